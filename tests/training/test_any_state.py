"""Random states: made anew, restored in place, restored into states that do not fit."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cas_ckpt.errors import CkptError
from cas_ckpt.training.capture.capture import capture_state
from cas_ckpt.training.restore.restore import plan_restore
from cas_ckpt.training.stateful import StateDict
from tests.searches import tries
from tests.training.roundtrip import canonical, checkout, commit, fetch, load, same_state

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=3),
    st.builds(
        lambda n, dtype: torch.arange(n).to(dtype), st.integers(0, 4), st.sampled_from([torch.int8, torch.bfloat16])
    ),
    st.builds(lambda n: np.arange(n, dtype=">i2"), st.integers(0, 3)),
)
NAMES = st.one_of(
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=4), st.integers(-5, 5)
)
KEYS = st.text("ab/~=0", max_size=3)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(NAMES, inner, max_size=3),
        st.dictionaries(NAMES, inner, max_size=3).map(OrderedDict),
    )


def with_stateful(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(containers(inner), st.dictionaries(st.text("ab", max_size=2), inner, max_size=2).map(StateDict))


PLAIN_STATES = st.dictionaries(KEYS, st.recursive(LEAVES, containers, max_leaves=8), max_size=4)
STATES = st.dictionaries(KEYS, st.recursive(LEAVES, with_stateful, max_leaves=8), max_size=4)


def like(value: Any) -> Any:
    """The same structure with other content."""
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 7)
    if isinstance(value, np.ndarray):
        return np.full_like(value, 7)
    if isinstance(value, dict):
        return type(value)((name, like(child)) for name, child in value.items())
    return type(value)(map(like, value)) if isinstance(value, list | tuple) else "other"


@given(PLAIN_STATES)
@settings(max_examples=tries(45, 150), deadline=None)
def test_any_state_is_made_anew(state: dict[str, Any]) -> None:
    assert same_state(load(commit(state)), state)


@given(STATES)
@settings(max_examples=tries(45, 150), deadline=None)
def test_any_state_is_restored_in_place(state: dict[str, Any]) -> None:
    target = like(state)
    checkout(commit(state), target)
    assert same_state(target, state)


@given(STATES, STATES)
@settings(max_examples=tries(45, 150), deadline=None)
def test_a_restore_into_another_state_works_whole_or_touches_nothing(
    source: dict[str, Any], target: dict[str, Any]
) -> None:
    before = canonical(capture_state(target))
    try:
        plan = plan_restore(target, commit(source))
    except CkptError:
        assert canonical(capture_state(target)) == before
        return
    fetch(plan.copies)
    plan.finish()
    assert same_state(target, source)
