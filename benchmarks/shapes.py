"""Shapes of real models and the meshes they are trained on, without a tensor.

Duty: what a benchmark or a simulation of planning needs to know of Llama 3, a mixture of experts and
GPT-2: names, shapes, how often, and which dimension tensor parallelism divides. Knows nothing of
grids. Sizes from the models' published configurations; the tensor-parallel plan is the usual one
(Megatron; torchtitan): q, k, v, gate and up by output, attention output and down by input, vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Weight:
    """One kind of tensor of a model.

    Attributes:
        name: State-dict name, `{}` where the layer number (and the expert number) stands.
        shape: Global shape, elements.
        copies: How many tensors of this kind there are (layers, or layers times experts).
        tp_dim: Dimension that tensor parallelism divides; None when it keeps replicas.
        expert: "no", "stacked" (dimension 0 counts experts) or "single" (one tensor per expert).
    """

    name: str
    shape: tuple[int, ...]
    copies: int = 1
    tp_dim: int | None = None
    expert: str = "no"

    @property
    def num_elements(self) -> int:
        """Elements of all copies together."""
        return math.prod(self.shape) * self.copies


@dataclass(frozen=True, slots=True)
class Mesh:
    """Degrees of a device mesh; ranks = fsdp x tp x ep. `family` groups meshes in tables."""

    fsdp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def num_ranks(self) -> int:
        """Ranks of the whole mesh."""
        return self.fsdp * self.tp * self.ep

    @property
    def family(self) -> str:
        """The column of the tables that this mesh belongs to."""
        if self.ep > 1:
            return "EP"
        if self.tp > 1:
            return "TP" if self.fsdp == 1 else "FSDPxTP"
        return "FSDP 2^k" if self.fsdp & (self.fsdp - 1) == 0 else "FSDP 3*2^k"

    def __str__(self) -> str:
        return "x".join(f"{kind}{n}" for kind, n in (("fsdp", self.fsdp), ("tp", self.tp), ("ep", self.ep)) if n > 1)


def _dense(hidden: int, kv: int, layers: int) -> tuple[Weight, ...]:
    return (
        Weight("layers.{}.attention.wq.weight", (hidden, hidden), layers, 0),
        Weight("layers.{}.attention.wk.weight", (kv, hidden), layers, 0),
        Weight("layers.{}.attention.wv.weight", (kv, hidden), layers, 0),
        Weight("layers.{}.attention.wo.weight", (hidden, hidden), layers, 1),
        Weight("layers.{}.attention_norm.weight", (hidden,), layers),
        Weight("layers.{}.ffn_norm.weight", (hidden,), layers),
        Weight("norm.weight", (hidden,)),
    )


def _vocabulary(hidden: int, vocab: int) -> tuple[Weight, ...]:
    return Weight("tok_embeddings.weight", (vocab, hidden), 1, 0), Weight("output.weight", (vocab, hidden), 1, 0)


def llama(hidden: int, inter: int, *, layers: int, kv: int = 1024, vocab: int = 128256) -> tuple[Weight, ...]:
    """Weights of a Llama 3 model; `kv` is key-value heads times head size."""
    return (
        *_dense(hidden, kv, layers),
        Weight("layers.{}.feed_forward.w1.weight", (inter, hidden), layers, 0),
        Weight("layers.{}.feed_forward.w3.weight", (inter, hidden), layers, 0),
        Weight("layers.{}.feed_forward.w2.weight", (hidden, inter), layers, 1),
        *_vocabulary(hidden, vocab),
    )


def mixtral(*, experts: str, hidden: int = 4096, inter: int = 14336, layers: int = 32) -> tuple[Weight, ...]:
    """Weights of Mixtral 8x7B; `experts` is "single", "stacked" [E, out, in] or "stacked-t" [E, in, out]."""
    num_experts = 8
    up, down = (inter, hidden), (hidden, inter)
    name, copies, kind = "layers.{}.moe.experts.", layers, "stacked"
    if experts == "single":
        name, copies, kind = "layers.{}.block.experts.{}.", layers * num_experts, "single"
    if experts == "stacked-t":
        up, down = down, up
    head: tuple[int, ...] = () if experts == "single" else (num_experts,)
    up_dim, down_dim = len(head) + up.index(inter), len(head) + down.index(inter)
    return (
        *_dense(hidden, 1024, layers),
        Weight("layers.{}.moe.gate.weight", (num_experts, hidden), layers),
        Weight(name + "w1", (*head, *up), copies, up_dim, kind),
        Weight(name + "w3", (*head, *up), copies, up_dim, kind),
        Weight(name + "w2", (*head, *down), copies, down_dim, kind),
        *_vocabulary(hidden, 32000),
    )


def gpt2(hidden: int, *, layers: int, vocab: int = 50304) -> tuple[Weight, ...]:
    """Weights of GPT-2 as nn.Linear holds them (nanoGPT), embeddings tied."""
    return (
        Weight("transformer.wte.weight", (vocab, hidden), 1, 0),
        Weight("transformer.wpe.weight", (1024, hidden)),
        Weight("transformer.h.{}.ln.weight", (hidden,), 4 * layers),
        Weight("transformer.h.{}.attn.c_attn.weight", (3 * hidden, hidden), layers, 0),
        Weight("transformer.h.{}.attn.c_proj.weight", (hidden, hidden), layers, 1),
        Weight("transformer.h.{}.mlp.c_fc.weight", (4 * hidden, hidden), layers, 0),
        Weight("transformer.h.{}.mlp.c_proj.weight", (hidden, 4 * hidden), layers, 1),
    )


MODELS: dict[str, tuple[Weight, ...]] = {
    "gpt2-124M": gpt2(768, layers=12),
    "gpt2-1.5B": gpt2(1600, layers=48),
    "llama3-8B": llama(4096, 14336, layers=32),
    "llama3-70B": llama(8192, 28672, layers=80),
    "llama3-405B": llama(16384, 53248, layers=126),
    "mixtral-8x7B": mixtral(experts="single"),
    "mixtral-8x7B [E,out,in]": mixtral(experts="stacked"),
    "mixtral-8x7B [E,in,out]": mixtral(experts="stacked-t"),
}
"""Model name -> its weights."""

MESHES: tuple[Mesh, ...] = (
    *(Mesh(fsdp=n) for n in (8, 48, 64, 96, 256, 1024)),
    *(Mesh(tp=n) for n in (2, 4, 8)),
    *(Mesh(fsdp=n, tp=t) for n, t in ((8, 4), (16, 8), (12, 8), (128, 8))),
    *(Mesh(fsdp=n, ep=8) for n in (1, 8)),
)
"""The meshes that tables are made for."""


def meshes_of(model: str) -> Iterator[Mesh]:
    """Meshes that make sense for a model: no EP without experts, fp32 weights fit in 80 GB, GPT-2 on <= 64 ranks."""
    num_bytes = 4 * sum(weight.num_elements for weight in MODELS[model])
    most = 64 if model.startswith("gpt2") else 2048
    for mesh in MESHES:
        fits = num_bytes <= mesh.num_ranks * 80e9 and mesh.num_ranks <= most
        if fits and (mesh.ep == 1 or model.startswith("mixtral")):
            yield mesh


def cuts(weight: Weight, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """Inner cut positions along each dimension, by the rules of DTensor (ceil(size / n) per rank).

    The ranks' regions are all products of the intervals between cuts. FSDP divides dimension 0 of what
    tensor and expert parallelism leave, or dimension 1 where stacked experts are too few; weights that
    are no experts are divided over the expert ranks by FSDP too (torchtitan).
    """
    pieces: list[list[int]] = [[size] for size in weight.shape]
    if weight.tp_dim is not None:
        pieces[weight.tp_dim] = _split(pieces[weight.tp_dim], mesh.tp)
    if weight.expert == "stacked":
        pieces[0] = _split(pieces[0], mesh.ep)
    fsdp = mesh.fsdp if weight.expert != "no" else mesh.fsdp * mesh.ep
    dim = 1 if weight.expert == "stacked" and mesh.ep * mesh.fsdp > weight.shape[0] else 0
    pieces[dim] = _split(pieces[dim], fsdp)
    return tuple(_inner(sizes) for sizes in pieces)


def _split(sizes: list[int], parts: int) -> list[int]:
    """Each size divided over `parts` ranks, chunk by chunk; empty chunks dropped."""
    return [min(-(-size // parts), size - at) for size in sizes for at in range(0, size, -(-size // parts))]


def _inner(sizes: list[int]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(sizes[:-1]))
