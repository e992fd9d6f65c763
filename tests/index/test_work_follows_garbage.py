"""Collecting, dropping and asking upward never read a whole table of objects, locations or edges.

SQLite says beforehand how it will go about a statement, so this needs no large index and no clock.
"""

from __future__ import annotations

import re
import sqlite3
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from cas_ckpt.index import contents, garbage, history, usage
from cas_ckpt.index import rows as statements
from cas_ckpt.index.index import Index
from cas_ckpt.index.rows import AxisBound, CommitFilter, PackRecord, objects_by_id
from cas_ckpt.objects.pack import PackKind
from tests.index.building import STORE, commit_row, data_pack, digest, extent, meta_pack

LARGE = {"t_objects", "t_locations", "t_edges"}


@contextmanager
def _asked(look: Callable[[sqlite3.Connection, str, Any], None]) -> Iterator[None]:
    """A time in which `look` sees each statement before it runs."""
    with pytest.MonkeyPatch.context() as patched:
        for name in ("_rows", "_change"):
            run = getattr(statements, name)

            def seen(connection: Any, text: str, values: Any, run: Callable[..., Any] = run) -> Any:
                driver = statements.sqlite_driver(connection)
                assert driver is not None
                look(driver, text, values)
                return run(connection, text, values)

            patched.setattr(statements, name, seen)
        yield


@contextmanager
def _scans() -> Iterator[list[str]]:
    """Statements of the block that scan a large table."""
    found: list[str] = []

    def look(driver: sqlite3.Connection, statement: str, values: Any) -> None:
        plan = driver.execute(f"EXPLAIN QUERY PLAN {statement}", values).fetchall()
        named = re.findall(r"(?:FROM|JOIN)\s+(\w+)\s+(?:AS\s+)?(\w+)", statement)
        large = LARGE | {alias for table, alias in named if table in LARGE}
        for *_ids, detail in plan:
            words = detail.split()
            if words[0] == "SCAN" and words[1] in large:
                found.append(f"{detail}: {statement}")

    with _asked(look):
        yield found


@pytest.fixture
def index(tmp_path: Any) -> Iterator[Index]:
    with Index.open(tmp_path / "index.sqlite", store_id=STORE) as index:
        for name in "ab":
            chunks = [f"{name} {number}" for number in range(5)] + ["common"]
            row = commit_row(name, layout=digest("layout"))
            index.add_packs([data_pack(f"d {name}", chunks)])
            index.add_packs([meta_pack(f"m {name}", {f"root of {name}": chunks}, commit=row)])
        index.add_packs([PackRecord("part", PackKind.DATA, 1, [extent("a 1", num_leaves=1, base=digest("a 2"))])])
        yield index


def _collect(index: Index) -> None:
    commits, roots = [digest("a"), digest("b")], [digest("root of b"), digest("never seen")]
    with garbage.living(index, commits=commits, roots=roots) as living:
        names = [pack.name for pack in living.packs()]
        assert set(names) == {"d a", "m a", "d b", "part"}
        assert living.missing() == [digest("never seen")]
        assert living.needed(names)
        assert living.live_entries(names)
        assert living.summary().num_objects


def _freed(index: Index) -> None:
    roots = [digest("root of a"), digest("root of b")]
    assert garbage.freed(index, ([digest("a"), digest("b")], roots), ([], [])).num_chunks == 11


QUESTIONS: dict[str, Callable[[Index], object]] = {
    "collecting": _collect,
    "dropping": lambda index: index.drop_packs(["d a", "m a"]),
    "freed": _freed,
    "holding": lambda index: index.read(usage.commits_holding, digest("common")),
    "chosen by layout": lambda index: index.read(history.matching, CommitFilter(axes=(AxisBound("tp", 2),))),
    "nearest": lambda index: index.read(usage.nearest, [digest("common"), digest("a 3")]),
}


@pytest.mark.parametrize("ask", QUESTIONS.values(), ids=QUESTIONS.keys())
def test_no_large_table_is_scanned(index: Index, ask: Callable[[Index], object]) -> None:
    with _scans() as found:
        ask(index)
        ask(index)
    assert found == []


def test_a_scan_would_be_noticed(index: Index) -> None:
    with _scans() as found:
        index.read(usage.read_stats)
    assert found


def test_packs_that_were_examined_are_not_examined_again(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    whole = garbage.find

    def find(connection: Any, *, above: int, upto: int, again: bool, **targets: Any) -> None:
        seen.append((above, upto))
        whole(connection, above=above, upto=upto, again=again, **targets)

    monkeypatch.setattr(garbage, "find", find)
    _collect(index)
    _collect(index)
    index.add_packs([data_pack("one more", ["z"])])
    garbage.freed(index, ([], []), ([], []))
    assert seen == [(0, 5), (5, 5), (5, 5), (5, 6), (6, 6)]


def test_examining_many_packs_asks_for_the_targets_of_all_commits_twice(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage, "ENTRIES_PER_TURN", 3)
    asked: list[str] = []

    for number in range(10):
        name = f"more {number}"
        index.add_packs([meta_pack(f"m {name}", {f"root of {name}": []}, commit=commit_row(name))])
    with _asked(lambda _, statement, __: asked.append(statement)):
        garbage.examine(index)
    turns = sum("INSERT INTO unreferenced SELECT l.object_id" in statement for statement in asked)
    assert turns > 6
    assert sum("WHERE o.digest = c.root" in statement for statement in asked) == 3  # the first turn, all, the last turn


def test_what_is_examined_in_many_turns_is_what_is_examined_in_one(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for entries in (3, 10_000):
        monkeypatch.setattr(garbage, "ENTRIES_PER_TURN", entries)
        with Index.open(tmp_path / f"{entries}.sqlite", store_id=STORE) as index:
            for number in range(12):
                name = f"n{number}"
                chunks = [f"{name} {at}" for at in range(3)]
                commit = commit_row(name) if number % 3 else None
                index.add_packs([data_pack(f"d {name}", [*chunks, "common"])])
                index.add_packs([meta_pack(f"m {name}", {f"root of {name}": chunks[:2]}, commit=commit)])
            garbage.examine(index)
            with index.reading() as connection:
                found.append(sorted(connection.exec_driver_sql("SELECT object_id FROM t_suspects").scalars()))
    assert found[0] == found[1] and len(found[0]) > 10


def test_targets_serve_no_longer_once_a_pack_was_dropped(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "ENTRIES_PER_TURN", 3)
    targets = index.read(garbage.commit_targets)._replace(numbers=array("q", range(10_000)))  # of numbers given anew
    index.drop_packs(["m a"])
    for name in "cdefg":
        index.add_packs([meta_pack(f"m {name}", {f"root of {name}": []})])
    while index.write(garbage.examine_some, targets):
        pass
    with index.reading() as connection:
        roots = [digest(f"root of {name}") for name in "cdefg"]
        found = {found: number for found, number, _ in objects_by_id(connection, roots)}
        assert set(found.values()) <= set(connection.exec_driver_sql("SELECT object_id FROM t_suspects").scalars())
        assert len(found) == 5


def test_a_handle_counts_chunks_without_reading_objects(index: Index) -> None:
    with _scans() as found:
        assert index.read(contents.chunks_at_most) >= 11
    assert found == []
