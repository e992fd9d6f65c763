"""What every index must know of layouts, whatever database it lies in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select

from cas_ckpt.errors import CorruptionError
from cas_ckpt.index import history, manifests
from cas_ckpt.index.index import Index
from cas_ckpt.index.rows import AxisBound, CommitFilter, PackRecord, change
from cas_ckpt.index.schema import DIVISION_BOXES, LAYOUT_AXES, LAYOUTS, METADATA, PLACEMENTS
from cas_ckpt.objects.digest import ObjectKind
from cas_ckpt.objects.layouts import (
    Division,
    Holders,
    LayoutObject,
    compose_layout,
    decode_layout,
    holders_of,
    layout_node,
)
from cas_ckpt.objects.nodes import Node
from cas_ckpt.objects.pack import PackKind
from cas_ckpt.objects.spec import Mesh
from tests.divided import boxes_by_rank, mesh, over
from tests.index.building import commit_row, digest, empty, extent
from tests.objects.divisions import WORLD, divisions
from tests.searches import tries

NUM_TENSORS = 3402


def layout_pack(name: str, nodes: Sequence[Node], commits: Sequence[str] = ()) -> PackRecord:
    """A meta pack of layout nodes, and of commits that name the first of them."""
    rows = [commit_row(commit, layout=nodes[0].digest) for commit in commits]
    entries = [extent(node.digest, ObjectKind.LAYOUT) for node in nodes]
    entries += [extent(row.digest, ObjectKind.COMMIT) for row in rows]
    contents = [(node.digest, decode_layout(node.data)) for node in nodes]
    return PackRecord(name, PackKind.META, 5_000, entries, commits=rows, contents=contents)


def num_rows(index: Index) -> dict[str, int]:
    """Rows of each table of layouts."""
    tables = [
        table for table in METADATA.sorted_tables if table.name.startswith(("t_layout", "t_placement", "t_division"))
    ]
    with index.reading() as connection:
        return {
            table.name: connection.execute(select(func.count()).select_from(table)).scalar_one() for table in tables
        }


def read(index: Index, layout: LayoutObject) -> Holders | None:
    return index.read(manifests.read_holders, layout_node(layout).digest)


def of_1024_ranks(*axes: str) -> LayoutObject:
    """3,402 tensors of a mesh of 16 x 64 ranks."""
    grid = mesh(16, 64, names=axes)
    ways = [Division((over(grid, *splits),)) for splits in (("S(0)", "S(1)"), ("S(0)", "R"))]
    keys = [f"model/layers.{number // 9}.weight_{number % 9}" for number in range(NUM_TENSORS)]
    return compose_layout({key: ways[at % 2] for at, key in enumerate(keys)}, world_size=1024)


class LayoutTests:
    def test_a_layout_is_read_back_from_its_rows(self, index: Index) -> None:
        @given(st.lists(divisions, max_size=5))
        @settings(max_examples=tries(10, 25), deadline=None, suppress_health_check=list(HealthCheck))
        def check(given_ones: list[Division]) -> None:
            empty(index)
            keys = {f"key {at} ü": division for at, division in enumerate(given_ones)}
            layout = compose_layout(keys, world_size=WORLD, aliases=(("a", "b"), ("c", "d")))
            index.add_packs([layout_pack("m", [layout_node(layout)])])
            assert read(index, layout) == holders_of(layout)

        check()

    def test_a_layout_that_says_less_is_read_back_as_it_is(self, index: Index) -> None:
        old = LayoutObject(8, (("dp", 4),), {"a": ["S(0)"], "b": ["@tp=2", "S(0)"], "c": ["boxes"], "d": []})
        plain = LayoutObject()
        index.add_packs([layout_pack("m", [layout_node(old), layout_node(plain)])])
        assert read(index, old) == holders_of(old)
        assert read(index, plain) == holders_of(plain)
        assert index.read(manifests.read_holders, bytes(32)) is None

    def test_a_thousand_commits_by_three_layouts_have_the_rows_of_three(self, index: Index) -> None:
        three = [layout_node(of_1024_ranks(*axes)) for axes in (("pp", "dp"), ("dp", "tp"), ("dp", "ep"))]
        for number in range(50):
            names = [f"commit {number * 20 + at}" for at in range(20)]
            index.add_packs([layout_pack(f"m {number}", [three[number % 3]], names)])
        found = num_rows(index)
        assert (found["t_layouts"], found["t_layout_axes"], found["t_divisions"]) == (3, 6, 6)
        assert found["t_placements"] == 3 * NUM_TENSORS

    def test_rows_of_a_layout_go_with_it_and_no_others_do(self, index: Index) -> None:
        kept, gone = of_1024_ranks("dp", "tp"), of_1024_ranks("dp", "ep")
        index.add_packs([layout_pack("a", [layout_node(kept)])])
        before = num_rows(index)
        boxes = Division((boxes_by_rank((12, 7), [(3, 6), (2,)], 4),))
        other = compose_layout({"w": boxes, "v": Division((), (1,))}, world_size=4, aliases=(("v", "x"),))
        index.add_packs([layout_pack("b", [layout_node(gone), layout_node(other), layout_node(kept)])])
        assert all(num_rows(index)[name] > count for name, count in before.items())
        index.drop_packs(["b"])
        assert num_rows(index) == before
        assert read(index, kept) == holders_of(kept)
        assert read(index, gone) is None

    def test_rows_that_are_not_of_a_layout_are_damage_and_never_unfold(self, index: Index) -> None:
        ways = {
            "a": Division((over(mesh(2, 2), "S(0)", "R"),)),
            "b": Division((boxes_by_rank((12, 7), [(3, 6), (2,)], 4),)),
        }
        layout = compose_layout(ways | {"c": Division((), (1,))}, world_size=4)
        for table, changes in (
            ("t_layouts", ("num_divisions = 2000000000", "num_divisions = -1", "num_divisions = 2", "world_size = 3")),
            (
                "t_divisions",
                ("division_id = division_id - 10", "division_id = division_id + 10", "mesh = -1", "mesh = 5"),
            ),
            ("t_division_boxes", ("ranks = '0-9999999'", "ranks = '1-0'", "offsets = '[0]'", "sizes = 'x'")),
            ("t_layout_meshes", ("ranks = '0-2'", "mesh = 1000000000")),
            ("t_division_axes", ("placement = 'S(x)'", "part = 7")),
            ("t_layout_axes", ("size = 1000000000000", "axis = axis + 7, mesh = 9")),
            ("t_placements", ("division_id = 3", "division_id = -1")),
        ):
            for changed in changes:
                index.add_packs([layout_pack("m", [layout_node(layout)])])
                index.write(change, f"UPDATE {table} SET {changed}")
                with pytest.raises(CorruptionError, match="index rebuild"):
                    read(index, layout)
                index.drop_packs(["m"])
        index.add_packs([layout_pack("m", [layout_node(layout)])])
        assert read(index, layout) == holders_of(layout)

    def test_meshes_and_boxes_can_be_asked_for_in_sql(self, index: Index) -> None:
        stages = [mesh(2, 2, names=("dp", "tp"), first=4 * at) for at in range(2)]
        ways = {f"layers/{at}": Division((over(stage, "R", "S(0)"),)) for at, stage in enumerate(stages)}
        ways["moved"] = Division((boxes_by_rank((12, 7), [(3,), ()], 2),))
        layout = compose_layout(ways, world_size=8)
        index.add_packs([layout_pack("m", [layout_node(layout)])])
        with index.reading() as connection:
            axes = connection.execute(select(LAYOUT_AXES.c.mesh, LAYOUT_AXES.c.name, LAYOUT_AXES.c.size)).all()
            boxes = connection.execute(
                select(DIVISION_BOXES.c.offsets, DIVISION_BOXES.c.sizes, DIVISION_BOXES.c.ranks)
            ).all()
            world = connection.execute(select(LAYOUTS.c.world_size, LAYOUTS.c.mesh, LAYOUTS.c.num_meshes)).one()
            keys = connection.execute(select(PLACEMENTS.c.key)).scalars().all()
        assert set(map(tuple, axes)) == {(at, name, 2) for at in range(2) for name in ("dp", "tp")}
        assert set(map(tuple, boxes)) == {("[0, 0]", "[3, 7]", "0"), ("[3, 0]", "[9, 7]", "1")}
        assert tuple(world) == (8, "dp=2,tp=2", 2)
        assert sorted(keys) == sorted(ways)

    def test_commits_are_chosen_by_their_ranks_and_by_dimensions_of_any_mesh(self, index: Index) -> None:
        def grid(**sizes: int) -> Mesh:
            return mesh(*sizes.values(), names=tuple(sizes))

        layouts_of = {
            "solo": compose_layout({}, world_size=1),
            "fsdp": compose_layout({"w": Division((over(grid(dp=8), "S(0)"),))}, world_size=8),
            "tp": compose_layout({"w": Division((over(grid(dp=4, tp=2), "S(0)", "S(1)"),))}, world_size=8),
            "experts": compose_layout({
                "w": Division((over(grid(dp=4, tp=4), "S(0)", "S(1)"),)),
                "v": Division((over(grid(dp=4, tp=4), "R", "R"),)),
                "experts": Division((over(grid(ep=16), "S(0)"),)),
            }, world_size=16),
        }  # fmt: skip
        for name, layout in layouts_of.items():
            index.add_packs([layout_pack(f"m {name}", [layout_node(layout)], [name])])
        index.add_packs([layout_pack("m", [layout_node(layouts_of["tp"])], ["again"])])

        def chosen(**conditions: Any) -> set[str]:
            wanted = CommitFilter(**conditions)
            found = history.log(index, [digest(name) for name in (*layouts_of, "again")], wanted=wanted)
            return {row.message for row in found}

        assert chosen(world_size=8) == {"fsdp", "tp", "again"}
        assert chosen(world_size=1) == {"solo"}
        assert chosen(axes=(AxisBound("tp"),)) == {"tp", "again", "experts"}
        assert chosen(axes=(AxisBound("tp", 2),)) == {"tp", "again"}
        assert chosen(axes=(AxisBound("tp", 4), AxisBound("ep"))) == {"experts"}
        assert chosen(axes=(AxisBound("ep", 8),)) == chosen(world_size=16, axes=(AxisBound("cp"),)) == set()
        assert chosen(world_size=16, author="nobody") == set()
