"""Keys of modules and optimizers do not depend on wrappers; optimizers know their parameters by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from cas_ckpt.errors import MismatchError
from cas_ckpt.objects.state import Container, Item, ValueItem, render_key, walk
from cas_ckpt.ops.patterns import KeyPatterns
from cas_ckpt.training.capture import capture_state
from cas_ckpt.training.naming import with_names
from tests.training.roundtrip import canonical, checkout, commit, failure_of, load, same_state
from tests.training.test_optimizers import EXTRA, OPTIMIZERS, build, seeded, train

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
"""Importing torch.compile raises it."""


class Net(torch.nn.Module):
    """Two layers, a norm with buffers, and a head that is tied to the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 4, bias=False)
        self.head.weight = self.layers[0].weight

    def forward(self, x: torch.Tensor | None = None) -> torch.Tensor:
        x = torch.arange(12.0).reshape(3, 4) if x is None else x
        for layer in self.layers:
            x = torch.tanh(layer(x))
        found: torch.Tensor = self.head(self.norm(x))
        return found


def net(seed: int = 0) -> Net:
    made: Net = seeded(Net, seed)
    return made


def adam(module: torch.nn.Module, steps: int = 2, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, **options)
    train(module, optimizer, steps)
    return optimizer


def keys(tree: Item) -> set[str]:
    return {render_key(path) for path, _ in walk(tree)}


def params_of(tree: Container, *path: Any) -> list[Any]:
    item: Any = tree
    for name in (*path, "params"):
        item = item.children[name]
    assert isinstance(item, ValueItem)
    return list(item.value)


def by_number(state: Mapping[str, Any]) -> Container:
    """What versions before this one committed: torch's own state dicts, a module's as an OrderedDict."""
    made = commit({name: each.state_dict() for name, each in state.items()})
    for name, each in state.items():
        if isinstance(each, torch.nn.Module):
            module = made.children[name]
            assert isinstance(module, Container)
            made.children[name] = Container("odict", module.children)
    return made


# --- modules ---------------------------------------------------------------------------------


def inner_wrapped(module: Net) -> torch.nn.Module:
    module.layers[0] = checkpoint_wrapper(module.layers[0])
    module.layers[1] = torch.compile(module.layers[1])  # type: ignore[assignment]
    return module


def wrapped_twice(module: Net) -> torch.nn.Module:
    made: Any = torch.compile(torch.nn.DataParallel(inner_wrapped(module)))
    return made  # type: ignore[no-any-return]


WRAPPERS: dict[str, Callable[[Net], Any]] = {
    "torch.compile": torch.compile,
    "DataParallel": torch.nn.DataParallel,
    "checkpoint_wrapper": checkpoint_wrapper,
    "wrapped layers": inner_wrapped,
    "wrapped wrappers": wrapped_twice,
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapped_module_and_its_optimizer_are_what_they_are_without(name: str) -> None:
    bare, module = net(), net()
    bare_optimizer = adam(bare)
    optimizer = adam(module)
    wrapped = WRAPPERS[name](module)
    tree = commit({"model": wrapped, "optim": optimizer})
    assert canonical(capture_state({"model": wrapped, "optim": optimizer})) == canonical(
        capture_state({"model": bare, "optim": bare_optimizer})
    )

    other = net(seed=5)
    target = {"optim": adam(other), "model": WRAPPERS[name](other)}  # nothing is run, so nothing is compiled
    versions = target["model"].state_dict()._metadata
    checkout(tree, target)
    assert same_state(target, {"model": bare, "optim": bare_optimizer})
    assert target["model"].state_dict()._metadata == versions


def test_a_users_module_that_is_called_module_keeps_its_name() -> None:
    class DataParallel(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = torch.nn.Linear(1, 1)
            self._orig_mod = torch.nn.Linear(1, 1)

    assert {"model/module.weight", "model/_orig_mod.bias"} <= keys(capture_state({"model": DataParallel()}))


def test_a_modules_state_dict_is_the_same_state_as_the_module() -> None:
    model = net()
    assert same_state({"model": model}, {"model": model.state_dict()})
    assert same_state({"model": model}, {"model": get_model_state_dict(model)})
    target = {"model": model.state_dict()}
    before = target["model"]
    checkout(commit({"model": net(seed=4)}), target)
    assert target["model"] is before
    assert same_state(target, {"model": net(seed=4)})
    empty = {"model": torch.nn.Identity().state_dict()}
    kind = type(empty["model"])
    checkout(commit({"model": torch.nn.Identity()}), empty)
    assert type(empty["model"]) is kind


def test_a_key_that_only_one_side_has_is_told_under_its_name_without_wrappers() -> None:
    target = {"model": torch.compile(torch.nn.Sequential(torch.nn.Linear(2, 2)))}
    error = failure_of(lambda: checkout(commit({"model": torch.nn.Linear(2, 2)}), target))
    assert "model/0.weight" in str(error)
    assert "_orig_mod" not in str(error)
    plan = checkout(commit({"model": torch.nn.Linear(2, 2)}), target, strict=False)
    assert plan.missing == ("model/0.weight", "model/0.bias")
    assert set(plan.unexpected) == {"model/weight", "model/bias"}


# --- optimizers ------------------------------------------------------------------------------


def state_of(tree: Container, key: str = "optim") -> Container:
    optim = tree.children[key]
    assert isinstance(optim, Container)
    state = optim.children["state"]
    assert isinstance(state, Container)
    return state


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


def test_groups_and_parameters_are_found_by_name_in_whatever_order_they_stand() -> None:
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


# --- which names -----------------------------------------------------------------------------


def two_modules() -> dict[str, Any]:
    gen, disc = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW([*gen.parameters(), *disc.parameters()])
    disc(gen(torch.ones(1, 2))).sum().backward()
    optimizer.step()
    return {"gen": gen, "disc": disc, "both": optimizer, "one": torch.optim.SGD(disc.parameters(), lr=1.0)}


def test_an_optimizer_over_two_modules_has_their_keys_in_front() -> None:
    state = two_modules()
    tree = commit(state)
    assert set(state_of(tree, "both").children) == {"gen.weight", "gen.bias", "disc.weight", "disc.bias"}
    assert params_of(tree, "one", "param_groups", 0) == ["weight", "bias"]
    other = two_modules()
    checkout(tree, other)
    assert same_state(other, state)


def test_modules_in_dicts_and_lists_are_found() -> None:
    state = two_modules()
    tree = commit({"models": [state["gen"], {"d": state["disc"]}], "opts": {"both": state["both"]}})
    opts: Any = tree.children["opts"]
    assert params_of(opts, "both", "param_groups", 0) == ["models.0.weight", "models.0.bias", "models.1.d.weight",
                                                          "models.1.d.bias"]  # fmt: skip


def test_names_do_not_depend_on_the_order_in_which_the_state_was_filled() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.layers.parameters(), lr=0.1)
    one = {"model": model, "layers": model.layers, "optim": optimizer}
    other = dict(reversed(one.items()))
    assert same_state(one, other)
    assert params_of(capture_state(one), "optim", "param_groups", 0)[0] == "0.weight"


def test_numbers_stay_where_a_parameter_is_not_found_or_names_collide() -> None:
    model = net()
    loose = torch.optim.SGD([*model.parameters(), torch.nn.Parameter(torch.ones(1))], lr=0.1)
    assert params_of(capture_state({"model": model, "optim": loose}), "optim", "param_groups", 0) == list(range(7))
    alone = torch.optim.SGD(model.parameters(), lr=0.1)
    assert params_of(capture_state({"optim": alone}), "optim", "param_groups", 0) == list(range(6))

    inner = torch.nn.Module()
    inner.b = torch.nn.Linear(1, 1, bias=False)
    clash = {"a": inner, "a.b": torch.nn.Linear(1, 1, bias=False)}
    both = torch.optim.SGD([param for module in clash.values() for param in module.parameters()], lr=0.1)
    assert params_of(capture_state({**clash, "optim": both}), "optim", "param_groups", 0) == [0, 1]


def test_a_commit_by_names_fits_an_optimizer_without_its_module() -> None:
    model, other = net(), net(seed=3)
    optimizer = adam(model)
    tree = commit({"model": model, "optim": optimizer})
    target = adam(other, steps=1)
    checkout(tree, {"optim": target}, strict=False)
    assert same_state({"optim": optimizer}, {"optim": target})


def test_an_optimizer_whose_state_has_another_form_is_given_back_what_it_gave() -> None:
    class Odd(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {"mine": [group["lr"] for group in self.param_groups]}

        def load_state_dict(self, state_dict: Any) -> None:
            for group, lr in zip(self.param_groups, state_dict["mine"], strict=True):
                group["lr"] = lr

    model = net()
    tree = commit({"model": model, "optim": Odd(model.parameters(), lr=0.25)})
    target = Odd(model.parameters(), lr=1.0)
    checkout(tree, {"model": model, "optim": target})
    assert target.param_groups[0]["lr"] == 0.25


def test_state_of_the_optimizer_itself_stays_beside_that_of_its_parameters() -> None:
    def make(extra: int) -> dict[str, Any]:
        model = net()
        optimizer = adam(model)
        optimizer.state["calls"] = {"n": extra}  # type: ignore[index]
        return {"model": model, "optim": optimizer}

    tree = commit(make(5))
    assert "calls" in state_of(tree).children
    other = make(6)
    checkout(tree, other)
    assert other["optim"].state["calls"] == {"n": 5}


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
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    model, other = net(), net(seed=3)
    optimizer, target = adam(model), adam(other, steps=1)
    loaded = load(commit({"model": model, "optim": optimizer}))
    set_optimizer_state_dict(other, target, optim_state_dict=loaded["optim"])
    assert same_state({"model": model, "optim": optimizer}, {"model": model, "optim": loaded["optim"]})
    assert same_state({"optim": optimizer}, {"optim": target})


def test_with_names_gives_what_commits_hold_and_loads_into_the_state() -> None:
    model, other = net(), net(seed=3)
    state = {"model": torch.compile(model), "inner": {"optim": adam(model)}, "n": 1}
    named = with_names(state)
    assert same_state(named, state)
    assert same_state(with_names(named), state)
    target = {"model": other, "inner": {"optim": adam(other, steps=1)}, "n": 1}
    taken = with_names(target)
    taken["model"].load_state_dict(named["model"].state_dict())
    taken["inner"]["optim"].load_state_dict(copy.deepcopy(named["inner"]["optim"].state_dict()))
    assert same_state(target, state)


def test_every_optimizer_has_options_that_give_it_state() -> None:
    assert EXTRA.keys() <= set(OPTIMIZERS)
