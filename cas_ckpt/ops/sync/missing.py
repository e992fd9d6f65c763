"""Objects that another repository lacks: a Merkle walk from the roots of commits down, ending where both are equal.

    1. `plan_commits`: which commits travel, which of them with their data, and what they can be compared with; pure
    2. `Walk`: the trees of those are gone through level by level, beside the trees of commits that the other side has
       whole. A node that is in one of these is complete there with all that is below it, so the walk ends there; what
       is reached is asked for at the other side, and comes out in batches

Invariant: that an object is stored at the other side says nothing of what is below it: a copy that was broken off, or
a collection, leaves nodes without their children. Only what a commit holds that a ref keeps there, or what this walk
has gone through itself, ends a way. Every node that comes out was verified, and names only what was gone through too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import compress
from operator import not_
from typing import TypeAlias

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.live import Graph
from cas_ckpt.core.records import node_children
from cas_ckpt.core.tree import ask
from cas_ckpt.core.units import PackShard
from cas_ckpt.errors import CorruptionError, NotFoundError
from cas_ckpt.index import contents
from cas_ckpt.index.entries import stored_parts
from cas_ckpt.index.rows import batches
from cas_ckpt.objects.digest import Digest, ObjectKind, short
from cas_ckpt.objects.nodes import Node, TensorEntry, decode_commit, decode_tensor, decode_tree
from cas_ckpt.objects.pack import Location
from cas_ckpt.objects.patterns import KeyPatterns, compile_pattern
from cas_ckpt.transfer.copying import Wanted, whole_places
from cas_ckpt.transfer.pack_writer import NODE_BATCH_BYTES

COMMITS_TOGETHER = 256
"""Commits whose trees are gone through side by side, so that their nodes of a level are read together."""

NODES_TOGETHER = 2048
BYTES_TOGETHER = 8 * 1024 * 1024
"""Nodes in memory at a time while a level is read, or one that is longer than that."""

MAX_NODES = 50_000
"""A batch comes out once it has so many nodes, however short they are."""

_Places: TypeAlias = Mapping[bytes, Sequence[Location]]

MAX_CHUNKS = 100_000
"""A batch comes out once it names so many chunks (some 50 MB of places)."""


@dataclass(frozen=True, slots=True)
class CommitPlan:
    """The commits that travel.

    Attributes:
        commits: Parents before children.
        with_data: Those of them whose state travels, too; of the others only the commit itself does.
        bases: Commit -> parents whose states will be whole at the other side.
        kept: Commits that are there already.
        promised: Commits that are promised to the other side: of those that travel, chunks may stay behind.
    """

    commits: tuple[Digest, ...]
    with_data: frozenset[Digest]
    bases: Mapping[Digest, tuple[Digest, ...]]
    kept: Set[bytes] = frozenset()
    promised: Set[bytes] = frozenset()


def plan_commits(
    graph: Graph, tips: Iterable[bytes], *, kept: Set[bytes], without_data: Collection[bytes],
    forgotten: Collection[bytes], promised: Set[bytes] = frozenset(),
) -> CommitPlan:  # fmt: skip
    """The commits to copy so that `tips` and all that they lead to are there.

    Args:
        graph: Of the side that has them.
        kept: Commits that refs keep at the other side, with all that they lead to.
        without_data: Commits of `kept` whose data is not kept there.
        forgotten: Commits whose data may be gone at this side.
        promised: Commits of which chunks may be absent at the other side, as a remote keeps them for it.
    Raises:
        CorruptionError: a commit on the way is not known.
    """
    tips = set(tips)
    wanted = graph.reached(tips, without=kept) | {tip for tip in tips if tip in without_data}
    for digest in sorted(wanted):
        if digest not in graph:
            raise CorruptionError(f"commit {short(digest)} is in no intact pack: run repo.fsck() there")
    order = graph.parents_first(wanted)
    with_data = {digest for digest in order if digest not in forgotten or digest in tips}
    whole = (with_data | {digest for digest in kept if digest not in without_data}) - promised
    bases = {
        Digest(digest): tuple(Digest(parent) for parent in graph.commits[digest].parents if parent in whole)
        for digest in order
    }
    return CommitPlan(tuple(map(Digest, order)), frozenset(map(Digest, with_data)), bases, kept, promised)


@dataclass(slots=True)
class Batch:
    """Some of what is missing.

    Attributes:
        nodes: Verified.
        chunks: Chunk -> the extents that hold it, where it comes from.
    """

    nodes: list[Node] = field(default_factory=list)
    chunks: dict[Digest, list[Location]] = field(default_factory=dict)
    node_bytes: int = 0

    @property
    def holds_commits(self) -> bool:
        """Whether there are commits in it, and only such in those after it."""
        return bool(self.nodes) and self.nodes[-1].kind == ObjectKind.COMMIT

    @property
    def is_full(self) -> bool:
        """Whether it is time to copy it."""
        return (
            self.node_bytes >= NODE_BATCH_BYTES or len(self.nodes) >= MAX_NODES or len(self.chunks) >= MAX_CHUNKS
        )  # fmt: skip

    def of(self, shard: PackShard) -> Batch:
        """Its chunks that are in one part of the source's packs, and no node."""
        chunks = {digest: places for digest, places in self.chunks.items() if shard.has(places[0].pack)}
        return Batch(chunks=chunks)

    def extents(self) -> Iterator[Wanted]:
        """Every extent to copy."""
        return ((digest, place) for digest, places in self.chunks.items() for place in places)


class Walk:
    """Goes through the trees of a `CommitPlan`.

    Args:
        source: Where the commits are. target: Where they go.
        near: The one of the two whose nodes are cheaper to read: of what both have, it is read.
        keys: Patterns of the keys whose chunks travel, of promised commits; empty: all. Nodes travel all the same, so
            that what does not come is known by its name.
    """

    def __init__(
        self, source: RepositoryHandle, target: RepositoryHandle, plan: CommitPlan, *, near: RepositoryHandle,
        keys: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._source = source
        self._target = target
        self._near = near
        self._plan = plan
        self._passed: set[Digest] = set()
        self._keys = keys
        self._wanted: set[Digest] = set()
        self._unmatched: list[str] | None = None  # nothing was looked for so far
        self._batch, self._commits = Batch(), Batch()
        self._later: list[Digest] = []  # further commits, when those in memory are enough
        self._expected = {*plan.commits, *plan.kept}

    def batches(self) -> Iterator[Batch]:
        """Batches of missing objects. Each has to be copied, and known at the target, before the next one is requested.

        Commits come last, in the last one if they are few: one that is stored, with another that follows it, counts as
        published.

        Raises:
            NotFoundError, CorruptionError: something is not there, or damaged, at the source.
        """
        for commits in batches(self._plan.commits, COMMITS_TOGETHER):
            yield from self._through(commits)
        if self._later and (self._batch.nodes or self._batch.chunks):
            yield self._batch
            self._batch = Batch()
        self._batch.nodes += self._commits.nodes
        if self._batch.nodes or self._batch.chunks:
            yield self._batch
        for part in batches(self._later, COMMITS_TOGETHER):
            for few in self._few_commits(part):
                batch = Batch()
                self._keep(ObjectKind.COMMIT, self._read(ObjectKind.COMMIT, few), batch)
                yield batch

    def _through(self, commits: Sequence[Digest]) -> Iterator[Batch]:
        level: set[Digest] = set()  # roots and layouts of the commits whose states travel
        for few in self._few_commits(commits):
            level |= self._take_few(few)
        inside = set(commits)
        outside = {base for commit in commits for base in self._plan.bases[commit] if base not in inside}
        complete = self._roots_of(outside)
        while level:
            shared = complete & level
            fresh = [digest for digest in level if digest not in complete and digest not in self._passed]
            self._passed.update(shared)
            below: set[Digest] = set()
            for part, places in self._located(fresh):
                below |= self._take(part, places)
                if self._batch.is_full:
                    yield self._batch
                    self._batch = Batch()
            complete = self._children_of(complete - level) if below else set()
            level = below

    def _few_commits(self, commits: Sequence[Digest]) -> Iterator[Sequence[Digest]]:
        """`commits`, as many at a time as may be in memory, as far as indexes know how long they are."""
        there, here = (side.index.read(contents.locate, commits) for side in (self._target, self._source))
        return _in_bytes(commits, {**there, **here})

    def _take_few(self, commits: Sequence[Digest]) -> set[Digest]:
        expected = self._expected
        found = self._read(ObjectKind.COMMIT, commits)
        level: set[Digest] = set()
        for digest in commits:
            commit = decode_commit(found[digest])
            strange = [one for one in commit.parents if one not in expected and not self._target.known([one])[0]]
            if strange:
                raise CorruptionError(
                    f"commit {short(digest)} follows {short(strange[0])}, which its index does not know: run "
                    "repo.rebuild_index() there"
                )
            if digest in self._plan.with_data:
                level |= {Digest(commit.root), Digest(commit.layout)}
                if self._keys:
                    is_promised = digest in self._plan.promised
                    keys = KeyPatterns(self._keys if is_promised else ())
                    parts = ask(self._source, stored_parts, Digest(commit.root), keys=keys)
                    if is_promised:  # patterns that match a key of tensors that travel are of use
                        matched = [part.key for part in parts]
                        waiting = list(self._keys) if self._unmatched is None else self._unmatched
                        compiled = [(pattern, compile_pattern(pattern)) for pattern in waiting]
                        self._unmatched = [text for text, one in compiled if not any(map(one.fullmatch, matched))]
                    self._wanted.update(part.node for part in parts if part.node is not None)
        if self._later or self._commits.is_full:
            self._later += compress(commits, map(not_, self._target.known(commits)))
        else:
            self._keep(ObjectKind.COMMIT, found, self._commits)
        return level

    @property
    def unmatched(self) -> list[str]:
        """Patterns of which no tensor came, of the promised commits that were gone through; none, if none were."""
        return self._unmatched or []

    def _located(self, digests: Sequence[Digest]) -> Iterator[tuple[Sequence[Digest], _Places]]:
        """These objects and where they are, as many at a time as may be in memory."""
        for part in batches(digests, NODES_TOGETHER):
            places = self._places(part)
            for few in _in_bytes(part, places):
                yield few, places

    def _take(self, digests: Sequence[Digest], places: _Places) -> set[Digest]:
        """Take these objects if they are missing; what they name."""
        below: set[Digest] = set()
        chunks = [digest for digest in digests if places[digest][0].kind == ObjectKind.CHUNK]
        for digest in compress(chunks, map(not_, self._target.known(chunks))):
            self._batch.chunks[digest] = whole_places(places[digest])
        for kind in {ObjectKind(places[digest][0].kind) for digest in digests} - {ObjectKind.CHUNK}:
            own = [digest for digest in digests if places[digest][0].kind == kind]
            found = self._read(kind, own)
            for digest, data in found.items():
                below.update(self._children(kind, digest, data))
            self._passed.update(own)
            self._keep(kind, found, self._batch)
        return below

    def _children(self, kind: ObjectKind, digest: Digest, data: bytes) -> Collection[Digest]:
        """Children of a node, without chunks that are not sent."""
        children = node_children(kind, data)
        if not self._keys or kind == ObjectKind.LAYOUT:
            return children
        if kind in (ObjectKind.TREE, ObjectKind.TREE_PAGE):
            entries = decode_tree(data, page=kind == ObjectKind.TREE_PAGE).entries
            single = {each.node for each in entries if isinstance(each, TensorEntry) and each.single}
            return [child for child in children if child not in single or child in self._wanted]
        if digest in self._wanted:
            self._wanted.update(children)
            return children
        return decode_tensor(data).pages if kind == ObjectKind.TENSOR else ()

    def _keep(self, kind: ObjectKind, found: Mapping[Digest, bytes], batch: Batch) -> None:
        """Put into the batch what the target lacks."""
        digests = list(found)
        for digest in compress(digests, map(not_, self._target.known(digests))):
            children = () if kind == ObjectKind.COMMIT else node_children(kind, found[digest])
            batch.nodes.append(Node(kind, digest, found[digest], children))
            batch.node_bytes += len(found[digest])

    def _places(self, digests: Sequence[Digest]) -> _Places:
        """The places of these objects: at the source or, if it lacks them, at the target."""
        located = self._source.index.read(contents.locate, digests)
        absent = [digest for digest in digests if not located.get(digest)]
        if absent:
            there = list(compress(absent, self._target.known(absent)))
            located = {**located, **self._target.index.read(contents.locate, there)}
            absent = [digest for digest in absent if not located.get(digest)]
        return {**located, **self._source.locate(absent)} if absent else located

    def _read(self, kind: ObjectKind, digests: Sequence[Digest]) -> dict[Digest, bytes]:
        """The bytes of these nodes, verified, from the near side where that has them."""
        if not digests:
            return {}
        if self._near is self._source:
            try:
                return self._source.read_nodes(kind, digests)
            except (NotFoundError, CorruptionError):
                pass  # the other side may have what this one has lost
        at_target = list(compress(digests, self._target.known(digests)))
        there = set(at_target)
        rest = [digest for digest in digests if digest not in there]
        found = self._target.read_nodes(kind, at_target) if at_target else {}
        return {**found, **(self._source.read_nodes(kind, rest) if rest else {})}

    # --- what is complete at the target -------------------------------------------------------

    def _roots_of(self, commits: Collection[Digest]) -> set[Digest]:
        """Roots and layouts of commits that are whole at the target, as far as they can be read at the near side."""
        roots: set[Digest] = set()
        for commit in sorted(commits):
            try:
                data = decode_commit(self._near.read_node(ObjectKind.COMMIT, commit))
            except NotFoundError:
                continue
            roots |= {Digest(data.root), Digest(data.layout)}
        return roots

    def _children_of(self, digests: Collection[Digest]) -> set[Digest]:
        """Children of these objects, which are whole at the target; without those that the near side lacks."""
        located = self._near.index.read(contents.locate, list(digests)) if digests else {}
        by_kind: dict[ObjectKind, list[Digest]] = {}
        for digest, places in located.items():
            by_kind.setdefault(ObjectKind(places[0].kind), []).append(Digest(digest))
        by_kind.pop(ObjectKind.CHUNK, None)
        found: set[Digest] = set()
        for kind, own in by_kind.items():
            for part in batches(own, NODES_TOGETHER):
                for few in _in_bytes(part, located):
                    try:
                        nodes = self._near.read_nodes(kind, few)
                    except (NotFoundError, CorruptionError):
                        continue
                    for data in nodes.values():
                        found.update(node_children(kind, data))
        return found


def _in_bytes(digests: Sequence[Digest], places: _Places) -> Iterator[Sequence[Digest]]:
    """`digests` cut where the nodes among them are longer than may be in memory together."""
    start = total = 0
    for at, digest in enumerate(digests):
        known = places.get(digest)
        length = 0 if not known or known[0].kind == ObjectKind.CHUNK else known[0].stored_bytes
        if at > start and total + length > BYTES_TOGETHER:
            yield digests[start:at]
            start, total = at, 0
        total += length
    if start < len(digests):
        yield digests[start:]
