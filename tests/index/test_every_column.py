"""Whatever is changed in a derived row, in SQLite or PostgreSQL, fsck's comparison with the packs finds it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Column, Connection, Table, and_, delete, select, update

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.packs import read_pack
from cas_ckpt.core.records import Lineage
from cas_ckpt.index import integrity
from cas_ckpt.index.rows import PackRecord
from cas_ckpt.index.schema import (
    COMMITS,
    EDGES,
    GC_CANDIDATES,
    LOCATIONS,
    METADATA,
    NOWHERE,
    OBJECTS,
    PACKS,
    REMEMBERED,
    VALUES,
)
from cas_ckpt.objects.layouts import Division, compose_layout, layout_node
from cas_ckpt.objects.spec import Box, BoxPlacement
from cas_ckpt.transfer.pack_writer import write_nodes
from tests.builders import commit, new_repository, numbers
from tests.divided import mesh, over

DERIVED = [table for table in METADATA.sorted_tables if table not in (*REMEMBERED, GC_CANDIDATES)]
SHARED = (PACKS, OBJECTS, LOCATIONS, EDGES, VALUES)  # one row too many of these is none of a pack that is there
NOT_OF_PACKS = {PACKS.c.first_seen_us, COMMITS.c.branch}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with rows in every derived table."""
    path = tmp_path_factory.mktemp("columns") / "repo"
    boxes = BoxPlacement(((Box((0, 0), (3, 4)), (2,)), (Box((3, 0), (1, 4)), (0, 3))))
    divisions = {
        "a": Division((over(mesh(4, 2), "S(0)", "R"),)),
        "b": Division((over(mesh(2, first=2), "SS(1,2)"),)),
        "c": Division((boxes,), (1,)),
    }
    layout = compose_layout(divisions, world_size=8, aliases=(("a", "b"), ("c", "d")))
    with closing(new_repository(path)) as handle:
        write_nodes(handle.store, [layout_node(layout)])
        first = commit(handle, {"w": numbers(900, 900), "x": 1, "a\0b": "text"}, metrics={"loss": 1.5})
        side = commit(handle, {"w": numbers(40, 40), "many": {f"k{at}": at for at in range(300)}}, branch="side")
        lineage = [Lineage("fine-tune-of", first.id, {"note": 1})]
        commit(handle, {"z": 1}, parents=("main", side.id), lineage=lineage, meta={"m": 2}, step=3, message="merged")
        handle.sync()
    return path


@pytest.fixture(params=["sqlite", "postgresql"])
def handle(request: pytest.FixtureRequest, path: Path, server_url: str) -> Iterator[RepositoryHandle]:
    with closing(
        RepositoryHandle.open(path, index_url=server_url if request.param == "postgresql" else None)
    ) as handle:
        handle.sync()
        yield handle


def _other(column: Column[Any], value: Any) -> Any:
    """Another value than `value`."""
    if value is None:
        return {"TEXT": "another", "BLOB": b"another", "BYTEA": b"another"}.get(str(column.type), 1)
    if isinstance(value, int):
        return value + 1000
    if isinstance(value, float):
        return value + 1
    return value + (b"x" if isinstance(value, bytes) else '"' if value.startswith("{") else " ")


class _Undone(Exception):
    """Ends a transaction."""


def _found(handle: RepositoryHandle, records: Sequence[PackRecord], change: Any) -> list[str]:
    """What fsck would say after `change`, which is undone."""
    found: list[str] = []
    try:
        with handle.index.writing() as connection:
            connection.execute(change)
            found += integrity.differences(connection, records).values()
            found += integrity.stray_rows(connection)
            raise _Undone
    except (
        _Undone,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
    ) as error:  # the latter are damage, where it is read
        if not isinstance(error, _Undone):
            found.append(str(error))
    return found


def _rows(connection: Connection, table: Table) -> list[tuple[Any, ...]]:
    query = select(table)
    if "pack_id" in table.c:
        query = query.where(table.c.pack_id != NOWHERE)
    return [tuple(row) for row in connection.execute(query.order_by(*table.primary_key))]


@pytest.mark.slow
def test_every_changed_column_and_every_lost_row_of_every_derived_table_is_found(handle: RepositoryHandle) -> None:
    records = [read_pack(handle.store, key) for key in handle.index.packs()]
    with handle.index.reading() as connection:
        assert integrity.differences(connection, records) == {}
        assert integrity.stray_rows(connection) == []
        rows = {table: _rows(connection, table) for table in DERIVED}
    for table, there in rows.items():
        assert there, table.name
        some = {there[0], there[len(there) // 2], there[-1]}
        for row in some if handle.index.place.endswith(".sqlite") else {there[-1]}:  # a question costs PostgreSQL more
            own = and_(*(column == value for column, value in zip(table.c, row, strict=True) if column.primary_key))
            assert _found(handle, records, delete(table).where(own)), (table.name, row)
            for column, value in zip(table.c, row, strict=True):
                if column not in NOT_OF_PACKS:
                    changed = update(table).where(own).values({column: _other(column, value)})
                    assert _found(handle, records, changed), (table.name, column.name, row)


@pytest.mark.slow
def test_rows_too_many_are_found(handle: RepositoryHandle) -> None:
    records = [read_pack(handle.store, key) for key in handle.index.packs()]
    with handle.index.reading() as connection:
        rows = {table: _rows(connection, table) for table in DERIVED}
    for table, there in rows.items():
        if table in SHARED:
            continue
        known = {tuple(row[: len(table.primary_key)]) for row in there}
        for at, column in enumerate(table.primary_key):
            row = list(there[-1])
            row[at] = _other(column, row[at])  # of specs those that are used no more stay, unless they take a number
            assert tuple(row[: len(table.primary_key)]) not in known
            assert _found(handle, records, table.insert().values(tuple(row))), (table.name, column.name)
