"""Files that a wrapped module was saved to give the names, and the root, of the plain module."""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.optim.swa_utils import AveragedModel

from cas_ckpt import ImportOptions, Repository
from tests.cli.running import call

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def repo(tmp_path: Path) -> Repository:
    return Repository.init(tmp_path / "repo")


def plain() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.BatchNorm1d(40))


def compiled(model: torch.nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def partly_compiled(model: torch.nn.Sequential) -> Any:
    model[1] = compiled(model[1])
    return model


WRAPPED = {
    "compiled": lambda: compiled(plain()),
    "parallel": lambda: torch.nn.DataParallel(plain()),
    "compiled and parallel": lambda: torch.nn.DataParallel(compiled(plain())),
    "parallel and compiled": lambda: compiled(torch.nn.DataParallel(plain())),
    "in part": lambda: partly_compiled(plain()),
}


def with_forward_module(model: torch.nn.Module) -> dict[str, Any]:
    """The state as Lightning's Fabric names it where its own hooks do not."""
    return {f"_forward_module.{name}": value for name, value in model.state_dict().items()}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_a_file_of_a_wrapped_module_is_the_state_of_the_live_one(repo: Repository, tmp_path: Path, wrap: Any) -> None:
    wrapped = wrap()
    torch.save({"model": wrapped.state_dict(), "step": 3}, tmp_path / "s.pt")
    imported = repo.import_file(tmp_path / "s.pt")
    assert imported.root == repo.commit({"model": wrapped, "step": 3}).root
    assert imported.root == repo.commit({"model": plain(), "step": 3}).root
    (told,) = imported.renamed
    assert re.fullmatch(r"model: (module\.|_orig_mod\.)( and module\.)? of a wrapper is left out of [57] names", told)
    loaded = repo.load(imported)["model"]
    assert loaded._metadata == plain().state_dict()._metadata  # a BatchNorm1d is of version 2


@pytest.mark.filterwarnings("ignore:TypedStorage")  # of DCP itself, in torch 2.9
def test_each_kind_of_file_is_named_alike(repo: Repository, tmp_path: Path) -> None:
    state = compiled(plain()).state_dict()
    root = repo.commit({"model": plain()}).root
    save_file(dict(state), tmp_path / "m.safetensors")
    torch.save(state, tmp_path / "m.pt")
    torch.save({"model": with_forward_module(plain())}, tmp_path / "fabric.ckpt")
    dcp.save({"model": state}, checkpoint_id=tmp_path / "dcp")
    assert repo.import_file(tmp_path / "m.safetensors", branch="safetensors").root == root
    assert repo.import_file(tmp_path / "m.pt", branch="pt", prefix="model").root == root
    assert repo.import_file(tmp_path / "fabric.ckpt", branch="fabric").root == root
    assert repo.import_file(tmp_path / "dcp", branch="dcp").root == root


def test_a_module_that_is_called_module_beside_others_keeps_its_name(repo: Repository, tmp_path: Path) -> None:
    average = AveragedModel(plain())
    torch.save(
        {"ema": average.state_dict(), "odd": {"module.a": 1, "module.b": {"w": torch.ones(1)}}}, tmp_path / "s.pt"
    )
    imported = repo.import_file(tmp_path / "s.pt")
    assert imported.renamed == ()
    assert repo.load(imported)["ema"].keys() == average.state_dict().keys()


def test_names_are_kept_if_the_caller_says_so(repo: Repository, tmp_path: Path) -> None:
    own = torch.nn.ModuleDict({"module": plain()})  # no wrapper
    torch.save({"model": own.state_dict()}, tmp_path / "s.pt")
    kept = repo.import_file(tmp_path / "s.pt", options=ImportOptions(keep_names=True))
    assert kept.renamed == ()
    assert kept.root == repo.commit({"model": own}).root


def test_an_ordered_dict_keeps_its_order(repo: Repository, tmp_path: Path) -> None:
    state = OrderedDict([("_orig_mod.b", torch.ones(2)), ("_orig_mod.a", torch.zeros(2))])
    torch.save({"model": state}, tmp_path / "s.pt")
    assert list(repo.load(repo.import_file(tmp_path / "s.pt"))["model"]) == ["b", "a"]


def test_the_command_says_what_it_left_out_of_names(repo: Repository, tmp_path: Path) -> None:
    save_file({"_orig_mod.w": torch.ones(2)}, tmp_path / "m.safetensors")
    done = call("-C", tmp_path / "repo", "import", tmp_path / "m.safetensors")
    assert done.code == 0
    assert "renamed: model: _orig_mod. of a wrapper is left out of 1 name\n" in done.err
