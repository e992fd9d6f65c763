"""The other objects that real training saves: modules, scalers, EMA copies, loaders, dicts."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from cas_ckpt.errors import MismatchError, PartialRestoreError
from cas_ckpt.training.stateful import StateDict
from tests.training.roundtrip import checkout, commit, failure_of, load, same_state


@pytest.mark.parametrize("enabled", [True, False])
def test_a_gradient_scaler_comes_back(enabled: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=enabled)
    other = torch.amp.GradScaler("cpu", init_scale=2.0, enabled=enabled)
    checkout(commit({"scaler": scaler}), {"scaler": other})
    assert other.get_scale() == scaler.get_scale()


def test_an_ema_copy_comes_back_in_place() -> None:
    model = torch.nn.Linear(3, 2)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(2):
        ema.update_parameters(model)
    tree = commit({"ema": ema})
    other = AveragedModel(torch.nn.Linear(3, 2))
    weight = other.module.weight
    checkout(tree, {"ema": other})
    assert other.module.weight is weight
    assert same_state({"ema": other}, {"ema": ema})
    assert other.n_averaged == 2


class Loader:
    """Like torchdata's StatefulDataLoader: position, a shuffled order and worker states, made anew each call."""

    def __init__(self, length: int) -> None:
        self.order = torch.randperm(length)
        self.position = 0
        self.workers: dict[int, Any] = {0: {"cursor": (0, None), "seen": set()}}

    def __iter__(self) -> Iterator[int]:
        while self.position < len(self.order):
            self.position += 1
            self.workers[0]["seen"].add(self.position)
            yield int(self.order[self.position - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order.clone(), "position": self.position, "workers": copy.deepcopy(self.workers)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.order, self.position = state_dict["order"], state_dict["position"]
        self.workers = dict(state_dict["workers"])


def test_a_data_loader_goes_on_with_the_next_sample() -> None:
    loader, other = Loader(6), Loader(6)
    iterator = iter(loader)
    next(iterator), next(iterator)
    tree = commit({"data": loader})
    expected = list(loader)
    checkout(tree, {"data": other})
    assert other.workers == {0: {"cursor": (0, None), "seen": {1, 2}}}
    assert list(other) == expected


class WithExtras(torch.nn.Module):
    """A module with extra state, a buffer that is not saved and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3, bias=False)
        self.second = torch.nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.norm = torch.nn.BatchNorm1d(3)
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.notes: dict[str, Any] = {"n": 0, "history": torch.zeros(2)}

    def get_extra_state(self) -> dict[str, Any]:
        return self.notes

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.notes = state


def test_a_module_comes_back_in_place_with_extra_state_and_ties() -> None:
    module, other = WithExtras(), WithExtras()
    module.notes = {"n": 5, "history": torch.ones(2), "more": [1, {"a": 2}]}
    module.norm(module.first(torch.randn(4, 3)))
    before = dict(other.named_parameters()) | dict(other.named_buffers())
    plan = checkout(commit({"m": module}), {"m": other})
    after = dict(other.named_parameters()) | dict(other.named_buffers())
    assert all(before[name] is after[name] for name in before)
    assert other.second.weight is other.first.weight
    assert other.notes["n"] == 5
    assert other.notes["more"] == [1, {"a": 2}]
    assert same_state({"m": module}, {"m": other})
    assert len([at for at in (str(copy.path) for copy in plan.copies) if "weight" in at and "norm" not in at]) == 1


def test_loading_a_module_notifies_its_hooks_and_copies_nothing_twice() -> None:
    module = torch.nn.Linear(2, 2)
    seen: list[Any] = []
    module.register_load_state_dict_post_hook(lambda _, keys: seen.append(keys))
    addresses = [parameter.data_ptr() for parameter in module.parameters()]
    checkout(commit({"m": torch.nn.Linear(2, 2)}), {"m": module})
    assert len(seen) == 1
    assert [parameter.data_ptr() for parameter in module.parameters()] == addresses


def test_a_lazy_module_takes_its_shapes_from_the_commit() -> None:
    lazy = torch.nn.LazyLinear(2)
    module = torch.nn.Linear(3, 2)
    checkout(commit({"m": module}), {"m": lazy})
    assert torch.equal(lazy.weight, module.weight)


def test_a_module_without_parameters_comes_back() -> None:
    tree = commit({"m": torch.nn.Identity(), "list": [torch.nn.Dropout()]})
    checkout(tree, {"m": torch.nn.Identity(), "list": [torch.nn.Dropout()]})
    assert load(tree) == {"m": {}, "list": [{}]}


def test_a_buffer_without_its_own_memory_is_refused() -> None:
    def make() -> torch.nn.Module:
        module = torch.nn.Module()
        module.register_buffer("mask", torch.ones(1).expand(3))
        return module

    with pytest.raises(MismatchError, match="m/mask: elements of the target share memory"):
        checkout(commit({"m": make()}), {"m": make()})


def test_a_state_dict_becomes_exactly_the_commit_in_place() -> None:
    progress = StateDict(step=3, best=0.5, loose=torch.ones(2))
    tree = commit({"p": progress})
    loose = progress["loose"]
    progress.update(step=9, later=1, loose=loose.zero_())
    checkout(tree, {"p": progress})
    assert progress["loose"] is loose
    assert (progress["step"], progress["best"], loose.tolist()) == (3, 0.5, [1, 1])
    assert "later" not in progress


def test_a_plain_value_in_the_place_of_a_state_dict_is_refused_before_anything_is_touched() -> None:
    tree = commit({"w": torch.ones(3), "epoch": 3})
    weight = torch.zeros(3)
    for target in (StateDict(), StateDict(other=0), StateDict(epoch=0, other=0)):
        failed = failure_of(lambda target=target: checkout(tree, {"w": weight, "epoch": target}))
        assert isinstance(failed, MismatchError)
        assert "the target is a StateDict, the commit holds a plain value of type int" in str(failed)
        assert not weight.any()
    for wanted in (StateDict(epoch=0), 0):
        into: dict[str, Any] = {"w": weight, "epoch": wanted}
        checkout(tree, into)
        assert into["epoch"] in (3, {"epoch": 3})
        assert into["epoch"] is wanted or wanted == 0


class SavesMore(torch.nn.Module):
    """Saves a part that it does not look for, and looks for one that it does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(300))
        self.inner = torch.nn.Linear(2, 2)
        self.scale = torch.zeros(300)
        self.register_state_dict_post_hook(SavesMore.change)

    @staticmethod
    def change(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[prefix + "weight.scale"] = module.scale
        del state[prefix + "inner.bias"]


def test_a_module_takes_the_state_that_it_gives_even_if_torch_expects_another() -> None:
    for wrap in (torch.nn.Sequential, torch.nn.DataParallel):
        module = SavesMore()
        with torch.no_grad():
            module.weight.fill_(2)
            module.scale.fill_(3)
        tree = commit({"model": wrap(module)})
        other = SavesMore()
        checkout(tree, {"model": wrap(other)})
        assert (other.weight[0].item(), other.scale[0].item()) == (2, 3)


def test_an_optimizer_without_groups_is_an_object_with_a_state() -> None:
    class Own(torch.optim.Optimizer):
        def __init__(self, value: int) -> None:
            self.value = value

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.value = state_dict["value"]

    other = Own(0)
    checkout(commit({"optim": Own(7)}), {"optim": other})
    assert other.value == 7


def test_stateful_objects_may_be_anywhere() -> None:
    def make() -> dict[str, Any]:
        return {"nets": [torch.nn.Linear(1, 1), {"b": torch.nn.Linear(2, 1)}], "deep": StateDict(inner=StateDict(n=1))}

    state, other = make(), make()
    state["deep"]["inner"]["n"] = 7
    inner = other["deep"]["inner"]
    checkout(commit(state), other)
    assert same_state(state, other)
    assert other["deep"]["inner"] is inner


class Failing:
    """A Stateful object that cannot load."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: Any) -> None:
        raise KeyError("whatever")


def test_an_error_while_loading_names_the_object() -> None:
    state = {"first": StateDict(a=1), "deep": {"bad": Failing()}, "last": StateDict(b=2)}
    with pytest.raises(PartialRestoreError, match="load_state_dict of the target's Failing raised KeyError") as caught:
        checkout(commit(state), state)
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.key == "deep/bad"
    assert caught.value.restored == ("first",)
    assert "not restored: 'last'" in str(caught.value)


def test_every_stateful_object_is_loaded_once() -> None:
    loads: list[str] = []

    class Counting(StateDict):
        def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
            loads.append("load")
            super().load_state_dict(state_dict)

    state = {"a": Counting(x=torch.ones(1)), "b": [Counting(y=1)]}
    checkout(commit(state), state)
    assert loads == ["load", "load"]


def test_nothing_of_this_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkout(commit({"m": WithExtras()}), {"m": WithExtras()})
