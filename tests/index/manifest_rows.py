"""The rows of manifests and layouts without numbers, so that two indexes can be compared, and older indexes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, select

from cas_ckpt.index.database import open_database
from cas_ckpt.index.index import Index, migrations_folder
from cas_ckpt.index.schema import (
    COMMIT_TEXTS,
    DIVISION_AXES,
    DIVISION_BOXES,
    DIVISIONS,
    ENTRIES,
    LAYOUT_ALIASES,
    LAYOUT_AXES,
    LAYOUT_MESHES,
    LAYOUTS,
    NODE_SPECS,
    OBJECTS,
    PLACEMENTS,
    RAW_NAMES,
    SPECS,
    TENSORS,
    TREES,
)

DERIVED = (
    TREES, ENTRIES, RAW_NAMES, NODE_SPECS, TENSORS, LAYOUTS, LAYOUT_MESHES, LAYOUT_AXES, LAYOUT_ALIASES, PLACEMENTS,
    DIVISIONS, DIVISION_AXES, DIVISION_BOXES, COMMIT_TEXTS,
)  # fmt: skip


def said(index: Index) -> dict[str, set[tuple[Any, ...]]]:
    """Table -> its rows, objects by their ids, dtypes and shapes by their names."""
    return index.read(_said)


def _said(connection: Connection) -> dict[str, set[tuple[Any, ...]]]:
    digests = dict(map(tuple, connection.execute(select(OBJECTS.c.object_id, OBJECTS.c.digest))))
    specs = {row.spec_id: tuple(row)[2:] for row in connection.execute(select(SPECS))}
    meaning = {"object_id": digests, "node_id": digests, "child_id": digests, "spec_id": specs}
    found = {}
    for table in DERIVED:
        names = [column.name for column in table.columns]
        rows = [
            tuple(
                meaning[name][value] if name in meaning and value is not None else value
                for name, value in zip(names, row, strict=True)
            )
            for row in connection.execute(select(table))
        ]
        found[table.name] = set(rows)
        assert len(found[table.name]) == len(rows)
    return found


def make_older(place: str | Path, store_id: str, revision: str) -> None:
    """Take the index at `place` back to the schema `revision`, as that version would have left it."""
    database, config = open_database(place, store_id=store_id, read_only=False), Config()
    config.set_main_option("script_location", str(migrations_folder()))
    with database.writing() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, revision)
    database.close()
