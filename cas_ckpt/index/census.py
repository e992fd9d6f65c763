"""The index in numbers.

Invariant: counts what is there; scans tables, so it is for people, not for every commit.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, FromClause, Select, func, select

from cas_ckpt.index.rows import IndexStats
from cas_ckpt.index.schema import COMMITS, EDGES, LOCATIONS, NOWHERE, PACKS
from cas_ckpt.objects.kinds import ObjectKind


def read_stats(connection: Connection) -> IndexStats:
    """How much of everything the index knows."""
    num_packs, pack_bytes = connection.execute(select(func.count(), func.sum(PACKS.c.size_bytes))).one()
    objects = {ObjectKind(kind): (count, int(size)) for kind, count, size in connection.execute(_by_kind())}
    missing = select(func.count()).select_from(LOCATIONS).where(LOCATIONS.c.pack_id == NOWHERE)
    return IndexStats(
        num_packs=num_packs,
        pack_bytes=int(pack_bytes or 0),
        objects=objects,
        num_commits=_count(connection, COMMITS),
        num_edges=_count(connection, EDGES),
        num_missing=connection.execute(missing).scalar_one(),
    )


def _by_kind() -> Select[Any]:
    """(kind, objects, plain bytes), an object in several extents counted once."""
    each = (
        select(func.max(LOCATIONS.c.kind).label("kind"), func.max(LOCATIONS.c.num_bytes).label("num_bytes"))
        .where(LOCATIONS.c.pack_id != NOWHERE)
        .group_by(LOCATIONS.c.object_id)
        .subquery()
    )
    return select(each.c.kind, func.count(), func.sum(each.c.num_bytes)).group_by(each.c.kind).order_by(each.c.kind)


def _count(connection: Connection, table: FromClause) -> int:
    return connection.execute(select(func.count()).select_from(table)).scalar_one()
