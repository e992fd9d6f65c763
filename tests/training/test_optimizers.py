"""Every optimizer and every learning rate scheduler of torch."""

from __future__ import annotations

import collections
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR

from cas_ckpt.errors import MismatchError, PartialRestoreError
from tests.training.roundtrip import checkout, commit, failure_of, same_state

OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
)
EXTRA: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adam": {"amsgrad": True},
    "LBFGS": {"history_size": 3, "max_iter": 2},
}


class Net(torch.nn.Module):
    """Two matrices and a norm with buffers; an embedding with sparse gradients if wanted."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.sparse = sparse
        self.embed = torch.nn.Embedding(5, 4, sparse=sparse)
        if not sparse:
            self.first = torch.nn.Linear(4, 4, bias=False)
            self.second = torch.nn.Linear(4, 4, bias=False)

    def forward(self) -> torch.Tensor:
        embedded: torch.Tensor = self.embed(torch.tensor([0, 2, 2]))
        return embedded if self.sparse else self.second(torch.tanh(self.first(embedded)))


def seeded(make: Callable[[], Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return make()


def build(name: str, *, seed: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    model = seeded(lambda: Net(sparse=name == "SparseAdam"), seed)
    return model, getattr(torch.optim, name)(model.parameters(), **EXTRA.get(name, {}))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value: torch.Tensor = (model() ** 2).sum()
        value.backward()
        return value

    for _ in range(steps):
        optimizer.step(loss)


def test_every_optimizer_of_torch_is_tried() -> None:
    assert {"AdamW", "LBFGS", "SparseAdam", "Adafactor", "Rprop", "ASGD"} <= set(OPTIMIZERS)


@pytest.mark.parametrize("fresh", [True, False], ids=["into a fresh one", "into a used one"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_continues_as_if_it_had_never_stopped(name: str, fresh: bool) -> None:
    model, optimizer = build(name)
    train(model, optimizer)
    tree = commit({"model": model, "optim": optimizer})
    train(model, optimizer)

    other = build(name, seed=9)
    if not fresh:
        train(*other, steps=3)
    checkout(tree, {"model": other[0], "optim": other[1]})
    assert commit({"model": other[0], "optim": other[1]}) == tree
    train(*other)
    assert same_state({"model": other[0], "optim": other[1]}, {"model": model, "optim": optimizer})


def test_a_used_optimizer_keeps_its_tensor_objects() -> None:
    model, optimizer = build("AdamW")
    train(model, optimizer)
    tree = commit({"model": model, "optim": optimizer})
    train(model, optimizer)
    weights = list(model.parameters())
    moments = [value for weight in weights for value in optimizer.state[weight].values()]
    addresses = [tensor.data_ptr() for tensor in [*weights, *moments]]
    plan = checkout(tree, {"model": model, "optim": optimizer})
    after = [value for weight in model.parameters() for value in optimizer.state[weight].values()]
    assert all(a is b for a, b in zip([*weights, *moments], [*model.parameters(), *after], strict=True))
    assert [tensor.data_ptr() for tensor in [*weights, *after]] == addresses
    assert len(plan.copies) == len(weights) + len(moments)


def test_state_that_the_commit_does_not_have_is_dropped() -> None:
    model, optimizer = build("AdamW")
    tree = commit({"optim": optimizer})
    train(model, optimizer)
    assert optimizer.state
    checkout(tree, {"optim": optimizer})
    assert not optimizer.state


def test_learning_rates_and_groups_come_back() -> None:
    model = Net()
    groups = [
        {"params": model.first.parameters(), "lr": 1e-2},
        {"params": model.second.parameters(), "betas": (0.5, 0.6)},
    ]
    optimizer = torch.optim.AdamW(groups)
    tree = commit({"optim": optimizer})
    optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["betas"] = 7.0, (0.1, 0.1)
    checkout(tree, {"optim": optimizer})
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert optimizer.param_groups[1]["betas"] == (0.5, 0.6)


def test_state_of_another_dtype_than_its_parameter_is_not_cast() -> None:
    def make() -> torch.optim.Optimizer:
        weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        optimizer.state[weight]["master"] = torch.full((3,), 1.0009765625)
        return optimizer

    optimizer = make()
    checkout(commit({"optim": make()}), {"optim": optimizer})
    (state,) = optimizer.state.values()
    assert state["master"].dtype == torch.float32
    assert state["master"][0] == 1.0009765625


class Window(NamedTuple):
    """What an optimizer may have for a parameter."""

    scale: torch.Tensor
    steps: int


def with_containers(*, used: bool = True) -> torch.optim.Optimizer:
    """An optimizer of bfloat16 parameters whose state is in containers, and has dtypes of its own."""
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    if used:
        fine = torch.full((3,), 1.0009765625)
        optimizer.state[weight] = {
            "history": [fine.clone(), fine.clone()],
            "codes": (torch.tensor([1, 255], dtype=torch.uint8), torch.tensor([1 << 60])),
            "losses": collections.deque([0.5, 0.25], maxlen=7),
            "window": Window(fine.clone(), 3),
            "named": collections.OrderedDict(b=fine.clone(), a=1),
            "inner": {"step": torch.tensor(3, dtype=torch.int64), "master": fine.clone()},
            "kind": "rowwise",
            "packed": b"\x00\x01",
            "seen": {1, 2},
        }
    return optimizer


@pytest.mark.parametrize("used", [False, True], ids=["into a fresh one", "into a used one"])
def test_containers_in_the_state_of_a_parameter_come_back_as_they_were(used: bool) -> None:
    before = with_containers()
    tree = commit({"optim": before})
    optimizer = with_containers(used=used)
    checkout(tree, {"optim": optimizer})
    assert commit({"optim": optimizer}) == tree
    (state,), (wanted,) = optimizer.state.values(), before.state.values()
    assert {**{name: type(each) for name, each in state.items()}, "window": Window} == {
        name: type(each) for name, each in wanted.items()
    }
    assert state["losses"].maxlen == 7
    assert [*state["named"]] == ["b", "a"]


def test_what_the_class_makes_of_its_state_when_it_is_loaded_sees_the_containers() -> None:
    class Counting(torch.optim.SGD):
        def __setstate__(self, state: dict[str, Any]) -> None:
            super().__setstate__(state)
            self.seen = [each["losses"].maxlen for each in state.get("state", {}).values()]

    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = Counting([weight], lr=0.1)
    optimizer.state[weight]["losses"] = collections.deque([0.5], maxlen=7)
    checkout(commit({"optim": optimizer}), {"optim": optimizer})
    assert optimizer.seen == [7]
    assert "__setstate__" not in vars(optimizer)
    assert not optimizer._optimizer_load_state_dict_pre_hooks  # type: ignore[attr-defined]


def test_state_that_an_optimizers_own_load_alters_is_an_error() -> None:
    class Casting(torch.optim.SGD):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            for each in self.state.values():
                each["history"] = [tensor.bfloat16() for tensor in each["history"]]

    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = Casting([weight], lr=0.1)
    optimizer.state[weight]["history"] = [torch.full((3,), 1.0009765625)]
    tree = commit({"optim": optimizer})
    failed = failure_of(lambda: checkout(tree, {"optim": optimizer}))
    assert isinstance(failed, PartialRestoreError)
    assert "optim/state/0/history/0: the commit holds float32[3], the optimizer has bfloat16[3]" in str(failed)


class _FabricOptimizer:
    """As Lightning's Fabric wraps optimizers: of the class of the one in it, to which loading is left."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Fabric", (self.__class__, type(optimizer)), {})

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state_dict)
        vars(self).update(vars(self._optimizer))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def test_an_optimizer_in_a_wrapper_of_fabric_is_restored_like_the_plain_one() -> None:
    tree = commit({"optim": with_containers()})
    optimizer = with_containers(used=False)
    wrapped: Any = _FabricOptimizer(optimizer)
    checkout(tree, {"optim": wrapped})
    assert commit({"optim": optimizer}) == tree
    assert "__setstate__" not in {*vars(optimizer), *vars(wrapped)}


def test_an_optimizer_may_add_to_a_state_that_was_empty() -> None:
    class Adding(torch.optim.SGD):
        def __setstate__(self, state: dict[str, Any]) -> None:
            super().__setstate__(state)
            for each in self.state.values():
                each.setdefault("seen", 0)

    def make() -> torch.optim.Optimizer:
        optimizer = Adding([weight := torch.nn.Parameter(torch.ones(3))], lr=0.1)
        optimizer.state[weight] = {}
        return optimizer

    optimizer = make()
    checkout(commit({"optim": make()}), {"optim": optimizer})
    assert [*optimizer.state.values()] == [{"seen": 0}]


@pytest.mark.parametrize("sizes", [[1, 2], [4], [2], [1, 1, 1]])
def test_other_parameter_groups_are_refused_before_anything_is_touched(sizes: list[int]) -> None:
    def make(sizes: list[int]) -> dict[str, Any]:
        weights = [[torch.nn.Parameter(torch.randn(2)) for _ in range(size)] for size in sizes]
        return {"a": weights[0][0], "optim": torch.optim.Adam([{"params": group} for group in weights])}

    target = make([3])
    before = commit(target)
    error = failure_of(lambda: checkout(commit(make(sizes)), target))
    assert isinstance(error, MismatchError)
    assert "optim/param_groups: the target has 1 groups of 3 parameters, the commit" in str(error)
    assert commit(target) == before


def test_a_moment_of_another_shape_is_refused_by_key() -> None:
    def make(width: int) -> dict[str, Any]:
        weight = torch.nn.Parameter(torch.ones(width))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        weight.grad = torch.ones(width)
        optimizer.step()
        return {"optim": optimizer}

    with pytest.raises(MismatchError, match=r"optim/state/0/momentum_buffer: the target is float32\[3\], the commit"):
        checkout(commit(make(4)), make(3))


class Ramp:
    """A callable with state, as LambdaLR saves it."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 1.0 / (1 + epoch)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lrs.LambdaLR(o, Ramp()),
    "LambdaLR with a lambda": lambda o: lrs.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, Ramp()),
    "StepLR": lambda o: lrs.StepLR(o, 2),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [2, 3, 3]),
    "ConstantLR": lambda o: lrs.ConstantLR(o, total_iters=3),
    "LinearLR": lambda o: lrs.LinearLR(o, total_iters=4),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, total_iters=4),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=20),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lrs.SequentialLR(o, [lrs.ConstantLR(o), lrs.StepLR(o, 1)], milestones=[2]),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler([lrs.ConstantLR(o), lrs.StepLR(o, 1)]),
    "SWALR": lambda o: SWALR(o, swa_lr=0.05),
}
if torch.__version__ < "2.10":  # its state holds a function there, which is refused
    del SCHEDULERS["SWALR"]


def test_every_scheduler_of_torch_is_tried() -> None:
    kinds = {name for name, kind in vars(lrs).items() if inspect.isclass(kind) and issubclass(kind, lrs.LRScheduler)}
    assert kinds - {"LRScheduler", "_LRScheduler"} <= {name.split()[0] for name in SCHEDULERS}


def scheduled(name: str) -> tuple[torch.optim.Optimizer, Any]:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    return optimizer, SCHEDULERS[name](optimizer)


def rates(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> Iterator[float]:
    for step in range(steps):
        optimizer.step()
        scheduler.step(1.0 + step) if isinstance(scheduler, lrs.ReduceLROnPlateau) else scheduler.step()
        yield optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_goes_on_where_it_was(name: str) -> None:
    optimizer, scheduler = scheduled(name)
    list(rates(optimizer, scheduler, 3))
    tree = commit({"optim": optimizer, "sched": scheduler})
    expected = list(rates(optimizer, scheduler, 4))
    other = scheduled(name)
    checkout(tree, {"optim": other[0], "sched": other[1]})
    assert commit({"optim": other[0], "sched": other[1]}) == tree
    assert list(rates(*other, 4)) == expected
