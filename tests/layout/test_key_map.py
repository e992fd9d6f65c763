"""A key map gives each element of a tree a place, as numpy would by reshaping; nothing is lost in silence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from cas_ckpt import KeyMap
from cas_ckpt.errors import InvalidInputError, UnsupportedValueError
from cas_ckpt.layout.key_map import MappedTree
from cas_ckpt.objects.layouts import LayoutObject
from cas_ckpt.objects.state import Container, DerivedTensor, Item, StoredTensor, ValueItem, render_key, walk
from tests.layout.key_maps import Array, Op, applied, histories, stored, tree
from tests.searches import tries


def elements(item: Item) -> Array:
    """What a tensor is by its parts, each element of which is in one of them."""
    assert isinstance(item, StoredTensor)
    if not isinstance(item, DerivedTensor):
        assert item.inline is not None
        return np.frombuffer(item.inline, item.spec.dtype).reshape(item.spec.shape)
    found, times = np.empty(item.spec.shape, item.spec.dtype), np.zeros(item.spec.shape, int)
    for part in item.parts:
        order = [each.dim for each in part.stretches]
        source = tuple(
            slice(each.start, each.start + (each.size - 1) * each.step + 1, each.step)
            for each in sorted(part.stretches, key=lambda each: each.dim)
        )
        place = tuple(
            slice(each.at, each.at + (each.size - 1) * each.stride + 1, each.stride) for each in part.stretches
        )
        found[place] = elements(part.stored)[source].transpose(order)
        times[place] += 1
    assert (times == 1).all()
    return found


def arrays(mapped: MappedTree) -> dict[str, Array]:
    return {render_key(path): elements(item) for path, item in walk(mapped.tree) if path}


@settings(max_examples=tries(60, 1000), deadline=None)
@given(histories())
def test_any_rules_give_what_numpy_gives_and_their_inverse_takes_it_back(
    history: tuple[dict[str, Array], list[Op], list[Op], dict[str, Array]],
) -> None:
    before, rules, back, wanted = history
    mapped = applied(rules, {f"x{key}": array for key, array in before.items()})
    assert mapped.unmapped == tuple(f"x{key}" for key in before)  # numbers would be integer names
    mapped = applied(
        [{"prefix": "t", "to": ""}, *rules, {"prefix": "", "to": "t"}], {f"t{k}": v for k, v in before.items()}
    )
    found = arrays(mapped)
    assert found.keys() == {f"t{key}" for key in wanted}
    assert all(np.array_equal(found[f"t{key}"], array) for key, array in wanted.items())
    whole = [{"prefix": "t", "to": ""}, *rules, *back, {"prefix": "", "to": "t"}]
    again = arrays(applied(whole, {f"t{key}": array for key, array in before.items()}))
    assert again.keys() == {f"t{key}" for key in before}
    assert all(np.array_equal(again[f"t{key}"], array) for key, array in before.items())


# --- names ------------------------------------------------------------------------------------


def test_a_renamed_tensor_is_the_stored_one_and_ties_and_orders_go_with_it() -> None:
    ones = np.ones((2, 2))
    given = tree({"model": {"a.w": ones, "b.w": ones, "c.w": ones}, "lr": ValueItem(1)})
    mapped = applied([{"rename": r"model/(.)\.w", "to": r"net/\1.x.w"}, {"transpose": "net/c.x.w"}], given)
    assert mapped.tree.children["net"].children["a.x.w"] is given.children["model"].children["a.w"]  # type: ignore[union-attr]
    assert mapped.unmapped == ("lr",)
    layout = LayoutObject(
        aliases=(("model/a.w", "model/b.w", "model/c.w"),), orders={"model/a.w": (1, 0), "model/c.w": (1, 0)},
    )  # fmt: skip
    found = mapped.layout(layout)
    assert found.aliases == (("net/a.x.w", "net/b.x.w"),)  # not with the one that was transposed
    assert found.orders == {"net/a.x.w": (1, 0)}


def test_tensors_that_are_made_alike_of_tied_ones_are_tied() -> None:
    ones = np.ones((2, 2))
    given = tree({"a": ones, "b": ones, "like a": ones, "c": ones, "d": ones, "q": ones, "r": ones})
    rules: list[Op] = [{"cast": "[abcd]|like a", "to": "bfloat16"}, {"split": "[qr]", "to": [r"\g<0>1", r"\g<0>2"]}]
    found = applied(rules, given).layout(LayoutObject(aliases=(("a", "b"), ("c", "d"), ("q", "r"))))
    assert found.aliases == (("a", "b"), ("c", "d"), ("q1", "r1"), ("q2", "r2"))


def test_containers_keep_their_kinds_unless_a_list_lost_an_item() -> None:
    one = np.ones(1)
    given = tree({"l": tree({0: one, 1: one}, "list"), "t": tree({0: one, 1: one}, "tuple"),
                  "o": Container("odict", {"a": stored(one), "b": stored(one)}, {"order": ["b", "a"]}),
                  "e": {}})  # fmt: skip
    mapped = applied([{"rename": "l/1", "to": "x"}, {"rename": "o/(b)", "to": r"o/new \1"}], given).tree
    kinds = {name: each.kind for name, each in mapped.children.items() if isinstance(each, Container)}
    assert kinds == {"l": "dict", "t": "tuple", "o": "odict", "e": "dict"}
    assert mapped.children["o"].attrs == {"order": ["new b", "a"]}  # type: ignore[union-attr]


def test_containers_keep_their_kinds_under_other_names() -> None:
    one = np.ones(1)
    ordered = Container("odict", {"a": stored(one), "b": stored(one)}, {"order": ["b", "a"]})
    given = tree({"m": {"l": tree({0: one, 1: one}, "list"), "t": tree({0: {"x": one}}, "tuple"),
                        "p": tree({0: {"s": one}, 1: {"s": one}}, "ranks"), "o": ordered}})  # fmt: skip
    for above in ("n/k/", ""):
        mapped: Any = applied([{"prefix": "m/", "to": above}, {"cast": ".*", "to": "float16"}], given).tree
        inner = mapped if not above else mapped.children["n"].children["k"]
        kinds = {name: each.kind for name, each in inner.children.items()}
        assert kinds == {"l": "list", "t": "tuple", "p": "ranks", "o": "odict"}
        assert inner.children["o"].attrs == {"order": ["b", "a"]}
    top: Any = applied([{"prefix": "m/l/", "to": ""}, {"drop": "m/.*"}], given).tree
    assert (top.kind, list(top.children)) == ("dict", [0, 1])
    mixed: Any = applied([{"rename": "m/t/0/x", "to": "m/l/2"}, {"prefix": "m/", "to": "n/"}], given).tree
    assert mixed.children["n"].children["l"].kind == "dict"


def test_what_is_one_tensor_to_people_is_renamed_whole() -> None:
    sparse = Container("sparse_coo", {"indices": stored(np.ones(1)), "values": stored(np.ones(1))})
    assert applied([{"prefix": "a", "to": "b"}], tree({"a": sparse})).tree.children == {"b": sparse}
    with pytest.raises(UnsupportedValueError, match="a: the key map changes a tensor, the commit holds a sparse_coo"):
        applied([{"transpose": "a"}], tree({"a": sparse}))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([{"rename": "a|b", "to": "c"}], "two entries get the key 'c'"),
        ([{"rename": "a", "to": "b"}], "two entries get the key 'b'"),
        ([{"rename": "a", "to": "b/c"}], "b/c is below another entry|other entries are below"),
        ([{"prefix": "a", "to": ""}], "an empty key"),
        ([{"fuse": ["a", "z"], "to": "c"}], "of what matches z, which is nothing"),
        ([{"fuse": ["a|b", "z"], "to": "c"}], "a and b are the same part of c"),
        ([{"fuse": ["a", "v"], "to": "c"}], "v: .* cannot be joined with .* along dimension 0"),
        ([{"split": "a", "to": ["c", "d", "e"]}], "a: dimension 0 of .* is not 3 equal parts"),
        ([{"interleave": "a", "shape": [3, 2, -1]}], "a: dimension 0 of .* is not 6 equal parts"),
        ([{"rename": "(a)", "to": r"\2"}], "invalid group reference"),
    ],
)
def test_a_map_that_does_not_fit_the_commit_says_why(rules: list[Op], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        applied(rules, {"a": np.ones((4, 2)), "b": np.ones((4, 2)), "v": np.ones((4, 3))})


@pytest.mark.parametrize("rule", [{"transpose": "a", "dims": [0, 2]}, {"split": "s", "to": ["x", "y"]}])
def test_a_rule_for_a_dimension_that_is_not_there_is_refused(rule: Op) -> None:
    with pytest.raises(UnsupportedValueError, match="has no dimension"):
        applied([rule], {"a": np.ones((4, 2)), "s": np.array(1.0)})


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"rename": "(", "to": "a"}, "cannot be read"),
        ({"rename": "a"}, "a rename rule of a key map: missing 1 required positional argument: 'to'"),
        ({"rename": "a", "to": "b", "dim": 1}, "unexpected keyword argument 'dim'"),
        ({"rename": "a", "to": 3}, "3 for a pattern or a key"),
        ({"rename": 3, "to": "a"}, "3 for a pattern or a key"),
        ({"rename": "a", "to": "\ud800"}, "for a pattern or a key"),
        ({"turn": "a"}, "give one of rename, prefix"),
        ({"rename": "a", "drop": "b"}, "give one of rename, prefix"),
        ("rename", "give one of rename, prefix"),
        ({"split": "a", "to": ["b"], "ratios": [1, 2]}, r"ratios \[1, 2\]: give 1 whole"),
        ({"split": "a", "to": ["b"], "groups": 0}, "groups"),
        ({"fuse": ["a"], "to": "b", "groups": 0}, "groups"),
        ({"split": "a", "to": []}, "into nothing"),
        ({"interleave": "a", "shape": [0, -1, 2]}, "give one -1"),
        ({"transpose": "a", "dims": [0]}, "give 2 whole numbers"),
        ({"interleave": "a", "shape": [-1, -1, 2]}, "give one -1"),
        ({"cast": "a", "to": "int8"}, "casts to 'int8'"),
        ({"cast": "a", "to": "float31"}, "casts to 'float31'"),
    ],
)
def test_a_rule_of_another_form_is_refused_when_the_map_is_made(rule: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        KeyMap([rule])


def test_rules_that_are_no_list_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="has the rules None"):
        KeyMap(None)  # type: ignore[arg-type]


def test_a_tensor_without_elements_is_divided_into_any_number_of_groups() -> None:
    numbers = {"dim": 0, "groups": 10**15}  # one after the other, they would take days
    rules: list[Op] = [{"split": "a", "to": ["b", "c"], **numbers}, {"fuse": ["b", "c"], "to": "d", **numbers}]
    assert arrays(applied(rules, {"a": np.zeros((0, 3))}))["d"].shape == (0, 3)


def test_a_cast_leaves_what_are_no_floating_point_numbers() -> None:
    mapped = applied([{"cast": ".*", "to": "bfloat16"}], {"f": np.ones(2), "i": np.ones(2, "int64"), "v": ValueItem(1)})
    dtypes = {name: each.spec.dtype for name, each in mapped.tree.children.items() if isinstance(each, StoredTensor)}
    assert dtypes == {"f": "bfloat16", "i": "int64"}
    assert mapped.unmapped == ()


# --- ready maps -------------------------------------------------------------------------------


def test_ready_maps_are_for_the_key_of_the_model() -> None:
    tensor = np.arange(96.0).reshape(24, 4)
    layer = {"mlp.gate_proj.weight": tensor, "mlp.up_proj.weight": -tensor}
    model = {f"model.layers.3.{name}": each for name, each in layer.items()}
    key_map = KeyMap.ready("hf_to_megatron", num_heads=4, num_kv_heads=2, at="")
    found = arrays(key_map.applied(tree(model), lambda items, *_: items))
    assert found.keys() == {"decoder.layers.3.mlp.linear_fc1.weight"}
    assert np.array_equal(*found.values(), np.concatenate([tensor, -tensor]))
    below = KeyMap.ready("hf_to_megatron", num_heads=4, at="nets/my.one").applied(
        tree({"nets": {"my.one": model}, "nets/my_one": model}), lambda items, *_: items
    )
    assert "nets/my.one/decoder.layers.3.mlp.linear_fc1.weight" in arrays(below)
    assert len(below.unmapped) == 2


@pytest.mark.parametrize(
    ("name", "numbers", "message"),
    [
        ("x", {}, "no ready key map 'x'"),
        ("hf_to_megatron", {}, "missing 1 required keyword-only argument: 'num_heads'"),
        ("hf_to_megatron", {"num_heads": 5, "num_kv_heads": 2}, "5 heads are not 2 groups"),
        ("hf_to_megatron", {"num_heads": "many"}, "num_heads"),
        ("hf_to_megatron", {"num_heads": 4, "fused_norms": "false"}, "give True or False"),
        ("qwen3_hf_to_torchtitan", {"num_heads": 1}, "num_heads"),
        ("megatron_to_hf", {"num_heads": 4, "at": 1}, "at is 1"),
    ],
)
def test_a_ready_map_says_what_it_needs(name: str, numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        KeyMap.ready(name, **numbers)
