"""What happens to an index in PostgreSQL when the server, the connection or somebody else does not behave.

Everything is real: sessions are ended, a server is killed, a copy of it stands by, databases are put back.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, Engine, event, make_url

from cas_ckpt import Repository
from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.errors import (
    CkptError,
    ConflictError,
    CorruptionError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
    UnsupportedVersionError,
)
from cas_ckpt.index import contents, postgres
from cas_ckpt.index.index import Index
from cas_ckpt.index.postgres import schema_of
from cas_ckpt.index.rows import REVISIONS
from cas_ckpt.ops.fsck.check import check_open
from cas_ckpt.ops.fsck.repair import rebuild_index, refill_index
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.gc.plan import GcOptions
from cas_ckpt.ops.history.log import log_commits
from tests.builders import commit, leave_garbage, numbers, stored_arrays
from tests.index.building import STORE, data_pack
from tests.index.conftest import Server, running_server
from tests.index.manifest_rows import make_older
from tests.listener import Listener
from tests.processes import Forked

pytestmark = pytest.mark.slow

_ENDED = "terminating connection|closed the connection|: the connection is lost;"
"""How drivers of several versions say that the server ended a session."""

EAGER = GcOptions(min_age_s=0, reflog_expire_s=0, max_unused=0)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One of our own, as it is killed now and then."""
    with running_server() as server:
        yield server


@pytest.fixture
def other(server: Server) -> Iterator[psycopg.Connection[Any]]:
    """Another client of the server."""
    with psycopg.connect(server.plain_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def path(tmp_path: Path) -> Path:
    init_repository(tmp_path / "repo").close()
    return tmp_path / "repo"


def _opened(path: Path, server: Server, **how: Any) -> closing[RepositoryHandle]:
    return closing(RepositoryHandle.open(path, index_url=server.url, **how))


def _engine(handle: RepositoryHandle) -> Engine:
    return handle.index._database.engine


@contextmanager
def _at_statement(engine: Engine, wanted: int, happen: Callable[[Connection], None]) -> Iterator[list[int]]:
    """Let something happen before the statement of that number, or the commit of its transaction; yields the count."""
    count = [0]

    def look(connection: Connection, *_: Any) -> None:
        count[0] += 1
        if count[0] == wanted:
            happen(connection)

    for name in ("before_cursor_execute", "commit"):
        event.listen(engine, name, look)
    try:
        yield count
    finally:
        for name in ("before_cursor_execute", "commit"):
            event.remove(engine, name, look)


def _state(step: int) -> dict[str, Any]:
    return {"w": numbers(64, 64, seed=step), "same": numbers(64, 64), "step": step}


def _all_is_well(path: Path, server: Server, ids: list[str]) -> None:
    """What was said to be committed is there, the index is as the packs say, and commits go on."""
    with _opened(path, server) as handle:
        ids.append(commit(handle, _state(100 + len(ids))).id)
        found = [row.id for row in log_commits(handle)]
        assert set(ids) <= set(found)
        assert stored_arrays(handle, next(log_commits(handle)).root).keys() == {"w", "same"}
        assert check_open(handle).ok


def test_a_session_that_is_ended_before_any_statement_of_a_commit_loses_nothing(
    path: Path, server: Server, other: psycopg.Connection[Any]
) -> None:
    def end(connection: Connection) -> None:
        driver: Any = connection.connection.driver_connection
        other.execute("SELECT pg_terminate_backend(%s, 5000)", (driver.info.backend_pid,))

    with _opened(path, server) as handle:
        ids = [commit(handle, _state(0)).id]
        handle.forget_chunks()
        with _at_statement(_engine(handle), 0, end) as count:
            ids.append(commit(handle, _state(1)).id)
    assert count[0] > 20
    with _opened(path, server) as handle:
        for number in range(1, count[0] + 1):
            handle.forget_chunks()  # as the first commit of a handle, which asks the most
            with _at_statement(_engine(handle), number, end), suppress(TransientStorageError):
                ids.append(commit(handle, _state(1 + number)).id)
        ids.append(commit(handle, _state(0)).id)
    assert len(ids) > count[0] / 2  # most of what is asked is asked again, or after the commit was made
    _all_is_well(path, server, ids)


def test_a_session_that_is_ended_while_rows_are_copied_leaves_none_of_them(
    server: Server, other: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = data_pack("d", range(5000))
    with Index.open(server.url, store_id=STORE) as index:
        write, count = psycopg.Copy.write_row, [0]

        def write_row(copy: Any, row: Any) -> None:
            count[0] += 1
            if count[0] == 2500:
                other.execute("SELECT pg_terminate_backend(%s, 5000)", (copy.connection.info.backend_pid,))
            write(copy, row)

        monkeypatch.setattr(psycopg.Copy, "write_row", write_row)
        with pytest.raises(TransientStorageError, match=_ENDED):
            index.add_packs([pack])
        monkeypatch.undo()
        assert (index.packs(), index.read(contents.chunks_at_most)) == ({}, 0)
        assert index.add_packs([pack]) == 1
        assert index.read(contents.chunks_at_most) == 5000
    Index.discard(server.url, store_id=STORE)


@pytest.mark.parametrize(("verb", "part"), [("commit", 0.3), ("commit", 0.95), ("gc", 0.7), ("rebuild", 0.8)])
def test_a_server_that_is_killed_and_starts_again_in_the_middle_of_a_verb_loses_nothing(
    path: Path, server: Server, verb: str, part: float
) -> None:
    def work(handle: RepositoryHandle) -> str | None:
        if verb == "commit":
            return commit(handle, _state(50)).id
        collect_garbage(handle, EAGER) if verb == "gc" else refill_index(handle)
        return None

    with _opened(path, server) as handle:
        ids = [commit(handle, _state(0)).id]
        leave_garbage(handle)
        with _every_statement(0, server) as count:
            made = work(handle)
        leave_garbage(handle)
        ids += [made] if made else []
        with _every_statement(max(int(part * count[0]), 1), server), suppress(CkptError):
            made = work(handle)
            ids += [made] if made else []
        collect_garbage(handle, EAGER)  # through the same handle; a dead one is taken over
        ids.append(commit(handle, _state(60)).id)
    _all_is_well(path, server, ids)


@contextmanager
def _every_statement(wanted: int, server: Server) -> Iterator[list[int]]:
    """As `_at_statement`, of all engines: that of an index beside another one, too."""
    with _at_statement(Engine, wanted, lambda _: server.restart()) as count:  # type: ignore[arg-type]
        yield count


def test_connections_that_died_while_nobody_used_them_are_not_noticed(
    path: Path, server: Server, other: psycopg.Connection[Any]
) -> None:
    with _opened(path, server) as handle, Repository.open(path, index_url=server.url) as repo:
        for step in range(3):
            info = commit(handle, _state(step))
            assert next(iter(repo.log("main"))).id == info.id
            end_all = "SELECT count(pg_terminate_backend(pid, 5000)) FROM pg_stat_activity WHERE application_name = %s"
            ended = other.execute(end_all, ("cas_ckpt",)).fetchone()
            assert ended is not None and ended[0] >= 2
            assert repo.sql("SELECT count(*) FROM commits").rows == ((step + 1,),)
        server.restart()
        commit(handle, _state(9))
        assert len(list(repo.log("main"))) == 4


def test_a_server_that_is_down_is_said_to_be_and_the_repository_can_be_used_without_it(
    path: Path, server: Server, tmp_path: Path
) -> None:
    with _opened(path, server) as handle:
        info = commit(handle, _state(0))
        server.kill()
        try:
            with pytest.raises(TransientStorageError, match="out of reach"):
                commit(handle, _state(1))
            with pytest.raises(TransientStorageError, match="out of reach"):
                RepositoryHandle.open(path, index_url=server.url)
            with Repository.open(path, index_url=str(tmp_path / "mine.sqlite")) as repo:
                assert next(iter(repo.log("main"))).id == info.id
        finally:
            server.start()
        commit(handle, _state(1))
    _all_is_well(path, server, [info.id])


def test_a_database_that_was_lost_is_filled_again_from_the_packs(
    path: Path, server: Server, other: psycopg.Connection[Any]
) -> None:
    with _opened(path, server) as handle:
        ids = [commit(handle, _state(step)).id for step in range(3)]
        other.execute(f'DROP SCHEMA "{schema_of(handle.config.store_id)}" CASCADE'.encode())
        with pytest.raises(CorruptionError, match="index rebuild"):
            list(log_commits(handle))
    _all_is_well(path, server, ids)


def test_a_database_that_was_put_back_to_an_older_copy_catches_up(
    path: Path, server: Server, other: psycopg.Connection[Any], tmp_path: Path
) -> None:
    with _opened(path, server) as handle:
        schema = schema_of(handle.config.store_id)
        ids = [commit(handle, _state(0)).id]
        leave_garbage(handle)
        older = server.run("pg_dump", "-n", schema, server.plain_url)
        collect_garbage(handle, EAGER)
        ids.append(commit(handle, _state(1)).id)
        leave_garbage(handle)
        collect_garbage(handle, EAGER)
        other.execute(f'DROP SCHEMA "{schema}" CASCADE'.encode())
        (server.folder / "older.sql").write_text(older)
        (server.folder / "older.sql").chmod(0o644)
        server.run("psql", "-q", "-v", "ON_ERROR_STOP=1", "-f", str(server.folder / "older.sql"), server.plain_url)
        ids.append(commit(handle, _state(2)).id)  # through a handle that was open all the time
    _all_is_well(path, server, ids)


def test_tables_of_another_repository_are_refused_and_stay(
    path: Path, server: Server, other: psycopg.Connection[Any], tmp_path: Path
) -> None:
    init_repository(tmp_path / "second").close()
    with _opened(path, server) as handle:
        commit(handle, _state(0))
        mine = schema_of(handle.config.store_id)
    with _opened(tmp_path / "second", server) as handle:
        theirs = schema_of(handle.config.store_id)
    other.execute(f'DROP SCHEMA "{theirs}" CASCADE; ALTER SCHEMA "{mine}" RENAME TO "{theirs}"'.encode())
    for read_only in (False, True):
        with pytest.raises(ConflictError, match="of another repository"):
            RepositoryHandle.open(tmp_path / "second", index_url=server.url, read_only=read_only)
    assert other.execute(f'SELECT count(*) FROM "{theirs}".t_commits'.encode()).fetchone() == (1,)
    assert rebuild_index(tmp_path / "second", index_url=server.url).stats.num_commits == 0
    with _opened(tmp_path / "second", server) as handle:
        assert list(log_commits(handle)) == []


def test_tables_of_a_later_version_are_refused(path: Path, server: Server, other: psycopg.Connection[Any]) -> None:
    with _opened(path, server) as handle:
        schema = schema_of(handle.config.store_id)
    other.execute(f"UPDATE \"{schema}\".alembic_version SET version_num = '9999'".encode())
    for read_only in (False, True):
        with pytest.raises(UnsupportedVersionError, match=r"9999.*upgrade cas_ckpt"):
            RepositoryHandle.open(path, index_url=server.url, read_only=read_only)


def _open_and_commit(path: Path, url: str, name: str, branch: str, count: int) -> None:
    with closing(RepositoryHandle.open(path, index_url=url)) as handle:
        for step in range(count):
            commit(handle, {"same": numbers(64, 64, seed=step), "own": name}, branch=branch, message=f"{name} {step}")


def test_hosts_that_upgrade_an_index_at_once_wait_for_one_another(path: Path, server: Server) -> None:
    with _opened(path, server) as handle:
        commit(handle, _state(0))
        make_older(server.url, handle.config.store_id, REVISIONS[0])
    processes = [Forked(_open_and_commit, path, server.url, str(each), "main", 1) for each in range(3)]
    assert [process.wait(timeout=100) for process in processes] == [0] * 3
    with _opened(path, server) as handle:
        assert len(list(log_commits(handle))) == 4
        assert check_open(handle).ok


def test_eight_processes_that_commit_the_same_chunks_at_once_lose_no_commit_and_never_deadlock(
    path: Path, server: Server, other: psycopg.Connection[Any]
) -> None:
    """Half of them on one branch, the others on a branch each."""
    with _opened(path, server) as handle:
        commit(handle, _state(0))
    branches = ["main"] * 4 + [f"b{each}" for each in range(4)]
    processes = [
        Forked(_open_and_commit, path, server.url, str(each), branch, 3) for each, branch in enumerate(branches)
    ]
    assert [process.wait(timeout=100) for process in processes] == [0] * 8
    with _opened(path, server) as handle:
        said = {row.message for branch in set(branches) for row in log_commits(handle, [branch])}
        assert said >= {f"{each} {step}" for each in range(8) for step in range(3)}
        assert check_open(handle).ok
    assert other.execute("SELECT sum(deadlocks) FROM pg_stat_database").fetchone() == (0,)


def test_a_limit_of_the_server_for_statements_ends_a_verb_with_nothing_half_done(
    server: Server, other: psycopg.Connection[Any]
) -> None:
    with Index.open(server.url, store_id=STORE) as index:
        index.add_packs([data_pack("before", ["a"])])
    other.execute("ALTER ROLE postgres SET statement_timeout = '300ms'")
    try:
        with Index.open(server.url, store_id=STORE) as index, psycopg.connect(server.plain_url) as blocking:
            blocking.execute(f'LOCK TABLE "{schema_of(STORE)}".t_edges, "{schema_of(STORE)}".t_locations'.encode())
            with pytest.raises(TransientStorageError, match="time limit for statements"):
                index.add_packs([data_pack("d", ["b"])])
            blocking.rollback()
            assert index.packs().keys() == {"before"}
            assert index.add_packs([data_pack("d", ["b"])]) == 1
    finally:
        other.execute("ALTER ROLE postgres RESET statement_timeout")
        Index.discard(server.url, store_id=STORE)


def test_sessions_that_somebody_else_used_last_are_no_danger(
    path: Path, server: Server, other: psycopg.Connection[Any], tmp_path: Path
) -> None:
    """As behind PgBouncer, which gives every transaction another session: here it looks at another repository's."""
    init_repository(tmp_path / "second").close()
    with _opened(tmp_path / "second", server) as handle:
        commit(handle, {"w": numbers(8, 8)})
        theirs = schema_of(handle.config.store_id)

    def used_by_another(raw: Any, *_: Any) -> None:
        with raw.cursor() as cursor:
            cursor.execute(f'SET search_path TO "{theirs}"; DEALLOCATE ALL; SET lock_timeout = 1'.encode())
        raw.commit()

    with _opened(path, server) as handle:
        event.listen(_engine(handle), "checkout", used_by_another)
        ids = [commit(handle, _state(step)).id for step in range(8)]  # a driver prepares what it sees five times
        leave_garbage(handle)
        assert collect_garbage(handle, EAGER).deleted_packs
        assert {row.id for row in log_commits(handle)} >= set(ids)
        assert check_open(handle).ok
        with Repository.open(path, index_url=server.url) as repo:
            event.listen(repo._handle.index._database.engine, "checkout", used_by_another)
            assert repo.sql("SELECT count(*) FROM commits").rows[0][0] >= len(ids)
    assert other.execute(f'SELECT count(*) FROM "{theirs}".t_commits'.encode()).fetchone() == (1,)


def test_a_standby_answers_readers_and_says_to_writers_what_it_is(path: Path, server: Server) -> None:
    with _opened(path, server) as handle:
        info = commit(handle, _state(0))
    standby = server.folder.with_name(f"{server.folder.name}-standby")
    server.run("pg_basebackup", "-D", str(standby), "-R", "-c", "fast", "-d", server.plain_url)
    for left in standby.glob(".s.PGSQL*"):
        left.unlink()
    options = f"-h '' -k {standby}"
    server.run("pg_ctl", "-w", "-D", str(standby), "-o", options, "-l", str(standby / "log"), "start")
    try:
        url = make_url(server.url).update_query_dict({"host": str(standby)}).render_as_string(hide_password=False)
        with Repository.open(path, index_url=url, read_only=True) as repo:
            assert [row.id for row in repo.log("main")] == [info.id]
            assert len(repo.ls("main")) == 3
            assert repo.load("main")["step"] == 0
            assert repo.sql("SELECT count(*) FROM commits").rows == ((1,),)
        with Repository.open(path, index_url=url, read_only=None) as repo:  # as the command line does
            assert [row.id for row in repo.log("main")] == [info.id]
        with pytest.raises(PermissionDeniedError, match="standby.*read_only=True"):
            RepositoryHandle.open(path, index_url=url)
    finally:
        with suppress(subprocess.CalledProcessError):
            server.run("pg_ctl", "-w", "-D", str(standby), "-m", "immediate", "stop")
        shutil.rmtree(standby, ignore_errors=True)


def test_a_server_that_takes_the_connection_and_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(postgres._TIMES, "connect_timeout", 2)  # seconds; the driver takes no less

    def listens(connection: socket.socket) -> None:
        with connection:
            while connection.recv(1 << 16):
                pass

    with Listener(listens) as silent:
        url = silent.endpoint.replace("http://", "postgresql+psycopg://ann@")
        with pytest.raises(StorageError, match="timeout"):
            Index.open(f"{url}/ckpt", store_id=STORE)
