"""gc: condemn, fence, rescue, delete (docs/gc.md has the story and its proof).

    g1  list the packs                                   BEFORE the refs
    g2  read refs, their logs, pins, forgotten commits; find what is dead. Of what was forgotten and is whole here,
        tiers are asked whether they have it: what they lack stays for this time
    g3  choose packs: dead ones, and sparse and small ones, whose needed part is copied first: verified, put together
        where a chunk's leaves are in several extents, and left out where another pack has it intact
    g4  swap gc/state: idle g -> condemned g+1           writers that ask from now on avoid these packs
    g5  FENCE: swap every ref of generation <= g to g+1  a commit that began before g4 cannot land any more
    g6  RESCUE: keep the packs that those heads need
    g7  swap gc/state: condemned -> deleting, what is left
    g8  delete; swap gc/state -> idle

Invariant: a pack is deleted only if it was listed before the refs were read, was condemned before
every ref was fenced, and no head that the fence saw needs it. Any error on the way ends the
collection with nothing deleted that was not decided; the next collection takes over where it
stopped. Its safety needs no clock; it waits for no process, and none waits for it. Damage
never spreads: a pack with a damaged entry that is needed is left alone, complete, for repair. Copies that a collection
left behind when it died are found superfluous by the next.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Collection as Some
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from cas_ckpt import clock
from cas_ckpt.arguments import Buffer
from cas_ckpt.core.forgotten import merge_forgotten, read_forgotten_leniently, sweep_released, write_released
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.live import (
    LiveSets,
    all_refs,
    graph_with,
    live_sets,
    not_at_tiers,
    read_graph,
    released_by_expiry,
    whole_commits,
)
from cas_ckpt.core.packs import pack_batches, read_copy, read_nodes
from cas_ckpt.core.protocol import (
    GcPhase,
    GcState,
    elsewhere_since_s,
    live_sessions,
    read_gc_state,
    require_current,
    require_not_older,
    swap_gc_state,
    sweep_sessions,
)
from cas_ckpt.core.refs import Generation, Move, Ref, RefKind, default_author
from cas_ckpt.core.settings import read_settings
from cas_ckpt.errors import (
    ConflictError,
    CorruptionError,
    NotFoundError,
    OutOfSpaceError,
    PermissionDeniedError,
    StorageError,
    UnsupportedVersionError,
)
from cas_ckpt.index import contents, garbage
from cas_ckpt.index.garbage import Living
from cas_ckpt.index.rows import batches
from cas_ckpt.objects import codec
from cas_ckpt.objects.digest import MOST_NAMED, Digest, ObjectKind, short
from cas_ckpt.objects.nodes import Node
from cas_ckpt.objects.pack import PACK_PREFIX, ExtentInfo, Location
from cas_ckpt.ops.gc.plan import GcOptions, GcPlan, GcReport, choose_packs, foreseen, rewritten
from cas_ckpt.parallel.workers import map_all, run_all
from cas_ckpt.progress import SILENT, Progress
from cas_ckpt.storage.probe import sweep_probes
from cas_ckpt.storage.store import Leftovers, delete_many, sweep_temporaries
from cas_ckpt.transfer.arrivals import chunk_spans
from cas_ckpt.transfer.chunk_reader import ChunkReader
from cas_ckpt.transfer.pack_writer import EncodedChunk, PackSink
from cas_ckpt.transfer.sources import SpanMemory, Unit, Wanted, limits_of, longest_bytes, plan_units, requests_at_once

OVERTAKEN = "another garbage collection is at work and goes on: nothing is left to do here"

PACKS_PER_DELETE = 1000
"""Packs that are deleted by one call of the store."""

TURNS = 1000
"""Times that a shard goes on after it met the collection of another: as many as there may be others, and more."""

LOOKS = 3
"""Times that something needed may be missing, each after a new listing, before it is called damage."""


def collect_garbage(
    handle: RepositoryHandle, options: GcOptions | None = None, *, dry_run: bool = False, progress: Progress = SILENT
) -> GcReport:
    """Delete what nothing needs. Any number of writers and readers may be at work meanwhile.

    Raises:
        CorruptionError: something that is needed is missing or damaged: nothing was deleted.
        ConflictError: another collection is at work, and goes on with it.
        PermissionDeniedError, StorageError: the medium refused; the next collection takes over. Where packs may not be
            deleted and all else is allowed (an append-only bucket), the report says so instead.
    """
    if not dry_run:
        handle.require_writable()
    return Collection(handle, options or GcOptions(), progress=progress, dry_run=dry_run).run()


class Collection:
    """One collection, step by step. Every step is one method, so that tests can break it."""

    def __init__(
        self, handle: RepositoryHandle, options: GcOptions, *, progress: Progress = SILENT, dry_run: bool = False
    ) -> None:
        self.handle = handle
        self.options = options
        self.progress = progress
        self.dry_run = dry_run
        self.report = GcReport(0, dry_run)
        self.copied: Sequence[str] = ()  # packs of which all that is needed is stored elsewhere now
        self._now_us = int(clock.now_s() * 1e6)
        self._seen = GcState()
        self._expired: dict[tuple[RefKind, str], set[Move]] = {}
        self._released: set[Digest] = set()
        self._deleted: set[str] = set()

    def run(self) -> GcReport:
        """Finish what an earlier collection left, then collect."""
        shard = self.options.shard
        for left in reversed(range(TURNS if shard is not None else 1)):
            try:
                return self._run()
            except PermissionDeniedError:
                if not self.report.denied:
                    raise
                return self.report
            except ConflictError:  # of a shard: those of others collect beside it; each helps those that it meets
                if not left:
                    raise
        raise ConflictError(OVERTAKEN)

    def _run(self) -> GcReport:
        state = self._seen = read_gc_state(self.handle.store)
        require_not_older(self.handle.store, state, self.handle.index.generation)
        if state.phase != GcPhase.IDLE and not self.dry_run:
            self._note(took_over=state.phase.value)
            self.handle.sync()
            state = self.take_over(state)
        return self.collect(state)

    def take_over(self, state: GcState) -> GcState:
        """Finish the collection that left `state`: from the fence on, or its deletions.

        No entry of a log goes with it, as it is not written down yet what that would release.
        """
        self._expired, self._released = {}, set()
        if state.phase == GcPhase.CONDEMNED:
            state = self.rescue(state, self.fence(state))
        return self.delete(state)

    def collect(self, state: GcState) -> GcReport:
        """One whole cycle from `state`, which is idle (or, in a dry run, whatever it is)."""
        present = self.list_packs()
        sets = self.mark()
        with self._liveness(sets) as living:
            garbage = living.summary()
            plan = self.choose(living, present)
            self._note(
                generation=state.generation.number, dead_objects=garbage.num_objects, dead_bytes=garbage.stored_bytes,
                young_packs=len(plan.young), wasted_bytes=plan.wasted_bytes, unmerged_packs=len(plan.unmerged),
                unmerged_bytes=sum(pack.size_bytes for pack in plan.unmerged),
            )  # fmt: skip
            if self.dry_run:
                return foreseen(self.report, plan, self.sweep_leftovers())
            self.copy_needed(living, plan)
        state = self.take_away(state, plan, present, sets)
        self.tidy()
        self._note(generation=state.generation.number)
        return self.report

    def take_away(self, state: GcState, plan: GcPlan, present: Some[str], sets: LiveSets) -> GcState:
        """g4 to g8 for what nothing needs of the plan.

        A shard that meets the collection of another one goes back to g1: it finishes that one, lists and marks anew,
        and tries again with what it has copied already, as far as that is still right.
        """
        again = False
        for left in reversed(range(TURNS if self.options.shard is not None else 1)):
            try:
                if again:
                    state = self._seen = read_gc_state(self.handle.store)
                    if state.phase != GcPhase.IDLE:  # whatever is under way is finished
                        self.handle.sync()
                        state = self.take_over(state)
                    present, sets = self.list_packs(), self.mark()
                condemned = self.condemnable(plan, present, sets)
                if not condemned:
                    return state
                if self._released:  # before the fence takes them out of logs
                    write_released(self.handle.store, self._released)
                state = self.condemn(state, condemned)
                state = self.rescue(state, self.fence(state))
                try:
                    return self.delete(state)
                finally:
                    self.report = rewritten(self.report, plan, self._deleted)
            except ConflictError:
                if not left:
                    raise
            again = True
        raise ConflictError(OVERTAKEN)

    def _note(self, **found: Any) -> None:
        self.report = replace(self.report, **found)

    # --- g1 to g3: nothing is changed but for copies --------------------------------------

    def list_packs(self) -> dict[str, int]:
        """g1, and again after the fence: every pack of the store, all of them known to the index.

        Raises:
            CorruptionError: a pack cannot be read, so it is not known what it needs.
            UnsupportedVersionError: likewise, for it was written by a later version.
        """
        self.handle.sync()
        if self.handle.damaged:
            key, why = next(iter(self.handle.damaged.items()))
            raise CorruptionError(
                f"{len(self.handle.damaged)} packs cannot be read, such as {key}: {why}. Nothing is collected before "
                "that is mended: run repo.fsck()"
            )
        newer = self.handle.index.newer_pack
        if newer is not None:
            raise UnsupportedVersionError(
                f"{newer} holds objects of a later version, and what they need is not known: upgrade cas_ckpt, run "
                "repo.rebuild_index(), then collect"
            )
        return self.handle.present_packs()

    def mark(self) -> LiveSets:
        """g2: what the refs, their logs and pins keep."""
        expired_us = self._now_us - int(self.options.reflog_expire_s * 1e6)
        refs = self.read_refs()
        if self.dry_run:
            self._seen = read_gc_state(self.handle.store)  # after the refs: others may go on beside a dry run
        for ref in refs:
            self._require_known(ref, self._seen)
        self.handle.note_refs(refs)
        if not self.dry_run:
            named = {ref.key for ref in refs if ref.target is not None}
            self.handle.refs.announce(named - self.handle.refs.announced())
        self._expired = {(ref.kind, ref.name): {move for move in ref.log if move.time_us < expired_us} for ref in refs}
        try:
            sets = self._without_what_tiers_lack(refs, expired_us)
            if any(self._expired.values()):
                self._released = released_by_expiry(self.handle, refs, sets, expired_us)
            return sets
        except CorruptionError:
            self._require_alone()  # else it is not damage, but what the other one moved between two pages of a listing
            raise

    def _without_what_tiers_lack(self, refs: Sequence[Ref], expired_us: int) -> LiveSets:
        """The live sets, plus forgotten commits that a tier is to have and lacks: their last copy would go.

        `forget` asked the tiers when it wrote down what it gave up, which may be long ago.
        """
        sets = live_sets(self.handle, refs=refs, expire_before_us=expired_us, keep_orphans=True)
        if not sets.forgotten or not read_settings(self.handle.store).tiers:
            return sets
        graph = read_graph(self.handle)
        going = [Digest(one) for one in sets.forgotten if graph.commits[one].root not in sets.roots]
        lacking = not_at_tiers(self.handle, refs, whole_commits(self.handle, graph, going))
        if not lacking:
            return sets
        self._note(not_at_tiers=tuple((commit.hex(), why) for commit, why in sorted(lacking.items())))
        gone = read_forgotten_leniently(self.handle.store) - lacking.keys()
        return live_sets(self.handle, refs=refs, forgotten=gone, expire_before_us=expired_us, keep_orphans=True)

    def read_refs(self) -> Sequence[Ref]:
        """Every ref: placeholders and deleted ones too.

        Raises:
            CorruptionError: one is damaged, or lost.
        """
        return all_refs(self.handle)

    @contextmanager
    def _liveness(self, sets: LiveSets) -> Iterator[Living]:
        """Liveness of `sets` by the index.

        Chunks that a remote promised may be absent: nothing follows from one, as it refers to nothing.

        Raises:
            CorruptionError: something else that is needed is in no pack. What it refers to is not known then, or it
                is damage; either way nothing may be concluded. ConflictError: another collection moved it meanwhile.
        """
        for _ in range(LOOKS):
            with garbage.living(
                self.handle.index, commits=sets.commits, roots=sets.roots, published=sets.published
            ) as living:
                missing = living.missing(1)
                if missing and sets.promised:
                    missing = living.missing(1, promised=sets.promised)
                if not missing:
                    yield living
                    return
            self._require_alone()
            self.list_packs()  # an index that is being rebuilt, or a listing that another collection changed
        raise CorruptionError(
            f"object {short(missing[0])}, which a live commit needs, is in no pack, and no remote promised it. Nothing "
            f"is collected before that is mended: run repo.fsck(), then repair it{self._repair()} or forget the commit"
        )

    def _repair(self) -> str:
        """How what is lost here comes back from a tier, for a message; empty: there is none, as far as is known."""
        try:
            tiers = read_settings(self.handle.store).tiers
        except (CorruptionError, UnsupportedVersionError):
            return ""
        return f' (repo.repair("chunks", sources=["{tiers[0].url}"]) takes it from {tiers[0].name})' if tiers else ""

    def _require_alone(self) -> None:
        """Raise ConflictError if another collection has changed gc/state since this one did, or read it."""
        if read_gc_state(self.handle.store).record != self._seen.record:
            raise ConflictError(OVERTAKEN)

    def choose(self, living: Living, present: dict[str, int]) -> GcPlan:
        """g3: the packs that are to go."""
        return choose_packs(
            living.packs(), present, options=self.options, now_us=self._now_us,
            writers_at_work=bool(live_sessions(self.handle.store)), pack_bytes=self.handle.config.pack_bytes,
            in_parts=self.handle.index.read(contents.packs_in_parts) if self.options.whole_chunks else (),
            local=self.handle.store.abilities.local,
        )  # fmt: skip

    def copy_needed(self, living: Living, plan: GcPlan) -> None:
        """Copy what is needed of the sparse and small packs, durably. A full disk ends it, not the collection."""
        if not plan.copied:
            return
        self.progress.start("copying", sum(pack.copied_bytes for pack in plan.copied))
        try:
            copies = Repacker(self.handle, living, self.progress).copy([pack.name for pack in plan.copied])
            self.copied = copies.packs
            self._note(
                copied_packs=len(copies.packs), copied_bytes=copies.num_bytes,
                damaged=tuple(sorted(copies.damaged.items())),
            )  # fmt: skip
        except OutOfSpaceError:
            self._note(full=True)
        finally:
            self.progress.finish()

    def condemnable(self, plan: GcPlan, present: Some[str], sets: LiveSets) -> tuple[str, ...]:
        """The packs of the plan that nothing in `sets` needs, now that the copies are there.

        No more than a record names: the next collection takes the others.
        """
        wanted = {pack.name for pack in plan.dead}.union(self.copied).intersection(present)
        if not wanted:
            return ()
        if self.copied:
            self.list_packs()
        return tuple(sorted(wanted - self.needed(wanted, sets))[:MOST_NAMED])

    # --- g4 to g8 -------------------------------------------------------------------------

    def condemn(self, state: GcState, packs: Sequence[str]) -> GcState:
        """g4: from now on no writer relies on `packs`.

        Raises:
            ConflictError: another collection began meanwhile.
        """
        return self.swap(state, generation=state.generation.next(), phase=GcPhase.CONDEMNED, condemned=packs)

    def swap(self, state: GcState, *, generation: Generation, phase: GcPhase, condemned: Sequence[str]) -> GcState:
        """Change gc/state, unless another process did."""
        try:
            self._seen = swap_gc_state(
                self.handle.store, state, generation=generation, phase=phase, condemned=condemned
            )
        except ConflictError as error:
            raise ConflictError(OVERTAKEN) from error
        return self._seen

    def fence(self, state: GcState) -> list[Ref]:
        """g5: bring every ref to the new generation; the refs as they were seen then.

        A writer that read its ref before the fence, and gc/state before g4, cannot swap that ref any more. Each ref is
        swapped by itself, in no order, as many at once as the store answers.
        """
        return map_all(
            lambda ref: self.fence_ref(ref, state), self.read_refs(), num_threads=self.handle.num_requests
        )  # fmt: skip

    def fence_ref(self, ref: Ref, state: GcState) -> Ref:
        """Swap one ref to the generation of `state`; again after each conflict.

        Out of its log go the entries that g2 found expired, and no others: an entry that was made since keeps what
        it names, whatever the clock of its writer says.
        """
        expired = self._expired.get((ref.kind, ref.name), set())
        while True:
            self._require_known(ref, state)
            if ref.generation == state.generation and expired.isdisjoint(ref.log):
                return ref
            kept = tuple(move for move in ref.log if move not in expired)
            try:
                return self.handle.refs.fence(ref, generation=state.generation, log=kept)
            except ConflictError:
                ref = self.handle.refs.get(ref.kind, ref.name)

    def _require_known(self, ref: Ref, state: GcState) -> None:
        """Raise if `ref` is of a generation that `state` cannot know.

        Raises:
            ConflictError: another collection goes on. CorruptionError: gc/state was put back from an older copy.
        """
        try:
            require_current(state, ref.generation, key=ref.key)
        except CorruptionError:
            self._require_alone()
            raise

    def rescue(self, state: GcState, heads: Sequence[Ref]) -> GcState:
        """g6 and g7: what the fenced heads need is kept; the rest is going to be deleted.

        Raises:
            CorruptionError: it is not known what they need; gc/state stays as it is.
        """
        self.list_packs()
        needed = self.needed(state.condemned, live_sets(self.handle, refs=heads, keep_orphans=True))
        self._note(rescued_packs=self.report.rescued_packs + len(needed))
        rest = [pack for pack in state.condemned if pack not in needed]
        return self.swap(state, generation=state.generation, phase=GcPhase.DELETING, condemned=rest)

    def needed(self, condemned: Iterable[str], sets: LiveSets) -> set[str]:
        """Those of `condemned` that hold something which `sets` need and no other pack has.

        A pack that the index knows and the last listing did not show never counts as another one: another
        process may have added it after it was deleted. A pack that the index does not know is needed.
        """
        wanted = set(condemned)
        with self._liveness(sets) as living:
            known = living.pack_names()
            unseen = known - self.handle.present_packs().keys()
            return (living.needed((wanted & known) | unseen) & wanted) | (wanted - known)

    def delete(self, state: GcState) -> GcState:
        """g8: delete the condemned packs, all of them again if it was begun before.

        Raises:
            PermissionDeniedError: some may not be deleted; the report says how many. They are not relied on any more,
                and gc/state stays "deleting", so that they are deleted once that is allowed.
            StorageError: a pack is still there afterwards; gc/state stays "deleting".
        """
        present = self.handle.present_packs()
        self.progress.start("deleting", sum(present.get(pack, 0) for pack in state.condemned))
        denied: PermissionDeniedError | None = None
        try:
            for packs in batches(state.condemned, PACKS_PER_DELETE):
                try:
                    delete_many(self.handle.store, packs)
                except PermissionDeniedError as error:
                    denied = error  # it may be of these alone
                    continue
                sizes = {pack: present[pack] for pack in packs if pack in present}
                num_bytes = sum(sizes.values())
                self._deleted |= sizes.keys()
                self._note(
                    deleted_packs=self.report.deleted_packs + len(sizes),
                    deleted_bytes=self.report.deleted_bytes + num_bytes,
                )
                self.progress.advance(num_bytes)
            if denied is not None:
                condemned = set(state.condemned)
                left = {key: size for key, size in self.handle.store.list(PACK_PREFIX) if key in condemned}
                self._note(
                    generation=state.generation.number, denied=str(denied), denied_packs=len(left),
                    denied_bytes=sum(left.values()),
                )  # fmt: skip
                raise denied
            self.require_gone(state.condemned)
        finally:
            self.progress.finish()
        self.handle.index.drop_packs(state.condemned)
        self.handle.index.set_generation(state.generation.number)
        self.handle.forget_chunks()
        return self.swap(state, generation=state.generation, phase=GcPhase.IDLE, condemned=())

    def require_gone(self, packs: Iterable[str]) -> None:
        """Check that packs are gone that were deleted: a writer may rely on nothing less.

        Raises:
            StorageError: some are listed still.
        """
        stored = {key for key, _ in self.handle.store.list(PACK_PREFIX)}
        left = [pack for pack in packs if pack in stored]
        if left:
            raise StorageError(
                f"{left[0]} is still there after it was deleted ({len(left)} packs are): allow deletion in "
                f"{self.handle.store.url}, then collect again"
            )

    # --- afterwards -----------------------------------------------------------------------

    def tidy(self) -> None:
        """Merge records of forgotten commits; drop announcements of dead sessions, and what the killed left behind."""
        merge_forgotten(self.handle.store, known=self._commits_there, author=default_author())
        sweep_released(self.handle.store, known=self._commits_there, led_to=self._commits_led_to)
        sweep_sessions(self.handle.store)
        if self.handle.store.abilities.local:  # elsewhere each look is a request
            sweep_probes(self.handle.store)
        leftovers = self.sweep_leftovers()
        self._note(temporaries=leftovers.num_files, temporary_bytes=leftovers.num_bytes)

    def sweep_leftovers(self) -> Leftovers:
        """Remove unfinished files as old as young packs, and older than any session of another machine.

        A writer of this machine holds a lock on its file as long as it lives, so that its file stays whatever its age.
        """
        before_s, since_s = self._now_us / 1e6 - self.options.min_age_s, elsewhere_since_s(self.handle.store)
        before_s = before_s if since_s is None else min(before_s, since_s)
        return sweep_temporaries(self.handle.store, before_s, dry_run=self.dry_run)

    def _commits_led_to(self) -> Some[bytes]:
        """Every commit that a ref leads to now."""
        heads = [ref.target for ref in self.read_refs() if ref.target is not None]
        return graph_with(self.handle, heads).reached(heads)

    def _commits_there(self) -> Some[bytes]:
        """Every commit of the store, one that was made and forgotten since g2 too."""
        self.handle.sync()
        return read_graph(self.handle).commits.keys()


# --- copies of what is needed -----------------------------------------------------------------------


_LOGGER = logging.getLogger("cas_ckpt")


@dataclass(slots=True)
class Copies:
    """Result of copying.

    Attributes:
        packs: Packs of which everything that is needed is stored elsewhere now.
        num_bytes: Stored bytes that were written.
        damaged: Pack -> what is wrong with it; these stay.
    """

    packs: list[str] = field(default_factory=list)
    num_bytes: int = 0
    damaged: dict[str, str] = field(default_factory=dict)


class Repacker:
    """Copies the needed extents of packs into new packs. Called by one thread."""

    def __init__(self, handle: RepositoryHandle, living: Living, progress: Progress) -> None:
        self._handle = handle
        self._living = living
        self._progress = progress
        self._sink = PackSink(handle.store, pack_bytes=handle.config.pack_bytes)
        self._leaving: frozenset[str] = frozenset()
        self._done: set[bytes] = set()
        self._copies = Copies()

    def copy(self, packs: Sequence[str]) -> Copies:
        """Copy what is needed of `packs` and has no intact copy in others; all copies are durable when it returns.

        Raises:
            OutOfSpaceError, StorageError: nothing of what was begun may be relied on.
        """
        self._leaving = frozenset(packs)
        try:
            present = self._handle.present_packs()
            for batch in pack_batches((pack, present.get(pack, 0)) for pack in packs):
                # The index is asked once for all of a batch.
                entries = self._living.live_entries([pack for pack, _ in batch])
                wanted = [extent.digest for extents in entries.values() for extent in extents]
                try:
                    located = self._handle.locate(wanted, here=True)
                except (CorruptionError, NotFoundError):
                    located = None  # one of them has lost something: each is asked for by itself, and that one stays
                for pack, _ in batch:
                    self._copy_pack(pack, entries[pack], located)
            self._copies.num_bytes = sum(pack.size_bytes for pack in self._sink.finish())
        except BaseException:
            self._sink.abort()
            raise
        return self._copies

    def _copy_pack(
        self, pack: str, extents: Sequence[ExtentInfo], located: Mapping[bytes, Sequence[Location]] | None
    ) -> None:
        try:
            if located is None:
                located = self._handle.locate([extent.digest for extent in extents], here=True)
            nodes = [extent for extent in extents if extent.kind != ObjectKind.CHUNK]
            by_kind: dict[ObjectKind, list[Digest]] = {}
            for node in nodes:
                if not self._is_kept_node(node, located[node.digest]):
                    by_kind.setdefault(ObjectKind(node.kind), []).append(node.digest)
            for kind, digests in by_kind.items():
                for digest, data in read_nodes(_Located(self._handle, located), kind, digests).items():
                    self._sink.add_node(Node(kind, digest, data))
            self._done.update(node.digest for node in nodes)
            chunks = {extent.digest: extent for extent in extents if extent.kind == ObjectKind.CHUNK}
            left = [chunk for chunk in chunks.values() if chunk.digest not in self._done]
            self._progress.advance(sum(map(_num_bytes, extents)) - sum(map(_num_bytes, left)))
            self._copy_chunks(left, located)
        except (CorruptionError, NotFoundError) as error:
            _LOGGER.warning("%s is left as it is: %s", pack, error)
            self._copies.damaged[pack] = str(error)
            return
        self._copies.packs.append(pack)

    def _is_kept_node(self, extent: ExtentInfo, places: Sequence[Location]) -> bool:
        """Whether the node is stored, intact, in a pack that stays, or was copied into one."""
        if extent.digest in self._done:
            return True
        staying = self._staying(places)
        try:
            if staying:
                read_copy(self._handle.store, ObjectKind(extent.kind), extent.digest, staying)
        except (CorruptionError, NotFoundError):
            return False  # damaged: the twin that is to go may be the last one
        return bool(staying)

    def _staying(self, places: Sequence[Location]) -> list[Location]:
        """The places in packs that stay."""
        return [place for place in places if place.pack not in self._leaving]

    def _copy_chunks(self, chunks: Sequence[ExtentInfo], located: Mapping[bytes, Sequence[Location]]) -> None:
        """Copy those chunks that have no intact copy in packs that stay; over a network many are read at once."""
        store = self._handle.store
        units: list[Unit[ExtentInfo]] = [Unit((), (chunk,)) for chunk in chunks]
        if not store.abilities.local:
            spans = (
                chunk_spans(self._staying(located[chunk.digest]) or located[chunk.digest], chunk.num_bytes)
                for chunk in chunks
            )
            units = plan_units(map(Wanted, chunks, spans), limits_of(store))

        def make_worker() -> Callable[[Unit[ExtentInfo]], None]:
            memory = SpanMemory(store)
            reader = ChunkReader(memory)

            def work(unit: Unit[ExtentInfo]) -> None:
                with suppress(CorruptionError, NotFoundError):  # of which chunk it is, its own reading says
                    memory.load(unit.spans)
                for chunk in unit.items:
                    places = located[chunk.digest]
                    if not _is_intact(reader, chunk, self._staying(places)):
                        self._copy_chunk(reader, chunk, places)
                    self._done.add(chunk.digest)
                    self._progress.advance(_num_bytes(chunk))

            return work

        run_all(units, make_worker, num_threads=requests_at_once(store, longest_bytes(units)))

    def _copy_chunk(self, reader: ChunkReader, extent: ExtentInfo, places: Sequence[Location]) -> None:
        payloads: list[Buffer] = []
        extents = reader.intact(
            extent.digest, places, extent.num_bytes, lambda found: payloads.append(reader.payload(found))
        )
        first = extents[0]
        if len(extents) == 1:
            payload, encoding = payloads[0], first.info.encoding
        else:
            plain = memoryview(bytearray(extent.num_bytes))
            reader.read(extents, plain)
            encoded = codec.encode_extent(plain, policy="raw", item_bytes=1)
            payload, encoding = encoded.payload, encoded.encoding
        self._sink.add_chunk(
            EncodedChunk(extent.digest, extent.num_bytes, first.info.leaf_bytes, first.digests, encoding, payload)
        )


def _num_bytes(extent: ExtentInfo) -> int:
    return extent.header_bytes + extent.stored_bytes


def _is_intact(reader: ChunkReader, chunk: ExtentInfo, staying: Sequence[Location]) -> bool:
    try:
        if staying:
            reader.verify(chunk.digest, staying, chunk.num_bytes)
    except (CorruptionError, NotFoundError):
        return False  # incomplete, or damaged: the twin that is to go may be the last one
    return bool(staying)


class _Located:
    """Where objects are, asked for all of a batch together."""

    def __init__(self, handle: RepositoryHandle, located: Mapping[bytes, Sequence[Location]]) -> None:
        self.store = self.cached_store = handle.store  # what is copied is what is stored
        self.num_requests = handle.num_requests
        self._handle = handle
        self._located = located

    def locate(self, digests: Iterable[Digest], *, here: bool = False) -> Mapping[bytes, Sequence[Location]]:
        """The places that are known."""
        return self._located

    def relocate(self, digest: Digest, tried: Some[str]) -> Sequence[Location]:
        """Where it is stored now that one of the packs `tried` is gone."""
        return self._handle.relocate(digest, tried, here=True)
