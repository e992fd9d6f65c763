"""Commits as the index has them: one by id, those that heads lead to, those that meet conditions, and all there are.

A log takes several transactions: one finds the order, then the rows are read some hundreds at a time. Numbers of
commits may be given again in between, so each row is asked for by number and id.

Invariant: a commit comes before its parents, and among those that may come next the youngest does (`CommitGraph`).
Parents that the index does not know end a way, unless the whole history is asked for. Edges of lineage come in the
order in which their commit gives them. Of conditions all must hold; texts are compared in Python, over the few
distinct ones, so that both databases mean the same by them. Knows nothing of refs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from sqlalchemy import Connection, case, exists, func, select, text

from cas_ckpt.errors import NotFoundError
from cas_ckpt.index.database import OBJECTS_BY_ID, KeyQuery, batches, rows_for, rows_of
from cas_ckpt.index.filters import SIGNS, CommitFilter
from cas_ckpt.index.first_parents import LINE, line_as_log
from cas_ckpt.index.layouts import layouts_with
from cas_ckpt.index.rows import CommitRow
from cas_ckpt.index.schema import COMMITS, LINEAGE, METRICS, MORE_PARENTS, OBJECTS, PACKS
from cas_ckpt.index.texts import read_json, read_metrics
from cas_ckpt.objects.digest import Digest, short
from cas_ckpt.objects.graph import CommitGraph
from cas_ckpt.objects.nodes import LineageEdge

if TYPE_CHECKING:
    from cas_ckpt.index.index import Index


_COMMITS_PER_READ = 500

_Parents: TypeAlias = dict[int, tuple[bytes, ...]]


_COMMITS = KeyQuery(select(COMMITS), COMMITS.c.object_id)
_MORE_PARENTS = KeyQuery(
    select(MORE_PARENTS).order_by(MORE_PARENTS.c.object_id, MORE_PARENTS.c.position), MORE_PARENTS.c.object_id
)
_LINEAGE = KeyQuery(select(LINEAGE).order_by(LINEAGE.c.object_id, LINEAGE.c.position), LINEAGE.c.object_id)
_ROOTS = KeyQuery(
    select(COMMITS.c.root).select_from(OBJECTS.join(COMMITS, COMMITS.c.object_id == OBJECTS.c.object_id)),
    OBJECTS.c.digest,
)
_NODES = select(COMMITS.c.digest, COMMITS.c.object_id, COMMITS.c.time_us, COMMITS.c.first_parent)
_LINKS = select(COMMITS.c.object_id, COMMITS.c.digest, COMMITS.c.root, COMMITS.c.layout, COMMITS.c.first_parent)
_SIZES = select(COMMITS.c.object_id, COMMITS.c.digest, COMMITS.c.root, COMMITS.c.first_parent, COMMITS.c.stats)

_LINE = """
    WITH RECURSIVE line(digest, place) AS (
        SELECT o.digest, 1 FROM t_objects o CROSS JOIN t_commits c WHERE o.digest = :start AND c.object_id = o.object_id
        UNION ALL
        SELECT c.first_parent, l.place + 1 FROM line l CROSS JOIN t_objects o CROSS JOIN t_commits c
        WHERE l.place < :most AND l.digest <> :until AND o.digest = l.digest AND c.object_id = o.object_id
        AND c.first_parent IS NOT NULL
    )
    SELECT digest FROM line ORDER BY place
"""
"""A commit is found by its digest through `objects`: there is no other way in by digest."""


def read_commit(connection: Connection, digest: bytes) -> CommitRow | None:
    """The commit called `digest`, or None."""
    numbers = [number for _, number, _ in OBJECTS_BY_ID.rows(connection, [digest])]
    return next(iter(read_commits(connection, numbers)), None)


def read_root(connection: Connection, digest: bytes) -> bytes | None:
    """The id of the state of the commit called `digest`, or None."""
    return next((bytes(root) for (root,) in _ROOTS.rows(connection, [digest])), None)


def read_commits(connection: Connection, numbers: Sequence[int]) -> list[CommitRow]:
    """The commits with these numbers, in this order; unknown numbers are left out."""
    more = _more_parents(connection, numbers)
    lineage = read_lineage(connection, numbers)
    rows = {row[0]: row for row in _COMMITS.rows(connection, numbers)}
    return [_commit(rows[number], more, lineage.get(number, ())) for number in numbers if number in rows]


def read_commits_of_ids(connection: Connection, digests: Sequence[bytes]) -> list[CommitRow]:
    """The commits with these ids, in this order; unknown ones are left out."""
    numbers = {digest: number for digest, number, _ in OBJECTS_BY_ID.rows(connection, digests)}
    return read_commits(connection, [numbers[digest] for digest in digests if digest in numbers])


def read_commits_again(connection: Connection, wanted: Sequence[tuple[int, bytes]]) -> list[CommitRow]:
    """The commits with these numbers and ids, in this order; those that went are left out.

    The numbers are those of an earlier transaction: since then others may have them.
    """
    rows = read_commits(connection, [number for number, _ in wanted])
    digests = [digest for _, digest in wanted]
    if [row.digest for row in rows] == digests:
        return rows
    return read_commits_of_ids(connection, digests)


def _more_parents(connection: Connection, numbers: Iterable[int] | None = None) -> _Parents:
    rows = rows_of(connection, _MORE_PARENTS.query) if numbers is None else _MORE_PARENTS.rows(connection, numbers)
    found: _Parents = {}
    for number, _, parent in rows:
        found[number] = (*found.get(number, ()), parent)
    return found


def _commit(row: tuple[Any, ...], more: _Parents, lineage: tuple[LineageEdge, ...]) -> CommitRow:
    number, digest, root, layout, first, message, author, time_us, step, branch, metrics, meta, stats = row
    parents = _parents(number, first, more)
    return CommitRow(
        digest, root, parents, layout, message, author, time_us, step, branch, read_metrics(metrics), meta,
        read_json(stats), lineage,
    )  # fmt: skip


def _parents(number: int, first: bytes | None, more: _Parents) -> tuple[bytes, ...]:
    return () if first is None else (first, *more[number]) if number in more else (first,)


def read_line(connection: Connection, start: bytes, *, most: int, until: bytes | None = None) -> list[bytes]:
    """The commit `start`, its first parent, that one's first parent and so on.

    Args:
        most: At most so many; the cost follows them, not the repository.
        until: End there.
    """
    rows = connection.execute(text(_LINE), {"start": start, "most": most, "until": until or b""})
    return [bytes(digest) for (digest,) in rows]


_LINE_COMMITS = (8, 64)
"""A line costs ten times what the graph costs for a commit: that is worth it near the ends alone."""


def meeting(connection: Connection, first: bytes, other: bytes) -> bytes | None:
    """The commit where two lines of first parents meet, the best that both have in common; None: look at the graph.

    That is so if no merge comes before it, and it is not far back: the cost does not follow the repository.
    """
    for most in _LINE_COMMITS:
        one, another = (
            [(bytes(row.digest), row[-1]) for row in connection.execute(text(LINE), {"start": start, "most": most})]
            for start in (first, other)
        )
        places = {digest: at for at, (digest, _) in enumerate(another)}
        for at, (digest, _) in enumerate(one):
            if digest in places:
                before = [*one[:at], *another[: places[digest]]]
                return None if any(merge for _, merge in before) else digest
    return None


def read_lineage(connection: Connection, numbers: Iterable[int]) -> dict[int, tuple[LineageEdge, ...]]:
    """Number of a commit -> its edges; commits without any are left out."""
    if connection.execute(select(LINEAGE.c.object_id).limit(1)).scalar() is None:
        return {}
    found: dict[int, tuple[LineageEdge, ...]] = {}
    for number, _, kind, target, note in _LINEAGE.rows(connection, numbers):
        found[number] = (*found.get(number, ()), LineageEdge(kind, Digest(target), note))
    return found


def all_lineage(connection: Connection) -> list[tuple[bytes, LineageEdge]]:
    """(commit, edge) for every edge, by the commit's number and in its order."""
    query = (
        select(COMMITS.c.digest, LINEAGE.c.kind, LINEAGE.c.target, LINEAGE.c.note)
        .join(COMMITS, COMMITS.c.object_id == LINEAGE.c.object_id)
        .order_by(LINEAGE.c.object_id, LINEAGE.c.position)
    )
    rows = connection.execute(query)
    return [(digest, LineageEdge(kind, Digest(target), note)) for digest, kind, target, note in rows]


# --- the commits that some heads lead to ----------------------------------------------------


class _Node(NamedTuple):
    """What the walk needs of one commit."""

    object_id: int
    time_us: int
    parents: tuple[bytes, ...]


def walk(
    connection: Connection, starts: Iterable[bytes], *, first_parent: bool, whole: bool = False,
    more: Mapping[bytes, CommitRow] = MappingProxyType({}),
) -> list[tuple[int, bytes]]:  # fmt: skip
    """The numbers and ids of all commits that `starts` lead to, in the order of the log.

    Reads three columns of every commit once (a tenth of a second for 10,000).

    Args:
        whole: Raise for parents that the index does not know, instead of ending the walk there.
        more: Commits that it does not know, by id; they get the number 0.
    Raises:
        NotFoundError: the index knows no commit of such an id.
    """
    most, further = (1 if first_parent else None), _more_parents(connection)
    nodes = {digest: _Node(0, row.time_us, tuple(row.parents)[:most]) for digest, row in more.items()}
    nodes |= {
        digest: _Node(number, time_us, _parents(number, first, further)[:most])
        for digest, number, time_us, first in rows_of(connection, _NODES)
    }
    heads = list(starts)
    for head in heads:
        if head not in nodes:
            raise NotFoundError(f"commit {short(head)}: the index knows no such commit")
    graph = CommitGraph[_Node](nodes)
    order = graph.log_order(heads)
    for parent, child in graph.unknown_parents(order if whole else ()).items():
        raise NotFoundError(f"commit {short(parent)}: the index does not know this parent of {short(child)}")
    return [(nodes[digest].object_id, digest) for digest in order]


def log(
    index: Index,
    starts: Iterable[bytes],
    *,
    limit: int | None = None,
    first_parent: bool = False,
    whole: bool = False,
    wanted: CommitFilter | None = None,
    more: Mapping[bytes, CommitRow] = MappingProxyType({}),
) -> Iterator[CommitRow]:
    """All commits that `starts` lead to: children before parents, and the youngest first.

    The order is fixed by this call; the rows are read in short transactions as they are asked for. With a limit, the
    first ones of one line of commits are found without the rest of the history.

    Args:
        whole: Raise for parents that the index does not know, instead of ending there.
        wanted: Leave out those that do not meet this.
        more: Commits that the index does not know, by id; not with `wanted`.
    Raises:
        NotFoundError: one of `starts` (or of the parents, if `whole`) is not a commit that the index knows.
    """
    heads = list(dict.fromkeys(starts))
    with index.reading() as connection:
        found = None
        if limit and len(heads) == 1 and not wanted and not more:
            line = connection.execute(text(LINE), {"start": heads[0], "most": limit}).all()
            found = line_as_log(line, most=limit, first_parent=first_parent, whole=whole)
        if found is None:
            found = walk(connection, heads, first_parent=first_parent, whole=whole, more=more)
        if wanted:
            kept = matching(connection, wanted)
            found = [commit for commit in found if commit[0] in kept]
    return _rows(index, found[:limit], more)


def _rows(index: Index, found: Sequence[tuple[int, bytes]], more: Mapping[bytes, CommitRow]) -> Iterator[CommitRow]:
    for batch in batches(found, _COMMITS_PER_READ):
        stored = [each for each in batch if each[0]] if more else batch
        rows = index.read(read_commits_again, stored) if stored else []
        if len(stored) == len(batch):
            yield from rows
            continue
        by_id = {row.digest: row for row in rows}
        yield from (
            by_id[digest] if number else more[digest] for number, digest in batch if not number or digest in by_id
        )


class CommitSize(NamedTuple):
    """A commit as those see it who add bytes up: its place in history, and what its state held and added."""

    digest: bytes
    root: bytes
    parents: tuple[bytes, ...]
    total_bytes: int
    new_bytes: int


def read_sizes(connection: Connection, starts: Iterable[bytes], *, whole: bool = False) -> list[CommitSize]:
    """All commits that `starts` lead to, a commit before its parents; arguments and errors as for `walk`."""
    more = _more_parents(connection)
    order = walk(connection, starts, first_parent=False, whole=whole)
    found = {}
    for number, digest, root, first, packed in rows_of(connection, _SIZES):
        stats, parents = read_json(packed), _parents(number, first, more)
        total, new = int(stats.get("total_bytes", 0)), int(stats.get("new_bytes", 0))
        found[number] = CommitSize(digest, root, parents, total, new)
    return [found[number] for number, _ in order]


# --- all commits --------------------------------------------------------------------------


class CommitLinks(NamedTuple):
    """What one commit names: its tree, its layout node (if any) and its parents, the first one first."""

    root: bytes
    layout: bytes | None
    parents: tuple[bytes, ...]


def read_links(connection: Connection) -> dict[bytes, CommitLinks]:
    """Commit -> what it names, for every commit that the index knows."""
    more = _more_parents(connection)
    return {
        digest: CommitLinks(root, layout, _parents(number, first, more))
        for number, digest, root, layout, first in rows_of(connection, _LINKS)
    }


def read_links_and_packs(connection: Connection) -> tuple[dict[bytes, CommitLinks], set[str]]:
    """`read_links`, and the names of the packs that were known at the same moment."""
    return read_links(connection), set(connection.execute(select(PACKS.c.name)).scalars())


def metric_names(connection: Connection) -> list[str]:
    """The names of all metrics, sorted."""
    return sorted(connection.execute(select(METRICS.c.name).distinct()).scalars())


def ranked(
    connection: Connection, name: str, *, largest: bool, among: Collection[bytes], limit: int
) -> list[tuple[bytes, float]]:
    """Up to `limit` commits of `among` and their value of the metric `name`, the best first.

    A value that is not finite is never better than one that is; NaN, which is null, is the last.
    """
    value = METRICS.c.value
    place = case((value.is_(None), 2), (func.abs(value) == math.inf, 1), else_=0)
    best = value.desc() if largest else value.asc()
    query = (
        select(COMMITS.c.digest, METRICS.c.value)
        .join(COMMITS, COMMITS.c.object_id == METRICS.c.object_id)
        .where(METRICS.c.name == name)
        .order_by(place, best, COMMITS.c.time_us, COMMITS.c.object_id)
    )
    wanted = among if isinstance(among, (set, frozenset)) else set(among)
    found: list[tuple[bytes, float]] = []
    for digest, value in connection.execute(query):
        if len(found) >= limit:
            break
        if digest in wanted:
            found.append((digest, math.nan if value is None else value))
    return found


def commits_of_root(connection: Connection, root: bytes) -> list[bytes]:
    """The ids of all commits of the tree `root`, the oldest row first."""
    query = select(COMMITS.c.digest).where(COMMITS.c.root == root).order_by(COMMITS.c.object_id)
    return list(connection.execute(query).scalars())


def youngest_of_roots(connection: Connection, roots: Iterable[bytes]) -> dict[bytes, bytes]:
    """State -> the youngest commit of it that the index knows; reads all commits for each some hundred states."""
    c = COMMITS.c
    rows = rows_for(connection, select(c.root, c.digest, c.time_us), c.root, roots)
    return {row.root: row.digest for row in sorted(rows, key=lambda row: (row.time_us, row.digest))}


# --- the commits that meet some conditions: those of a filtered log ---------------------------

_WILD = frozenset("*?[")


def matching(connection: Connection, wanted: CommitFilter) -> set[int]:
    """The numbers of all commits that `wanted` lets through."""
    c, m = COMMITS.c, METRICS.c
    query = select(c.object_id)
    if wanted.since_us is not None:
        query = query.where(c.time_us >= wanted.since_us)
    if wanted.until_us is not None:
        query = query.where(c.time_us <= wanted.until_us)
    if wanted.first_step is not None:
        query = query.where(c.step >= wanted.first_step)
    if wanted.last_step is not None:
        query = query.where(c.step <= wanted.last_step)
    for bound in wanted.metrics:
        holds = getattr(m.value, SIGNS[bound.sign])(bound.value)
        query = query.where(exists(select(m.object_id).where(m.object_id == c.object_id, m.name == bound.name, holds)))
    if wanted.world_size is not None or wanted.axes:
        query = query.where(c.layout.in_(layouts_with(wanted.world_size, wanted.axes)))
    if wanted.author is None:
        return set(connection.execute(query).scalars())
    return {row.object_id for row in rows_for(connection, query, c.author, _authors(connection, wanted.author))}


def _authors(connection: Connection, wanted: str) -> list[str]:
    """The distinct authors that are meant."""
    pattern = wanted.casefold()
    names = connection.execute(select(COMMITS.c.author).distinct()).scalars()
    if _WILD.isdisjoint(pattern):
        return [name for name in names if pattern in name.casefold()]
    return [name for name in names if fnmatchcase(name.casefold(), pattern)]
