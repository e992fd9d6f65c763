"""SQL that people write, against PostgreSQL's own ways to do more than to read."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.errors import (
    ConflictError,
    InvalidInputError,
    PermissionDeniedError,
    TooLargeError,
    TransientStorageError,
)
from cas_ckpt.index.index import Index
from cas_ckpt.index.postgres import schema_of
from cas_ckpt.index.query import QueryLimits, run_query
from tests.docs.pages import DOCS
from tests.docs.questions import answer, make_example, shown
from tests.index.building import commit_pack, data_pack
from tests.index.queries_suite import all_rows
from tests.index.views_suite import ask, filled, rows

pytestmark = pytest.mark.slow

SHORT = QueryLimits(1000, 1 << 24, 0.5)
STORE = "queries"


@pytest.fixture
def index(server_url: str) -> Iterator[Index]:
    Index.discard(server_url, store_id=STORE)
    with Index.open(server_url, store_id=STORE) as index:
        index.add_packs([commit_pack("a"), data_pack("d", ["x"])])
        yield index
    Index.discard(server_url, store_id=STORE)


@pytest.fixture
def other(server_url: str) -> Iterator[psycopg.Connection[Any]]:
    """Another client of the server."""
    with psycopg.connect(server_url.replace("+psycopg", ""), autocommit=True) as connection:
        yield connection


@pytest.mark.parametrize(
    "text",
    [
        "COPY t_commits TO PROGRAM 'touch /tmp/owned'", "COPY (SELECT 1) TO STDOUT", "RESET ALL", "LISTEN x",
        "DO $$ BEGIN DELETE FROM t_commits; END $$", "SET statement_timeout = 0", "LOCK TABLE t_commits", "LOAD 'x'",
        "PREPARE x AS SELECT 1", "EXECUTE x", "DECLARE x CURSOR FOR SELECT 1", "FETCH ALL FROM cas_ckpt_sql",
        "CLOSE ALL", "DISCARD ALL", "TRUNCATE t_commits", "GRANT ALL ON t_commits TO PUBLIC", "CREATE EXTENSION dblink",
        "MERGE INTO t_commits USING t_refs ON true WHEN MATCHED THEN DELETE", "CALL x()", "SHOW ALL",
        "EXPLAIN SELECT 1", "SELECT nextval('x')", "SELECT lo_create(0)", "SELECT * FROM t_commits FOR UPDATE",
        "WITH x AS (DELETE FROM t_commits RETURNING *) SELECT * FROM x", "SELECT * INTO x FROM t_commits",
        "SELECT set_config('transaction_read_only', 'off', true)", "SELECT E'\\'; DELETE FROM t_commits; --'; SELECT 1",
    ],
)  # fmt: skip
def test_no_other_statement_is_taken(index: Index, text: str) -> None:
    before = all_rows(index)
    with pytest.raises(InvalidInputError, match=r"^sql: .+") as caught:
        run_query(index, text, {}, SHORT)
    assert "\n" not in str(caught.value)
    assert all_rows(index) == before


def test_a_write_that_a_query_hides_is_refused_by_the_read_only_transaction(
    index: Index, other: psycopg.Connection[Any]
) -> None:
    other.execute("CREATE SCHEMA IF NOT EXISTS lab")
    other.execute(
        f"CREATE OR REPLACE FUNCTION lab.wipe() RETURNS int LANGUAGE sql AS "
        f'$$ DELETE FROM "{schema_of(STORE)}".t_commits; SELECT 1 $$'
    )
    with pytest.raises(InvalidInputError, match="read-only transaction"):
        ask(index, "SELECT lab.wipe()")
    assert rows(index, "SELECT count(*) FROM commits") == [(1,)]
    other.execute("DROP SCHEMA lab CASCADE")


@pytest.mark.parametrize(
    "text",
    [
        "SELECT pg_sleep(100)", "SELECT set_config('statement_timeout', '0', false), pg_sleep(100)",
        "SELECT pg_sleep(0.2) FROM generate_series(1, 100)", "SELECT pg_advisory_lock(7), pg_sleep(100)",
        "SELECT count(*) FROM generate_series(1, 1000000000000)",
        "SELECT repeat('x', 1000000000) FROM generate_series(1, 100)",
        "SELECT set_config('statement_timeout', '0', true) FROM generate_series(1, 1) UNION ALL "
        "SELECT pg_sleep(0.05)::text FROM generate_series(1, 1000)",
    ],
)  # fmt: skip
def test_the_server_ends_what_sleeps_or_goes_on_for_ever(
    index: Index, other: psycopg.Connection[Any], text: str
) -> None:
    begun = time.monotonic()
    with pytest.raises(TooLargeError, match=r"within 0\.5 seconds|bytes of values"):
        run_query(index, text, {}, SHORT)
    assert time.monotonic() - begun < 20
    assert _sessions(other) == 0


def test_rows_are_asked_for_in_pieces_and_the_server_makes_no_more(index: Index) -> None:
    text = "SELECT 1 / (2000 - n) FROM generate_series(1, 3000) n"
    with pytest.raises(TooLargeError, match="more than 10 rows"):
        run_query(index, text, {}, QueryLimits(10, 1 << 20, 20.0))
    assert rows(index, "SELECT n, n::text FROM generate_series(1, 3000) n") == [(n, str(n)) for n in range(1, 3001)]


def test_what_a_query_locks_or_sets_ends_with_it(index: Index, other: psycopg.Connection[Any]) -> None:
    ask(index, "SELECT pg_advisory_lock(99), set_config('work_mem', '1GB', false)")
    assert _sessions(other) == 0
    assert other.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'").fetchall() == [(0,)]
    assert rows(index, "SELECT current_setting('work_mem') <> '1GB'") == [(1,)]
    index.add_packs([data_pack("e", ["y"])])
    assert _sessions(other) == 0


def test_backslashes_are_read_as_by_the_standard_whatever_the_server_is_set_to(
    index: Index, server_url: str, other: psycopg.Connection[Any]
) -> None:
    ((database,),) = other.execute("SELECT current_database()").fetchall()
    other.execute(f"ALTER DATABASE {database} SET standard_conforming_strings = off")
    try:
        with Index.open(server_url, store_id=STORE) as again:
            assert rows(again, "SELECT '\\', :a, current_setting('standard_conforming_strings')", a=1) == [
                ("\\", 1, "on")
            ]
    finally:
        other.execute(f"ALTER DATABASE {database} RESET standard_conforming_strings")


def _sessions(other: psycopg.Connection[Any]) -> int:
    """Sessions of queries that did not end; the server takes a moment to end one."""
    for _ in range(50):
        query = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE %s AND pid <> pg_backend_pid()"
        ((count,),) = other.execute(query, ("%cas_ckpt_sql%",)).fetchall()
        if not count:
            break
        time.sleep(0.1)
    return int(count)


def test_values_that_only_this_database_has_become_numbers_and_text(index: Index) -> None:
    text = (
        "SELECT 12::numeric, 1.5::numeric, 'NaN'::numeric, true, date '2026-01-02', '[1]'::jsonb, ARRAY[1, 2], "
        "'\\x00'::bytea"
    )
    ((whole, part, nan, *others),) = rows(index, text)
    assert (whole, type(whole), part) == (12, int, 1.5)
    assert nan != nan
    assert others == [1, "2026-01-02", "[1]", "[1, 2]", b"\0"]


def test_a_number_of_many_digits_is_text_and_counted_as_long_as_it_is(index: Index) -> None:
    ((number, whole),) = rows(index, "SELECT 10::numeric ^ 5000, 9223372036854775807::numeric + 1")
    assert (number.split(".")[0], whole) == ("1" + 5000 * "0", 1 << 63)
    for power in (5000, 300):
        text = f"SELECT 10::numeric ^ {power} FROM generate_series(1, 300)"
        with pytest.raises(TooLargeError, match="bytes of values"):
            run_query(index, text, {}, QueryLimits(1000, 1 << 15, 20.0))


def test_each_piece_of_rows_has_the_time_that_is_left(index: Index) -> None:
    text = (
        "SELECT current_setting('statement_timeout'), current_setting('idle_in_transaction_session_timeout'), "
        "pg_sleep(0.001) FROM generate_series(1, 250)"
    )
    found = rows(index, text)
    assert len({row[0] for row in found}) == 3
    assert all(row[1] != "0" for row in found)


def test_more_time_than_the_server_takes_is_as_much_as_it_takes(index: Index) -> None:
    assert run_query(index, "SELECT 1", {}, QueryLimits(10, 1000, 1e9)).rows == [(1,)]


def test_a_query_that_somebody_cancelled_did_not_take_too_long(index: Index) -> None:
    with pytest.raises(TransientStorageError, match="cancel"):
        run_query(index, "SELECT pg_cancel_backend(pg_backend_pid()), pg_sleep(5)", {}, QueryLimits(10, 1000, 60.0))


def test_another_driver_is_named(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index._database.engine.dialect, "driver", "pg8000")
    with pytest.raises(InvalidInputError, match="found the driver pg8000"):
        ask(index, "SELECT 1")


def test_what_the_server_is_not_ready_for_is_an_error_of_the_query(index: Index) -> None:
    with pytest.raises(InvalidInputError, match=r"^sql: recovery is not in progress$"):
        ask(index, "SELECT pg_wal_replay_pause()")


def test_ctrl_c_ends_a_query_here_as_well(index: Index, other: psycopg.Connection[Any]) -> None:
    def press() -> None:
        text = "SELECT count(*) FROM pg_stat_activity WHERE state = 'active' AND query LIKE 'FETCH%'"
        while other.execute(text).fetchall() == [(0,)]:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_query(index, "SELECT pg_sleep(100)", {}, QueryLimits(10, 1000, 60.0))
    thread.join()
    signal.signal(signal.SIGINT, before)
    assert _sessions(other) == 0
    index.add_packs([data_pack("e", ["y"])])


def test_a_role_that_may_only_read_the_views_can_ask_and_nothing_else(
    index: Index, server_url: str, other: psycopg.Connection[Any]
) -> None:
    schema = f'"{schema_of(STORE)}"'
    other.execute("DROP ROLE IF EXISTS reader")
    other.execute("CREATE ROLE reader LOGIN")
    try:
        url = server_url.replace("://postgres:", "://reader:")
        assert url != server_url
        with pytest.raises(PermissionDeniedError, match="'reader' may not use the schema"):
            Index.open(url, store_id=STORE, read_only=True)
        other.execute(f"GRANT USAGE ON SCHEMA {schema} TO reader")
        other.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO reader")
        with Index.open(url, store_id=STORE, read_only=True) as reader:
            assert rows(reader, "SELECT message FROM commits") == [("a",)]
            with pytest.raises(InvalidInputError, match="permission denied"):
                ask(reader, "SELECT pg_read_file('/etc/passwd')")
    finally:
        other.execute("DROP OWNED BY reader")
        other.execute("DROP ROLE reader")


def test_a_view_of_somebody_that_rests_on_ours_is_named_and_stays(
    index: Index, server_url: str, other: psycopg.Connection[Any]
) -> None:
    schema = f'"{schema_of(STORE)}"'
    other.execute(f"CREATE VIEW public.mine AS SELECT message FROM {schema}.commits")
    try:
        other.execute(f"UPDATE {schema}.t_meta SET value = '0 commits' WHERE key = 'views'")
        with pytest.raises(ConflictError, match="(?s)mine.*drop that, try again"):
            Index.open(server_url, store_id=STORE)
        assert other.execute("SELECT message FROM public.mine").fetchall() == [("a",)]
    finally:
        other.execute("DROP VIEW public.mine")
    with Index.open(server_url, store_id=STORE) as again:
        assert rows(again, "SELECT message FROM commits") == [("a",)]


@pytest.mark.parametrize("view", ["entries", "changes", "key_changes"])
def test_no_commit_costs_a_reading_of_all_entries(index: Index, other: psycopg.Connection[Any], view: str) -> None:
    filled(index)
    other.execute(f'SET search_path TO "{schema_of(STORE)}"'.encode())
    plan = "\n".join(line for (line,) in other.execute(f"EXPLAIN SELECT * FROM {view}".encode()))
    assert "Recursive Union" in plan
    assert "t_entries_pkey" in plan
    assert re.search(r"Seq Scan on t_entries [eiwx]\b", plan) is None  # `p` are parts of one composite tensor


def test_the_questions_of_the_docs_have_the_same_answers_here(server_url: str, tmp_path: Path) -> None:
    """What the page shows is made on SQLite (tests/docs/test_made_parts.py)."""
    make_example(tmp_path / "ckpts", index_url=server_url)
    page = (DOCS / "sql.md").read_text()
    assert shown(lambda query: answer(tmp_path / "ckpts", query, "--index", server_url)) in page
    with closing(RepositoryHandle.open(tmp_path / "ckpts")) as handle:
        Index.discard(server_url, store_id=handle.config.store_id)
