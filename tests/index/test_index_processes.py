"""Several processes at one index, some of which die. All of them are real."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cas_ckpt.index import contents, history, remembered
from cas_ckpt.index.index import Index
from cas_ckpt.index.rows import RefRow
from tests.index.building import STORE, all_commits, commit_pack, data_pack, digest
from tests.index.plans_suite import SHAPES, loads, plan, rows_left
from tests.index.restores_suite import restore
from tests.processes import ROOT, Forked
from tests.quick_index import migrations_run

pytestmark = pytest.mark.slow


def fill(place: Path, name: str) -> None:
    with migrations_run():
        for number in range(15):
            with Index.open(place, store_id=STORE) as index:
                index.add_packs([data_pack(f"{name}-{number}", [f"{name}-{number}", "common"])])
                index.add_packs([commit_pack("c"), commit_pack(f"{name}-c")])


def test_processes_that_make_and_fill_an_index_at_once_lose_nothing(tmp_path: Path) -> None:
    place = tmp_path / "index.sqlite"
    writers = [Forked(fill, place, name) for name in "abc"]
    assert [writer.wait(timeout=100) for writer in writers] == [0, 0, 0]
    with Index.open(place, store_id=STORE) as index:
        assert index.read(contents.chunks_at_most) == 90
        assert len(index.read(contents.locate, [digest("common")])[digest("common")]) == 45
        assert sorted(row.message for row in all_commits(index)) == ["a-c", "b-c", "c", "c-c"]


def log_restores(place: Path, name: str) -> None:
    with Index.open(place, store_id=STORE) as index:
        for number in range(10):
            index.write(remembered.write_restore, restore(name, f"root of {name}", at_s=number))
            index.write(remembered.write_plan, plan(f"root {number}", f"dp={name}"), loads(2), SHAPES)


def test_processes_that_log_a_hundred_restores_at_once_lose_none(tmp_path: Path) -> None:
    place = tmp_path / "index.sqlite"
    Index.open(place, store_id=STORE).close()
    writers = [Forked(log_restores, place, str(name)) for name in range(10)]
    assert [writer.wait(timeout=100) for writer in writers] == [0] * 10
    with Index.open(place, store_id=STORE) as index:
        found = index.read(remembered.read_restores)
        assert sorted((row.commit_id, row.started_us) for row in found) == sorted(
            (digest(str(name)), number * 1_000_000) for name in range(10) for number in range(10)
        )
        kept = index.read(remembered.read_plans)
        assert len(kept) == 100
        assert all(each.totals["read_bytes"][1] == 21 for each in kept)


def die_while_logging(place: Path) -> None:
    remembered._drop_oldest = lambda connection: os._exit(9)
    with Index.open(place, store_id=STORE) as index:
        index.write(remembered.write_restore, restore("before"))
        index.write(remembered.write_plan, plan("root", "dp=2"), loads(2), SHAPES)


def test_a_process_that_dies_while_it_keeps_a_plan_leaves_no_part_of_it(tmp_path: Path) -> None:
    place = tmp_path / "index.sqlite"
    assert Forked(die_while_logging, place).wait(timeout=100) == 9
    with Index.open(place, store_id=STORE) as index:
        assert index.read(remembered.read_restores) == [restore("before")]
        assert index.read(rows_left) == (0, 0, 0)


def die_inside_a_transaction(place: Path) -> None:
    contents._insert_edges_and_commits = lambda *rows: os._exit(9)  # type: ignore[assignment]
    Index.open(place, store_id=STORE).add_packs([data_pack("during", range(20_000)), commit_pack("c")])


def test_a_process_that_dies_inside_a_transaction_leaves_nothing_of_it(tmp_path: Path) -> None:
    place = tmp_path / "index.sqlite"
    with Index.open(place, store_id=STORE) as index:
        index.add_packs([data_pack("before", ["a"])])
    assert Forked(die_inside_a_transaction, place).wait(timeout=100) == 9
    with Index.open(place, store_id=STORE) as index:
        assert index.packs().keys() == {"before"}
        assert index.read(contents.chunk_digests) == {digest("a")}
        assert index.add_packs([data_pack("during", range(20_000)), commit_pack("c")]) == 2


def die_after_a_transaction(place: Path) -> None:
    Index.open(place, store_id=STORE).add_packs([data_pack("d", ["a"]), commit_pack("c")])
    os._exit(9)


def test_a_process_that_dies_after_a_transaction_leaves_all_of_it(tmp_path: Path) -> None:
    place = tmp_path / "index.sqlite"
    assert Forked(die_after_a_transaction, place).wait(timeout=100) == 9
    with Index.open(place, store_id=STORE) as index:
        assert index.read(history.read_commit, digest("c")) is not None
        assert index.packs().keys() == {"d", "pack of c"}


READING = """
import sys
sys.path.insert(0, {root!r})
from cas_ckpt.index import history
from cas_ckpt.index.index import Index
from tests.index.building import STORE, digest
assert [row.message for row in history.log(Index.open({place!r}, store_id=STORE), [digest("c")])] == ["c"]
heavy = {{"alembic", "torch", "sqlalchemy.orm", "sqlalchemy.dialects.postgresql"}} & set(sys.modules)
sys.exit(f"imported {{heavy}}" if heavy else 0)
"""


def test_reading_an_index_imports_neither_alembic_nor_torch(tmp_path: Path) -> None:
    place = tmp_path / "index.sqlite"
    with Index.open(place, store_id=STORE) as index:
        index.add_packs([commit_pack("c")])
    script = READING.format(root=str(ROOT), place=str(place))
    assert subprocess.run([sys.executable, "-c", script], timeout=100, check=False).returncode == 0


def test_a_commit_of_an_unchanged_state_writes_few_bytes(tmp_path: Path) -> None:
    place = tmp_path / "index.sqlite"
    log = tmp_path / "index.sqlite-wal"
    stats = {"total_bytes": 10**9, "new_bytes": 0, "stored_bytes": 0, "num_entries": 300, "num_new_chunks": 0}
    names = [f"commit {number}" for number in range(60)]
    packs = [
        commit_pack(name, names[i - 1 : i], step=i, author="Ann <ann@example.com>", layout=digest("l"), stats=stats)
        for i, name in enumerate(names)
    ]
    with Index.open(place, store_id=STORE) as index:
        index.add_packs([data_pack("d", range(1500)), *packs[:10]])
    with Index.open(place, store_id=STORE) as index:
        for number in range(10, 60):
            index.add_packs([packs[number]])
            index.write(remembered.write_refs, [RefRow("heads/main", packs[number].commits[0].digest, 0, 0.0)])
        assert log.stat().st_size / 50 < 7200
