"""Checkpoints of trainers come in whole, or the import says what it left out."""

from __future__ import annotations

import copy
import io
import os
import pickle
import random
import warnings
import zipfile
from collections import Counter, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from cas_ckpt import ImportInfo, ImportOptions, LeftOut, Repository, RNGState
from cas_ckpt.errors import InvalidInputError, MismatchError
from tests.cli.running import call
from tests.formats.trainer_folders import accelerate_folder, accelerate_rng, trainer_folder, trainer_rng


@pytest.fixture
def repo(tmp_path: Path) -> Repository:
    return Repository.init(tmp_path / "repo")


def same(one: Any, other: Any) -> bool:
    """Whether both have the same types, structure and bits."""
    if isinstance(one, dict):
        return type(one) is type(other) and set(one) == set(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    return type(one) is type(other) and bool(one == other)


def test_every_state_of_a_trainers_checkpoint_comes_in(repo: Repository, tmp_path: Path) -> None:
    saved = trainer_folder(tmp_path / "checkpoint-500", with_arguments=False)
    imported = repo.import_file(tmp_path / "checkpoint-500")
    assert isinstance(imported, ImportInfo)
    assert imported.left_out == ()
    loaded = repo.load(imported)
    assert same(loaded["model"], dict(saved["model.safetensors"]))
    assert same(loaded["optim"], saved["optimizer.pt"])
    assert same(loaded["scheduler"], saved["scheduler.pt"])
    assert same(loaded["scaler"], saved["scaler.pt"])
    assert same(loaded["rng"], {"0": saved["rng_state.pth"]})
    assert set(loaded["files"]) == {"config.json", "trainer_state.json"}


def test_random_states_of_a_trainer_restore_the_generators(repo: Repository, tmp_path: Path) -> None:
    trainer_folder(tmp_path / "checkpoint-500", ranks=3, with_arguments=False)
    torch.save(trainer_rng(), tmp_path / "checkpoint-500" / "rng_state_2.pth")
    expected = random.random(), np.random.rand(), torch.rand(1)
    rng = repo.load(repo.import_file(tmp_path / "checkpoint-500"))["rng"]
    assert list(rng) == ["0", "1", "2"]
    random.setstate(rng["2"]["python"])
    np.random.set_state(rng["2"]["numpy"])
    torch.set_rng_state(rng["2"]["cpu"])
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected


@pytest.mark.parametrize("write", [trainer_folder, accelerate_folder])
def test_imported_random_states_go_into_an_rng_state(repo: Repository, tmp_path: Path, write: Any) -> None:
    write(tmp_path / "state")
    (tmp_path / "state" / "random_states_1.pkl").unlink(missing_ok=True)
    rank = accelerate_rng if write is accelerate_folder else trainer_rng
    torch.save(rank() | {"cuda": []} if rank is trainer_rng else rank(), next((tmp_path / "state").glob("r*_state*")))
    expected = random.random(), np.random.rand(), torch.rand(1)
    imported = repo.import_file(tmp_path / "state")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the commit holds the random states of . CUDA devices")
        repo.checkout(imported, into={"rng": RNGState()}, keys="rng")
    assert (random.random(), np.random.rand(), torch.rand(1)) == expected


def test_a_class_in_a_trainers_checkpoint_is_named_and_left_out(repo: Repository, tmp_path: Path) -> None:
    trainer_folder(tmp_path / "checkpoint-500")
    imported = repo.import_file(tmp_path / "checkpoint-500")
    (left_out,) = imported.left_out
    assert left_out.name == "training_args.bin"
    assert "TrainingArguments" in left_out.reason
    assert "optim" in repo.load(imported)


def test_a_deque_in_a_part_is_named_and_left_out(repo: Repository, tmp_path: Path) -> None:
    trainer_folder(tmp_path / "state", with_arguments=False)
    torch.save({"losses": deque([1.0])}, tmp_path / "state" / "scheduler.pt")
    (left_out,) = repo.import_file(tmp_path / "state").left_out
    assert left_out.name == "scheduler.pt"
    assert "collections.deque" in left_out.reason


def test_every_state_of_an_accelerate_folder_comes_in(repo: Repository, tmp_path: Path) -> None:
    saved = accelerate_folder(tmp_path / "state")
    imported = repo.import_file(tmp_path / "state")
    assert imported.left_out == ()
    loaded = repo.load(imported)
    keys = {
        "model": "model.safetensors", "model_1": "model_1.safetensors", "optim": "optimizer.bin",
        "optim_1": "optimizer_1.bin", "scheduler": "scheduler.bin", "scaler": "scaler.pt", "sampler": "sampler.bin",
        "dataloader": "dl_state_dict.bin",
    }  # fmt: skip
    for key, file in keys.items():
        wanted = dict(saved[file]) if file.endswith("safetensors") else saved[file]
        assert same(loaded[key], wanted), key
    assert same(loaded["rng"], {"0": saved["random_states_0.pkl"], "1": saved["random_states_1.pkl"]})
    assert same(loaded["custom"], {"0": saved["custom_checkpoint_0.pkl"]})


def test_what_no_importer_knows_is_named(repo: Repository, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    accelerate_folder(folder)
    (folder / "global_step500").mkdir()
    (folder / "pytorch_model.bin").write_bytes((folder / "optimizer.bin").read_bytes())
    (folder / "optimizer.pt").write_bytes((folder / "optimizer.bin").read_bytes())
    (folder / "notes.xyz").write_text("?")
    (folder / ".gitattributes").write_text("")
    left_out = repo.import_file(folder).left_out
    assert [each.name for each in left_out] == ["global_step500", "notes.xyz", "optimizer.bin", "pytorch_model.bin"]
    assert "is a folder" in left_out[0].reason
    assert "key" in left_out[2].reason
    assert "read from model.safetensors" in left_out[3].reason


def test_a_damaged_part_refuses_the_import_instead_of_being_left_out(repo: Repository, tmp_path: Path) -> None:
    trainer_folder(tmp_path / "checkpoint-500")
    whole = (tmp_path / "checkpoint-500" / "optimizer.pt").read_bytes()
    (tmp_path / "checkpoint-500" / "optimizer.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InvalidInputError, match=r"optimizer\.pt"):
        repo.import_file(tmp_path / "checkpoint-500")


def test_a_part_that_links_out_of_the_folder_is_refused(repo: Repository, tmp_path: Path) -> None:
    trainer_folder(tmp_path / "checkpoint-500", with_arguments=False)
    (tmp_path / "checkpoint-500" / "optimizer.pt").rename(tmp_path / "elsewhere.pt")
    (tmp_path / "checkpoint-500" / "optimizer.pt").symlink_to(tmp_path / "elsewhere.pt")
    with pytest.raises(InvalidInputError, match="symbolic link"):
        repo.import_file(tmp_path / "checkpoint-500")
    assert "optim" in repo.load(repo.import_file(tmp_path / "checkpoint-500", options=ImportOptions(follow_links=True)))


def test_the_adapter_of_a_trainers_checkpoint_is_its_model(repo: Repository, tmp_path: Path) -> None:
    trainer_folder(tmp_path / "checkpoint-500", with_arguments=False)
    folder = tmp_path / "checkpoint-500"
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    assert set(repo.load(repo.import_file(folder))["model"]) == {
        "0.weight", "0.bias", "1.weight", "1.bias",
    }  # fmt: skip


@pytest.mark.parametrize("header", [{"lm_head.weight": "embed.weight"}, {"format": "pt"}], ids=["a tie", "left out"])
def test_a_file_of_tied_weights_goes_into_a_live_tied_model(
    repo: Repository, tmp_path: Path, header: dict[str, str]
) -> None:
    weight = torch.randn(90, 30)
    save_file({"embed.weight": weight}, tmp_path / "model.safetensors", metadata=header)
    imported = repo.import_file(tmp_path / "model.safetensors")
    parts = {"embed": torch.nn.Embedding(90, 30), "lm_head": torch.nn.Linear(30, 90, bias=False)}
    untied, tied = torch.nn.ModuleDict(copy.deepcopy(parts)), torch.nn.ModuleDict(parts)
    tied["lm_head"].weight = tied["embed"].weight
    assert repo.checkout(imported, into={"model": tied}, keys="model").missing == ()
    assert tied["lm_head"].weight is tied["embed"].weight
    assert torch.equal(tied["lm_head"].weight, weight)
    if "format" in header:
        with pytest.raises(MismatchError, match=r"not in the commit \(1\):\n +model/lm_head.weight"):
            repo.checkout(imported, into={"model": untied}, keys="model")
    else:
        repo.checkout(imported, into={"model": untied}, keys="model")
        assert torch.equal(untied["lm_head"].weight, weight)


def test_a_prefix_is_where_everything_goes(repo: Repository, tmp_path: Path) -> None:
    weights = {"w": torch.randn(30, 4)}
    save_file(weights, tmp_path / "m.safetensors")
    torch.save(weights, tmp_path / "pytorch_model.bin")
    trainer_folder(tmp_path / "checkpoint-500", with_arguments=False)
    as_model = repo.import_file(tmp_path / "pytorch_model.bin", prefix="model", branch="bin")
    assert as_model.root == repo.import_file(tmp_path / "m.safetensors", branch="safetensors").root
    nested = repo.load(repo.import_file(tmp_path / "checkpoint-500", prefix="a/b", branch="nested"))
    assert set(nested) == {"a"}
    assert set(nested["a"]) == {"b"}
    assert {"model", "optim", "rng", "files"} <= set(nested["a"]["b"])
    with pytest.raises(InvalidInputError, match="empty name"):
        repo.import_file(tmp_path / "m.safetensors", prefix="a//b", branch="refused")


def test_the_command_line_names_what_it_left_out_and_ends_with_3(repo: Repository, tmp_path: Path) -> None:
    trainer_folder(tmp_path / "checkpoint-500")
    done = call("-C", tmp_path / "repo", "import", tmp_path / "checkpoint-500", "--prefix", "run")
    assert done.code == 3
    assert "left out: training_args.bin: " in done.err
    assert "Left out: training_args.bin" in call("-C", tmp_path / "repo", "log").out
    told = call("-C", tmp_path / "repo", "import", tmp_path / "checkpoint-500", "--branch", "again", "--json")
    assert told.code == 3
    assert [each["name"] for each in told.json["left_out"]] == ["training_args.bin"]
    (tmp_path / "checkpoint-500" / "training_args.bin").unlink()
    assert call("-C", tmp_path / "repo", "import", tmp_path / "checkpoint-500", "--onto", "main").code == 0


# --- NumPy arrays in files of torch.save ----------------------------------------------------


def test_numpy_arrays_and_numbers_in_a_torch_file_come_in_bit_by_bit(repo: Repository, tmp_path: Path) -> None:
    state = {
        "plain": np.arange(24, dtype=np.int16).reshape(2, 3, 4), "fortran": np.asfortranarray(np.random.rand(5, 7)),
        "big": np.arange(9, dtype=">f4"), "bool": np.array([True, False]), "none": np.empty((0, 3)),
        "complex": np.array([1 + 2j]), "scalar": np.float64(0.1), "half": np.float16(1.5), "zero": np.array(7),
        "tensor": torch.randn(300, 40), "part": torch.arange(100).view(10, 10)[2:5, 1:9], "empty": torch.empty(0, 2),
        "bf16": torch.randn(40, dtype=torch.bfloat16), "shared": [1, {"a": (2, None, 0.5, b"\xff")}],
        "ordered": torch.nn.Linear(3, 2).state_dict(), "counter": Counter(a=2), "set": {1, "b"},
        "array": bytearray(b"ab"), "device": torch.device("cpu"),
        "dtype": torch.float8_e5m2, "number": 1 + 2j, "parameter": torch.nn.Parameter(torch.ones(300, 7)),
    }  # fmt: skip
    state["again"] = state["tensor"]
    torch.save(state, tmp_path / "s.pt")
    root = repo.commit(state, branch="live").root
    imported = repo.import_file(tmp_path / "s.pt", branch="imported")
    loaded = repo.load(imported)
    assert same(loaded, state)
    assert imported.root == root


class _Runs:
    """Makes a folder if it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize(
    "value",
    [
        np.array([object()], dtype=object),
        np.zeros(2, dtype=[("a", "i4"), ("b", "f8")]),
        np.array(["2020"], dtype="M8[Y]"),
        np.array(["text"]),
    ],
    ids=["objects", "fields", "times", "text"],
)
def test_arrays_of_other_than_numbers_are_left_out(repo: Repository, tmp_path: Path, value: Any) -> None:
    trainer_folder(tmp_path / "c", with_arguments=False)
    torch.save({"value": value}, tmp_path / "c" / "scheduler.pt")
    assert [each.name for each in repo.import_file(tmp_path / "c").left_out] == ["scheduler.pt"]


def test_code_beside_an_array_is_not_run(repo: Repository, tmp_path: Path) -> None:
    trainer_folder(tmp_path / "c", with_arguments=False)
    torch.save({"value": np.arange(3), "evil": _Runs(tmp_path / "ran")}, tmp_path / "c" / "scheduler.pt")
    (left_out,) = repo.import_file(tmp_path / "c").left_out
    assert isinstance(left_out, LeftOut)
    assert not (tmp_path / "ran").exists()


class _Claims:
    """An array that claims a shape that its bytes do not fill."""

    def __init__(self, array: Any, shape: tuple[int, ...]) -> None:
        self.array, self.shape = array, shape

    def __reduce__(self) -> Any:
        make, args, state = self.array.__reduce__()
        return make, args, (state[0], self.shape, *state[2:])


@pytest.mark.parametrize("shape", [(1 << 40,), (-1,), (2, 2), (1 << 62, 1 << 62)])
def test_an_array_that_claims_more_than_its_bytes_is_not_made(
    repo: Repository, tmp_path: Path, shape: tuple[int, ...]
) -> None:
    data = io.BytesIO()
    torch.save({"value": 0}, data)
    pickled = pickle.dumps({"value": _Claims(np.arange(3), shape)}, protocol=2)
    with zipfile.ZipFile(data) as old, zipfile.ZipFile(tmp_path / "s.pt", "w") as new:
        for info in old.infolist():
            new.writestr(info.filename, pickled if info.filename.endswith("data.pkl") else old.read(info))
    with pytest.raises(InvalidInputError, match="shape"):
        repo.import_file(tmp_path / "s.pt")
