"""The state of optimizers by the names of their parameters: what it is, and how it is restored."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from cas_ckpt.errors import MismatchError
from cas_ckpt.objects.patterns import KeyPatterns
from cas_ckpt.objects.state import Container, render_key, walk
from cas_ckpt.training.capture.capture import capture_state
from cas_ckpt.training.stateful import with_names
from tests.training.roundtrip import canonical, checkout, commit, failure_of, load, same_state
from tests.training.test_naming import Net, adam, net, params_of, state_of
from tests.training.test_optimizers import EXTRA, OPTIMIZERS, build, train

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
"""Importing torch.compile raises it."""


def by_number(state: Mapping[str, Any]) -> Container:
    """What versions before this one committed: torch's own state dicts, a module's as an OrderedDict."""
    made = commit({name: each.state_dict() for name, each in state.items()})
    for name, each in state.items():
        if isinstance(each, torch.nn.Module):
            module = made.children[name]
            assert isinstance(module, Container)
            made.children[name] = Container("odict", module.children)
    return made


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_is_that_of_torchs_own_helper(name: str) -> None:
    model, optimizer = build(name)
    train(model, optimizer)
    ours = capture_state({"model": model, "optim": optimizer})
    theirs = capture_state({"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)})
    assert canonical(ours) == canonical(theirs)
    assert all(isinstance(key, str) for key in state_of(ours).children)


@pytest.mark.parametrize("fresh", [True, False], ids=["into a fresh one", "into a used one"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_commit_by_numbers_is_still_restored(name: str, fresh: bool) -> None:
    model, optimizer = build(name)
    train(model, optimizer)
    tree = by_number({"model": model, "optim": optimizer})
    other = build(name, seed=3)
    if not fresh:
        train(*other, steps=3)
    checkout(tree, {"model": other[0], "optim": other[1]})
    assert same_state({"model": other[0], "optim": other[1]}, {"model": model, "optim": optimizer})
    train(*other)
    train(model, optimizer)
    assert same_state({"model": other[0], "optim": other[1]}, {"model": model, "optim": optimizer})


def test_committing_has_no_effect_on_an_optimizer_without_state() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    groups = copy.deepcopy(optimizer.state_dict()["param_groups"])
    tree = commit({"model": model, "optim": optimizer})
    assert not optimizer.state
    assert optimizer.state_dict()["param_groups"] == groups
    assert all(param.grad is None for param in model.parameters())
    assert not state_of(tree).children


def test_tied_parameters_are_called_by_their_first_name() -> None:
    model = net()
    tree = capture_state({"model": model, "optim": adam(model)})
    assert "layers.0.weight" in state_of(tree).children
    assert "head.weight" not in state_of(tree).children


class _FabricModule(torch.nn.Module):
    """As Lightning's Fabric wraps modules: twice, and without a word of it in state dicts."""

    __module__ = "lightning.fabric.wrappers"

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._forward_module = module
        self._original_module = module

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return self._original_module.state_dict(*args, **options)


def test_a_module_that_fabric_wraps_is_the_same_state_as_the_plain_one() -> None:
    model = net()
    optim = adam(model)
    trees = [capture_state({"model": each, "optim": optim}) for each in (model, _FabricModule(model))]
    plain, wrapped = ([render_key(path) for path, _ in walk(tree)] for tree in trees)
    assert plain == wrapped
    assert "optim/state/layers.0.weight/exp_avg" in wrapped


def test_frozen_parameters_have_a_name_and_no_state() -> None:
    def make(seed: int) -> dict[str, Any]:
        model = net(seed)
        for layer in model.layers:
            layer.requires_grad_(False)
        return {"model": model, "optim": adam(model)}

    state = make(0)
    tree = commit(state)
    assert set(state_of(tree).children) == {"norm.weight", "norm.bias"}
    assert params_of(tree, "optim", "param_groups", 0)[0] == "layers.0.weight"
    other = make(3)
    checkout(tree, other)
    assert same_state(other, state)


def test_an_optimizer_over_a_part_of_the_model_names_that_part() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.layers[1].parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer)
    tree = commit({"model": model, "optim": optimizer})
    assert set(state_of(tree).children) == {"layers.1.weight", "layers.1.bias"}


def grouped(model: Net, order: list[int]) -> torch.optim.Optimizer:
    parts = [list(model.layers.parameters()), list(model.norm.parameters())]
    groups = [{"params": parts[number], "lr": 0.01 * (1 + number)} for number in order]
    optimizer = torch.optim.AdamW(groups)
    train(model, optimizer)
    return optimizer


def test_several_groups_keep_their_order_and_their_parameters_order() -> None:
    model = net()
    tree = commit({"model": model, "optim": grouped(model, [1, 0])})
    assert params_of(tree, "optim", "param_groups", 0) == ["norm.weight", "norm.bias"]
    assert params_of(tree, "optim", "param_groups", 1)[:2] == ["layers.0.weight", "layers.0.bias"]


def test_groups_and_parameters_are_found_by_name_in_whatever_order_they_are() -> None:
    model, other = net(), net(seed=2)
    optimizer, target = grouped(model, [0, 1]), grouped(other, [1, 0])
    tree = commit({"model": model, "optim": optimizer})
    checkout(tree, {"model": other, "optim": target})
    assert [group["lr"] for group in target.param_groups] == [0.02, 0.01]
    mine, theirs = (get_optimizer_state_dict(*pair)["state"] for pair in ((model, optimizer), (other, target)))
    assert same_state({"state": mine}, {"state": theirs})


def test_parameters_in_other_groups_are_refused_by_name_with_nothing_touched() -> None:
    model, other = net(), net(seed=2)
    tree = commit({"model": model, "optim": grouped(model, [0, 1])})
    norm, layers = list(other.norm.parameters()), list(other.layers.parameters())
    mixed = torch.optim.AdamW([{"params": [*layers[1:], norm[0]]}, {"params": [layers[0], norm[1]]}])
    target = {"model": other, "optim": mixed}
    before = commit(target)
    error = failure_of(lambda: checkout(tree, target))
    assert isinstance(error, MismatchError)
    assert "optim/param_groups: the target has 2 groups of 4, 2 parameters, the commit 2 groups of 4, 2" in str(error)
    assert commit(target) == before


def test_an_unknown_parameter_is_refused_by_name() -> None:
    one, two = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.Linear(2, 2)
    tree = commit({"model": one, "optim": torch.optim.SGD(one.parameters())})
    target = {"model": two, "optim": torch.optim.SGD(two.parameters())}
    error = failure_of(lambda: checkout(tree, target, keys=["optim"]))
    assert "the commit 1 groups of 2 parameters, without 'weight', 'bias': build the optimizer" in str(error)


@pytest.mark.parametrize("parts", [["layers"], ["layers", "norm"]], ids=["fewer parameters", "more groups"])
def test_a_part_of_the_parameters_or_other_groups_are_refused(parts: list[str]) -> None:
    model = net()
    tree = commit({"model": model, "optim": torch.optim.AdamW(model.parameters())})
    groups = [{"params": list(getattr(model, part).parameters())} for part in parts]
    error = failure_of(lambda: checkout(tree, {"model": model, "optim": torch.optim.AdamW(groups)}))
    assert "the commit 1 groups of 6 parameters: build the optimizer" in str(error)


def test_a_parameter_that_no_rank_committed_is_refused_among_several_ranks_too() -> None:
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    other.more = torch.nn.Parameter(torch.ones(2))
    tree = commit({"model": model, "optim": torch.optim.SGD(model.parameters())})
    target = {"model": other, "optim": torch.optim.SGD(other.parameters())}
    error = failure_of(lambda: checkout(tree, target, keys="optim", rank=0, world_size=2))
    assert "the commit 1 groups of 2 parameters, without 'more': build" in str(error)


def test_only_a_ranks_own_parameters_are_restored_among_several_ranks() -> None:
    """Pipeline stages: the commit holds all of them, each rank has one."""
    whole = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.5)
    whole(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    tree = commit({"model": whole, "optim": optimizer})

    stage = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(2, 2))
    target = {"model": stage, "optim": torch.optim.AdamW(stage.parameters(), lr=0.1)}
    failure_of(lambda: checkout(tree, target))
    plan = checkout(tree, target, rank=1, world_size=2)
    assert set(plan.unexpected) == {"model/0.bias", "model/0.weight"}
    restored = commit(target)
    assert set(state_of(restored).children) == {"1.weight", "1.bias"}
    assert state_of(restored).children["1.weight"] == state_of(tree).children["1.weight"]
    assert target["optim"].param_groups[0]["lr"] == 0.5


def test_a_used_optimizer_keeps_its_tensor_objects_under_a_wrapper() -> None:
    model = net()
    optimizer = adam(model)
    state = {"model": torch.compile(model), "optim": optimizer}
    tree = commit(state)
    train(model, optimizer)
    before = [value for param in model.parameters() for value in optimizer.state[param].values()]
    checkout(tree, state)
    after = [value for param in model.parameters() for value in optimizer.state[param].values()]
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert commit(state) == tree


@pytest.mark.parametrize("keys_wanted", ["optim/state", "optim/param_groups", "optim/state/**/exp_avg"])
def test_parts_of_an_optimizer_can_be_chosen(keys_wanted: str) -> None:
    model, other = net(), net(seed=4)
    optimizer, target = adam(model), adam(other, steps=3)
    optimizer.param_groups[0]["lr"] = 0.5
    tree = commit({"model": model, "optim": optimizer})
    before = commit({"model": other, "optim": target})
    checkout(tree, {"model": other, "optim": target}, keys=keys_wanted)
    after = commit({"model": other, "optim": target})

    def pick(tree: Container, wanted: bool) -> dict[str, Any]:
        chosen = KeyPatterns(keys_wanted)
        entries = {render_key(path): item for path, item in walk(tree)}
        return {key: item for key, item in entries.items() if chosen.matches(key) is wanted}

    assert pick(after, True) == pick(tree, True)
    assert pick(after, False) == pick(before, False)


def test_a_loaded_optimizer_is_what_torchs_own_helper_takes() -> None:
    model, other = net(), net(seed=3)
    optimizer, target = adam(model), adam(other, steps=1)
    loaded = load(commit({"model": model, "optim": optimizer}))
    set_optimizer_state_dict(other, target, optim_state_dict=loaded["optim"])
    assert same_state({"model": model, "optim": optimizer}, {"model": model, "optim": loaded["optim"]})
    assert same_state({"optim": optimizer}, {"optim": target})


def test_loading_a_state_of_other_parameters_by_hand_is_refused_by_name() -> None:
    model, other = torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2))
    named = with_names({"model": model, "optim": torch.optim.SGD(model.parameters(), lr=1.0)})["optim"]
    target = with_names({"model": other, "optim": torch.optim.SGD(other.parameters(), lr=2.0)})["optim"]
    with pytest.raises(MismatchError, match="2 parameters that the optimizer does not have, such as 'weight': build"):
        target.load_state_dict(named.state_dict())
    target.load_state_dict(torch.optim.SGD(model.parameters(), lr=3.0).state_dict())  # torch's own, by number
    assert target.optimizer.param_groups[0]["lr"] == 3.0


def test_every_optimizer_has_options_that_give_it_state() -> None:
    assert EXTRA.keys() <= set(OPTIMIZERS)


def test_no_entry_of_a_flat_form_takes_the_place_of_another() -> None:
    """`b` beside `b.c` cannot be nested: both are handed over by the names that they have."""
    model = torch.nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    moments = {f"state.weight.{name}": torch.full((2, 2), float(at)) for at, name in enumerate(("b", "b.c"))}
    groups = {f"param_groups.weight.{name}": value for name, value in optimizer.param_groups[0].items()}
    del groups["param_groups.weight.params"]
    for state in (moments, dict(reversed(moments.items()))):
        checkout(commit({"m": model, "o": {**state, **groups}}), {"m": model, "o": optimizer})
        restored = optimizer.state[model.weight]
        assert (restored.keys(), restored["b"].max(), restored["b.c"].max()) == ({"b", "b.c"}, 0.0, 1.0)
