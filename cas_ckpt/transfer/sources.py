"""Where a restore gets bytes from over a network: spans that are read together, and what was staged on the local disk.

    plan_units     few requests, each of bytes that are wanted: a caller says in which spans of which packs something is
                   (`Wanted`), those that are near one another are joined; a unit is what one thread reads and then has

    SpanMemory     a store, of which one thread has some spans in memory
    StagedStore    a store, of which verified chunks are in a private temporary file: over a network that file does
                   for the second pass of a restore what the page cache does for a local store

The file has no name, and ends with the process. A chunk in it is plain: one raw extent of all its leaves, a hole where
leaves are not wanted. Chunks begin at pages, and the kernel is asked not to read ahead, so that no page is in memory
which was not verified as it was written, or as it was read again.

Invariant: plans are pure; every wanted byte is in one unit, and no byte in two, as long as nobody wants the same byte
twice. What is wanted in several places far apart makes a unit by itself, so that whoever gets a unit has all of it. A
source answers as the store would, or raises. What the disk gives back is verified like what a store
gives (chunk_reader.py); what is damaged there is read from the store once more, and what does not fit is not staged.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from typing import IO, Generic, NamedTuple, TypeVar

import numpy as np

from cas_ckpt import native
from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import CorruptionError, NotFoundError
from cas_ckpt.native import Part
from cas_ckpt.objects import codec
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.objects.pack import ExtentInfo, coalesced
from cas_ckpt.storage.disk import Descriptor, is_in_memory, leaves_of_file
from cas_ckpt.storage.store import Store
from cas_ckpt.transfer.chunk_reader import STAGED, Source, leaf_reader, new_memory

_LOGGER = logging.getLogger("cas_ckpt")

SPARE_BYTES = 1 << 30
"""So much of a disk, or a tenth of it if that is less, is left free."""

IN_FLIGHT_BYTES = 72 * 1024 * 1024
"""Most bytes of all reads at one time, whatever a store can do."""

GAP_BYTES = 128 * 1024
_SHORTEST_SPAN_BYTES, _LONGEST_SPAN_BYTES = 2 * 1024 * 1024, 16 * 1024 * 1024


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Limits for joining two spans; docs/decisions/011 has the measurements.

    Attributes:
        gap_bytes: Bytes read in vain, at most, to save a request.
        span_bytes: Bytes of one request, at most, unless what is wanted for one item is longer.
    """

    gap_bytes: int
    span_bytes: int


class Span(NamedTuple):
    """Consecutive bytes of a pack, from `offset` to `end`."""

    pack: str
    offset: int
    end: int


@dataclass(frozen=True, slots=True)
class Wanted(Generic[T]):
    """Something that is in some spans of one or several packs; in no span: read by other means."""

    item: T
    spans: Sequence[Span]


@dataclass(frozen=True, slots=True, eq=False)
class Unit(Generic[T]):
    """Spans that one thread reads, one request each, and the items that are in them."""

    spans: tuple[Span, ...]
    items: tuple[T, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that reading it takes."""
        return sum(span.end - span.offset for span in self.spans)


def plan_units(wanted: Iterable[Wanted[T]], limits: ReadLimits) -> list[Unit[T]]:
    """The units in which all that is wanted is read, in the order in which it is stored; first what has no span."""
    units: list[Unit[T]] = []
    placed: list[tuple[str, Span, Unit[T] | None, T]] = []
    for each in wanted:
        spans = _joined(each.spans, limits)
        if not spans:
            units.append(Unit((), (each.item,)))
        alone = Unit(spans, (each.item,)) if len(spans) > 1 else None
        placed += [(span.pack, span, alone, each.item) for span in spans]
    placed.sort(key=lambda each: each[1])
    # A span of what is read by itself ends the unit before it: nothing is read across it.
    for alone, run in groupby(placed, key=lambda each: each[2]):
        if alone is None:
            units += _shared(run, limits)
        elif next(run)[1] == alone.spans[0]:
            units.append(alone)
    return units


def opening_first(units: Iterable[Unit[T]]) -> list[Unit[T]]:
    """The same units, the first one of each pack before all others: reading begins at many packs, not at one."""
    begun: set[str] = set()
    first: list[Unit[T]] = []
    others: list[Unit[T]] = []
    for unit in units:
        packs = {span.pack for span in unit.spans}
        (others if packs and packs <= begun else first).append(unit)
        begun |= packs
    return first + others


def longest_bytes(units: Iterable[Unit[T]]) -> int:
    """Bytes of the longest unit; 0 if there is none."""
    return max((unit.num_bytes for unit in units), default=0)


def _joined(spans: Sequence[Span], limits: ReadLimits) -> tuple[Span, ...]:
    """The spans of one item, those joined that are near one another: they are in memory together anyway."""
    if len(spans) < 2:
        return tuple(spans)
    ordered = sorted(spans)
    longest = sum(span.end for span in spans)
    near = coalesced(((span.pack, span, None) for span in ordered), gap_bytes=limits.gap_bytes, span_bytes=longest)
    return tuple(_around([span for _, span, _ in group]) for group in near)


def _shared(run: Iterable[tuple[str, Span, Unit[T] | None, T]], limits: ReadLimits) -> Iterator[Unit[T]]:
    items = ((pack, span, item) for pack, span, _, item in run)
    for group in coalesced(items, gap_bytes=limits.gap_bytes, span_bytes=limits.span_bytes):
        yield Unit((_around([span for _, span, _ in group]),), tuple(item for _, _, item in group))


def _around(spans: Sequence[Span]) -> Span:
    return Span(spans[0].pack, spans[0].offset, max(span.end for span in spans))


def limits_of(store: Store, total_bytes: int | None = None, *, most_bytes: int = IN_FLIGHT_BYTES) -> ReadLimits:
    """Limits of reads over a network; docs/decisions/011 has the measurements.

    Args:
        total_bytes: What will be read, if that is known: as many requests as are of use at once get a share of it.
        most_bytes: Most that is read at one time.
    """
    parallel = max(store.abilities.parallel, 1)
    span_bytes = min(most_bytes, IN_FLIGHT_BYTES) // parallel
    if total_bytes is not None:
        span_bytes = min(span_bytes, total_bytes // parallel)
    return ReadLimits(GAP_BYTES, max(_SHORTEST_SPAN_BYTES, min(span_bytes, _LONGEST_SPAN_BYTES)))


def requests_at_once(store: Store, unit_bytes: int = 0, *, most_bytes: int = IN_FLIGHT_BYTES) -> int:
    """How many reads of so many bytes run at one time: as many as are of use to the store, in bounded memory."""
    most_bytes = min(most_bytes, IN_FLIGHT_BYTES)
    return max(1, min(store.abilities.parallel, most_bytes // max(unit_bytes, 1)))


class SpanMemory:
    """A source of which some spans are in memory; one per thread."""

    def __init__(self, store: Source) -> None:
        self._store = store
        self._read_leaves = leaf_reader(store)
        self._space = np.empty(0, np.uint8)
        self._loaded: list[tuple[Span, memoryview]] = []

    def load(self, spans: Sequence[Span]) -> None:
        """Have these spans in memory, and no others; views of others are void.

        Raises:
            NotFoundError, CorruptionError, StorageError: as the store does; none is in memory then.
        """
        self._loaded = []
        num_bytes = sum(span.end - span.offset for span in spans)
        if len(self._space) < num_bytes:
            self._space = new_memory(num_bytes)
        start, loaded = 0, []
        for span in spans:
            view = self._space.data[start : start + span.end - span.offset]
            self._store.read_into(span.pack, span.offset, view)
            loaded.append((span, view.toreadonly()))
            start += len(view)
        self._loaded = loaded

    def get_range(self, key: str, offset: int, length: int) -> Buffer:
        """See `Source`; a view of what is in memory is valid until the next `load`."""
        found = self._find(key, offset, length)
        return self._store.get_range(key, offset, length) if found is None else found

    def read_into(self, key: str, offset: int, target: memoryview, *, cached_only: bool = False) -> bool:
        """See `Source`."""
        found = self._find(key, offset, len(target))
        if found is None:
            return self._store.read_into(key, offset, target, cached_only=cached_only)
        target[:] = found
        return True

    def read_leaves(
        self, key: str, offset: int, first: int, size: int, leaf_bytes: int, digests: Buffer | None,
        parts: Sequence[Part], cached_only: bool = False,
    ) -> int:  # fmt: skip
        """See `ReadsLeaves`."""
        found = self._find(key, offset, size)
        if found is None:
            return self._read_leaves(key, offset, first, size, leaf_bytes, digests, parts, cached_only)
        return native.read_leaves(found, 0, first, size, leaf_bytes, digests, parts)

    def _find(self, key: str, offset: int, length: int) -> memoryview | None:
        for span, view in self._loaded:
            if span.pack == key and span.offset <= offset and offset + length <= span.end:
                return view[offset - span.offset : offset - span.offset + length]
        return None


class StagedStore:
    """A store of which verified chunks may be read from a temporary file; many threads.

    Attributes:
        store: The store itself.
    """

    def __init__(
        self, store: Store, chunks: Iterable[tuple[Digest, int]], file: IO[bytes] | None, room_bytes: int
    ) -> None:
        """Nothing is staged yet.

        Args:
            chunks: Those that may be, with their plain bytes.
            file: Empty; None: nothing can be staged.
            room_bytes: How many bytes of the disk it may take.
        """
        self.store = store
        self._read_leaves = leaf_reader(store)
        self._file = file
        self._places: dict[bytes, int] = {}
        start = 0
        for digest, num_bytes in chunks:
            self._places[digest] = start
            start += -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._left_bytes = room_bytes
        self._lock = threading.Lock()

    def put(self, digest: Digest, start: int, plain: memoryview) -> bool:
        """Stage verified bytes of a chunk from `start` on; False where there is no room for them."""
        at = self._places[digest] + start
        with self._lock:
            if self._file is None or len(plain) > self._left_bytes:
                return False
            self._left_bytes -= len(plain)
        try:
            while plain:
                done = os.pwrite(self._file.fileno(), plain, at)
                plain, at = plain[done:], at + done
        except OSError as error:
            with self._lock:
                is_first, self._left_bytes = self._left_bytes >= 0, -1
            if is_first:
                _LOGGER.warning(
                    "what is restored cannot all be staged on the local disk (%s): the rest is downloaded twice, once "
                    "to verify it and once to restore it; free some space, or set TMPDIR", error.strerror or error
                )  # fmt: skip
            return False
        return True

    def extent(self, info: ExtentInfo) -> ExtentInfo:
        """Where a chunk is that was staged, whole or the leaves that are wanted of it, given one of its extents."""
        return ExtentInfo(
            info.digest, ObjectKind.CHUNK, codec.RAW, info.num_bytes, info.num_bytes, info.leaf_bytes, 0,
            info.chunk_leaves, self._places[info.digest], 0,
        )  # fmt: skip

    def get_range(self, key: str, offset: int, length: int) -> Buffer:
        """See `Source`: of packs."""
        return self.store.get_range(key, offset, length)

    def read_into(self, key: str, offset: int, target: memoryview, *, cached_only: bool = False) -> bool:
        """See `Source`: of packs. What a network brings is never what was verified before."""
        return not cached_only and self.store.read_into(key, offset, target)

    def read_leaves(
        self, key: str, offset: int, first: int, size: int, leaf_bytes: int, digests: Buffer | None,
        parts: Sequence[Part], cached_only: bool = False,
    ) -> int:  # fmt: skip
        """See `ReadsLeaves`: of packs, as `read_into`; and of what was staged.

        Raises:
            CorruptionError: the disk has lost what was staged.
        """
        if key != STAGED:
            return 0 if cached_only else self._read_leaves(key, offset, first, size, leaf_bytes, digests, parts)
        with self._staged() as fd:
            return leaves_of_file(fd, key, offset, first, size, leaf_bytes, digests, parts, cached_only)

    @contextmanager
    def _staged(self) -> Iterator[int]:
        if self._file is None:
            raise NotFoundError("nothing was staged")
        try:
            yield self._file.fileno()
        except OSError as error:
            raise CorruptionError(f"what was staged on the local disk cannot be read again: {error}") from error


@contextmanager
def staging(store: Store, chunks: Sequence[tuple[Digest, int]], wanted_bytes: int) -> Iterator[StagedStore]:
    """The store, with room on a local disk for these chunks (id, plain bytes) until the block ends.

    Args:
        wanted_bytes: Bytes of them that are wanted; 0: nothing will be staged.
    """
    room_bytes = 0
    with ExitStack() as stack:
        file: IO[bytes] | None = None
        if wanted_bytes:
            folder, room_bytes = _roomiest(temporary_folders(), wanted_bytes)
            with suppress(OSError):  # then nothing is staged, which is said below
                if folder:
                    file = stack.enter_context(tempfile.TemporaryFile(prefix="cas-ckpt-", dir=folder, buffering=0))
        if file is not None and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        if wanted_bytes and (file is None or room_bytes < wanted_bytes):
            _LOGGER.warning(
                "no folder for temporary files has room to stage the %d bytes that are restored, the largest has %d: "
                "what does not fit is downloaded twice, once to verify it and once to restore it; free some space on a "
                "local disk, or set TMPDIR", wanted_bytes, 0 if file is None else room_bytes,
            )  # fmt: skip
        yield StagedStore(store, chunks, file, room_bytes)


def temporary_folders() -> list[str]:
    """Where temporary files may be: where this process has them, and where those are that survive a reboot."""
    found = ["/var/tmp"]  # noqa: S108
    with suppress(FileNotFoundError):  # this process has none
        found.insert(0, tempfile.gettempdir())
    return [folder for folder in found if os.access(folder, os.W_OK) and not _is_memory(folder)]


def _roomiest(folders: Collection[str], wanted_bytes: int) -> tuple[str, int]:
    """The first folder with so much room, else the one with the most; and how much that is."""
    best, most_bytes = "", 0
    for folder in folders:
        with suppress(OSError):  # a disk that does not say what room it has gets nothing
            disk = os.statvfs(folder)
            room_bytes = disk.f_bavail * disk.f_frsize - min(SPARE_BYTES, disk.f_blocks * disk.f_frsize // 10)
            if room_bytes > most_bytes:
                best, most_bytes = folder, room_bytes
            if room_bytes >= wanted_bytes:
                break
    return best, most_bytes


def _is_memory(folder: str) -> bool:
    """Whether files in `folder` are kept in memory, of which a restore may need all there is."""
    try:
        descriptor = Descriptor(os.open(folder, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    return is_in_memory(descriptor.fd)
