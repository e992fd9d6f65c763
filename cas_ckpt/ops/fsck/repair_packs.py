"""Takes damaged packs out of use: what is intact in them is written elsewhere, then they are moved aside.

    r1  gc/state is read, before anything else is looked at. A collection that is not idle is ended first:
        condemned: swap to deleting with an EMPTY list, then to idle. Nothing is deleted, so that needs no fence
        deleting: what is on the list is deleted. That was decided: fenced, rescued, or (by a repair) copied
    r2  every intact entry of the damaged packs whose object is not whole in an undamaged pack is copied
        into new packs; of a raw chunk with damaged leaves, the intact leaves
    r3  the copies are read back and verified, and the damaged packs copied to damaged/..., as they are
    r4  swap gc/state: idle g -> condemned g+1, the damaged packs        (fails if a collection began since r1)
    r5  fence the refs; swap gc/state -> deleting; delete the packs; swap -> idle

Invariant: nothing intact is ever gone: before r4 it stands in a new pack or in an undamaged one that no
collection condemned, because gc/state did not change since r1. Dying anywhere leaves the damaged packs
in place, or copies of all that is intact in them; the next repair goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.packs import node_children, read_pack
from cas_ckpt.core.protocol import CONDEMNED, DELETING, IDLE, GcState, Generation, require_current, swap_gc_state
from cas_ckpt.core.refs import Ref, RefKind, RefStore
from cas_ckpt.errors import (
    CkptError,
    ConflictError,
    CorruptionError,
    InternalError,
    InvalidInputError,
    NotFoundError,
    StorageError,
)
from cas_ckpt.index import contents
from cas_ckpt.index.database import IN_MEMORY
from cas_ckpt.index.index import Index
from cas_ckpt.objects import codec
from cas_ckpt.objects.digest import Digest, ObjectKind, leaf_digest, object_id
from cas_ckpt.objects.nodes import Node, decode_commit
from cas_ckpt.objects.pack import ExtentInfo, Location, decode_entry_header
from cas_ckpt.ops.fsck.records import ASIDE_PREFIX
from cas_ckpt.storage.store import Store
from cas_ckpt.storage.url import open_store
from cas_ckpt.transfer.chunk_reader import ChunkReader
from cas_ckpt.transfer.pack_writer import ChunkSink, EncodedChunk, WrittenPack, write_nodes
from cas_ckpt.transfer.scan import ExtentScanner, ScanUnit

# DOC of cas_ckpt.ops.fsck.repair_packs:
# Brings objects that are lost here from other repositories, by id, and writes them into new packs.
#
# Invariant: what is written was verified against its id after it was read from the other side, and
# nothing that is here is touched. Below a node that is brought, whatever is not here is brought too.
#

NODE_BATCH_BYTES = 16 * 1024 * 1024
BATCH = 500


def open_source(url: str) -> RepositoryHandle:
    """Another repository, to be read from; its index is made anew in memory if it has none that can be used.

    Raises:
        NoRepositoryError and others: it cannot be opened.
    """
    try:
        handle = RepositoryHandle.open(url, read_only=True)
        handle.sync()
        return handle
    except CorruptionError:
        store = open_store(url)
        from cas_ckpt.core.config import read_config

        config = read_config(store)
        handle = RepositoryHandle(store, config, Index.open(IN_MEMORY, store_id=config.store_id), read_only=True)
        handle.sync()
        return handle


@dataclass(slots=True)
class PackSink:
    """Writes nodes and extents of chunks into new packs; `finish` makes all of them durable."""

    store: Store
    pack_bytes: int
    _nodes: list[Node] = field(default_factory=list)
    _node_bytes: int = 0
    _written: list[WrittenPack] = field(default_factory=list)
    _chunks: ChunkSink | None = None

    def add_node(self, node: Node) -> None:
        """Add a node."""
        self._nodes.append(node)
        self._node_bytes += len(node.data)
        if self._node_bytes >= NODE_BATCH_BYTES:
            self._flush()

    def add_chunk(self, chunk: EncodedChunk) -> None:
        """Add an extent of a chunk."""
        if self._chunks is None:
            self._chunks = ChunkSink(self.store, pack_bytes=self.pack_bytes)
        self._chunks.put(chunk)

    def _flush(self) -> None:
        if self._nodes:
            self._written.append(write_nodes(self.store, self._nodes))
            self._nodes, self._node_bytes = [], 0

    def finish(self) -> list[WrittenPack]:
        """The packs, durable."""
        self._flush()
        if self._chunks is not None:
            self._written += self._chunks.finish()
        return self._written

    def abort(self) -> None:
        """Leave no unfinished pack."""
        if self._chunks is not None:
            self._chunks.abort()


def kept() -> None:
    """The payload is a copy of its own: there is no buffer to give back."""


@dataclass(slots=True)
class ObjectFetcher:
    """Fetches objects from some repositories into a sink.

    Attributes:
        lacks: Tells which of some ids are not whole here.
        is_bare: Whether a commit keeps only its own object (it was forgotten).
        found: Ids that were fetched (or, without a sink, would be).
        nowhere: Ids that no source has intact.
    """

    sources: Sequence[RepositoryHandle]
    sink: PackSink | None
    lacks: Callable[[Iterable[bytes]], set[bytes]]
    is_bare: Callable[[bytes], bool]
    found: set[bytes] = field(default_factory=set)
    nowhere: set[bytes] = field(default_factory=set)

    def fetch(self, wanted: Iterable[bytes]) -> None:
        """Bring `wanted`, and what is below and not here either."""
        waiting = sorted(set(wanted))
        while waiting:
            batch, waiting = waiting[:BATCH], waiting[BATCH:]
            below: set[bytes] = set()
            for digest in batch:
                children = self._fetch_one(digest)
                if children is None:
                    self.nowhere.add(digest)
                else:
                    self.found.add(digest)
                    below.update(children)
            below -= self.found | self.nowhere | set(waiting)
            waiting += sorted(self.lacks(below))

    def _fetch_one(self, digest: bytes) -> tuple[bytes, ...] | None:
        """What the object names, once it is brought; None if no source has it intact."""
        for source in self.sources:
            try:
                places = source.index.read(contents.locate, [digest]).get(digest, [])
                if places:
                    return self._bring(source, Digest(digest), places)
            except CkptError:
                continue
        return None

    def _bring(self, source: RepositoryHandle, digest: Digest, places: Sequence[Location]) -> tuple[bytes, ...]:
        kind = ObjectKind(places[0].kind)
        if kind == ObjectKind.CHUNK:
            self._bring_chunk(source, digest, places)
            return ()
        data = source.read_node(kind, digest)
        children = self._named(kind, digest, data)
        if self.sink is not None:
            self.sink.add_node(Node(kind, digest, data))
        return children

    def _named(self, kind: ObjectKind, digest: Digest, data: bytes) -> tuple[bytes, ...]:
        if kind == ObjectKind.COMMIT:
            commit = decode_commit(data)
            own = () if self.is_bare(digest) else (commit.root, commit.layout)
            return (*own, *commit.parents)
        return () if kind == ObjectKind.LAYOUT else node_children(kind, data)

    def _bring_chunk(self, source: RepositoryHandle, digest: Digest, places: Sequence[Location]) -> None:
        reader = ChunkReader(source.store)
        extents = reader.verify(digest, places, places[0].num_bytes)
        if self.sink is None:
            return
        for extent in extents:
            info = extent.info
            self.sink.add_chunk(
                EncodedChunk(
                    digest, info.num_bytes, info.leaf_bytes, extent.digests, info.encoding, reader.payload(extent),
                    release=kept, leaves=(info.first_leaf, info.num_leaves),
                )
            )  # fmt: skip


COPY_BYTES = 1024 * 1024
"""A damaged pack is copied aside in pieces of this size; a piece that cannot be read becomes zeros."""


@dataclass(slots=True)
class Salvage:
    """Copies what is intact of damaged packs into a sink.

    Attributes:
        wanted: Ids of the objects that have to be copied.
    """

    store: Store
    sink: PackSink
    wanted: set[bytes]
    num_copied: int = 0
    _covered: dict[bytes, set[int]] = field(default_factory=dict)

    def copy(self, pack: str, entries: Iterable[ExtentInfo]) -> None:
        """Copy the intact ones of `entries`."""
        for info in sorted(entries, key=lambda entry: entry.offset):
            if info.digest in self.wanted:
                try:
                    self._copy_entry(pack, info)
                except (CorruptionError, NotFoundError, StorageError):
                    continue  # damaged: what is lost with it was told

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
            self.num_copied += 1
            return
        covered = self._covered.setdefault(found.digest, set())
        for extent in _intact_parts(found, digests, payload, covered):
            self.num_copied += 1
            covered.update(range(extent.first, extent.first + extent.count))
            self.sink.add_chunk(
                EncodedChunk(
                    found.digest, found.num_bytes, found.leaf_bytes, digests, extent.encoding, extent.payload,
                    release=kept, leaves=(extent.first, extent.count),
                )
            )  # fmt: skip
        if len(covered) == found.chunk_leaves:
            self.wanted.discard(found.digest)
            del self._covered[found.digest]


@dataclass(frozen=True, slots=True)
class _Part:
    """A run of intact leaves, as it is to be written."""

    first: int
    count: int
    encoding: int
    payload: bytes


def _intact_parts(info: ExtentInfo, digests: Sequence[Digest], payload: bytes, covered: Collection[int]) -> list[_Part]:
    """The runs of leaves of an extent that are intact and not in `covered`; the whole of it, if that can be."""
    plain = memoryview(payload)
    if info.encoding != codec.RAW:
        plain = memoryview(codec.decode_extent(info.encoding, payload, num_bytes=info.plain_bytes))
    leaf, first = info.leaf_bytes, info.first_leaf
    good = [
        first + at not in covered and leaf_digest(plain[at * leaf : (at + 1) * leaf]) == digests[first + at]
        for at in range(info.num_leaves)
    ]
    if all(good):
        return [_Part(first, info.num_leaves, info.encoding, payload)]
    runs: list[list[int]] = []
    for at, intact in enumerate(good):
        if intact and runs and runs[-1][1] == at:
            runs[-1][1] = at + 1
        elif intact:
            runs.append([at, at + 1])
    return [
        _Part(first + start, stop - start, int(codec.RAW), bytes(plain[start * leaf : stop * leaf]))
        for start, stop in runs
    ]


def add_verified(store: Store, index: Index, written: Sequence[WrittenPack]) -> None:
    """Read back the packs that were written, every byte, and bring their rows into the index.

    Raises:
        CorruptionError: the medium gives other bytes than were written: nothing may be removed.
    """
    scanner = ExtentScanner(store)
    for pack in written:
        record = read_pack(store, pack.key)
        entries = sorted(record.entries, key=lambda entry: entry.offset)
        bad = scanner.check(ScanUnit(pack.key, entries))
        if bad:
            raise CorruptionError(f"{pack.key} was written a moment ago and is damaged already: {bad[0].what}")
        index.add_packs([record])


# --- out of the way -----------------------------------------------------------------------


def end_cycle(store: Store, state: GcState) -> GcState:
    """Bring gc/state from `state` to idle: what is only condemned stays, what is being deleted is deleted.

    A collector that is alive cannot go on from "condemned" after that, for the record that it expects is gone.

    Raises:
        ConflictError: somebody else goes on with it. StorageError: a pack cannot be deleted.
    """
    if state.phase == CONDEMNED:
        state = _swapped(store, state, state.generation, DELETING, ())
    return _finish(store, state) if state.phase == DELETING else state


def _exists(store: Store, key: str) -> bool:
    try:
        store.head(key)
        return True
    except NotFoundError:
        return False


def set_aside(store: Store, key: str, size: int) -> None:
    """Copy the pack `key`, as it is, to `damaged/...`; again if a copy was left unfinished. It is not deleted."""
    target = ASIDE_PREFIX + key
    try:
        if store.head(target) == size:
            return
        store.delete(target)
    except NotFoundError:
        pass  # no copy was begun yet
    with store.open_writer(target) as writer:
        for start in range(0, size, COPY_BYTES):
            length = min(COPY_BYTES, size - start)
            try:
                piece = bytes(store.get_range(key, start, length))
            except (CorruptionError, StorageError):
                piece = bytes(length)
            writer.write(piece)
        writer.commit()


def retire(store: Store, state: GcState, packs: Sequence[str]) -> None:
    """r4 and r5: condemn `packs`, fence, delete.

    Args:
        state: Idle, as it was before anything was copied.
    Raises:
        ConflictError: a garbage collection began meanwhile: nothing was deleted; repair again.
    """
    there = [pack for pack in packs if _exists(store, pack)]
    if there:
        state = _swapped(store, state, state.generation.next(), CONDEMNED, there)
        _fence(store, state)
        _finish(store, _swapped(store, state, state.generation, DELETING, there))


def _finish(store: Store, state: GcState) -> GcState:
    for pack in state.condemned:
        store.delete(pack)
        if _exists(store, pack):
            raise StorageError(f"{pack} is still there after it was deleted: allow deletion, then repair again")
    return _swapped(store, state, state.generation, IDLE, ())


def _swapped(store: Store, state: GcState, generation: Generation, phase: str, packs: Sequence[str]) -> GcState:
    try:
        return swap_gc_state(store, state, generation=generation, phase=phase, condemned=packs)
    except ConflictError as error:
        raise ConflictError(
            "a garbage collection went on while packs were repaired; nothing intact was removed: repair again"
        ) from error


def _fence(store: Store, state: GcState) -> None:
    """Bring every ref to the generation of `state`.

    One that is damaged stays as it is: whatever is swapped onto it needs nothing that the copies do not hold.
    """
    refs = RefStore(store)
    for kind in RefKind:
        for key in [key for key, _ in store.list(kind.value) if key.endswith(".ref")]:
            _fence_ref(refs, kind, key.removeprefix(kind.value).removesuffix(".ref"), state)


def _fence_ref(refs: RefStore, kind: RefKind, name: str, state: GcState) -> None:
    for _ in range(100):
        try:
            ref: Ref = refs.get(kind, name)
        except (CorruptionError, NotFoundError, InvalidInputError):
            return
        if ref.generation == state.generation:
            return
        require_current(state, ref.generation, key=ref.key)
        try:
            refs.fence(ref, generation=state.generation, log=ref.log)
            return
        except ConflictError:
            continue
    raise InternalError(f"{kind.label} {name!r} moved a hundred times while it was fenced")
