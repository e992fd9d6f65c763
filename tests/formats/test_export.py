"""What was committed goes out as files that others read, whole or not at all."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import commit_of, layout_of
from cas_ckpt.core.revisions import resolve
from cas_ckpt.errors import (
    ConflictError,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    OutOfSpaceError,
    UnsupportedValueError,
)
from cas_ckpt.formats import folders as output_files
from cas_ckpt.formats import safetensors as exporting
from cas_ckpt.formats.verbs import export_any
from cas_ckpt.objects.spec import Spec
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.training.capture.capture import capture_state
from tests.builders import new_repository
from tests.formats.import_files import import_file, sharded_folder


@pytest.fixture
def repo(tmp_path: Path) -> RepositoryHandle:
    return new_repository(tmp_path / "repo")


def commit_state(handle: RepositoryHandle, state: dict[str, Any]) -> None:
    commit_tree(handle, capture_state(state), CommitRequest())


def tensors() -> dict[str, torch.Tensor]:
    return {
        "layer.w": torch.randn(2100, 1500), "layer.b": torch.randn(17).bfloat16(), "scalar": torch.tensor(5),
        "none": torch.empty(0, 4), "long": torch.arange(5_000_000, dtype=torch.int32), "ü": torch.ones(1).half(),
        "a/b": torch.ones(3, dtype=torch.bool), "deep": torch.randn(1, 3, 1, 7, dtype=torch.float64),
        "c": torch.ones(2, dtype=torch.complex64), "0": torch.ones(2, dtype=torch.uint8),
    }  # fmt: skip


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_model_goes_out_byte_for_byte_as_the_library_writes_it(repo: RepositoryHandle, tmp_path: Path) -> None:
    model = tensors()
    commit_state(repo, {"model": model})
    info = export_any(repo, "main", tmp_path / "ours.safetensors")
    save_file(model, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert info.num_tensors == len(model)
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


def test_an_imported_folder_goes_out_as_it_came_in(repo: RepositoryHandle, tmp_path: Path) -> None:
    given_folder = sharded_folder(tmp_path / "given")
    first = import_file(repo, given_folder)
    export_any(repo, "main", tmp_path / "out", max_shard_bytes=600 * 64 * 4 + 12)
    assert names(tmp_path / "out") == names(given_folder)
    for name in names(given_folder):
        if name != "model.safetensors.index.json":
            assert (tmp_path / "out" / name).read_bytes() == (given_folder / name).read_bytes()
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == json.loads((given_folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert index["metadata"]["total_size"] == 4 * (600 * 64 + 3 + 50 * 50)
    assert import_file(repo, tmp_path / "out", branch="again").root == first.root


def test_a_folder_without_need_of_shards_holds_one_file(repo: RepositoryHandle, tmp_path: Path) -> None:
    import_file(repo, sharded_folder(tmp_path / "given"))
    export_any(repo, "main", tmp_path / "out")
    assert names(tmp_path / "out") == ["config.json", "model.safetensors", "tokenizer.model"]


def test_shards_hold_no_more_than_they_may_and_each_tensor_once(repo: RepositoryHandle, tmp_path: Path) -> None:
    state = {f"t{number}": torch.randn(100 + number) for number in range(20)}
    commit_state(repo, {"model": state})
    info = export_any(repo, "main", tmp_path / "big.safetensors", max_shard_bytes=1000)
    *shards, index = info.files
    assert Path(index).name == "big.safetensors.index.json"
    assert Path(shards[0]).name == f"big-00001-of-{len(shards):05}.safetensors"
    found: dict[str, torch.Tensor] = {}
    for shard in shards:
        part = load_file(shard)
        assert sum(tensor.nbytes for tensor in part.values()) <= 1000
        assert not found.keys() & part.keys()
        found |= part
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_tied_tensors_are_written_once_per_name(repo: RepositoryHandle, tmp_path: Path) -> None:
    shared = torch.randn(40, 40)
    commit_state(repo, {"model": {"a": shared, "b": shared}})
    export_any(repo, "main", tmp_path / "m.safetensors")
    found = load_file(tmp_path / "m.safetensors")
    assert torch.equal(found["a"], shared)
    assert torch.equal(found["b"], shared)


@pytest.mark.parametrize("limit", [None, 6000])
def test_a_folder_has_tied_tensors_once_and_its_header_names_the_others(
    repo: RepositoryHandle, tmp_path: Path, limit: int | None
) -> None:
    shared, other = torch.randn(40, 30), torch.randn(40, 30)
    model = {
        "encoder.embed.weight": shared,
        "shared.weight": shared,
        "lm_head.weight": shared,
        "x.y.b": other,
        "b": other,
    }
    commit_state(repo, {"model": model})
    export_any(repo, "main", tmp_path / "out", max_shard_bytes=limit)
    found: dict[str, torch.Tensor] = {}
    headers: dict[str, str] = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(path)
        with safe_open(path, "pt") as file:
            headers |= file.metadata()
    assert found.keys() == {"shared.weight", "b"}
    ties = {"lm_head.weight": "shared.weight", "encoder.embed.weight": "shared.weight", "x.y.b": "b"}
    assert headers == {"format": "pt", **ties}
    import_file(repo, tmp_path / "out", branch="again")
    aliases = [layout_of(repo, commit_of(repo, resolve(repo, name))).aliases for name in ("main", "again")]
    assert aliases[0] == aliases[1] != ()
    export_any(repo, "main", tmp_path / "part", keys=["model/lm_head.weight", "model/b"])
    assert load_file(tmp_path / "part" / "model.safetensors").keys() == {"lm_head.weight", "b"}


def test_a_tied_tensor_that_has_the_name_of_a_text_in_the_header_is_written_too(
    repo: RepositoryHandle, tmp_path: Path
) -> None:
    shared = torch.randn(40, 40)
    commit_state(repo, {"model": dict.fromkeys(["a", "format", "note"], shared), "metadata": {"note": "mine"}})
    export_any(repo, "main", tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "mine"}
        assert sorted(file.keys()) == ["a", "format", "note"]


def test_keys_choose_what_goes_out_and_others_keep_their_whole_name(repo: RepositoryHandle, tmp_path: Path) -> None:
    commit_state(repo, {"model": {"w": torch.ones(3)}, "ema": {"x": [torch.zeros(2)]}, "step": 5})
    export_any(repo, "main", tmp_path / "m.safetensors", keys=["model", "ema"])
    assert load_file(tmp_path / "m.safetensors").keys() == {"w", "ema/x/0"}
    with pytest.raises(NotFoundError):
        export_any(repo, "main", tmp_path / "n.safetensors", keys="nothing")


@pytest.mark.parametrize(
    ("value", "key"),
    [(5, "model/x"), ({"deep": "text"}, "model/x/deep"), ("t" * 5000, "model/x"), (np.array(["a"]), "model/x"),
     (torch.ones(2, dtype=torch.complex128), "model/x"), (torch.eye(3).to_sparse(), "model/x"),
     (np.array([1], "M8[s]"), "model/x")],
)  # fmt: skip
def test_what_safetensors_cannot_hold_is_named(repo: RepositoryHandle, tmp_path: Path, value: Any, key: str) -> None:
    commit_state(repo, {"model": {"w": torch.ones(3), "x": value}})
    with pytest.raises(UnsupportedValueError, match=f"{key}:"):
        export_any(repo, "main", tmp_path / "m.safetensors")
    export_any(repo, "main", tmp_path / "m.safetensors", keys="model/w")


def test_two_tensors_of_one_name_are_refused(repo: RepositoryHandle, tmp_path: Path) -> None:
    commit_state(repo, {"model": {"w": torch.ones(3)}, "w": torch.ones(2)})
    with pytest.raises(InvalidInputError, match="would be called 'w'"):
        export_any(repo, "main", tmp_path / "m.safetensors")
    commit_state(repo, {"model": {"__metadata__": torch.ones(3)}})
    with pytest.raises(InvalidInputError, match="__metadata__"):
        export_any(repo, "main", tmp_path / "m.safetensors")


EVIL_NAMES = ["../evil.json", "/evil.json", "..", "", "a\\b", "a\nb", "model.safetensors", "x" * 300]


@pytest.mark.parametrize("name", EVIL_NAMES)
def test_side_files_of_a_stranger_stay_in_the_folder(repo: RepositoryHandle, tmp_path: Path, name: str) -> None:
    commit_state(repo, {"model": {"w": torch.ones(3)}, "files": {name: b"evil"}})
    with pytest.raises(InvalidInputError, match="files/"):
        export_any(repo, "main", tmp_path / "out" / "folder")
    assert not (tmp_path / "out").exists()


def test_no_file_is_replaced_unless_it_is_forced(repo: RepositoryHandle, tmp_path: Path) -> None:
    import_file(repo, sharded_folder(tmp_path / "given"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("mine")
    with pytest.raises(ConflictError, match="config.json"):
        export_any(repo, "main", tmp_path / "out")
    assert names(tmp_path / "out") == ["config.json"]
    export_any(repo, "main", tmp_path / "out", force=True)
    assert (tmp_path / "out" / "config.json").read_text() != "mine"
    for name in ("x.safetensors", "x.pt"):
        (tmp_path / name).mkdir()
        with pytest.raises(ConflictError, match="folder"):
            export_any(repo, "main", tmp_path / name, keys="model", force=True)


def test_a_file_that_appears_meanwhile_is_kept_and_nothing_of_ours(
    repo: RepositoryHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_file(repo, sharded_folder(tmp_path / "given"))
    original = output_files.OutputFiles._publish

    def late(self: output_files.OutputFiles) -> None:
        (tmp_path / "out" / "tokenizer.model").write_text("theirs")
        original(self)

    monkeypatch.setattr(output_files.OutputFiles, "_publish", late)
    with pytest.raises(ConflictError, match=r"tokenizer\.model"):
        export_any(repo, "main", tmp_path / "out")
    assert names(tmp_path / "out") == ["tokenizer.model"]
    assert (tmp_path / "out" / "tokenizer.model").read_text() == "theirs"


@pytest.mark.parametrize("name", ["m.safetensors", "m.pt", "folder"])
def test_a_full_disk_leaves_nothing(
    repo: RepositoryHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    import_file(repo, sharded_folder(tmp_path / "given"))
    (tmp_path / "out").mkdir()

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(output_files, "sync_file", full)
    with pytest.raises(OutOfSpaceError):
        export_any(repo, "main", tmp_path / "out" / name, keys="model")
    assert names(tmp_path / "out") == []


def test_a_write_that_torch_sees_fail_is_told_as_what_it_is(
    repo: RepositoryHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit_state(repo, {"w": torch.randn(500_000)})

    class FullFile:
        room = 2000

        def write(self, data: bytes) -> int:
            self.room -= len(data)
            if self.room < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return len(data)

    save = torch.save
    monkeypatch.setattr(torch, "save", lambda state, file, **given: save(state, FullFile(), **given))
    with pytest.raises(OutOfSpaceError):
        export_any(repo, "main", tmp_path / "m.pt")
    assert not (tmp_path / "m.pt").exists()


@pytest.mark.parametrize("name", ["m.safetensors", "m.pt"])
def test_damage_in_the_repository_leaves_no_file(repo: RepositoryHandle, tmp_path: Path, name: str) -> None:
    commit_state(repo, {"w": torch.randn(500_000)})
    files = [path for path in (tmp_path / "repo").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    os.chmod(largest, 0o644)
    with largest.open("r+b") as file:
        file.seek(largest.stat().st_size // 2)
        file.write(b"\xff\x00\xff\x00")
    with pytest.raises(CorruptionError):
        export_any(repo, "main", tmp_path / name)
    assert names(tmp_path) == ["repo"]


def test_a_torch_file_holds_the_state_and_its_ties_and_comes_back_in(repo: RepositoryHandle, tmp_path: Path) -> None:
    shared = torch.randn(50, 50)
    commit_state(repo, {"a": shared, "b": {"c": shared, "n": [1, 2.5, None]}, "text": "x"})
    info = export_any(repo, "main", tmp_path / "s.pt")
    assert info.num_tensors == 2
    loaded = torch.load(tmp_path / "s.pt", weights_only=True)
    assert loaded["a"].data_ptr() == loaded["b"]["c"].data_ptr()
    assert torch.equal(loaded["a"], shared)
    assert loaded["b"]["n"] == [1, 2.5, None]
    root = commit_of(repo, resolve(repo, "main")).root.hex()
    assert import_file(repo, tmp_path / "s.pt", branch="again").root == root


def test_unknown_formats_and_limits_are_refused(repo: RepositoryHandle, tmp_path: Path) -> None:
    commit_state(repo, {"w": torch.ones(3)})
    for form, limit in (("onnx", None), ("torch", 5), ("safetensors", 0)):
        with pytest.raises(InvalidInputError):
            export_any(repo, "main", tmp_path / "out.pt", format=form, max_shard_bytes=limit)
    with pytest.raises(NotFoundError):
        export_any(repo, "nothing", tmp_path / "out.pt")
    assert names(tmp_path) == ["repo"]


shapes = st.lists(st.integers(0, 40), max_size=4).map(tuple)


@given(shapes, st.integers(4, 4000))
def test_bands_are_the_tensor_in_order_each_element_once(shape: tuple[int, ...], step_bytes: int) -> None:
    spec = Spec("float32", shape)
    whole = np.arange(spec.num_elements, dtype=np.float32).reshape(shape)
    parts = [whole[box.slices].reshape(-1) for box in exporting.bands(spec, step_bytes=step_bytes)]
    assert all(part.nbytes <= max(step_bytes, 4) for part in parts)
    assert np.array_equal(np.concatenate([np.empty(0, np.float32), *parts]), whole.reshape(-1))
