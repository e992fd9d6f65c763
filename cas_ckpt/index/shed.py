"""Taking packs out of the index.

    1. what lies in the packs loses those locations; what lay in them alone is homeless
    2. what the homeless said goes: their edges, and the rows of commits
    3. the homeless, and what they referred to, are looked at: is there anything that refers to them?
       seen or not, what is referred to keeps its number; unseen without a reference, it goes;
       seen without a reference, it becomes a suspect for the next collection

Invariant: one transaction. What lay only in the packs that go is unknown afterwards, and so
are the edges and commits that it held; what others still refer to keeps its number with kind 0 and a
location in pack 0. The work follows what is dropped. Numbers may be given again, of packs and of
objects, so that nothing may remember one that went.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import Connection, select

from cas_ckpt.index.mirror import note_newer
from cas_ckpt.index.rows import UNKNOWN_KIND
from cas_ckpt.index.schema import COMMITS, LINEAGE, METRICS, MORE_PARENTS, NOWHERE, PACKS
from cas_ckpt.index.scratch import execute, number_table, scratch_tables
from cas_ckpt.index.statements import insert_missing, rows_for
from cas_ckpt.index.suspects import clamp_watermark, has_deltas

_DROPPED = number_table("dropped")
"""Numbers of packs."""

_TOUCHED = number_table("touched")
"""Objects that lay in them."""

_HOMELESS = number_table("homeless")
"""Objects that lay in them alone."""

_LEFT = number_table("left_behind")
"""What the homeless referred to, and themselves."""

_GONE = number_table("gone")
"""Objects that no row is to name any more."""

_MISSING = f"""
    INSERT INTO locations (object_id, pack_id, first_leaf, kind, num_bytes, num_leaves, leaf_bytes, "offset",
                           header_bytes, stored_bytes, encoding)
    SELECT h.object_id, {NOWHERE}, 0, {UNKNOWN_KIND}, 0, 0, 0, 0, 0, 0, 0 FROM homeless h WHERE true
"""
_UNREFERRED = "NOT EXISTS (SELECT 1 FROM edges e WHERE e.child_id = b.object_id)"
_NO_BASE = """
    AND NOT EXISTS (SELECT 1 FROM objects o CROSS JOIN locations d
                    WHERE o.object_id = b.object_id AND d.base = o.digest)
"""
_NOWHERE = f"EXISTS (SELECT 1 FROM locations l WHERE l.object_id = b.object_id AND l.pack_id = {NOWHERE})"


def drop_packs(connection: Connection, names: Iterable[str]) -> int:
    """Forget these packs and what lay in them alone; returns how many packs were known."""
    wanted = sorted(set(names))
    numbers = [(row.pack_id,) for row in rows_for(connection, select(PACKS.c.pack_id), PACKS.c.name, wanted)]
    if not numbers:
        return 0
    with scratch_tables(connection, _DROPPED, _TOUCHED, _HOMELESS, _LEFT, _GONE):
        insert_missing(connection, _DROPPED, sorted(numbers))
        deltas = has_deltas(connection)
        _take_away(connection, deltas=deltas)
        _silence_homeless(connection)
        _let_go(connection, deltas=deltas)
        execute(connection, "DELETE FROM scrubs WHERE pack IN "
                "(SELECT p.name FROM dropped d CROSS JOIN packs p WHERE p.pack_id = d.object_id)")  # fmt: skip
        execute(connection, "DELETE FROM packs WHERE pack_id IN (SELECT object_id FROM dropped)")
    clamp_watermark(connection)
    note_newer(connection, gone=wanted)
    return len(numbers)


def _take_away(connection: Connection, *, deltas: bool) -> None:
    """Remove the locations in these packs, and find out what is homeless without them."""
    lying = "FROM dropped d CROSS JOIN locations l WHERE l.pack_id = d.object_id"
    execute(connection, f"INSERT INTO touched SELECT l.object_id {lying} ON CONFLICT DO NOTHING")
    if deltas:
        execute(
            connection,
            "INSERT INTO left_behind SELECT o.object_id FROM dropped d CROSS JOIN locations l CROSS JOIN objects o "
            "WHERE l.pack_id = d.object_id AND l.base IS NOT NULL AND o.digest = l.base ON CONFLICT DO NOTHING",
        )
    execute(connection, "DELETE FROM locations WHERE pack_id IN (SELECT object_id FROM dropped)")
    execute(
        connection,
        "INSERT INTO homeless SELECT t.object_id FROM touched t "
        "WHERE NOT EXISTS (SELECT 1 FROM locations l WHERE l.object_id = t.object_id)",
    )
    execute(  # what lies elsewhere may lie there in part
        connection,
        "INSERT INTO suspects SELECT t.object_id, 0 FROM touched t "
        "WHERE t.object_id NOT IN (SELECT object_id FROM homeless) ON CONFLICT DO NOTHING",
    )


def _silence_homeless(connection: Connection) -> None:
    """Remove what the homeless said, noting whom they spoke of."""
    execute(connection, "INSERT INTO left_behind SELECT object_id FROM homeless WHERE true ON CONFLICT DO NOTHING")
    execute(
        connection,
        "INSERT INTO left_behind SELECT e.child_id FROM homeless h CROSS JOIN edges e "
        "WHERE e.parent_id = h.object_id ON CONFLICT DO NOTHING",
    )
    for column in ("root", "layout"):
        execute(
            connection,
            "INSERT INTO left_behind SELECT o.object_id FROM homeless h CROSS JOIN commits c CROSS JOIN objects o "
            f"WHERE c.object_id = h.object_id AND o.digest = c.{column} ON CONFLICT DO NOTHING",
        )
    execute(connection, "DELETE FROM edges WHERE parent_id IN (SELECT object_id FROM homeless)")
    for table in (MORE_PARENTS, METRICS, LINEAGE, COMMITS):
        execute(connection, f"DELETE FROM {table.name} WHERE object_id IN (SELECT object_id FROM homeless)")
    execute(connection, f"UPDATE objects SET kind = {UNKNOWN_KIND} WHERE object_id IN (SELECT object_id FROM homeless)")
    execute(connection, _MISSING)


def _let_go(connection: Connection, *, deltas: bool) -> None:
    """Remove what is nowhere and not referred to; suspect what is somewhere and not referred to."""
    alone = _UNREFERRED + (_NO_BASE if deltas else "")
    execute(connection, f"INSERT INTO gone SELECT b.object_id FROM left_behind b WHERE {_NOWHERE} AND {alone}")
    execute(
        connection,
        f"INSERT INTO suspects SELECT b.object_id, 1 FROM left_behind b WHERE NOT {_NOWHERE} AND {alone} "
        "ON CONFLICT (object_id) DO UPDATE SET referred = 1",
    )
    execute(connection, "DELETE FROM suspects WHERE object_id IN (SELECT object_id FROM homeless)")
    for table in ("locations", "objects"):
        execute(connection, f"DELETE FROM {table} WHERE object_id IN (SELECT object_id FROM gone)")
