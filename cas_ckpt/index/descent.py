"""Lineage: what commits say that their states were made from, apart from their parents.

Invariant: edges come in the order in which their commit gives them. Most commits have none, and a
repository without any pays for one look at an empty table.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import Connection, select

from cas_ckpt.index.schema import COMMITS, LINEAGE
from cas_ckpt.index.statements import rows_for
from cas_ckpt.objects.commit import LineageEdge
from cas_ckpt.objects.digest import Digest


def read_lineage(connection: Connection, numbers: Iterable[int]) -> dict[int, tuple[LineageEdge, ...]]:
    """Number of a commit -> its edges; commits without any are left out."""
    if connection.execute(select(LINEAGE.c.object_id).limit(1)).scalar() is None:
        return {}
    found: dict[int, tuple[LineageEdge, ...]] = {}
    query = select(LINEAGE).order_by(LINEAGE.c.object_id, LINEAGE.c.position)
    for row in rows_for(connection, query, LINEAGE.c.object_id, numbers):
        edge = LineageEdge(row.kind, Digest(row.target), row.note)
        found[row.object_id] = (*found.get(row.object_id, ()), edge)
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
