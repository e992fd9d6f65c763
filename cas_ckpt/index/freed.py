"""What would die: bytes that live as things are and would not if some commits were gone.

Invariant: the answer counts each object once, and the work follows what would die, and what is
dead already. Nothing is changed. Must not know why the commits would be gone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from sqlalchemy import Connection, text

from cas_ckpt.index.cascade import CASCADE, Cascade, suspect_all
from cas_ckpt.index.rows import Usage
from cas_ckpt.index.schema import COMMITS, NOWHERE
from cas_ckpt.index.scratch import scratch_tables
from cas_ckpt.index.statements import rows_for
from cas_ckpt.index.suspects import FINDINGS, find_now
from cas_ckpt.objects.kinds import ObjectKind

_MEASURE = f"""
    SELECT kind, count(*), sum(num_bytes), sum(stored_bytes) FROM (
        SELECT max(l.kind) AS kind, max(l.num_bytes) AS num_bytes, sum(l.stored_bytes + l.header_bytes) AS stored_bytes
        FROM dead d CROSS JOIN locations l
        WHERE d.level >= :level AND l.object_id = d.object_id AND l.pack_id > {NOWHERE} GROUP BY l.object_id
    ) each_object GROUP BY kind
"""


@dataclass(frozen=True, slots=True)
class LiveSet:
    """What lives, by digest.

    Attributes:
        commits: Commits whose own objects live.
        roots: Roots and layouts of those whose data lives, too.
    """

    commits: Collection[bytes]
    roots: Collection[bytes]


def freed(connection: Connection, now: LiveSet, then: LiveSet) -> Usage:
    """What `now` keeps alive and `then` would not; commit objects and layouts count as nodes."""
    lasting = {*then.commits, *then.roots}
    with scratch_tables(connection, *FINDINGS, *CASCADE):
        find_now(connection)
        cascade = Cascade(connection)
        cascade.guard(lasting.union(now.commits, now.roots))
        suspect_all(cascade)
        cascade.spread()
        first = cascade.level
        cascade.release({*now.commits, *now.roots} - lasting)
        cascade.spread()
        return _measure(connection, first)


def live_set(connection: Connection, commits: Iterable[bytes]) -> LiveSet:
    """These commits with all their data."""
    rows = list(rows_for(connection, COMMITS.select(), COMMITS.c.digest, commits))
    roots = {digest for row in rows for digest in (row.root, row.layout) if digest is not None}
    return LiveSet([row.digest for row in rows], roots)


def _measure(connection: Connection, level: int) -> Usage:
    chunks, num_bytes, nodes, node_bytes, stored_bytes = 0, 0, 0, 0, 0
    for kind, count, plain, stored in connection.execute(text(_MEASURE), {"level": level}):
        stored_bytes += int(stored)
        if kind == ObjectKind.CHUNK:
            chunks, num_bytes = count, int(plain)
        else:
            nodes, node_bytes = nodes + count, node_bytes + int(plain)
    return Usage(chunks, num_bytes, nodes, node_bytes, stored_bytes)
