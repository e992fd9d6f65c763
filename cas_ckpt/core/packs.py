"""Stored packs, read back: their directories, the rows of the index that they give, and single nodes out of them.

Nodes are small, so those that are stored near one another are read together.

All rows of an index are made anew from the packs by a rebuild, and for an index that an older version made (`filled`):

    1. an index beside is filled: every pack's directory is read, and the nodes of meta packs
    2. it catches up with what came or went meanwhile, and its rows take the place of the others, in one step

Invariant: no node leaves this file whose bytes do not have its id; where nodes are stored, it knows only by asking. The
rows that `read_pack` makes from a pack's bytes are the rows that `pack_record` (records.py) made when it
was written, so a rebuilt index equals the lost one. At any moment others see the rows of before or those of after.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias, cast

from cas_ckpt.core.host_cache import CachedReads
from cas_ckpt.core.records import PART_BYTES, PART_ENTRIES, NodeRows
from cas_ckpt.errors import CkptError, CorruptionError, NotFoundError, UnsupportedVersionError
from cas_ckpt.index import remembered
from cas_ckpt.index.database import IN_MEMORY
from cas_ckpt.index.index import CatchUp, Change, Index, beside, may_replace, replace_rows
from cas_ckpt.index.rows import PackRecord
from cas_ckpt.objects import pack
from cas_ckpt.objects.digest import Digest, ObjectKind, object_id, short
from cas_ckpt.objects.pack import MOST_HINTS_BYTES, ExtentInfo, Hints, Location, coalesced, decode_hints, hints_bytes
from cas_ckpt.parallel.workers import map_all
from cas_ckpt.progress import SILENT, Progress, phase
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.storage.store import Store
from cas_ckpt.transfer.pack_writer import pack_key

_LOGGER = logging.getLogger("cas_ckpt")

PACKS_PER_BATCH = 256
BYTES_PER_BATCH = 1 << 30
"""Packs whose entries are held in memory at a time."""

WHOLE_BYTES = 1024 * 1024
"""A meta pack up to this long is read whole where a request costs more than the bytes."""

LOADED_BYTES = 1024 * 1024
"""How much of the end of a meta pack is read by a reader who knows nothing but its name."""

LARGE_DIRECTORY_BYTES = 256 * 1024
"""Packs with a longer directory are read one at a time, so that those that are read at once take little memory."""

_META_SUFFIX = f".{pack.PackKind.META.suffix}"
_META_WEIGHT = 256
"""The contents of nodes take twelve times their bytes in memory, twice that if somebody means harm: a batch has 4 MiB
of such packs."""


def read_directory(store: Store, key: str) -> tuple[pack.Trailer, list[ExtentInfo]]:
    """The trailer of the stored pack `key`, and its entries of kinds that this version knows; one or two reads.

    Raises:
        CorruptionError: truncated, damaged, or stored under a name that is not its own.
    """
    trailer, tail = _read_tail(store, key)
    return trailer, _directory(store, key, trailer, tail)


def _read_tail(store: Store, key: str) -> tuple[pack.Trailer, bytes]:
    """The trailer, and the bytes that the pack ends with."""
    size, tail = store.get_tail(key, pack.TAIL_GUESS_BYTES)
    trailer = pack.decode_trailer(tail[-pack.TRAILER_BYTES :], size_bytes=size, key=key)
    if trailer.name.hex() not in key:
        raise CorruptionError(f"{key}: this pack says that it is {trailer.name.hex()}: restore it from a copy")
    return trailer, tail


def _directory(store: Store, key: str, trailer: pack.Trailer, tail: bytes) -> list[ExtentInfo]:
    """The entries, read from `tail` if it has them all."""
    wanted = trailer.size_bytes - trailer.directory_offset
    if wanted > len(tail):
        tail = bytes(store.get_range(key, trailer.directory_offset, wanted))
    directory = tail[len(tail) - wanted : len(tail) - pack.TRAILER_BYTES]
    return pack.decode_directory(directory, trailer, key=key)


def read_pack(store: Store, key: str) -> PackRecord:
    """The rows of the stored pack `key`.

    Raises:
        CorruptionError: damaged; restore the pack from a copy.
    """
    return _record(store, key, *read_directory(store, key))


def _record(store: Store, key: str, trailer: pack.Trailer, infos: Sequence[ExtentInfo]) -> PackRecord:
    rows = _node_rows(_nodes(store, key, infos))
    num_newer = trailer.num_entries - len(infos)
    return PackRecord(
        key, trailer.kind, trailer.size_bytes, infos, rows.edges, rows.commits, num_newer, contents=rows.contents
    )


def read_in_parts(store: Store, key: str) -> PackRecord:
    """The rows of the stored pack `key`, as one record for each of its parts: for a pack of any length.

    All of it is verified now; it is read once more when its rows are asked for, while an index is being written.

    Raises:
        CorruptionError: damaged; restore the pack from a copy.
    """
    trailer, infos = read_directory(store, key)
    for _ in _parts(store, key, trailer, infos):
        pass
    num_newer = trailer.num_entries - len(infos)
    return PackRecord(
        key, trailer.kind, trailer.size_bytes, num_newer=num_newer, num_in_parts=len(infos),
        parts=lambda: _parts(store, key, *read_directory(store, key)),
    )  # fmt: skip


def _parts(store: Store, key: str, trailer: pack.Trailer, infos: Sequence[ExtentInfo]) -> Iterator[PackRecord]:
    part: list[ExtentInfo] = []
    num_bytes = 0
    for info in sorted(infos, key=lambda info: info.offset):
        length = 0 if info.kind == ObjectKind.CHUNK else info.stored_bytes
        if part and (len(part) >= PART_ENTRIES or num_bytes + length > PART_BYTES):
            yield _record(store, key, trailer, part)
            part, num_bytes = [], 0
        part.append(info)
        num_bytes += length
    if part:
        yield _record(store, key, trailer, part)


def _node_rows(nodes: Iterable[tuple[ExtentInfo, bytes]]) -> NodeRows:
    """Rows of nodes that are verified by their ids."""
    rows = NodeRows()
    for info, data in nodes:
        # A layout that cannot be read gives no rows: no state depends on it.
        with suppress(CorruptionError, UnsupportedVersionError) if info.kind == ObjectKind.LAYOUT else nullcontext():
            rows.add(info.kind, info.digest, data)
    return rows


@dataclass(frozen=True, slots=True)
class ListedPack:
    """The record of a pack that was listed.

    Attributes:
        record: None: it is so long that it is to be read alone, by `read_in_parts`.
        directories: (trailer, directory) of data packs, copied into this meta pack.
    """

    record: PackRecord | None
    directories: Sequence[tuple[bytes, bytes]] = ()


def read_listed_pack(store: Store, key: str, size: int) -> ListedPack:
    """`read_pack` of a pack that a listing says is `size` bytes long: a small meta pack is read whole, by one request.

    Args:
        store: May answer from a cache; what is damaged there is read again.
    Raises:
        CorruptionError, NotFoundError.
    """
    if is_meta(key) and size > PART_BYTES:
        return ListedPack(None)
    if store.abilities.local or size > WHOLE_BYTES or not is_meta(key):
        trailer, tail = _read_tail(store, key)
        if trailer.size_bytes - trailer.directory_offset > LARGE_DIRECTORY_BYTES:
            return ListedPack(None)
        return ListedPack(_record(store, key, trailer, _directory(store, key, trailer, tail)))
    data, is_cached = read_whole(store, key, size)
    try:
        record = read_pack(_alone(key, data), key)
    except CorruptionError:
        if not is_cached:
            raise
        cast(CachedReads, store).drop(key, 0, size)
        return read_listed_pack(store, key, size)
    found = _hints_before(memoryview(data), pack.decode_trailer(data[-pack.TRAILER_BYTES :], size_bytes=size, key=key))
    return ListedPack(record, found.directories if found is not None else ())


def copied_records(
    directories: Iterable[tuple[bytes, bytes]], sizes: Mapping[str, int] | None = None
) -> Iterator[PackRecord]:
    """The rows of data packs whose directories were copied into hints; copies that are none are passed over.

    Args:
        sizes: Key -> length of the packs that are wanted, as they were listed; None: all, of any length.
    """
    for copied, directory in directories:
        with suppress(CorruptionError, UnsupportedVersionError):
            name, claimed = pack.claimed_pack(copied)
            key = pack_key(name, pack.PackKind.DATA)
            size = claimed if sizes is None else sizes.get(key)
            if size is None:
                continue
            trailer = pack.decode_trailer(copied, size_bytes=size, key=key)
            infos = pack.decode_directory(directory, trailer, key=key)
            if trailer.kind == pack.PackKind.DATA and all(info.kind == ObjectKind.CHUNK for info in infos):
                yield PackRecord(key, trailer.kind, size, infos, [], [], trailer.num_entries - len(infos), contents=[])


@dataclass(frozen=True, slots=True)
class LoadedPack:
    """A meta pack as a reader sees it who knows its name and nothing else.

    Attributes:
        entries: Its nodes, and where they are in it.
        nodes: Those of them that were read with its end, each proven by its id.
        hints: What it says besides; None if it says nothing, or what is damaged.
        num_newer: Entries that only a later version knows.
    """

    key: str
    size_bytes: int
    entries: Sequence[ExtentInfo]
    nodes: Mapping[Digest, bytes]
    hints: Hints | None
    num_newer: int = 0

    def record(self) -> PackRecord | None:
        """The rows of the pack, the same as `read_pack` gives; None if not all of its nodes were read."""
        if any(entry.digest not in self.nodes for entry in self.entries):
            return None
        rows = _node_rows((info, self.nodes[info.digest]) for info in self.entries)
        return PackRecord(
            self.key, pack.PackKind.META, self.size_bytes, self.entries, rows.edges, rows.commits, self.num_newer,
            contents=rows.contents,
        )  # fmt: skip


def load_pack(store: Store, name: bytes) -> LoadedPack:
    """The meta pack called `name`: whole by one request if it is small, else its directory, hints and last nodes.

    Raises:
        NotFoundError: it is gone. CorruptionError: damaged.
    """
    key = pack_key(name, pack.PackKind.META)
    try:
        return _loaded(store, key)
    except CorruptionError:
        if not isinstance(store, CachedReads):
            raise
    store.drop_tail(key, LOADED_BYTES)
    return _loaded(store, key)


def _loaded(store: Store, key: str) -> LoadedPack:
    size, tail = store.get_tail(key, LOADED_BYTES)
    trailer = pack.decode_trailer(tail[-pack.TRAILER_BYTES :], size_bytes=size, key=key)
    if trailer.name.hex() not in key:
        raise CorruptionError(f"{key}: this pack says that it is {trailer.name.hex()}: restore it from a copy")
    start = size - len(tail)
    if start > trailer.directory_offset:
        before = store.get_range(key, trailer.directory_offset, start - trailer.directory_offset)
        tail, start = bytes(before) + tail, trailer.directory_offset
    directory = memoryview(tail)[trailer.directory_offset - start : size - start - pack.TRAILER_BYTES]
    entries = pack.decode_directory(directory, trailer, key=key)
    nodes = {}
    for info in entries:
        at = info.offset + info.header_bytes - start
        if at >= 0 and info.kind != ObjectKind.CHUNK:
            data = tail[at : at + info.stored_bytes]
            if object_id(info.kind.label, data) == info.digest:
                nodes[info.digest] = data
    found = _hints_before(memoryview(tail), trailer, start=start)
    return LoadedPack(key, size, entries, nodes, found, trailer.num_entries - len(entries))


def _hints_before(tail: memoryview, trailer: pack.Trailer, *, start: int = 0) -> Hints | None:
    """The hints in front of the directory, if they are in `tail`, which begins at `start`; None: none, or damaged."""
    before = tail[: max(trailer.directory_offset - start, 0)]
    length = hints_bytes(before)
    if length is None or length > len(before):
        return None
    with suppress(CorruptionError, UnsupportedVersionError):
        return decode_hints(before[len(before) - length :])
    return None


def hints_problem(store: Store, key: str, trailer: pack.Trailer, entries: Sequence[ExtentInfo]) -> str | None:
    """The damage of the hints of a meta pack; None if they are intact, or there are none."""
    start = max((info.end for info in entries), default=pack.HEADER_BYTES)
    length = trailer.directory_offset - start
    if trailer.kind != pack.PackKind.META or length <= 0 or trailer.num_entries != len(entries):
        return None
    if length > 2 * MOST_HINTS_BYTES:
        return f"{length} bytes that are no entry are in front of its directory"
    try:
        decode_hints(store.get_range(key, start, length))
    except CorruptionError as error:
        return str(error)
    except UnsupportedVersionError:
        return None
    return None


def pack_name(key: str) -> bytes:
    """The name of the pack that is stored under `key`."""
    return bytes.fromhex(key.rpartition("/")[2].partition(".")[0])


def read_whole(store: Store, key: str, size: int) -> tuple[bytes, bool]:
    """The bytes of the pack, and whether they come from the cache."""
    if isinstance(store, CachedReads):
        return store.whole(key, size)
    return bytes(store.get_range(key, 0, size)), False


def small_pack(store: Store, key: str, size: int) -> Store:
    """A store to read the pack from: a copy of it in memory, where that takes fewer requests.

    Raises:
        NotFoundError, CorruptionError: it is gone, or shorter than it was listed.
    """
    if store.abilities.local or size > WHOLE_BYTES or not is_meta(key):
        return store
    return _alone(key, read_whole(store, key, size)[0])


def _alone(key: str, data: bytes) -> MemoryStore:
    """A store with this pack alone, which is in memory already."""
    memory = MemoryStore()
    memory.put(key, data)
    return memory


def _nodes(store: Store, key: str, infos: Iterable[ExtentInfo]) -> Iterator[tuple[ExtentInfo, bytes]]:
    """The nodes of a pack with their bytes, verified; those that are stored near one another are read together."""
    nodes = sorted((info for info in infos if info.kind != ObjectKind.CHUNK), key=lambda info: info.offset)
    for span in coalesced((key, info, info) for info in nodes):
        start, stop = span[0][1].offset, max(info.end for _, info, _ in span)
        data = memoryview(store.get_range(key, start, stop - start))
        for _, _, info in span:
            at = info.offset + info.header_bytes - start
            node = bytes(data[at : at + info.stored_bytes])
            if object_id(info.kind.label, node) != info.digest:
                raise CorruptionError(
                    f"{key} at {info.offset}: {info.kind.label} {short(info.digest)} is damaged: restore it from a copy"
                )
            yield info, node


def pack_batches(packs: Iterable[tuple[str, int]]) -> Iterator[list[tuple[str, int]]]:
    """(pack, its size), some at a time: as many as may have their entries and nodes in memory together.

    They are brought into an index in one transaction, for which other writers have to wait.
    """
    batch: list[tuple[str, int]] = []
    num_bytes = 0
    for key, size in packs:
        weight = size * (_META_WEIGHT if is_meta(key) else 1)
        if batch and (len(batch) >= PACKS_PER_BATCH or num_bytes + weight > BYTES_PER_BATCH):
            yield batch
            batch, num_bytes = [], 0
        batch.append((key, size))
        num_bytes += weight
    if batch:
        yield batch


_MOST_ROWS = 50_000
"""Rows that are brought into an index in one transaction: some 50 MB of memory, and a second."""

_BYTES_PER_ROW = 160
"""Of packs with nodes: so 8 MiB of these, too, come in one transaction, however little they refer to."""


def is_meta(key: str) -> bool:
    """Whether the pack that is stored under `key` holds nodes."""
    return key.endswith(_META_SUFFIX)


def data_first(packs: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """(pack, its size), those with nodes last: what these refer to is known then, and need not be looked for twice."""
    return sorted(packs, key=lambda pack: (is_meta(pack[0]), pack[0]))


def record_batches(records: Iterable[PackRecord]) -> Iterator[list[PackRecord]]:
    """The records of many packs, as many at a time as an index takes in one transaction."""
    batch: list[PackRecord] = []
    num_rows = 0
    for record in records:
        num_edges = sum(len(children) for _, children in record.edges)
        from_nodes = record.size_bytes // _BYTES_PER_ROW if record.kind is pack.PackKind.META else 0
        num_rows += max(len(record.entries) + num_edges, from_nodes, record.num_in_parts)
        batch.append(record)
        if num_rows >= _MOST_ROWS:
            yield batch
            batch, num_rows = [], 0
    if batch:
        yield batch


# --- single nodes -----------------------------------------------------------------------------


class Whereabouts(Protocol):
    """A store, and who knows where objects are in it.

    Attributes:
        cached_store: The store, or the store behind a cache, which may hold what is damaged.
        num_requests: How many requests at once are of use.
    """

    store: Store

    @property
    def cached_store(self) -> Store: ...

    @property
    def num_requests(self) -> int: ...

    def locate(self, digests: Iterable[Digest], *, here: bool = False) -> Mapping[bytes, Sequence[Location]]: ...

    def relocate(self, digest: Digest, tried: Collection[str]) -> Sequence[Location]: ...


def read_nodes(source: Whereabouts, kind: ObjectKind, digests: Sequence[Digest]) -> dict[Digest, bytes]:
    """The bytes of many nodes of one kind, verified; near ones are read together.

    Raises:
        NotFoundError, CorruptionError.
    """
    located = source.locate(digests, here=kind == ObjectKind.COMMIT)
    wanted = [(located[digest][0].pack, located[digest][0], digest) for digest in digests]
    wanted.sort(key=lambda each: (each[0], each[1].offset))
    found: dict[Digest, bytes] = {}
    spans = map_all(partial(_read_span, source, kind), coalesced(wanted), num_threads=source.num_requests)
    for span, nodes in spans:
        found.update(nodes)
        for _, _, digest in span if len(nodes) < len(span) else ():
            # Another copy may be intact, and the others of the span certainly are.
            try:
                found[digest] = read_copy(source.store, kind, digest, located[digest])
            except (CorruptionError, NotFoundError) as error:
                tried = {place.pack for place in located[digest]}
                others = source.relocate(digest, tried)
                if isinstance(error, CorruptionError) and tried.issuperset(place.pack for place in others):
                    raise
                found[digest] = read_copy(source.store, kind, digest, others)
    return found


_Span: TypeAlias = list[tuple[str, Location, Digest]]


def _read_span(source: Whereabouts, kind: ObjectKind, span: _Span) -> tuple[_Span, dict[Digest, bytes]]:
    """The nodes of a span, read by one request; none of them if one is damaged, or the pack is gone."""
    (pack_key, first, _), (_, last, _) = span[0], span[-1]
    if any(place.stored_bytes > pack.MAX_NODE_BYTES for _, place, _ in span):
        return span, {}
    length = last.offset + last.header_bytes + last.stored_bytes - first.offset
    found: dict[Digest, bytes] = {}
    try:
        data = memoryview(source.cached_store.get_range(pack_key, first.offset, length))
        for _, place, digest in span:
            at = place.offset + place.header_bytes - first.offset
            node = bytes(data[at : at + place.stored_bytes])
            if object_id(kind.label, node) != digest:
                raise _damaged(kind, digest, place)
            found[digest] = node
    except (CorruptionError, NotFoundError):
        if isinstance(source.cached_store, CachedReads):
            source.cached_store.drop(pack_key, first.offset, length)
        return span, {}
    return span, found


def read_copy(store: Store, kind: ObjectKind, digest: Digest, places: Sequence[Location]) -> bytes:
    """One node from the first of `places` that has it intact.

    Raises:
        CorruptionError, NotFoundError: none has; what was wrong first.
    """
    failure: CkptError | None = None
    for place in places:
        try:
            if place.stored_bytes > pack.MAX_NODE_BYTES:  # the index of somebody else may claim anything
                raise _damaged(kind, digest, place)
            data = bytes(store.get_range(place.pack, place.offset + place.header_bytes, place.stored_bytes))
            if object_id(kind.label, data) == digest:
                return data
            failure = failure or _damaged(kind, digest, place)
        except (CorruptionError, NotFoundError) as error:
            failure = failure or error
    raise failure or NotFoundError(f"{kind.label} {short(digest)} is in no pack: it was collected, or never was here")


def _damaged(kind: ObjectKind, digest: Digest, place: Location) -> CorruptionError:
    return CorruptionError(
        f"{kind.label} {short(digest)} in {place.pack} at offset {place.offset}: "
        "the stored bytes do not have this id: restore it from a copy"
    )


# --- all rows of an index made anew -----------------------------------------------------------


def filled(store: Store, index: Index, *, progress: Progress = SILENT) -> tuple[Index, list[tuple[str, str]]]:
    """An index that is behind, once it is filled; and damaged packs, which the log names.

    Where it may not be filled, it is closed, and one in memory takes its place.
    """
    index.is_behind = index.read(remembered.read_meta, remembered.BEHIND) is not None  # others fill it, too
    if not index.is_behind:
        return index, []
    _LOGGER.info("index %s: an older version made it; it is filled anew", index.place)
    if not may_replace(index):
        with index as before:
            if before.is_shared:
                _LOGGER.warning("%s; until then, all packs are read here", wants_maintainer(before))
            index = Index.open(IN_MEMORY, store_id=before.store_id) if before.is_shared else before.detached()
    damaged = refill(store, index, progress=progress)
    for key, why in damaged:
        _LOGGER.warning("%s is left out, and fsck says what that takes away: %s", key, why)
    return index, damaged


def wants_maintainer(index: Index) -> str:
    """That somebody else has to fill this index."""
    return f"index {index.place}: an older version made it, and the maintainer has to open the repository to fill it"


def refill(store: Store, index: Index, *, progress: Progress = SILENT) -> list[tuple[str, str]]:
    """Make the rows of `index` anew, which any number of processes may be using; returns damaged packs, and why.

    Raises:
        PermissionDeniedError: the index cannot be written. CorruptionError: it is damaged.
    """
    with beside(index) as made:
        damaged = add_all_packs(store, made, progress=progress)
        replace_rows(index, made, catching_up(store, damaged))
    index.is_behind = False
    return damaged


def catching_up(store: Store, damaged: list[tuple[str, str]]) -> CatchUp:
    """Packs that were added or deleted since an index was filled; damaged packs are added to `damaged`."""

    def look(known: Mapping[str, int]) -> Change:
        stored = dict(store.list(pack.PACK_PREFIX))
        passed_over = {key for key, _ in damaged}
        new = [(key, size) for key, size in stored.items() if known.get(key) != size and key not in passed_over]
        gone = [key for key, size in known.items() if stored.get(key) != size]
        return Change(list(_readable(store, new, damaged)), gone)

    return look


def add_all_packs(store: Store, index: Index, *, progress: Progress = SILENT) -> list[tuple[str, str]]:
    """Add every pack of `store` to `index`; the damaged ones and what is wrong with each."""
    packs = list(store.list(pack.PACK_PREFIX))
    damaged: list[tuple[str, str]] = []
    with phase(progress, "indexing", sum(size for _, size in packs)):
        for batch in record_batches(_readable(store, data_first(packs), damaged)):
            index.add_packs(batch)
            progress.advance(sum(record.size_bytes for record in batch))
    return damaged


def _readable(store: Store, packs: Sequence[tuple[str, int]], damaged: list[tuple[str, str]]) -> Iterator[PackRecord]:
    """Records of the packs, in order, read from the packs alone."""
    at_once = store.abilities.parallel
    for batch in pack_batches(packs) if at_once > 1 else ([each] for each in packs):
        found = map_all(partial(_read_one, store), batch, num_threads=at_once)
        for (key, _), record in zip(batch, found, strict=True):
            if isinstance(record, PackRecord):
                yield record
            elif isinstance(record, CorruptionError):
                damaged.append((key, str(record)))


def _read_one(store: Store, listed: tuple[str, int]) -> PackRecord | NotFoundError | CorruptionError:
    """The rows of a pack, or why there are none; one that is not found was collected since the listing."""
    try:
        key, size = listed
        if is_meta(key) and size > PART_BYTES:
            return read_in_parts(store, key)
        return read_pack(small_pack(store, key, size), key)
    except (NotFoundError, CorruptionError) as error:
        return error
