"""LoRA: the base model stays as it is, small low-rank matrices beside its linear layers learn.

The base is the submodule `base`, the adapters are `adapters`: so `frozen="model/base/**"` names
everything that does not change.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from examples.demo.model import GPT, Attention


class Adapter(nn.Module):
    """x -> up(down(x)) * scale; gives zero until it has learned something."""

    def __init__(self, linear: nn.Linear, *, rank: int, scale: float = 2.0) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.down.T @ self.up.T * self.scale


class LoraGPT(nn.Module):
    """A GPT whose attention projections have adapters; its own parameters take no gradient."""

    def __init__(self, base: GPT, *, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        attentions = [module for module in base.modules() if isinstance(module, Attention)]
        linears = [linear for attention in attentions for linear in (attention.qkv, attention.out)]
        self.adapters = nn.ModuleList(Adapter(linear, rank=rank) for linear in linears)
        for linear, adapter in zip(linears, self.adapters, strict=True):
            linear.register_forward_hook(partial(_add, adapter))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.base(tokens)


def _add(adapter: nn.Module, linear: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output + adapter(inputs[0])
