"""Rules of ready key maps: what Hugging Face calls the tensors of Llama and Qwen, and what torchtitan and Megatron do.

A row of a table is one name on each side; {} is the number of the layer. torchtitan's Llama has the rows of q and k in
another order than Hugging Face, since its rotary embedding turns neighbours where theirs turns halves. Megatron has q,
k and v in one tensor, one query group after the other, and gate and up in one.

Invariant: of each map there is the inverse. Pure tables; what the rules mean: key_map.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

from cas_ckpt.arguments import check_whole
from cas_ckpt.errors import InvalidInputError, shown_value

Rows: TypeAlias = Iterable[tuple[str, str]]
Rules: TypeAlias = list[Mapping[str, Any]]

_TORCHTITAN: Rows = (
    ("model.embed_tokens.weight", "tok_embeddings.weight"),
    ("model.layers.{}.self_attn.q_proj.weight", "layers.{}.attention.qkv_linear.wq.weight"),
    ("model.layers.{}.self_attn.k_proj.weight", "layers.{}.attention.qkv_linear.wk.weight"),
    ("model.layers.{}.self_attn.v_proj.weight", "layers.{}.attention.qkv_linear.wv.weight"),
    ("model.layers.{}.self_attn.o_proj.weight", "layers.{}.attention.wo.weight"),
    ("model.layers.{}.self_attn.q_norm.weight", "layers.{}.attention.q_norm.weight"),
    ("model.layers.{}.self_attn.k_norm.weight", "layers.{}.attention.k_norm.weight"),
    ("model.layers.{}.mlp.gate_proj.weight", "layers.{}.feed_forward.w1.weight"),
    ("model.layers.{}.mlp.up_proj.weight", "layers.{}.feed_forward.w3.weight"),
    ("model.layers.{}.mlp.down_proj.weight", "layers.{}.feed_forward.w2.weight"),
    ("model.layers.{}.input_layernorm.weight", "layers.{}.attention_norm.weight"),
    ("model.layers.{}.post_attention_layernorm.weight", "layers.{}.ffn_norm.weight"),
    ("model.norm.weight", "norm.weight"),
    ("lm_head.weight", "lm_head.weight"),
)

_MEGATRON: Rows = (
    ("model.embed_tokens.weight", "embedding.word_embeddings.weight"),
    ("model.layers.{}.self_attn.o_proj.weight", "decoder.layers.{}.self_attention.linear_proj.weight"),
    ("model.layers.{}.self_attn.q_norm.weight", "decoder.layers.{}.self_attention.q_layernorm.weight"),
    ("model.layers.{}.self_attn.k_norm.weight", "decoder.layers.{}.self_attention.k_layernorm.weight"),
    ("model.layers.{}.mlp.down_proj.weight", "decoder.layers.{}.mlp.linear_fc2.weight"),
    ("model.norm.weight", "decoder.final_layernorm.weight"),
    ("lm_head.weight", "output_layer.weight"),
)
_NORMS: Rows = (
    ("model.layers.{}.input_layernorm.weight", "decoder.layers.{}.input_layernorm.weight"),
    ("model.layers.{}.post_attention_layernorm.weight", "decoder.layers.{}.pre_mlp_layernorm.weight"),
)
_FUSED_NORMS: Rows = (
    ("model.layers.{}.input_layernorm.weight", "decoder.layers.{}.self_attention.linear_qkv.layer_norm_weight"),
    ("model.layers.{}.post_attention_layernorm.weight", "decoder.layers.{}.mlp.linear_fc1.layer_norm_weight"),
)
_QKV = [f"model.layers.{{}}.self_attn.{each}_proj." for each in "qkv"]
_GATE_UP = [f"model.layers.{{}}.mlp.{each}_proj.weight" for each in ("gate", "up")]
_LINEAR_QKV, _LINEAR_FC1 = "decoder.layers.{}.self_attention.linear_qkv.", "decoder.layers.{}.mlp.linear_fc1.weight"
_KINDS = ("weight", "bias")  # Qwen2 has a bias


class _Place:
    """Patterns and names below the key of the model."""

    def __init__(self, at: Any) -> None:
        if not isinstance(at, str):
            raise InvalidInputError(f"at is {shown_value(at)}: give the key of the model, '' for the top")
        self._above = f"{at}/" if at else ""

    def pattern(self, name: str) -> str:
        return re.escape(self._above + name).replace(r"\{\}", "([0-9]+)")

    def name(self, name: str) -> str:
        return (self._above + name).replace("\\", r"\\").replace("{}", r"\1")

    def renamed(self, rows: Rows) -> Rules:
        return [{"rename": self.pattern(one), "to": self.name(other)} for one, other in rows]


def _from_hf(place: _Place, rows: Rows) -> Rules:
    """Without what old versions saved of each layer's rotary embedding, which follows from the configuration."""
    return [{"drop": place.pattern("model.layers.{}.self_attn.rotary_emb.inv_freq")}, *place.renamed(rows)]


def _back(rows: Rows) -> Rows:
    return [(other, one) for one, other in rows]


def _llama3(rows: Rows, *, to_hf: bool, num_heads: int, num_kv_heads: int | None = None, at: str = "model") -> Rules:
    place = _Place(at)
    rules = place.renamed(rows) if to_hf else _from_hf(place, rows)
    counts = {"q": num_heads, "k": num_kv_heads or num_heads}
    for each, count in counts.items():
        halves = [check_whole("num_heads", count, least=1), 2, -1]
        pattern = f"layers.{{}}.attention.qkv_linear.w{each}.weight"
        if to_hf:
            pattern, halves = f"model.layers.{{}}.self_attn.{each}_proj.weight", [halves[0], -1, 2]
        rules.append({"interleave": place.pattern(pattern), "shape": halves})
    return rules


def _qwen3(rows: Rows, *, to_hf: bool, at: str = "model") -> Rules:
    return _Place(at).renamed(rows) if to_hf else _from_hf(_Place(at), rows)


def _groups(num_heads: int, num_kv_heads: int | None) -> tuple[int, int]:
    """Query groups, and heads in each."""
    heads = check_whole("num_heads", num_heads, least=1)
    groups = heads if num_kv_heads is None else check_whole("num_kv_heads", num_kv_heads, least=1)
    if heads % groups:
        raise InvalidInputError(f"{heads} heads are not {groups} groups of the same size: give those of the model")
    return groups, heads // groups


def _hf_to_megatron(
    *, num_heads: int, num_kv_heads: int | None = None, at: str = "model", fused_norms: bool = False
) -> Rules:
    place, (groups, _) = _Place(at), _groups(num_heads, num_kv_heads)
    if fused_norms not in (True, False):
        raise InvalidInputError(f"fused_norms is {shown_value(fused_norms)}: give True or False")
    rules = _from_hf(place, (*_MEGATRON, *(_FUSED_NORMS if fused_norms else _NORMS)))
    for kind in _KINDS:
        patterns = [place.pattern(each + kind) for each in _QKV]
        rules.append({"fuse": patterns, "to": place.name(_LINEAR_QKV + kind), "groups": groups})
    return [*rules, {"fuse": [place.pattern(each) for each in _GATE_UP], "to": place.name(_LINEAR_FC1)}]


def _megatron_to_hf(*, num_heads: int, num_kv_heads: int | None = None, at: str = "model") -> Rules:
    place, (groups, per_group) = _Place(at), _groups(num_heads, num_kv_heads)
    rules: Rules = [{"drop": place.pattern("") + r".*\._extra_state"}]  # TransformerEngine's scales of fp8
    rules += place.renamed(_back((*_MEGATRON, *_NORMS, *_FUSED_NORMS)))
    for kind in _KINDS:
        names = [place.name(each + kind) for each in _QKV]
        ratios = [per_group, 1, 1]
        rules.append({"split": place.pattern(_LINEAR_QKV + kind), "to": names, "ratios": ratios, "groups": groups})
    return [*rules, {"split": place.pattern(_LINEAR_FC1), "to": [place.name(each) for each in _GATE_UP]}]


READY: dict[str, Callable[..., Rules]] = {
    "llama3_hf_to_torchtitan": partial(_llama3, _TORCHTITAN, to_hf=False),
    "llama3_torchtitan_to_hf": partial(_llama3, _back(_TORCHTITAN), to_hf=True),
    "qwen3_hf_to_torchtitan": partial(_qwen3, _TORCHTITAN, to_hf=False),
    "qwen3_torchtitan_to_hf": partial(_qwen3, _back(_TORCHTITAN), to_hf=True),
    "hf_to_megatron": _hf_to_megatron,
    "megatron_to_hf": _megatron_to_hf,
}
"""The ready maps by their names."""


def ready_rules(name: str, numbers: Mapping[str, Any]) -> Rules:
    """The rules of a ready map.

    Raises:
        InvalidInputError: no such map, or it takes other numbers.
    """
    if name not in READY:
        raise InvalidInputError(f"there is no ready key map {shown_value(name)}: give one of {', '.join(READY)}")
    try:
        return READY[name](**numbers)
    except TypeError as error:
        raise InvalidInputError(f"the key map {name}: {str(error).partition('() ')[2]}") from error
