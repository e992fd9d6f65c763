"""torch.Generator in a state: stored as its device and its state, restored in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cas_ckpt import PerRank, StateDict, errors
from cas_ckpt.objects.state import Container
from tests.training.roundtrip import checkout, commit, load


def test_a_generator_goes_on_where_it_was() -> None:
    generator = torch.Generator().manual_seed(3)
    torch.rand(5, generator=generator)
    tree = commit({"g": generator, "l": [generator]})
    wanted = torch.rand(4, generator=generator)
    target = torch.Generator().manual_seed(8)
    checkout(tree, {"g": target, "l": [torch.Generator()]})
    assert torch.equal(torch.rand(4, generator=target), wanted)
    assert torch.equal(torch.rand(4, generator=load(tree)["g"]), wanted)
    assert torch.equal(torch.rand(4, generator=load(tree)["l"][0]), wanted)


def test_reading_a_generator_draws_nothing_and_the_same_state_is_the_same_tree() -> None:
    one, other = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    assert commit({"g": one}) == commit({"g": one}) == commit({"g": other})
    torch.rand(1, generator=other)
    assert commit({"g": one}) != commit({"g": other})


def test_a_generator_for_each_rank_and_one_inside_an_object_are_restored() -> None:
    source = torch.Generator().manual_seed(3)
    tree = commit({"r": PerRank(source), "d": StateDict(g=source)})
    own, inner = torch.Generator(), torch.Generator()
    target = {"r": PerRank(own), "d": StateDict(g=inner)}
    checkout(tree, target)
    assert torch.equal(own.get_state(), source.get_state())
    assert torch.equal(inner.get_state(), source.get_state())
    assert target["d"]["g"] is inner  # type: ignore[index]


def test_a_generator_that_the_commit_has_not_is_refused_before_anything_is_touched() -> None:
    target = torch.Generator().manual_seed(1)
    before = target.get_state()
    with pytest.raises(errors.MismatchError, match="the target is a generator of cpu, the commit holds a plain value"):
        checkout(commit({"g": 3, "w": torch.ones(1)}), {"g": target, "w": torch.zeros(1)})
    assert torch.equal(target.get_state(), before)


def generator_tree(attrs: Any, state: torch.Tensor) -> Container:
    part = commit({"state": state}).children["state"]
    return Container("dict", {"g": Container("generator", {"state": part}, attrs)})


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has such a device")
def test_a_generator_of_a_device_that_is_not_there_says_so() -> None:
    with pytest.raises(errors.UnsupportedValueError, match="g: .*generator of cuda.*choose keys"):
        load(generator_tree({"device": "cuda"}, torch.zeros(16, dtype=torch.uint8)))


def test_a_generator_of_another_device_does_not_fit() -> None:
    tree = generator_tree({"device": "cuda"}, torch.zeros(16, dtype=torch.uint8))
    with pytest.raises(errors.MismatchError, match="generator of cpu.*generator of another kind of device"):
        checkout(tree, {"g": torch.Generator()})


@given(st.integers(0, 3))
def test_a_state_of_a_generator_that_torch_refuses_is_corrupt(length: int) -> None:
    with pytest.raises(errors.CorruptionError, match="g: the state of a generator cannot be set"):
        load(generator_tree({"device": "cpu"}, torch.zeros(length, dtype=torch.uint8)))
