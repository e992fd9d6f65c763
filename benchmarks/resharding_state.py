"""A Llama 3 8B at an eighth of its size, as virtual ranks hold it: views of one set of arrays, no copies.

Duty: random weights, and for each rank of a division a state whose sources answer what that rank holds
and refuse everything else. Must not know: stores, commits.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from benchmarks.shapes import llama
from cas_ckpt.layout.holdings import Shard, held_by, holdings, whole
from cas_ckpt.layout.target_layout import TargetLayout, parse_layout
from cas_ckpt.objects.spec import Box, Mesh, MeshPlacement, Spec
from cas_ckpt.objects.state import Container, TensorItem

Array = np.ndarray[Any, Any]

LAYERS = 32
DTYPE, ITEM_BYTES, RAW = "bfloat16", 2, np.uint16
_BLOCK = 1 << 20
_FILL_THREADS = 2
_LAYER = re.compile(r"layers\.(\d+)\.")


class NotHeldError(Exception):
    """A virtual rank was asked for elements that it does not hold."""


def specs(layers: int) -> dict[str, Spec]:
    """Name -> spec: hidden sizes 3/8 of Llama 3 8B's, vocabulary 1/8; 32 layers have 1.03 G parameters."""
    weights = llama(1536, 5376, layers=layers, kv=384, vocab=16032)
    return {w.name.replace("{}", str(copy)): Spec(DTYPE, w.shape) for w in weights for copy in range(w.copies)}


def fill(found: dict[str, Spec]) -> dict[str, Array]:
    """bfloat16 weights of a normal distribution, one array each; the same every time."""
    with ThreadPoolExecutor(_FILL_THREADS) as pool:
        return dict(zip(found, pool.map(_filled, found, found.values()), strict=True))


def _filled(name: str, spec: Spec) -> Array:
    random = np.random.default_rng(zlib.crc32(name.encode()))
    flat = np.empty(math.prod(spec.shape), RAW)
    for start in range(0, len(flat), _BLOCK):
        part = flat[start : start + _BLOCK]
        # The upper half of a float32 is a bfloat16, rounded towards zero.
        part[:] = (0.02 * random.standard_normal(len(part), np.float32)).view(RAW)[1::2]
    return flat.reshape(spec.shape)


@dataclass(frozen=True)
class Division:
    """How the state is divided: pipeline stages, each over ranks of its own in a mesh.

    Attributes:
        name: What people call it.
        mesh: As layout/target_layout.py reads it; "" is one rank with everything.
        layers: Fewer layers than the table's state, where a whole one takes too long.
    """

    name: str
    mesh: str = ""
    stages: int = 1
    layers: int | None = None
    _placed: dict[Any, MeshPlacement] = field(default_factory=dict, compare=False, repr=False)
    _shards: dict[Any, tuple[Shard, ...]] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def _layout(self) -> TargetLayout:
        return parse_layout(self.mesh or "dp=1")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._layout.world_size * self.stages

    def stage_of(self, name: str, num_layers: int) -> int:
        """Pipeline stage that has a tensor."""
        layer = _LAYER.search(name)
        if layer is not None:
            return int(layer[1]) * self.stages // num_layers
        return 0 if "embed" in name else self.stages - 1

    def placement(self, name: str, spec: Spec, stage: int) -> MeshPlacement | None:
        """Where a tensor goes; None on one rank that has all."""
        if not self.mesh:
            return None
        splits = self._layout.usual(name, spec)
        found = self._placed.get((splits, stage))
        if found is None:
            first = stage * self._layout.world_size
            ranks = tuple(range(first, first + self._layout.world_size))
            mesh = Mesh(self._layout.names, self._layout.shape, ranks)
            found = self._placed[splits, stage] = MeshPlacement(mesh, splits)
        return found

    def shards(self, name: str, spec: Spec, stage: int) -> tuple[Shard, ...]:
        """Who holds what of a tensor; one object for tensors that are divided alike, as plans want it."""
        placed = self.placement(name, spec, stage)
        like = (spec.shape, id(placed))
        if like not in self._shards:
            found = whole(spec.shape, [0]) if placed is None else holdings(spec.shape, [placed])
            self._shards[like] = found
        return self._shards[like]


class HeldViews:
    """What one virtual rank holds of an array: views inside its pieces."""

    def __init__(self, array: Array, placement: MeshPlacement | None, rank: int) -> None:
        self._array = array
        self._placement = placement
        self._rank = rank

    @cached_property
    def _pieces(self) -> Sequence[Box]:
        if self._placement is None:
            return [Box((0,) * self._array.ndim, self._array.shape)]
        return [box for box, _ in held_by(self._rank, self._array.shape, self._placement)]

    def read(self, box: Box) -> Array:
        """The elements of `box`, a view."""
        if not any(piece.intersect(box) == box for piece in self._pieces):
            raise NotHeldError(f"rank {self._rank} does not hold {box}")
        return self._array[box.slices]


def state_of(division: Division, arrays: dict[str, Array], found: dict[str, Spec], rank: int) -> Container:
    """The state of one rank: the keys of its stage, each with its source."""
    items = {name: item for name, item in _items(division, arrays, found, rank)}
    return Container("dict", {"model": Container("dict", dict(items))})


def _items(
    division: Division, arrays: dict[str, Array], found: dict[str, Spec], rank: int
) -> Iterator[tuple[str, TensorItem]]:
    num_layers = num_layers_of(found)
    own_stage = rank * division.stages // division.size
    for name, spec in found.items():
        if division.stage_of(name, num_layers) == own_stage:
            placed = division.placement(name, spec, own_stage)
            yield name, TensorItem(spec, HeldViews(arrays[name], placed, rank), "torch", None, placed)


def num_layers_of(found: dict[str, Spec]) -> int:
    """Layers of the state."""
    return 1 + max(int(layer[1]) for name in found if (layer := _LAYER.search(name)))
