"""docs/reference.md names every method and the attributes of what is returned; docs/dcp.md has a row per argument."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from enum import Enum
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import cas_ckpt
from cas_ckpt import Repository, dcp

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "reference.md").read_text()
DCP = (DOCS / "dcp.md").read_text()
METHODS = [name for name, _ in inspect.getmembers(Repository, callable) if not name.startswith("_")]
OTHERS = re.findall(r"^### `cas_ckpt\.([\w.]+)`$", TEXT, re.MULTILINE)
ROW = re.compile(r"^\| `\*{0,2}(\w+)` \| `(.*?)` \| (.*?) \| (.+) \|$", re.MULTILINE)

OF_THE_QUEUE = {"watch", "begin", "end", "take_failure", "counted", "add_saved"}
"""Methods of a `PendingCommit` that make it go on: for the library."""

Argument = tuple[str, str, str]
"""Name, type and default, as a row of the page has them."""


def section(name: str, page: str = TEXT) -> str:
    """What a page says below the heading of a method or class."""
    found = re.search(rf"^### `{re.escape(name)}`\n(.*?)(?=^#|\Z)", page, re.MULTILINE | re.DOTALL)
    assert found, f"there is no heading ### `{name}`"
    return found[1]


def arguments(call: Callable[..., Any]) -> list[Argument]:
    """What the code declares."""
    found = []
    for parameter in inspect.signature(call).parameters.values():
        declared = parameter.annotation
        kind = (declared if isinstance(declared, str) else declared.__name__).replace("|", "\\|")
        found.append((parameter.name, kind, default(parameter)))
    return [each for each in found if each[0] != "self"]


def default(parameter: inspect.Parameter) -> str:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return "any number"
    given = parameter.default
    shown = repr(given.value if isinstance(given, Enum) else given).replace("'", '"')
    return "required" if parameter.default is parameter.empty else f"`{shown}`"


@cache
def results() -> dict[str, str]:
    """Class -> module of what methods return, as the files of repository/ import it for their annotations."""
    found = {"CommitStats": "cas_ckpt", "ImportInfo": "cas_ckpt", "Head": "cas_ckpt"}
    for file in (DOCS.parent / "cas_ckpt" / "repository").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                found |= {alias.name: str(node.module) for alias in node.names}
    return found


def test_each_method_and_each_other_name_is_taken_from_its_docstring_below_a_heading_of_its_own() -> None:
    headings = re.findall(r"^### `([\w.]+)`\n\n::: ([\w.]+)$", TEXT, re.MULTILINE)
    wanted = [(name, f"cas_ckpt.Repository.{name}") for name in METHODS]
    assert sorted(headings) == sorted(wanted + [(f"cas_ckpt.{name}", f"cas_ckpt.{name}") for name in OTHERS])


@pytest.mark.parametrize("name", ["CasStorageReader", "CasStorageWriter", "CheckpointPaths"])
def test_a_class_for_dcp_has_a_row_for_each_argument(name: str) -> None:
    found = [(row[0], row[1], row[2]) for row in ROW.findall(section(name, DCP))]
    assert found == arguments(getattr(dcp, name))


def test_properties_are_described() -> None:
    names = [name for name, value in vars(Repository).items() if isinstance(value, property)]
    assert [name for name in names if f"`repo.{name}`" not in TEXT] == []


def test_what_methods_return_has_its_attributes() -> None:
    rows = re.findall(
        r"^\| `([A-Z]\w+)` \| (.*) \|$", TEXT.partition("## Results")[2].partition("\n## ")[0], re.MULTILINE
    )
    assert len(rows) > 20
    for name, said in rows:
        python_type = getattr(import_module(results()[name]), name)
        words = set(re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", said.partition("; also")[0])))
        more = set(re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", said.partition("; also")[2])))
        own = set(getattr(python_type, "_fields", ())) or {field.name for field in fields(python_type)}
        if name == "ImportInfo":
            own = own - {field.name for field in fields(cas_ckpt.CommitInfo)}
            words -= {"CommitInfo", "LeftOut", "name", "reason"}
        assert words == own, name
        assert all(hasattr(python_type, attribute) for attribute in more), name


def test_the_classes_that_methods_return_are_all_listed() -> None:
    returned = {inspect.signature(getattr(Repository, name)).return_annotation for name in METHODS}
    names = {name for text in returned for name in re.findall(r"[A-Z]\w+", str(text))}
    listed = set(re.findall(r"^\| `([A-Z]\w+)` \|", TEXT.partition("## Results")[2], re.MULTILINE))
    assert names - {"Repository", "Self", "None", "Any", "Iterator", "PendingCommit"} - listed == set()


def test_what_a_pending_commit_has_is_described() -> None:
    text = TEXT.partition("#### Pending commits")[2].partition("\n### ")[0]
    names = {name for name in vars(cas_ckpt.PendingCommit) if not name.startswith("_")} - OF_THE_QUEUE
    assert {name for name in names if not re.search(rf"`{name}(\(|`)", text)} == set()


def test_errors_have_their_exit_codes_and_all_are_listed() -> None:
    rows = re.findall(r"^\| (`\w+Error`[^|]*) \| (\d+) \|", TEXT.partition("## Errors")[2], re.MULTILINE)
    shown = {name: int(code) for names, code in rows for name in re.findall(r"`(\w+)`", names)}
    errors = {name for name in cas_ckpt.__all__ if name.endswith("Error")} - {"CkptError"}
    assert shown == {name: getattr(cas_ckpt, name).exit_code for name in errors}
