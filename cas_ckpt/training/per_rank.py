"""Values that every rank has for itself: positions of data loaders, random numbers.

A per-rank value stands in a commit as a container of kind "ranks": rank -> what that rank had,
with the number of ranks in its attrs.

**The rule of restoring.** A per-rank value is restored if and only if the commit was made by as
many ranks as the checkout has: rank r gets what rank r had. Else it is left untouched, and the
checkout's report lists it (`per_rank_skipped`): what was right for one of 8 ranks is right for
none of 6. A value that stands in the commit as one for all counts as that of a single rank.

Invariant: which values are per rank depends on their types and the number of ranks alone. Must
not know process groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeGuard

from cas_ckpt.errors import CorruptionError
from cas_ckpt.objects.state import RANKS, Container, Item, Path, render_key
from cas_ckpt.training.rng import RNGState
from cas_ckpt.training.stateful import is_stateful

WORLD_SIZE = "world_size"
"""The only attr of a container of kind `RANKS`."""


class PerRank:
    """Holds a value that each rank keeps for itself; all others must be equal on all ranks.

        state = {"model": model, "loader": PerRank(loader), "position": PerRank({"epoch": 3, "at": 17})}

    A checkout restores it in place if the commit was made by as many ranks, see
    `cas_ckpt.training.per_rank`. `RNGState` is per rank by itself.

    Attributes:
        value: A Stateful object, tensor, array, plain value, or a dict, list or tuple of these.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"

    def state_dict(self) -> dict[str, Any]:
        """This rank's value."""
        return {"value": self.value.state_dict() if is_stateful(self.value) else self.value}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        if is_stateful(self.value):
            self.value.load_state_dict(state_dict["value"])
        else:
            self.value = state_dict["value"]


def is_per_rank(value: Any, world_size: int) -> TypeGuard[PerRank | RNGState]:
    """Whether each rank keeps its own `value`; a single rank's RNGState is a value like others."""
    return isinstance(value, PerRank) or (isinstance(value, RNGState) and world_size > 1)


def own_value(value: PerRank | RNGState) -> Any:
    """What this rank keeps."""
    return value.value if isinstance(value, PerRank) else value.state_dict()


def is_ranks(item: Item) -> TypeGuard[Container]:
    """Whether a commit holds a per-rank value here."""
    return isinstance(item, Container) and item.kind == RANKS


def ranks_container(rank: int, item: Item, world_size: int) -> Container:
    """What one rank contributes to a per-rank value."""
    return Container(RANKS, {rank: item}, {WORLD_SIZE: world_size})


def world_size_of(item: Item, path: Path) -> int:
    """How many ranks committed `item`: 1 for what is not kept per rank.

    Raises:
        CorruptionError: a container of ranks that no commit writes.
    """
    if not is_ranks(item):
        return 1
    size = item.attrs.get(WORLD_SIZE) if isinstance(item.attrs, dict) else None
    if type(size) is not int or not all(type(rank) is int and 0 <= rank < size for rank in item.children):
        raise CorruptionError(f"{render_key(path)}: holds values of ranks, but not of which: restore an older commit")
    return size
