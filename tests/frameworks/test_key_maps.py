"""Ready key maps hold Hugging Face's Llama and Qwen against torchtitan and Megatron: equal tensors, equal logits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cas_ckpt import KeyMap, Repository
from tests.frameworks import key_map_cases as cases
from tests.frameworks.programs import program

pytestmark = pytest.mark.filterwarnings("default")  # those of the frameworks
NUMBERS = {"num_heads": cases.HEADS, "num_kv_heads": cases.KV_HEADS}


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with Repository.init(tmp_path / "repo", group=None) as repo:
        yield repo


@pytest.fixture
def megatron_world(tmp_path: Path) -> Iterator[None]:
    pytest.importorskip("megatron.core")
    with cases.one_rank(tmp_path):
        yield


def titan_map(family: str, *, to_hf: bool) -> KeyMap:
    if family == "qwen3":
        return KeyMap.ready("qwen3_torchtitan_to_hf" if to_hf else "qwen3_hf_to_torchtitan")
    return KeyMap.ready("llama3_torchtitan_to_hf" if to_hf else "llama3_hf_to_torchtitan", **NUMBERS)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def state_of(model: torch.nn.Module) -> dict[str, Any]:
    return {name: each for name, each in model.state_dict().items() if not name.endswith("_extra_state")}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_torchtitan_has_what_its_own_adapter_makes_of_hugging_face_and_back(repo: Repository, family: str) -> None:
    pytest.importorskip("torchtitan")
    theirs = cases.hf(family)
    model, adapter = cases.titan(family)
    repo.commit({"model": theirs})
    report = repo.checkout(into={"model": model}, key_map=titan_map(family, to_hf=False))
    assert report.unmapped == ()
    assert same(model.state_dict(), adapter.from_hf(dict(theirs.state_dict())))
    torch.testing.assert_close(cases.logits(model, "titan"), cases.logits(theirs, "hf"))

    cases.random(model)
    repo.commit({"model": model})
    assert repo.checkout(into={"model": theirs}, key_map=titan_map(family, to_hf=True)).unmapped == ()
    assert same(dict(theirs.state_dict()), adapter.to_hf(model.state_dict()))
    torch.testing.assert_close(cases.logits(theirs, "hf"), cases.logits(model, "titan"))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tied_embeddings_stay_tied_between_hugging_face_and_torchtitan(repo: Repository, family: str) -> None:
    pytest.importorskip("torchtitan")
    theirs = cases.hf(family, tied=True)
    model, adapter = cases.titan(family, tied=True)
    repo.commit({"model": theirs})
    repo.checkout(into={"model": model}, key_map=titan_map(family, to_hf=False))
    assert same(model.state_dict(), adapter.from_hf(dict(theirs.state_dict())))
    cases.random(model)
    repo.commit({"model": model})
    loaded = repo.load(key_map=titan_map(family, to_hf=True))["model"]
    assert loaded["lm_head.weight"] is loaded["model.embed_tokens.weight"]
    assert same({"lm_head.weight": loaded["lm_head.weight"], **adapter.to_hf(model.state_dict())}, dict(loaded))


@pytest.mark.usefixtures("megatron_world")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_megatron_computes_what_hugging_face_does_and_back(repo: Repository, family: str, tmp_path: Path) -> None:
    theirs, model = cases.hf(family), cases.megatron(family)
    repo.commit({"model": theirs})
    report = repo.checkout(into={"model": model}, key_map=KeyMap.ready("hf_to_megatron", **NUMBERS), strict=False)
    assert (report.unmapped, report.unexpected) == ((), ())
    assert all(key.endswith("._extra_state") for key in report.missing)  # of other kinds of layers; None here
    torch.testing.assert_close(cases.logits(model, "megatron"), cases.logits(theirs, "hf"))

    cases.random(model)
    repo.commit({"model": model})
    back = KeyMap.ready("megatron_to_hf", **NUMBERS)
    assert repo.checkout(into={"model": theirs}, key_map=back).unmapped == ()
    torch.testing.assert_close(cases.logits(theirs, "hf"), cases.logits(model, "megatron"))
    repo.export("HEAD", tmp_path / "hf", key_map=back)
    assert same(load_file(tmp_path / "hf" / "model.safetensors"), dict(theirs.state_dict()))


@pytest.mark.usefixtures("megatron_world")
def test_tied_embeddings_of_megatron_have_one_name(repo: Repository) -> None:
    theirs, model = cases.hf("qwen3", tied=True), cases.megatron("qwen3", tied=True)
    repo.commit({"model": theirs})
    to_megatron = KeyMap.ready("hf_to_megatron", **NUMBERS)
    untied = KeyMap([{"drop": r"model/lm_head\.weight"}, *to_megatron.rules])
    report = repo.checkout(into={"model": model}, key_map=untied, strict=False)
    assert report.unexpected == ()
    torch.testing.assert_close(cases.logits(model, "megatron"), cases.logits(theirs, "hf"))
    cases.random(model)
    repo.commit({"model": model})
    repo.checkout(into={"model": theirs}, key_map=KeyMap.ready("megatron_to_hf", **NUMBERS))
    torch.testing.assert_close(cases.logits(theirs, "hf"), cases.logits(model, "megatron"))


def test_layers_of_transformer_engine_have_their_norms_under_its_names(repo: Repository) -> None:
    """No TransformerEngine is here: the names are those that its LayerNormLinear has."""
    theirs = cases.hf("llama")
    repo.commit({"model": theirs})
    loaded = repo.load(key_map=KeyMap.ready("hf_to_megatron", **NUMBERS, fused_norms=True))["model"]
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in loaded
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in loaded
    repo.commit({"model": loaded})
    back = repo.load(key_map=KeyMap.ready("megatron_to_hf", **NUMBERS))["model"]
    assert same(dict(back), dict(theirs.state_dict()))


def test_the_program_of_the_page_gives_the_model_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(program("Key maps"), names)
    wanted = {name: each.bfloat16() for name, each in names["model"].state_dict().items()}
    assert same(dict(names["again"].state_dict()), wanted)
    assert "model.layers.1.self_attn.q_proj.weight" in wanted
    assert "decoder.layers.1.mlp.linear_fc1.weight" in load_file(tmp_path / "runs" / "megatron" / "model.safetensors")
