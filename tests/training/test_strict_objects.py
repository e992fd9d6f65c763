"""Strict inside objects: the state of another kind of object is refused before anything is touched."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.optim import lr_scheduler

from cas_ckpt import InvalidInputError, MismatchError, PartialRestoreError, Repository, RNGState, StateDict
from cas_ckpt.dcp import CasStorageWriter
from cas_ckpt.errors import PeerError
from cas_ckpt.parallel.peers import Peers
from cas_ckpt.training.restore.restore import plan_restore
from tests.thread_peers import run_ranks
from tests.training.roundtrip import checkout, commit

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    name: partial(getattr(torch.optim, name), lr=0.1)
    for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 3),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3]),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 3),
    "LinearLR": lr_scheduler.LinearLR,
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.StepLR(optimizer, 2)], [2]
    ),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, 10, cycle_momentum=False),
}


def trained(name: str) -> dict[str, Any]:
    model = torch.nn.Linear(3, 2)
    optimizer = OPTIMIZERS[name](model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": model, "optim": optimizer}


@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_another_optimizer_is_refused(name: str, used: bool) -> None:
    model = torch.nn.Linear(3, 2)
    target = trained(name) if used else {"model": model, "optim": OPTIMIZERS[name](model.parameters())}
    before = commit(target)
    for other in OPTIMIZERS:
        tree = commit(trained(other))
        if other == name:
            plan_restore(target, tree)
        else:
            with pytest.raises(MismatchError, match="optim/param_groups/0/"):
                plan_restore(target, tree)
    assert commit(target) == before


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_state_of_another_scheduler_is_refused(name: str) -> None:
    def made(kind: str) -> dict[str, Any]:
        return {"sched": SCHEDULERS[kind](torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1))}

    target = made(name)
    before = commit(target)
    for other in SCHEDULERS:
        if other == name:
            checkout(commit(made(other)), made(name))
        else:
            with pytest.raises(MismatchError, match="sched/"):
                plan_restore(target, commit(made(other)))
    assert commit(target) == before


def test_not_strict_leaves_alone_what_only_one_side_has() -> None:
    source, target = trained("AdamW"), trained("SGD")
    groups = copy.deepcopy(target["optim"].param_groups[0])
    plan = checkout(commit(source), target, strict=False)
    assert "optim/param_groups/0/momentum" in plan.missing
    assert "optim/param_groups/0/betas" in plan.unexpected
    group = target["optim"].param_groups[0]
    assert "betas" not in group
    assert (group["momentum"], group["dampening"]) == (groups["momentum"], groups["dampening"])
    assert group["weight_decay"] == source["optim"].param_groups[0]["weight_decay"]
    target["optim"].step()


def test_not_strict_keeps_a_scheduler_whole() -> None:
    optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
    step, cosine = lr_scheduler.StepLR(optimizer, 3), lr_scheduler.CosineAnnealingLR(optimizer, 7)
    optimizer.step()
    step.step()
    plan = checkout(commit({"sched": step}), {"sched": cosine}, strict=False)
    assert plan.missing == ("sched/T_max", "sched/eta_min")
    assert plan.unexpected == ("sched/gamma", "sched/step_size")
    assert (cosine.T_max, cosine.last_epoch) == (7, 1)
    assert not hasattr(cosine, "gamma")


class Meter:
    """Saves more the longer it runs."""

    def __init__(self, **sums: float) -> None:
        self.sums: dict[Any, float] = dict(sums)

    def state_dict(self) -> dict[Any, float]:
        return dict(self.sums)

    def load_state_dict(self, state_dict: dict[Any, float]) -> None:
        self.sums = dict(state_dict)


def test_a_fresh_object_takes_more_than_it_saves_now_and_numbered_parts_are_data() -> None:
    meter = Meter()
    checkout(commit({"m": Meter(loss=1.0)}), {"m": meter})
    assert meter.sums == {"loss": 1.0}
    checkout(commit({"m": Meter(loss=1.0, accuracy=2.0)}), {"m": meter})
    assert len(meter.sums) == 2
    numbered = Meter()
    numbered.sums = {1: 2.0, 5: 3.0}
    other = Meter()
    other.sums = {1: 4.0}
    checkout(commit({"m": other}), {"m": numbered})
    assert numbered.sums == {1: 4.0}


def test_what_an_object_saves_and_the_commit_lacks_is_missing() -> None:
    target = {"m": Meter(loss=1.0, accuracy=2.0)}
    with pytest.raises(MismatchError, match=r"in the target but not in the commit \(1\):\s+m/accuracy"):
        plan_restore(target, commit({"m": Meter(loss=5.0)}))
    plan = checkout(commit({"m": Meter(loss=5.0)}), target, strict=False)
    assert plan.missing == ("m/accuracy",)
    assert target["m"].sums == {"loss": 5.0, "accuracy": 2.0}
    with pytest.raises(MismatchError, match="m: the target saves a dict, the commit holds a plain value of type list"):
        plan_restore(target, commit({"m": [1, 2]}))


def test_no_key_in_common_is_an_error_without_strict_too() -> None:
    weight = torch.zeros(3)
    with Repository.init("memory://nothing-in-common") as repo:
        repo.commit({"model": {"w": torch.ones(3)}})
        for into in ({"net": {"w": weight}}, {"model": {"other": weight}}, {"w": weight}):
            with pytest.raises(MismatchError, match="no key in common.*'model'"):
                repo.checkout(into=into, strict=False)
        assert weight.sum() == 0
        report = repo.checkout(into={"model": {"w": weight}, "more": 1}, strict=False)
        assert report.missing == ("more",)


def test_ranks_of_which_one_has_something_in_common_succeed() -> None:
    url = "memory://one-in-common"
    with Repository.init(url, group=None) as repo:
        repo.commit({"a": torch.ones(3)})

    def work(peers: Peers) -> Any:
        into = {"a" if peers.rank == 1 else "b": torch.zeros(3)}
        with Repository.open(url, group=peers) as repo:
            repo.checkout(into=into, strict=False)
            nothing = {f"{peers.rank}": torch.zeros(3)}
            with pytest.raises((MismatchError, PeerError), match="no key in common"):
                repo.checkout(into=nothing, strict=False)
        return {name: float(value.sum()) for name, value in into.items()}

    assert run_ranks(2, work, timeout_s=20) == [{"b": 0.0}, {"a": 3.0}]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_random_states_of_a_dcp_commit_are_restored_or_refused_before_anything_is_touched() -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "repo")
        model = torch.nn.Linear(3, 2)
        state = {"model": model.state_dict(), "rng": RNGState().state_dict()}
        Repository.init(place).close()
        dcp.save(state, storage_writer=CasStorageWriter(place), no_dist=True)
        torch.set_rng_state(state["rng"]["torch"])
        expected = torch.rand(3)
        target = torch.nn.Linear(3, 2)
        before = target.weight.detach().clone()
        with Repository.open(place) as repo:
            named = RNGState({"shuffle": torch.Generator()})
            with pytest.raises(MismatchError, match="generators"):
                repo.checkout(into={"model": target, "rng": named})
            assert torch.equal(target.weight, before)
            repo.checkout(into={"model": target, "rng": RNGState()})
        assert torch.equal(target.weight, model.weight)
        assert torch.equal(torch.rand(3), expected)


def test_a_state_of_random_numbers_without_its_parts_is_refused() -> None:
    tree = commit({"w": torch.ones(2), "rng": {"torch": torch.get_rng_state()}})
    with pytest.raises(MismatchError, match=r"rng/numpy\s+rng/python"):
        plan_restore({"w": torch.zeros(2), "rng": RNGState()}, tree)


class Refusing(StateDict):
    """Takes no state."""

    def load_state_dict(self, state_dict: Any) -> None:
        raise KeyError("scale")


def test_an_error_of_one_ranks_object_reaches_the_others_by_name() -> None:
    url = "memory://refusing-object"
    with Repository.init(url, group=None) as repo:
        repo.commit({"good": StateDict(a=1), "thing": StateDict(a=1)})

    def work(peers: Peers) -> Any:
        into = {"good": StateDict(a=0), "thing": Refusing(a=0) if peers.rank else StateDict(a=0)}
        with Repository.open(url, group=peers) as repo, pytest.raises((PartialRestoreError, PeerError)) as caught:
            repo.checkout(into=into)
        return type(caught.value).__name__, str(caught.value)

    (first, words), (second, own_words) = run_ranks(2, work, timeout_s=20)
    assert (first, second) == ("PeerError", "PartialRestoreError")
    assert "thing" in words and "KeyError('scale')" in words
    assert "'good'" in own_words


def test_a_name_that_no_key_can_hold_matters_only_where_it_was_asked_for(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit({"a": {"w": torch.ones(2)}})
        into: dict[str, Any] = {"a": {"w": torch.zeros(2), (1, 2): 3}}
        repo.checkout("main", into=into, keys="a/w")
        assert into["a"]["w"].tolist() == [1, 1]
        with pytest.raises(InvalidInputError, match="give text or integers as keys"):
            repo.checkout("main", into=into)
