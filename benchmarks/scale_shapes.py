"""Training states of real models on real meshes, as specs and shards, without a tensor.

Duty: fp32 weights with two moments under torchtitan's names, divided by the product's own rules
(layout/target_layout.py); pipeline stages on ranks of their own. Knows nothing of plans.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.shapes import MODELS, llama
from cas_ckpt.layout.holdings import Shard, holdings
from cas_ckpt.layout.target_layout import TargetLayout, parse_layout
from cas_ckpt.objects.spec import Mesh, MeshPlacement, Spec

EIGHTH = "llama3-8B/8"
MIXTRAL = "mixtral-8x7B [E,out,in]"
ALL_MODELS = MODELS | {EIGHTH: llama(1024, 3584, layers=32, kv=256, vocab=32064)}
_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Division:
    """How a state is divided: a mesh, and how many pipeline stages have one of their own each."""

    mesh: str
    stages: int = 1

    @property
    def num_ranks(self) -> int:
        """Ranks of all stages."""
        return parse_layout(self.mesh).world_size * self.stages

    def __str__(self) -> str:
        return self.mesh if self.stages == 1 else f"pp={self.stages},{self.mesh}"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a state and who has what of it."""

    key: str
    spec: Spec
    shards: tuple[Shard, ...]


def keys_and_specs(model: str) -> Iterator[tuple[str, Spec]]:
    """Every parameter and its moments, by key."""
    for weight in ALL_MODELS[model]:
        names = [weight.name.replace("{}", str(copy)) for copy in range(weight.copies)]
        for name in names:
            spec = Spec("float32", weight.shape)
            yield f"model/{name}", spec
            yield f"optim/state/{name}/exp_avg", spec
            yield f"optim/state/{name}/exp_avg_sq", spec


def state(model: str, division: Division) -> list[Tensor]:
    """The whole state; tensors that are placed alike share their shards."""
    layout = parse_layout(division.mesh)
    stages = [_Stage(layout, stage * layout.world_size) for stage in range(division.stages)]
    num_layers = max(weight.copies for weight in ALL_MODELS[model])
    found = []
    for key, spec in keys_and_specs(model):
        stage = stages[_stage_of(key, num_layers, division.stages)]
        found.append(Tensor(key, spec, stage.shards(key, spec)))
    return sorted(found, key=lambda tensor: tensor.key)


class _Stage:
    """A layout on ranks that begin at `first`."""

    def __init__(self, layout: TargetLayout, first: int) -> None:
        self._layout = layout
        self._mesh = Mesh(layout.names, layout.shape, tuple(range(first, first + layout.world_size)))
        self._found: dict[object, tuple[Shard, ...]] = {}

    def shards(self, key: str, spec: Spec) -> tuple[Shard, ...]:
        splits = self._layout.usual(key, spec)
        if (spec.shape, splits) not in self._found:
            self._found[spec.shape, splits] = holdings(spec.shape, [MeshPlacement(self._mesh, splits)])
        return self._found[spec.shape, splits]


def _stage_of(key: str, num_layers: int, stages: int) -> int:
    layer = _LAYER.search(key)
    if layer is not None:
        return int(layer[1]) * stages // num_layers
    return 0 if "embed" in key else stages - 1
