"""Folders of torch.distributed.checkpoint come in as the state that was saved, however it was sharded."""

from __future__ import annotations

import argparse
import dataclasses
import pickle
import random
import sys
import types
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from cas_ckpt import ImportOptions, Repository
from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.errors import InvalidInputError
from cas_ckpt.formats import dcp_import as dcp_folder_files
from cas_ckpt.formats.dcp_import import nested
from cas_ckpt.formats.dcp_metadata import check_cover
from cas_ckpt.objects.spec import Box
from cas_ckpt.objects.state import ValueItem
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.training.capture.capture import capture_state
from cas_ckpt.training.verbs import load_state
from tests.formats.dcp_folders import save_boxes, save_by_ranks, save_folder, training_state
from tests.formats.import_files import import_file
from tests.searches import tries


@pytest.fixture
def repo() -> RepositoryHandle:
    return init_repository("memory://")


def live_root(repo: RepositoryHandle, state: Mapping[str, Any]) -> str:
    return commit_tree(repo, capture_state(state), CommitRequest(branch="live")).root


@pytest.mark.parametrize(
    "options",
    [{}, {"thread_count": 3}, {"single_file_per_rank": False}, {"_extensions": [ZStandard()]},
     {"planner": DefaultSavePlanner(flatten_state_dict=False)}],
    ids=["plain", "threads", "a file per item", "zstd", "not flattened"],
)  # fmt: skip
def test_a_folder_is_the_state_that_was_saved(repo: RepositoryHandle, tmp_path: Path, options: dict[str, Any]) -> None:
    state = training_state()
    assert import_file(repo, save_folder(tmp_path / "c", state, **options)).root == live_root(repo, state)


def test_more_files_than_may_be_open(repo: RepositoryHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_folder_files, "_MAX_OPEN_FILES", 2)
    # Equal lengths: were a file taken for another by its number, its bytes would be taken too.
    state = {f"t{number}": torch.randn(200, 50) for number in range(40)}
    folder = save_folder(tmp_path / "c", state, single_file_per_rank=False)
    assert import_file(repo, folder).root == live_root(repo, state)


def test_what_frameworks_put_beside_the_saved_state_comes_in_or_is_named(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "c", {"model": {"w": torch.ones(3)}, "files": {"n": 1}})
    meta = {"epoch": 3, "loops": {"fit_loop": {"total": 7}}, "lr_schedulers": [{"last_epoch": 3, "_last_lr": [0.1]}]}
    torch.save(meta, folder / "meta.pt")  # as Lightning does for FSDP
    torch.save({"args": argparse.Namespace(lr=Fraction(1, 10))}, folder / "common.pt")  # as Megatron does
    torch.save({"w": 1}, folder / "else.pt")
    (folder / "config.json").write_text("{}")
    (folder / "__9_0.distcp").write_bytes(b"")  # of a rank that had nothing to save
    with Repository.init("memory://beside") as repo:
        imported = repo.import_file(folder, options=ImportOptions(meta={"by": "me"}))
        assert [each.name for each in imported.left_out] == ["common.pt", "config.json", "else.pt"]
        assert "fractions.Fraction" in imported.left_out[0].reason
        assert "saved beside it" in imported.left_out[1].reason
        loaded = repo.load()
        assert loaded["meta"] == meta
        assert loaded["files"] == {"n": 1}
        (commit,) = repo.log()
        assert commit.meta == {"by": "me", "left_out": {each.name: each.reason for each in imported.left_out}}


def test_a_folder_whose_metadata_has_the_plans_of_the_ranks_is_read(
    repo: RepositoryHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Megatron keeps there how each rank wrote it, in a class of its own."""
    home = types.ModuleType("megatron.core.dist_checkpointing.strategies.torch")
    fields = [("mcore_data", dict, dataclasses.field(default_factory=dict))]
    plan = dataclasses.make_dataclass("MCoreSavePlan", fields, bases=(SavePlan,), frozen=True)
    plan.__module__ = home.__name__
    home.MCoreSavePlan = plan  # type: ignore[attr-defined]
    names = home.__name__.split(".")
    for length in range(1, len(names) + 1):  # pickle imports what is above it, too
        monkeypatch.setitem(sys.modules, ".".join(names[:length]), home)
    state = {"w": torch.randn(90, 80), "n": 3}
    folder = save_folder(tmp_path / "c", state)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    items = planner.create_local_plan().items
    mcore_data = {"w": {"nd_reformulated_orig_global_shape": (90, 80)}}
    metadata.all_local_plans = [SavePlan(items), plan(items, mcore_data=mcore_data)]
    metadata.mcore_data = {}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert import_file(repo, folder).root == live_root(repo, state)


def test_flat_keys_stay_flat(repo: RepositoryHandle, tmp_path: Path) -> None:
    state = {"a.b": torch.ones(3), "a.c": torch.zeros(2), "n": 3}
    folder = save_folder(tmp_path / "c", state, planner=DefaultSavePlanner(flatten_state_dict=False))
    assert import_file(repo, folder).root == live_root(repo, state)


def test_what_dcp_does_not_save_is_not_there(repo: RepositoryHandle, tmp_path: Path) -> None:
    state = {"optim": {0: torch.ones(2)}, "gone": {}, "list": [{}, torch.ones(1), {}]}
    loaded = load_state(repo, import_file(repo, save_folder(tmp_path / "c", state)).id)
    assert set(loaded) == {"optim", "list"}
    assert set(loaded["optim"]) == {"0"}
    assert loaded["list"][0] == {}
    assert len(loaded["list"]) == 2


def test_a_list_of_values_alone_is_one_value() -> None:
    leaves = {("l", 1): ValueItem(2), ("l", 0): ValueItem("a")}
    assert nested(leaves, count=2).children["l"] == ValueItem(["a", 2])


# --- many ranks -----------------------------------------------------------------------------


def shard(tensor: torch.Tensor, mesh: DeviceMesh, placements: list[Any]) -> DTensor:
    """The part of a tensor that is on this rank, cut out by hand: a fake group moves nothing."""
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    local = tensor[Box(tuple(offsets), tuple(sizes)).slices] if all(sizes) else tensor.new_empty(sizes)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.contiguous().stride()
    )


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)])
def test_shards_of_many_ranks_are_the_tensors_that_they_are_of(
    repo: RepositoryHandle, tmp_path: Path, mesh: tuple[int, ...]
) -> None:
    full = {
        "even": torch.randn(1200, 700), "uneven": torch.randn(1001, 33), "few": torch.randn(1, 900),
        "wide": torch.randn(40, 30000), "bias": torch.randn(7).bfloat16(), "none": torch.empty(0, 5),
    }  # fmt: skip
    replicated = torch.randn(300)

    def make(device_mesh: DeviceMesh) -> dict[str, Any]:
        wide = len(mesh) - 1
        by_row: list[Any] = [Shard(0)] * len(mesh)
        mixed: list[Any] = [Replicate()] * wide + [Shard(1)]
        model = {key: shard(tensor, device_mesh, by_row) for key, tensor in full.items() if key != "wide"}
        model["wide"] = shard(full["wide"], device_mesh, mixed)
        return {"model": model, "same": replicated, "epoch": 3}

    imported = import_file(repo, save_by_ranks(tmp_path / "c", mesh, make))
    assert imported.root == live_root(repo, {"model": full, "same": replicated, "epoch": 3})


def cut_up(box: Box, rng: random.Random, depth: int) -> list[Box]:
    """A partition of a box that no mesh has."""
    axes = [axis for axis, size in enumerate(box.sizes) if size > 1]
    if not depth or not axes:
        return [box]
    axis = rng.choice(axes)
    at = rng.randrange(1, box.sizes[axis])
    halves = []
    for start, size in ((0, at), (at, box.sizes[axis] - at)):
        offsets, sizes = list(box.offsets), list(box.sizes)
        offsets[axis] += start
        sizes[axis] = size
        halves += cut_up(Box(tuple(offsets), tuple(sizes)), rng, depth - 1)
    return halves


@pytest.mark.parametrize("seed", range(6))
def test_chunks_that_follow_no_rule(repo: RepositoryHandle, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    tensors = {"w": torch.randn(1100, 900), "t": torch.randn(40, 50, 60).to(torch.float16), "v": torch.arange(100_000)}
    boxes = [(key, box) for key, tensor in tensors.items()
             for box in cut_up(Box((0,) * tensor.ndim, tuple(tensor.shape)), rng, 5)]  # fmt: skip
    rng.shuffle(boxes)
    options = {"_extensions": [ZStandard()]} if seed == 0 else {}
    folder = save_boxes(tmp_path / "c", tensors, [boxes[rank::4] for rank in range(4)], **options)
    assert import_file(repo, folder).root == live_root(repo, tensors)


@given(st.lists(st.integers(0, 7), min_size=1, max_size=3), st.integers(0, 2**32), st.integers(0, 4))
@settings(max_examples=tries(45, 150))
def test_a_partition_is_a_cover_and_nothing_else_is(shape: list[int], seed: int, depth: int) -> None:
    rng = random.Random(seed)
    whole = Box((0,) * len(shape), tuple(shape))
    boxes = [box for box in cut_up(whole, rng, depth) if box.num_elements]
    check_cover(whole.sizes, boxes, key="k")
    if len(boxes) > 1:
        one = rng.choice(boxes)
        with pytest.raises(InvalidInputError, match="k: no saved chunk holds"):
            check_cover(whole.sizes, [box for box in boxes if box != one], key="k")
        part = cut_up(one, rng, 1)[0]
        with pytest.raises(InvalidInputError, match="k: two saved chunks hold"):
            check_cover(whole.sizes, [*boxes, part], key="k")
