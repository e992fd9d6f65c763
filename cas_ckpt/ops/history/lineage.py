"""How commits are related: what a state was made from, where histories meet, and which commits share content.

    lineage   A state comes from the commits that its history and its typed edges lead to, from theirs in turn, and so
              on; what comes from it is the same read the other way. Every edge comes once, nearest first; targets
              that are not here (a base of another repository) end a way and are listed all the same.
    holders   Which commits hold the very content that is under a key: compared by id, whatever key it has elsewhere.
    nearest   Which commits share most with a state, so that its base is found wherever it came from:
              1. choose a few chunks of every tensor, spread over it: of a state they are hashed, of a commit the index
                 knows their ids
              2. ask the index which commits hold them

Invariant: nothing is written. Of holders and of the nearest, only commits that some ref leads to are listed. What is
hashed is a sample: a share of the sample is an estimate of the share of the state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cas_ckpt import native
from cas_ckpt.core.forgotten import forgotten_view
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.live import graph_with
from cas_ckpt.core.records import Brief, CommitInfo, info_from_row
from cas_ckpt.core.revisions import Revision, resolve
from cas_ckpt.core.tree import ask, known_commit, known_root
from cas_ckpt.errors import InvalidInputError
from cas_ckpt.index import entries, history, usage
from cas_ckpt.objects.digest import Digest, chunk_id
from cas_ckpt.objects.nodes import INLINE_BYTES, LineageEdge
from cas_ckpt.objects.spec import Spec, as_raw, grid_for
from cas_ckpt.objects.state import Container, TensorItem, walk
from cas_ckpt.objects.values import decode_value
from cas_ckpt.ops.history.log import start_of_log


@dataclass(frozen=True, slots=True)
class LineageStep:
    """One edge: the state of `commit` is `kind` `target`. Ids are hexadecimal.

    Attributes:
        is_here: Whether the target is a commit of this repository.
        meta: What the user said about it.
    """

    commit: str
    kind: str
    target: str
    is_here: bool
    meta: Any = None


@dataclass(frozen=True, slots=True, repr=False)
class CommitLineage(Brief):
    """The lineage of one commit.

    Attributes:
        origins: What it was made from, directly or not, the nearest first.
        descendants: What was made from it, directly or not, the nearest first.
    """

    commit: str
    origins: tuple[LineageStep, ...]
    descendants: tuple[LineageStep, ...]


def lineage_of(handle: RepositoryHandle, revision: Revision) -> CommitLineage:
    """Ancestors and descendants of the commit `revision` over lineage edges and history, transitively.

    Raises:
        NotFoundError: no such revision.
    """
    start = resolve(handle, revision)
    graph = graph_with(handle, [start])
    edges = handle.index.read(history.all_lineage)
    upward: dict[bytes, list[_DirectedEdge]] = {}
    downward: dict[bytes, list[_DirectedEdge]] = {}
    for commit, edge in edges:
        upward.setdefault(commit, []).append(_DirectedEdge(edge.target, commit, edge))
        downward.setdefault(edge.target, []).append(_DirectedEdge(commit, commit, edge))
    origins = _followed(start, upward, graph.parents_of, most=len(edges))
    descendants: list[_DirectedEdge] = []
    if len(origins) < len(edges):  # what leads to a commit is not what it leads to: ids of commits are of all they name
        children = graph.children(graph.commits)
        descendants = _followed(start, downward, lambda commit: children.get(commit, ()), most=len(edges))
    return CommitLineage(
        start.hex(),
        tuple(_step(way, way.edge.target in graph) for way in origins),
        tuple(_step(way, way.edge.target in graph) for way in descendants),
    )


@dataclass(frozen=True, slots=True)
class _DirectedEdge:
    """An edge in the direction of a walk: it leads to `end`, and `commit` names it."""

    end: bytes
    commit: bytes
    edge: LineageEdge


def _followed(
    start: Digest,
    edges: Mapping[bytes, Iterable[_DirectedEdge]],
    parents: Callable[[bytes], Iterable[bytes]],
    *,
    most: int,
) -> list[_DirectedEdge]:
    """Every edge that `start` leads to over edges and history, breadth first; ends with `most`: there are no more."""
    found: list[_DirectedEdge] = []
    seen: set[bytes] = {start}
    todo: deque[bytes] = deque([start])
    while todo and len(found) < most:
        at = todo.popleft()
        ways = edges.get(at, ())
        found += ways
        for end in (*(way.end for way in ways), *parents(at)):
            if end not in seen:
                seen.add(end)
                todo.append(end)
    return found


def _step(way: _DirectedEdge, is_here: bool) -> LineageStep:
    edge = way.edge
    meta = None if edge.note is None else decode_value(edge.note, key="metadata of lineage")
    return LineageStep(way.commit.hex(), edge.kind, edge.target.hex(), is_here, meta)


def merge_bases(handle: RepositoryHandle, revisions: Sequence[Revision]) -> list[Digest]:
    """The best common ancestors of the first revision with the others together, by id.

    As in git, several others count as if they were merged: what is common to the first and any of them.

    Raises:
        InvalidInputError: fewer than two revisions. NotFoundError: one that is not there.
    """
    if len(revisions) < 2:
        raise InvalidInputError(f"a merge base of {len(revisions)} commits: give two revisions or more")
    first, *others = (resolve(handle, revision) for revision in revisions)
    if len(others) == 1 and (base := handle.index.read(history.meeting, first, others[0])) is not None:
        return [Digest(base)]
    return graph_with(handle, [first, *others]).merge_bases(first, others)


def is_ancestor(handle: RepositoryHandle, old: Revision, new: Revision) -> bool:
    """Whether `new` leads to `old`; a commit leads to itself."""
    first, last = resolve(handle, old), resolve(handle, new)
    base = handle.index.read(history.meeting, first, last)
    if base is not None:
        return base == first
    return first in graph_with(handle, [last]).ancestors([last])


def holders_of(handle: RepositoryHandle, revision: Revision, key: str) -> list[CommitInfo]:
    """The commits that hold what is under `key` in `revision`, itself included, the youngest first.

    Args:
        key: A tensor, or a container: then the same names with the same content below it.
    Raises:
        NotFoundError: no such revision or key. InvalidInputError: so small that it has no id of its own.
    """
    root = known_root(handle, resolve(handle, revision))
    content = ask(handle, entries.object_of, root, key=key)
    if content is None:
        raise InvalidInputError(
            f"{key} is so small that it is stored in its container and has no id of its own: ask for the container, or "
            f"see when it changed with repo.log(keys={key!r})"
        )
    starts = start_of_log(handle, (), all_refs=True)
    reached = graph_with(handle, starts).ancestors(starts)
    forgotten = forgotten_view(handle)
    found = [digest for digest in handle.index.read(usage.commits_holding, content) if digest in reached]
    rows = handle.index.read(history.read_commits_of_ids, found)
    infos = [info_from_row(row, forgotten=row.digest in forgotten) for row in rows]
    return sorted(infos, key=lambda info: (-info.time_s, info.id))


MOST_CELLS = 512
"""Cells of a sample, about: 2 GB to hash at most, and a question that the index answers at once."""

CELLS_PER_TENSOR = 4
_EVERY_COMMIT = 1 << 31


@dataclass(frozen=True, slots=True)
class NearCommit:
    """A commit, and how much of the sample it holds.

    Attributes:
        share: Of the sample's bytes, 0..1.
    """

    commit: CommitInfo
    num_chunks: int
    num_bytes: int
    share: float


def nearest_to_commit(handle: RepositoryHandle, revision: Revision, *, limit: int = 5) -> list[NearCommit]:
    """The commits that share most with `revision`, but for those of its own history.

    Raises:
        NotFoundError: no such revision.
    """
    handle.sync()  # every commit is compared, those too that this host knows only by name
    digest = resolve(handle, revision)
    every = ask(handle, entries.stored_parts, known_root(handle, digest))
    stored = [(part.spec, part.node) for part in every if part.node is not None]
    chosen, most = _chosen([spec for spec, _ in stored])
    sizes = handle.index.read(usage.some_chunks, {stored[at][1] for at in chosen}, most=most)
    graph = graph_with(handle, [digest])
    related = graph.ancestors([digest]).union(graph.children(graph.commits).get(digest, ()))
    return _nearest(handle, sizes, limit, without=related)


def nearest_to_state(handle: RepositoryHandle, state: Container, *, limit: int = 5) -> list[NearCommit]:
    """The commits that share most with `state`, which is not committed for that.

    Tensors that are divided over ranks are left out: no rank can hash their cells alone.
    """
    handle.sync()
    items = [item for _, item in walk(state) if isinstance(item, TensorItem) and item.placement is None]
    sizes: dict[Digest, int] = {}
    chosen, most = _chosen([item.spec for item in items])
    for item in (items[at] for at in chosen):
        grid = grid_for(item.spec)
        count = min(most, grid.num_cells)
        for cell in sorted({grid.num_cells * number // count for number in range(count)}):
            num_bytes = grid.box(cell).num_elements * item.spec.item_bytes
            leaves = native.leaf_digests(
                as_raw(item.source.read(grid.box(cell)), item.spec.item_bytes), grid.leaf_bytes
            )
            sizes[chunk_id(num_bytes, leaves)] = num_bytes
    return _nearest(handle, sizes, limit, without=set())


def _nearest(
    handle: RepositoryHandle, sizes: Mapping[Digest, int], limit: int, *, without: set[bytes]
) -> list[NearCommit]:
    """The commits that hold most of a sample, given as the bytes of each of its chunks."""
    starts = start_of_log(handle, (), all_refs=True)
    wanted = graph_with(handle, starts).ancestors(starts) - without - forgotten_view(handle)
    found: list[NearCommit] = []
    num_bytes = max(sum(sizes.values()), 1)
    for near in handle.index.read(usage.nearest, sorted(sizes), limit=_EVERY_COMMIT):
        if len(found) >= limit:
            break
        if near.commit in wanted:
            info = info_from_row(known_commit(handle, Digest(near.commit)))
            found.append(NearCommit(info, near.num_chunks, near.num_bytes, near.num_bytes / num_bytes))
    return found


def _chosen(specs: Sequence[Spec]) -> tuple[list[int], int]:
    """Which tensors to look at, spread over all sizes, and at how many chunks of each; fewer if tensors are many."""
    large = [at for at, spec in enumerate(specs) if spec.num_bytes > INLINE_BYTES]
    stride = max(1, -(-len(large) // MOST_CELLS))
    ordered = sorted(large, key=lambda at: (-specs[at].num_bytes, specs[at].shape, specs[at].dtype))
    return ordered[::stride], max(1, min(CELLS_PER_TENSOR, MOST_CELLS // max(len(large), 1)))
