"""Small models of Hugging Face, torchtitan and Megatron of one shape, on the CPU, and their logits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

DIM, HEADS, KV_HEADS, HEAD_DIM, LAYERS, HIDDEN, VOCAB, EPS, THETA = 64, 8, 2, 16, 3, 96, 128, 1e-6, 10000.0
TOKENS = torch.arange(24).reshape(2, 12) * 5 % VOCAB


def hf(family: str, *, tied: bool = False) -> torch.nn.Module:
    """`family`: llama, qwen2 or qwen3; random weights, norms and biases too."""
    import transformers as hf

    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    heads = DIM // HEADS if family == "qwen2" else HEAD_DIM
    config = getattr(hf, f"{name}Config")(
        hidden_size=DIM, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=heads,
        num_hidden_layers=LAYERS, intermediate_size=HIDDEN, vocab_size=VOCAB, rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": THETA}, max_position_embeddings=64,
        tie_word_embeddings=tied, attn_implementation="eager",
    )  # fmt: skip
    model: torch.nn.Module = getattr(hf, f"{name}ForCausalLM")(config)
    return random(model)


def random(model: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def titan(family: str, *, tied: bool = False) -> tuple[torch.nn.Module, Any]:
    """torchtitan's model of the same shape, random, and its own adapter."""
    import torchtitan.models.llama3 as llama3
    import torchtitan.models.qwen3 as qwen3
    from torchtitan.models.common import ComplexRoPE, CosSinRoPE, Embedding, Linear, RMSNorm, ScaledDotProductAttention

    init = {"weight": torch.nn.init.ones_}
    common: dict[str, Any] = {
        "dim": DIM, "vocab_size": VOCAB, "norm": RMSNorm.Config(normalized_shape=DIM, eps=EPS, param_init=init),
        "tok_embeddings": Embedding.Config(num_embeddings=VOCAB, embedding_dim=DIM, param_init=init),
        "lm_head": Linear.Config(in_features=DIM, out_features=VOCAB, param_init=init), "enable_weight_tying": tied,
    }  # fmt: skip
    layers: dict[str, Any] = {
        "n_layers": LAYERS, "dim": DIM, "n_heads": HEADS, "n_kv_heads": KV_HEADS, "hidden_dim": HIDDEN,
        "attn_backend": "flex",
    }  # fmt: skip
    rope = {"dim": HEAD_DIM, "max_seq_len": 64, "theta": THETA}
    if family == "llama":
        made = llama3._build_llama3_layers(rope=ComplexRoPE.Config(**rope), **layers)
        for layer in made:  # it takes no head_dim, and norms of another epsilon
            at = layer.attention
            at.head_dim = at.qkv_linear.head_dim = HEAD_DIM
            at.qkv_linear.wqkv.out_features = HEAD_DIM * (HEADS + 2 * KV_HEADS)
            at.wo.in_features = HEADS * HEAD_DIM
            layer.attention_norm.eps = layer.ffn_norm.eps = EPS
        config, adapter = llama3.Llama3Model.Config(layers=made, **common), llama3.Llama3StateDictAdapter
    else:
        made = qwen3._build_qwen3_layers(head_dim=HEAD_DIM, rope=CosSinRoPE.Config(**rope), **layers)
        config, adapter = qwen3.Qwen3Model.Config(layers=made, **common), qwen3.Qwen3StateDictAdapter
    for layer in made:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = config.build()
    if tied:
        model.lm_head.weight = model.tok_embeddings.weight
    for module in model.modules():
        if isinstance(module, (ComplexRoPE, CosSinRoPE)):
            module.init_states(buffer_device=torch.device("cpu"))
    return random(model), adapter(config, None)


@contextmanager
def one_rank(folder: Any) -> Iterator[None]:
    """A world of one, as Megatron needs it."""
    from megatron.core import parallel_state

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel(1, 1)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def megatron(family: str, *, tied: bool = False) -> Any:
    """Megatron's GPTModel of the same shape by its local layers, random."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.transformer.transformer_config import TransformerConfig

        norms = family == "qwen3"
        config = TransformerConfig(
            num_layers=LAYERS, hidden_size=DIM, num_attention_heads=HEADS, num_query_groups=KV_HEADS,
            kv_channels=DIM // HEADS if family == "qwen2" else HEAD_DIM, ffn_hidden_size=HIDDEN,
            use_cpu_initialization=True, normalization="RMSNorm", add_bias_linear=False,
            add_qkv_bias=family == "qwen2", gated_linear_unit=True, activation_func=torch.nn.functional.silu,
            attention_dropout=0.0, hidden_dropout=0.0, layernorm_epsilon=EPS, qk_layernorm=norms,
            bias_activation_fusion=False, masked_softmax_fusion=False, gradient_accumulation_fusion=False,
            persist_layer_norm=False,
        )  # fmt: skip
        model = GPTModel(
            config, get_gpt_layer_local_spec(qk_layernorm=norms, normalization="RMSNorm"), vocab_size=VOCAB,
            max_sequence_length=64, position_embedding_type="rope", rotary_base=int(THETA),
            share_embeddings_and_output_weights=tied,
        )  # fmt: skip
    return random(model)


def logits(model: Any, framework: str) -> torch.Tensor:
    """What the model says of `TOKENS`."""
    with torch.no_grad():
        if framework == "hf":
            return model(TOKENS).logits
        positions = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
        if framework == "titan":
            return model(TOKENS, positions)
        size = TOKENS.shape[1]
        mask = torch.triu(torch.ones(1, 1, size, size, dtype=torch.bool), 1)
        attention = "megatron.core.transformer.dot_product_attention.tensor_parallel.get_cuda_rng_tracker"
        with (  # what it asks a GPU for
            patch("torch.cuda.current_device", lambda: "cpu"),
            patch(attention, lambda: SimpleNamespace(fork=nullcontext)),
        ):
            return model(TOKENS, positions, mask)
