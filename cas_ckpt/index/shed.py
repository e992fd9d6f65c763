"""Taking packs out of the index.

Invariant: one transaction. What lay only in the packs that go is unknown afterwards, and so
are the edges and commits that it held; what others still refer to keeps its number with kind 0.
Costs a scan of the tables, which is what garbage collection costs anyway.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import Connection, delete, insert, literal, select, update

from cas_ckpt.index.rows import UNKNOWN_KIND
from cas_ckpt.index.schema import COMMITS, EDGES, LOCATIONS, METRICS, MORE_PARENTS, NOWHERE, OBJECTS, PACKS
from cas_ckpt.index.statements import batches, rows_for

_PACKS_PER_STATEMENT = 250


def drop_packs(connection: Connection, names: Iterable[str]) -> int:
    """Forget these packs and what lay in them alone; returns how many packs were known."""
    query = select(PACKS.c.pack_id)
    numbers = sorted(row.pack_id for row in rows_for(connection, query, PACKS.c.name, names))
    for batch in batches(numbers, _PACKS_PER_STATEMENT):
        _mark_nowhere(connection, batch)
        connection.execute(delete(LOCATIONS).where(LOCATIONS.c.pack_id.in_(batch)))
        connection.execute(delete(PACKS).where(PACKS.c.pack_id.in_(batch)))
    if numbers:
        _forget_homeless(connection)
    return len(numbers)


def _mark_nowhere(connection: Connection, packs: Iterable[int]) -> None:
    """Give objects that lie in these packs and in no other a location in pack 0."""
    elsewhere = LOCATIONS.alias()
    stays = (elsewhere.c.object_id == LOCATIONS.c.object_id) & elsewhere.c.pack_id.not_in(packs)
    values = [
        LOCATIONS.c.object_id,
        *(literal(0).label(c.name) for c in LOCATIONS.c if c.name not in ("object_id", "base")),
    ]
    homeless = (
        select(*values)
        .where(LOCATIONS.c.pack_id.in_(packs), ~select(elsewhere.c.object_id).where(stays).exists())
        .distinct()
    )
    names = [column.name for column in LOCATIONS.c if column.name != "base"]
    connection.execute(insert(LOCATIONS).from_select(names, homeless))


def _forget_homeless(connection: Connection) -> None:
    """Remove what objects without a pack said, and those that nothing refers to altogether."""
    homeless = select(LOCATIONS.c.object_id).where(LOCATIONS.c.pack_id == NOWHERE)
    connection.execute(delete(EDGES).where(EDGES.c.parent_id.in_(homeless)))
    for table in (COMMITS, MORE_PARENTS, METRICS):
        connection.execute(delete(table).where(table.c.object_id.in_(homeless)))
    connection.execute(update(OBJECTS).where(OBJECTS.c.object_id.in_(homeless)).values(kind=UNKNOWN_KIND))
    wanted = select(EDGES.c.child_id)
    unwanted = (LOCATIONS.c.pack_id == NOWHERE) & LOCATIONS.c.object_id.not_in(wanted)
    connection.execute(delete(LOCATIONS).where(unwanted))
    connection.execute(
        delete(OBJECTS).where(OBJECTS.c.kind == UNKNOWN_KIND, OBJECTS.c.object_id.not_in(select(LOCATIONS.c.object_id)))
    )
