"""How a spec is divided over ranks: meshes and placements, as values.

Invariant: a placement describes every rank's part, not only the own one, so that all ranks
that hold equal placements make equal plans without talking. Knows nothing of torch; which
elements follow from a placement is layout/holdings.py.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, TypeAlias

from cas_ckpt.errors import InvalidInputError
from cas_ckpt.objects.spec import Box


@dataclass(frozen=True, slots=True)
class Mesh:
    """A grid of ranks.

    Attributes:
        names: One name per dimension ("" where it has none).
        shape: Ranks along each dimension.
        ranks: World rank of every place, in C order; all different.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        num_ranks = len(self.ranks)
        if len(self.names) != len(self.shape) or not math.prod(self.shape) == len(set(self.ranks)) == num_ranks:
            raise InvalidInputError(f"mesh {self.names} of shape {self.shape} does not fit {len(self.ranks)} ranks")


@dataclass(frozen=True, slots=True)
class Split:
    """What one mesh dimension does to a tensor.

    Attributes:
        dim: Tensor dimension that is cut along this mesh dimension; None: every rank has all.
        stride: 1 for consecutive parts (torch's Shard). More for torch's _StridedShard: the
            dimension is first cut into `stride` parts and each of them along the mesh.
    """

    dim: int | None = None
    stride: int = 1

    def __str__(self) -> str:
        if self.dim is None:
            return "R"
        return f"S({self.dim})" if self.stride == 1 else f"SS({self.dim},{self.stride})"


_SPLIT = re.compile(r"R|S\((\d{1,4})\)|SS\((\d{1,4}),(\d{1,9})\)")


def parse_split(text: str) -> Split:
    """The split that `str` wrote.

    Raises:
        InvalidInputError: it is none.
    """
    found = _SPLIT.fullmatch(text)
    if found is None:
        raise InvalidInputError(f"placement {text!r} is none: wanted R, S(dim) or SS(dim,stride)")
    plain, strided, stride = found.groups()
    if strided is not None:
        return Split(int(strided), int(stride))
    return Split() if plain is None else Split(int(plain))


@dataclass(frozen=True, slots=True)
class MeshPlacement:
    """A tensor divided over a mesh: one split per mesh dimension, applied in order (as DTensor does)."""

    mesh: Mesh
    splits: tuple[Split, ...]


@dataclass(frozen=True, slots=True)
class BoxPlacement:
    """A tensor of which ranks hold boxes that follow no rule: (box, ranks that hold it), in any order."""

    boxes: tuple[tuple[Box, tuple[int, ...]], ...]


Placement: TypeAlias = MeshPlacement | BoxPlacement


def pack_placement(placement: Placement) -> list[Any]:
    """`placement` as lists of text and numbers, to be told to other ranks."""
    if isinstance(placement, BoxPlacement):
        return [[list(box.offsets), list(box.sizes), list(ranks)] for box, ranks in placement.boxes]
    mesh = placement.mesh
    return ["mesh", list(mesh.names), list(mesh.shape), list(mesh.ranks), list(map(str, placement.splits))]


def unpack_placement(packed: Any) -> Placement:
    """What `pack_placement` packed.

    Raises:
        InvalidInputError, TypeError, ValueError: it is none.
    """
    if not packed or packed[0] != "mesh":
        return BoxPlacement(tuple((_box(offsets, sizes), _counts(ranks)) for offsets, sizes, ranks in packed))
    _, names, shape, ranks, splits = packed
    return MeshPlacement(Mesh(tuple(names), _counts(shape), _counts(ranks)), tuple(map(parse_split, splits)))


def _box(offsets: Any, sizes: Any) -> Box:
    if len(offsets) != len(sizes):
        raise InvalidInputError(f"a box of {len(offsets)} offsets and {len(sizes)} sizes: wanted one pair a dimension")
    return Box(_counts(offsets), _counts(sizes))


def _counts(values: Any) -> tuple[int, ...]:
    if any(type(value) is not int or value < 0 for value in values):
        raise InvalidInputError("a placement counts with something that is no whole number from 0 on")
    return tuple(values)
