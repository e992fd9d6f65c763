"""`--shard I/N`: the packs that one job of N takes, where many share the work that scales with packs.

Invariant: the part of a pack follows from its name alone, which is random and never changes: so the N parts hold each
pack once, for every process, host and time, and are about equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cas_ckpt.core.units import parse_part
from cas_ckpt.errors import InvalidInputError, shown_value

MOST_SHARDS = 100_000


@dataclass(frozen=True, slots=True)
class PackShard:
    """One part of the packs: number `part`, from 1 on, of `parts`."""

    part: int
    parts: int

    def __post_init__(self) -> None:
        if not 1 <= self.part <= self.parts <= MOST_SHARDS:
            raise InvalidInputError(
                f"shard {self.part}/{self.parts}: give I/N with I from 1 to N, N up to {MOST_SHARDS}"
            )

    def __str__(self) -> str:
        return f"{self.part}/{self.parts}"

    def has(self, pack: str) -> bool:
        """Whether the pack under this key is in the part."""
        return int(pack.rpartition("/")[2].partition(".")[0][:8], 16) % self.parts + 1 == self.part

    def of(self, packs: Iterable[str]) -> list[str]:
        """Those of `packs` that are in the part, in their order."""
        return [pack for pack in packs if self.has(pack)]


def parse_shard(text: str) -> PackShard:
    """The part that "2/7", the second of seven, means.

    Raises:
        InvalidInputError: another form.
    """
    found = parse_part(text)
    if found is None:
        raise InvalidInputError(
            f"shard {shown_value(text)}: give I/N, such as 2/7 (the second of seven; not from 0 on)"
        )
    return PackShard(*found)
