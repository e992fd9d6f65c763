"""Layouts as rows: the world, the axes of its mesh, and how the tensor under each key was divided.

Invariant: one set of rows for each distinct layout node, however many commits name it.
"""

from __future__ import annotations

from sqlalchemy import Connection

from cas_ckpt.index.database import execute, insert_missing
from cas_ckpt.index.schema import CUTS, LAYOUT_AXES, LAYOUTS, PLACEMENTS
from cas_ckpt.index.texts import storable
from cas_ckpt.objects.nodes import LayoutObject


def add_layout(connection: Connection, number: int, layout: LayoutObject) -> None:
    """Add the rows of the layout node `number`, unless they are there."""
    mesh = ",".join(f"{name}={size}" for name, size in layout.mesh)
    row = (number, layout.world_size, storable(mesh), len(layout.placements))
    if insert_missing(connection, LAYOUTS, [row]) == 0:
        return
    axes = [(number, axis, storable(name), size) for axis, (name, size) in enumerate(layout.mesh)]
    insert_missing(connection, LAYOUT_AXES, axes)


def drop_layouts(connection: Connection) -> None:
    """Remove the rows of the layouts whose numbers are in the table `orphaned`."""
    for table in (LAYOUTS, LAYOUT_AXES, PLACEMENTS, CUTS):
        execute(connection, f"DELETE FROM {table.name} WHERE object_id IN (SELECT object_id FROM orphaned)")
