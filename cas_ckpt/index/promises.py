"""Which objects that are not whole in any pack are promised: chunks that the states of promised commits lead to.

    1. upwards from what is absent, to every node that leads to it
    2. downwards from promised roots, along these nodes alone: what of it the promise reaches
    3. of that, the chunks: a chunk names nothing, so that all is known of what lives and what does not

Invariant: a node is never promised. Of one that is absent it is not known what it names, so nobody could collect. The
kind of what is in no pack is told by the nodes that name it. The work follows what is absent and the nodes above it.
Must not know: remotes, refs, or why a commit counts as promised.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sqlalchemy import Column, Connection, Integer, text
from sqlalchemy import Index as TableIndex

from cas_ckpt.index.database import OBJECTS_BY_ID, execute, fill_numbers, insert_missing, number_table, scratch_tables
from cas_ckpt.index.manifests import FLAVOR_STEP
from cas_ckpt.index.trees import read_digests
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.objects.nodes import PAGE_CHUNKS, EntryForm

ABSENT = number_table("absent")
"""Objects that are asked about."""

_ABOVE = number_table("above_absent", Column("level", Integer, nullable=False))
_LED = number_table("led_to", Column("level", Integer, nullable=False))
_ROOTS = number_table("promised_roots")
for _table in (_ABOVE, _LED):
    TableIndex(f"{_table.name}_by_level", _table.c.level)
TABLES = (ABSENT, _ABOVE, _LED, _ROOTS)

_UPWARDS = """
    INSERT INTO above_absent SELECT DISTINCT e.parent_id, :next FROM above_absent a CROSS JOIN t_edges e
    WHERE a.level = :level AND e.child_id = a.object_id ON CONFLICT DO NOTHING
"""
_DOWNWARDS = """
    INSERT INTO led_to SELECT DISTINCT e.child_id, :next FROM led_to d CROSS JOIN t_edges e CROSS JOIN above_absent a
    WHERE d.level = :level AND e.parent_id = d.object_id AND a.object_id = e.child_id ON CONFLICT DO NOTHING
"""
_IS_CHUNK = f"""
    EXISTS (SELECT 1 FROM t_objects o WHERE o.object_id = a.object_id AND o.kind = {int(ObjectKind.CHUNK)})
    OR EXISTS (
        SELECT 1 FROM t_edges e CROSS JOIN t_objects p WHERE e.child_id = a.object_id AND p.object_id = e.parent_id
        AND (p.kind = {int(ObjectKind.CHUNK_PAGE)}
             OR EXISTS (SELECT 1 FROM t_tensors t WHERE t.object_id = p.object_id AND t.num_chunks <= {PAGE_CHUNKS})
             OR EXISTS (SELECT 1 FROM t_entries n WHERE n.node_id = p.object_id AND n.child_id = a.object_id
                        AND (n.form & {FLAVOR_STEP - 1}) = {int(EntryForm.CHUNK)})))
"""
_DROP_PROMISED = f"""
    DELETE FROM absent WHERE object_id IN (
        SELECT a.object_id FROM absent a CROSS JOIN led_to d WHERE d.object_id = a.object_id AND ({_IS_CHUNK}))
"""


def drop_promised(connection: Connection, roots: Iterable[bytes]) -> int:
    """Take what is promised out of `ABSENT`; how many objects that was. `TABLES` are there, the others empty.

    Args:
        roots: Roots of the states of promised commits.
    """
    execute(connection, "INSERT INTO above_absent SELECT object_id, 0 FROM absent WHERE true")
    _spread(connection, _UPWARDS)
    fill_numbers(connection, _ROOTS, roots)
    execute(
        connection,
        "INSERT INTO led_to SELECT r.object_id, 0 FROM promised_roots r CROSS JOIN above_absent a "
        "WHERE a.object_id = r.object_id",
    )
    _spread(connection, _DOWNWARDS)
    return execute(connection, _DROP_PROMISED)


def _spread(connection: Connection, statement: str) -> None:
    level = 0
    while execute(connection, statement, level=level, next=level + 1):
        level += 1


def promised(connection: Connection, digests: Collection[Digest], roots: Collection[bytes]) -> set[Digest]:
    """Those of these objects, which are in no pack, that are promised."""
    if not digests or not roots:
        return set()
    numbers = {number: digest for digest, number, _ in OBJECTS_BY_ID.rows(connection, digests)}
    return {Digest(numbers[number]) for number in promised_numbers(connection, numbers, roots)}


def promised_numbers(connection: Connection, numbers: Iterable[int], roots: Collection[bytes]) -> set[int]:
    """The same for numbers of objects."""
    wanted = set(numbers)
    if not wanted or not roots:
        return set()
    with scratch_tables(connection, *TABLES):
        insert_missing(connection, ABSENT, [(number,) for number in sorted(wanted)])
        drop_promised(connection, roots)
        left = set(connection.execute(text("SELECT object_id FROM absent")).scalars())
    return wanted - left


def some_absent(connection: Connection, limit: int) -> list[bytes]:
    """Up to `limit` ids of `ABSENT`."""
    numbers = list(connection.execute(text(f"SELECT object_id FROM absent LIMIT {int(limit)}")).scalars())
    return sorted(read_digests(connection, numbers).values())
