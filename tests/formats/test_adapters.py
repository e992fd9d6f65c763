"""Adapters of PEFT: a folder of PEFT goes into a live PeftModel, and what a live one has comes out as PEFT writes it.

PEFT is not installed here. The names in files and in live models are those of PEFT 0.21.2, which wrote and opened such
folders when this was made (`save_pretrained`, `PeftModel.from_pretrained` over a small Llama).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cas_ckpt import ImportOptions, Repository
from cas_ckpt.errors import ConflictError, InvalidInputError
from tests.cli.running import call

LAYER = "base_model.model.model.layers.0."
EMBED = "base_model.model.model.embed_tokens."


@dataclass
class Written:
    """What PEFT writes: names in its file and in the live model, with NAME for the adapter's."""

    config: dict[str, Any]
    names: dict[str, str]
    base: tuple[str, ...] = field(default=(f"{LAYER}q_proj.base_layer.weight", f"{LAYER}q_proj.base_layer.bias"))


LORA = {f"{LAYER}q_proj.lora_{part}.weight": f"{LAYER}q_proj.lora_{part}.NAME.weight" for part in "AB"}
HEAD = "base_model.model.lm_head."
WRITTEN = {
    "lora": Written({"peft_type": "LORA", "target_modules": ["q_proj"]}, LORA),
    "a module beside": Written(
        {"peft_type": "LORA", "modules_to_save": ["lm_head"]},
        LORA | {f"{HEAD}weight": f"{HEAD}modules_to_save.NAME.weight"},
        (f"{LAYER}q_proj.base_layer.weight", f"{HEAD}original_module.weight"),
    ),
    "an embedding": Written(
        {"peft_type": "LORA", "target_modules": ["q_proj", "embed_tokens"]},
        LORA
        | {f"{EMBED}lora_embedding_{part}": f"{EMBED}lora_embedding_{part}.NAME" for part in "AB"}
        | {f"{EMBED}base_layer.weight": f"{EMBED}base_layer.weight"},
        (f"{LAYER}q_proj.base_layer.weight",),
    ),
    "dora": Written(
        {"peft_type": "LORA", "use_dora": True},
        LORA | {f"{LAYER}q_proj.lora_magnitude_vector": f"{LAYER}q_proj.lora_magnitude_vector.NAME.weight"},
    ),
    "biases of adapted layers": Written(
        {"peft_type": "LORA", "bias": "lora_only"},
        LORA | {name: name for name in [f"{LAYER}q_proj.base_layer.bias"]},
        (f"{LAYER}q_proj.base_layer.weight", f"{LAYER}norm.bias"),
    ),
    "all biases": Written(
        {"peft_type": "LORA", "bias": "all"},
        LORA | {name: name for name in [f"{LAYER}q_proj.base_layer.bias", f"{LAYER}norm.bias"]},
        (f"{LAYER}q_proj.base_layer.weight",),
    ),
    "tokens": Written(
        {"peft_type": "LORA", "trainable_token_indices": [1, 2]},
        LORA | {f"{EMBED}token_adapter.trainable_tokens_delta": f"{EMBED}token_adapter.trainable_tokens_delta.NAME"},
        (f"{LAYER}q_proj.base_layer.weight", f"{EMBED}token_adapter.base_layer.weight"),
    ),
    "ia3": Written({"peft_type": "IA3"}, {f"{LAYER}q_proj.ia3_l": f"{LAYER}q_proj.ia3_l.NAME"}),
    "adalora": Written(
        {"peft_type": "ADALORA"}, {f"{LAYER}q_proj.lora_{part}": f"{LAYER}q_proj.lora_{part}.NAME" for part in "ABE"}
    ),
    "loha": Written({"peft_type": "LOHA"}, {f"{LAYER}q_proj.hada_w1_a": f"{LAYER}q_proj.hada_w1_a.NAME"}),
}
cases = pytest.mark.parametrize("written", WRITTEN.values(), ids=WRITTEN)


@pytest.fixture
def repo(tmp_path: Path) -> Repository:
    return Repository.init(tmp_path / "repo")


def random(names: Any) -> dict[str, torch.Tensor]:
    return {name: torch.randn(30, 4) for name in names}


def adapter_folder(folder: Path, config: Any, tensors: Mapping[str, torch.Tensor]) -> Path:
    """A folder as PEFT writes it."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(dict(tensors), folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def live_model(tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """A module whose state dict has these names."""
    root = torch.nn.Module()
    for name, tensor in tensors.items():
        *parents, last = name.split(".")
        module = root
        for parent in parents:
            if parent not in dict(module.named_children()):
                module.add_module(parent, torch.nn.Module())
            module = module.get_submodule(parent)
        module.register_parameter(last, torch.nn.Parameter(tensor.clone()))
    return root


def live_names(written: Written, adapter: str) -> dict[str, str]:
    return {file: live.replace("NAME", adapter) for file, live in written.names.items()}


@cases
@pytest.mark.parametrize("adapter", ["default", "mine"])
def test_an_imported_adapter_goes_into_the_live_model(
    repo: Repository, tmp_path: Path, written: Written, adapter: str
) -> None:
    tensors, names = random(written.names), live_names(written, adapter)
    base, other = random(written.base), random(name.replace("NAME", "other") for name in written.names.values())
    model = live_model({**other, **base, **random(names.values())})
    imported = repo.import_file(
        adapter_folder(tmp_path / "a", written.config, tensors), options=ImportOptions(adapter=adapter)
    )
    changed = sum(file != live for file, live in names.items())
    assert f"{changed} of {len(names)} names got the adapter's, {adapter!r}" in imported.renamed[0]
    done = repo.checkout(imported, into={"model": model}, keys="model", strict=False)
    state = model.state_dict()
    assert done.unexpected == ()
    assert all(torch.equal(state[live], tensors[file]) for file, live in names.items())
    kept = {name: tensor for name, tensor in {**other, **base}.items() if name not in names.values()}
    assert all(torch.equal(state[name], tensor) for name, tensor in kept.items())
    loaded = repo.load(imported, keys="model")["model"]
    assert model.load_state_dict(loaded, strict=False).unexpected_keys == []


@cases
def test_the_adapter_of_a_live_model_comes_out_as_peft_writes_it(
    repo: Repository, tmp_path: Path, written: Written
) -> None:
    tensors, names = random(written.names), live_names(written, "mine")
    other = random(live for live in live_names(written, "other").values() if live not in names.values())
    model = live_model({**random(written.base), **other, **{names[file]: tensor for file, tensor in tensors.items()}})
    config = json.dumps(written.config).encode()
    live = repo.commit({"model": model, "step": 3, "files": {"adapter_config.json": config}})
    repo.export(live, tmp_path / "out", adapter="mine")
    wanted = adapter_folder(tmp_path / "wanted", written.config, tensors)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == {
        path.name: path.read_bytes() for path in wanted.iterdir()
    }


@cases
def test_an_imported_adapter_comes_out_as_it_was(repo: Repository, tmp_path: Path, written: Written) -> None:
    resized = [] if EMBED in "".join(written.names) else [f"{EMBED}weight"]  # written for a vocabulary that has grown
    folder = adapter_folder(tmp_path / "a", written.config, random([*written.names, *resized]))
    (folder / "README.md").write_text("an adapter")
    repo.export(repo.import_file(folder, options=ImportOptions(adapter="mine")), tmp_path / "out", adapter="mine")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }


def test_the_weights_of_an_adapter_may_be_a_file_of_torch(repo: Repository, tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "a", WRITTEN["lora"].config, tensors := random(LORA))
    as_safetensors = repo.load(repo.import_file(folder, branch="one"))
    torch.save(tensors, folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()
    assert repo.load(repo.import_file(folder, branch="two"))["model"].keys() == as_safetensors["model"].keys()


def test_a_live_model_and_its_imported_adapter_share_their_tensors(repo: Repository, tmp_path: Path) -> None:
    tensors, names = random(LORA), live_names(WRITTEN["lora"], "default")
    repo.commit({"model": live_model({names[file]: tensor for file, tensor in tensors.items()})})
    folder = adapter_folder(tmp_path / "a", WRITTEN["lora"].config, tensors)
    difference = repo.diff("main", repo.import_file(folder, branch="imported"))
    assert {entry.key.partition("/")[0] for entry in difference.entries} == {"files", "metadata"}


def test_the_configuration_may_be_in_the_folder_already(repo: Repository, tmp_path: Path) -> None:
    repo.commit({"model": live_model(random(live_names(WRITTEN["lora"], "default").values())), "step": 1})
    with pytest.raises(InvalidInputError, match=r"adapter_config.json.*model.peft_config\['default'\].save_pretrained"):
        repo.export("main", tmp_path / "out", adapter="default")
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "adapter_config.json").write_text(json.dumps(WRITTEN["lora"].config))
    repo.export("main", tmp_path / "out", adapter="default")
    assert load_file(tmp_path / "out" / "adapter_model.safetensors").keys() == LORA.keys()
    with pytest.raises(ConflictError, match="adapter_model.safetensors exists"):
        repo.export("main", tmp_path / "out", adapter="default")


def test_what_cannot_be_written_as_an_adapter_is_said(repo: Repository, tmp_path: Path) -> None:
    repo.import_file(adapter_folder(tmp_path / "a", WRITTEN["lora"].config, random(LORA)))
    for path, options, reason in (
        ("out", {"adapter": "mine"}, "no tensor is of an adapter 'mine': there are default"),
        ("out", {"adapter": "a.b"}, "no name of an adapter"),
        ("x.safetensors", {"adapter": "default"}, "as a folder"),
        ("out", {"adapter": "default", "max_shard_bytes": 100}, "not in shards"),
        ("x.pt", {"adapter": "default"}, "as safetensors, in a folder, not as torch"),
    ):
        with pytest.raises(InvalidInputError, match=reason):
            repo.export("main", tmp_path / path, **options)
        assert not (tmp_path / path).exists()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"peft_type": "PROMPT_TUNING"}, "of the type PROMPT_TUNING is not known"),
        ({"peft_type": ["LORA"]}, r"of the type \['LORA'\] is not known"),
        ([1], "adapter_config.json is not a JSON object"),
    ],
    ids=str,
)
def test_what_is_not_certain_keeps_the_names_of_the_file(
    repo: Repository, tmp_path: Path, config: Any, reason: str
) -> None:
    tensors = random(["prompt_embeddings", "a.lora_A.weight"])
    imported = repo.import_file(adapter_folder(tmp_path / "a", config, tensors))
    (told,) = imported.renamed
    assert re.search(reason, told)
    assert repo.load(imported)["model"].keys() == tensors.keys()


def test_odd_names_in_the_folder_of_an_adapter_harm_nothing(repo: Repository, tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "modules_to_save": ["", 5, "head"], "bias": 3, "target_modules": {"a": 1}}
    odd = ["lora_", "modules_to_save", "x.modules_to_save", "", ".", "head", "head.w", "lora_magnitude_vector.weight"]
    imported = repo.import_file(adapter_folder(tmp_path / "a", config, random(odd)))
    assert len(repo.load(imported)["model"]) == len(odd)
    repo.export(imported, tmp_path / "out", adapter="default")
    clashing = random(["x.lora_magnitude_vector", "x.lora_magnitude_vector.weight"])
    with pytest.raises(InvalidInputError, match="stand for 'x.lora_magnitude_vector.default.weight'"):
        repo.import_file(adapter_folder(tmp_path / "b", config, clashing), branch="clashing")


def test_an_adapter_is_named_only_where_there_is_one(repo: Repository, tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "a", WRITTEN["lora"].config, random(LORA))
    kept = repo.import_file(folder, options=ImportOptions(keep_names=True), branch="kept")
    assert kept.renamed == ()
    assert repo.load(kept)["model"].keys() == LORA.keys()
    for path, options in (
        (folder / "adapter_model.safetensors", ImportOptions(adapter="mine")),
        (folder, ImportOptions(adapter="mine", keep_names=True)),
    ):
        with pytest.raises(InvalidInputError, match="no adapter is here that could be called 'mine'"):
            repo.import_file(path, options=options, branch="refused")


def test_the_command_line_brings_an_adapter_in_and_out(repo: Repository, tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "a", WRITTEN["lora"].config, random(LORA))
    done = call("-C", tmp_path / "repo", "import", folder, "--adapter", "mine")
    assert done.code == 0
    assert done.err == "renamed: model: 2 of 2 names got the adapter's, 'mine', as in a live PeftModel\n"
    told = call("-C", tmp_path / "repo", "import", folder, "--branch", "again", "--json")
    assert "'default'" in told.json["renamed"][0]
    assert call("-C", tmp_path / "repo", "export", "main", tmp_path / "out", "--adapter", "mine").code == 0
    assert (tmp_path / "out" / "adapter_model.safetensors").read_bytes() == (
        folder / "adapter_model.safetensors"
    ).read_bytes()
