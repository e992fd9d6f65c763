"""DCP's flat names and nested state: one way as DCP goes, the other way as far as can be known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from cas_ckpt.dcp.names import flat_items
from cas_ckpt.dcp.tree import Nesting
from cas_ckpt.errors import MismatchError
from cas_ckpt.objects.state import Container, StoredTensor, TensorItem, walk
from cas_ckpt.training.capture.capture import capture_state
from tests.dcp.states import awkward_state, plain_state, same, trained

NAMES = st.sampled_from(["a", "b", "0", "1", "layers.0.w", "state", "param_groups", "x y"])
LEAVES = st.one_of(st.none(), st.integers(0, 3), st.just("text"), st.lists(st.integers(0, 3), max_size=2), st.tuples())


def states(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    tensors = st.builds(lambda size: torch.zeros(size), st.integers(0, 3))
    below = st.recursive(
        leaves | tensors,
        lambda inner: st.lists(inner, min_size=1, max_size=3) | st.dictionaries(NAMES, inner, min_size=1, max_size=3),
        max_leaves=8,
    )
    return st.dictionaries(NAMES, below, max_size=4)


def flattened(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """As DCP flattens it; None for the states that it refuses."""
    try:
        return flatten_state_dict(state)
    except ValueError:
        return None


@given(states(LEAVES))
def test_a_flattened_state_is_nested_again(state: dict[str, Any]) -> None:
    flat = flattened(state)
    if flat is not None:
        values, paths = flat
        assert same(Nesting(paths, values).build(values.items()), state)


@given(states(LEAVES))
def test_entries_are_named_as_dcp_names_them(state: dict[str, Any]) -> None:
    flat = flattened(state)
    if flat is None:
        with pytest.raises(MismatchError, match="two entries"):
            flat_items(stored(state))
    else:
        found = flat_items(stored(state))
        assert {name: path for name, (path, _) in found.items()} == flat[1]


def stored(state: dict[str, Any]) -> Container:
    """The tree as a commit gives it back."""
    return as_stored(capture_state(state))


def as_stored(item: Any) -> Any:
    if isinstance(item, Container):
        return Container(item.kind, {name: as_stored(child) for name, child in item.children.items()}, item.attrs)
    return StoredTensor(item.spec, item.flavor, None, b"") if isinstance(item, TensorItem) else item


def test_the_names_of_all_that_training_has_are_those_of_dcp() -> None:
    for state in (plain_state(), awkward_state(), {"sparse": torch.eye(3).to_sparse()}):
        assert {name: path for name, (path, _) in flat_items(stored(state)).items()} == flatten_state_dict(state)[1]


def test_optimizers_get_their_numbers_back_and_nothing_else_does() -> None:
    model, optimizer = trained()
    named = {"state": {"0": {"step": 1}}, "param_groups": [{"params": ["0"], "lr": 0.1}]}
    state = {
        "deep": {"optim": optimizer.state_dict()},
        "sgd": torch.optim.SGD(model.parameters()).state_dict(),
        "named": named,
        "list": torch.nn.ParameterList([torch.zeros(2)]).state_dict(),
        "state": {"0": 1},
        "07": {"07": 2},
    }
    values, paths = flatten_state_dict(state)
    assert same(Nesting(paths, values).build(values.items()), {**state, "list": dict(state["list"])})


def test_a_place_that_held_an_empty_dict_holds_one_again() -> None:
    values, paths = flatten_state_dict({"rows": [{}, {"a": 1}, [{}, torch.zeros(1)]]})
    assert same(Nesting(paths, values).build(values.items()), {"rows": [{}, {"a": 1}, [{}, torch.zeros(1)]]})


def test_outermost_names_alone_for_planners_that_do_not_flatten() -> None:
    found = flat_items(stored({"model": {"w": torch.zeros(1)}, "step": 1}), flatten=False)
    assert {name: path for name, (path, _) in found.items()} == {"model": ("model",), "step": ("step",)}
    assert isinstance(found["model"][1], Container)


def test_every_stored_entry_has_one_name() -> None:
    tree = stored({name: value for name, value in plain_state().items() if name not in ("pair", "rows")})
    leaves = [path for path, item in walk(tree) if not (isinstance(item, Container) and item.kind == "dict")]
    assert len(flat_items(tree)) == len(leaves)
