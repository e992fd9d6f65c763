"""Questions that go upward: who refers to this, and through whom, up to the commits.

Invariant: edges are followed from child to parent, each once however many ways lead over it; a
commit is reached through its root (or is itself asked for, or by its layout). All commits that the
index knows may be answers, also forgotten ones. Must not know which of them live.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

from sqlalchemy import Connection, func, select, text

from cas_ckpt.index.rows import UNKNOWN_KIND
from cas_ckpt.index.schema import LOCATIONS, NOWHERE, OBJECTS
from cas_ckpt.index.scratch import execute, number_table, scratch_tables
from cas_ckpt.index.statements import insert_missing, rows_for

_FRONTIER = number_table("frontier")
_ABOVE = number_table("above")
_Masks: TypeAlias = dict[int, int]
"""Number of an object -> the chunks below it, one bit each."""

_CLIMB = """
    INSERT INTO above WITH RECURSIVE climbed(object_id) AS (
        SELECT object_id FROM objects WHERE digest = :digest
        UNION SELECT e.parent_id FROM climbed a CROSS JOIN edges e WHERE e.child_id = a.object_id
    ) SELECT object_id FROM climbed
"""
_HOLDING = """
    SELECT c.object_id, c.digest FROM commits c CROSS JOIN objects o CROSS JOIN above a
    WHERE o.digest = c.root AND a.object_id = o.object_id
    UNION SELECT c.object_id, c.digest FROM commits c
    WHERE c.layout = :digest OR c.root = :digest OR c.digest = :digest
    ORDER BY 1
"""


class Shared(NamedTuple):
    """How much of what was asked for stands in a commit.

    Attributes:
        num_chunks: How many of the chunks.
        num_bytes: Their plain bytes.
    """

    commit: bytes
    num_chunks: int
    num_bytes: int


def commits_holding(connection: Connection, digest: bytes) -> list[bytes]:
    """The commits whose state contains the object (chunk, tensor, tree, page), the first known first.

    A layout is held by the commits that name it, a commit by itself.
    """
    with scratch_tables(connection, _ABOVE):
        execute(connection, _CLIMB, digest=digest)
        return [row.digest for row in connection.execute(text(_HOLDING), {"digest": digest})]


def nearest(connection: Connection, digests: Iterable[bytes], *, limit: int) -> list[Shared]:
    """The commits that share the most bytes with these chunks, the best first, of equals the youngest.

    Args:
        digests: Chunks of a state, or a sample of some hundred of them.
    """
    query = select(OBJECTS.c.object_id).where(OBJECTS.c.kind != UNKNOWN_KIND)
    numbers = [row.object_id for row in rows_for(connection, query, OBJECTS.c.digest, digests)]
    if not numbers:
        return []
    masks = _masks(connection, {number: 1 << bit for bit, number in enumerate(numbers)})
    sizes = _bits_by_size(connection, numbers)
    roots = connection.execute(
        text(
            "SELECT c.object_id AS number, c.digest, o.object_id AS root FROM commits c CROSS JOIN objects o "
            "WHERE o.digest = c.root"
        )
    )
    found = [(masks[row.root], row.number, row.digest) for row in roots if row.root in masks]
    worth = {mask: sum(size * (mask & bits).bit_count() for size, bits in sizes.items()) for mask, _, _ in found}
    found.sort(key=lambda each: (-worth[each[0]], -each[0].bit_count(), -each[1]))
    return [Shared(digest, mask.bit_count(), worth[mask]) for mask, _, digest in found[:limit]]


def _masks(connection: Connection, starts: Mapping[int, int]) -> _Masks:
    """The chunks below every object above the starts, level by level; only news go further up."""
    masks: _Masks = dict(starts)
    news: _Masks = dict(starts)
    with scratch_tables(connection, _FRONTIER):
        while news:
            risen: _Masks = {}
            for parents, mask in _upward(connection, news).items():
                for parent in map(int, parents.split(",")):
                    risen[parent] = risen.get(parent, 0) | mask
            news = {}
            for parent, mask in risen.items():
                before = masks.get(parent, 0)
                if mask | before != before:
                    masks[parent], news[parent] = mask | before, mask & ~before
    return masks


def _upward(connection: Connection, news: _Masks) -> dict[str, int]:
    """Parents, as a list in one text, -> all the chunks below the objects that have just these parents.

    A text for each child costs a tenth of a row for each edge; and what is in every commit has the
    same thousand parents.
    """
    connection.execute(_FRONTIER.delete())
    insert_missing(connection, _FRONTIER, [(number,) for number in sorted(news)])
    sqlite = connection.dialect.name == "sqlite"
    parents = "group_concat(e.parent_id)" if sqlite else "string_agg(CAST(e.parent_id AS TEXT), ',')"
    rows = connection.execute(
        text(f"SELECT f.object_id, (SELECT {parents} FROM edges e WHERE e.child_id = f.object_id) FROM frontier f")
    )
    found: dict[str, int] = {}
    for child, joined in rows:
        if joined is not None:
            found[joined] = found.get(joined, 0) | news[child]
    return found


def _bits_by_size(connection: Connection, numbers: list[int]) -> dict[int, int]:
    """Plain bytes -> the chunks that are so big, one bit each."""
    query = (
        select(LOCATIONS.c.object_id, func.max(LOCATIONS.c.num_bytes).label("num_bytes"))
        .where(LOCATIONS.c.pack_id != NOWHERE)
        .group_by(LOCATIONS.c.object_id)
    )
    bits = {number: 1 << bit for bit, number in enumerate(numbers)}
    found: dict[int, int] = {}
    for row in rows_for(connection, query, LOCATIONS.c.object_id, numbers):
        found[row.num_bytes] = found.get(row.num_bytes, 0) | bits[row.object_id]
    return found
