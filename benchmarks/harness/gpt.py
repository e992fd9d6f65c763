"""A real GPT module (decoder only, fused qkv, GELU MLP, untied head) and the same with LoRA adapters.

The head is untied on purpose: some peers store tied weights twice, which would flatter the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

_ADAPTED = ("qkv", "proj")


@dataclass(frozen=True, slots=True)
class GPTShape:
    """Sizes of a GPT; `width` must be a multiple of 64 (the size of a head)."""

    vocab: int
    context: int
    width: int
    layers: int


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.fc = nn.Linear(width, 4 * width)
        self.fc_proj = nn.Linear(4 * width, width)
        self.heads = width // 64

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, same shape as `x` ([batch, time, width])."""
        x = x + self.proj(self._attend(self.qkv(self.ln_1(x))))
        out: Tensor = x + self.fc_proj(functional.gelu(self.fc(self.ln_2(x))))
        return out

    def _attend(self, qkv: Tensor) -> Tensor:
        batch, time, _ = qkv.shape
        q, k, v = (part.view(batch, time, self.heads, 64).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, time, -1)


class GPT(nn.Module):
    """Token logits from token ids."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocab, shape.width)
        self.wpe = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [batch, time, vocab] for ids [batch, time]."""
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.ln_f(x))
        return logits


class Adapter(nn.Module):
    """The low-rank pair of one linear layer: adds `up(down(x))` to its output."""

    def __init__(self, num_in: int, num_out: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(num_in, rank, bias=False)
        self.up = nn.Linear(rank, num_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The update of the adapted layer's output."""
        update: Tensor = self.up(self.down(x))
        return update


class LoraGPT(nn.Module):
    """A frozen GPT (`base`) with trained adapters (`lora`) on the attention's qkv and proj."""

    def __init__(self, shape: GPTShape, rank: int) -> None:
        super().__init__()
        self.base = GPT(shape)
        self.base.requires_grad_(False)
        self.lora = nn.ModuleList(_adapters(shape.width, rank) for _ in range(shape.layers))
        for index in range(shape.layers):
            for name in _ADAPTED:
                linear = self.base.get_submodule(f"blocks.{index}.{name}")
                linear.register_forward_hook(_Adapted(self.lora.get_submodule(f"{index}.{name}")))

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the adapted model."""
        logits: Tensor = self.base(ids)
        return logits


def _adapters(width: int, rank: int) -> nn.ModuleDict:
    return nn.ModuleDict({"qkv": Adapter(width, 3 * width, rank), "proj": Adapter(width, width, rank)})


class _Adapted:
    """Adds an adapter's update to the output of the layer that it is hooked to."""

    def __init__(self, adapter: nn.Module) -> None:
        self._adapter = adapter

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        adapted: Tensor = output + self._adapter(inputs[0])
        return adapted
