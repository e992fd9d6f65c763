"""Intact copies of objects, written into new packs: fetched from other repositories, or copied out of damaged packs.

Invariant: what is written was verified against its id after it was read, and nothing that is here is touched.
Below a node that is fetched, whatever is not here is fetched too. New packs count only once they were read back.
Must not know: what is lost and what is needed; gc/state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from cas_ckpt.core.config import Config, read_config
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.packs import read_pack
from cas_ckpt.core.records import node_children
from cas_ckpt.errors import CkptError, CorruptionError, NotFoundError, StorageError
from cas_ckpt.index import contents
from cas_ckpt.index.database import IN_MEMORY
from cas_ckpt.index.index import Index
from cas_ckpt.objects import codec
from cas_ckpt.objects.digest import DIGEST_BYTES, Digest, ObjectKind, leaf_digest, object_id
from cas_ckpt.objects.nodes import Node, decode_commit
from cas_ckpt.objects.pack import ExtentInfo, Location, decode_entry_header
from cas_ckpt.storage.store import Store
from cas_ckpt.storage.url import open_store
from cas_ckpt.transfer.chunk_reader import ChunkReader
from cas_ckpt.transfer.pack_writer import EncodedChunk, PackSink, WrittenPack
from cas_ckpt.transfer.scan import ExtentScanner, ScanUnit

_FETCH_BATCH = 500


# --- writing --------------------------------------------------------------------------------


@contextmanager
def new_packs(store: Store, index: Index, config: Config) -> Iterator[PackSink]:
    """A sink for objects; when the block ends, its packs are durable, verified and in the index.

    Raises:
        CorruptionError: the medium gives other bytes than were written: nothing may be removed.
    """
    sink = PackSink(store, pack_bytes=config.pack_bytes)
    try:
        yield sink
        _add_verified(store, index, sink.finish())
    except BaseException:
        sink.abort()
        raise


def _add_verified(store: Store, index: Index, written: Sequence[WrittenPack]) -> None:
    """Read back the packs that were written, every byte, and bring their rows into the index."""
    scanner = ExtentScanner(store)
    for pack in written:
        record = read_pack(store, pack.key)
        bad = scanner.check(ScanUnit(pack.key, sorted(record.entries, key=lambda entry: entry.offset)))
        if bad:
            raise CorruptionError(f"{pack.key} was written a moment ago and is damaged already: {bad[0].what}")
        index.add_packs([record])


# --- from other repositories ----------------------------------------------------------------


def open_source(url: str) -> RepositoryHandle:
    """Another repository, to be read from; its index is made anew in memory if it has none that can be used.

    Raises:
        NoRepositoryError and others: it cannot be opened.
    """
    try:
        handle = RepositoryHandle.open(url, read_only=True)
        handle.sync()
    except CorruptionError:
        store = open_store(url)
        config = read_config(store)
        handle = RepositoryHandle(store, config, Index.open(IN_MEMORY, store_id=config.store_id), read_only=True)
        handle.sync()
    return handle


@dataclass(slots=True)
class ObjectFetcher:
    """Fetches objects from some repositories into a sink.

    Attributes:
        incomplete: Answers which of some ids are not whole here.
        forgotten: Commits that keep only their own object.
        found: Ids that were fetched (or, without a sink, would be).
        not_found: Ids that no source has intact.
    """

    sources: Sequence[RepositoryHandle]
    sink: PackSink | None
    incomplete: Callable[[Iterable[bytes]], set[bytes]]
    forgotten: Collection[bytes]
    found: set[bytes] = field(default_factory=set)
    not_found: set[bytes] = field(default_factory=set)

    def fetch(self, wanted: Iterable[bytes]) -> None:
        """Fetch `wanted`, and what is below and not here either."""
        waiting = sorted(set(wanted))
        while waiting:
            batch, waiting = waiting[:_FETCH_BATCH], waiting[_FETCH_BATCH:]
            below: set[bytes] = set()
            for digest in batch:
                children = self._fetch_one(Digest(digest))
                if children is None:
                    self.not_found.add(digest)
                else:
                    self.found.add(digest)
                    below.update(children)
            below -= self.found | self.not_found | set(waiting)
            waiting += sorted(self.incomplete(below))

    def _fetch_one(self, digest: Digest) -> tuple[bytes, ...] | None:
        """What the object names, once it is fetched; None if no source has it intact."""
        for source in self.sources:
            try:
                places = source.index.read(contents.locate, [digest]).get(digest, [])
                if places and places[0].kind == ObjectKind.CHUNK:
                    self._fetch_chunk(source, digest, places)
                    return ()
                if places:
                    return self._fetch_node(source, digest, ObjectKind(places[0].kind))
            except CkptError:
                continue
        return None

    def _fetch_node(self, source: RepositoryHandle, digest: Digest, kind: ObjectKind) -> tuple[bytes, ...]:
        data = source.read_node(kind, digest)
        children: tuple[bytes, ...] = ()
        if kind == ObjectKind.COMMIT:
            commit = decode_commit(data)
            children = commit.parents if digest in self.forgotten else (commit.root, commit.layout, *commit.parents)
        elif kind != ObjectKind.LAYOUT:
            children = node_children(kind, data)
        if self.sink is not None:
            self.sink.add_node(Node(kind, digest, data))
        return children

    def _fetch_chunk(self, source: RepositoryHandle, digest: Digest, places: Sequence[Location]) -> None:
        reader = ChunkReader(source.store)
        extents = reader.verify(digest, places, places[0].num_bytes)
        if self.sink is None:
            return
        for extent in extents:
            info = extent.info
            leaves, payload = (info.first_leaf, info.num_leaves), reader.payload(extent)
            sizes = (info.num_bytes, info.leaf_bytes)
            self.sink.add_chunk(EncodedChunk(digest, *sizes, extent.digests, info.encoding, payload, leaves))


# --- out of damaged packs -------------------------------------------------------------------


@dataclass(slots=True)
class Salvage:
    """Copies what is intact of damaged packs into a sink; of a raw chunk with damaged leaves, the intact leaves.

    Attributes:
        wanted: Ids of the objects that have to be copied.
    """

    store: Store
    sink: PackSink
    wanted: set[bytes]
    _covered: dict[bytes, set[int]] = field(default_factory=dict)

    def copy(self, pack: str, entries: Iterable[ExtentInfo]) -> None:
        """Copy the intact ones of `entries`."""
        for info in sorted(entries, key=lambda entry: entry.offset):
            if info.digest in self.wanted:
                try:
                    self._copy_entry(pack, info)
                except (CorruptionError, NotFoundError, StorageError):
                    continue  # damaged: what is lost with it was reported

    def _copy_entry(self, pack: str, info: ExtentInfo) -> None:
        header = self.store.get_range(pack, info.offset, info.header_bytes)
        found, digests = decode_entry_header(header, offset=info.offset)
        payload = bytes(self.store.get_range(pack, info.offset + info.header_bytes, found.stored_bytes))
        if found.digest != info.digest:
            raise CorruptionError(f"{pack} at {info.offset}: another object than the directory says")
        if found.kind != ObjectKind.CHUNK:
            if object_id(found.kind.label, payload) != found.digest:
                raise CorruptionError(f"{pack} at {info.offset}: a damaged node")
            self.sink.add_node(Node(found.kind, found.digest, payload))
            self.wanted.discard(found.digest)
            return
        covered = self._covered.setdefault(found.digest, set())
        sizes = (found.num_bytes, found.leaf_bytes)
        for run in _intact_runs(found, digests, payload, covered):
            covered.update(range(run.first, run.first + run.count))
            leaves = (run.first, run.count)
            self.sink.add_chunk(EncodedChunk(found.digest, *sizes, digests, run.encoding, run.payload, leaves))
        if len(covered) == found.chunk_leaves:
            self.wanted.discard(found.digest)
            del self._covered[found.digest]


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of intact leaves, as it is to be written."""

    first: int
    count: int
    encoding: int
    payload: bytes


def _intact_runs(info: ExtentInfo, digests: bytes, payload: bytes, covered: Collection[int]) -> list[_Run]:
    """The runs of leaves of an extent that are intact and not in `covered`; the whole of it, if that can be."""
    plain = memoryview(payload)
    if info.encoding != codec.RAW:
        plain = memoryview(codec.decode_extent(info.encoding, payload, num_bytes=info.plain_bytes))
    leaf, first = info.leaf_bytes, info.first_leaf
    good = [
        first + at not in covered
        and leaf_digest(plain[at * leaf : (at + 1) * leaf])
        == digests[(first + at) * DIGEST_BYTES : (first + at + 1) * DIGEST_BYTES]
        for at in range(info.num_leaves)
    ]
    if all(good):
        return [_Run(first, info.num_leaves, info.encoding, payload)]
    spans: list[list[int]] = []
    for at, intact in enumerate(good):
        if intact and spans and spans[-1][1] == at:
            spans[-1][1] = at + 1
        elif intact:
            spans.append([at, at + 1])
    return [
        _Run(first + start, stop - start, int(codec.RAW), bytes(plain[start * leaf : stop * leaf]))
        for start, stop in spans
    ]
