"""Which objects are dead, found from garbage up, and what would die if some commits were gone.

    1. guard what is known to live
    2. candidates: what may have died first
    3. a candidate dies unless it is guarded or something outside the dead refers to it
    4. what the newly dead refer to are the next candidates; again from 3 until nobody dies

Invariant: once `find` returns, an object that the starts lead to is in `dead` if and only if no guarded object leads
to it, provided that every object without a parent that leads to it is among the starts. An answer counts each object
once, and nothing is changed. The work follows the references out of dead objects, never the repository.
Must not know why something lives, or why commits would be gone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, TypeAlias

from sqlalchemy import Column, Connection, Integer, text

from cas_ckpt.index.candidates import FINDINGS, examine, find_now, has_deltas
from cas_ckpt.index.database import by_number, execute, fill_numbers, number_table, rows_for, scratch_tables
from cas_ckpt.index.rows import Usage
from cas_ckpt.index.schema import COMMITS, NOWHERE
from cas_ckpt.objects.digest import ObjectKind

if TYPE_CHECKING:
    from cas_ckpt.index.index import Index

GUARDED = number_table("guarded")
DEAD = number_table("dead", Column("level", Integer, nullable=False))
CANDIDATES = number_table("candidates")
by_number(DEAD, "level")
DEAD_TABLES = (GUARDED, DEAD, CANDIDATES)

_NO_PARENT = """
    NOT EXISTS (SELECT 1 FROM edges p WHERE p.child_id = c.object_id
                AND NOT EXISTS (SELECT 1 FROM dead x WHERE x.object_id = p.parent_id))
"""
_NO_DELTA = """
    AND NOT EXISTS (SELECT 1 FROM objects o CROSS JOIN locations b
                    WHERE o.object_id = c.object_id AND b.base = o.digest
                    AND NOT EXISTS (SELECT 1 FROM dead x WHERE x.object_id = b.object_id))
"""
_CHILDREN = """
    INSERT INTO candidates SELECT e.child_id FROM dead d CROSS JOIN edges e
    WHERE d.level = :level AND e.parent_id = d.object_id ON CONFLICT DO NOTHING
"""
_BASES = """
    INSERT INTO candidates SELECT o.object_id FROM dead d CROSS JOIN locations l CROSS JOIN objects o
    WHERE d.level = :level AND l.object_id = d.object_id AND l.base IS NOT NULL AND o.digest = l.base
    ON CONFLICT DO NOTHING
"""


class DeadObjects:
    """The dead objects of one connection, which has `DEAD_TABLES` and the findings of index/candidates.py.

    Attributes:
        level: That of those that die next; it rises from one `find` to the next.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._deltas = has_deltas(connection)
        self.level = 0

    def guard(self, digests: Iterable[bytes]) -> list[bytes]:
        """Let these live, and what they lead to; returns those that are in no known pack."""
        return fill_numbers(self._connection, GUARDED, digests)

    def consider_all(self) -> None:
        """Take for candidates every commit, root and layout that is not guarded, and what nothing refers to."""
        for table in ("commits", "commit_targets", "unreferenced"):
            execute(
                self._connection,
                f"INSERT INTO candidates SELECT s.object_id FROM {table} s "
                "WHERE NOT EXISTS (SELECT 1 FROM guarded g WHERE g.object_id = s.object_id) ON CONFLICT DO NOTHING",
            )

    def release(self, digests: Iterable[bytes]) -> None:
        """Guard these no longer, and take them for candidates."""
        fill_numbers(self._connection, CANDIDATES, digests)
        execute(self._connection, "DELETE FROM guarded WHERE object_id IN (SELECT object_id FROM candidates)")

    def find(self) -> None:
        """Decide about the candidates, and about all that may die with them."""
        free = _NO_PARENT + (_NO_DELTA if self._deltas else "")
        died = 1
        while died:
            died = execute(
                self._connection,
                f"INSERT INTO dead SELECT c.object_id, :level FROM candidates c WHERE {free} "
                "AND NOT EXISTS (SELECT 1 FROM guarded g WHERE g.object_id = c.object_id) "
                "AND NOT EXISTS (SELECT 1 FROM dead x WHERE x.object_id = c.object_id)",
                level=self.level,
            )
            execute(self._connection, "DELETE FROM candidates")
            if died:
                execute(self._connection, _CHILDREN, level=self.level)
                if self._deltas:
                    execute(self._connection, _BASES, level=self.level)
            self.level += 1


_MEASURE = f"""
    SELECT kind, count(*), sum(num_bytes), sum(stored_bytes) FROM (
        SELECT max(l.kind) AS kind, max(l.num_bytes) AS num_bytes, sum(l.stored_bytes + l.header_bytes) AS stored_bytes
        FROM dead d CROSS JOIN locations l
        WHERE d.level >= :level AND l.object_id = d.object_id AND l.pack_id > {NOWHERE} GROUP BY l.object_id
    ) each_object GROUP BY kind
"""


LiveSet: TypeAlias = tuple[Collection[bytes], Collection[bytes]]
"""Ids of the commits whose own objects live; of the roots and layouts of those whose data lives, too."""


def freed(index: Index, now: LiveSet, then: LiveSet) -> Usage:
    """What `now` keeps alive and `then` would not; commit objects and layouts count as nodes."""
    examine(index)
    return index.read(_freed, now, then)


def unique(index: Index, commits: Collection[bytes], others: Collection[bytes]) -> Usage:
    """What these commits hold, themselves included, and the commits `others` do not."""
    return freed(index, index.read(live_set, commits), index.read(live_set, others))


def _freed(connection: Connection, now: LiveSet, then: LiveSet) -> Usage:
    lasting = {*then[0], *then[1]}
    with scratch_tables(connection, *FINDINGS, *DEAD_TABLES):
        find_now(connection)
        dead = DeadObjects(connection)
        dead.guard(lasting.union(*now))
        dead.consider_all()
        dead.find()
        first = dead.level
        dead.release({*now[0], *now[1]} - lasting)
        dead.find()
        return _measure(connection, first)


def live_set(connection: Connection, commits: Iterable[bytes]) -> LiveSet:
    """These commits with all their data."""
    rows = list(rows_for(connection, COMMITS.select(), COMMITS.c.digest, commits))
    roots = {digest for row in rows for digest in (row.root, row.layout) if digest is not None}
    return [row.digest for row in rows], roots


def _measure(connection: Connection, level: int) -> Usage:
    chunks, num_bytes, nodes, node_bytes, stored_bytes = 0, 0, 0, 0, 0
    for kind, count, plain, stored in connection.execute(text(_MEASURE), {"level": level}):
        stored_bytes += int(stored)
        if kind == ObjectKind.CHUNK:
            chunks, num_bytes = count, int(plain)
        else:
            nodes, node_bytes = nodes + count, node_bytes + int(plain)
    return Usage(chunks, num_bytes, nodes, node_bytes, stored_bytes)
