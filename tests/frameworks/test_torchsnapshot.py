"""torchsnapshot itself beside its interface here: the same paths; and its folders are restored as it restores them."""

from __future__ import annotations

import importlib.metadata
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torchsnapshot

from cas_ckpt import Repository
from cas_ckpt import torchsnapshot as ours
from tests.ranks import results, run_processes
from tests.torchsnapshot.states import same, trained

CASES = "tests.frameworks.torchsnapshot_cases"


def state_of(library: Any) -> dict[str, Any]:
    """What a program with either library takes."""
    values = {
        "step": 3, "loss": 0.1, "name": "x", "flag": False, "data": b"\x00y", "nothing": None, "pair": (1, "a"),
        "history": [1, 2, {"x": 4}], "tensors": [torch.ones(2), [torch.zeros(1)]], "d/e": {"%": 1},
        "ordered": OrderedDict(b=torch.ones(1), a=torch.zeros(1)), "half": torch.ones(4, dtype=torch.bfloat16),
        "complex": torch.ones(2, dtype=torch.complex64), "table": torch.arange(12_000.0).reshape(400, 30),
    }  # fmt: skip
    return {**trained(1), "values": library.StateDict(values)}


def test_the_release_that_is_compared_with_is_the_newest() -> None:
    assert importlib.metadata.version("torchsnapshot") == "0.1.0" == torchsnapshot.__version__


def test_paths_and_entries_are_those_of_torchsnapshot(tmp_path: Path) -> None:
    theirs = torchsnapshot.Snapshot.take(str(tmp_path / "theirs"), state_of(torchsnapshot)).get_manifest()
    mine = ours.Snapshot.take(str(tmp_path / "ours"), state_of(ours)).get_manifest()
    assert mine.keys() == theirs.keys()
    for path, entry in theirs.items():
        if entry.type != "OrderedDict":  # a module's state dict is a dict in a commit
            assert mine[path].type == entry.type, path
        for name in ("dtype", "shape", "serialized_value", "readable", "replicated"):
            assert getattr(mine[path], name, None) == getattr(entry, name, None), path


@pytest.mark.parametrize("batching", ["0", "1"])
def test_a_folder_of_torchsnapshot_restores_here_as_it_does_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batching: str
) -> None:
    monkeypatch.setenv("TORCHSNAPSHOT_DISABLE_BATCHING", batching)
    monkeypatch.setenv("TORCHSNAPSHOT_MAX_CHUNK_SIZE_BYTES_OVERRIDE", "10000")
    app_state = {**state_of(torchsnapshot), "rng": torchsnapshot.RNGState()}
    torch.manual_seed(9)
    theirs = torchsnapshot.Snapshot.take(str(tmp_path / "old"), app_state)
    drawn = torch.rand(2)
    snapshot = ours.import_snapshot(tmp_path / "old", str(tmp_path / "runs" / "old"))
    other = {**trained(5, steps=0), "values": ours.StateDict(), "rng": ours.RNGState()}
    snapshot.restore(other)
    assert torch.equal(torch.rand(2), drawn)
    assert all(same(other[key], app_state[key]) for key in ("model", "optim", "sched"))
    assert same(dict(other["values"]), dict(app_state["values"]))
    manifest = theirs.get_manifest()
    assert snapshot.get_manifest().keys() == manifest.keys()
    for path in ("0/model/0.weight", "0/values/d%2Fe/%25", "0/values/history/2/x", "0/optim/state/0/exp_avg"):
        assert same(snapshot.read_object(path), theirs.read_object(path))
    ours.close_repositories()


def test_a_folder_by_ranks_is_restored_by_any_number(tmp_path: Path) -> None:
    results(run_processes(2, f"{CASES}:take", str(tmp_path / "old")))
    snapshot = ours.import_snapshot(tmp_path / "old", str(tmp_path / "new"))
    state = {**trained(4), "table": ours.StateDict(t=torch.zeros(7, 3)), "rng": ours.RNGState()}
    snapshot.restore(state)
    taken = trained(1)
    assert all(same(state[key], taken[key]) for key in ("model", "optim", "sched"))
    assert state["progress"]["step"] == 10 and snapshot.read_object("1/progress/history") == [1, 1]
    assert torch.equal(state["table"]["t"][:, 0], torch.tensor([1.0] * 4 + [2.0] * 3))
    theirs = torchsnapshot.Snapshot(str(tmp_path / "old")).get_manifest()
    shards = {path for path, entry in theirs.items() if entry.type == "ShardedTensor"}  # whose ranks nobody knows here
    assert snapshot.get_manifest().keys() - {"0/table/t"} == theirs.keys() - shards
    with Repository.open(tmp_path / ".cas_ckpt") as repo:
        assert repo.log("main")[0].message.startswith("import ")
    ours.close_repositories()
