"""cas-ckpt sql: tables, JSON and CSV, parameters, standard input, errors."""

from __future__ import annotations

import csv
import io
import subprocess
from pathlib import Path

import pytest
import torch

from cas_ckpt import Repository
from tests.cli.running import call, command, environment

LISTED = "SELECT key, num_bytes, dtype FROM refs r JOIN entries e USING (commit_no) WHERE r.name = :ref ORDER BY key"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sql") / "repo"
    with Repository.init(path) as repo:
        repo.commit({"w": torch.ones(1000), "a\nb": 1, 'é,"': 2}, step=100, metrics={"loss": 0.5})
    return path


def test_a_table_has_a_line_for_each_row_and_no_control_characters(place: Path) -> None:
    ran = call("-C", place, "sql", LISTED, "-p", "ref=main")
    assert (
        ran.out == 'key     num_bytes  dtype\na\\x0ab          1  -\nw            4000  float32\né,"             1  -\n'
    )


def test_the_views_are_listed_without_a_repository(tmp_path: Path) -> None:
    lines = call("-C", tmp_path, "sql", "--views").out.splitlines()
    assert ["commits", "a row for each commit that the index knows, forgotten ones too"] in [
        line.split(maxsplit=1) for line in lines
    ]
    listed = call("-C", tmp_path, "sql", "--views", "--json").json
    (metrics,) = [view for view in listed if view["view"] == "metrics"]
    assert [column["name"] for column in metrics["columns"]] == ["commit_id", "commit_no", "name", "value", "is_nan"]
    assert call("-C", tmp_path, "sql").code == call("-C", tmp_path, "sql", "--views", "SELECT 1").code == 2


def test_json_has_an_object_for_each_row(place: Path) -> None:
    ran = call("-C", place, "sql", LISTED, "--parameter", "ref=main", "--json")
    assert ran.json[1] == {"key": "w", "num_bytes": 4000, "dtype": "float32"}
    assert ran.json[0] == {"key": "a\nb", "num_bytes": 1, "dtype": None}
    assert call("-C", place, "sql", "SELECT x'00ff' AS b, 0.5 AS x", "--json").json == [{"b": "00ff", "x": 0.5}]
    assert call("-C", place, "sql", "SELECT x'00ff' AS b, 0.5 AS x WHERE 1 = 0", "--json").json == []


def test_csv_has_every_value_as_it_is(place: Path) -> None:
    ran = call("-C", place, "sql", LISTED, "-p", "ref=main", "--csv")
    assert list(csv.reader(io.StringIO(ran.out))) == [
        ["key", "num_bytes", "dtype"], ["a\nb", "1", ""], ["w", "4000", "float32"], ['é,"', "1", ""],
    ]  # fmt: skip
    assert call("-C", place, "sql", "SELECT x'00ff' AS b", "--csv").out == "b\n00ff\n"


def test_the_query_comes_from_standard_input(place: Path) -> None:
    done = subprocess.run(
        command("-C", place, "sql", "-", "-p", "s=100"), input="SELECT message, step\nFROM commits WHERE step = :s;\n",
        env=environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout.splitlines()[1].split()) == (0, ["100"])


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("7", 7), ("-1.5", -1.5), ('"7"', "7"), ("null", None), ("a=b", "a=b"), ("main", "main"), ("[1]", "[1]"),
        ("1e3", 1e3), ("true", 1),
    ],
)  # fmt: skip
def test_parameters_are_numbers_where_they_read_as_numbers(place: Path, given: str, found: object) -> None:
    ran = call("-C", place, "sql", "SELECT :x AS x", "-p", f"x={given}", "--json")
    assert ran.json == [{"x": found}]


def test_errors_are_one_line_in_words_of_the_shell(place: Path) -> None:
    ran = call("-C", place, "sql", LISTED)
    assert (ran.code, ran.err) == (2, "cas-ckpt: error: sql: the query has a parameter :ref: give -p ref=...\n")
    ran = call("-C", place, "sql", "DELETE FROM t_commits")
    assert (ran.code, ran.err) == (2, "cas-ckpt: error: sql: not authorized: it may only read\n")
    ran = call("-C", place, "sql", LISTED, "-p", "ref=main", "--max-rows", "2")
    assert (ran.code, ran.out) == (1, "")
    assert "more than 2 rows: ask for fewer (LIMIT), or give more with --max-rows" in ran.err
    endless = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT count(*) FROM r"
    ran = call("-C", place, "sql", endless, "--timeout", "0.2")
    assert (ran.code, "give more time with --timeout" in ran.err) == (1, True)
    assert call("-C", place, "sql", "SELECT 1 AS a, 2 AS a", "--json").code == 2
    assert call("-C", place, "sql", "SELECT 1", "--json", "--csv").code == 2
    assert "--timeout is 0.0: give a number" in call("-C", place, "sql", "SELECT 1", "--timeout", "0").err
    assert "given twice" in call("-C", place, "sql", "SELECT :x", "-p", "x=1", "-p", "x=2").err


@pytest.mark.parametrize("text", ["SHOW TABLES", ".tables", "SELECT", "DESCRIBE commits", "SELECT * FROM commit"])
def test_what_is_not_sql_says_what_is(place: Path, text: str) -> None:
    ran = call("-C", place, "sql", text)
    assert (ran.code, "wanted one query: SELECT, VALUES or WITH" in ran.err) == (2, True)


def test_an_empty_answer_has_its_columns(place: Path) -> None:
    assert call("-C", place, "sql", "SELECT step, message FROM commits WHERE step = 7").out == "step  message\n"
