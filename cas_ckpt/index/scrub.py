"""The scrub log: which packs were read and verified whole, when, and what was found.

Invariant: a row says what one reading found and nothing more; a pack without a row was never
read whole. Knows nothing of how packs are read.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, select

from cas_ckpt.index.schema import SCRUBS
from cas_ckpt.index.statements import upsert


@dataclass(frozen=True, slots=True)
class Scrub:
    """One pack, read whole.

    Attributes:
        checked_us: When, microseconds since the epoch.
        num_bytes: How much was read.
        damage: What was wrong; None: nothing.
    """

    pack: str
    checked_us: int
    num_bytes: int
    damage: str | None = None


def read_scrubs(connection: Connection) -> dict[str, Scrub]:
    """Pack -> its last reading."""
    c = SCRUBS.c
    rows = connection.execute(select(c.pack, c.checked_us, c.num_bytes, c.damage))
    return {row.pack: Scrub(row.pack, row.checked_us, row.num_bytes, row.damage) for row in rows}


def write_scrub(connection: Connection, scrub: Scrub) -> None:
    """Put `scrub` in the place of the pack's former reading."""
    row = {
        "pack": scrub.pack,
        "checked_us": scrub.checked_us,
        "num_bytes": scrub.num_bytes,
        "damage": scrub.damage,
    }
    upsert(connection, SCRUBS, row)
