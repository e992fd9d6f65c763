"""The views have the same rows on SQLite and on PostgreSQL, and of shards those that the layouts say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cas_ckpt.index import remembered
from cas_ckpt.index.index import Index
from cas_ckpt.index.rows import storable
from cas_ckpt.index.views import VIEWS
from cas_ckpt.objects.layouts import Division, LayoutObject, compose_layout, holders_of, layout_node
from cas_ckpt.objects.spec import MeshPlacement
from tests.index.building import STORE, commit_row, digest, meta_pack
from tests.index.layouts_suite import layout_pack
from tests.index.plans_suite import SHAPES, loads, plan
from tests.index.restores_suite import restore
from tests.index.views_suite import ask, filled, rows, with_everything
from tests.objects.divisions import WORLD, divisions
from tests.searches import tries

pytestmark = pytest.mark.slow

OF_THIS_INDEX = ("_no", "seen", "seen_s")
"""Ends of the names of columns that two indexes of one repository have differently."""

NAMES = ["\0nul", "\ud800x", "q'\"", "a%_b*[c]", "line\nbreak", "é", "🎉", "Z", "a", "~", "", "{0}", "HEX[n.digest]"]
TIMES_US = [-5, 2**63 - 1, 0, 10**15 + 999_999, 253_402_300_799_999_999]
NUMBERS = [1e308, float("inf"), 1.5, -0.0, 5e-324, float("nan"), float("-inf")]


@cache
def layouts() -> list[LayoutObject]:
    """Layouts of random divisions, and those that say less."""
    found: list[LayoutObject] = [LayoutObject(), LayoutObject(8, (("dp", 4),), {"b": ["@tp=2", "S(0)"], "d": []})]

    @settings(
        max_examples=tries(20, 60), database=None, derandomize=True, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.dictionaries(st.one_of(st.text(max_size=4), st.sampled_from(NAMES)), divisions, max_size=6))
    def draw(held: dict[str, Division]) -> None:
        found.append(compose_layout(held, world_size=WORLD))

    draw()
    return found


def fill(index: Index) -> None:
    filled(index)
    with_everything(index)
    for at, layout in enumerate(layouts()):
        index.add_packs([layout_pack(f"l{at}", [layout_node(layout)], [f"by layout {at}"])])
    for at, name in enumerate(NAMES):
        odd = commit_row(
            f"odd {at}", message=name, author=name, branch=name, time_us=TIMES_US[at % len(TIMES_US)], step=at - 3,
            metrics={name: NUMBERS[at % len(NUMBERS)]}, stats={"new_bytes": (0, -7, 2**62)[at % 3]},
        )  # fmt: skip
        index.add_packs([meta_pack(f"odd {at}", {}, commit=odd)])
        index.write(remembered.write_plan, plan(f"r{at}", name, 1, rules={name: ("R",)}), loads(1), SHAPES)
        row = restore("a", f"r{at}", mesh=name, author=name, host=name, error=name or None, wants=digest(at) or None)
        index.write(remembered.write_restore, row)
    index.write(remembered.write_restore, restore("a", wants=None, num_bytes=None, seconds=0.1))


@pytest.fixture(scope="module")
def both(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Index, Index]]:
    """One repository in two indexes: SQLite's and PostgreSQL's."""
    place: Path = tmp_path_factory.mktemp("views") / "index.sqlite"
    Index.discard(server_url, store_id=STORE)
    with Index.open(place, store_id=STORE) as first, Index.open(server_url, store_id=STORE) as second:
        for index in (first, second):
            fill(index)
        yield first, second
    Index.discard(server_url, store_id=STORE)


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)
def test_both_databases_answer_with_the_same_rows(both: tuple[Index, Index], view: Any) -> None:
    names = [column.name for column in view.columns if not column.name.endswith(OF_THIS_INDEX)]
    answers = [ask(index, f"SELECT {', '.join(names)} FROM {view.name}") for index in both]
    assert answers[0].columns == answers[1].columns == tuple(names)
    found = [sorted(answer.rows, key=repr) for answer in answers]
    assert found[0]
    assert found[0] == found[1]


def test_what_is_not_there_is_null(both: tuple[Index, Index]) -> None:
    for index in both:
        query = "SELECT parent_id, layout_id, layout_no FROM commits WHERE message = :name"
        assert rows(index, query, name=NAMES[2]) == [(None, None, None)]
        assert rows(index, "SELECT count(*) FROM restores WHERE wants IS NULL") == [(1,)]


def shards_of(layout: LayoutObject) -> Iterator[tuple[Any, ...]]:
    """What the view is to say of a layout, from the layout itself."""
    holders = holders_of(layout)
    for key, number in holders.keys.items():
        division = holders.division(number)
        if division is None or "\ud800" in key:  # it is not known, or not in the node
            continue
        for rank in division.everywhere:
            yield (storable(key), len(division.placements), rank, "whole", *[None] * 8)
        for position, placement in enumerate(division.placements):
            at_place = storable(key), position
            if not isinstance(placement, MeshPlacement):
                for box, ranks in placement.boxes:
                    held = json.dumps(box.offsets), json.dumps(box.sizes)
                    yield from ((*at_place, rank, "boxes", *[None] * 6, *held) for rank in ranks)
                continue
            mesh, step = placement.mesh, [1]
            for size in reversed(mesh.shape[1:]):
                step.insert(0, step[0] * size)
            for place, rank in enumerate(mesh.ranks):
                if not mesh.shape:
                    yield (*at_place, rank, "mesh", *[None] * 8)
                for axis, (name, size, split) in enumerate(zip(mesh.names, mesh.shape, placement.splits, strict=True)):
                    at = place // step[axis] % size
                    part = (None, None, None) if split.dim is None else (split.dim, at, size)
                    yield (*at_place, rank, "mesh", axis, name, at, *part, None, None)


def test_shards_are_those_that_the_layouts_say(both: tuple[Index, Index]) -> None:
    query = (
        "SELECT key, position, rank, kind, axis, name, coordinate, dim, part, num_parts, offsets, sizes FROM shards "
        "WHERE layout_id = :layout"
    )
    num_rows = 0
    for layout in layouts():
        expected = sorted(shards_of(layout), key=repr)
        num_rows += len(expected)
        for index in both:
            assert sorted(rows(index, query, layout=layout_node(layout).digest.hex()), key=repr) == expected
    assert num_rows > 1000
