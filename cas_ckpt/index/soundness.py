"""Which objects stand nowhere whole, and what is above them: how far damage reaches.

Invariant: an object is whole if intact extents, in packs that are there, hold every one of its
leaves. Everything is by number, and memory grows with the damage, not with the index. Every answer
is of one transaction of its own, and is refused once the index was made anew. Knows nothing of refs or of keys.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Row, or_, select

from cas_ckpt.errors import ConflictError
from cas_ckpt.index.database import Database
from cas_ckpt.index.mirror import MADE, read_meta
from cas_ckpt.index.rows import UNKNOWN_KIND
from cas_ckpt.index.schema import EDGES, LOCATIONS, NOWHERE, OBJECTS, PACKS
from cas_ckpt.index.statements import batches, rows_for

_OBJECTS_PER_READ = 10_000


@dataclass(frozen=True, slots=True)
class Unusable:
    """What may not be counted on.

    Attributes:
        packs: Names of packs that are gone, or whose structure is broken.
        extents: (pack, offset) of entries that are damaged.
    """

    packs: frozenset[str] = frozenset()
    extents: frozenset[tuple[str, int]] = field(default=frozenset())


class Soundness:
    """Questions about an index that agrees with the packs."""

    def __init__(self, database: Database) -> None:
        self._database = database
        with database.reading() as connection:
            self._made = read_meta(connection, MADE)

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        """A transaction in which numbers mean what they meant at the beginning."""
        with self._database.reading() as connection:
            if read_meta(connection, MADE) != self._made:
                raise ConflictError(f"index {self._database.place}: it was made anew meanwhile: ask again")
            yield connection

    def numbers(self, digests: Iterable[bytes]) -> dict[bytes, int]:
        """Digest -> number; unknown digests are left out."""
        query = select(OBJECTS.c.digest, OBJECTS.c.object_id)
        with self._reading() as connection:
            return {row.digest: row.object_id for row in rows_for(connection, query, OBJECTS.c.digest, digests)}

    def digests(self, numbers: Collection[int]) -> dict[int, bytes]:
        """Number -> digest."""
        query = select(OBJECTS.c.object_id, OBJECTS.c.digest)
        with self._reading() as connection:
            return {row.object_id: row.digest for row in rows_for(connection, query, OBJECTS.c.object_id, numbers)}

    def referred_only(self) -> set[int]:
        """Objects that nodes refer to and that no pack holds."""
        query = select(OBJECTS.c.object_id).where(OBJECTS.c.kind == UNKNOWN_KIND)
        with self._reading() as connection:
            return set(connection.execute(query).scalars())

    def in_parts(self) -> set[int]:
        """Objects of which some extent holds only a part."""
        short = LOCATIONS.c.num_leaves * LOCATIONS.c.leaf_bytes < LOCATIONS.c.num_bytes
        chunks = (LOCATIONS.c.pack_id != NOWHERE) & (LOCATIONS.c.leaf_bytes > 0)
        query = select(LOCATIONS.c.object_id).where(chunks, or_(LOCATIONS.c.first_leaf > 0, short)).distinct()
        with self._reading() as connection:
            return set(connection.execute(query).scalars())

    def in_packs(self, packs: Collection[str]) -> set[int]:
        """Objects of which these packs hold something."""
        if not packs:
            return set()
        query = select(LOCATIONS.c.object_id)
        with self._reading() as connection:
            numbers = [number for number, name in _names(connection).items() if name in packs]
            return {row[0] for row in rows_for(connection, query, LOCATIONS.c.pack_id, numbers)}

    def places(self, pack: str) -> dict[int, int]:
        """Offset -> object, for every entry that the index knows of in the pack."""
        query = select(LOCATIONS.c.offset, LOCATIONS.c.object_id)
        with self._reading() as connection:
            numbers = [number for number, name in _names(connection).items() if name == pack]
            return {row.offset: row.object_id for row in rows_for(connection, query, LOCATIONS.c.pack_id, numbers)}

    def broken(self, numbers: Iterable[int], unusable: Unusable) -> set[int]:
        """Those of the objects that are nowhere whole once `unusable` is left out."""
        found: set[int] = set()
        with self._reading() as connection:
            names = _names(connection)
            for batch in batches(sorted(set(numbers)), _OBJECTS_PER_READ):
                places: dict[int, list[Row[Any]]] = {number: [] for number in batch}
                for row in rows_for(connection, select(LOCATIONS), LOCATIONS.c.object_id, batch):
                    name = names.get(row.pack_id)
                    if name is not None and name not in unusable.packs and (name, row.offset) not in unusable.extents:
                        places[row.object_id].append(row)
                found.update(number for number, rows in places.items() if not _is_whole(rows))
        return found

    def above(self, numbers: Iterable[int]) -> set[int]:
        """These objects and all nodes that lead to them."""
        reached = set(numbers)
        level = reached
        query = select(EDGES.c.parent_id)
        with self._reading() as connection:
            while level:
                parents = {row[0] for row in rows_for(connection, query, EDGES.c.child_id, level)}
                level = parents - reached
                reached = reached | level
        return reached


def _names(connection: Connection) -> dict[int, str]:
    return {number: name for number, name in connection.execute(select(PACKS.c.pack_id, PACKS.c.name))}


def _is_whole(rows: Iterable[Row[Any]]) -> bool:
    reached = 0
    for row in sorted(rows, key=lambda row: (row.first_leaf, -row.num_leaves)):
        if row.leaf_bytes == 0:
            return True
        if row.first_leaf > reached:
            return False
        reached = max(reached, row.first_leaf + row.num_leaves)
        if reached * row.leaf_bytes >= row.num_bytes:
            return True
    return False
