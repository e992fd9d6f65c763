"""What becomes a container, what one value, and what is refused."""

from __future__ import annotations

import random
import warnings
from collections import Counter, OrderedDict, UserDict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

from cas_ckpt.errors import InvalidInputError, UnsupportedValueError
from cas_ckpt.objects.spec import Spec
from cas_ckpt.objects.state import Container, Flavor, StoredTensor, TensorItem, ValueItem, walk
from cas_ckpt.training.capture.capture import MAX_DEPTH, capture_state
from cas_ckpt.training.capture.tensors import simple_item, supported, tensor_item
from cas_ckpt.training.per_rank import RNGState
from cas_ckpt.training.stateful import StateDict
from tests.training.roundtrip import commit, failure_of, load

Pair = namedtuple("Pair", "a b")


def captured(value: Any) -> Any:
    return capture_state({"x": value}).children["x"]


def kind_of(value: Any) -> str:
    item = captured(value)
    return item.kind if isinstance(item, Container) else "value" if isinstance(item, ValueItem) else "tensor"


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({}, "dict"),
        ({"a": 1}, "dict"),
        ([1, [2, (3, None)]], "value"),
        ([], "value"),
        ([1, {}], "list"),
        ((1, torch.ones(1)), "tuple"),
        ([np.ones(1)], "list"),
        (OrderedDict(a=[1, {}]), "value"),
        (OrderedDict(a=[1, {"b": torch.ones(1)}]), "odict"),
        ([OrderedDict(a={})], "value"),
        ([OrderedDict(a=torch.ones(1))], "list"),
        ([torch.nn.Identity()], "list"),
        (OrderedDict(a=StateDict()), "odict"),
        (StateDict(b=2), "dict"),
        (torch.nn.Identity(), "dict"),
        (torch.nn.Identity().state_dict(), "dict"),
        (Counter({3: 1}), "value"),
        (torch.Size([1, 2]), "value"),
        (Pair(1, 2), "value"),
        (deque([1]), "value"),
        (torch.float32, "value"),
        (torch.nn.Parameter(torch.ones(1)), "tensor"),
    ],
    ids=repr,
)
def test_what_needs_structure_is_a_container_and_the_rest_one_value(value: Any, kind: str) -> None:
    assert kind_of(value) == kind


def test_a_state_comes_back_with_its_types() -> None:
    state = {
        "ints": {0: "a", 1: torch.ones(2), -3: None},
        "texts": {"0": 1, "": 2, "a/b": 3, "~": 4, "snow \u2603": 5},
        "mixed": [1, (2.5, torch.zeros(1), {"deep": [True]}), None],
        "ordered": OrderedDict(z=1, a=2),
        "size": torch.Size([1, 2]),
        "odd": (1, (2, [3])),
        "array": np.arange(3),
        "empty": [{}, [], ()],
    }
    made = load(commit(state))
    assert made["ints"].keys() == state["ints"].keys()
    assert made["texts"] == state["texts"]
    assert type(made["mixed"][1]) is tuple
    assert made["mixed"][1][2] == {"deep": [True]}
    assert list(made["ordered"]) == ["z", "a"]
    assert type(made["size"]) is torch.Size
    assert made["odd"] == state["odd"]
    assert made["array"].dtype == np.arange(3).dtype
    assert made["empty"] == [{}, [], ()]


def test_any_mapping_can_be_the_state_itself() -> None:
    assert load(commit(UserDict(a=1))) == {"a": 1}
    assert capture_state(OrderedDict(a=1)).kind == "dict"
    with pytest.raises(InvalidInputError, match="a state is a mapping"):
        capture_state([1])  # type: ignore[arg-type]


def test_capturing_shares_memory_and_changes_no_version() -> None:
    model = torch.nn.Linear(3, 2)
    before = model.weight._version
    item = captured(model).children["weight"]
    view = item.source.read(item.spec.box)
    with torch.no_grad():
        model.weight.fill_(5.0)
    assert (view.view(np.float32) == 5.0).all()
    assert model.weight._version == before + 1
    assert model.weight.requires_grad


def test_capturing_draws_no_random_number() -> None:
    generator = torch.Generator().manual_seed(3)
    optimizer = torch.optim.AdamW(torch.nn.Linear(3, 2).parameters())

    def draws() -> list[Any]:
        return [torch.rand(1), np.random.random(), random.random(), torch.rand(1, generator=generator)]

    rng = RNGState({"mine": generator})
    saved = rng.state_dict()
    expected = draws()
    rng.load_state_dict(saved)
    commit({"model": torch.nn.Dropout(), "optim": optimizer, "rng": rng})
    assert draws() == expected


def test_tied_tensors_have_one_region_and_others_their_own() -> None:
    shared, other = torch.nn.Parameter(torch.ones(2, 3)), torch.ones(2, 3)
    tree = capture_state({"a": shared, "b": shared.detach(), "view": shared.t(), "other": other, "part": shared[:1]})
    regions = {path[0]: item.identity[0] for path, item in walk(tree) if isinstance(item, TensorItem) and item.identity}
    assert regions["a"] == regions["b"]
    assert len(set(regions.values())) == 4


def test_a_version_tells_that_bytes_may_have_changed() -> None:
    weight = torch.nn.Parameter(torch.ones(3))

    def identity() -> Any:
        return captured(weight).identity

    first = identity()
    assert identity() == first
    with torch.no_grad():
        weight.add_(1)
    assert identity() != first
    assert identity()[0] == first[0]


def test_plain_subclasses_of_tensors_are_tensors() -> None:
    class Tagged(torch.Tensor):
        pass

    tagged = torch.arange(3.0).as_subclass(Tagged)
    assert load(commit({"x": tagged}))["x"].tolist() == [0, 1, 2]
    assert load(commit({"x": torch.nn.Buffer(torch.ones(1))}))["x"] == 1


def freed() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


REFUSED: dict[str, tuple[Any, str]] = {
    "meta": (lambda: torch.ones(3, device="meta"), "meta tensor"),
    "fake": (fake, "freed or never was"),
    "freed": (freed, "freed or never was"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged), "wraps other tensors"),
    "mkldnn": (lambda: torch.ones(3).to_mkldnn(), "layout torch._mkldnn"),
    "lazy": (lambda: torch.nn.LazyLinear(2).weight, "uninitialized parameter"),
    "bool key": (lambda: {True: 1}, "key True of type bool"),
    "tuple key": (lambda: {(1, 2): torch.ones(1)}, "key .1, 2. of type tuple"),
    "huge key": (lambda: {1 << 64: 1}, "of type int"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_stored_is_refused_by_key(name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises(UnsupportedValueError, match=f"^deep/0: .*{words}"):
        capture_state({"deep": [make()]})


@pytest.mark.parametrize(
    "name", ["a\0b", "\ud800", "n" * 4097, "\u2603" * 1366], ids=["nul", "surrogate", "long", "wide"]
)
def test_names_that_keys_cannot_hold_are_refused(name: str) -> None:
    with pytest.raises(InvalidInputError, match=r"^deep: the name"):
        capture_state({"deep": {name: 1}})


def test_the_longest_names_are_taken() -> None:
    state = {"n" * 4096: 1, "\u2603" * 1365: 2}
    assert load(commit(state)) == state


def self_containing() -> list[Any]:
    found: list[Any] = [[], {}, {}, StateDict(), StateDict()]
    found[0].append(found[0])
    found[1]["again"] = found[1]
    found[2]["tuple"] = (torch.ones(1), [found[2]])
    found[3]["self"] = found[3]
    found[4]["inner"] = {"outer": [found[4]]}
    return found


@pytest.mark.parametrize("which", range(5))
def test_a_state_that_contains_itself_is_refused(which: int) -> None:
    with pytest.raises(UnsupportedValueError, match=r"^x.*contains itself"):
        capture_state({"x": self_containing()[which]})


def test_depth_has_a_limit_far_below_recursion() -> None:
    deep: Any = torch.ones(1)
    for _ in range(MAX_DEPTH - 1):
        deep = [deep]
    assert captured(deep).kind == "list"
    with pytest.raises(UnsupportedValueError, match="deeper than"):
        capture_state({"x": [deep]})


def test_the_same_object_twice_is_no_cycle() -> None:
    shared = {"a": [1, {}]}
    assert load(commit({"x": shared, "y": [shared, shared]})) == {"x": shared, "y": [shared, shared]}


def test_odd_keys_are_left_to_pickle_if_that_is_allowed() -> None:
    odd = {(1, 2): 3}
    item = capture_state({"x": odd}, allow_pickle=True).children["x"]
    assert isinstance(item, ValueItem)
    assert item.value is odd


def test_a_class_is_no_stateful_object() -> None:
    assert isinstance(captured(torch.nn.Linear), ValueItem)


def odd_tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(60.0)
    with torch.inference_mode():
        inferred = torch.ones(5)
    return {
        "scalar": torch.tensor(2.0), "parameter": torch.nn.Parameter(torch.ones(3, 4)), "no elements": torch.ones(0, 3),
        "a part": base[7:19].view(3, 4), "turned": base.view(6, 10).t(), "expanded": torch.ones(1).expand(4),
        "one row": base.view(6, 10)[:1], "one column": base.view(6, 10)[:, :1], "bfloat16": torch.ones(7).bfloat16(),
        "bool": torch.ones(9, dtype=torch.bool), "complex": torch.ones(3, dtype=torch.complex64),
        "conjugated": torch.ones(3, dtype=torch.complex64).conj(), "inference": inferred,
        "negated": torch.ones(3, dtype=torch.complex64).conj().imag, "float8": torch.ones(4).to(torch.float8_e5m2),
    }  # fmt: skip


@pytest.mark.parametrize("name", odd_tensors())
def test_the_short_way_to_an_item_gives_what_the_long_one_gives_or_nothing(name: str) -> None:
    tensor = odd_tensors()[name]
    short, long = simple_item(tensor), tensor_item(supported(tensor, ("x",)))
    if name in ("no elements", "turned", "expanded", "complex", "conjugated", "negated", "one column"):
        assert short is None
    else:
        assert short is not None
        assert (short.spec, short.flavor, short.identity) == (long.spec, long.flavor, long.identity)
        assert type(short.source) is type(long.source) and short.source.tensor is tensor


def test_what_has_no_memory_is_left_to_the_long_way() -> None:
    freed = torch.ones(1000)
    freed.untyped_storage().resize_(0)
    short = torch.ones(1000)
    short.untyped_storage().resize_(400)
    for tensor in (freed, short, torch.ones(3, device="meta"), torch.eye(3).to_sparse()):
        assert simple_item(tensor) is None


def test_what_is_found_out_of_a_spec_is_found_once_for_all_arrays_and_tensors_that_are_alike() -> None:
    alike = [np.zeros(3, np.float32), np.ones(3, np.float32), torch.ones(3), torch.nn.Parameter(torch.zeros(3))]
    first, *others = [captured(each).spec for each in alike]
    assert all(other is first for other in others)


def test_tensors_of_sizes_that_no_array_can_have_are_refused() -> None:
    assert "reshape it" in str(failure_of(lambda: commit({"w": torch.empty(0, 1 << 62)})))
    made = load(commit({"w": torch.empty(0, 1 << 60)}))
    assert made["w"].shape == (0, 1 << 60)
    tree = Container("dict", {"w": StoredTensor(Spec("float32", (0, 1 << 62)), Flavor.NUMPY, None, b"")})
    assert "reshape it" in str(failure_of(lambda: load(tree)))


def test_a_masked_tensor_is_refused_by_key() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        masked = torch.masked.masked_tensor(torch.ones(3), torch.tensor([True, False, True]))
    assert "w: cannot store a masked tensor: store its get_data() and get_mask()" in str(
        failure_of(lambda: commit({"w": masked}))
    )
