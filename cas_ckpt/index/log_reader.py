"""The log of one commit, from an index in a file of SQLite, by the driver alone.

`history.py` answers the same and far more, over SQLAlchemy, which takes longer to import (0.1 to 0.2 s) than most logs
take to read. So this is for the command line, and for the plain case alone: whatever is in the least unusual is None,
and then `history.py` is asked. The two give the same (tests/cli/test_quick_log.py).

Invariant: reads in one transaction, changes nothing, and answers only from a database of the newest schema and of the
store that is meant.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from cas_ckpt.index.open_lock import OpenLock
from cas_ckpt.index.rows import REVISIONS, CommitRow
from cas_ckpt.objects.graph import CommitGraph

_BUSY_TIMEOUT_S = 1.0
_PER_READ = 500

_LINE = """
    WITH RECURSIVE line(object_id, digest, parent, place) AS (
        SELECT c.object_id, o.digest, c.first_parent, 1 FROM t_objects o CROSS JOIN t_commits c
        WHERE o.digest = :start AND c.object_id = o.object_id
        UNION ALL
        SELECT c.object_id, o.digest, c.first_parent, l.place + 1
        FROM line l CROSS JOIN t_objects o CROSS JOIN t_commits c
        WHERE l.place < :most AND o.digest = l.parent AND c.object_id = o.object_id
    )
    SELECT object_id, digest, parent FROM line ORDER BY place
"""
_NODES = "SELECT digest, object_id, time_us, first_parent FROM t_commits"
_MERGES = "SELECT object_id, parent FROM t_more_parents ORDER BY object_id, position"
_ROWS = (
    "SELECT object_id, digest, root, layout, first_parent, message, author, time_us, step, branch, metrics, meta, "
    "stats FROM t_commits WHERE object_id IN ({numbers})"
)
_UNUSUAL = ("SELECT 1 FROM t_lineage LIMIT 1", "SELECT 1 FROM t_restores LIMIT 1")
"""What this does not read: what states were made from, and what was proven of them."""


class _Node(NamedTuple):
    object_id: int
    time_us: int
    parents: tuple[bytes, ...]


def read_log(
    path: Path, start: bytes, *, store_id: str, limit: int | None, first_parent: bool
) -> list[CommitRow] | None:
    """The first `limit` commits that `start` leads to, in the order of the log; None: ask `history.log`.

    Args:
        first_parent: Follow only the first parent of merges.
    """
    if not path.is_file():
        return None
    lock = OpenLock(path, read_only=False)
    try:
        uri = f"file:{quote(str(path))}?mode=rw"
        with closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_TIMEOUT_S, isolation_level=None)) as connection:
            connection.execute("PRAGMA trusted_schema=OFF")
            connection.execute("PRAGMA cell_size_check=ON")
            connection.execute("PRAGMA query_only=ON")
            connection.execute("BEGIN")
            if not _is_plain(connection, store_id):
                return None
            return _read(connection, start, limit, first_parent=first_parent)
    except (sqlite3.Error, ValueError, TypeError):  # damage, or a file that may not be written
        return None
    finally:
        lock.close()


def _is_plain(connection: sqlite3.Connection, store_id: str) -> bool:
    revision = connection.execute("SELECT version_num FROM alembic_version").fetchall()
    store = connection.execute("SELECT value FROM t_meta WHERE key = 'store_id'").fetchall()
    if revision != [(REVISIONS[-1],)] or store != [(store_id,)]:
        return False
    return all(connection.execute(query).fetchone() is None for query in _UNUSUAL)


def _read(
    connection: sqlite3.Connection, start: bytes, limit: int | None, *, first_parent: bool
) -> list[CommitRow] | None:
    merges: dict[int, tuple[bytes, ...]] = {}
    for number, parent in connection.execute(_MERGES):
        merges[number] = (*merges.get(number, ()), parent)
    numbers = None
    if first_parent or limit is not None:
        numbers = _of_line(connection, start, limit)
        if numbers is not None and not first_parent and not merges.keys().isdisjoint(numbers[:-1]):
            numbers = None  # behind a merge more than one commit may come next
    if numbers is None:
        numbers = _of_graph(connection, start, merges)
    if numbers is None:
        return None
    chosen = numbers if limit is None else numbers[:limit]
    return list(_rows(connection, chosen, merges))


def _of_line(connection: sqlite3.Connection, start: bytes, limit: int | None) -> list[int] | None:
    """The commit, its first parent and so on; the cost follows `limit`. None: the index lacks one of them."""
    most = 1 << 60 if limit is None else limit
    rows = connection.execute(_LINE, {"start": start, "most": most}).fetchall()
    if not rows or (len(rows) < most and rows[-1][2] is not None):
        return None
    return [number for number, _, _ in rows]


def _of_graph(connection: sqlite3.Connection, start: bytes, merges: dict[int, tuple[bytes, ...]]) -> list[int] | None:
    nodes = {
        digest: _Node(number, time_us, () if first is None else (first, *merges.get(number, ())))
        for digest, number, time_us, first in connection.execute(_NODES)
    }
    graph = CommitGraph[_Node](nodes)
    if start not in graph:
        return None
    order = graph.log_order([start])
    if graph.unknown_parents(order):
        return None
    return [nodes[digest].object_id for digest in order]


def _rows(
    connection: sqlite3.Connection, numbers: Sequence[int], merges: dict[int, tuple[bytes, ...]]
) -> Iterator[CommitRow]:
    for at in range(0, len(numbers), _PER_READ):
        some = numbers[at : at + _PER_READ]
        query = _ROWS.format(numbers=", ".join(map(str, map(int, some))))
        found = {row[0]: row for row in connection.execute(query)}
        for number in some:
            _, digest, root, layout, first, message, author, time_us, step, branch, metrics, meta, stats = found[number]
            parents = () if first is None else (first, *merges.get(number, ()))
            yield CommitRow(
                digest, root, parents, layout, message, author, time_us, step, branch, _loads(metrics), meta,
                _loads(stats),
            )  # fmt: skip


_JSON = json.JSONDecoder()


def _loads(text: str | None) -> dict[str, Any]:
    if not text:
        return {}
    values, end = _JSON.raw_decode(text)
    if end != len(text) or not isinstance(values, dict):
        raise ValueError(f"{text!r} is not a mapping")
    return values
