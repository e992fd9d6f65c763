"""Restore plans as rows: what a plan says on the whole, what each rank does in it, and which tensors are planned alike.

A plan is kept by the state that it restores and by what names its target, on which alone it depends. What it says of
all ranks together (least, sum, most) is summed up from their rows when it is asked for.

Invariant: a plan is there with all of its rows, or not at all: one whose rows are not all there is passed over, and may
be made again. The youngest are kept: at most `MOST_PLANS`, and `MOST_RANK_ROWS` rows of ranks. It knows no layouts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Float, Select, case, cast, delete, func, select

from cas_ckpt.index.database import insert_missing, rows_for
from cas_ckpt.index.schema import PLAN_RANKS, PLAN_SHAPES, PLANS
from cas_ckpt.index.statements import KEYS_PER_QUERY, batches
from cas_ckpt.index.texts import storable

MOST_PLANS = 1000

MOST_RANK_ROWS = 1 << 20
"""Some 50 MB on SQLite; as many ranks as a target may have, so that the youngest plan always fits."""

RANK_COLUMNS = tuple(column.name for column in PLAN_RANKS.columns)[2:]
"""What is known of each rank, in the order of `KeptPlan.totals` and of rows that are written."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """What a plan says on the whole; the columns of `t_plans`, `rules` as what the JSON says."""

    root: bytes
    target: bytes
    wants: bytes
    planner_version: int
    mesh: str
    rules: Mapping[str, tuple[str, ...]]
    world_size: int
    num_tensors: int
    num_templates: int
    num_chunks: int
    chunk_bytes: int
    wanted_bytes: int
    made_us: int


@dataclass(frozen=True, slots=True)
class ShapeRow:
    """Tensors that are planned alike; the columns of `t_plan_shapes`."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    placements: tuple[str, ...]
    num_tensors: int
    num_chunks: int


@dataclass(frozen=True, slots=True)
class KeptPlan:
    """A plan that was read.

    Attributes:
        totals: Name of a column of `t_plan_ranks` -> its least value, the sum over all ranks, its most.
    """

    row: PlanRow
    totals: Mapping[str, tuple[int, int, int]]
    shapes: tuple[ShapeRow, ...]


def write_plan(
    connection: Connection, row: PlanRow, ranks: Sequence[Sequence[int]], shapes: Iterable[ShapeRow]
) -> None:
    """Keep a plan in the place of what was kept for the same state and target.

    One that a checkout kept is replaced by one with the same wants that was requested.

    Args:
        ranks: For each rank, in order, the values of `RANK_COLUMNS`.
    """
    table = PLANS.c
    known = select(table.plan_id).where(table.root == row.root, table.target.in_([row.target, row.wants]))
    _drop(connection, list(connection.execute(known).scalars()))
    number = int(connection.execute(select(func.max(table.plan_id))).scalar() or 0) + 1
    rules = json.dumps({pattern: list(placements) for pattern, placements in row.rules.items()})
    insert_missing(connection, PLANS, [(
        number, row.root, row.target, row.wants, row.planner_version, storable(row.mesh), rules, row.world_size,
        row.num_tensors, row.num_templates, row.num_chunks, row.chunk_bytes, row.wanted_bytes, row.made_us,
    )])  # fmt: skip
    insert_missing(connection, PLAN_RANKS, [(number, rank, *values) for rank, values in enumerate(ranks)])
    insert_missing(connection, PLAN_SHAPES, [(
        number, position, storable(shape.key), storable(shape.dtype), json.dumps(shape.shape),
        json.dumps(shape.placements), shape.num_tensors, shape.num_chunks,
    ) for position, shape in enumerate(shapes)])  # fmt: skip
    _drop_oldest(connection)


def _drop_oldest(connection: Connection) -> None:
    """Drop what is more than `MOST_PLANS` and `MOST_RANK_ROWS`; the later a plan was kept, the higher its number."""
    sizes = select(PLANS.c.plan_id, PLANS.c.world_size).order_by(PLANS.c.plan_id.desc())
    sum_of_ranks, gone = 0, []
    for place, (number, world_size) in enumerate(connection.execute(sizes)):
        sum_of_ranks += world_size
        if place >= MOST_PLANS or sum_of_ranks > MOST_RANK_ROWS:
            gone.append(number)
    _drop(connection, gone)


def _drop(connection: Connection, numbers: Sequence[int]) -> None:
    for batch in batches(numbers, KEYS_PER_QUERY):
        for table in (PLAN_RANKS, PLAN_SHAPES, PLANS):
            connection.execute(delete(table).where(table.c.plan_id.in_(batch)))


def drop_incomplete(connection: Connection) -> None:
    """Drop plans whose rows are not all there, and rows without a plan: what a copy of a damaged index may leave."""
    whole = set(connection.execute(_summed().with_only_columns(PLANS.c.plan_id)).scalars())
    for table in (PLANS, PLAN_RANKS, PLAN_SHAPES):
        numbers = set(connection.execute(select(table.c.plan_id).distinct()).scalars())
        _drop(connection, sorted(numbers - whole))


# --- reading --------------------------------------------------------------------------------


def _summed() -> Select[Any]:
    """All plans whose rows are all there, and the least, sum and most of what their ranks do."""
    sums = [function(PLAN_RANKS.c[name]) for name in RANK_COLUMNS for function in (func.min, func.sum, func.max)]
    return (
        select(*PLANS.columns, *sums)
        .join(PLAN_RANKS, PLAN_RANKS.c.plan_id == PLANS.c.plan_id)
        .group_by(PLANS.c.plan_id)
        .having(func.count() == PLANS.c.world_size)
    )


def known_targets(connection: Connection, root: bytes) -> set[bytes]:
    """The targets that there are plans for, of this state."""
    return {
        bytes(target)
        for target in connection.execute(
            _summed().with_only_columns(PLANS.c.target).where(PLANS.c.root == root)
        ).scalars()
    }


def read_plan(connection: Connection, root: bytes, target: bytes) -> KeptPlan | None:
    """The plan for this state and target, or None."""
    query = _summed().where(PLANS.c.root == root, PLANS.c.target == target)
    return next(iter(_read(connection, query)), None)


def read_plans(
    connection: Connection, root: bytes | None = None, *, planner_version: int | None = None
) -> list[KeptPlan]:
    """All plans for `root`, or all there are, by (root, mesh, target); of one version of the planner, or any."""
    query = _by_planner(_summed(), planner_version).order_by(PLANS.c.root, PLANS.c.mesh, PLANS.c.target)
    return _read(connection, query if root is None else query.where(PLANS.c.root == root))


def _by_planner(query: Select[Any], version: int | None) -> Select[Any]:
    return query if version is None else query.where(PLANS.c.planner_version == version)


def has_plan(connection: Connection, root: bytes, wants: bytes) -> bool:
    """Whether there is a plan of this state for these wants."""
    query = select(PLANS.c.plan_id).where(PLANS.c.root == root, PLANS.c.wants == wants).limit(1)
    return connection.execute(query).first() is not None


def plans_for_wants(
    connection: Connection, wants: Iterable[tuple[bytes, bytes]]
) -> dict[tuple[bytes, bytes], KeptPlan]:
    """(state, wants) -> the youngest plan for it; where there is none, it is left out."""
    wanted = set(wants)
    found: dict[tuple[bytes, bytes], KeptPlan] = {}
    rows = rows_for(connection, _summed().order_by(PLANS.c.plan_id), PLANS.c.wants, [each for _, each in wanted])
    for plan in _kept(connection, list(rows)):
        if (plan.row.root, plan.row.wants) in wanted:
            found[plan.row.root, plan.row.wants] = plan
    return found


def cheapest_plans(
    connection: Connection,
    root: bytes,
    *,
    storage_bandwidth: float,
    network_bandwidth: float,
    targets: Sequence[bytes] | None = None,
    most_ranks: int | None = None,
    planner_version: int | None = None,
) -> list[KeptPlan]:
    """The plans for `root`, the one that takes the least time first; of equals the one of fewer ranks.

    Args:
        storage_bandwidth, network_bandwidth: Bytes per second and rank; the time is that of the rank that reads most,
            and of the one that sends or receives most, one after the other.
        targets: Only plans for these.
        most_ranks: Only plans for so many ranks at most.
        planner_version: Only plans by this version of the planner.
    """
    ranks = PLAN_RANKS.c
    sent, received = func.max(ranks.sent_bytes), func.max(ranks.received_bytes)
    seconds = cast(func.max(ranks.read_bytes), Float) / storage_bandwidth
    seconds += cast(case((sent > received, sent), else_=received), Float) / network_bandwidth
    query = _summed().where(PLANS.c.root == root).order_by(seconds, PLANS.c.world_size, PLANS.c.mesh, PLANS.c.target)
    if targets is not None:
        query = query.where(PLANS.c.target.in_(targets))
    if most_ranks is not None:
        query = query.where(PLANS.c.world_size <= most_ranks)
    return _read(connection, _by_planner(query, planner_version))


def _read(connection: Connection, query: Select[Any]) -> list[KeptPlan]:
    return _kept(connection, connection.execute(query).all())


def _kept(connection: Connection, rows: Sequence[Any]) -> list[KeptPlan]:
    """Rows of `_summed` as plans, with the shapes of each."""
    shapes: dict[int, list[ShapeRow]] = {}
    of_these = select(PLAN_SHAPES).order_by(PLAN_SHAPES.c.plan_id, PLAN_SHAPES.c.position)
    for row in rows_for(connection, of_these, PLAN_SHAPES.c.plan_id, [row.plan_id for row in rows]):
        shape, placements = tuple(map(int, json.loads(row.shape))), tuple(map(str, json.loads(row.placements)))
        shapes.setdefault(row.plan_id, []).append(
            ShapeRow(row.key, row.dtype, shape, placements, int(row.num_tensors), int(row.num_chunks))
        )
    return [KeptPlan(_plan_row(row), _totals(row), tuple(shapes.get(row.plan_id, ()))) for row in rows]


def _plan_row(row: Any) -> PlanRow:
    rules = {str(pattern): tuple(map(str, placements)) for pattern, placements in json.loads(row.rules).items()}
    names = ("world_size", "num_tensors", "num_templates", "num_chunks", "chunk_bytes", "wanted_bytes", "made_us")
    ids = bytes(row.root), bytes(row.target), bytes(row.wants)
    counts: dict[str, Any] = {name: int(getattr(row, name)) for name in names}
    return PlanRow(*ids, int(row.planner_version), row.mesh, rules, **counts)


def _totals(row: Any) -> dict[str, tuple[int, int, int]]:
    values = tuple(row)[len(PLANS.columns) :]
    return {
        name: (int(values[3 * at]), int(values[3 * at + 1]), int(values[3 * at + 2]))
        for at, name in enumerate(RANK_COLUMNS)
    }
