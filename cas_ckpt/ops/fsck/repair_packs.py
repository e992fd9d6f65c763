"""repair of packs and chunks: what is lost is brought from elsewhere, what is damaged is taken out of use.

    r1  gc/state is read, before anything that it may change is looked at
    r2  the damage is found: structure, and the data of packs that the scrub log says are damaged
    r3  a collection that is not idle is ended, for a dead one could not go on beside damage:
        condemned: swap to deleting with an EMPTY list, then to idle. Nothing is deleted, so that needs no fence
        deleting: what is on the list is deleted. That was decided: fenced, rescued, or (by a repair) copied
        Where that fails (it is alive, or nothing can be deleted), lost objects are brought all the same; none
        counts as intact here that only a condemned pack holds
    r4  chunks: lost objects are fetched, by id, from other repositories              (ops/fsck/recover.py)
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

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field

from cas_ckpt.core.config import Config
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.live import ASIDE_PREFIX
from cas_ckpt.core.protocol import GC_STATE_KEY, GcPhase, GcState, read_gc_state, require_current, swap_gc_state
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
from cas_ckpt.index import integrity
from cas_ckpt.index.index import Index
from cas_ckpt.index.integrity import UnusableParts
from cas_ckpt.ops.fsck.data import DataOptions, read_data
from cas_ckpt.ops.fsck.problems import ProblemFinder
from cas_ckpt.ops.fsck.records import Records, ref_keys
from cas_ckpt.ops.fsck.recover import ObjectFetcher, Salvage, new_packs
from cas_ckpt.ops.fsck.report import Findings, RepairKind, RepairLog, RepairRequest
from cas_ckpt.ops.fsck.structure import Structure, checked_structure
from cas_ckpt.progress import Progress
from cas_ckpt.storage.store import Store, exists
from cas_ckpt.transfer.pack_writer import PackSink

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
        self._log.did(RepairKind.PACKS, GC_STATE_KEY, what)

    # --- chunks ---------------------------------------------------------------------------

    def _bring_lost(self) -> set[bytes]:
        """Bring what is nowhere whole, if asked to; what was brought (or, in a dry run, could be)."""
        lost = self._lost() if RepairKind.CHUNKS in self._kinds else set()
        if not lost:
            return set()
        finder = self._finder
        with nullcontext() if self._log.dry_run else self._new_packs() as sink:
            fetcher = ObjectFetcher(self._sources, sink, finder.incomplete, self._records.forgotten)
            fetcher.fetch(lost)
        if fetcher.found:
            places = ", ".join(source.store.url for source in self._sources)
            self._log.did(RepairKind.CHUNKS, self._store.url, f"{len(fetcher.found)} objects from {places}")
        not_found = fetcher.not_found - set(finder.integrity.digests(finder.promised).values())
        if not_found and finder.is_needed(not_found):
            shown = ", ".join(digest.hex()[:12] for digest in sorted(not_found)[:_MOST_NAMED])
            self._log.leave(
                RepairKind.CHUNKS, self._store.url,
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
            self._log.did(RepairKind.PACKS, pack, "what is intact in it is in new packs, itself in damaged/")

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
        ConflictError: somebody else goes on with it. StorageError: a pack cannot be deleted.
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
