"""From damaged places to problems: what each of them costs, whom it hits, and what repairs it.

Invariant: damage is told once, at the pack where it is; what is in no pack at all is one problem of
its own. An object with another intact copy is not lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cas_ckpt.core.live import LOOKS
from cas_ckpt.errors import NotFoundError
from cas_ckpt.index import history, integrity
from cas_ckpt.index.index import Index
from cas_ckpt.index.integrity import Soundness, Unusable
from cas_ckpt.objects.digest import short
from cas_ckpt.objects.pack import PACK_PREFIX
from cas_ckpt.ops.fsck.impact import Blast, LiveCommits, Radius, live_commits
from cas_ckpt.ops.fsck.records import Records, read_names
from cas_ckpt.ops.fsck.report import FROM_OTHER, Effect, Findings, Problem, ProblemKind, RepairKind
from cas_ckpt.ops.fsck.structure import Structure, is_pack, scan_packs
from cas_ckpt.storage.store import Store
from cas_ckpt.transfer.scan import BadExtent

_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class Missing:
    """Objects that are needed and stand in no pack: by number, and those that the index has no number for."""

    numbers: frozenset[int]
    unknown: frozenset[bytes]


class Judge:
    """Tells the problems of one structure.

    Attributes:
        gone: Packs that nothing may rely on: those that are there no more, and those that are to be left out.
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
        self.sound: Soundness = integrity.Soundness(index)
        self._look(records)

    def _look(self, records: Records) -> None:
        """See what is live and which packs are gone; the packs were listed after `records`, so that all is there."""
        index, structure = self._index, self._structure
        self._records = records
        self.live: LiveCommits = live_commits(index.read(history.read_links), records)
        self._blast = Blast(self._store, index, self.sound, self.live)
        self.gone = self._without.union(index.packs().keys() - structure.packs.keys())
        self._cut = {key: self._cut_away(key) for key in structure.broken}
        unlisted = {key for key, finding in structure.broken.items() if not finding.is_listed}
        damaged = {(key, extent.info.offset) for key, found in structure.bad.items() for extent in found}
        damaged.update((key, offset) for key, offsets in self._cut.items() for offset in offsets)
        self._now = Unusable(self.gone, frozenset(damaged))
        self._after_a_rebuild = Unusable(self.gone | unlisted, frozenset(damaged))

    def _cut_away(self, key: str) -> dict[int, int]:
        """Offset -> object of entries that the index knows and that were not found in a broken pack."""
        found = {info.offset for info in self._structure.broken[key].entries}
        places = self.sound.places(key)
        return {offset: number for offset, number in places.items() if offset not in found}

    def tell(self, findings: Findings) -> None:
        """Add all problems to `findings`."""
        told: set[int] = set()
        for key in sorted(self._structure.broken.keys() | self._structure.bad.keys()):
            told |= self._tell_pack(key, findings)
        self._tell_missing(told, findings)

    # --- packs ----------------------------------------------------------------------------

    def lost_in(self, key: str) -> set[int]:
        """Objects that are damaged in this pack and have no other intact copy."""
        digests = {extent.info.digest for extent in self._structure.bad.get(key, ())}
        suspects = set(self.sound.numbers(digests).values()) | set(self._cut.get(key, {}).values())
        return self.sound.broken(suspects, self._now)

    def at_risk_in(self, key: str) -> set[int]:
        """Objects that only this pack holds, if a new index would not find them in it."""
        if key not in self._structure.broken or self._structure.broken[key].is_listed:
            return set()
        return self.sound.broken(self.sound.in_packs({key}), self._after_a_rebuild)

    def _tell_pack(self, key: str, findings: Findings) -> set[int]:
        lost, at_risk = self.lost_in(key), self.at_risk_in(key)
        radius = self._blast.radius(lost | at_risk)
        really_lost = self._blast.radius(lost).hits if lost != lost | at_risk else radius.hits
        effect = Effect.LOST if lost and really_lost else Effect.AT_RISK if radius.hits else Effect.HARMLESS
        broken = self._structure.broken.get(key)
        bad = self._structure.bad.get(key, ())
        kind = ProblemKind.ENTRIES if broken is None else ProblemKind.PACK
        what = _described(None if broken is None else broken.broken, bad, len(self._cut.get(key, ())))
        findings.problems.append(
            Problem(kind, key, what, effect, self._repair(findings, effect), self._ids(lost), radius.hits, radius.refs)
        )
        return lost

    def _repair(self, findings: Findings, effect: Effect) -> str:
        if effect is Effect.LOST:
            return findings.command(RepairKind.CHUNKS, FROM_OTHER)
        return findings.command(RepairKind.PACKS)

    def _ids(self, numbers: set[int]) -> tuple[str, ...]:
        return tuple(sorted(digest.hex() for digest in self.sound.digests(numbers).values()))

    def broken_now(self, numbers: Iterable[int]) -> set[int]:
        """Those of the objects that are nowhere whole as things are."""
        return self.sound.broken(numbers, self._now)

    def needed_missing(self, told: Iterable[int]) -> set[bytes]:
        """Ids of all that is in no pack and that some live commit needs."""
        missing = self.missing(told)
        radius = self._blast.radius(set(missing.numbers), missing.unknown)
        return {bytes.fromhex(digest) for digest in radius.objects} if radius.hits else set()

    def is_needed(self, digests: Iterable[bytes]) -> bool:
        """Whether some live commit needs one of these objects."""
        wanted = set(digests)
        numbers = self.sound.numbers(wanted)
        return bool(self._blast.radius(set(numbers.values()), wanted - numbers.keys()).hits)

    # --- what is nowhere ------------------------------------------------------------------

    def missing(self, told: Iterable[int] = ()) -> Missing:
        """All that stands in no pack, whole, although something names it."""
        suspects = self.sound.referred_only() | self.sound.in_parts() | self.sound.in_packs(self.gone)
        told = set(told)
        numbers = self.sound.broken(suspects, self._now) - told
        unknown = {*self._blast.missing_roots(), *self.live.missing}
        known = self.sound.numbers(unknown)
        return Missing(frozenset(numbers), frozenset(digest for digest in unknown if known.get(digest) not in told))

    def _missing_radius(self, told: set[int]) -> Radius:
        missing = self.missing(told)
        return self._blast.radius(set(missing.numbers), missing.unknown, excused=self.live.remembered)

    def _tell_missing(self, told: set[int], findings: Findings) -> None:
        radius = self._missing_radius(told)
        for _ in range(LOOKS):
            if not radius.hits or not self._look_again():
                break
            radius = self._missing_radius(told)
        if not radius.hits:
            return
        names = "; ".join(f"commit {short(d)}, which {who} names" for d, who in list(self.live.missing.items())[:3])
        what = f"{len(radius.objects)} objects that commits need are in no pack{': ' if names else ''}{names}"
        repair = findings.command(RepairKind.CHUNKS, FROM_OTHER)
        findings.problems.append(
            Problem(
                ProblemKind.MISSING, PACK_PREFIX, what, Effect.LOST, repair, radius.objects, radius.hits, radius.refs
            )
        )

    def _look_again(self) -> bool:
        """Look again if names changed, for what is missing may have been forgotten and collected; whether they did."""
        now = read_names(self._store, self._records)
        if (now.refs, now.forgotten) == (self._records.refs, self._records.forgotten):
            return False
        catch_up(self._store, self._structure, self._index)
        self._look(now)
        return True


def catch_up(store: Store, structure: Structure, index: Index) -> None:
    """Take in packs that were written while others were looked at: a collection may have moved things there."""
    new = [(key, size) for key, size in store.list(PACK_PREFIX) if key not in structure.packs and is_pack(key)]
    known = index.packs()
    if not index.read_only:
        index.add_packs([finding.record for finding in scan_packs(store, new) if finding.key not in known])
    structure.packs.update(new)


def drop_vanished(store: Store, structure: Structure) -> None:
    """Forget what was found in packs that a collection took away while they were looked at."""
    for key in [*structure.broken, *structure.bad]:
        try:
            store.head(key)
        except NotFoundError:
            structure.broken.pop(key, None)
            structure.bad.pop(key, None)
            structure.packs.pop(key, None)


def _described(broken: str | None, bad: Sequence[BadExtent], num_cut: int) -> str:
    parts = [broken] if broken else []
    parts += [extent.what for extent in bad[:_MOST_NAMED]]
    if len(bad) > _MOST_NAMED:
        parts.append(f"{len(bad) - _MOST_NAMED} more entries are damaged")
    if num_cut:
        parts.append(f"{num_cut} entries that stood in it cannot be found")
    return "; ".join(parts)
