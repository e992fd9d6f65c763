"""Restore plans as rows: kept whole or not at all, summed up, ranked, and bounded, whatever the database."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sqlalchemy import Connection, delete, func, select, update

from cas_ckpt.errors import CorruptionError, InvalidInputError
from cas_ckpt.index import remembered
from cas_ckpt.index.index import Index
from cas_ckpt.index.remembered import RANK_COLUMNS, KeptPlan, PlanRow, ShapeRow
from cas_ckpt.index.schema import PLAN_RANKS, PLAN_SHAPES, PLANS
from tests.index.building import digest

SHAPES = (
    ShapeRow("model/wq", "bfloat16", (1024, 1024), ("S(0)", "R"), 12, 4),
    ShapeRow("norm", "float32", (), (), 1, 1),
)


def plan(root: str, mesh: str, world_size: int = 2, **changes: object) -> PlanRow:
    row = PlanRow(
        digest(root), digest(mesh), digest(f"wants of {mesh}"), 2, mesh, {"**/norm*": ("R", "S(0)")},
        world_size, 13, 2, 49, 1 << 40, 1 << 41, 1_700_000_000_000_000,
    )  # fmt: skip
    return replace(row, **changes)  # type: ignore[arg-type]


def loads(world_size: int, *, read: int = 10, sent: int = 0, received: int = 0) -> list[tuple[int, ...]]:
    """What ranks do; the last one reads one byte more."""
    return [(read + (rank == world_size - 1), 1, sent, received, 100 + rank, 3) for rank in range(world_size)]


def rows_left(connection: Connection) -> tuple[int, ...]:
    return tuple(
        connection.execute(select(func.count()).select_from(table)).scalar() or 0
        for table in (PLANS, PLAN_RANKS, PLAN_SHAPES)
    )


def meshes(found: list[KeptPlan]) -> list[str]:
    return [each.row.mesh for each in found]


class PlanTests:
    def test_a_plan_is_found_by_root_and_target_as_it_was_kept(self, index: Index) -> None:
        row = plan("root", "dp=2")
        index.write(remembered.write_plan, row, [(1, 2, 3, 4, 5, 6), (1 << 50, 8, 9, 10, 11, 12)], SHAPES)
        found = index.read(remembered.read_plan, row.root, row.target)
        assert found is not None
        assert (found.row, found.shapes) == (row, SHAPES)
        assert list(found.totals) == list(RANK_COLUMNS)
        assert found.totals["read_bytes"] == (1, (1 << 50) + 1, 1 << 50)
        assert found.totals["num_straddled"] == (6, 18, 12)
        assert index.read(remembered.read_plan, row.root, digest("other")) is None
        assert index.read(remembered.read_plan, digest("other"), row.target) is None

    def test_a_plan_that_is_kept_again_takes_the_place_of_the_old_one(self, index: Index) -> None:
        index.write(remembered.write_plan, plan("root", "dp=8", 8), loads(8), SHAPES)
        index.write(remembered.write_plan, plan("root", "dp=8", 3), loads(3), SHAPES[:1])
        assert [each.row.world_size for each in index.read(remembered.read_plans)] == [3]
        assert index.read(rows_left) == (1, 3, 1)

    def test_a_plan_that_a_checkout_kept_gives_way_to_one_that_was_asked_for(self, index: Index) -> None:
        wants = digest("wants of dp=2")
        index.write(remembered.write_plan, plan("root", "of a checkout", target=wants, wants=wants), loads(2), SHAPES)
        index.write(remembered.write_plan, plan("root", "dp=2"), loads(2), SHAPES)
        assert meshes(index.read(remembered.read_plans)) == ["dp=2"]
        index.write(remembered.write_plan, plan("root", "fsdp=2", wants=wants), loads(2), SHAPES)
        assert meshes(index.read(remembered.read_plans)) == ["dp=2", "fsdp=2"]

    def test_plans_are_listed_by_root_and_mesh(self, index: Index) -> None:
        for root in "ba":
            for target in ("dp=4", "dp=2"):
                index.write(remembered.write_plan, plan(root, target), loads(2), SHAPES)
        assert meshes(index.read(remembered.read_plans, digest("a"))) == ["dp=2", "dp=4"]
        assert [each.row.root for each in index.read(remembered.read_plans)] == sorted([digest("a"), digest("b")] * 2)

    def test_the_cheapest_plan_is_found_in_sql(self, index: Index) -> None:
        for target, ranks in (
            ("reads", loads(4, read=1000)),
            ("sends", loads(2, read=10, sent=5000)),
            ("receives", loads(2, read=10, received=100)),
            ("twin of receives", loads(1, read=9, received=100) + loads(2, read=10, received=100)),
        ):
            index.write(remembered.write_plan, plan("root", target, len(ranks)), ranks, SHAPES)
        index.write(remembered.write_plan, plan("other root", "free", 1), loads(1, read=0), SHAPES)

        def ranked(storage: float, network: float, **limits: object) -> list[str]:
            asked = {"storage_bandwidth": storage, "network_bandwidth": network, **limits}
            return meshes(index.read(remembered.cheapest_plans, digest("root"), **asked))  # type: ignore[arg-type]

        assert ranked(1.0, 10.0) == ["receives", "twin of receives", "sends", "reads"]
        assert ranked(1.0, 1.0) == ["receives", "twin of receives", "reads", "sends"]
        assert ranked(1.0, 1.0, most_ranks=2) == ["receives", "sends"]
        assert ranked(1.0, 1.0, targets=[digest("reads"), digest("free")]) == ["reads"]
        assert ranked(1.0, 1.0, targets=[]) == []

    def test_a_plan_without_some_of_its_rows_is_not_one(self, index: Index) -> None:
        index.write(remembered.write_plan, plan("root", "dp=4", 4), loads(4), SHAPES)
        index.write(remembered.write_plan, plan("root", "dp=2"), loads(2), SHAPES)
        index.write(lambda connection: connection.execute(delete(PLAN_RANKS).where(PLAN_RANKS.c.rank == 3)))
        assert meshes(index.read(remembered.read_plans)) == ["dp=2"]
        assert index.read(rows_left) == (2, 5, 4)
        index.write(remembered.drop_incomplete)
        assert index.read(rows_left) == (1, 2, 2)

    def test_only_the_youngest_plans_are_kept(self, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(remembered, "MOST_RANK_ROWS", 10)
        for target in ("dp=4", "dp=5", "dp=6"):
            size = int(target[-1])
            index.write(remembered.write_plan, plan("root", target, size), loads(size), SHAPES)
        assert meshes(index.read(remembered.read_plans)) == ["dp=6"]
        monkeypatch.setattr(remembered, "MOST_PLANS", 2)
        for target in ("dp=1", "dp=2"):
            index.write(remembered.write_plan, plan("root", target, 1), loads(1), SHAPES)
        assert meshes(index.read(remembered.read_plans)) == ["dp=1", "dp=2"]
        assert index.read(rows_left) == (2, 2, 4)

    def test_text_that_no_database_holds_is_kept_as_far_as_it_can_be(self, index: Index) -> None:
        shape = replace(SHAPES[0], key="a\0b\ud800'\";--", placements=("S(0)\0",))
        rules = {"a\0\ud800*": ("R",)}
        index.write(remembered.write_plan, plan("root", "d\0p\udfff=2", rules=rules), loads(2), [shape])
        (found,) = index.read(remembered.read_plans)
        assert (found.row.mesh, found.row.rules) == ("d\ufffdp\ufffd=2".replace("\ufffd=", "\ufffd" * 3 + "="), rules)
        assert found.shapes[0].placements == ("S(0)\0",)
        assert found.shapes[0].key.startswith("a\ufffdb\ufffd")

    def test_numbers_that_no_database_holds_are_refused_whole(self, index: Index) -> None:
        with pytest.raises(InvalidInputError):
            index.write(remembered.write_plan, plan("root", "dp=2", wanted_bytes=1 << 63), loads(2), SHAPES)
        assert index.read(rows_left) == (0, 0, 0)

    @pytest.mark.parametrize("rules", ["", "[]", "{", '{"a": 1}', "null"])
    def test_a_row_that_cannot_be_read_is_damage_of_the_index(self, index: Index, rules: str) -> None:
        index.write(remembered.write_plan, plan("root", "dp=2"), loads(2), SHAPES)
        index.write(lambda connection: connection.execute(update(PLANS).values(rules=rules)))
        with pytest.raises(CorruptionError, match="rebuild"):
            index.read(remembered.read_plans)
