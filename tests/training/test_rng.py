"""RNGState: every generator comes back, and looking at them changes none."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from cas_ckpt.errors import MismatchError
from cas_ckpt.training.per_rank import RNGState
from tests.formats.trainer_folders import accelerate_rng, trainer_rng
from tests.training.roundtrip import checkout, commit

NUMPY_KINDS = [np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64, np.random.PCG64DXSM]


def draws(generators: Mapping[str, Any] | None = None) -> list[Any]:
    """Numbers from every generator; odd counts, so that cached normals matter too."""
    own: list[Any] = [torch.randn(3).tolist(), np.random.normal(), random.gauss(0, 1), random.random()]
    for generator in (generators or {}).values():
        torch_own = isinstance(generator, torch.Generator)
        own.append(torch.rand(3, generator=generator).tolist() if torch_own else generator.normal(size=3).tolist())
    return own


def test_numbers_after_a_checkout_are_those_after_the_commit() -> None:
    generators = {"loader": torch.Generator().manual_seed(1), "noise": np.random.default_rng(2)}
    draws(generators)
    state = {"rng": RNGState(generators)}
    tree = commit(state)
    expected = draws(generators)
    draws(generators)
    checkout(tree, state)
    assert draws(generators) == expected


@pytest.mark.parametrize("kind", NUMPY_KINDS)
def test_every_bit_generator_of_numpy_comes_back(kind: Any) -> None:
    generators = {"g": np.random.Generator(kind(5))}
    draws(generators)
    state = {"rng": RNGState(generators)}
    tree = commit(state)
    expected = draws(generators)
    checkout(tree, state)
    assert draws(generators) == expected


def test_a_fresh_process_with_other_seeds_continues_the_same_numbers() -> None:
    old, new = {"g": torch.Generator().manual_seed(1)}, {"g": torch.Generator().manual_seed(99)}
    tree = commit({"rng": RNGState(old)})
    expected = draws(old)
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    checkout(tree, {"rng": RNGState(new)})
    assert draws(new) == expected


def test_reading_the_state_changes_nothing() -> None:
    state = {"rng": RNGState({"g": np.random.default_rng(3)})}
    first = commit(state)
    assert commit(state) == first
    assert commit(state) == first


class Drawing:
    """A Stateful object whose loading draws numbers, as many do."""

    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        draws()


def test_generators_are_restored_after_everything_that_may_draw() -> None:
    state = {"rng": RNGState(), "z": Drawing()}
    tree = commit(state)
    expected = draws()
    checkout(tree, state)
    assert draws() == expected


@pytest.mark.parametrize("names", [[], ["other"], ["g", "h"]])
def test_other_generator_names_are_refused_before_anything_moves(names: list[str]) -> None:
    weight = torch.ones(2)
    tree = commit({"rng": RNGState({"g": torch.Generator()}), "w": torch.zeros(2)})
    target = {"rng": RNGState({name: torch.Generator() for name in names}), "w": weight}
    before = commit(target)
    with pytest.raises(MismatchError, match=r"^rng: the commit holds the generators \['g'\]"):
        checkout(tree, target)
    assert commit(target) == before


def test_states_of_devices_that_are_not_here_are_left_out_with_a_warning() -> None:
    if torch.cuda.is_available():
        pytest.skip("this test is about a machine without CUDA")
    rng = RNGState()
    saved = rng.state_dict()
    expected = draws()
    saved["cuda"] = {0: torch.zeros(16, dtype=torch.uint8)}
    with pytest.warns(UserWarning, match="random states of 1 CUDA devices, here are 0"):
        rng.load_state_dict(saved)
    assert draws() == expected


@pytest.mark.parametrize("saved", [trainer_rng, accelerate_rng])
def test_what_a_trainer_saved_of_each_rank_is_taken(saved: Callable[[], dict[str, Any]]) -> None:
    first, expected_first = saved(), draws()
    second, expected_second = saved() | ({"cuda": torch.arange(16)} if saved is trainer_rng else {}), draws()
    tree = commit({"rng": {"0": first, "1": second}, "one": {"0": first}, "bare": second})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the commit holds the random states of . CUDA devices")
        for rank, expected in enumerate((expected_first, expected_second)):
            checkout(tree, {"rng": RNGState()}, keys="rng", rank=rank, world_size=2)
            assert draws() == expected
        checkout(tree, {"one": RNGState()}, keys="one")
        assert draws() == expected_first
        checkout(tree, {"bare": RNGState()}, keys="bare")
        assert draws() == expected_second
        checkout(tree, {"rng": {"1": RNGState()}}, keys="rng/~=1")
        assert draws() == expected_second
    before = random.getstate()
    plan = checkout(tree, {"rng": RNGState()}, keys="rng")  # of two ranks, into one
    assert plan.per_rank_skipped == ("rng",)
    checkout(tree, {"rng": RNGState()}, keys="rng/~=0")  # names none of the target's parts
    assert random.getstate() == before


def test_a_state_of_another_form_is_refused_by_name() -> None:
    state = trainer_rng()
    for other in (state | {"npu": torch.zeros(3)}, {"cpu": state["cpu"]}, {"0": state, "1": 3}, {}):
        with pytest.raises(MismatchError, match="rng"):
            checkout(commit({"rng": other}), {"rng": RNGState()})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_every_cuda_generator_comes_back() -> None:
    state = {"rng": RNGState()}
    tree = commit(state)
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    expected = [torch.rand(3, device=device).tolist() for device in devices]
    checkout(tree, state)
    assert [torch.rand(3, device=device).tolist() for device in devices] == expected
