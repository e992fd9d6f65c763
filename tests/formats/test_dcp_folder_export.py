"""What was committed goes out as a folder that torch.distributed.checkpoint reads back equal."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.errors import (
    ConflictError,
    InvalidInputError,
    NotFoundError,
    OutOfSpaceError,
    TooLargeError,
    UnsupportedValueError,
)
from cas_ckpt.formats import folders as output_files
from cas_ckpt.formats.verbs import export_any
from cas_ckpt.memory import limits
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.training.capture.capture import capture_state
from tests.formats.dcp_folders import quietly, read_metadata, save_folder, training_state
from tests.formats.import_files import import_file


@pytest.fixture
def repo() -> RepositoryHandle:
    return init_repository("memory://")


def commit(repo: RepositoryHandle, state: Mapping[str, Any], branch: str = "main") -> str:
    return commit_tree(repo, capture_state(state), CommitRequest(branch=branch)).root


def blank(value: Any) -> Any:
    """The same structure with other content, for dcp.load to fill."""
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=torch.uint8).new_zeros(value.shape).to(value.dtype)
    if isinstance(value, dict):
        return {name: blank(part) for name, part in value.items()}
    return [blank(part) for part in value] if isinstance(value, list) else None


def load(folder: Path, into: dict[str, Any]) -> dict[str, Any]:
    with quietly():
        dcp.load(into, checkpoint_id=folder, no_dist=True)
    return into


def contiguous(state: dict[str, Any]) -> dict[str, Any]:
    """DCP copies values: a lazily conjugated tensor is written out when it comes back."""
    return state | {"conj": state["conj"].resolve_conj()}


@pytest.mark.parametrize("limit", [None, 300_000, 1], ids=["one file", "files", "a file per item"])
def test_stock_torch_reads_what_was_exported(repo: RepositoryHandle, tmp_path: Path, limit: int | None) -> None:
    state = contiguous(training_state())
    root = commit(repo, state)
    info = export_any(repo, "main", tmp_path / "c", format="dcp", max_shard_bytes=limit)
    assert commit(repo, load(tmp_path / "c", blank(state)), "loaded") == root
    with quietly():
        dcp_to_torch_save(tmp_path / "c", tmp_path / "s.pt")
    assert commit(repo, torch.load(tmp_path / "s.pt", weights_only=False), "converted") == root
    assert import_file(repo, tmp_path / "c", "imported").root == root
    assert sorted(os.path.basename(name) for name in info.files) == sorted(os.listdir(tmp_path / "c"))
    assert info.files[-1].endswith("/.metadata")


def test_the_metadata_is_what_torch_would_have_written(repo: RepositoryHandle, tmp_path: Path) -> None:
    state = training_state() | {"ints": {3: torch.ones(2)}}
    commit(repo, state)
    export_any(repo, "main", tmp_path / "ours", format="dcp")
    ours, theirs = read_metadata(tmp_path / "ours"), read_metadata(save_folder(tmp_path / "theirs", state))
    for entry in theirs.state_dict_metadata.values():
        if hasattr(entry, "properties"):
            entry.properties.requires_grad = False
            entry.properties.strides = None  # torch 2.15 writes what the tensor had, and reads it nowhere
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.planner_data == theirs.planner_data
    assert set(ours.storage_data) == set(theirs.storage_data)
    assert ours.version == theirs.version


def test_files_are_no_longer_than_was_asked_and_large_tensors_are_cut(repo: RepositoryHandle, tmp_path: Path) -> None:
    commit(repo, {"w": torch.randn(1000, 500), "one": torch.randn(1, 400_000), "b": torch.ones(3), "lr": 0.1})
    limit = 400_000
    export_any(repo, "main", tmp_path / "c", format="dcp", max_shard_bytes=limit)
    sizes = [path.stat().st_size for path in (tmp_path / "c").glob("*.distcp")]
    assert max(sizes) <= limit + 4096
    assert len(sizes) >= 9
    metadata = read_metadata(tmp_path / "c")
    assert len(metadata.state_dict_metadata["w"].chunks) >= 5  # type: ignore[union-attr]
    assert len(metadata.state_dict_metadata["b"].chunks) == 1  # type: ignore[union-attr]


def test_an_optimizer_is_loaded_by_its_owner(repo: RepositoryHandle, tmp_path: Path) -> None:
    model = torch.nn.Linear(60, 50)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 60)).sum().backward()
    optim.step()
    state = {"model": model.state_dict(), "optim": optim.state_dict()}
    commit(repo, state)
    export_any(repo, "main", tmp_path / "c", format="dcp")
    loaded = load(tmp_path / "c", blank(state))
    assert torch.equal(loaded["optim"]["state"][0]["exp_avg"], optim.state_dict()["state"][0]["exp_avg"])
    assert torch.equal(loaded["model"]["weight"], model.weight)


def test_tuples_and_arrays_go_out_as_objects(repo: RepositoryHandle, tmp_path: Path) -> None:
    state = {"pair": (torch.arange(900_000), {"a": torch.ones(2)}), "deep": [[(torch.ones(1),)], 2],
             "array": np.arange(5000.0), "fields": np.zeros(3, [("a", "i4"), ("b", "f8")])}  # fmt: skip
    root = commit(repo, state)
    export_any(repo, "main", tmp_path / "c", format="dcp")
    assert commit(repo, load(tmp_path / "c", dict.fromkeys(state)), "loaded") == root


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "sparse": ({"a": {"s": torch.eye(3).to_sparse()}}, "a/s: a tensor of kind sparse_coo"),
    "sparse in a tuple": ({"a": (torch.eye(3).to_sparse(),)}, "a/0: a tensor of kind sparse_coo"),
    "int4": ({"n": torch.zeros(4, dtype=torch.uint8).view(torch.int4)}, "n: torch saves int4"),
    "one flat key": ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "DCP calls it 'a.b'"),
    "a number and its text": ({"a": {0: 1, "0": 2}}, "a/.*0: DCP calls it 'a.0'"),
}


@pytest.mark.parametrize(
    "state", [{"array": np.zeros(1 << 19)}, {"pair": (torch.zeros(1 << 20), 1)}], ids=["an array", "a tuple"]
)
def test_objects_that_would_not_fit_into_memory_are_refused_before_anything_is_written(
    repo: RepositoryHandle, tmp_path: Path, state: dict[str, Any]
) -> None:
    commit(repo, state)
    folder = tmp_path / "folder"
    with limits(max_bytes=1 << 21), pytest.raises(TooLargeError, match="4194304 bytes of tensors"):
        export_any(repo, "main", folder, format="dcp")
    assert not folder.exists()
    with limits(max_bytes=1 << 22):
        export_any(repo, "main", folder, format="dcp")


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_dcp_cannot_hold_is_named_and_nothing_is_written(
    repo: RepositoryHandle, tmp_path: Path, name: str
) -> None:
    state, reason = UNSUPPORTED[name]
    commit(repo, state | {"w": torch.ones(3)})
    with pytest.raises(UnsupportedValueError, match=reason):
        export_any(repo, "main", tmp_path / "c", format="dcp")
    assert not (tmp_path / "c").exists()
    export_any(repo, "main", tmp_path / "c", format="dcp", keys="w")
    assert torch.equal(load(tmp_path / "c", {"w": torch.zeros(3)})["w"], torch.ones(3))


def test_bad_wishes_are_refused(repo: RepositoryHandle, tmp_path: Path) -> None:
    commit(repo, {"w": torch.ones(3)})
    with pytest.raises(InvalidInputError, match="0 bytes hold nothing"):
        export_any(repo, "main", tmp_path / "c", format="dcp", max_shard_bytes=0)
    with pytest.raises(NotFoundError):
        export_any(repo, "main", tmp_path / "c", format="dcp", keys="x")
    assert not (tmp_path / "c").exists()


# --- a checkpoint that is there already -----------------------------------------------------


def test_a_checkpoint_is_replaced_only_by_force_and_as_a_whole(repo: RepositoryHandle, tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "c", {"w": torch.zeros(3), "more": torch.ones(9)}, single_file_per_rank=False)
    commit(repo, {"w": torch.ones(3)})
    with pytest.raises(ConflictError):
        export_any(repo, "main", folder, format="dcp")
    export_any(repo, "main", folder, format="dcp", force=True)
    assert torch.equal(load(folder, {"w": torch.zeros(3)})["w"], torch.ones(3))
    assert sorted(os.listdir(folder)) == [".metadata", "__0_2.distcp"]


@pytest.mark.parametrize("failing", range(4))
def test_a_full_disk_leaves_the_old_checkpoint_as_it_was(
    repo: RepositoryHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    folder = save_folder(tmp_path / "c", {"w": torch.zeros(300)})
    commit(repo, {"w": torch.ones(300), "v": torch.ones(200)})
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    effects = iter(range(100))

    def full_at(effect: Any) -> Any:
        def run(*args: Any) -> Any:
            if next(effects) == failing:
                raise OSError(errno.ENOSPC, "No space left on device")
            return effect(*args)

        return run

    monkeypatch.setattr(output_files, "sync_file", full_at(output_files.sync_file))
    monkeypatch.setattr(output_files.os, "replace", full_at(os.replace))
    with pytest.raises(OutOfSpaceError):
        export_any(repo, "main", folder, format="dcp", max_shard_bytes=1, force=True)
    after = {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith("__0_")}
    assert after[".metadata"] == before[".metadata"]
    assert torch.equal(load(folder, {"w": torch.ones(300)})["w"], torch.zeros(300))
