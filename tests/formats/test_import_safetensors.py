"""Safetensors files and folders come in bit for bit, as the state that a live model would be."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file, save_model

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.revisions import resolve
from cas_ckpt.errors import InvalidInputError
from cas_ckpt.formats import folders as input_file
from cas_ckpt.formats.folders import FileSource, InputFile, ReadScratch
from cas_ckpt.formats.models import find_model
from cas_ckpt.formats.safetensors import DTYPES, model_tree
from cas_ckpt.formats.verbs import import_any
from cas_ckpt.objects.spec import Box, Spec
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.training.capture.capture import capture_state
from cas_ckpt.training.capture.tensors import torch_dtype
from cas_ckpt.training.verbs import load_state
from tests.builders import commit, new_repository, numbers, same_bytes, stored_arrays
from tests.formats.import_files import (
    assert_refused,
    claim,
    container_id,
    honest_file,
    import_file,
    raw_file,
    sharded_folder,
    write_index,
)


@pytest.fixture
def repo(tmp_path: Path) -> RepositoryHandle:
    return new_repository(tmp_path / "repo")


def test_the_tensors_of_a_file_are_committed_bit_for_bit(repo: RepositoryHandle, tmp_path: Path) -> None:
    arrays = {"w": numbers(2500, 1030), "flat": numbers(3_000_000, seed=3), "x/y": numbers(5), "none": numbers(0, 4)}
    info = import_file(repo, honest_file(tmp_path / "m.safetensors", **arrays))
    back = stored_arrays(repo, info.root)
    assert {key.removeprefix("model/") for key in back} == set(arrays)
    assert all(same_bytes(back[f"model/{name}"], array) for name, array in arrays.items())


def test_an_imported_model_is_the_same_state_as_the_live_model(repo: RepositoryHandle, tmp_path: Path) -> None:
    layers = (torch.nn.Linear(700, 600), torch.nn.BatchNorm1d(600), torch.nn.Linear(600, 3).bfloat16())
    model = torch.nn.Sequential(*layers)
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    imported = import_file(repo, tmp_path / "m.safetensors")
    live = commit_tree(repo, capture_state({"model": model, "step": 1}), CommitRequest(branch="live"))
    assert container_id(repo, imported.root, "model") == container_id(repo, live.root, "model")
    assert live.stats.num_new_chunks == 0


def test_a_tie_that_the_header_records_is_one(repo: RepositoryHandle, tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(90, 30), "lm_head": torch.nn.Linear(30, 90, bias=False)})
    model["lm_head"].weight = model["embed"].weight
    save_model(model, str(tmp_path / "m.safetensors"))
    imported = import_file(repo, tmp_path / "m.safetensors")
    live = commit_tree(repo, capture_state({"model": model}), CommitRequest(branch="live"))
    assert container_id(repo, imported.root, "model") == container_id(repo, live.root, "model")
    loaded = load_state(repo, imported.id)["model"]
    assert loaded["embed.weight"].data_ptr() == loaded["lm_head.weight"].data_ptr()


def test_loading_an_import_and_committing_it_again_gives_the_same_root(repo: RepositoryHandle, tmp_path: Path) -> None:
    first = import_file(repo, sharded_folder(tmp_path / "model"))
    loaded = load_state(repo, first.id)
    assert loaded["files"]["config.json"] == b'{"hidden_size": 64}'
    assert loaded["metadata"] == {"format": "pt"}
    again = commit_tree(repo, capture_state(loaded), CommitRequest(branch="again"))
    assert again.root == first.root


def test_every_dtype_of_the_format_comes_in_under_its_torch_name(repo: RepositoryHandle, tmp_path: Path) -> None:
    data = bytes(range(16))
    header = {f"t_{theirs}": claim(theirs, [16 * 2], 16 * at, 16 * at + 16) for at, theirs in enumerate(DTYPES)}
    for name, entry in header.items():
        bits = 4 if name == "t_F4" else Spec(DTYPES[name[2:]], ()).item_bytes * 8
        entry["shape"] = [16 * 8 // bits]
    path = raw_file(tmp_path / "m.safetensors", header, data * len(header))
    loaded = load_state(repo, import_file(repo, path).id)["model"]
    for theirs, ours in DTYPES.items():
        tensor = loaded[f"t_{theirs}"]
        assert tensor.dtype == torch_dtype(ours)
        assert bytes(tensor.view(torch.uint8).numpy()) == data


def test_a_folder_of_shards_is_one_model(repo: RepositoryHandle, tmp_path: Path) -> None:
    folder = import_file(repo, sharded_folder(tmp_path / "model"))
    whole = honest_file(tmp_path / "m.safetensors", a=numbers(600, 64), b=numbers(3), c=numbers(50, 50, seed=1))
    single = import_file(repo, whole, branch="single")
    assert container_id(repo, folder.root, "model") == container_id(repo, single.root, "model")
    assert load_state(repo, folder.id, keys="files")["files"].keys() == {"config.json", "tokenizer.model"}


def test_metadata_on_which_shards_disagree_is_kept_for_each(repo: RepositoryHandle, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, epoch in (("a", "1"), ("b", "2")):
        header = {"__metadata__": {"format": "pt", "epoch": epoch}, name: claim("U8", [1], 0, 1)}
        raw_file(folder / f"{name}.safetensors", header, b"x")
    write_index(folder, {"a": "a.safetensors", "b": "b.safetensors"})
    metadata = load_state(repo, import_file(repo, folder).id)["metadata"]
    assert metadata == {"format": "pt", "epoch@a.safetensors": "1", "epoch@b.safetensors": "2"}


def hub_cache(folder: Path) -> Path:
    """A snapshot as the cache of the Hugging Face hub lays it."""
    (folder / "blobs").mkdir(parents=True)
    snapshot = folder / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    honest_file(folder / "blobs" / "5f3a")
    (folder / "blobs" / "77aa").write_text("{}")
    (snapshot / "model.safetensors").symlink_to(Path("..", "..", "blobs", "5f3a"))
    (snapshot / "config.json").symlink_to(Path("..", "..", "blobs", "77aa"))
    return snapshot


def test_files_behind_symbolic_links_are_read_as_in_a_hub_cache(repo: RepositoryHandle, tmp_path: Path) -> None:
    assert set(load_state(repo, import_file(repo, hub_cache(tmp_path / "models--a--b")).id)["files"]) == {"config.json"}
    (tmp_path / "link").symlink_to(tmp_path / "models--a--b" / "snapshots" / "0123abc")
    import_file(repo, tmp_path / "link")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "a.safetensors"])
def test_a_link_that_leads_out_of_a_folder_is_refused(repo: RepositoryHandle, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    secret = tmp_path / "secret"
    if name.endswith("safetensors"):
        honest_file(secret)
    else:
        secret.write_text("{}")
    if name == "a.safetensors":
        write_index(folder, {"w": name, "b": name})
    elif name == "config.json":
        honest_file(folder / "model.safetensors")
    (folder / name).symlink_to(secret)
    assert_refused(repo, folder, "symbolic link to .*secret, outside the folder")
    import_any(repo, folder, CommitRequest(), follow_links=True)
    inside = folder / "kept"
    secret.rename(inside)
    (folder / name).unlink()
    (folder / name).symlink_to("kept")
    import_file(repo, folder)


def test_a_link_that_only_looks_like_one_of_a_hub_cache_is_refused(repo: RepositoryHandle, tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path / "models--a--b")
    (tmp_path / "secret.json").write_text("{}")
    (tmp_path / "models--a--b" / "blobs" / "9999").symlink_to(tmp_path / "secret.json")
    (snapshot / "tokenizer.json").symlink_to(Path("..", "..", "blobs", "9999"))
    assert_refused(repo, snapshot, "outside the folder")


def test_boxes_are_read_right_by_band_and_by_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(3 * 5 * 7 * 4, dtype=np.uint16).reshape(3, 5, 7, 4)
    (tmp_path / "f").write_bytes(b"head" + array.tobytes())
    source = FileSource(InputFile(tmp_path / "f"), 4, Spec("bfloat16", array.shape), ReadScratch())
    boxes = [Box((0, 0, 0, 0), (3, 5, 7, 4)), Box((1, 2, 3, 1), (1, 2, 3, 2)), Box((0, 1, 0, 2), (3, 2, 7, 1)),
             Box((2, 4, 6, 3), (1, 1, 1, 1)), Box((1, 0, 2, 0), (1, 5, 2, 4)), Box((0, 0, 0, 0), (3, 0, 7, 4)),
             ]  # fmt: skip
    one, cut = boxes[3], boxes[2]
    for limit in (input_file.MAX_BAND_BYTES, 16):
        monkeypatch.setattr(input_file, "MAX_BAND_BYTES", limit)
        for box in [*boxes, *boxes, one, cut, one]:
            assert same_bytes(source.read(box), array[box.slices])


def test_importing_again_stores_nothing(repo: RepositoryHandle, tmp_path: Path) -> None:
    path = honest_file(tmp_path / "m.safetensors", w=numbers(2048, 2048))
    first, second = import_file(repo, path), import_file(repo, path)
    assert second.root == first.root
    assert second.stats.num_new_chunks == 0


# --- what is no model -----------------------------------------------------------------------


def test_what_is_no_plain_file_is_refused(repo: RepositoryHandle, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.safetensors")
    (tmp_path / "empty.safetensors").touch()
    (tmp_path / "notes.doc").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "odd").mkdir()
    os.mkfifo(tmp_path / "odd" / "model.safetensors")
    reasons = {"fifo.safetensors": "FIFO", "empty.safetensors": "0 bytes", "notes.doc": "ends in",
               "folder": "wanted one of", "odd": "FIFO", "nowhere.safetensors": "No such file",
               "nowhere.pt": "No such file"}  # fmt: skip
    for name, reason in reasons.items():
        assert_refused(repo, tmp_path / name, reason)


@pytest.mark.parametrize(
    "shard",
    [7, None, "", "..", "../m.safetensors", "/etc/passwd", "x\\y.safetensors", "x\n.safetensors", "m.bin",
     "./n.safetensors"],
)  # fmt: skip
def test_an_index_that_leads_elsewhere_is_refused_unread(repo: RepositoryHandle, tmp_path: Path, shard: object) -> None:
    (tmp_path / "model").mkdir()
    honest_file(tmp_path / "m.safetensors", a=numbers(3))
    write_index(tmp_path / "model", {"a": shard})
    assert_refused(repo, tmp_path / "model", "wanted the name of a file here")


@pytest.mark.parametrize(
    "weight_map",
    [None, [], {}, {"a": "gone.safetensors"}, {"a": "m.safetensors", "z": "m.safetensors"},
     {"a": "m.safetensors", "b": "n.safetensors", "only_m": "n.safetensors"}],
)  # fmt: skip
def test_an_index_that_names_what_is_not_there_is_refused(
    repo: RepositoryHandle, tmp_path: Path, weight_map: object
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    honest_file(folder / "m.safetensors", a=numbers(3), only_m=numbers(1))
    honest_file(folder / "n.safetensors", b=numbers(3))
    write_index(folder, weight_map)
    assert_refused(repo, folder)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"weight_map": {"a": "x", "a": "y"}}', "\xff"])
def test_an_index_that_is_no_json_is_refused(repo: RepositoryHandle, tmp_path: Path, text: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors.index.json").write_bytes(text.encode("latin-1"))
    assert_refused(repo, tmp_path / "model")


def test_one_tensor_in_two_shards_is_refused(repo: RepositoryHandle, tmp_path: Path) -> None:
    folder = sharded_folder(tmp_path / "model")
    honest_file(folder / "model-00002-of-00002.safetensors", c=numbers(50, 50), a=numbers(600, 64))
    assert_refused(repo, folder, "too")


def test_a_file_cut_short_while_it_is_read_leaves_the_branch(repo: RepositoryHandle, tmp_path: Path) -> None:
    path = honest_file(tmp_path / "m.safetensors", w=numbers(4_000_000))
    before = commit(repo, {"x": numbers(4)})
    tree = model_tree(find_model(path))
    os.truncate(path, 9_000_000)
    with pytest.raises(InvalidInputError, match="truncated"):
        commit_tree(repo, tree, CommitRequest())
    assert resolve(repo, "main").hex() == before.id
