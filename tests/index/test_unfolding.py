"""Queries that databases would unfold into thousands of millions of words are refused, and what people write is not."""

from __future__ import annotations

from contextlib import suppress

import pytest

from cas_ckpt.errors import InvalidInputError
from cas_ckpt.index.query_text import MOST_CHARS, read_query


def parts(count: int, text: str, *, last: str = "SELECT * FROM {name}", first: str = "SELECT step AS x FROM commits",
          name: str = "c{}", **names: str) -> str:  # fmt: skip
    """A query of `count` parts, each of which names the former one."""
    found = [f"{name.format(0)} AS ({first})"]
    for number in range(1, count):
        given = {key: value.format(number - 1) for key, value in names.items()}
        found.append(f"{name.format(number)} AS ({text.format(**{'former': name.format(number - 1)} | given)})")
    return f"WITH {', '.join(found)} {last.format(name=name.format(count - 1))}"


def nested(count: int, columns: str) -> str:
    text = "SELECT step AS x FROM commits"
    for _ in range(count):
        text = f"SELECT {columns} FROM ({text}) AS q"
    return text


UNFOLDING = {
    "columns": parts(40, "SELECT x + x AS x FROM {former}"),
    "columns of two names": parts(40, "SELECT x + y AS x, x - y AS y FROM {former}", first="SELECT 1 AS x, 2 AS y"),
    "columns without a name": parts(40, "SELECT \"x\" || x FROM {former}"),
    "columns in functions": parts(40, "SELECT coalesce(x, abs(x)) AS x FROM {former}"),
    "columns in an inner query": parts(40, "SELECT (SELECT x + x) AS x FROM {former}"),
    "columns one in another": nested(12, "x+x+x+x+x+x+x+x+x+x AS x"),
    "half of it grouped": parts(40, "SELECT x + x AS x FROM {former} UNION ALL SELECT 1 GROUP BY 1"),
    "grouped inside of a column": parts(40, "SELECT x + x + (SELECT 1 GROUP BY 1) AS x FROM {former}"),
    "a limit": parts(40, "SELECT x + x AS x FROM {former} LIMIT 5"),
    "not distinct": parts(40, "SELECT x + x IS DISTINCT FROM x AS x FROM {former}"),
    "tables": parts(40, "SELECT a.x FROM {former} a, {former} b"),
    "tables joined": parts(40, "SELECT a.x FROM {former} a JOIN {former} b USING (x)"),
    "tables in parentheses": parts(40, "SELECT 1 FROM ({former}), (({former}))"),
    "tables that are grouped": parts(40, "SELECT count(*) AS x FROM {former} a, {former} b GROUP BY a.x"),
    "sets": parts(40, "SELECT 1 AS x WHERE 1 IN {former} AND 2 IN {former}"),
    "arms": parts(40, "SELECT x FROM {former} UNION ALL SELECT x FROM {former}"),
    "names in quotes": parts(40, 'SELECT a.x FROM {other} a, "{former}" b', name='"c{}"', former="c{}", other="C{}"),
    "names in other quotes": parts(40, 'SELECT a.x FROM {other} a, {other} b', name='[c"{}]', other='"c""{}"'),
    "columns of a WITH named": parts(40, "SELECT x + x FROM {former}", name="c{}(x)", former="c{}"),
    "materialized": parts(40, "SELECT a.x FROM {former} a, {former} b").replace("AS (", "AS NOT MATERIALIZED ("),
    "two before": "WITH a0 AS (SELECT 1), a1 AS (SELECT 1), "
    + ", ".join(f"a{n} AS (SELECT 1 FROM a{n - 1}, a{n - 2})" for n in range(2, 60)) + " SELECT * FROM a59",
    "names of columns": f"SELECT {'+'.join(['step'] * 900)} AS a FROM commits WHERE {'+'.join(['a'] * 2000)}",
    "a circle": "WITH a AS (SELECT * FROM b), b AS (SELECT * FROM a) SELECT * FROM a",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "postgres"),
    [(name, postgres) for name in UNFOLDING for postgres in (False, True) if not (postgres and "[" in UNFOLDING[name])],
)
def test_what_unfolds_into_too_much_is_refused(name: str, postgres: bool) -> None:
    with pytest.raises(InvalidInputError, match=r"sql: the parts of the query name one another so often .* ask in"):
        read_query(UNFOLDING[name], postgres=postgres)


SHADOWED = "SELECT 1 AS x"
for _ in range(40):
    SHADOWED = f"WITH c AS ({SHADOWED}) SELECT a.x FROM c a, c b"

HARMLESS = [
    parts(90, "SELECT x FROM {former}"),
    parts(90, "SELECT x + 1 AS x FROM {former}"),
    parts(90, "SELECT sum(x * x + x) AS x FROM {former} GROUP BY x"),
    parts(90, "SELECT DISTINCT x * x + x AS x FROM {former}"),
    parts(5, "SELECT CASE WHEN x IS NULL THEN y WHEN y > x THEN z ELSE x END AS x, y, z FROM {former}",
          first="SELECT 1 AS x, 2 AS y, 3 AS z"),
    parts(8, "SELECT a.x FROM {former} a JOIN {former} b USING (x)"),
    "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r WHERE n < 10) SELECT * FROM r a, r b",
    "WITH a AS (SELECT 1 AS b), b AS (SELECT a.b FROM a) SELECT * FROM a JOIN b USING (b)",
    "SELECT " + ", ".join(["commit_no + step * 2"] * 200) + " FROM commits",
    "SELECT * FROM commits WHERE commit_id IN (" + ", ".join(["'0123456789abcdef'"] * 3000) + ")",
    " UNION ALL ".join(["SELECT step + step FROM commits WHERE step > 1"] * 200),
]  # fmt: skip


@pytest.mark.parametrize("text", HARMLESS)
def test_what_people_write_is_taken(text: str) -> None:
    assert read_query(text, postgres=False).num_tokens > 3
    assert read_query(text, postgres=True).num_tokens > 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SHADOWED, "so often"), ("SELECT (" * 10_000, "one another are too many"),
        ("WITH " + "c AS (SELECT " * 7000, "one another are too many"), ("(SELECT " * 12_000, "are too many"),
        (parts(2000, "SELECT 1 FROM {former}"), "are too many"),
    ],
)  # fmt: skip
def test_depth_is_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidInputError, match=f"sql: .*{said}"):
        read_query(text, postgres=False)


@pytest.mark.parametrize(
    "unit",
    ["(", "((SELECT 1),", "x,", "a AS (", "SELECT (1), ", ") AS (", "c(x,y) AS (), ", "'", '"', "WITH ", ",", "."],
)
@pytest.mark.parametrize("begin", ["SELECT ", "WITH c(", "SELECT * FROM ", ") "])
def test_any_text_is_read_to_its_end(unit: str, begin: str) -> None:
    for postgres in (False, True):
        with suppress(InvalidInputError):
            read_query((begin + unit * MOST_CHARS)[:MOST_CHARS], postgres=postgres)
