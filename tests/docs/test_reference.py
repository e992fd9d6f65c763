"""docs/reference.md agrees with the code: signatures, a row for each argument, the attributes of what is returned."""

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
from cas_ckpt.storage.url import SCHEMES

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


def call_of(name: str) -> str:
    """A signature without types, as the page shows it."""
    prefix = {"init": "Repository.", "open": "Repository.", "clone": "Repository."}.get(name, "repo.")
    declared = inspect.signature(getattr(Repository, name))
    parts, by_name, by_place = [], False, False
    for parameter in (each for each in declared.parameters.values() if each.name != "self"):
        if by_place and parameter.kind is not parameter.POSITIONAL_ONLY:
            parts.append("/")
        by_place = parameter.kind is parameter.POSITIONAL_ONLY
        if parameter.kind is parameter.VAR_POSITIONAL:
            by_name = True
        elif parameter.kind is parameter.KEYWORD_ONLY and not by_name:
            parts, by_name = [*parts, "*"], True
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        shown = default(parameter).strip("`")
        parts.append(f"{star}{parameter.name}" + (f"={shown}" if shown not in ("required", "any number") else ""))
    return f"{prefix}{name}({', '.join(parts)}) -> {declared.return_annotation}"


@cache
def results() -> dict[str, str]:
    """Class -> module of what methods return, as the files of repository/ import it for their annotations."""
    found = {"CommitStats": "cas_ckpt", "ImportInfo": "cas_ckpt", "Head": "cas_ckpt"}
    for file in (DOCS.parent / "cas_ckpt" / "repository").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                found |= {alias.name: str(node.module) for alias in node.names}
    return found


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_its_signature_and_a_row_for_each_argument(name: str) -> None:
    text = section(name)
    shown = re.search(r"```text\n(.*?)```", text, re.DOTALL)
    assert shown and " ".join(shown[1].split()) == call_of(name)
    assert [(row[0], row[1], row[2]) for row in ROW.findall(text)] == arguments(getattr(Repository, name))
    assert "**Cost** ([more](costs.md)): " in text


@pytest.mark.parametrize("name", OTHERS)
def test_another_name_has_a_row_for_each_argument(name: str) -> None:
    module, _, last = f"cas_ckpt.{name}".rpartition(".")
    found = [(row[0], row[1], row[2]) for row in ROW.findall(section(f"cas_ckpt.{name}"))]
    assert found == arguments(getattr(import_module(module), last))


def test_every_other_public_name_has_a_section_or_is_a_result_or_an_error() -> None:
    elsewhere = {"LeftOut", "Named", "PendingCommit", "Repository", "StateDict", "Trust", "__version__"}
    names = {name for name in cas_ckpt.__all__ if not name.endswith("Error") and f"\n| `{name}` |" not in TEXT}
    assert names - elsewhere == {name for name in OTHERS if "." not in name}


@pytest.mark.parametrize("name", ["CasStorageReader", "CasStorageWriter", "CheckpointPaths"])
def test_a_class_for_dcp_has_a_row_for_each_argument(name: str) -> None:
    found = [(row[0], row[1], row[2]) for row in ROW.findall(section(name, DCP))]
    assert found == arguments(getattr(dcp, name))


def test_only_methods_that_exist_are_described() -> None:
    described = re.findall(r"^### `(\w+)`$", TEXT, re.MULTILINE)
    assert sorted(described) == sorted(METHODS)


def test_every_scheme_of_a_store_has_its_row() -> None:
    places = TEXT.partition("#### Where a repository can be")[2].partition("###")[0]
    assert re.findall(r"^\| `(\w+)://", places, re.MULTILINE) == list(SCHEMES)


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
