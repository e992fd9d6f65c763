"""Loading without a template."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cas_ckpt import Repository
from cas_ckpt.errors import (
    CkptError,
    CorruptionError,
    InvalidInputError,
    UnsupportedValueError,
    UnsupportedVersionError,
)
from cas_ckpt.objects.layouts import LayoutObject
from cas_ckpt.objects.spec import Spec
from cas_ckpt.objects.state import Container, Item, StoredTensor, ValueItem
from cas_ckpt.training.restore.materialize import materialize
from cas_ckpt.training.stateful import StateDict
from tests.training.roundtrip import checkout, commit, fetch, load

STORED = StoredTensor(Spec("float32", (1,)), "torch", None, b"\0\0\0\0")


def test_new_tensors_go_to_the_device_and_floating_ones_take_the_dtype_that_is_asked_for() -> None:
    weight = torch.linspace(-3, 3, 70_000).reshape(100, 700)
    state = {"w": weight, "tied": weight, "half": weight.half(), "n": torch.arange(3), "flag": torch.tensor([True]),
             "c": torch.ones(2, dtype=torch.complex64), "a": np.ones(3), "sparse": torch.eye(3).to_sparse(),
             "scalar": torch.tensor(1.5)}  # fmt: skip
    with Repository.init("memory://devices") as repo:
        repo.commit(state)
        for options in ({"device": "cpu"}, {"map_location": torch.device("cpu")}, {}):
            found = repo.load(**options)
            assert torch.equal(found["w"], weight)
            assert found["half"].dtype == torch.float16
        found = repo.load(dtype=torch.bfloat16)
        assert torch.equal(found["w"], weight.bfloat16())
        assert found["tied"] is found["w"]
        assert found["half"].dtype == found["scalar"].dtype == torch.bfloat16
        kept = {"n": torch.int64, "flag": torch.bool, "c": torch.complex64, "sparse": torch.float32}
        assert {name: found[name].dtype for name in kept} == kept
        assert found["a"].dtype == np.float64
        assert torch.equal(repo.load(dtype=torch.float64)["half"], weight.half().double())
        odd: list[tuple[dict[str, Any], str]] = [
            ({"device": "nowhere"}, "nowhere"), ({"device": "cpu", "map_location": "cpu"}, "two names"),
            ({"map_location": {"cuda": "cpu"}}, "no tensor can be put"), ({"dtype": torch.int8}, "floating-point"),
            ({"dtype": "bfloat16"}, "floating-point"),
        ]  # fmt: skip
        for options, words in odd:
            with pytest.raises(InvalidInputError, match=words):
                repo.load(**options)


def test_loading_gives_plain_containers_and_new_tensors() -> None:
    model = torch.nn.Linear(2, 2)
    made = load(commit({"model": model, "list": [torch.ones(1), (1, {})], "n": 1}))
    assert type(made) is dict
    assert type(made["model"]) is dict
    assert type(made["model"]["weight"]) is torch.Tensor
    assert torch.equal(made["model"]["weight"], model.weight)
    assert made["model"]["weight"].data_ptr() != model.weight.data_ptr()
    assert not made["model"]["weight"].requires_grad
    assert made["list"][1] == (1, {})


def test_bytes_are_fetched_all_at_once_and_nothing_is_given_if_that_fails() -> None:
    calls: list[int] = []

    def failing(copies: Any) -> None:
        calls.append(len(copies))
        raise CorruptionError("a chunk is damaged")

    with pytest.raises(CorruptionError, match="damaged"):
        materialize(commit({"a": torch.ones(1), "b": [torch.ones(2)]}), failing)
    assert calls == [2]


def test_tied_tensors_are_one_tensor_again_and_read_once() -> None:
    tree = commit({"a": torch.ones(3), "b": {"c": torch.ones(3)}, "d": torch.ones(3)})
    copies: list[Any] = []

    def counting(wanted: Any) -> None:
        copies.extend(wanted)
        fetch(wanted)

    made = materialize(tree, counting, layout=LayoutObject(aliases=(("a", "b/c"), ("not/there",))))
    assert made["a"] is made["b"]["c"]
    assert made["a"] is not made["d"]
    assert len(copies) == 2
    assert made["a"].sum() == made["d"].sum() == 3


def test_ties_of_different_specs_are_corruption() -> None:
    tree = commit({"a": torch.ones(3), "b": torch.ones(2)})
    with pytest.raises(CorruptionError, match=r"^b: .* is listed as tied"):
        load(tree, layout=LayoutObject(aliases=(("a", "b"),)))


def test_what_a_restore_makes_new_is_tied_again_too() -> None:
    target: dict[str, Any] = {"x": None, "y": None}
    checkout(
        commit({"x": torch.ones(2), "y": torch.ones(2)}), target, layout=lambda: LayoutObject(aliases=(("x", "y"),))
    )
    assert target["x"] is target["y"]


def test_tensors_go_to_the_device_that_was_asked_for() -> None:
    assert load(commit({"x": torch.ones(2)}), device="cpu")["x"].device.type == "cpu"


@pytest.mark.parametrize(
    ("item", "kind"),
    [
        (Container("list", {0: STORED, "x": STORED}), CorruptionError),
        (Container("new kind", {}), UnsupportedVersionError),
        (Container("sparse_coo", {"indices": ValueItem(1)}), CorruptionError),
        (Container("structured", {"items": STORED}, {}), CorruptionError),
        (Container("structured", {}, {}), CorruptionError),
        (StoredTensor(Spec("float1", (1,)), "torch", None, b""), UnsupportedVersionError),
        (StoredTensor(Spec("np:<M8[s]", (1,)), "torch", None, b""), UnsupportedValueError),
    ],
    ids=str,
)
def test_what_no_commit_writes_is_refused(item: Item, kind: type[CkptError]) -> None:
    with pytest.raises(kind):
        load(Container("dict", {"x": item}))


def test_a_tree_that_nests_too_deep_is_refused_without_a_recursion_error() -> None:
    item: Item = STORED
    for _ in range(5000):
        item = Container("dict", {"a": item})
    with pytest.raises(CorruptionError, match="too deep"):
        load(Container("dict", {"x": item}))
    endless: dict[str, Any] = {}
    endless["a"] = endless
    for target in (None, endless, StateDict(endless)):
        with pytest.raises(CorruptionError, match="too deep"):
            checkout(Container("dict", {"x": item}), {"x": target})
