"""What damage reaches: from damaged objects up to commits, refs and keys.

    1. all nodes above the damaged objects, by the index's edges
    2. the live commits whose trees are among these
    3. the keys on the way down from their roots to the damage

Invariant: a commit is named if, and only if, it is live and needs an object that has no intact
copy. When it is not known which commits are live, all that are stored count. Only nodes that lead to
damage are read, each once however many commits share it; of one that cannot be read, all keys below it are named.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from cas_ckpt.core.live import Graph, logged
from cas_ckpt.core.units import BEFORE_ALL_US
from cas_ckpt.errors import CorruptionError, NotFoundError, StorageError, UnsupportedVersionError
from cas_ckpt.index import contents
from cas_ckpt.index.index import Index
from cas_ckpt.index.integrity import IntegrityView
from cas_ckpt.objects.digest import ObjectKind, object_id
from cas_ckpt.objects.nodes import ContainerEntry, PageEntry, TensorEntry, TreeNode, decode_tree
from cas_ckpt.objects.state import CONTAINER_KINDS, render_name
from cas_ckpt.ops.fsck.records import Records
from cas_ckpt.ops.fsck.report import Hit
from cas_ckpt.storage.store import Store

ALL_BELOW = "**"
LAYOUT_KEY = "(layout)"
RECORD_KEY = "(commit)"
"""Of a forgotten commit, which has nothing else that could be lost."""

_Keys: TypeAlias = tuple[str, ...]
_MAX_DEPTH = 200
_MOST_KEYS = 10_000
"""Of one container; one with more is named as a whole."""


@dataclass(frozen=True, slots=True)
class LiveCommits:
    """Commits that must be there.

    Attributes:
        graph: Every stored commit.
        complete: Commits whose data must be there as well.
        only_logged: Those of them that only logs of refs name: a collection may have taken their data.
        record_only: Forgotten commits, of which only the object must be there.
        missing: Commits that a ref or a live commit names and that are in no pack -> who names them.
        refs: Commit -> the refs that name it.
    """

    graph: Graph
    complete: frozenset[bytes]
    only_logged: frozenset[bytes]
    record_only: frozenset[bytes]
    missing: Mapping[bytes, str]
    refs: Mapping[bytes, tuple[str, ...]]

    @property
    def stored(self) -> frozenset[bytes]:
        """All of them that are in a pack."""
        return self.complete | self.record_only

    def roots(self, commits: Iterable[bytes]) -> set[bytes]:
        """Trees and layouts of these commits."""
        links = [self.graph.commits[digest] for digest in commits]
        return {root for link in links for root in (link.root, link.layout) if root is not None}


def live_commits(graph: Graph, records: Records) -> LiveCommits:
    """What the refs keep; entries of logs whose commits are gone keep nothing."""
    refs: dict[bytes, tuple[str, ...]] = {}
    for ref in records.refs:
        if ref.target is not None:
            refs[ref.target] = (*refs.get(ref.target, ()), f"{ref.kind.label} {ref.name}")
    missing: dict[bytes, str] = {head: ", ".join(names) for head, names in refs.items() if head not in graph}
    kept = graph.ancestors(refs)
    for parent, child in graph.unknown_parents(kept).items():
        missing.setdefault(parent, f"commit {child.hex()[:12]}")
    live = kept | graph.ancestors(logged(records.refs, BEFORE_ALL_US))
    if not records.all_known or missing:
        live |= graph.commits.keys()
    bare = {digest for digest in live if digest in records.forgotten and digest not in refs}
    return LiveCommits(graph, frozenset(live - bare), frozenset(live - kept), frozenset(bare), missing, refs)


@dataclass(frozen=True, slots=True)
class Impact:
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
class ImpactFinder:
    """Finds the impact of damage in one repository, by one state of its index."""

    store: Store
    index: Index
    sound: IntegrityView
    live: LiveCommits

    def missing_roots(self) -> set[bytes]:
        """Trees and layouts that live commits name and that no pack ever brought into the index."""
        wanted = self.live.roots(self.live.complete - self.live.only_logged)
        return wanted - self.sound.numbers(wanted).keys()

    def impact(
        self, numbers: set[int], unknown: Iterable[bytes] = (), *, excused: Collection[bytes] = frozenset()
    ) -> Impact:
        """What needs the objects `numbers`.

        Args:
            unknown: Objects of which the index has no number, that are needed too.
            excused: Commits that may do without.
        """
        absent = set(unknown)
        if not numbers and not absent:
            return Impact()
        digests = self.sound.digests(self.sound.above(numbers))
        affected = {digest: number in numbers for number, digest in digests.items()}
        affected.update((digest, True) for digest in absent)
        finder = KeyFinder(self.store, self.index, affected)
        missing = self.live.missing.keys() & affected.keys()
        commits = sorted((self.live.stored | missing).difference(excused))
        hits = [Hit(commit.hex(), keys) for commit in commits if (keys := self._keys(commit, affected, finder))]
        objects = sorted(digest.hex() for digest, damaged in affected.items() if damaged)
        return Impact(tuple(objects), tuple(hits), self._refs([bytes.fromhex(hit.commit) for hit in hits]))

    def _keys(self, commit: bytes, affected: Mapping[bytes, bool], finder: KeyFinder) -> _Keys:
        """Keys of `commit` that need something damaged."""
        live = self.live
        if commit not in live.graph:
            return (ALL_BELOW,) if commit in live.missing else ()
        if affected.get(commit):
            return (RECORD_KEY,) if commit in live.record_only else (ALL_BELOW,)
        if commit in live.record_only:
            return ()
        link = live.graph.commits[commit]
        keys = finder.keys(link.root)
        return (*keys, LAYOUT_KEY) if link.layout is not None and affected.get(link.layout) else keys

    def _refs(self, commits: Iterable[bytes]) -> tuple[str, ...]:
        """Names of the refs that lead to one of `commits`."""
        reached = self.live.graph.descendants(commits, among=self.live.stored)
        return tuple(sorted({name for digest in reached for name in self.live.refs.get(digest, ())}))


@dataclass(slots=True)
class KeyFinder:
    """Finds the keys of states that need damaged objects: down from a root, along affected nodes alone.

    Attributes:
        affected: Objects that are damaged or lead to damage -> whether they themselves are damaged.
    """

    store: Store
    index: Index
    affected: Mapping[bytes, bool]
    _below: dict[tuple[bytes, str], _Keys] = field(default_factory=dict)

    def keys(self, root: bytes) -> _Keys:
        """Keys below the tree `root` that need something damaged; `**` is all of them."""
        return self._tree(root, ObjectKind.TREE, "", 0)

    def _tree(self, digest: bytes, kind: ObjectKind, until: str, depth: int) -> _Keys:
        """Keys relative to the tree node, or page of one, `digest`.

        Args:
            until: For a page, the name from which on another page holds the entries ("" at the end).
        """
        if digest not in self.affected:
            return ()
        if (digest, until) not in self._below:
            node = None if self.affected[digest] or depth > _MAX_DEPTH else self._read(digest, kind)
            self._below[digest, until] = (ALL_BELOW,) if node is None else self._entries(node, until, depth)
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
            name = render_name(entry.name)
            if isinstance(entry, TensorEntry) and entry.node in self.affected:
                found.append(name)
            elif isinstance(entry, ContainerEntry):
                below = self._tree(entry.node, ObjectKind.TREE, "", depth + 1)
                found += [f"{name}/{key}" if key else name for key in below]
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
