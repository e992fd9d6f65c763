"""Which changes of a tensor are found between two looks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from cas_ckpt import StateChangedError
from cas_ckpt.training.background.changes import Watch, Watched


def weight_of(size: int = 1000) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.arange(float(size)))


def watch_of(key: str, tensors: list[torch.Tensor], counting: list[torch.Tensor]) -> tuple[Watch, Watched]:
    watch = Watch()
    watched = watch.add(key, tensors, counting)
    watch.begin()
    return watch, watched


def change_in_inference_mode(weight: torch.Tensor) -> None:
    with torch.inference_mode():
        weight.mul_(2)


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda weight: weight.detach().add_(1),
    "one element": lambda weight: weight.detach().__setitem__(7, 0.0),
    "through a view": lambda weight: weight.detach()[:3].zero_(),
    "foreach": lambda weight: torch._foreach_mul_([weight.detach()], 2.0),
    "inference mode": change_in_inference_mode,
    "copy_": lambda weight: weight.detach().copy_(torch.zeros(1000)),
    "init": lambda weight: torch.nn.init.normal_(weight),
    ".data": lambda weight: weight.data.add_(1),
    "NumPy": lambda weight: weight.detach().numpy().__iadd__(1),
    "the storage": lambda weight: weight.untyped_storage().fill_(0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_found_and_named(name: str) -> None:
    weight = weight_of()
    watch, watched = watch_of("model/w", [weight.detach()], [weight])
    watch.check(watched)
    CHANGES[name](weight)
    with pytest.raises(StateChangedError, match=r"^model/w: .*wait_staged"):
        watch.check(watched)


@pytest.mark.parametrize("weight", [torch.zeros(10, 20), torch.zeros(10, 20).t()], ids=["in one piece", "turned"])
@pytest.mark.parametrize("num_bytes", [0, 8000])
def test_memory_that_is_freed_or_resized_is_a_change(weight: torch.Tensor, num_bytes: int) -> None:
    weight = weight.clone()
    watch, watched = watch_of("w", [weight.detach()], [weight])
    weight.untyped_storage().resize_(num_bytes)
    with pytest.raises(StateChangedError, match=r"^w: its memory was freed"):
        watch.check(watched)


def test_of_many_tensors_the_one_that_changed_is_named() -> None:
    tensors = {f"w{n}": torch.zeros(7 + n, dtype=(torch.float32, torch.bfloat16, torch.int64)[n % 3]) for n in range(9)}
    watch = Watch()
    watched = {key: watch.add(key, [tensor.detach()], [tensor]) for key, tensor in tensors.items()}
    watch.begin()
    for key, tensor in tensors.items():
        watch.check(watched[key])
        tensor.data.fill_(1)
        with pytest.raises(StateChangedError, match=f"^{key}: .*does not count"):
            watch.check(watched[key])


HARMLESS: dict[str, Callable[[torch.nn.Parameter], object]] = {
    "new memory": lambda weight: setattr(weight, "data", torch.zeros(3)),
    "another dtype": lambda weight: setattr(weight, "data", weight.data.bfloat16()),
    "its gradient": lambda weight: (weight.sum() * 2).backward(),
    "read": lambda weight: weight.detach().numpy().sum(),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_leaves_the_bytes_of_the_call_alone_is_no_change(name: str) -> None:
    weight = weight_of()
    kept = weight.detach()
    watch, watched = watch_of("w", [kept], [weight])
    HARMLESS[name](weight)
    watch.check(watched)
    assert torch.equal(kept, torch.arange(1000.0))


@pytest.mark.parametrize("shape", [(1,), (3, 5), (2000,), (17, 333)])
def test_samples_of_any_shape_and_dtype_are_compared_as_bits(shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn):
        tensor = torch.zeros(shape).to(dtype)
        tensor.view(torch.uint8).fill_(255 if dtype.is_floating_point else 1)  # NaN equals itself here
        watch, watched = watch_of("w", [tensor], [tensor])
        watch.check(watched)
        tensor.data.view(torch.uint8).fill_(0)
        with pytest.raises(StateChangedError, match="does not count"):
            watch.check(watched)


def test_what_changes_after_the_last_look_is_no_business_of_the_commit() -> None:
    weight = weight_of()
    watch, watched = watch_of("w", [weight.detach()], [weight])
    watch.settle()
    weight.detach().add_(1)
    watch.look()
    watch.look(watched)


def test_what_was_found_at_the_last_look_stays_found() -> None:
    weight, other = weight_of(), weight_of()
    watch = Watch()
    watch.add("w", [weight.detach()], [weight])
    innocent = watch.add("v", [other.detach()], [other])
    weight.detach().add_(1)
    watch.settle()
    watch.settle()
    for at in (None, innocent):
        with pytest.raises(StateChangedError, match="^w: "):
            watch.look(at)


def test_watching_draws_no_random_number_of_the_program() -> None:
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    watch_of("w", [torch.zeros(10_000)], [])
    assert torch.equal(before, torch.random.get_rng_state())
