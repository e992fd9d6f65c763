"""Keys of modules and optimizers do not depend on wrappers; optimizers know their parameters by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from cas_ckpt.objects.state import Container, Item, ValueItem, render_key, walk
from cas_ckpt.training.capture.capture import capture_state
from cas_ckpt.training.stateful import with_names
from tests.training.roundtrip import canonical, checkout, commit, failure_of, same_state
from tests.training.test_optimizers import seeded, train

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


def state_of(tree: Container, key: str = "optim") -> Container:
    optim = tree.children[key]
    assert isinstance(optim, Container)
    state = optim.children["state"]
    assert isinstance(state, Container)
    return state


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
    again = capture_state({**state, "later": torch.nn.ModuleList([state["gen"]])})
    assert set(state_of(again, "both").children) == set(state_of(tree, "both").children)
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
    kept = make(7)
    checkout(tree, kept, keys="optim/param_groups")
    assert kept["optim"].state["calls"] == {"n": 7}


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
