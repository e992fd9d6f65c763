"""States that are divided over thread ranks: what each rank has of an array, and states made of it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cas_ckpt.layout.holdings import Shard, holdings
from cas_ckpt.layout.save_plan import SavePlan
from cas_ckpt.objects.spec import Box, BoxPlacement, Mesh, MeshPlacement, Placement, Spec, parse_split
from cas_ckpt.objects.state import Container, Item, TensorItem, ValueItem


def mesh(*shape: int, names: Sequence[str] = (), first: int = 0) -> Mesh:
    """A mesh of ranks from `first` on, in order."""
    count = int(np.prod(shape, dtype=int))
    return Mesh(tuple(names) or tuple(f"d{at}" for at in range(len(shape))), shape, tuple(range(first, first + count)))


def over(grid: Mesh, *splits: str) -> MeshPlacement:
    """A placement such as over(mesh(4, 2), "S(0)", "R")."""
    return MeshPlacement(grid, tuple(parse_split(text) for text in splits))


class LocalPieces:
    """What one rank holds: a copy of its pieces and nothing else; global coordinates outside."""

    def __init__(self, array: np.ndarray[Any, Any], shards: Sequence[Shard], rank: int) -> None:
        own = [piece for shard in shards if rank in shard.ranks for piece in shard.pieces]
        self.pieces = [(piece, array[piece.slices].copy()) for piece in own]

    def _view(self, box: Box) -> np.ndarray[Any, Any]:
        for piece, data in self.pieces:
            common = piece.intersect(box)
            if common == box or (not box.sizes and not piece.sizes):
                return data[box.relative_to(piece).slices]
        raise AssertionError(f"{box} is not inside one piece of this rank")

    def read(self, box: Box) -> np.ndarray[Any, Any]:
        return self._view(box)

    def open(self, box: Box) -> np.ndarray[Any, Any]:
        return self._view(box)

    def done(self, box: Box, array: np.ndarray[Any, Any]) -> None:
        """It was a view."""


def divided(array: np.ndarray[Any, Any], placement: Placement, rank: int) -> TensorItem:
    """What `rank` has of `array`, to be committed."""
    shards = holdings(array.shape, [placement])
    return TensorItem(Spec(array.dtype.name, array.shape), LocalPieces(array, shards, rank), "numpy", None, placement)


def state_of(items: Mapping[Any, Any], placements: Mapping[str, Placement], rank: int, prefix: str = "") -> Container:
    """Nested dicts of arrays and values as `rank` has them; keys without a placement are whole."""
    from tests.builders import tensor

    children: dict[Any, Item] = {}
    for name, value in items.items():
        key = f"{prefix}{name}"
        if isinstance(value, np.ndarray):
            placement = placements.get(key)
            children[name] = tensor(value) if placement is None else divided(value, placement, rank)
        elif isinstance(value, dict):
            children[name] = state_of(value, placements, rank, f"{key}/")
        else:
            children[name] = value if isinstance(value, (TensorItem, Container)) else ValueItem(value)
    return Container("dict", children)


def boxes_by_rank(shape: Sequence[int], cuts: Sequence[Sequence[int]], size: int) -> BoxPlacement:
    """Boxes between `cuts` along each dimension, given to the ranks in turn."""
    edges = [sorted({0, extent, *cut}) for extent, cut in zip(shape, cuts, strict=True)]
    spans = [list(itertools.pairwise(edge)) for edge in edges]
    boxes = []
    for number, place in enumerate(itertools.product(*spans)):
        box = Box(tuple(start for start, _ in place), tuple(stop - start for start, stop in place))
        boxes.append((box, (number % size,)))
    return BoxPlacement(tuple(boxes))


def written_bytes(plan: SavePlan, world_size: int) -> list[int]:
    """Plain bytes that each rank would write if everything were new; turns count as equal shares."""
    written = [0.0] * world_size
    for template in plan._templates.values():
        grid, item_bytes = template.grid, template.item_bytes
        for cell, shares in template.shares.items():
            for rank, count in shares:
                written[rank] += count * grid.cell_elements(cell) * item_bytes
        for cell, parts in template.straddling.items():
            shape = template.shape(cell)
            for leaf, owner in enumerate(shape.leaves.owners):
                owners = shape.leaves.equals.get(leaf, (owner,))
                size = min(grid.leaf_bytes, shape.box.num_elements * item_bytes - leaf * grid.leaf_bytes)
                for part in owners:
                    for rank in parts[part][1]:
                        written[rank] += len(template.tensors) * size / len(owners) / len(parts[part][1])
    return [round(num_bytes) for num_bytes in written]
