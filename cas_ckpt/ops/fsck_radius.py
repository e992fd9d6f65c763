"""How far damage reaches: from damaged objects up to commits, refs and keys.

    1. objects that are nowhere whole, of all that is suspicious (index/soundness.py)
    2. all nodes above them, by the index's edges
    3. the live commits whose trees are among these, and the keys on the way down to the damage

Invariant: a commit is named if, and only if, it is live and needs an object that has no intact
copy. When it is not known which commits are live, all that are stored count.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from cas_ckpt.index.catalog import Index
from cas_ckpt.index.graph import CommitLinks
from cas_ckpt.index.soundness import Soundness, Unusable
from cas_ckpt.ops.fsck_keys import ALL_BELOW, LAYOUT_KEY, RECORD_KEY, KeyFinder
from cas_ckpt.ops.fsck_records import Records
from cas_ckpt.ops.fsck_report import Hit
from cas_ckpt.storage.store import Store


@dataclass(frozen=True, slots=True)
class LiveCommits:
    """Commits that must be there.

    Attributes:
        links: What every stored commit names.
        whole: Commits whose data must be there as well.
        remembered: Those of them that only logs of refs name: a collection may have taken their data.
        bare: Commits of which only the object must be there.
        missing: Commits that a ref or a live commit names and that are in no pack -> who names them.
        names: Commit -> the refs that name it.
    """

    links: Mapping[bytes, CommitLinks]
    whole: frozenset[bytes]
    remembered: frozenset[bytes]
    bare: frozenset[bytes]
    missing: Mapping[bytes, str]
    names: Mapping[bytes, tuple[str, ...]]


def live_commits(links: Mapping[bytes, CommitLinks], records: Records) -> LiveCommits:
    """What the refs keep; entries of logs whose commits are gone keep nothing."""
    names: dict[bytes, tuple[str, ...]] = {}
    for ref in records.refs:
        if ref.target is not None:
            names[ref.target] = (*names.get(ref.target, ()), f"{ref.kind.label} {ref.name}")
    missing: dict[bytes, str] = {head: ", ".join(refs) for head, refs in names.items() if head not in links}
    logged = {d for ref in records.refs for move in ref.log for d in (move.old, move.new) if d is not None}
    strict = _walk(links, names, missing)
    reached = strict | _walk(links, logged, {})
    if not records.all_known or missing:
        reached |= links.keys()
    bare = {digest for digest in reached if digest in records.forgotten and digest not in names}
    return LiveCommits(links, frozenset(reached - bare), frozenset(reached - strict), frozenset(bare), missing, names)


def _walk(links: Mapping[bytes, CommitLinks], starts: Iterable[bytes], missing: dict[bytes, str]) -> set[bytes]:
    reached = {start for start in starts if start in links}
    todo = list(reached)
    while todo:
        digest = todo.pop()
        for parent in links[digest].parents:
            if parent not in links:
                missing.setdefault(parent, f"commit {digest.hex()[:12]}")
            elif parent not in reached:
                reached.add(parent)
                todo.append(parent)
    return reached


@dataclass(frozen=True, slots=True)
class Radius:
    """What some damage reaches.

    Attributes:
        objects: Ids of objects that are damaged or at risk.
        hits: Live commits that need them.
        refs: Refs that lead to these commits.
    """

    objects: tuple[str, ...] = ()
    hits: tuple[Hit, ...] = ()
    refs: tuple[str, ...] = ()


@dataclass(slots=True)
class Blast:
    """Tells the radius of damage in one repository, by one state of its index."""

    store: Store
    index: Index
    sound: Soundness
    live: LiveCommits
    _roots: dict[bytes, int] = field(default_factory=dict)

    def missing_roots(self) -> set[bytes]:
        """Trees and layouts that live commits name and that no pack ever told the index of."""
        surely = self.live.whole - self.live.remembered
        wanted = {d for c in surely for d in (self.live.links[c].root, self.live.links[c].layout) if d}
        return wanted - self._numbers(wanted).keys()

    def _numbers(self, digests: Iterable[bytes]) -> dict[bytes, int]:
        unknown = [digest for digest in digests if digest not in self._roots]
        self._roots.update(self.sound.numbers(unknown))
        return self._roots

    def broken(self, numbers: Iterable[int], unusable: Unusable) -> set[int]:
        """See `Soundness.broken`."""
        return self.sound.broken(numbers, unusable)

    def radius(
        self, numbers: set[int], unknown: Iterable[bytes] = (), *, excused: Collection[bytes] = frozenset()
    ) -> Radius:
        """What needs the objects `numbers`.

        Args:
            unknown: Objects of which the index has no number, that are needed too.
            excused: Commits that may do without.
        """
        absent = set(unknown)
        if not numbers and not absent:
            return Radius()
        above = self.sound.above(numbers)
        names = self.sound.digests(above)
        tainted = {digest: number in numbers for number, digest in names.items()}
        tainted.update((digest, True) for digest in absent)
        finder = KeyFinder(self.store, self.index, tainted)
        hits = []
        unseen = self.live.missing.keys() & tainted.keys()
        for digest in sorted((self.live.whole | self.live.bare | unseen).difference(excused)):
            keys = self._keys(digest, tainted, finder)
            if keys:
                hits.append(Hit(digest.hex(), keys))
        objects = [digest for digest, damaged in tainted.items() if damaged]
        refs = self._refs(bytes.fromhex(hit.commit) for hit in hits)
        return Radius(tuple(sorted(digest.hex() for digest in objects)), tuple(hits), refs)

    def _keys(self, commit: bytes, tainted: Mapping[bytes, bool], finder: KeyFinder) -> tuple[str, ...]:
        if commit not in self.live.links:
            return (ALL_BELOW,) if commit in self.live.missing else ()
        if commit in self.live.bare:
            return (RECORD_KEY,) if tainted.get(commit) else ()
        if tainted.get(commit):
            return (ALL_BELOW,)
        link = self.live.links[commit]
        keys = finder.keys(link.root)
        return (*keys, LAYOUT_KEY) if link.layout is not None and tainted.get(link.layout) else keys

    def _refs(self, commits: Iterable[bytes]) -> tuple[str, ...]:
        """Names of the refs that lead to one of `commits`."""
        children: dict[bytes, list[bytes]] = {}
        for digest in self.live.whole | self.live.bare:
            for parent in self.live.links[digest].parents:
                children.setdefault(parent, []).append(digest)
        reached = set(commits)
        todo = list(reached)
        while todo:
            for child in children.get(todo.pop(), ()):
                if child not in reached:
                    reached.add(child)
                    todo.append(child)
        return tuple(sorted({name for digest in reached for name in self.live.names.get(digest, ())}))


