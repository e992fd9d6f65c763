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
import os
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeAlias, TypeVar
from urllib.parse import quote

from cas_ckpt.errors import CorruptionError, NotFoundError
from cas_ckpt.index.rows import (
    REVISIONS,
    SIGNS,
    CommitFilter,
    CommitRow,
    batches,
    read_json,
    read_metrics,
    rows,
    rows_by_key,
    storable,
)
from cas_ckpt.index.sqlite import OpenLock, may_write
from cas_ckpt.objects.digest import Digest, short
from cas_ckpt.objects.graph import CommitGraph
from cas_ckpt.objects.nodes import LineageEdge

if TYPE_CHECKING:
    from cas_ckpt.index.index import Index
    from cas_ckpt.index.rows import AnyConnection

P = ParamSpec("P")
T = TypeVar("T")

_COMMITS_PER_READ = 500

_Parents: TypeAlias = dict[int, tuple[bytes, ...]]

_NUMBERS = "SELECT o.digest, o.object_id FROM t_objects o WHERE o.digest {keys}"
_COMMITS = """
    SELECT object_id, digest, root, layout, first_parent, message, author, time_us, step, branch, metrics, meta, stats
    FROM t_commits WHERE object_id {keys}
"""
_MORE_PARENTS = "SELECT object_id, parent FROM t_more_parents"
_LINEAGE = "SELECT object_id, kind, target, note FROM t_lineage WHERE object_id {keys} ORDER BY object_id, position"
_ROOTS = "SELECT c.root FROM t_objects o CROSS JOIN t_commits c WHERE o.digest {keys} AND c.object_id = o.object_id"

_LINE = """
    WITH RECURSIVE line(object_id, digest, parent, place) AS (
        SELECT c.object_id, o.digest, c.first_parent, 1 FROM t_objects o CROSS JOIN t_commits c
        WHERE o.digest = :start AND c.object_id = o.object_id
        UNION ALL
        SELECT c.object_id, o.digest, c.first_parent, l.place + 1
        FROM line l CROSS JOIN t_objects o CROSS JOIN t_commits c
        WHERE l.place < :most AND l.digest <> :until AND o.digest = l.parent AND c.object_id = o.object_id
    )
    SELECT l.object_id, l.digest, l.parent,
           EXISTS (SELECT 1 FROM t_more_parents m WHERE m.object_id = l.object_id) FROM line l ORDER BY l.place
"""
"""The commit `start`, its first parent and so on, at most `most`, down to `until`: number, id, first parent, whether it
has more parents. The cost follows `most`, not the repository. By digest a commit is found through `t_objects`."""


def read_commit(connection: AnyConnection, digest: bytes) -> CommitRow | None:
    """The commit called `digest`, or None."""
    return next(iter(read_commits_of_ids(connection, [digest])), None)


def read_root(connection: AnyConnection, digest: bytes) -> bytes | None:
    """The id of the state of the commit called `digest`, or None."""
    return next((root for (root,) in rows_by_key(connection, _ROOTS, [digest])), None)


def read_commits(connection: AnyConnection, numbers: Sequence[int]) -> list[CommitRow]:
    """The commits with these numbers, in this order; unknown numbers are left out."""
    more = _more_parents(connection, numbers)
    lineage = read_lineage(connection, numbers)
    found = {row[0]: row for row in rows_by_key(connection, _COMMITS, numbers)}
    return [_commit(found[number], more, lineage.get(number, ())) for number in numbers if number in found]


def read_commits_of_ids(connection: AnyConnection, digests: Sequence[bytes]) -> list[CommitRow]:
    """The commits with these ids, in this order; unknown ones are left out."""
    numbers: dict[bytes, int] = dict(rows_by_key(connection, _NUMBERS, digests))
    return read_commits(connection, [numbers[digest] for digest in digests if digest in numbers])


def read_commits_again(connection: AnyConnection, wanted: Sequence[tuple[int, bytes]]) -> list[CommitRow]:
    """The commits with these numbers and ids, in this order; those that went are left out.

    The numbers are those of an earlier transaction: since then others may have them.
    """
    found = read_commits(connection, [number for number, _ in wanted])
    digests = [digest for _, digest in wanted]
    if [row.digest for row in found] == digests:
        return found
    return read_commits_of_ids(connection, digests)


def _more_parents(connection: AnyConnection, numbers: Iterable[int] | None = None) -> _Parents:
    order = " ORDER BY object_id, position"
    found: _Parents = {}
    for number, parent in (
        rows(connection, _MORE_PARENTS + order)
        if numbers is None
        else rows_by_key(connection, f"{_MORE_PARENTS} WHERE object_id {{keys}}{order}", numbers)
    ):
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


def read_line(connection: AnyConnection, start: bytes, *, most: int, until: bytes | None = None) -> list[bytes]:
    """The commit `start`, its first parent, that one's first parent and so on.

    Args:
        most: At most so many; the cost follows them, not the repository.
        until: End there.
    """
    line = _line(connection, start, most, until or b"")
    found = [digest for _, digest, _, _ in line]
    unknown = line[-1][2] if 0 < len(line) < most and found[-1] != until else None
    return found if unknown is None else [*found, unknown]


def _line(connection: AnyConnection, start: bytes, most: int, until: bytes = b"") -> Sequence[tuple[Any, ...]]:
    return rows(connection, _LINE, start=start, most=most, until=until)


_LINE_COMMITS = (8, 64)
"""A line costs ten times what the graph costs for a commit: that is worth it near the ends alone."""


def meeting(connection: AnyConnection, first: bytes, other: bytes) -> bytes | None:
    """The commit where two lines of first parents meet, the best that both have in common; None: look at the graph.

    That is so if no merge comes before it, and it is not far back: the cost does not follow the repository.
    """
    for most in _LINE_COMMITS:
        one, another = (
            [(digest, merge) for _, digest, _, merge in _line(connection, start, most)] for start in (first, other)
        )
        places = {digest: at for at, (digest, _) in enumerate(another)}
        for at, (digest, _) in enumerate(one):
            if digest in places:
                before = [*one[:at], *another[: places[digest]]]
                return None if any(merge for _, merge in before) else digest
    return None


def read_lineage(connection: AnyConnection, numbers: Iterable[int]) -> dict[int, tuple[LineageEdge, ...]]:
    """Number of a commit -> its edges; commits without any are left out."""
    if not rows(connection, "SELECT object_id FROM t_lineage LIMIT 1"):
        return {}
    found: dict[int, tuple[LineageEdge, ...]] = {}
    for number, kind, target, note in rows_by_key(connection, _LINEAGE, numbers):
        found[number] = (*found.get(number, ()), LineageEdge(kind, Digest(target), note))
    return found


def all_lineage(connection: AnyConnection) -> list[tuple[bytes, LineageEdge]]:
    """(commit, edge) for every edge, by the commit's number and in its order."""
    found = rows(
        connection,
        "SELECT c.digest, l.kind, l.target, l.note FROM t_lineage l JOIN t_commits c ON c.object_id = l.object_id "
        "ORDER BY l.object_id, l.position",
    )
    return [(digest, LineageEdge(kind, Digest(target), note)) for digest, kind, target, note in found]


# --- the commits that some heads lead to ----------------------------------------------------


class _Node(NamedTuple):
    """The fields of one commit that the walk needs."""

    object_id: int
    time_us: int
    parents: tuple[bytes, ...]


def walk(
    connection: AnyConnection, starts: Iterable[bytes], *, first_parent: bool, whole: bool = False,
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
        for digest, number, time_us, first in rows(
            connection, "SELECT digest, object_id, time_us, first_parent FROM t_commits"
        )
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


def _line_as_log(
    connection: AnyConnection, start: bytes, *, most: int, first_parent: bool, whole: bool
) -> list[tuple[int, bytes]] | None:
    """Numbers and ids of the first `most` commits of the log of `start`, if they are one line; None: they are not.

    Up to a merge, only one commit may come next.
    """
    line = _line(connection, start, most)
    if not line or (not first_parent and any(merge for *_, merge in line[:-1])):
        return None
    _, _, parent, merge = line[-1]
    if len(line) < most and (parent is not None and (whole or merge)):
        return None  # an unknown parent, or the way goes on behind a merge: whoever reads all knows what to do
    return [(number, digest) for number, digest, *_ in line]


def log(
    index: Index | PlainIndex,
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
            found = _line_as_log(connection, heads[0], most=limit, first_parent=first_parent, whole=whole)
        if found is None:
            found = walk(connection, heads, first_parent=first_parent, whole=whole, more=more)
        if wanted:
            kept = matching(connection, wanted)
            found = [commit for commit in found if commit[0] in kept]
    return _rows(index, found[:limit], more)


def _rows(
    index: Index | PlainIndex, found: Sequence[tuple[int, bytes]], more: Mapping[bytes, CommitRow]
) -> Iterator[CommitRow]:
    for batch in batches(found, _COMMITS_PER_READ):
        stored = [each for each in batch if each[0]] if more else batch
        known = index.read(read_commits_again, stored) if stored else []
        if len(stored) == len(batch):
            yield from known
            continue
        by_id = {row.digest: row for row in known}
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


def read_sizes(connection: AnyConnection, starts: Iterable[bytes], *, whole: bool = False) -> list[CommitSize]:
    """All commits that `starts` lead to, a commit before its parents; arguments and errors as for `walk`."""
    more = _more_parents(connection)
    order = walk(connection, starts, first_parent=False, whole=whole)
    found = {}
    for number, digest, root, first, packed in rows(
        connection, "SELECT object_id, digest, root, first_parent, stats FROM t_commits"
    ):
        stats, parents = read_json(packed), _parents(number, first, more)
        total, new = int(stats.get("total_bytes", 0)), int(stats.get("new_bytes", 0))
        found[number] = CommitSize(digest, root, parents, total, new)
    return [found[number] for number, _ in order]


# --- all commits --------------------------------------------------------------------------


class CommitLinks(NamedTuple):
    """Ids that one commit refers to: its tree, its layout node (if any) and its parents, the first one first."""

    root: bytes
    layout: bytes | None
    parents: tuple[bytes, ...]


def read_links(connection: AnyConnection) -> dict[bytes, CommitLinks]:
    """Commit -> what it names, for every commit that the index knows."""
    more = _more_parents(connection)
    return {
        digest: CommitLinks(root, layout, _parents(number, first, more))
        for number, digest, root, layout, first in rows(
            connection, "SELECT object_id, digest, root, layout, first_parent FROM t_commits"
        )
    }


def read_links_and_packs(connection: AnyConnection) -> tuple[dict[bytes, CommitLinks], set[str]]:
    """`read_links`, and the names of the packs that were known at the same moment."""
    return read_links(connection), {name for (name,) in rows(connection, "SELECT name FROM t_packs")}


def metric_names(connection: AnyConnection) -> list[str]:
    """The names of all metrics, sorted."""
    return sorted(name for (name,) in rows(connection, "SELECT DISTINCT name FROM t_metrics"))


def ranked(
    connection: AnyConnection, name: str, *, largest: bool, among: Collection[bytes], limit: int
) -> list[tuple[bytes, float]]:
    """Up to `limit` commits of `among` and their value of the metric `name`, the best first.

    A value that is not finite is never better than one that is; NaN, which is null, is the last.
    """
    query = f"""
        SELECT c.digest, m.value FROM t_metrics m JOIN t_commits c ON c.object_id = m.object_id WHERE m.name = :name
        ORDER BY CASE WHEN m.value IS NULL THEN 2 WHEN abs(m.value) = :infinite THEN 1 ELSE 0 END,
        m.value {"DESC" if largest else "ASC"}, c.time_us, c.object_id
    """
    wanted = among if isinstance(among, (set, frozenset)) else set(among)
    found: list[tuple[bytes, float]] = []
    for digest, value in rows(connection, query, name=name, infinite=math.inf):
        if len(found) >= limit:
            break
        if digest in wanted:
            found.append((digest, math.nan if value is None else value))
    return found


def commits_of_root(connection: AnyConnection, root: bytes) -> list[bytes]:
    """The ids of all commits of the tree `root`, the oldest row first."""
    query = "SELECT digest FROM t_commits WHERE root = :root ORDER BY object_id"
    return [digest for (digest,) in rows(connection, query, root=root)]


def youngest_of_roots(connection: AnyConnection, roots: Iterable[bytes]) -> dict[bytes, bytes]:
    """State -> the youngest commit of it that the index knows; reads all commits for each some hundred states."""
    found = rows_by_key(connection, "SELECT time_us, digest, root FROM t_commits WHERE root {keys}", roots)
    return {root: digest for _, digest, root in sorted(found)}


# --- the commits that meet some conditions: those of a filtered log ---------------------------

_WILD = frozenset("*?[")


def matching(connection: AnyConnection, wanted: CommitFilter) -> set[int]:
    """The numbers of all commits that `wanted` lets through."""
    conditions, values = ["1 = 1"], dict[str, Any]()
    for condition, name, value in (
        ("c.time_us >= :since_us", "since_us", wanted.since_us),
        ("c.time_us <= :until_us", "until_us", wanted.until_us),
        ("c.step >= :first_step", "first_step", wanted.first_step),
        ("c.step <= :last_step", "last_step", wanted.last_step),
    ):
        if value is not None:
            conditions.append(condition)
            values[name] = value
    for at, bound in enumerate(wanted.metrics):
        conditions.append(
            "EXISTS (SELECT 1 FROM t_metrics m WHERE m.object_id = c.object_id "
            f"AND m.name = :metric{at} AND m.value {SIGNS[bound.sign]} :value{at})"
        )
        values |= {f"metric{at}": bound.name, f"value{at}": float(bound.value)}
    if wanted.world_size is not None or wanted.axes:
        conditions.append(f"c.layout IN ({_layouts_with(wanted, values)})")
    found = rows(
        connection, f"SELECT c.object_id, c.author FROM t_commits c WHERE {' AND '.join(conditions)}", **values
    )
    if wanted.author is None:
        return {number for number, _ in found}
    pattern = wanted.author.casefold()
    if _WILD.isdisjoint(pattern):
        pattern = f"*{pattern}*"
    names = {name for name in {name for _, name in found} if fnmatchcase(name.casefold(), pattern)}
    return {number for number, name in found if name in names}


def _layouts_with(wanted: CommitFilter, values: dict[str, Any]) -> str:
    """A query: the ids of the layouts of so many ranks that have meshes with all of these dimensions.

    A join might begin at the objects, millions of them.
    """
    conditions = ["1 = 1"]
    if wanted.world_size is not None:
        conditions.append("y.world_size = :world_size")
        values["world_size"] = wanted.world_size
    for at, axis in enumerate(wanted.axes):
        size = "" if axis.size is None else f" AND a.size = {int(axis.size)}"
        conditions.append(
            f"EXISTS (SELECT 1 FROM t_layout_axes a WHERE a.object_id = y.object_id AND a.name = :axis{at}{size})"
        )
        values[f"axis{at}"] = storable(axis.name)
    digest = "(SELECT o.digest FROM t_objects o WHERE o.object_id = y.object_id)"
    return f"SELECT {digest} FROM t_layouts y WHERE {' AND '.join(conditions)}"


# --- what restores prove --------------------------------------------------------------------------


def proven(connection: AnyConnection, roots: Iterable[bytes]) -> dict[bytes, int]:
    """State -> when the last restore that proves it began, in microseconds; states that none proves are left out."""
    if not rows(connection, "SELECT restore_id FROM t_restores LIMIT 1"):
        return {}
    query = """
        SELECT root, max(started_us) FROM t_restores WHERE complete = 1 AND error IS NULL AND root {keys} GROUP BY root
    """
    return dict(rows_by_key(connection, query, roots))


# --- an index in a file, without SQLAlchemy ---------------------------------------------------------

_BUSY_TIMEOUT_S = 1.0


class PlainIndex:
    """An index in a file of SQLite at one moment, for the questions of this module, by the driver alone."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """As `Index.reading`."""
        yield self._connection

    def read(self, question: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As `Index.read`."""
        return question(self._connection, *args, **kwargs)


@contextmanager
def plain_index(path: Path, *, store_id: str) -> Iterator[PlainIndex]:
    """The index in the file `path`, if it is of the newest schema and of the store that is meant.

    Raises:
        NotFoundError, CorruptionError: it is not, or not as usual in another way: open it by `Index.open`.
    """
    if not path.is_file() or not may_write(path):
        raise NotFoundError(f"index {path}: there is none that this user may write")
    lock = OpenLock(path, read_only=False)
    try:
        uri = f"file:{quote(os.fsencode(path))}?mode=rw"
        with closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_TIMEOUT_S, isolation_level=None)) as connection:
            for pragma in ("trusted_schema=OFF", "cell_size_check=ON", "query_only=ON"):
                connection.execute("PRAGMA " + pragma)
            connection.execute("BEGIN")
            revision = connection.execute("SELECT version_num FROM alembic_version").fetchall()
            store = connection.execute("SELECT value FROM t_meta WHERE key = 'store_id'").fetchall()
            if revision != [(REVISIONS[-1],)] or store != [(store_id,)]:
                raise NotFoundError(f"index {path}: it is of another store or schema")
            yield PlainIndex(connection)
    except (sqlite3.Error, ValueError, TypeError) as error:
        raise CorruptionError(f"index {path}: {error}") from error
    finally:
        lock.close()
