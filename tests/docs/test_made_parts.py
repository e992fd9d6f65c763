"""Parts of docs/ that are made from the code are what the code makes today."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from tests.docs import index_schema
from tests.docs.example import block, fields, items, values
from tests.docs.pages import DOCS, PARTS, with_part


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_what_the_code_makes_else_run_the_command_in_its_first_line(name: str) -> None:
    if name == "verbs" and version("click").startswith("8.1."):
        pytest.skip("click 8.1 writes what options take in another way")
    text = (DOCS / PARTS[name][0]).read_text()
    assert with_part(text, name) == text


def test_the_repository_of_the_example_has_the_same_bytes_each_time() -> None:
    assert values() == values()


def test_the_lines_of_the_example_hold_every_byte() -> None:
    nested = bytes.fromhex("93 a2 6162 82 a1 6b c0 a1 6c 92 01 ff cd 012c".replace(" ", ""))
    lines = items(nested, ("first: ", "second: ", "third: "))
    assert b"".join(data for data, _ in lines) == nested
    assert [meaning for _, meaning in lines] == [
        "array of 3", '  first: "ab"', "  second: map of 2", "    k: nil", "    l: array of 2", "      1", "      -1",
        "  third: 300",
    ]  # fmt: skip
    assert block(fields(b"\x02\x00ab", (2, "number #"), (2, "text"))) == (
        "```text\n0000  0200                              number 2\n0002  6162                              text\n```"
    )


def test_everything_in_the_schema_has_a_meaning_and_nothing_else_has() -> None:
    tables = index_schema.tables()
    columns = {f"{table.name}.{column.name}" for _, table in tables for column in table.columns}
    assert set(index_schema.comments()) == columns
    assert all(variable in index_schema.docstrings() for variable, _ in tables)
    assert {f"{table}.{column}" for table, column in index_schema.REFERENCES} <= columns
    assert set(index_schema.REFERENCES.values()) <= columns
