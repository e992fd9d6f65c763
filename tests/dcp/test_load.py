"""dcp.load of one process: exact, verified before anything is touched, never partly, never cast in silence."""

from __future__ import annotations

import copy
import dataclasses
import io
import mmap
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from cas_ckpt import Repository, limits
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.refs import UNKNOWN_HEAD, Head
from cas_ckpt.dcp import CasLoadPlanner, CasStorageReader, CasStorageWriter
from cas_ckpt.errors import NotFoundError, StorageError
from cas_ckpt.storage.file import FileStore
from tests.crash.test_restore_interrupted import StoreThatFails
from tests.dcp.states import alone, awkward_state, load, plain_state, same, save, trained
from tests.wrapped_stores import FaultyStore, flip_bit


def zeroed(state: Any) -> Any:
    """A target of the same form: other values, other memory."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state.detach())
    if isinstance(state, dict):
        return type(state)((name, zeroed(value)) for name, value in state.items())
    if isinstance(state, list) and any(isinstance(part, torch.Tensor | dict | list) for part in state):
        return [zeroed(part) for part in state]
    return "old"


def test_what_repo_commit_stored_is_loaded(repo: Repository) -> None:
    state = plain_state(5) | awkward_state()
    repo.commit(state)
    target = zeroed(state)
    tensors = {"half": target["half"], "turned": target["turned"]}
    reader = CasStorageReader(repo)
    load(target, reader, planner=CasLoadPlanner())
    assert same(target, state)
    assert all(target[name] is tensor for name, tensor in tensors.items())
    assert reader.commit == repo.resolve("HEAD")


def test_modules_and_optimizers_are_loaded_through_their_own_methods(repo: Repository) -> None:
    model, optimizer = trained(1)
    repo.commit({"model": model, "optim": optimizer.state_dict(), "extra": {"epoch": 3}})
    other, its_optimizer = trained(2)
    extra = {"epoch": 0}
    load({"model": other, "optim": its_optimizer, "extra": extra}, CasStorageReader(repo))
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert same(its_optimizer.state_dict(), optimizer.state_dict())
    assert extra == {"epoch": 3}


def test_a_state_can_be_made_from_the_commit_alone(repo: Repository) -> None:
    state = plain_state(1)
    save(state, CasStorageWriter(repo))
    made: dict[str, Any] = {}
    with alone():
        _load_state_dict(made, CasStorageReader(repo), no_dist=True, planner=_EmptyStateDictLoadPlanner())
    assert made["optim"]["state"].keys() == {"0", "1", "2", "3"}  # DCP's planner makes text of numbers
    del state["optim"], made["optim"], state["fresh"], made["fresh"]
    assert same(made, state | {"model": dict(state["model"])})


def test_sparse_tensors_and_arrays_come_back_as_they_were(repo: Repository) -> None:
    repo.commit({"sparse": torch.eye(3).to_sparse(), "array": np.ones((2, 2))})
    target: dict[str, Any] = {"sparse": None, "array": None}
    load(target, CasStorageReader(repo))
    assert torch.equal(target["sparse"].to_dense(), torch.eye(3))
    assert same(target["array"], np.ones((2, 2)))


def test_part_of_a_commit_is_loaded_and_what_it_lacks_is_refused_or_left(repo: Repository) -> None:
    save({"a": torch.ones(2), "b": {"c": torch.ones(3), "d": 1}}, CasStorageWriter(repo))
    target = {"b": {"c": torch.zeros(3)}}
    load(target, CasStorageReader(repo))
    assert same(target, {"b": {"c": torch.ones(3)}})
    more = {"a": torch.zeros(2), "new": torch.zeros(1)}
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: new"):
        load(more, CasStorageReader(repo))
    assert same(more["a"], torch.zeros(2))
    load(more, CasStorageReader(repo), planner=DefaultLoadPlanner(allow_partial_load=True))
    assert same(more, {"a": torch.ones(2), "new": torch.zeros(1)})


def test_planners_that_do_not_flatten_load_outermost_entries(repo: Repository) -> None:
    state = {"deep": {"w": torch.ones(600), "n": OrderedDict(a=1)}, "w": torch.ones(2)}
    repo.commit(state)
    target: dict[str, Any] = {"deep": None, "w": torch.zeros(2)}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    load(target, CasStorageReader(repo, flatten=False), planner=planner)
    assert same(target, state)


def test_no_dtype_is_cast_unless_asked_for(repo: Repository) -> None:
    save({"small": torch.full((3,), 1.5), "w": torch.full((40, 50), 1.5)}, CasStorageWriter(repo))
    target = {"small": torch.zeros(3), "w": torch.zeros(40, 50, dtype=torch.bfloat16)}
    with pytest.raises(CheckpointException, match=r"w: the destination is torch.bfloat16, .* float32\[40, 50\]"):
        load(target, CasStorageReader(repo))
    assert not target["small"].any()
    load(target, CasStorageReader(repo, cast=True))
    assert same(target["w"], torch.full((40, 50), 1.5, dtype=torch.bfloat16))


def test_another_shape_is_refused(repo: Repository) -> None:
    save({"w": torch.ones(4)}, CasStorageWriter(repo))
    with pytest.raises(CheckpointException, match="Size mismatch"):
        load({"w": torch.zeros(5)}, CasStorageReader(repo))


class _LeavesOut(DefaultLoadPlanner):
    """Forgets the second half of every tensor, as a load of uncoordinated saves does."""

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        for item in plan.items:
            object.__setattr__(item, "lengths", torch.Size((item.lengths[0] // 2, *item.lengths[1:])))
        return plan


def test_elements_that_nothing_covers_are_named_and_nothing_is_touched(repo: Repository) -> None:
    save({"w": torch.ones(6, 4), "x": torch.ones(2)}, CasStorageWriter(repo))
    target = {"w": torch.zeros(6, 4), "x": torch.zeros(2)}
    with pytest.raises(CheckpointException, match=r"MismatchError: (w\[3:6, 0:4\]|x\[1:2\]): no stored part covers"):
        load(target, CasStorageReader(repo), planner=_LeavesOut())
    assert not target["w"].any() and not target["x"].any()


def test_a_flipped_bit_is_found_before_anything_is_touched(tmp_path: Path) -> None:
    state = {"a": torch.arange(200_000.0), "b": torch.arange(300_000.0), "c": 5}
    Repository.init(tmp_path / "repo", encoding="raw").close()
    save(state, CasStorageWriter(tmp_path / "repo"))
    store = FaultyStore(FileStore(tmp_path / "repo"))
    handle = RepositoryHandle.on_store(store, index_url=str(tmp_path / "repo" / "index" / "index.sqlite"))
    largest = max(handle.index.packs().items(), key=lambda pack: pack[1])
    store.damage[largest[0]] = flip_bit(largest[1] // 2)
    target = zeroed(state)
    with pytest.raises(CheckpointException, match="CorruptionError: [ab]: chunk"):
        load(target, CasStorageReader(handle))
    assert not target["a"].any() and not target["b"].any() and target["c"] == "old"
    handle.close()


def test_a_crashed_or_refused_save_leaves_older_commits_as_they_were(repo: Repository) -> None:
    save({"w": torch.ones(2000)}, CasStorageWriter(repo), checkpoint_id="one")
    with pytest.raises(CheckpointException):
        save({"w": torch.zeros(2000), "bad": object()}, CasStorageWriter(repo))
    target = {"w": torch.zeros(2000)}
    load(target, CasStorageReader(repo))
    assert target["w"].all()


def test_a_stream_of_bytes_is_stored_as_bytes_and_loaded_as_a_stream(repo: Repository) -> None:
    state = {"one": io.BytesIO(b"abc"), "list": [io.BytesIO(b""), {"deep": io.BytesIO(b"x" * 5000)}]}
    save(state, CasStorageWriter(repo))
    assert repo.load("HEAD") == {"one": b"abc", "list": [b"", {"deep": b"x" * 5000}]}
    target: Any = {"one": io.BytesIO(), "list": [io.BytesIO(b"old"), {"deep": io.BytesIO()}]}
    load(target, CasStorageReader(repo))
    assert target["one"].read() == b"abc" and target["list"][0].read() == b""
    assert target["list"][1]["deep"].read() == b"x" * 5000


def test_memory_of_any_layout_is_filled(repo: Repository) -> None:
    save({"w": torch.arange(3000.0).reshape(30, 100)}, CasStorageWriter(repo))
    parameter = torch.nn.Parameter(torch.zeros(100, 30).t())
    wide = torch.zeros(30, 200)
    before = parameter._version
    load({"w": parameter}, CasStorageReader(repo))
    load({"w": wide[:, ::2]}, CasStorageReader(repo))
    assert torch.equal(parameter.data, torch.arange(3000.0).reshape(30, 100)) and parameter._version > before
    assert torch.equal(wide[:, ::2], parameter.data) and not wide[:, 1::2].any()


def test_loading_runs_no_pickle_of_the_commit(repo: Repository) -> None:
    with pytest.raises(CheckpointException, match="UnsupportedValueError"):
        save({"f": {1, 2}, "g": same}, CasStorageWriter(repo))
    save({"f": {1, 2}, "g": same}, CasStorageWriter(repo, allow_pickle=True))
    target: dict[str, Any] = {"f": None, "g": None}
    with pytest.raises(CheckpointException, match="allow_pickle"):
        load(target, CasStorageReader(repo))
    with pytest.raises(CheckpointException, match="allow_pickle is 'no': give True or False"):
        load(target, CasStorageReader(repo, allow_pickle="no"))  # type: ignore[arg-type]
    assert target == {"f": None, "g": None}
    load(target, CasStorageReader(repo, allow_pickle=True))
    assert target == {"f": {1, 2}, "g": same}


def test_a_ref_that_is_not_there_is_told_as_such(repo: Repository) -> None:
    with pytest.raises(CheckpointException, match="there is no branch, tag or commit 'nowhere'"):
        load({"a": 1}, CasStorageReader(repo, ref="nowhere"))


def test_metadata_that_could_not_be_read_says_why_by_every_field_and_is_copied(repo: Repository) -> None:
    metadata = CasStorageReader(repo, ref="nope").read_metadata()
    for each in (metadata, copy.copy(metadata), pickle.loads(pickle.dumps(metadata))):
        assert not hasattr(each, "other")
        for field in dataclasses.fields(Metadata):
            with pytest.raises(NotFoundError, match="nope"):
                getattr(each, field.name)


def test_head_is_unknown_once_a_load_that_fails_has_written_into_a_tensor(repo: Repository, tmp_path: Path) -> None:
    repo.commit({name: torch.rand(200_000) for name in "ab"})
    store = StoreThatFails(tmp_path / "repo", 1 << 30, lambda: StorageError("the disk went"))
    with closing(RepositoryHandle.on_store(store)) as handle:

        def loaded(allowed: int) -> list[bool]:
            store.allowed, store.reads = allowed, 0
            handle.head = Head("main", "11" * 32)
            target = {name: torch.zeros(200_000) for name in "ab"}
            with suppress(CheckpointException), limits(num_threads=1):
                load(target, CasStorageReader(handle))
            return sorted(bool(tensor.any()) for tensor in target.values())

        assert loaded(1 << 30) == [True, True]
        assert handle.head == Head("main", repo.resolve("main"))
        assert loaded(store.reads - 1) == [False, True]
        assert handle.head == UNKNOWN_HEAD
        assert loaded(3) == [False, False]
        assert handle.head == Head("main", "11" * 32)


def test_one_load_reads_one_commit_also_when_the_branch_moves(repo: Repository) -> None:
    """Rank 1 looked at the branch after it moved: the coordinator's commit counts for both."""
    save({"w": torch.ones(600)}, CasStorageWriter(repo))
    first, second = CasStorageReader(repo), CasStorageReader(repo)
    first.read_metadata()
    save({"w": torch.full((600,), 2.0)}, CasStorageWriter(repo))
    target = {"w": torch.zeros(600)}
    planner = DefaultLoadPlanner()
    metadata = second.read_metadata()
    planner.set_up_planner(target, metadata, is_coordinator=False)
    second.set_up_storage_reader(metadata, is_coordinator=False, rank=1)
    local = second.prepare_local_plan(planner.create_local_plan())
    plans = first.prepare_global_plan([first.prepare_local_plan(LoadPlan([])), local])
    second.read_data(plans[1], planner).wait()
    assert second.commit == first.commit == repo.resolve("HEAD~1")
    assert same(target["w"], torch.ones(600))


def test_the_planner_of_dcp_itself_would_leave_two_values(repo: Repository) -> None:
    repo.commit({"by_number": {1: "one"}})
    theirs, ours = {"by_number": {1: "old"}}, {"by_number": {1: "old"}}
    load(theirs, CasStorageReader(repo))
    load(ours, CasStorageReader(repo), planner=CasLoadPlanner())
    assert theirs == {"by_number": {1: "old", "1": "one"}} and ours == {"by_number": {1: "one"}}


def test_destinations_that_overlap_are_refused_before_anything_is_touched(repo: Repository) -> None:
    save({"a": torch.ones(1000), "b": torch.full((1000,), 2.0), "c": torch.ones(1000)}, CasStorageWriter(repo))
    buffer = torch.zeros(1500)
    for target in ({"a": buffer[:1000], "b": buffer[500:]}, {"a": buffer[:1000], "b": buffer[:1000]}):
        with pytest.raises(CheckpointException, match="MismatchError: a and b overlap in the target's memory"):
            load(target, CasStorageReader(repo))
        with pytest.raises(CheckpointException, match="MismatchError: a and b overlap in the target's memory"):
            load({name: each.to(torch.float32) for name, each in target.items()}, CasStorageReader(repo, cast=True))
        assert not buffer.any()
    tied = buffer[:1000]
    load({"a": tied, "c": tied}, CasStorageReader(repo))
    assert tied.all()


def test_a_destination_over_a_read_only_file_is_refused(repo: Repository, tmp_path: Path) -> None:
    save({"a": torch.ones(1000), "b": torch.ones(1000)}, CasStorageWriter(repo))
    (tmp_path / "file").write_bytes(bytes(4000))
    with (tmp_path / "file").open("rb") as file, mmap.mmap(file.fileno(), 4000, access=mmap.ACCESS_READ) as mapped:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target = {"a": torch.zeros(1000), "b": torch.frombuffer(mapped, dtype=torch.float32)}
        with pytest.raises(CheckpointException, match="MismatchError: b: the memory of the destination is mapped read"):
            load(target, CasStorageReader(repo))
        assert not target["a"].any()
        del target


LISTS: dict[str, Callable[[int], Any]] = {
    "arrays": lambda at: [np.full(2, at), np.full(1, at + 1)],
    "mixed": lambda at: [np.full(1, at), f"s{at}", [at, [np.full(2, at)]]],
    "streams": lambda at: [io.BytesIO(b"a%d" % at), io.BytesIO(b"b%d" % at)],
    "tuple of streams": lambda at: (io.BytesIO(b"a%d" % at), at),
    "generators": lambda at: [torch.Generator().manual_seed(at)],
}


@pytest.mark.parametrize("make", LISTS.values(), ids=LISTS)
def test_lists_without_tensors_come_back_as_they_were(repo: Repository, make: Callable[[int], Any]) -> None:
    """DCP takes such a list for one value, whatever the commit made of what is in it."""
    save({"x": make(0), "w": torch.ones(2)}, CasStorageWriter(repo))
    target = {"x": make(5), "w": torch.zeros(2)}
    load(target, CasStorageReader(repo))
    assert plain(target["x"]) == plain(make(0)) != plain(make(5))
    assert target["w"].tolist() == [1.0, 1.0]


def plain(value: Any) -> Any:
    """The types and contents of a value, comparable."""
    if isinstance(value, list | tuple):
        return type(value), [plain(each) for each in value]
    if isinstance(value, torch.Generator):
        return "generator", value.get_state().tolist()
    if isinstance(value, io.BytesIO):
        return "stream", value.getvalue()
    return type(value), value.tolist() if isinstance(value, np.ndarray) else value
