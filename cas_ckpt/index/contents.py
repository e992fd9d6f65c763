"""Questions about objects and packs: what is known, where it is stored, which ids begin like this.

Invariant: objects that are only referred to (kind 0) are never an answer. Knows nothing of commits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sqlalchemy import Connection, func, select

from cas_ckpt.errors import InvalidInputError
from cas_ckpt.index.rows import UNKNOWN_KIND
from cas_ckpt.index.schema import LOCATIONS, NOWHERE, OBJECTS, PACKS
from cas_ckpt.index.sql import KeyQuery, rows_of
from cas_ckpt.objects.digest import DIGEST_BYTES, ObjectKind
from cas_ckpt.objects.pack import Location

_KINDS = {int(kind): kind for kind in ObjectKind}

_LOCATED = KeyQuery(
    select(
        OBJECTS.c.digest,
        LOCATIONS.c.pack_id,
        LOCATIONS.c.kind,
        LOCATIONS.c.num_bytes,
        LOCATIONS.c.first_leaf,
        LOCATIONS.c.num_leaves,
        LOCATIONS.c.leaf_bytes,
        LOCATIONS.c.offset,
        LOCATIONS.c.header_bytes,
        LOCATIONS.c.stored_bytes,
        LOCATIONS.c.encoding,
        LOCATIONS.c.base,
    )
    .join(LOCATIONS, LOCATIONS.c.object_id == OBJECTS.c.object_id)
    .where(LOCATIONS.c.pack_id != NOWHERE),
    OBJECTS.c.digest,
)
PARTIAL = (LOCATIONS.c.first_leaf > 0) | (LOCATIONS.c.num_leaves * LOCATIONS.c.leaf_bytes < LOCATIONS.c.num_bytes)
"""A location that does not hold its whole object; chunks in parts may be incomplete."""

_PACK_NAMES = KeyQuery(select(PACKS.c.pack_id, PACKS.c.name), PACKS.c.pack_id)
_PACK_SIZES = select(PACKS.c.name, PACKS.c.size_bytes)
_KNOWN = KeyQuery(select(OBJECTS.c.digest).where(OBJECTS.c.kind != UNKNOWN_KIND), OBJECTS.c.digest)
_OBJECT = KeyQuery(select(OBJECTS.c.digest, OBJECTS.c.kind), OBJECTS.c.digest)


def chunk_digests(connection: Connection) -> set[bytes]:
    """The ids of all chunks that are in some pack in one extent; those in parts may be incomplete."""
    parts = select(LOCATIONS.c.object_id).where(LOCATIONS.c.pack_id != NOWHERE, PARTIAL)
    query = select(OBJECTS.c.digest).where(OBJECTS.c.kind == ObjectKind.CHUNK)
    return set(connection.execute(query.where(OBJECTS.c.object_id.not_in(parts))).scalars())


def chunks_and_packs(connection: Connection) -> tuple[set[bytes], set[str]]:
    """`chunk_digests`, and the names of the packs that were known at the same moment."""
    return chunk_digests(connection), set(connection.execute(select(PACKS.c.name)).scalars())


def pack_sizes(connection: Connection) -> dict[str, int]:
    """Name -> size in bytes of every pack."""
    return dict(rows_of(connection, _PACK_SIZES))


def count_chunks(connection: Connection) -> int:
    """How many chunks are in some pack."""
    query = select(func.count()).select_from(OBJECTS).where(OBJECTS.c.kind == ObjectKind.CHUNK)
    return connection.execute(query).scalar_one()


def known(connection: Connection, digests: Iterable[bytes]) -> set[bytes]:
    """Those of `digests` that are in some pack."""
    return {row[0] for row in _KNOWN.rows(connection, digests)}


def locate(connection: Connection, digests: Iterable[bytes]) -> dict[bytes, list[Location]]:
    """Digest -> all its extents, sorted by (pack number, first leaf); unknown digests are left out."""
    rows = list(_LOCATED.rows(connection, digests))
    names = dict(_PACK_NAMES.rows(connection, {row[1] for row in rows}))
    kinds = _KINDS
    found: dict[bytes, list[Location]] = {}
    for digest, pack_id, kind, *rest in rows:
        found.setdefault(digest, []).append(Location(names[pack_id], kinds[kind], *rest))
    return found


def resolve_prefix(
    connection: Connection, prefix: str, kinds: Collection[ObjectKind] = (ObjectKind.COMMIT,), *, limit: int = 16
) -> list[bytes]:
    """Up to `limit` ids of these kinds that begin with the hexadecimal digits `prefix`, ascending.

    Raises:
        InvalidInputError: `prefix` is not a hexadecimal number, or longer than an id.
    """
    digits = 2 * DIGEST_BYTES
    if not prefix or len(prefix) > digits or not set(prefix) <= set("0123456789abcdefABCDEF"):
        raise InvalidInputError(f"wanted 1 to {digits} hexadecimal digits of an id, found {prefix!r}")
    low, high = (bytes.fromhex(prefix.ljust(digits, filling)) for filling in "0f")
    if low == high:  # a whole id: asked by every verb that was given one
        return [digest for digest, kind in _OBJECT.rows(connection, [low]) if _KINDS.get(kind) in kinds][:limit]
    query = select(OBJECTS.c.digest).where(OBJECTS.c.digest.between(low, high))
    query = query.where(OBJECTS.c.kind.in_([int(kind) for kind in kinds])).order_by(OBJECTS.c.digest).limit(limit)
    return list(connection.execute(query).scalars())


def packs_in_parts(connection: Connection) -> set[str]:
    """Names of the packs that hold an extent which is not a whole chunk, as several ranks wrote some leaves each.

    A scan of all locations: for whoever rewrites packs.
    """
    c = LOCATIONS.c
    packs = select(c.pack_id).where(c.pack_id != NOWHERE, c.leaf_bytes > 0, PARTIAL).distinct()
    return set(connection.execute(select(PACKS.c.name).where(PACKS.c.pack_id.in_(packs))).scalars())
