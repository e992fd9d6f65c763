"""Reads packs from front to end and says which of their entries are not what they should be.

Over a network a unit is one request; where that fails, each entry is asked for by itself.

Invariant: an entry passes only if its header and every byte of its payload were read, hashed and
found to be what the header promises; nothing is believed because a neighbour was intact. Reads of local packs go
in steps that stay in the second-level cache. Knows nothing of commits or of SQL.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import (
    CorruptionError,
    NotFoundError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
    UnsupportedVersionError,
)
from cas_ckpt.objects import codec, pack
from cas_ckpt.objects.digest import ObjectKind, object_id, short
from cas_ckpt.objects.pack import ExtentInfo, decode_entry_header
from cas_ckpt.parallel.workers import run_all
from cas_ckpt.progress import Progress
from cas_ckpt.storage.store import Store
from cas_ckpt.transfer.chunk_reader import VerifiedExtent, num_intact
from cas_ckpt.transfer.sources import Span, SpanMemory, limits_of, requests_at_once

STEP_BYTES = 512 * 1024
"""Bytes read and hashed at a time: they stay in the second-level cache."""

AHEAD_BYTES = 8 * 1024 * 1024
"""How far ahead the store learns what will be read."""

UNIT_BYTES = 64 * 1024 * 1024
"""Threads share local packs by runs of entries about this long."""


@dataclass(frozen=True, slots=True)
class BadExtent:
    """An entry that cannot be used: where it is, as the directory has it, and what is wrong."""

    pack: str
    info: ExtentInfo
    what: str


@dataclass(frozen=True, slots=True)
class ScanUnit:
    """Entries of one pack, in the order in which they are stored."""

    pack: str
    entries: Sequence[ExtentInfo]

    @property
    def num_bytes(self) -> int:
        """Bytes that reading it takes."""
        return sum(info.header_bytes + info.stored_bytes for info in self.entries)

    @property
    def span(self) -> Span:
        """Where they are."""
        return Span(self.pack, self.entries[0].offset, max(info.end for info in self.entries))


class PackWindow:
    """Reads of one pack in ascending order, small ones many at a time. Not thread safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._scratch = np.empty(STEP_BYTES, np.uint8).data  # pages that are never used cost nothing
        self._key = ""
        self._end = self._start = self._stop = self._announced = 0

    def open(self, key: str, end: int) -> None:
        """Read `key` from now on, and nothing behind `end`."""
        self._key, self._end = key, end
        self._start = self._stop = self._announced = 0

    def read(self, offset: int, length: int, *, ahead: bool = True) -> memoryview:
        """`length` bytes from `offset`, valid until the next call.

        Args:
            ahead: More will be wanted right behind them, soon and in small pieces.
        Raises:
            CorruptionError: the pack ends before. StorageError: the medium refused.
        """
        if self._start <= offset and offset + length <= self._stop:
            return self._scratch[offset - self._start : offset - self._start + length]
        if self._announced < min(offset + AHEAD_BYTES, self._end):
            start = max(offset, self._announced)
            self._announced = min(start + 2 * AHEAD_BYTES, self._end)
            self._store.prefetch(self._key, start, self._announced - start)
        if length > len(self._scratch):
            whole = memoryview(bytearray(length))
            self._store.read_into(self._key, offset, whole)
            return whole
        wanted = max(length, min(len(self._scratch), self._end - offset)) if ahead else length
        self._start = self._stop = 0
        self._store.read_into(self._key, offset, self._scratch[:wanted])
        self._start, self._stop = offset, offset + wanted
        return self._scratch[:length]


class UnitWindow:
    """As `PackWindow`, for one unit that is in memory as far as the store could give it."""

    def __init__(self, store: Store) -> None:
        self._memory = SpanMemory(store)
        self._key = ""

    def load(self, unit: ScanUnit) -> None:
        """Have the unit in memory, if all of it is there.

        Raises:
            PermissionDeniedError: it may not be read. TransientStorageError: nothing can be read now.
        """
        fits = bool(unit.entries) and unit.span.end - unit.span.offset <= UNIT_BYTES
        try:
            self._memory.load([unit.span] if fits else [])
        except (PermissionDeniedError, TransientStorageError):
            raise
        except (CorruptionError, NotFoundError, StorageError):
            pass  # which of its entries is the cause, reading each of them says

    def open(self, key: str, end: int) -> None:
        """See `PackWindow`."""
        self._key = key

    def read(self, offset: int, length: int, *, ahead: bool = True) -> memoryview:
        """See `PackWindow`."""
        return memoryview(self._memory.get_range(self._key, offset, length))


class ExtentScanner:
    """Verifies entries with scratch memory of its own; one per thread."""

    def __init__(self, store: Store, *, window: UnitWindow | None = None) -> None:
        self._window: PackWindow | UnitWindow = PackWindow(store) if window is None else window

    def check(self, unit: ScanUnit, *, seen: Callable[[ExtentInfo, bytes], None] | None = None) -> list[BadExtent]:
        """The entries of `unit` that are damaged.

        Args:
            seen: Called with the bytes of every intact node.
        """
        self._window.open(unit.pack, unit.entries[-1].end if unit.entries else 0)
        bad = []
        for info in unit.entries:
            try:
                node = self._verify(info)
            except UnsupportedVersionError:
                continue  # of a later version: not ours to judge
            except (CorruptionError, NotFoundError, StorageError) as error:
                if isinstance(error, (PermissionDeniedError, TransientStorageError)):
                    raise
                bad.append(BadExtent(unit.pack, info, str(error)))
                continue
            if seen is not None and node is not None:
                seen(info, node)
        return bad

    def _verify(self, info: ExtentInfo) -> bytes | None:
        """The bytes of a node; None for a chunk, all of whose leaves here are intact."""
        header = self._window.read(info.offset, info.header_bytes, ahead=_is_small(info))
        found, digests = decode_entry_header(header, offset=info.offset)
        if found != info:
            raise CorruptionError(
                f"the entry of {short(info.digest)} at {info.offset} says other things than the directory"
            )
        start = info.offset + info.header_bytes
        if info.kind != ObjectKind.CHUNK:
            data = bytes(self._window.read(start, info.stored_bytes))
            if info.encoding != codec.RAW or object_id(info.kind.label, data) != info.digest:
                raise CorruptionError(f"{info.kind.label} {short(info.digest)} at {info.offset} does not have this id")
            return data
        if info.encoding != codec.RAW:
            payload = self._window.read(start, info.stored_bytes)
            plain = codec.decode_extent(info.encoding, payload, num_bytes=info.plain_bytes)
            _check_leaves(info, digests, plain, 0)
            return None
        if info.stored_bytes != info.plain_bytes:
            raise CorruptionError(f"chunk {short(info.digest)} at {info.offset} is {info.stored_bytes} bytes long")
        is_small = _is_small(info)
        step = info.stored_bytes if is_small else max(STEP_BYTES // info.leaf_bytes, 1) * info.leaf_bytes
        for at in range(0, info.stored_bytes, step):
            part = self._window.read(start + at, min(step, info.stored_bytes - at), ahead=is_small)
            _check_leaves(info, digests, part, at // info.leaf_bytes)
        return None


def _is_small(info: ExtentInfo) -> bool:
    return info.header_bytes + info.stored_bytes <= STEP_BYTES


def _check_leaves(info: ExtentInfo, digests: bytes, plain: Buffer, at: int) -> None:
    """Raise CorruptionError unless `plain` is leaves of the extent, from its own leaf `at` on."""
    first = info.first_leaf + at
    stop = first - -len(plain) // info.leaf_bytes
    intact = num_intact(VerifiedExtent("", info, digests), plain, first, stop)
    if first + intact < stop:
        raise CorruptionError(
            f"chunk {short(info.digest)}, leaf {first + intact}, at {info.offset}: the stored bytes do not have the "
            "hash that they were stored under"
        )


def unit_bytes_of(store: Store) -> int:
    """How long units of its packs are."""
    return UNIT_BYTES if store.abilities.local else limits_of(store).span_bytes


def scan_units(pack_key: str, entries: Iterable[ExtentInfo], *, unit_bytes: int = UNIT_BYTES) -> Iterator[ScanUnit]:
    """The entries of a pack in order, cut into units of at most `unit_bytes`, or of one entry that is longer."""
    part: list[ExtentInfo] = []
    for info in sorted(entries, key=lambda entry: entry.offset):
        if part and info.end - part[0].offset > unit_bytes:
            yield ScanUnit(pack_key, part)
            part = []
        part.append(info)
    if part:
        yield ScanUnit(pack_key, part)


def verify_units(
    store: Store,
    units: Iterable[ScanUnit],
    *,
    done: Callable[[ScanUnit, list[BadExtent]], None],
    num_threads: int,
    progress: Progress,
) -> None:
    """Read and hash every entry of `units`.

    Args:
        units: Taken one by one as threads become free, so that their producer may stop.
        done: Called, from any thread, with what was damaged in each unit (nothing, mostly).
        num_threads: That hash at one time; how many requests run at one time, a store that is not local says.
    Raises:
        PermissionDeniedError: the packs may not be read. TransientStorageError: the store cannot be reached.
    """
    is_local = store.abilities.local
    hashing = threading.Semaphore(num_threads)

    def make_worker() -> Callable[[ScanUnit], None]:
        window = None if is_local else UnitWindow(store)
        scanner = ExtentScanner(store, window=window)

        def work(unit: ScanUnit) -> None:
            if window is not None:
                window.load(unit)
            with hashing:
                done(unit, scanner.check(unit))
            progress.advance(unit.num_bytes)

        return work

    run_all(units, make_worker, num_threads=num_threads if is_local else requests_at_once(store, unit_bytes_of(store)))


def find_entries(store: Store, key: str, size_bytes: int) -> Iterator[ExtentInfo]:
    """Entries of a pack whose directory is lost, found by their magic and their own headers.

    Payloads are not looked at. An entry whose payload is not all there is left out.

    Raises:
        PermissionDeniedError: the pack may not be read. TransientStorageError: the store cannot be reached.
    """
    window = PackWindow(store)
    window.open(key, size_bytes)
    at = 0
    while at < size_bytes:
        info = _entry_at(window, at, size_bytes)
        if info is not None:
            yield info
            at = info.end
            continue
        at = _next_magic(window, at + 1, size_bytes)


def _entry_at(window: PackWindow, at: int, size_bytes: int) -> ExtentInfo | None:
    fixed = pack.entry_header_bytes(0)
    if at + fixed > size_bytes:
        return None
    try:
        head = window.read(at, fixed, ahead=False)
        length = pack.claimed_header_bytes(head)
        if length is None or at + length > size_bytes:
            return None
        info, _ = decode_entry_header(window.read(at, length, ahead=False), offset=at)
    except (PermissionDeniedError, TransientStorageError):
        raise
    except (CorruptionError, UnsupportedVersionError, StorageError):  # no entry, or one that cannot be read at all
        return None
    return info if info.end <= size_bytes else None


def _next_magic(window: PackWindow, at: int, size_bytes: int) -> int:
    """Where the next magic of an entry is, or the end of the pack."""
    overlap = len(pack.ENTRY_MAGIC) - 1
    while at + len(pack.ENTRY_MAGIC) <= size_bytes:
        length = min(STEP_BYTES, size_bytes - at)
        try:
            found = bytes(window.read(at, length)).find(pack.ENTRY_MAGIC)
        except (PermissionDeniedError, TransientStorageError):
            raise
        except (CorruptionError, StorageError):
            found = -1  # a stretch that cannot be read holds nothing for us
        if found >= 0:
            return at + found
        at += max(length - overlap, 1) if length == STEP_BYTES else length
    return size_bytes
