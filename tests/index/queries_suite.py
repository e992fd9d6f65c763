"""SQL that people write, whatever the database: what it is given, what it may not do, and where it ends."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from sqlalchemy import select

from cas_ckpt.errors import InvalidInputError, TooLargeError
from cas_ckpt.index import contents
from cas_ckpt.index.index import Index
from cas_ckpt.index.query import QueryLimits, run_query
from cas_ckpt.index.schema import METADATA
from tests.index.building import commit_pack, data_pack
from tests.index.views_suite import ask, rows

ENDLESS = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT count(*) FROM r"

CHANGES = [
    "INSERT INTO t_packs VALUES (77, 'x', 1, 1, 1, 1)",
    "UPDATE t_commits SET message = 'x'",
    "DELETE FROM t_commits",
    "DROP TABLE t_commits",
    "DROP VIEW commits",
    "ALTER TABLE t_commits ADD COLUMN x int",
    "CREATE TABLE x (y int)",
    "CREATE TEMPORARY TABLE x (y int)",
    "CREATE VIEW x AS SELECT 1",
    "CREATE INDEX x ON t_commits (step)",
    "WITH x AS (SELECT 1) DELETE FROM t_commits",
    "BEGIN",
    "COMMIT",
    "ROLLBACK",
    "SAVEPOINT x",
    "EXPLAIN ANALYZE DELETE FROM t_commits",
    "VACUUM",
    "ANALYZE",
    "REINDEX",
]
"""Refused by either database."""


def all_rows(index: Index) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of every table."""
    with index.reading() as connection:
        return {
            table.name: sorted(map(tuple, connection.execute(select(table))), key=repr)
            for table in METADATA.sorted_tables
        }


def limited(index: Index, query: str, **limits: Any) -> list[tuple[Any, ...]]:
    given = {"max_rows": 1000, "max_bytes": 1 << 20, "timeout_s": 20.0} | limits
    return run_query(index, query, {}, QueryLimits(**given)).rows


class QueryTests:
    @pytest.mark.parametrize("query", CHANGES)
    def test_what_is_not_a_question_is_refused_and_changes_nothing(self, index: Index, query: str) -> None:
        index.add_packs([commit_pack("a", metrics={"loss": 1.0}), data_pack("d", ["x"])])
        before = all_rows(index)
        with pytest.raises(InvalidInputError, match=r"^sql: .+") as caught:
            ask(index, query)
        assert "\n" not in str(caught.value)
        assert all_rows(index) == before
        assert rows(index, "SELECT message FROM commits") == [("a",)]

    @pytest.mark.parametrize(
        "query",
        [
            "SELECT 1; SELECT 2", "SELECT 1; DELETE FROM t_commits", "SELECT 1 -- ;\n; SELECT 2",
            "SELECT 1; COMMIT; DROP TABLE t_commits", "SELECT ';' ; SELECT \";\"",
        ],
    )  # fmt: skip
    def test_several_statements_are_refused(self, index: Index, query: str) -> None:
        with pytest.raises(InvalidInputError, match="^sql: .*one statement|cannot insert multiple commands"):
            ask(index, query)

    @pytest.mark.parametrize("query", ["SELECT 7", " SELECT 7 ; ", "/* ; ' */ SELECT 7 /* ; */;", "VALUES (7)"])
    def test_one_statement_may_end_as_people_end_it(self, index: Index, query: str) -> None:
        assert rows(index, query) == [(7,)]

    @pytest.mark.parametrize("query", ["", "  ", ";", "-- nothing\n", "/* nothing", "/* */ ;"])
    def test_no_statement_is_refused(self, index: Index, query: str) -> None:
        with pytest.raises(InvalidInputError, match="there is no query|syntax error|unterminated"):
            ask(index, query)

    @pytest.mark.parametrize(
        ("query", "said"),
        [
            ("SELECT '\0'", "NUL"), ("SELECT '\udc80'", "surrogates not allowed"),
            ("SELECT nosuch FROM commits", r"nosuch.*sql --views"),
            ("SELECT * FROM nowhere", r"nowhere.*sql --views"),
            ("SELEC 1", "syntax"), ("SELECT (" * 3000, r"."), ("SELECT 1" + "+1" * 40_000, r"."),
            ("SELECT 'it", r"."), ("SELECT count(", r"."), ("SELECT 1 UNION SELECT 1, 2", "columns"),
        ],
    )  # fmt: skip
    def test_a_query_that_is_wrong_is_an_error_of_one_line(self, index: Index, query: str, said: str) -> None:
        with pytest.raises(InvalidInputError, match=f"^sql: .*{said}") as caught:
            ask(index, query)
        assert "\n" not in str(caught.value)
        assert "damaged" not in str(caught.value)

    def test_parameters_are_given_by_name_and_what_is_in_quotes_is_text(self, index: Index) -> None:
        query = "SELECT :a, ':a', '%(a)s %s %', 'it''s :b', :b, :a AS \"x:c\" -- :d\n/* :e '*/"
        found = ask(index, query, a="it's; DROP TABLE t_commits --", b="%")
        value = "it's; DROP TABLE t_commits --"
        assert found.rows == [(value, ":a", "%(a)s %s %", "it's :b", "%", value)]
        assert found.columns[-1] == "x:c"
        assert rows(index, "SELECT 'a%' LIKE :p", p="a!%") in ([(0,)], [(False,)])

    def test_letters_are_told_apart_in_patterns_and_order(self, index: Index) -> None:
        index.add_packs([commit_pack(name) for name in ("b", "B", "a", "_", "é")])
        assert rows(index, "SELECT message FROM commits WHERE message LIKE :p", p="B%") == [("B",)]
        found = [message for (message,) in rows(index, "SELECT message FROM commits ORDER BY message")]
        assert found == ["B", "_", "a", "b", "é"]

    @pytest.mark.parametrize(
        "value", [None, 0, -(2**63), 2**63 - 1, 1.5, 1e300, "", "å∫ç漢字🎉\n'\"\\", b"\x00\xff", True]
    )
    def test_values_come_back_as_they_were_given(self, index: Index, value: Any) -> None:
        ((found,),) = rows(index, "SELECT :value", value=value)
        assert found == value
        assert type(found) is (int if isinstance(value, bool) else type(value))

    @pytest.mark.parametrize(
        ("parameters", "said"),
        [
            ({}, "the query has a parameter :a: give a="), ({"a": 1, "b": 2}, r"no parameter :b in the query \(a\)"),
            ({"a": 2**63}, "a is 9223372036854775808: give"), ({"a": [1]}, r"a is \[1\]"),
            ({"a": object()}, "a is an object"),
            ({"a": "\udc80"}, "."), ({"a": 1j}, "a is 1j"),
        ],
    )  # fmt: skip
    def test_parameters_that_do_not_fit_are_named(self, index: Index, parameters: dict[str, Any], said: str) -> None:
        with pytest.raises(InvalidInputError, match=said):
            ask(index, "SELECT :a", **parameters)

    @pytest.mark.parametrize("query", ["SELECT ?", "SELECT $1", "SELECT %s", "SELECT %(a)s"])
    def test_parameters_of_another_form_are_refused(self, index: Index, query: str) -> None:
        with pytest.raises(InvalidInputError, match=r"^sql: "):
            ask(index, query)

    def test_more_rows_than_may_be_are_an_error_and_as_many_are_not(self, index: Index) -> None:
        numbers = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r WHERE n < 10) SELECT n FROM r"
        assert len(limited(index, numbers, max_rows=10)) == 10
        with pytest.raises(TooLargeError, match=r"more than 9 rows: .*max_rows="):
            limited(index, numbers, max_rows=9)

    def test_more_bytes_than_may_be_are_an_error(self, index: Index) -> None:
        index.add_packs([commit_pack(f"c{number}", message="x" * 10_000) for number in range(20)])
        assert len(limited(index, "SELECT message FROM commits", max_bytes=300_000)) == 20
        with pytest.raises(TooLargeError, match=r"more than 190000 bytes of values.*max_bytes="):
            limited(index, "SELECT message FROM commits", max_bytes=190_000)

    @pytest.mark.parametrize(
        "query",
        [
            ENDLESS, ENDLESS.replace("UNION ALL", "UNION"), f"SELECT * FROM ({ENDLESS}) a, ({ENDLESS}) b",
            "SELECT count(*) FROM ({0}) a, ({0}) b, ({0}) c, ({0}) d, ({0}) e".format(
                "SELECT 1 AS x FROM commits UNION ALL SELECT 2 FROM commits"
            ),
        ],
    )  # fmt: skip
    def test_a_query_that_does_not_end_is_ended(self, index: Index, query: str) -> None:
        index.add_packs([commit_pack(f"c{number}") for number in range(60)])
        begun = time.monotonic()
        with pytest.raises(TooLargeError, match=r"no answer within 0\.3 seconds: .*timeout_s="):
            limited(index, query, timeout_s=0.3)
        assert time.monotonic() - begun < 10

    def test_others_write_while_a_query_runs(self, index: Index) -> None:
        ended: list[BaseException] = []

        def endless() -> None:
            try:
                limited(index, ENDLESS, timeout_s=2.0)
            except TooLargeError as error:
                ended.append(error)

        thread = threading.Thread(target=endless)
        thread.start()
        time.sleep(0.3)
        index.add_packs([data_pack("d", ["a"])])
        assert index.read(contents.chunks_at_most) == 1
        assert thread.is_alive()
        assert ended == []
        thread.join(30)
        assert len(ended) == 1

    def test_a_query_sees_what_was_written_before_it(self, index: Index) -> None:
        for number in range(3):
            index.add_packs([commit_pack(f"c{number}")])
            assert rows(index, "SELECT count(*) FROM commits") == [(number + 1,)]
