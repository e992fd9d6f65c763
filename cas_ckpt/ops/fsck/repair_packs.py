"""repair of packs and chunks: what is lost is brought from elsewhere, what is damaged is taken out of use.

    r1  gc/state is read, before anything that it may change is looked at
    r2  the damage is found: structure, and the data of packs that the scrub log says are damaged
    r3  a collection that is not idle is ended, for a dead one could not go on beside damage:
        condemned: swap to deleting with an EMPTY list, then to idle. Nothing is deleted, so that needs no fence
        deleting: what is on the list is deleted. That was decided: fenced, rescued, or (by a repair) copied
        Where that fails (it is alive, or nothing can be deleted), lost objects are brought all the same; none
        counts as intact here that only a condemned pack holds
    r4  chunks: lost objects are fetched, by id, from other repositories
    r5  packs: every intact entry of the damaged packs whose object no undamaged pack holds whole is copied into
        new packs, which are read back and verified; the damaged packs are copied to damaged/..., as they are
    r6  swap gc/state: idle g -> condemned g+1, the damaged packs        (fails if a collection began since r1)
    r7  fence the refs; swap gc/state -> deleting; delete the packs; swap -> idle

Invariant: nothing intact is ever gone: before r6 it is in a new pack, or in an undamaged one that no
collection condemned, because gc/state did not change since r1. Dying anywhere leaves the damaged packs
in place, or copies of all that is intact in them; the next repair goes on. What could not be brought is reported,
and is brought by a later repair, or by the next commit of the same state, which finds that the objects are not
here and writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field

from cas_ckpt import native
from cas_ckpt.arguments import RepairKind
from cas_ckpt.core.config import Config, read_config
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.live import ASIDE_PREFIX
from cas_ckpt.core.packs import read_pack
from cas_ckpt.core.protocol import GC_STATE_KEY, GcPhase, GcState, read_gc_state, require_current, swap_gc_state
from cas_ckpt.core.records import node_children
from cas_ckpt.core.ref_store import RefStore
from cas_ckpt.core.refs import Generation, RefKind
from cas_ckpt.errors import (
    CkptError,
    ConflictError,
    CorruptionError,
    InternalError,
    InvalidInputError,
    NotFoundError,
    StorageError,
)
from cas_ckpt.index import contents, integrity
from cas_ckpt.index.database import IN_MEMORY
from cas_ckpt.index.index import Index
from cas_ckpt.index.integrity import UnusableParts
from cas_ckpt.objects import codec
from cas_ckpt.objects.digest import DIGEST_BYTES, Digest, ObjectKind, object_id
from cas_ckpt.objects.nodes import Node, decode_commit
from cas_ckpt.objects.pack import ExtentInfo, Location, decode_entry_header
from cas_ckpt.ops.fsck.check import ProblemFinder
from cas_ckpt.ops.fsck.packs import DataOptions, Structure, checked_structure, read_data
from cas_ckpt.ops.fsck.records import Records, ref_keys
from cas_ckpt.ops.fsck.report import Findings, RepairLog, RepairRequest
from cas_ckpt.progress import Progress
from cas_ckpt.storage.store import Store, exists
from cas_ckpt.storage.url import open_store
from cas_ckpt.transfer.chunk_reader import ChunkReader, runs
from cas_ckpt.transfer.copying import intact_chunks
from cas_ckpt.transfer.pack_writer import EncodedChunk, PackSink, WrittenPack
from cas_ckpt.transfer.scan import ExtentScanner, ScanUnit

COPY_BYTES = 1024 * 1024
"""A damaged pack is copied aside in pieces of this size; a piece that cannot be read becomes zeros."""

_MOST_NAMED = 3
_FENCE_ATTEMPTS = 100


def repair_packs(
    store: Store, index: Index | None, config: Config, records: Records, request: RepairRequest,
    sources: Sequence[RepositoryHandle], log: RepairLog, *, progress: Progress,
) -> None:  # fmt: skip
    """Repair packs and chunks.

    Args:
        sources: Those of `request`, open.
    Raises:
        ConflictError: a garbage collection went on meanwhile: repair again.
        CorruptionError: gc/state is damaged: repair that first.
    """
    state = read_gc_state(store)
    findings = Findings(store)
    with checked_structure(store, index, findings, progress=progress) as structure:
        packs = structure.packs  # that may hold damaged chunks: all of them, where no scrub log says which
        if structure.is_own and not request.read_data:
            scrubs = structure.index.read(integrity.read_scrubs)
            doubtful = {key for key, scrub in scrubs.items() if scrub.damage is not None}.union(structure.damaged)
            packs = {key: packs[key] for key in sorted(doubtful & packs.keys())}
        read_data(store, structure, packs, findings, DataOptions(), progress=progress)
        structure.drop(key for key in structure.damaged if not exists(store, key))  # collected meanwhile
        _Repair(store, structure, config, records, state, request.kinds, sources, log).run()


@dataclass(slots=True)
class _Repair:
    """One repair of packs and chunks."""

    _store: Store
    _structure: Structure
    _config: Config
    _records: Records
    _state: GcState
    _kinds: Collection[RepairKind]
    _sources: Sequence[RepositoryHandle]
    _log: RepairLog
    _finder: ProblemFinder = field(init=False)
    _damaged: list[str] = field(init=False)

    def _look(self, *, without: Collection[str]) -> None:
        self._finder = ProblemFinder(self._store, self._structure, self._records, without=without)
        self._damaged = self._structure.damaged

    def run(self) -> None:
        """r3 to r7."""
        self._look(without=() if self._log.dry_run else self._state.condemned)
        try:
            self._end_collection()
        except CkptError:
            self._bring_lost()
            raise
        self._take_out_of_use(self._bring_lost())

    # --- the collection that was under way --------------------------------------------------

    def _end_collection(self) -> None:
        """End a collection, so that packs may be taken out of use; one that is not in the way is left alone."""
        state, condemned = self._state, self._state.condemned
        if state.phase == GcPhase.IDLE:
            return
        if state.phase == GcPhase.CONDEMNED:
            if not self._damaged and not self._finder.needed_missing():
                return
            what = f"the collection is given up; its {len(condemned)} condemned packs stay for the next one"
        else:
            what = f"the collection is finished: {len(condemned)} condemned packs are deleted"
        if not self._log.dry_run:
            if state.phase != GcPhase.CONDEMNED:
                # What only these hold whole is copied, because the copy that was to stay was damaged since.
                gone = (self._finder.gone | frozenset(self._damaged)).difference(condemned)
                if wanted := self._only_in(gone):
                    self._copy(wanted, [pack for pack in condemned if pack in self._structure.packs])
            self._state = end_collection(self._store, state)
            if state.phase != GcPhase.CONDEMNED:
                self._structure.drop(condemned)
                self._structure.index.drop_packs(condemned)
            self._look(without=())
        self._log.did("packs", GC_STATE_KEY, what)

    # --- chunks ---------------------------------------------------------------------------

    def _bring_lost(self) -> set[bytes]:
        """Bring what is nowhere whole, if asked to; what was brought (or, in a dry run, could be)."""
        lost = self._lost() if "chunks" in self._kinds else set()
        if not lost:
            return set()
        finder = self._finder
        with nullcontext() if self._log.dry_run else self._new_packs() as sink:
            fetcher = ObjectFetcher(self._sources, sink, finder.incomplete, self._records.forgotten)
            fetcher.fetch(lost)
        if fetcher.found:
            places = ", ".join(source.store.url for source in self._sources)
            self._log.did("chunks", self._store.url, f"{len(fetcher.found)} objects from {places}")
        not_found = fetcher.not_found - set(finder.integrity.digests(finder.promised).values())
        if not_found and finder.is_needed(not_found):
            shown = ", ".join(digest.hex()[:12] for digest in sorted(not_found)[:_MOST_NAMED])
            self._log.leave(
                "chunks", self._store.url,
                f"{len(not_found)} objects have no intact copy ({shown}): give another repository that holds "
                "them (--from), or commit the same state again",
            )  # fmt: skip
        return fetcher.found

    def _lost(self) -> set[bytes]:
        """Ids of what is lost with the damaged packs, or is in no pack at all: what remotes promised, too."""
        numbers = {number for pack in self._damaged for number in self._finder.lost_in(pack)}
        missing = self._finder.needed_missing(numbers)
        numbers |= self._finder.promised
        # Of a damaged entry that the index does not know, only the pack says the id.
        bad = {extent.info.digest for found in self._structure.bad.values() for extent in found}
        unknown = bad - self._finder.integrity.numbers(bad).keys()
        return missing.union(unknown, self._finder.integrity.digests(numbers).values())

    # --- packs ----------------------------------------------------------------------------

    def _take_out_of_use(self, brought: set[bytes]) -> None:
        if not self._damaged:
            return
        # What the damaged packs hold something of and no other pack holds whole.
        entries = [info for pack in self._damaged for info in self._structure.entries(self._store, pack)]
        found = {info.digest for info in entries}
        wanted = self._only_in(self._damaged) | (found - self._finder.integrity.numbers(found).keys())
        if not self._log.dry_run:
            self._copy(wanted - brought, self._damaged)
            for pack in self._damaged:
                set_aside(self._store, pack, self._structure.packs[pack])
            retire(self._store, self._state, self._damaged)
            self._structure.index.drop_packs(self._damaged)
        for pack in self._damaged:
            self._log.did("packs", pack, "what is intact in it is in new packs, itself in damaged/")

    def _only_in(self, packs: Collection[str]) -> set[bytes]:
        """Objects that the index knows in `packs` and that no pack holds whole which may be relied on."""
        integrity = self._finder.integrity
        unusable = UnusableParts(frozenset(self._damaged) | self._finder.gone)
        return set(integrity.digests(integrity.incomplete(integrity.in_packs(packs), unusable)).values())

    def _new_packs(self) -> AbstractContextManager[PackSink]:
        return new_packs(self._store, self._structure.index, self._config)

    def _copy(self, wanted: set[bytes], packs: Sequence[str]) -> None:
        """Copy what is intact of `wanted` in these packs into new ones."""
        with self._new_packs() as sink:
            salvage = Salvage(self._store, sink, set(wanted))
            for pack in packs:
                with suppress(NotFoundError):  # a collector that is alive deleted it meanwhile
                    salvage.copy(pack, self._structure.entries(self._store, pack))


# --- out of the way -----------------------------------------------------------------------


def end_collection(store: Store, state: GcState) -> GcState:
    """Bring gc/state from `state` to idle: what is only condemned stays, what is being deleted is deleted.

    A collector that is alive cannot go on from "condemned" after that, for the record that it expects is gone.

    Raises:
        ConflictError: another process continues it. StorageError: a pack cannot be deleted.
    """
    if state.phase == GcPhase.CONDEMNED:
        state = _swap(store, state, state.generation, GcPhase.DELETING, ())
    return _delete_condemned(store, state) if state.phase == GcPhase.DELETING else state


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
    """r6 and r7: condemn `packs`, fence, delete.

    Args:
        state: Idle, as it was before anything was copied.
    Raises:
        ConflictError: a garbage collection began meanwhile: nothing was deleted; repair again.
    """
    stored = [pack for pack in packs if exists(store, pack)]
    if stored:
        state = _swap(store, state, state.generation.next(), GcPhase.CONDEMNED, stored)
        for kind, _, name in ref_keys(store):
            if name is not None:
                _fence(RefStore(store), kind, name, state)
        _delete_condemned(store, _swap(store, state, state.generation, GcPhase.DELETING, stored))


def _delete_condemned(store: Store, state: GcState) -> GcState:
    for pack in state.condemned:
        store.delete(pack)
        if exists(store, pack):
            raise StorageError(f"{pack} is still there after it was deleted: allow deletion, then repair again")
    return _swap(store, state, state.generation, GcPhase.IDLE, ())


def _swap(store: Store, state: GcState, generation: Generation, phase: GcPhase, packs: Sequence[str]) -> GcState:
    try:
        return swap_gc_state(store, state, generation=generation, phase=phase, condemned=packs)
    except ConflictError as error:
        raise ConflictError(
            "a garbage collection went on while packs were repaired; nothing intact was removed: repair again"
        ) from error


def _fence(refs: RefStore, kind: RefKind, name: str, state: GcState) -> None:
    """Bring a ref to the generation of `state`.

    One that is damaged stays as it is: whatever is swapped onto it needs nothing that the copies do not hold.
    """
    for _ in range(_FENCE_ATTEMPTS):
        try:
            ref = refs.get(kind, name)
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
    raise InternalError(f"{kind.label} {name!r} moved {_FENCE_ATTEMPTS} times while it was fenced")


# --- intact copies of objects, written into new packs -----------------------------------------
#
# What is written was verified against its id after it was read, and nothing that is here is touched. Below a node that
# is fetched, whatever is not here is fetched too. New packs count only once they were read back.

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
        """Ids that the object refers to, after fetching it; None if no source has it intact."""
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
        if self.sink is None:
            reader.verify(digest, places, places[0].num_bytes)
            return
        for chunk in intact_chunks(reader, digest, places, places[0].num_bytes):
            self.sink.add_chunk(chunk)


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
    found, wanted = native.leaf_digests(plain, leaf), digests[first * DIGEST_BYTES :]
    good = [
        at
        for at in range(info.num_leaves)
        if first + at not in covered
        and found[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES] == wanted[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]
    ]
    if len(good) == info.num_leaves:
        return [_Run(first, info.num_leaves, info.encoding, payload)]
    return [
        _Run(first + start, stop - start, int(codec.RAW), bytes(plain[start * leaf : stop * leaf]))
        for start, stop in runs(good)
    ]
