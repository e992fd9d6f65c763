"""repair of packs and chunks: what is lost is brought from elsewhere, what is damaged is taken out of use.

    1. read gc/state, before anything that it may change is looked at
    2. find the damage: structure, and the data of packs that the scrub log says are damaged
    3. end a collection that died, for it could not go on beside damage; where that fails (it is alive, or
       nothing can be deleted), lost objects are brought all the same, and none counts as here that stands
       in a condemned pack alone
    4. chunks: bring lost objects, by id, from the other repositories   (ops/fsck/repair_packs.py)
    5. packs: copy what is intact, move the damaged packs aside         (ops/fsck/repair_packs.py)

Invariant: as there. What could not be brought is told, and is brought by a later repair, or by the
next commit of the same state, which finds that the objects are not here and writes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from cas_ckpt.core.config import Config
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.packs import read_directory
from cas_ckpt.core.protocol import CONDEMNED, GC_STATE_KEY, IDLE, GcState, read_gc_state
from cas_ckpt.errors import CkptError, NotFoundError
from cas_ckpt.index import integrity
from cas_ckpt.index.index import Index
from cas_ckpt.index.integrity import Unusable
from cas_ckpt.objects.pack import ExtentInfo
from cas_ckpt.ops.fsck.data import DataOptions, read_data
from cas_ckpt.ops.fsck.problems import Judge, drop_vanished
from cas_ckpt.ops.fsck.records import Records
from cas_ckpt.ops.fsck.repair_packs import ObjectFetcher, PackSink, Salvage, add_verified, end_cycle, retire, set_aside
from cas_ckpt.ops.fsck.report import Findings, RepairKind, RepairLog
from cas_ckpt.ops.fsck.structure import Structure, checked_structure
from cas_ckpt.progress import Progress
from cas_ckpt.storage.store import Store

_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class DataRepair:
    """What is asked for.

    Attributes:
        kinds: `packs`, `chunks` or both; `chunks` takes damaged packs out of use as well.
        sources: Repositories to fetch from.
        read_all: Read every pack, not only those that the scrub log knows to be damaged.
    """

    kinds: Collection[RepairKind]
    sources: Sequence[RepositoryHandle] = ()
    read_all: bool = False


def repair_data(
    store: Store, index: Index | None, config: Config, records: Records, wanted: DataRepair, log: RepairLog, *,
    progress: Progress,
) -> None:  # fmt: skip
    """Repair packs and chunks.

    Raises:
        ConflictError: a garbage collection went on meanwhile: repair again.
        CorruptionError: gc/state is damaged: repair that first.
    """
    state = read_gc_state(store)
    findings = Findings(store)
    with checked_structure(store, index, findings, progress=progress) as structure:
        _read_suspects(store, structure, findings, wanted, progress)
        drop_vanished(store, structure)
        if structure.index is not None:
            _Healer(store, structure, structure.index, config, records, state, wanted, log).heal()


def _read_suspects(
    store: Store, structure: Structure, findings: Findings, wanted: DataRepair, progress: Progress
) -> None:
    """Read the packs that may hold damaged chunks: all of them, where no scrub log tells which."""
    everything = wanted.read_all or not structure.is_own or structure.index is None
    suspects = set(structure.packs)
    if not everything and structure.index is not None:
        damaged = {
            key for key, scrub in structure.index.read(integrity.read_scrubs).items() if scrub.damage is not None
        }
        suspects &= damaged | structure.broken.keys() | structure.bad.keys()
    part = replace(structure, packs={key: structure.packs[key] for key in sorted(suspects)})
    read_data(store, part, findings, DataOptions(), progress=progress)


class _Healer:
    """One repair of packs and chunks."""

    def __init__(
        self, store: Store, structure: Structure, index: Index, config: Config, records: Records,
        state: GcState, wanted: DataRepair, log: RepairLog,
    ) -> None:  # fmt: skip
        self._store = store
        self._structure = structure
        self._index = index
        self._config = config
        self._records = records
        self._wanted = wanted
        self._log = log
        self._state = state
        self._look(without=() if log.dry_run else state.condemned)

    def _look(self, *, without: Collection[str]) -> None:
        self._judge = Judge(self._store, self._structure, self._index, self._records, without=without)
        self._damaged = sorted(self._structure.broken.keys() | self._structure.bad.keys())

    def heal(self) -> None:
        """All of it."""
        try:
            self._end_collection()
        except CkptError:
            self._bring_lost()
            raise
        self._take_out_of_use(self._bring_lost())

    # --- the collection that was under way --------------------------------------------------

    def _end_collection(self) -> None:
        """End a collection, so that packs may be taken out of use; one that hinders nobody is left alone."""
        state = self._state
        if state.phase == IDLE:
            return
        if state.phase == CONDEMNED:
            if not self._damaged and not self._judge.needed_missing(()):
                return
            what = f"the collection is given up; its {len(state.condemned)} condemned packs stay for the next one"
        else:
            what = f"the collection is finished: {len(state.condemned)} condemned packs are deleted"
        if not self._log.dry_run:
            if state.phase != CONDEMNED:
                self._save_from(state.condemned)
            self._state = end_cycle(self._store, state)
            if state.phase != CONDEMNED:
                self._forget(state.condemned)
            self._look(without=())
        self._log.did(RepairKind.PACKS, GC_STATE_KEY, what)

    def _save_from(self, condemned: Sequence[str]) -> None:
        """Copy what stands whole in `condemned` alone, because the copy that was to stay was damaged since."""
        stay = (self._judge.gone | frozenset(self._damaged)).difference(condemned)
        wanted = self._only_in(stay)
        if wanted:
            self._copy(wanted, [pack for pack in condemned if pack in self._structure.packs])

    def _forget(self, deleted: Sequence[str]) -> None:
        for pack in deleted:
            for found in (self._structure.packs, self._structure.broken, self._structure.bad):
                found.pop(pack, None)
        self._index.drop_packs(deleted)

    # --- chunks ---------------------------------------------------------------------------

    def _bring_lost(self) -> set[bytes]:
        """Bring what is nowhere whole, if asked to; what was brought (or, in a dry run, could be)."""
        lost = self._lost() if RepairKind.CHUNKS in self._wanted.kinds else set()
        if not lost:
            return set()
        sink = None if self._log.dry_run else PackSink(self._store, self._config.pack_bytes)
        fetcher = ObjectFetcher(self._wanted.sources, sink, self._lacks, self._records.forgotten.__contains__)
        try:
            fetcher.fetch(lost)
            if sink is not None:
                add_verified(self._store, self._index, sink.finish())
        except BaseException:
            if sink is not None:
                sink.abort()
            raise
        self._tell_brought(fetcher)
        return fetcher.found

    def _lost(self) -> set[bytes]:
        numbers: set[int] = set()
        for pack in self._damaged:
            numbers |= self._judge.lost_in(pack)
        missing = self._judge.needed_missing(numbers)
        lost = set(self._judge.sound.digests(numbers).values()) | set(missing)
        # Of a damaged entry that the index does not know, the pack alone tells the id.
        bad = {extent.info.digest for found in self._structure.bad.values() for extent in found}
        return lost | (bad - self._judge.sound.numbers(bad).keys())

    def _lacks(self, digests: Iterable[bytes]) -> set[bytes]:
        """Those of `digests` that are not whole here."""
        wanted = set(digests)
        numbers = self._judge.sound.numbers(wanted)
        broken = self._judge.broken_now(numbers.values())
        return {digest for digest in wanted if digest not in numbers or numbers[digest] in broken}

    def _tell_brought(self, fetcher: ObjectFetcher) -> None:
        if fetcher.found:
            places = ", ".join(source.store.url for source in self._wanted.sources)
            self._log.did(RepairKind.CHUNKS, self._store.url, f"{len(fetcher.found)} objects from {places}")
        if fetcher.nowhere and self._judge.is_needed(fetcher.nowhere):
            shown = ", ".join(digest.hex()[:12] for digest in sorted(fetcher.nowhere)[:_MOST_NAMED])
            self._log.leave(
                RepairKind.CHUNKS, self._store.url,
                f"{len(fetcher.nowhere)} objects have no intact copy ({shown}): give another repository that holds "
                "them (--from), or commit the same state again",
            )  # fmt: skip

    # --- packs ----------------------------------------------------------------------------

    def _take_out_of_use(self, brought: set[bytes]) -> None:
        if not self._damaged:
            return
        wanted = self._only_here() - brought
        if not self._log.dry_run:
            self._copy(wanted, self._damaged)
            for pack in self._damaged:
                set_aside(self._store, pack, self._structure.packs[pack])
            retire(self._store, self._state, self._damaged)
            self._index.drop_packs(self._damaged)
        for pack in self._damaged:
            self._log.did(RepairKind.PACKS, pack, "what is intact in it is in new packs, itself in damaged/")

    def _only_here(self) -> set[bytes]:
        """Objects that the damaged packs hold something of and no other pack holds whole."""
        found = {info.digest for pack in self._damaged for info in self._entries(pack)}
        return self._only_in(self._damaged) | (found - self._judge.sound.numbers(found).keys())

    def _only_in(self, packs: Collection[str]) -> set[bytes]:
        """Objects that the index knows in `packs` and that no pack holds whole which may be relied on."""
        sound = self._judge.sound
        unusable = Unusable(frozenset(self._damaged) | self._judge.gone)
        return set(sound.digests(sound.broken(sound.in_packs(packs), unusable)).values())

    def _entries(self, pack: str) -> Sequence[ExtentInfo]:
        found = self._structure.entries(pack)
        return read_directory(self._store, pack)[2] if found is None else found

    def _copy(self, wanted: set[bytes], packs: Sequence[str]) -> None:
        sink = PackSink(self._store, self._config.pack_bytes)
        salvage = Salvage(self._store, sink, set(wanted))
        try:
            for pack in packs:
                with suppress(NotFoundError):  # a collector that is alive deleted it meanwhile
                    salvage.copy(pack, self._entries(pack))
            add_verified(self._store, self._index, sink.finish())
        except BaseException:
            sink.abort()
            raise
