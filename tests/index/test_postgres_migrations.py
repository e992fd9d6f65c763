"""Migrations on PostgreSQL: what they make is what the code declares; up and down from every released schema."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.index import remembered
from cas_ckpt.index.database import open_database
from cas_ckpt.index.index import Index
from cas_ckpt.index.postgres import quoted, schema_of
from cas_ckpt.index.rows import REVISIONS, RefRow
from cas_ckpt.index.schema import METADATA
from cas_ckpt.ops.fsck.check import check_open
from cas_ckpt.ops.history.log import log_commits
from tests.builders import commit, numbers
from tests.index.building import data_pack, digest
from tests.index.manifest_rows import make_older, said

pytestmark = pytest.mark.slow

STORE = "migrated"
TABLES = """
    SELECT c.table_name, c.column_name, c.data_type, c.is_nullable, c.collation_name
    FROM information_schema.columns c JOIN information_schema.tables t USING (table_schema, table_name)
    WHERE c.table_schema = %s AND t.table_type = 'BASE TABLE' ORDER BY 1, c.ordinal_position
"""
INDEXES = "SELECT tablename, replace(indexdef, schemaname, '') FROM pg_indexes WHERE schemaname = %s ORDER BY 1, 2"


@pytest.fixture
def other(server_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(server_url.replace("+psycopg", ""), autocommit=True) as connection:
        yield connection


@pytest.fixture
def place(server_url: str) -> Iterator[str]:
    Index.discard(server_url, store_id=STORE)
    yield server_url
    Index.discard(server_url, store_id=STORE)


def _shape(other: psycopg.Connection[Any], schema: str) -> tuple[list[Any], list[Any]]:
    return other.execute(TABLES, (schema,)).fetchall(), other.execute(INDEXES, (schema,)).fetchall()


def test_what_the_migrations_make_is_what_the_code_declares(place: str, other: psycopg.Connection[Any]) -> None:
    Index.open(place, store_id=STORE).close()
    database = open_database(place, store_id=STORE, read_only=False)
    with database.reading() as connection:
        found = compare_metadata(MigrationContext.configure(connection), METADATA)
    database.close()
    assert [each for each in found if "alembic_version" not in str(each)] == []


@pytest.mark.parametrize("revision", [*REVISIONS[:-1], "base"])
def test_down_to_every_schema_and_up_again_makes_the_same_tables_and_keeps_what_is_kept(
    place: str, other: psycopg.Connection[Any], revision: str
) -> None:
    with Index.open(place, store_id=STORE) as index:
        index.add_packs([data_pack("d", range(3))], ref=RefRow("refs/heads/main", digest("c"), 3, 1.0))
    before = _shape(other, schema_of(STORE))
    make_older(place, STORE, revision)
    older = {table for table, *_ in _shape(other, schema_of(STORE))[0]}
    packs = "t_packs" if revision >= "0004" else "packs"
    assert older == {"alembic_version"} if revision == "base" else packs in older
    with Index.open(place, store_id=STORE) as index:
        assert index.packs() == ({} if revision == "base" else {"d": 10_000})
        assert set(index.read(remembered.read_refs)) == (set() if revision == "base" else {"refs/heads/main"})
    assert _shape(other, schema_of(STORE)) == before


def test_an_upgrade_that_is_broken_off_leaves_the_older_schema(
    place: str, other: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cas_ckpt.index import views

    with Index.open(place, store_id=STORE) as index:
        index.add_packs([data_pack("d", range(3))])
    make_older(place, STORE, REVISIONS[0])
    before = _shape(other, schema_of(STORE))

    def fail(_: object) -> None:
        raise OSError("cut")

    monkeypatch.setattr(views, "make_views", fail)
    with pytest.raises(OSError, match="cut"):
        Index.open(place, store_id=STORE)
    monkeypatch.undo()
    assert _shape(other, schema_of(STORE)) == before
    with Index.open(place, store_id=STORE) as index:
        assert index.packs() == {"d": 10_000}


@pytest.mark.parametrize("revision", REVISIONS[:-1])
def test_an_index_of_every_released_schema_is_upgraded_and_used(
    tmp_path: Path, server_url: str, revision: str, other: psycopg.Connection[Any]
) -> None:
    init_repository(tmp_path / "repo").close()
    with closing(RepositoryHandle.open(tmp_path / "repo", index_url=server_url)) as handle:
        for step in range(3):
            commit(handle, {"w": numbers(64, 64, seed=step), "step": step}, metrics={"loss": 1.0 / (step + 1)})
        wanted, store_id = said(handle.index), handle.config.store_id
    make_older(server_url, store_id, revision)
    with closing(RepositoryHandle.open(tmp_path / "repo", index_url=server_url)) as handle:
        assert said(handle.index) == wanted
        commit(handle, {"w": numbers(64, 64, seed=9)})
        assert len(list(log_commits(handle))) == 4
        assert check_open(handle).ok
    other.execute(f"DROP SCHEMA {quoted(schema_of(store_id))} CASCADE".encode())
