"""Restore plans that were made before, and how scattered the chunks of a state are.

Invariant: a plan is kept by the root that it restores and the digest of the layout that it restores
into; both are all that it depends on. Knows nothing of what a plan says.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from cas_ckpt.index.database import upsert
from cas_ckpt.index.schema import EDGES, LOCATIONS, NOWHERE, OBJECTS, PLANS
from cas_ckpt.objects.digest import ObjectKind


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A restore plan as the index keeps it.

    Attributes:
        root: The state that is restored.
        layout: Digest of the target layout (and of the version of the planner).
        target: The target layout as text.
        report: What the planner had to say.
    """

    root: bytes
    layout: bytes
    target: str
    report: bytes


def write_plan(connection: Connection, row: PlanRow) -> None:
    """Keep `row` in the place of an older one for the same root and layout."""
    upsert(connection, PLANS, (row.root, row.layout, row.target, row.report))


def read_plan(connection: Connection, root: bytes, layout: bytes) -> PlanRow | None:
    """The plan for this root and layout, or None."""
    query = select(PLANS).where(PLANS.c.root == root, PLANS.c.layout == layout)
    row = connection.execute(query).one_or_none()
    return None if row is None else PlanRow(*row)


def read_plans(connection: Connection, root: bytes | None = None) -> list[PlanRow]:
    """All plans for `root`, or all there are, by (root, target)."""
    query = select(PLANS).order_by(PLANS.c.root, PLANS.c.target)
    if root is not None:
        query = query.where(PLANS.c.root == root)
    return [PlanRow(*row) for row in connection.execute(query)]


def count_extents(connection: Connection, root: bytes) -> tuple[int, int]:
    """(chunks, extents) of the state `root`, every chunk once, a second copy of an extent not counted."""
    start = select(OBJECTS.c.object_id).where(OBJECTS.c.digest == root).cte("reached", recursive=True)
    reached = start.union(select(EDGES.c.child_id).join(start, EDGES.c.parent_id == start.c.object_id))
    extents = (
        select(LOCATIONS.c.object_id, LOCATIONS.c.first_leaf)
        .join(reached, reached.c.object_id == LOCATIONS.c.object_id)
        .where(LOCATIONS.c.pack_id != NOWHERE, LOCATIONS.c.kind == ObjectKind.CHUNK)
        .distinct()
        .subquery()
    )
    query = select(func.count(extents.c.object_id.distinct()), func.count()).select_from(extents)
    num_chunks, num_extents = connection.execute(query).one()
    return num_chunks, num_extents
