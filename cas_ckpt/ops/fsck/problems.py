"""From damaged places to problems: what each of them costs, whom it hits, and what repairs it.

Invariant: damage is reported once, at the pack where it is; what is in no pack at all is one problem of
its own. An object with another intact copy is not lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from cas_ckpt.core.live import LOOKS
from cas_ckpt.index import history
from cas_ckpt.index.index import Index
from cas_ckpt.index.integrity import IntegrityView, Unusable
from cas_ckpt.objects.digest import short
from cas_ckpt.objects.graph import CommitGraph
from cas_ckpt.objects.pack import PACK_PREFIX
from cas_ckpt.ops.fsck.impact import Impact, ImpactFinder, LiveCommits, live_commits
from cas_ckpt.ops.fsck.records import Records, reread_names
from cas_ckpt.ops.fsck.report import FROM_OTHER, Effect, Findings, Problem, ProblemKind, RepairKind
from cas_ckpt.ops.fsck.structure import Structure, catch_up
from cas_ckpt.storage.store import Store

_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class Missing:
    """Objects that are needed and are in no pack: by number, and those that the index has no number for."""

    numbers: frozenset[int]
    unknown: frozenset[bytes]


class ProblemFinder:
    """Finds the problems of one structure.

    Attributes:
        gone: Packs that nothing may rely on: those that are not there any more, and those to be left out.
    """

    def __init__(
        self, store: Store, structure: Structure, index: Index, records: Records, *, without: Iterable[str] = ()
    ) -> None:
        self._store = store
        self._index = index
        self._structure = structure
        self._without = frozenset(without)
        catch_up(store, structure, index)
        # One for all looks: its answers end when the index is made anew, whose numbers mean other objects.
        self.sound = IntegrityView(index)
        self._look(records)

    def _look(self, records: Records) -> None:
        """See what is live and which packs are gone; the packs were listed after `records`, so that all is there."""
        structure = self._structure
        self._records = records
        self.live: LiveCommits = live_commits(CommitGraph(self._index.read(history.read_links)), records)
        self._impact = ImpactFinder(self._store, self._index, self.sound, self.live)
        self.gone = self._without.union(self._index.packs().keys() - structure.packs.keys())
        self._not_found = {key: self._entries_not_found(key) for key in structure.broken}
        unlisted = {key for key in structure.broken if not structure.is_listed(key)}
        damaged = {(key, extent.info.offset) for key, found in structure.bad.items() for extent in found}
        damaged.update((key, offset) for key, offsets in self._not_found.items() for offset in offsets)
        self._unusable = Unusable(self.gone, frozenset(damaged))
        self._unusable_after_rebuild = Unusable(self.gone | unlisted, frozenset(damaged))

    def _entries_not_found(self, key: str) -> dict[int, int]:
        """Offset -> object of entries that the index knows and that were not found in a broken pack."""
        found = {info.offset for info in self._structure.broken[key].entries}
        return {offset: number for offset, number in self.sound.places(key).items() if offset not in found}

    def add_problems(self, findings: Findings) -> None:
        """Add all problems to `findings`."""
        reported: set[int] = set()
        for key in self._structure.damaged:
            reported |= self._add_pack_problem(key, findings)
        self._add_missing_problem(reported, findings)

    # --- in packs -------------------------------------------------------------------------

    def lost_in(self, key: str) -> set[int]:
        """Objects that are damaged in this pack and have no other intact copy."""
        digests = {extent.info.digest for extent in self._structure.bad.get(key, ())}
        damaged = {*self.sound.numbers(digests).values(), *self._not_found.get(key, {}).values()}
        return self.sound.broken(damaged, self._unusable)

    def _at_risk_in(self, key: str) -> set[int]:
        """Objects that only this pack holds, if a new index would not find them in it."""
        if self._structure.is_listed(key):
            return set()
        return self.sound.broken(self.sound.in_packs({key}), self._unusable_after_rebuild)

    def _add_pack_problem(self, key: str, findings: Findings) -> set[int]:
        """Add what is wrong with one pack; the objects that are lost with it."""
        lost = self.lost_in(key)
        needed = lost | self._at_risk_in(key)
        impact = self._impact.impact(needed)
        lost_hits = impact.hits if lost == needed else self._impact.impact(lost).hits
        effect = Effect.LOST if lost and lost_hits else Effect.AT_RISK if impact.hits else Effect.HARMLESS
        from_other = findings.command(RepairKind.CHUNKS, FROM_OTHER)
        repair = from_other if effect is Effect.LOST else findings.command(RepairKind.PACKS)
        broken = self._structure.broken.get(key)
        kind = ProblemKind.ENTRIES if broken is None else ProblemKind.PACK
        ids = tuple(sorted(digest.hex() for digest in self.sound.digests(lost).values()))
        what = self._damage_of(key)
        findings.problems.append(Problem(kind, key, what, effect, repair, ids, impact.hits, impact.refs))
        return lost

    def _damage_of(self, key: str) -> str:
        """What is wrong with one pack, in words."""
        broken, bad = self._structure.broken.get(key), self._structure.bad.get(key, ())
        parts = [broken.broken] if broken is not None and broken.broken else []
        parts += [extent.what for extent in bad[:_MOST_NAMED]]
        if len(bad) > _MOST_NAMED:
            parts.append(f"{len(bad) - _MOST_NAMED} more entries are damaged")
        if not_found := self._not_found.get(key):
            parts.append(f"{len(not_found)} of its entries cannot be found")
        return "; ".join(parts)

    # --- in no pack -----------------------------------------------------------------------

    def incomplete(self, digests: Iterable[bytes]) -> set[bytes]:
        """Those of the objects that no pack holds, whole and intact."""
        wanted = set(digests)
        numbers = self.sound.numbers(wanted)
        broken = self.sound.broken(numbers.values(), self._unusable)
        return {digest for digest in wanted if digest not in numbers or numbers[digest] in broken}

    def is_needed(self, digests: Collection[bytes]) -> bool:
        """Whether some live commit needs one of these objects."""
        numbers = self.sound.numbers(digests)
        return bool(self._impact.impact(set(numbers.values()), set(digests) - numbers.keys()).hits)

    def needed_missing(self, reported: Collection[int] = ()) -> set[bytes]:
        """Ids of all that is in no pack, if some live commit needs something of it."""
        missing = self._missing(reported)
        impact = self._impact.impact(set(missing.numbers), missing.unknown)
        return {bytes.fromhex(digest) for digest in impact.objects} if impact.hits else set()

    def _missing(self, reported: Collection[int]) -> Missing:
        """All that is in no pack, whole, although something names it; without what is reported already."""
        candidates = self.sound.referred_only() | self.sound.in_parts() | self.sound.in_packs(self.gone)
        numbers = self.sound.broken(candidates, self._unusable).difference(reported)
        unknown = {*self._impact.missing_roots(), *self.live.missing}
        known = self.sound.numbers(unknown)
        return Missing(frozenset(numbers), frozenset(digest for digest in unknown if known.get(digest) not in reported))

    def _add_missing_problem(self, reported: set[int], findings: Findings) -> None:
        impact = self._impact_of_missing(reported)
        for _ in range(LOOKS):
            if not impact.hits or not self._look_again():
                break
            impact = self._impact_of_missing(reported)
        if not impact.hits:
            return
        named = list(self.live.missing.items())[:_MOST_NAMED]
        names = "; ".join(f"commit {short(digest)}, which {who} names" for digest, who in named)
        what = f"{len(impact.objects)} objects that commits need are in no pack{': ' if names else ''}{names}"
        repair = findings.command(RepairKind.CHUNKS, FROM_OTHER)
        rest = (Effect.LOST, repair, impact.objects, impact.hits, impact.refs)
        findings.problems.append(Problem(ProblemKind.MISSING, PACK_PREFIX, what, *rest))

    def _impact_of_missing(self, reported: set[int]) -> Impact:
        missing = self._missing(reported)
        return self._impact.impact(set(missing.numbers), missing.unknown, excused=self.live.only_logged)

    def _look_again(self) -> bool:
        """Look again if names changed, for what is missing may have been forgotten and collected; whether they did."""
        now = reread_names(self._store, self._records)
        if (now.refs, now.forgotten) == (self._records.refs, self._records.forgotten):
            return False
        catch_up(self._store, self._structure, self._index)
        self._look(now)
        return True
