"""How far damage reaches: from damaged objects up to commits, refs and keys.

    1. objects that are nowhere whole, of all that is suspicious (index/integrity.py)
    2. all nodes above them, by the index's edges
    3. the live commits whose trees are among these, and the keys on the way down to the damage

Invariant: a commit is named if, and only if, it is live and needs an object that has no intact
copy. When it is not known which commits are live, all that are stored count.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from cas_ckpt.errors import CorruptionError, NotFoundError, StorageError, UnsupportedVersionError
from cas_ckpt.index import contents
from cas_ckpt.index.history import CommitLinks
from cas_ckpt.index.index import Index
from cas_ckpt.index.integrity import Soundness, Unusable
from cas_ckpt.objects.digest import ObjectKind, object_id
from cas_ckpt.objects.graph import CommitGraph
from cas_ckpt.objects.nodes import ContainerEntry, PageEntry, TensorEntry, TreeNode, decode_tree
from cas_ckpt.objects.state import CONTAINER_KINDS, Name, render_name
from cas_ckpt.ops.fsck.records import Records
from cas_ckpt.ops.fsck.report import Hit
from cas_ckpt.storage.store import Store

# DOC of cas_ckpt.ops.fsck.impact:
# Which keys of a state need a damaged object: down from the root, along tainted nodes alone.
#
# Invariant: only nodes that lead to the damage are read, each once however many commits share it.
# A node that cannot be read stands for all that is below it.
#

ALL_BELOW = "**"
LAYOUT_KEY = "(layout)"
RECORD_KEY = "(commit)"
"""Of a forgotten commit, which has nothing else that could be lost."""

_Keys: TypeAlias = tuple[str, ...]
_MAX_DEPTH = 200
_MOST_KEYS = 10_000
"""Of one container; one with more is named as a whole."""


@dataclass(slots=True)
class KeyFinder:
    """Finds keys above damage.

    Attributes:
        tainted: Objects that are damaged or lead to damage -> whether they themselves are damaged.
    """

    store: Store
    index: Index
    tainted: Mapping[bytes, bool]
    _below: dict[tuple[bytes, str], _Keys] = field(default_factory=dict)

    def keys(self, root: bytes) -> _Keys:
        """Keys below the tree `root` that need something damaged; `**` is all of them."""
        return self._tree(root, ObjectKind.TREE, "", 0)

    def _tree(self, digest: bytes, kind: ObjectKind, until: str, depth: int) -> _Keys:
        """Keys relative to the tree node, or page of one, `digest`.

        Args:
            until: For a page, the name from which on another page holds the entries ("" at the end).
        """
        if digest not in self.tainted:
            return ()
        if (digest, until) not in self._below:
            node = None if self.tainted[digest] or depth > _MAX_DEPTH else self._read(digest, kind)
            whole = ALL_BELOW if node is None else ""
            self._below[digest, until] = (whole,) if node is None else self._entries(node, until, depth)
        return self._below[digest, until]

    def _read(self, digest: bytes, kind: ObjectKind) -> TreeNode | None:
        """The node, from any intact copy. Not through the handle, which would change the index on the way."""
        for place in self.index.read(contents.locate, [digest]).get(digest, ()):
            try:
                data = bytes(self.store.get_range(place.pack, place.offset + place.header_bytes, place.stored_bytes))
                if object_id(kind.label, data) == digest:
                    return decode_tree(data, page=kind == ObjectKind.TREE_PAGE)
            except (CorruptionError, NotFoundError, StorageError, UnsupportedVersionError):
                continue
        return None

    def _entries(self, node: TreeNode, until: str, depth: int) -> _Keys:
        if node.kind and node.kind not in CONTAINER_KINDS:
            return ("",)  # people see a composite tensor as one entry
        found: list[str] = []
        for entry in node.entries:
            if isinstance(entry, TensorEntry) and entry.node in self.tainted:
                found.append(render_name(entry.name))
            elif isinstance(entry, ContainerEntry):
                below = self._tree(entry.node, ObjectKind.TREE, "", depth + 1)
                found += [_joined(entry.name, key) for key in below]
        found += self._pages(node.pages, until, depth)
        return tuple(dict.fromkeys(found)) if len(found) <= _MOST_KEYS else (ALL_BELOW,)

    def _pages(self, pages: Sequence[PageEntry], until: str, depth: int) -> list[str]:
        found: list[str] = []
        ends = [*(render_name(page.first) for page in pages[1:]), until]
        for page, end in zip(pages, ends, strict=False):
            below = self._tree(page.node, ObjectKind.TREE_PAGE, end, depth + 1)
            span = f"[{render_name(page.first)}..{end})"
            found += [span if key == ALL_BELOW else key for key in below]
        return found


def _joined(name: Name, key: str) -> str:
    return f"{render_name(name)}/{key}" if key else render_name(name)


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
    graph = CommitGraph(links)
    strict = graph.ancestors(names)
    for parent, child in graph.unknown_parents(strict).items():
        missing.setdefault(parent, f"commit {child.hex()[:12]}")
    reached = strict | graph.ancestors(logged)
    if not records.all_known or missing:
        reached |= links.keys()
    bare = {digest for digest in reached if digest in records.forgotten and digest not in names}
    return LiveCommits(links, frozenset(reached - bare), frozenset(reached - strict), frozenset(bare), missing, names)


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
        reached = CommitGraph(self.live.links).descendants(commits, among=self.live.whole | self.live.bare)
        return tuple(sorted({name for digest in reached for name in self.live.names.get(digest, ())}))
