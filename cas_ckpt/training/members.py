"""Placements in the numbers of a group: torch counts ranks in the world, `Peers` in the group.

Invariant: who holds what stays; only the numbers of the ranks change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from cas_ckpt.errors import UnsupportedValueError
from cas_ckpt.objects.placement import BoxPlacement, Placement
from cas_ckpt.objects.state import Container, Item, Path, TensorCopy, TensorItem, render_key
from cas_ckpt.transfer.peers import Peers


def numbers_of(peers: Peers) -> Mapping[int, int] | None:
    """World rank -> rank in the group; None where they are the same."""
    members = getattr(peers, "members", None)
    if members is None or list(members) == list(range(peers.size)):
        return None
    return {world: own for own, world in enumerate(members)}


def renumbered(item: Item, numbers: Mapping[int, int] | None, path: Path = ()) -> Item:
    """`item` with every placement in the group's numbers.

    Raises:
        UnsupportedValueError: a tensor that a rank outside the group has a part of; names its key.
    """
    if numbers is None:
        return item
    if isinstance(item, Container):
        children = {name: renumbered(child, numbers, (*path, name)) for name, child in item.children.items()}
        return replace(item, children=children)
    if isinstance(item, TensorItem) and item.placement is not None:
        return replace(item, placement=_placement(item.placement, numbers, path))
    return item


def renumbered_copies(copies: Sequence[TensorCopy], numbers: Mapping[int, int] | None) -> Sequence[TensorCopy]:
    """The same for what a checkout fills."""
    if numbers is None:
        return copies
    return [
        copy if copy.placement is None else replace(copy, placement=_placement(copy.placement, numbers, copy.path))
        for copy in copies
    ]


def _placement(placement: Placement, numbers: Mapping[int, int], path: Path) -> Placement:
    try:
        if isinstance(placement, BoxPlacement):
            return BoxPlacement(
                tuple((box, tuple(numbers[rank] for rank in ranks)) for box, ranks in placement.boxes)
            )
        ranks = tuple(numbers[rank] for rank in placement.mesh.ranks)
        return replace(placement, mesh=replace(placement.mesh, ranks=ranks))
    except KeyError as error:
        raise UnsupportedValueError(
            f"{render_key(path)}: rank {error} has a part of it and is not in the group: open the repository with a "
            "group of all ranks that the mesh has"
        ) from error
