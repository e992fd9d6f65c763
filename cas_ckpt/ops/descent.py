"""lineage: what a state was made from, step by step, and what was made from it.

A state comes from the commits that its history and its typed edges lead to, from theirs in turn,
and so on; what comes from it is the same read the other way.

Invariant: every edge is told once, nearest first; targets that are not here (a base of another
repository) end a way and are told all the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cas_ckpt.objects.commit import LineageEdge
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.values import decode_value
from cas_ckpt.ops.merge_base import links_of
from cas_ckpt.ops.records import Brief
from cas_ckpt.ops.resolve import Revision, resolve
from cas_ckpt.repository import RepositoryHandle


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
    """What the commit `revision` came from, and what came from it, transitively.

    Raises:
        NotFoundError: no such revision.
    """
    start = resolve(handle, revision)
    links = links_of(handle, [start])
    edges = handle.index.lineage()
    upward: dict[bytes, list[_Way]] = {}
    downward: dict[bytes, list[_Way]] = {}
    for commit, edge in edges:
        upward.setdefault(commit, []).append(_Way(edge.target, commit, edge))
        downward.setdefault(edge.target, []).append(_Way(commit, commit, edge))
    children: dict[bytes, list[bytes]] = {}
    for commit, link in links.items():
        for parent in link.parents:
            children.setdefault(parent, []).append(commit)
    parents = {commit: link.parents for commit, link in links.items()}
    here = links.keys()
    return CommitLineage(
        start.hex(),
        tuple(_step(way, way.edge.target in here) for way in _followed(start, upward, parents)),
        tuple(_step(way, way.edge.target in here) for way in _followed(start, downward, children)),
    )


@dataclass(frozen=True, slots=True)
class _Way:
    """An edge in the direction of a walk: it leads to `end`, and `commit` told of it."""

    end: bytes
    commit: bytes
    edge: LineageEdge


def _followed(
    start: Digest, edges: Mapping[bytes, Iterable[_Way]], history: Mapping[bytes, Iterable[bytes]]
) -> list[_Way]:
    """Every edge that `start` leads to over edges and history, breadth first."""
    found: list[_Way] = []
    seen: set[bytes] = {start}
    todo: deque[bytes] = deque([start])
    while todo:
        at = todo.popleft()
        ways = edges.get(at, ())
        found += ways
        for end in (*(way.end for way in ways), *history.get(at, ())):
            if end not in seen:
                seen.add(end)
                todo.append(end)
    return found


def _step(way: _Way, is_here: bool) -> LineageStep:
    edge = way.edge
    meta = None if edge.note is None else decode_value(edge.note, key="metadata of lineage")
    return LineageStep(way.commit.hex(), edge.kind, edge.target.hex(), is_here, meta)
