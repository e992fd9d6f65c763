"""SQL that people write, against SQLite's own ways to do more than to read, and to take long."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from cas_ckpt.errors import CorruptionError, InvalidInputError, TooLargeError
from cas_ckpt.index import query, remembered, sqlite
from cas_ckpt.index.index import Index
from cas_ckpt.index.query import QueryLimits, run_query
from cas_ckpt.index.rows import RefRow
from tests.docs.questions import QUESTIONS
from tests.index.building import STORE, commit_pack, commit_row, data_pack, digest, meta_pack
from tests.index.queries_suite import ENDLESS
from tests.index.views_suite import ask, filled, rows

SHORT = QueryLimits(1000, 1 << 24, 0.5)

NUMBERS = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "index.sqlite"


@pytest.fixture
def index(place: Path) -> Iterator[Index]:
    with Index.open(place, store_id=STORE) as index:
        index.add_packs([commit_pack("a"), data_pack("d", ["x"])])
        yield index


@pytest.mark.parametrize(
    "text",
    [
        "ATTACH 'other.sqlite' AS other", "DETACH main", "PRAGMA writable_schema = 1", "PRAGMA query_only = OFF",
        "PRAGMA journal_mode = DELETE", "PRAGMA table_info(t_commits)", "SELECT * FROM pragma_table_info('t_commits')",
        "SELECT * FROM pragma_journal_mode", "VACUUM INTO 'other.sqlite'",
        "SELECT * FROM dbstat",
        "CREATE VIRTUAL TABLE x USING fts5(y)",
        "UPDATE sqlite_master SET sql = ''", "DELETE FROM sqlite_master", "REPLACE INTO t_meta VALUES ('views', '9')",
        "INSERT INTO temp.x VALUES (1)", "RELEASE x", "END", "SELECT writefile('x', 'y')", "SELECT edit('x')",
        "CREATE TRIGGER x AFTER INSERT ON t_meta BEGIN SELECT 1; END", "SELECT readfile('/etc/passwd')",
        "SELECT * FROM sqlite_dbpage", "SELECT 1 FROM sqlite_dbpage", "SELECT * FROM SQLITE_STMT",
        "SELECT pgno FROM main.sqlite_dbpage p WHERE schema = 'main'",
        "WITH r AS (SELECT * FROM dbstat) SELECT 1 FROM r",
    ],
)  # fmt: skip
def test_nothing_but_reading_is_let_through(
    index: Index, place: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before, log = place.read_bytes(), place.with_name(place.name + "-wal").read_bytes()
    with pytest.raises(InvalidInputError, match=r"^sql: .+"):
        ask(index, text)
    assert (place.read_bytes(), place.with_name(place.name + "-wal").read_bytes()) == (before, log)
    assert not (tmp_path / "other.sqlite").exists()


@pytest.mark.parametrize("text", ["INSERT INTO t_meta VALUES ('x', 'y')", "CREATE TABLE x (y)", "DROP VIEW commits"])
def test_a_write_that_the_authorizer_missed_is_refused_by_the_connection(
    index: Index, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(query, "_authorize", lambda *_: sqlite3.SQLITE_OK)
    with monkeypatch.context() as patch:
        patch.setattr(sqlite, "reader", lambda path: lambda: sqlite.writer(path))
        with pytest.raises(InvalidInputError, match="readonly database"):
            ask(index, text)
    path = index._database.path
    assert path is not None
    with (
        closing(sqlite.reader(path)()) as connection,
        pytest.raises(sqlite3.OperationalError, match="readonly database"),
    ):
        connection.execute(text)


def test_tables_that_sqlite_has_by_itself_are_not_read(index: Index) -> None:
    """Which these are depends on how it was compiled."""
    with closing(sqlite3.connect(":memory:")) as plain:
        names = {name for (name,) in plain.execute("PRAGMA module_list")} - {"json_each", "json_tree"}
    for name in sorted(names | {"pragma_table_list"}):
        for text in ("SELECT * FROM {}", "SELECT 1 FROM {}", "SELECT count(*) FROM main.{} x"):
            with pytest.raises(InvalidInputError, match="^sql: "):
                ask(index, text.format(name))


def test_what_an_index_has_is_read_by_any_name(index: Index) -> None:
    index.write(lambda connection: connection.exec_driver_sql("CREATE VIEW theirs AS SELECT * FROM commits"))
    for text in (
        "SELECT count(*) FROM T_Commits", "SELECT c.message FROM main.COMMITS AS c",
        "SELECT 1 FROM sqlite_schema LIMIT 1",
        "SELECT name FROM sqlite_master LIMIT 1", "WITH more AS (SELECT 1 AS n) SELECT count(*) FROM more",
        "WITH t_x AS MATERIALIZED (SELECT 1) SELECT 1 FROM t_x", "SELECT 1 FROM (SELECT 2) inner_one",
        "SELECT version_num FROM alembic_version", "SELECT message FROM theirs",
    ):  # fmt: skip
        assert len(rows(index, text)) == 1, text


@pytest.mark.parametrize(
    "call", ["fts3_tokenizer('simple')", "FTS3_TOKENIZER('simple')", "load_extension('x')", "sqlite_log(1, 'x')"]
)
def test_functions_that_do_more_than_to_read_are_refused(index: Index, call: str) -> None:
    with pytest.raises(InvalidInputError, match="not authorized to use function"):
        ask(index, f"SELECT {call}")


def test_a_file_that_the_authorizer_would_let_in_is_refused_by_the_connection(
    index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(query, "_authorize", lambda *_: sqlite3.SQLITE_OK)
    with pytest.raises(InvalidInputError, match="too many attached databases"):
        ask(index, f"ATTACH '{tmp_path / 'other.sqlite'}' AS other")
    assert not (tmp_path / "other.sqlite").exists()


def test_plans_of_queries_can_be_looked_at(index: Index) -> None:
    found = rows(index, "EXPLAIN QUERY PLAN SELECT * FROM commits")
    assert any("SCAN" in row[3] for row in found)


@pytest.mark.parametrize(
    "text",
    [
        "SELECT zeroblob(2000000)", "SELECT randomblob(1000000000)", "SELECT hex(zeroblob(600000))",
        f"{NUMBERS} LIMIT 100) SELECT group_concat(hex(zeroblob(10000))) FROM r",
        f"{NUMBERS} LIMIT 100) SELECT json_group_array(hex(zeroblob(10000))) FROM r",
        "WITH RECURSIVE r(x) AS (SELECT 'ab' UNION ALL SELECT x || x FROM r) SELECT max(length(x)) FROM r",
    ],
)  # fmt: skip
def test_a_value_that_is_too_long_is_an_error(index: Index, text: str) -> None:
    with pytest.raises(TooLargeError, match=r"bytes of values.*max_bytes="):
        run_query(index, text, {}, QueryLimits(1000, 1 << 20, 60.0))


def test_numbers_and_nulls_are_counted_as_eight_bytes_each(index: Index) -> None:
    text = f"{NUMBERS} LIMIT 100) SELECT n, NULL FROM r"
    assert len(run_query(index, text, {}, QueryLimits(1000, 1600, 20.0)).rows) == 100
    with pytest.raises(TooLargeError, match="bytes of values"):
        run_query(index, text, {}, QueryLimits(1000, 1599, 20.0))


def test_rows_that_come_quickly_end_in_time_as_well(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query, "_STEPS_PER_LOOK", 1 << 30)
    with pytest.raises(TooLargeError, match="no answer within"):
        run_query(index, f"{NUMBERS}) SELECT n FROM r", {}, QueryLimits(1 << 40, 1 << 40, 0.3))


@pytest.mark.slow
def test_sorting_and_temporary_rows_take_a_bounded_memory(index: Index, place: Path) -> None:
    """In a process of its own, so that its most memory is that of the query."""
    program = f"""
        import re
        from cas_ckpt.index.index import Index
        from cas_ckpt.index.query import QueryLimits, run_query

        def most_kb():
            return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])

        with Index.open({str(place)!r}, store_id={STORE!r}) as index:
            limits = QueryLimits(1, 1 << 28, 100)
            run_query(index, "SELECT 1", {{}}, limits)
            before = most_kb()
            text = "{NUMBERS} LIMIT 150000) SELECT count(*) FROM (SELECT DISTINCT hex(randomblob(200)) FROM r)"
            print(run_query(index, text, {{}}, limits).rows, most_kb() - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True, timeout=110
    )
    answer, taken_kb = done.stdout.rsplit(" ", 1)
    assert answer == "[(150000,)]"
    assert int(taken_kb) < 30_000, "75 MB of rows were kept"


@pytest.fixture
def pressed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SIGINT comes, from another thread, when a query has looked at the clock."""
    begun = threading.Event()
    is_late = query._Taken.is_late

    def looked(taken: query._Taken) -> bool:
        begun.set()
        return is_late(taken)

    def press() -> None:
        begun.wait(60)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(query._Taken, "is_late", looked)
    thread = threading.Thread(target=press)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    thread.start()
    yield
    begun.set()
    thread.join()
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("text", [ENDLESS, f"{NUMBERS}) SELECT median(n) FROM r", f"{NUMBERS}) SELECT n FROM r"])
def test_ctrl_c_ends_a_query(index: Index, pressed: None, text: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_query(index, text, {}, QueryLimits(1 << 40, 1 << 40, 60.0))
    assert rows(index, "SELECT message FROM commits") == [("a",)]
    index.add_packs([commit_pack("b")])


@pytest.mark.slow
def test_a_signal_whose_handler_returns_lets_a_query_go_on(index: Index, pressed: None) -> None:
    came: list[object] = []
    signal.signal(signal.SIGINT, lambda *_: came.append(1))
    found = run_query(index, f"{NUMBERS} LIMIT 3000000) SELECT count(*) FROM r", {}, QueryLimits(1, 99, 60.0))
    assert (found.rows, came) == ([(3_000_000,)], [1])


class Ended(BaseException):
    """What the handler of a signal raises."""


@pytest.mark.parametrize("kind", [Ended, SystemExit, MemoryError, ValueError])
@pytest.mark.parametrize("text", [ENDLESS, f"{NUMBERS}) SELECT median(n) FROM r"])
def test_another_signal_ends_a_query_with_what_its_handler_raises(
    index: Index, pressed: None, text: str, kind: type[BaseException]
) -> None:
    error = kind("of the handler")

    def ended(*_: object) -> None:
        raise error

    signal.signal(signal.SIGINT, ended)
    with pytest.raises(kind) as caught:
        run_query(index, text, {}, QueryLimits(1, 1 << 40, 60.0))
    assert caught.value is error


def test_a_thread_asks(index: Index) -> None:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.extend(rows(index, "SELECT message FROM commits")))
    thread.start()
    thread.join()
    assert found == [("a",)]


def test_the_median_of_numbers_is_there_and_ends_in_time(index: Index) -> None:
    text = "SELECT median(column1), median(NULL), median(column1) FILTER (WHERE column1 < 3) FROM (VALUES {})"
    assert rows(index, text.format("(9), (1), (2.5), (NULL)")) == [(2.5, None, 1.75)]
    with pytest.raises(TooLargeError, match=r"within 0\.5 seconds"):
        run_query(index, f"{NUMBERS}) SELECT median(n) FROM r", {}, SHORT)


def test_a_median_keeps_no_more_than_the_bytes_of_an_answer(index: Index) -> None:
    text = f"{NUMBERS} LIMIT :n) SELECT median(n), median(NULL) FROM r"
    limits = QueryLimits(1, 8000, 20.0)
    assert run_query(index, text, {"n": 1000}, limits).rows == [(500.5, None)]
    with pytest.raises(TooLargeError, match="more than 8000 bytes of values"):
        run_query(index, text, {"n": 1001}, limits)


def test_unique_bytes_by_branch_and_week_take_twice_the_steps_for_twice_the_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (text,) = [text for title, text in QUESTIONS if "by the week" in title]
    looks = [0]
    is_late = query._Taken.is_late

    def looked(taken: query._Taken) -> bool:
        looks[0] += 1
        return is_late(taken)

    monkeypatch.setattr(query._Taken, "is_late", looked)
    steps = []
    for count in (100, 200):
        with Index.open(tmp_path / f"{count}.sqlite", store_id=STORE) as index:
            for number in range(count):
                tensors: list[object] = [f"t{at} {(number + at) // 9}" for at in range(9)]
                row = commit_row(f"c{number}", [f"c{number - 1}"] if number else [], time_us=number * 86_400_000_000)
                index.add_packs([meta_pack(f"p{number}", {f"root of c{number}": tensors}, commit=row)])
            heads = {"main": count - 1, "old": count // 2, "ft": count - 3}
            refs = [RefRow(f"refs/heads/{name}.ref", digest(f"c{at}"), 1, 1.0) for name, at in heads.items()]
            index.write(remembered.write_refs, refs)
            looks[0] = 0
            assert {name for name, *_ in run_query(index, text, {}, QueryLimits(999, 1 << 24, 60.0)).rows} == {"main"}
            steps.append(looks[0])
    assert steps[1] < 3 * steps[0]


def test_json_is_unfolded_as_in_views(index: Index) -> None:
    index.add_packs([commit_pack("b", metrics={"loss": 1.5})])
    text = "SELECT j.key, j.value FROM commits c, json_each(c.metrics) j WHERE c.message = 'b'"
    assert rows(index, text) == [("loss", 1.5)]
    assert rows(index, "SELECT value FROM json_tree('[[7]]') WHERE type = 'integer'") == [(7,)]


def test_an_index_in_memory_is_asked_as_one_in_a_file_and_others_go_on(index: Index) -> None:
    with Index.open(":memory:", store_id=STORE) as memory:
        filled(memory)
        assert rows(memory, "SELECT count(*) FROM refs") == [(4,)]
        with pytest.raises(InvalidInputError, match="it may only read"):
            ask(memory, "DELETE FROM t_commits")
        memory.add_packs([commit_pack("late")])
        assert rows(memory, "SELECT count(*) FROM commits") == [(4,)]


def test_an_index_on_a_medium_that_cannot_be_written_is_asked(index: Index, place: Path, tmp_path: Path) -> None:
    copy = tmp_path / "medium" / "index.sqlite"
    copy.parent.mkdir()
    index.close()
    shutil.copy(place, copy)
    copy.chmod(0o400)
    copy.parent.chmod(0o500)
    try:
        with Index.open(copy, store_id=STORE, read_only=True) as again:
            assert rows(again, "SELECT message FROM commits") == [("a",)]
    finally:
        copy.parent.chmod(0o700)


def test_a_damaged_index_is_said_to_be_damaged_and_not_the_query(index: Index, place: Path) -> None:
    filled(index)
    index.close()
    data = bytearray(place.read_bytes())
    data[512 * 8 : len(data) - 512 * 8] = os.urandom(len(data) - 512 * 16)
    place.write_bytes(data)
    with pytest.raises(CorruptionError, match="damaged"), Index.open(place, store_id=STORE) as again:
        ask(again, "SELECT * FROM locations")
