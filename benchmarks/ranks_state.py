"""What four ranks hold in `benchmarks.ranks`: a GPT's fp32 weights and two moments, sharded or replicated.

Duty: one rank's part of a state, deterministic, filled or zeroed, and a check of what a load brought.
fsdp: DTensors, Shard(0) over a 1-D mesh. ddp: whole tensors, equal on every rank. Must not know: who saves.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.shapes import gpt2

WIDTH = 768
KINDS = ("weight", "exp_avg", "exp_avg_sq")
FLOAT_BYTES = 4


def shapes(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every parameter by name."""
    for weight in gpt2(WIDTH, layers=layers):
        yield from ((weight.name.replace("{}", str(copy)), weight.shape) for copy in range(weight.copies))


def state_bytes(layers: int) -> int:
    """Plain bytes of the whole state: each element counted once, however many ranks have it."""
    return len(KINDS) * FLOAT_BYTES * sum(math.prod(shape) for _, shape in shapes(layers))


class RankState:
    """This rank's part of the state.

    Attributes:
        parts: Nested dicts, as both sides take them.
        local: This rank's own memory by name.
    """

    def __init__(self, layout: str, layers: int, *, blank: bool) -> None:
        self._mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if layout == "fsdp" else None
        self._blank = blank
        self.local: dict[str, Tensor] = {}
        model, moments = {}, {}
        for name, shape in shapes(layers):
            weight, *slots = (self._tensor(f"{name}.{kind}", shape) for kind in KINDS)
            model[name] = weight
            moments[name] = dict(zip(KINDS[1:], slots, strict=True))
        self.parts: dict[str, Any] = {"model": model, "optim": {"state": moments}}

    def _tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if self._mesh is None:
            return self._local(name, shape)
        size, _ = Shard.local_shard_size_and_offset(shape[0], dist.get_world_size(), dist.get_rank())
        local = self._local(name, (size, *shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        whole = torch.Size(shape)
        return DTensor.from_local(local, self._mesh, [Shard(0)], run_check=False, shape=whole, stride=stride)

    def _local(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.zeros(shape)
        tensor = self.local[name] = tensor.zero_() if self._blank else self._filled(name, tensor)
        return tensor

    def _filled(self, name: str, tensor: Tensor) -> Tensor:
        """Values as a training has them: moments small, their squares positive."""
        part = "" if self._mesh is None else f"@{dist.get_rank()}"
        tensor.normal_(generator=torch.Generator().manual_seed(zlib.crc32(f"{name}{part}".encode())))
        if name.endswith("exp_avg"):
            return tensor.mul_(1e-3)
        return tensor.square_().mul_(1e-6) if name.endswith("exp_avg_sq") else tensor.mul_(0.02)

    def wrong(self, *, every: int = 5) -> list[str]:
        """Names of sampled tensors (each `every`-th and the last) that are not what they are to be."""
        names = list(self.local)
        sample = dict.fromkeys((*names[::every], names[-1]))
        return [n for n in sample if not torch.equal(self._filled(n, torch.empty_like(self.local[n])), self.local[n])]
