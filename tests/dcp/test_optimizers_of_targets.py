"""Which parameter of a commit a target of dcp.load means, where names and numbers look alike."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException

from cas_ckpt import Repository
from cas_ckpt.dcp import CasStorageReader, CasStorageWriter
from tests.dcp.states import by_helper, load, same, save


def layers(count: int, seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A Sequential, whose parameters are called 0.weight, 1.weight, ..."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2, bias=False) for _ in range(count)))
    return model, stepped(torch.optim.AdamW(model.parameters()))


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for number, param in enumerate(optimizer.param_groups[0]["params"]):
        param.grad = torch.full_like(param, number + 1.0)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
def test_layers_that_the_commit_lacks_are_no_numbers_of_parameters(repo: Repository, flat: bool) -> None:
    pair, more = layers(2), layers(4, seed=1)
    save(by_helper(pair, flat=flat), CasStorageWriter(repo))
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: model.2.weight"):
        load(by_helper(more, flat=flat), CasStorageReader(repo))
    target = by_helper(more, flat=flat)
    load(target, CasStorageReader(repo), planner=DefaultLoadPlanner(allow_partial_load=True))
    assert same(target["model"]["0.weight"], pair[0].state_dict()["0.weight"])


def test_a_live_optimizer_of_numbered_layers_is_loaded_by_their_names(repo: Repository) -> None:
    pair, other = layers(2), layers(2, seed=1)
    save(by_helper(pair), CasStorageWriter(repo))
    load({"optim": other[1]}, CasStorageReader(repo))
    assert same(other[1].state_dict(), pair[1].state_dict())


def test_numbered_layers_are_refused_where_the_commit_has_numbers_alone(repo: Repository) -> None:
    model, optimizer = layers(2)
    repo.commit({"optim": optimizer.state_dict()})
    with pytest.raises(CheckpointException, match="MismatchError: optim: the target has the parameters by names"):
        load({"optim": by_helper((model, optimizer))["optim"]}, CasStorageReader(repo))


def test_names_that_are_numbers_are_not_taken_for_places(repo: Repository) -> None:
    def pair(turn: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(3)) for _ in range(2)])
        return model, stepped(torch.optim.AdamW(list(model.parameters())[::turn]))

    model, optimizer = pair(1)
    repo.commit({"model": model, "optim": optimizer})
    other = pair(1)[1]
    load({"optim": other}, CasStorageReader(repo))
    assert same(other.state_dict(), optimizer.state_dict())
    model, optimizer = pair(-1)
    repo.commit({"model": model, "optim": optimizer})
    with pytest.raises(CheckpointException, match="number 0 would get the state of '0' in place of that of '1'"):
        load({"optim": pair(-1)[1]}, CasStorageReader(repo))


def test_options_of_parameters_that_are_called_by_numbers_are_refused_in_the_flat_form(repo: Repository) -> None:
    """`param_groups.1.lr` would be that of group 1 of the commit, not of the parameter "1"."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(3)) for _ in range(3)])
    first, second, third = model
    optimizer = stepped(torch.optim.Adam([{"params": [first, second], "lr": 0.1}, {"params": [third], "lr": 0.5}]))
    repo.commit({"model": model, "optim": optimizer})
    with pytest.raises(CheckpointException, match="look like numbers of groups"):
        load({"optim": by_helper((model, optimizer), flat=True)["optim"]}, CasStorageReader(repo))
    target = {"optim": by_helper((model, optimizer))["optim"]}
    load(target, CasStorageReader(repo))
    assert [group["lr"] for group in target["optim"]["param_groups"]] == [0.1, 0.5]


def test_a_target_with_less_state_than_the_commit_is_told(repo: Repository, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = layers(2)
    repo.commit({"model": model, "optim": optimizer})
    other = torch.nn.Sequential(*(torch.nn.Linear(2, 2, bias=False) for _ in range(2)))
    half = torch.optim.AdamW(other.parameters())
    other[0].weight.grad = torch.ones(2, 2)
    half.step()
    fewer = {"optim": half.state_dict()}
    load(fewer, CasStorageReader(repo))
    assert "the commit has the state of 2 parameters, the target of 1" in caplog.text
