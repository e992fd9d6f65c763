"""Chunks that stand in parts: several ranks wrote some leaves each.

Invariant: names packs, and changes nothing. A scan of all locations: for whoever rewrites packs.
"""

from __future__ import annotations

from sqlalchemy import Connection, select

from cas_ckpt.index.schema import LOCATIONS, NOWHERE, PACKS


def packs_in_parts(connection: Connection) -> set[str]:
    """Names of the packs that hold an extent which is not a whole chunk."""
    c = LOCATIONS.c
    part = (c.first_leaf > 0) | (c.num_leaves * c.leaf_bytes < c.num_bytes)
    packs = select(c.pack_id).where(c.pack_id != NOWHERE, c.leaf_bytes > 0, part).distinct()
    return set(connection.execute(select(PACKS.c.name).where(PACKS.c.pack_id.in_(packs))).scalars())
