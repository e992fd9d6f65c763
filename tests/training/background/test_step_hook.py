"""The hook before every step of every optimizer: who is waited for, and what never breaks a step."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from cas_ckpt.training.background import commits
from cas_ckpt.training.background.commits import hold_steps, let_steps


@pytest.fixture(autouse=True)
def _nothing_held() -> Iterator[None]:
    yield
    commits._held.clear()


class Waits:
    """Notes what a weight was when the step asked."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.seen: list[float] = []

    def __call__(self) -> None:
        self.seen.append(self.weight.flatten()[0].item())


def one_weight() -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.full((4,), 5.0))
    weight.grad = torch.ones(4)
    return weight


OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=1.0),
    "SGD with momentum": lambda params: torch.optim.SGD(params, lr=1.0, momentum=0.9),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=1.0, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1.0, fused=True),
    "AdamW capturable": lambda params: torch.optim.AdamW(params, lr=1.0, foreach=False),
    "Muon": lambda params: torch.optim.Muon([torch.nn.Parameter(params[0].detach().view(2, 2))], lr=1.0),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_torch_asks_before_it_changes_anything(name: str) -> None:
    weight = one_weight()
    optimizer = OPTIMIZERS[name]([weight])
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    waits = Waits(weight)
    hold_steps(waits)
    optimizer.step()
    assert waits.seen == [5.0] and weight[0].item() != 5.0
    let_steps(waits)
    optimizer.step()
    assert waits.seen == [5.0]


def test_lbfgs_asks_once_before_its_inner_steps() -> None:
    weight = torch.nn.Parameter(torch.full((4,), 5.0))
    optimizer = torch.optim.LBFGS([weight], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return loss

    waits = Waits(weight)
    hold_steps(waits)
    optimizer.step(closure)  # type: ignore[arg-type]
    assert waits.seen == [5.0] and weight[0].item() != 5.0


def test_an_optimizer_that_steps_inside_of_backward_asks_too() -> None:
    weight = torch.nn.Parameter(torch.full((4,), 5.0))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.register_post_accumulate_grad_hook(lambda param: optimizer.step())
    waits = Waits(weight)
    hold_steps(waits)
    weight.sum().backward()
    assert waits.seen == [5.0] and weight[0].item() == 4.0


def test_an_optimizer_of_somebody_else_asks_if_it_is_derived_from_torchs() -> None:
    class Sign(torch.optim.Optimizer):
        def __init__(self, params: list[torch.nn.Parameter]) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for param in self.param_groups[0]["params"]:
                param.data.sub_(param.grad.sign())

    weight = one_weight()
    waits = Waits(weight)
    hold_steps(waits)
    Sign([weight]).step()
    assert waits.seen == [5.0] and weight[0].item() == 4.0


def test_a_waiter_that_fails_does_not_break_the_step(caplog: pytest.LogCaptureFixture) -> None:
    weight = one_weight()

    def fails() -> None:
        raise OSError("no")

    hold_steps(fails)
    torch.optim.SGD([weight], lr=1.0).step()
    assert weight[0].item() == 4.0 and "the step is made" in caplog.text


def test_an_interrupt_while_a_step_waits_is_raised_and_the_step_is_not_made() -> None:
    weight = one_weight()

    def interrupted() -> None:
        raise KeyboardInterrupt

    hold_steps(interrupted)
    with pytest.raises(KeyboardInterrupt):
        torch.optim.SGD([weight], lr=1.0).step()
    assert weight[0].item() == 5.0


def test_hooks_of_others_are_called_as_before() -> None:
    weight, called = one_weight(), []
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.register_step_pre_hook(lambda *_: called.append("own"))
    hold_steps(lambda: called.append("ours"))
    optimizer.step()
    assert called == ["ours", "own"]


def test_a_forked_child_waits_for_nobody() -> None:
    """The thread that stages is not there: a step of the child would wait for ever."""
    weight = one_weight()
    hold_steps(lambda: os._exit(7))
    child = os.fork()
    if not child:
        torch.optim.SGD([weight], lr=1.0).step()
        os._exit(0 if weight[0].item() == 4.0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
