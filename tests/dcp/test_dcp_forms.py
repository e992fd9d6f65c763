"""What is not in a root, through DCP: versions of modules are stored and told by either door, strides come back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

from cas_ckpt import CommitOptions, Repository
from cas_ckpt.dcp import CasSavePlanner, CasStorageReader, CasStorageWriter, with_names
from tests.dcp.states import alone, load, save
from tests.training.test_forms import Doubling, Old, layout_of


def state(kind: type[Doubling], value: float = 0.0) -> dict[str, Any]:
    """A module, and what one gave as its state, deeper."""
    parts = torch.nn.Sequential(kind(value), torch.nn.BatchNorm1d(3))
    return {"model": torch.nn.Sequential(kind(value)), "deep": {"x": [parts.state_dict()], "epoch": 1}}


def loaded(value: Any) -> float:
    """What a module makes of a state that it was given."""
    model = torch.nn.Sequential(Doubling(), torch.nn.BatchNorm1d(3))
    model.load_state_dict(value)
    return model[0].weight[0].item()


@pytest.mark.parametrize("how", ["CasSavePlanner", "flat", "async"])
def test_a_save_notes_the_versions_that_a_commit_notes(repo: Repository, how: str) -> None:
    repo.commit(state(Old), branch="natively", options=CommitOptions(create=True))
    writer = CasStorageWriter(repo, branch="main", create=True)
    if how == "async":
        with alone():
            dcp.async_save(state(Old), storage_writer=writer, no_dist=True).result()
    else:
        flat = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planners = {"CasSavePlanner": CasSavePlanner(), "flat": flat}
        save(state(Old), writer, planner=planners[how])
    assert layout_of(repo, "main") == layout_of(repo, "natively")
    assert layout_of(repo, "main").versions == {"model": {}, "deep/x/0": {"1": 2}}


@pytest.mark.parametrize("flatten", [True, False])
def test_a_load_tells_a_module_which_version_its_state_is_of(repo: Repository, flatten: bool) -> None:
    repo.commit(state(Old, 1.0))
    target = state(Doubling)
    planner = DefaultLoadPlanner(flatten_state_dict=flatten, flatten_sharded_tensors=flatten)
    load(target, CasStorageReader(repo, flatten=flatten), planner=planner)
    assert target["model"][0].weight[0] == loaded(target["deep"]["x"][0]) == 2.0
    save(target, CasStorageWriter(repo))
    load(target, CasStorageReader(repo))
    assert target["model"][0].weight[0] == 2.0  # once


def test_with_names_too(repo: Repository) -> None:
    save(with_names({"model": torch.nn.DataParallel(Old(1.0))}), CasStorageWriter(repo), planner=CasSavePlanner())
    target = torch.nn.DataParallel(Doubling())
    load(with_names({"model": target}), CasStorageReader(repo))
    assert target.module.weight[0] == 2.0


def test_what_a_load_makes_new_lies_in_memory_as_it_was_committed(repo: Repository) -> None:
    repo.commit({"part": {"w": torch.arange(600.0).view(20, 30).t()}, "pair": (torch.ones(30, 20).t(), 1)})
    target: dict[str, Any] = {"part": {}, "pair": ()}
    load(target, CasStorageReader(repo, flatten=False), planner=DefaultLoadPlanner(False, False))
    assert target["part"]["w"].stride() == (1, 30)
    assert target["pair"][0].stride() == (1, 20)


def test_a_part_that_nothing_was_loaded_into_keeps_its_version(repo: Repository) -> None:
    repo.commit({"model": torch.nn.Sequential(Old(1.0))})
    both = torch.nn.Sequential(Doubling(), Doubling(3.0))
    load({"model": both}, CasStorageReader(repo), planner=DefaultLoadPlanner(allow_partial_load=True))
    assert [each.weight[0].item() for each in both] == [2.0, 3.0]


def test_a_commit_that_says_nothing_of_versions_is_loaded_as_it_was_before(repo: Repository) -> None:
    repo.commit({"model": dict(Old(1.0).state_dict())})
    model = Doubling()
    load({"model": model}, CasStorageReader(repo))
    assert model.weight[0] == 1.0
