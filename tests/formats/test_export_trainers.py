"""A commit of an imported checkpoint comes out as the files that its framework wrote, or a key without one is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cas_ckpt import Repository
from cas_ckpt.errors import InvalidInputError, NotFoundError, UnsupportedValueError
from tests.cli.running import call
from tests.formats.test_import_trainers import same
from tests.formats.trainer_folders import accelerate_folder, trainer_folder


@pytest.fixture
def repo(tmp_path: Path) -> Repository:
    return Repository.init(tmp_path / "repo")


def content(folder: Path) -> dict[str, Any]:
    """What the files of a folder hold, by name."""
    found: dict[str, Any] = {}
    for path in folder.iterdir():
        if path.suffix == ".safetensors":
            found[path.name] = load_file(path)
        elif path.suffix == ".json":
            found[path.name] = path.read_bytes()
        else:
            found[path.name] = torch.load(path, weights_only=False)
    return found


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_checkpoint_of_trainer_comes_out_as_it_went_in(repo: Repository, tmp_path: Path, ranks: int) -> None:
    trainer_folder(tmp_path / "in", ranks=ranks, with_arguments=False)
    imported = repo.import_file(tmp_path / "in")
    info = repo.export(imported, tmp_path / "out", format="trainer", progress=True)
    before, after = content(tmp_path / "in"), content(tmp_path / "out")
    assert same(before, after)
    assert sorted(info.files) == sorted(str(path) for path in (tmp_path / "out").iterdir())
    assert info.total_bytes > sum(tensor.nbytes for tensor in after["model.safetensors"].values())


def test_a_save_of_accelerate_comes_out_as_it_went_in(repo: Repository, tmp_path: Path) -> None:
    accelerate_folder(tmp_path / "in")
    imported = repo.import_file(tmp_path / "in")
    repo.export(imported, tmp_path / "out", format="accelerate")
    assert same(content(tmp_path / "in"), content(tmp_path / "out"))


def test_parts_that_are_chosen_come_out_alone(repo: Repository, tmp_path: Path) -> None:
    trainer_folder(tmp_path / "in", ranks=2, with_arguments=False)
    repo.import_file(tmp_path / "in")
    repo.export("HEAD", tmp_path / "out", format="trainer", keys=["model", "rng/~=1"])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model.safetensors", "rng_state_1.pth"]
    repo.export("HEAD", tmp_path / "groups", format="trainer", keys="optim/param_groups")
    assert [*torch.load(tmp_path / "groups" / "optimizer.pt")] == ["param_groups"]
    repo.export("HEAD", tmp_path / "optimizer", format="trainer", keys="optim")
    assert [path.name for path in (tmp_path / "optimizer").iterdir()] == ["optimizer.pt"]


def test_a_key_that_no_file_is_for_is_named_and_nothing_is_written(repo: Repository, tmp_path: Path) -> None:
    repo.commit({"model": torch.nn.Linear(2, 2), "curve": np.zeros(3)})
    for framework in ("trainer", "accelerate"):
        with pytest.raises(UnsupportedValueError, match=f"curve: a folder of {framework} has no file for it"):
            repo.export("main", tmp_path / "out", format=framework)
    assert not (tmp_path / "out").exists()
    accelerate_folder(tmp_path / "in")
    repo.import_file(tmp_path / "in", onto="main")
    with pytest.raises(UnsupportedValueError, match="custom/~=0: a folder of trainer has no file"):
        repo.export("HEAD", tmp_path / "out", format="trainer")
    with pytest.raises(NotFoundError):
        repo.export("HEAD", tmp_path / "out", format="trainer", keys="nothing")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("state", [{"rng": {0: 1, "0": 2}}, {"rng/0": 1, "rng": {0: 2}}])
def test_two_entries_of_one_file_are_refused(repo: Repository, tmp_path: Path, state: dict[str, Any]) -> None:
    repo.commit(state)
    for framework in ("trainer", "accelerate"):
        with pytest.raises(UnsupportedValueError, match="another entry goes into r"):
            repo.export("main", tmp_path / "out", format=framework)
    assert not (tmp_path / "out").exists()


def test_digits_of_other_scripts_are_no_number_of_a_rank(repo: Repository, tmp_path: Path) -> None:
    repo.commit({"rng": {"٣": 1, "0": 2}})
    with pytest.raises(UnsupportedValueError, match="rng/٣: a folder of trainer has no file"):
        repo.export("main", tmp_path / "out", format="trainer")


def test_a_trainer_that_cannot_be_written_leaves_nothing(repo: Repository, tmp_path: Path) -> None:
    repo.commit({"model": {"a": torch.zeros(2), "b": 7}, "optim": {"lr": 0.1}})
    with pytest.raises(UnsupportedValueError, match="model/b"):
        repo.export("main", tmp_path / "out", format="trainer")
    with pytest.raises(InvalidInputError, match=r"checkpoint\.pt: a checkpoint of trainer is a folder"):
        repo.export("main", tmp_path / "checkpoint.pt", format="trainer", keys="optim")
    repo.commit({"optim": {"lr": 0.1}, "files": {"optimizer.pt": b"mine"}})
    with pytest.raises(InvalidInputError, match=r"files/optimizer\.pt: no file of the folder may be called so"):
        repo.export("main", tmp_path / "out", format="trainer")
    assert [path.name for path in tmp_path.iterdir()] == ["repo"]


def test_the_command_line_writes_them_too(repo: Repository, tmp_path: Path) -> None:
    trainer_folder(tmp_path / "in", with_arguments=False)
    repo.import_file(tmp_path / "in")
    call("-C", str(tmp_path / "repo"), "export", "HEAD", str(tmp_path / "out"), "--format", "trainer")
    assert same(content(tmp_path / "in"), content(tmp_path / "out"))
