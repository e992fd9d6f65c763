"""The log of one commit, from an index in a file of SQLite, by the driver alone.

`history.py` answers the same and far more, over SQLAlchemy, which takes longer to import (0.1 to 0.2 s) than most logs
take to read. So this is for the command line, and for the plain case alone: whatever is in the least unusual is None,
and then `history.py` is asked. The two give the same (tests/cli/test_quick_log.py).

Invariant: reads in one transaction, changes nothing, and answers only from a database of the newest schema and of the
store that is meant.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from cas_ckpt.index.first_parents import LINE, line_as_log
from cas_ckpt.index.open_lock import OpenLock, may_write
from cas_ckpt.index.rows import REVISIONS, CommitRow
from cas_ckpt.index.texts import read_json, read_metrics
from cas_ckpt.objects.graph import CommitGraph

_BUSY_TIMEOUT_S = 1.0
_PER_READ = 500
_ALL = 1 << 60

_NODES = "SELECT digest, object_id, time_us, first_parent FROM t_commits"
_MERGES = "SELECT object_id, parent FROM t_more_parents {of_some} ORDER BY object_id, position"
_ROWS = (
    "SELECT object_id, digest, root, layout, first_parent, message, author, time_us, step, branch, metrics, meta, "
    "stats FROM t_commits WHERE object_id IN ({numbers})"
)
_PROVEN = """
    SELECT root, MAX(started_us) FROM t_restores
    WHERE complete = 1 AND error IS NULL AND root IN ({marks}) GROUP BY root
"""
"""What `restores.proven` asks."""

_UNUSUAL = "SELECT 1 FROM t_lineage LIMIT 1"
"""What this does not read: what states were made from."""


class LoggedCommit(NamedTuple):
    """A commit, and when the last restore that proves its state began, in microseconds; None: none does."""

    row: CommitRow
    restored_us: int | None


class _Node(NamedTuple):
    object_id: int
    time_us: int
    parents: tuple[bytes, ...]


def read_log(
    path: Path, start: bytes, *, store_id: str, limit: int | None, first_parent: bool
) -> list[LoggedCommit] | None:
    """The first `limit` commits that `start` leads to, in the order of the log; None: ask `history.log`.

    Args:
        first_parent: Follow only the first parent of merges.
    """
    if not path.is_file() or not may_write(path):
        return None
    lock = OpenLock(path, read_only=False)
    try:
        uri = f"file:{quote(os.fsencode(path))}?mode=rw"
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
    return connection.execute(_UNUSUAL).fetchone() is None


def _read(
    connection: sqlite3.Connection, start: bytes, limit: int | None, *, first_parent: bool
) -> list[LoggedCommit] | None:
    found = None
    if first_parent or limit is not None:
        most = _ALL if limit is None else limit
        line = connection.execute(LINE, {"start": start, "most": most}).fetchall()
        found = line_as_log(line, most=most, first_parent=first_parent, whole=True)
    if found is None and not first_parent:
        found = _of_graph(connection, start)
    if found is None:
        return None
    return list(_rows(connection, [number for number, _ in found[:limit]]))


def _of_graph(connection: sqlite3.Connection, start: bytes) -> list[tuple[int, bytes]] | None:
    """Numbers and ids of all that `start` leads to; None: the index lacks one of them."""
    merges = _merges(connection)
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
    return [(nodes[digest].object_id, digest) for digest in order]


def _merges(connection: sqlite3.Connection, numbers: Sequence[int] | None = None) -> dict[int, tuple[bytes, ...]]:
    """Number -> parents after the first, of the merges among these commits, or of all that there are."""
    of_some = "" if numbers is None else f"WHERE object_id IN ({_listed(numbers)})"
    merges: dict[int, tuple[bytes, ...]] = {}
    for number, parent in connection.execute(_MERGES.format(of_some=of_some)):
        merges[number] = (*merges.get(number, ()), parent)
    return merges


def _rows(connection: sqlite3.Connection, numbers: Sequence[int]) -> Iterator[LoggedCommit]:
    for at in range(0, len(numbers), _PER_READ):
        some = numbers[at : at + _PER_READ]
        merges = _merges(connection, some)
        found = {row[0]: row for row in connection.execute(_ROWS.format(numbers=_listed(some)))}
        roots = [found[number][2] for number in some]
        restored = dict(connection.execute(_PROVEN.format(marks=", ".join("?" * len(roots))), roots))
        for number in some:
            _, digest, root, layout, first, message, author, time_us, step, branch, metrics, meta, stats = found[number]
            parents = () if first is None else (first, *merges.get(number, ()))
            row = CommitRow(
                digest, root, parents, layout, message, author, time_us, step, branch, read_metrics(metrics), meta,
                read_json(stats),
            )  # fmt: skip
            yield LoggedCommit(row, restored.get(root))


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, map(int, numbers)))
