"""Layout nodes say in few bytes who held what, whatever the order of ranks; what is malformed is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cas_ckpt.errors import CkptError, CorruptionError
from cas_ckpt.layout.holdings import Shard, holdings
from cas_ckpt.objects.digest import ObjectKind, unpack_canonical
from cas_ckpt.objects.layouts import (
    MAX_RANKS,
    Division,
    LayoutObject,
    Unexplained,
    compose_layout,
    decode_layout,
    holders_of,
    layout_node,
)
from cas_ckpt.objects.nodes import make_node
from cas_ckpt.objects.spec import Box, BoxPlacement, Mesh, MeshPlacement, Split
from tests.divided import mesh, over
from tests.objects.divisions import SHAPE, WORLD, divisions
from tests.searches import tries

KEYS = [f"layers/{number}/weight" for number in range(6)]


def held(division: Division) -> set[Shard]:
    return set(holdings(SHAPE, division.placements, division.everywhere))


def payload(layout: LayoutObject) -> dict[str, Any]:
    found: dict[str, Any] = unpack_canonical(layout_node(layout).data)[2]
    return found


@given(st.lists(divisions, min_size=1, max_size=6))
@settings(max_examples=tries(25, 80), deadline=None)
def test_who_held_what_is_read_back_from_the_node(given_ones: list[Division]) -> None:
    layout = compose_layout(dict(zip(KEYS, given_ones, strict=False)), world_size=WORLD)
    assert decode_layout(layout_node(layout).data) == layout
    holders = holders_of(layout)
    for key, division in zip(KEYS, given_ones, strict=False):
        found = holders.division(holders.keys[key])
        assert found is not None
        assert held(found) == held(division)


@given(st.lists(divisions, min_size=1, max_size=6), st.randoms())
@settings(max_examples=tries(10, 40), deadline=None)
def test_the_bytes_do_not_depend_on_who_comes_first(given_ones: list[Division], draw: random.Random) -> None:
    pairs = list(zip(KEYS, given_ones, strict=False))
    wanted = layout_node(compose_layout(dict(pairs), world_size=WORLD)).data
    draw.shuffle(pairs)
    turned = {}
    for key, division in pairs:
        order = list(division.placements)
        draw.shuffle(order)
        boxes = [
            BoxPlacement(tuple(reversed(each.boxes))) if isinstance(each, BoxPlacement) else each for each in order
        ]
        turned[key] = Division(tuple(boxes), division.everywhere)
    assert layout_node(compose_layout(turned, world_size=WORLD)).data == wanted


def test_one_mesh_of_all_ranks_in_order_needs_no_more_than_its_splits() -> None:
    one = mesh(4, 2, names=("dp", "tp"))
    layout = compose_layout(
        {"w": Division((over(one, "S(0)", "R"),)), "v": Division((over(one, "R", "R"),))}, world_size=8
    )
    assert payload(layout) == {
        "world_size": 8,
        "mesh": [["dp", 4], ["tp", 2]],
        "placements": {"w": ["S(0)", "R"], "v": ["R", "R"]},
        "aliases": [],
    }
    assert payload(compose_layout({}, world_size=1)) == {"world_size": 1, "mesh": [], "placements": {}, "aliases": []}


def test_stages_of_a_pipeline_say_which_ranks_they_are_of() -> None:
    stages = [mesh(4, names=("dp",)), mesh(4, names=("dp",), first=4)]
    given_ones = {f"layers/{at}": Division((over(stages[at // 2], "S(0)"),)) for at in range(4)}
    given_ones["head"] = Division((), (4, 5, 6, 7))
    found = payload(compose_layout(given_ones, world_size=8))
    assert found["mesh"] == [["dp", 4]]
    assert found["ranks"] == [0, 4, 1]
    assert found["meshes"] == [[[["dp", 4]], [4, 4, 1]]]
    assert found["divisions"] == [[["whole", [4, 4, 1]]], [["mesh", 1, ["S(0)"]]]]
    assert found["placements"] == {
        "layers/0": ["S(0)"], "layers/1": ["S(0)"], "layers/2": ["@1"], "layers/3": ["@1"], "head": ["@0"],
    }  # fmt: skip


def test_a_mesh_whose_ranks_are_not_in_order_costs_a_few_bytes_and_not_one_for_each_key() -> None:
    exchanged = Mesh(("tp", "dp"), (8, 128), tuple(row * 8 + at for at in range(8) for row in range(128)))
    plain = MeshPlacement(mesh(8, 128, names=("tp", "dp")), (Split(1), Split(0)))
    keys = [f"model/layers.{number}.attention.weight" for number in range(3402)]
    turned = Division((MeshPlacement(exchanged, plain.splits),))
    layout = compose_layout(dict.fromkeys(keys, turned), world_size=1024)
    in_order = compose_layout(dict.fromkeys(keys, Division((plain,))), world_size=1024)
    assert len(layout_node(layout).data) - len(layout_node(in_order).data) < 100
    assert holders_of(layout).division(0) == turned


def test_a_tensor_over_the_meshes_of_128_groups_is_said_once_for_all_that_are_alike() -> None:
    groups = tuple(over(mesh(8, names=("tp",), first=8 * at), "S(0)") for at in range(128))
    keys = [f"model/layers.{number}.attention.weight" for number in range(3402)]
    layout = compose_layout(dict.fromkeys(keys, Division(groups)), world_size=1024)
    assert len(layout_node(layout).data) < sum(map(len, keys)) + 8 * len(keys) + 6000
    found = holders_of(layout).division(0)
    assert found is not None
    assert set(found.placements) == set(groups)


def test_placements_that_were_written_without_their_ranks_say_so() -> None:
    old = LayoutObject(8, (("dp", 4),), {"a": ["S(0)"], "b": ["@tp=2", "S(0)"], "c": ["boxes"]})
    later = LayoutObject(4, (("dp", 4),), {"a": ["S(0)"], "b": ["Z(0)"], "c": ["@7"]})
    for layout, unknown in ((old, "abc"), (later, "bc")):
        found = holders_of(decode_layout(layout_node(layout).data))
        assert [key for key, number in found.keys.items() if found.division(number) is None] == list(unknown)
    assert found.divisions[found.keys["b"]] == (Unexplained(("Z(0)",)),)


SOUND: dict[str, Any] = {
    "world_size": 8, "mesh": [["dp", 4]], "ranks": [0, 4, 1], "meshes": [[[["tp", 2]], [6, 2, 1]]],
    "divisions": [[["mesh", 1, ["S(0)"]], ["boxes", [[[0], [2], [1, 2, 1]]]], ["whole", [0, 1, 1, 4, 1, 1]]]],
    "placements": {"w": ["@0"], "v": ["R"]}, "aliases": [],
    "orders": [[[1, 0], ["t", "u"]]], "versions": {"model": {"bn": 2}, "": {}},
}  # fmt: skip


def changed(**changes: Any) -> bytes:
    return make_node(ObjectKind.LAYOUT, SOUND | changes).data


@pytest.mark.parametrize(
    "changes",
    [
        {"world_size": 0},
        {"world_size": -1},
        {"world_size": MAX_RANKS + 1},
        {"world_size": 1 << 60},
        {"mesh": [["dp", 0]]},
        {"mesh": [["dp", 5]]},
        {"mesh": [["dp", 1 << 60]], "world_size": MAX_RANKS},
        {"mesh": [["d", 1]] * 65},
        {"mesh": []},
        {"ranks": []},
        {"ranks": [0, 3, 1]},
        {"ranks": [0, 4, 1, 4, 1, 1]},
        {"ranks": [5, 4, 1]},
        {"ranks": [0, 2, 1, 1, 2, 1]},
        {"meshes": []},
        {"meshes": [[]]},
        {"meshes": [7]},
        {"meshes": [[[["tp", 2]], [6, 1, 1]]]},
        {"meshes": [[[], [6, 1, 1]]]},
        {"meshes": [[[["tp", 1 << 59]], [0, 1 << 59, 1]]]},
        {"meshes": [[[["tp", MAX_RANKS]], [0, MAX_RANKS, 1]]] * 5, "world_size": MAX_RANKS},
        {"divisions": []},
        {"divisions": [[]]},
        {"divisions": [[["mesh", 2, ["S(0)"]]]]},
        {"divisions": [[["mesh", -1, ["S(0)"]]]]},
        {"divisions": [[["mesh", 0, ["S(0)"]]]], "mesh": []},
        {"divisions": [[["mesh", True, ["S(0)"]]]]},
        {"divisions": [[["mesh", 1, []]]]},
        {"divisions": [[["mesh", 1, ["S(0)", "R"]]]]},
        {"divisions": [[["mesh", 1, ["shard"]]]]},
        {"divisions": [[["mesh", 1, [0]]]]},
        {"divisions": [[["boxes", []]]]},
        {"divisions": [[["boxes", [[[0], [2, 2], [1, 1, 1]]]]]]},
        {"divisions": [[["boxes", [[[-1], [2], [1, 1, 1]]]]]]},
        {"divisions": [[["boxes", [[[0], [1 << 63], [1, 1, 1]]]]]]},
        {"divisions": [[["boxes", [[[0], [2], [1, 9, 1]]]]]]},
        {"divisions": [[["boxes", [[[0], [2]]]]]]},
        {"divisions": [[["whole", [4, 2, 1, 5, 2, 1]]]]},
        {"divisions": [[["whole", [8, 1, 1]]]]},
        {"divisions": [[["partial", [0, 1, 1]]]]},
        {"placements": {"w": ["@1"]}},
        {"placements": {"w": ["R"] * 65}},
        {"aliases": [["a", 1]]},
        {"orders": []},
        {"orders": [[[1, 0]]]},
        {"orders": [[[1, 0], []]]},
        {"orders": [[[1, 1], ["t"]]]},
        {"orders": [[[2, 0], ["t"]]]},
        {"orders": [[[True, 0], ["t"]]]},
        {"orders": [[[*range(64), 64], ["t"]]]},
        {"orders": [[[1, 0], [7]]]},
        {"orders": [[7, ["t"]]]},
        {"orders": [[[1, 0], ["u", "t"]]]},
        {"orders": [[[1, 0], ["t"]], [[1, 0], ["u"]]]},
        {"orders": [[[1, 0], ["t"]], [[1, 0, 2], ["t"]]]},
        {"versions": {}},
        {"versions": {"model": 2}},
        {"versions": {"model": {"bn": "2"}}},
        {"versions": {"model": {"bn": -1}}},
        {"versions": {"model": {7: 1}}},
        {"versions": {7: {}}},
        {"more": 1},
    ],
    ids=str,
)
def test_a_layout_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    decode_layout(changed())
    with pytest.raises(CorruptionError):
        decode_layout(changed(**changes))


def test_a_division_over_a_mesh_whose_ranks_are_not_said_is_refused() -> None:
    over_it = SOUND | {"divisions": [[["mesh", 0, ["S(0)"]]]]}
    decode_layout(make_node(ObjectKind.LAYOUT, over_it).data)
    del over_it["ranks"]
    with pytest.raises(CorruptionError):
        decode_layout(make_node(ObjectKind.LAYOUT, over_it).data)


@given(st.data())
@settings(max_examples=tries(80, 300))
def test_a_mutated_layout_raises_only_typed_errors(data: st.DataObject) -> None:
    raw = bytearray(changed())
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        layout = decode_layout(bytes(raw))
        assert layout_node(layout).data == bytes(raw)
        holders = holders_of(layout)
        for number in range(len(holders.divisions)):
            holders.division(number)
    except CkptError:
        pass


def test_what_a_division_lists_is_known_before_it_is_counted_out() -> None:
    everyone = [["whole", [0, MAX_RANKS, 1]]]
    boxes = [["boxes", [[[at], [1], [0, MAX_RANKS, 1]] for at in range(1000)]]]
    layout = decode_layout(changed(world_size=MAX_RANKS, divisions=[everyone, boxes]))
    holders = holders_of(layout)
    assert [holders.num_listed(number) for number in (0, 1)] == [MAX_RANKS, 1000 * MAX_RANKS]
    assert holders.num_listed(2) == 4
    assert layout.divisions[1][0].boxes[0][0] == Box((0,), (1,))  # type: ignore[union-attr]
