"""An index of an older schema gets the rows that it lacks, whatever happens meanwhile."""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event

from cas_ckpt.core import packs
from cas_ckpt.core.backfill import complete_index
from cas_ckpt.core.config import INDEX_PATH
from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.packs import pack_batches, read_directory
from cas_ckpt.errors import CorruptionError
from cas_ckpt.index import integrity, meta, pending
from cas_ckpt.index.integrity import Scrub
from cas_ckpt.index.rows import REVISIONS, PackRecord
from cas_ckpt.objects.layouts import Division, compose_layout, layout_node
from cas_ckpt.ops.fsck.check import check_open, check_url
from cas_ckpt.ops.fsck.rebuild import rebuild_index
from cas_ckpt.ops.fsck.report import ProblemKind
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.gc.plan import GcOptions
from cas_ckpt.ops.refs import delete_branch
from cas_ckpt.transfer.pack_writer import write_nodes
from tests.builders import commit, numbers
from tests.divided import mesh, over
from tests.index.manifest_rows import make_older, said
from tests.processes import Forked

pytestmark = pytest.mark.slow

NUM_COMMITS = 6


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with closing(init_repository(tmp_path / "repo")) as handle:
        for step in range(NUM_COMMITS):
            small = {f"step {at}": at + step for at in range(300)}
            commit(handle, {"w": numbers(900, 2000, seed=step), "b": numbers(3, seed=1), "more": small})
            odd = {"w": numbers(40, 40, seed=step), "a\0b": "x", "long": "y" * 40}
            commit(handle, odd, branch="side", meta={"step": step}, provenance=True)
    return tmp_path / "repo"


@pytest.fixture
def wanted(path: Path) -> dict[str, set[tuple[Any, ...]]]:
    with closing(RepositoryHandle.open(path)) as handle:
        found = said(handle.index)
    assert found["t_entries"] and found["t_tensors"] and found["t_raw_names"] and found["t_layouts"]
    return found


def _older(path: Path, revision: str = "0003") -> None:
    with closing(RepositoryHandle.open(path)) as handle:
        store_id = handle.config.store_id
    make_older(path / INDEX_PATH, store_id, revision)


def _completed(path: Path) -> dict[str, set[tuple[Any, ...]]]:
    with closing(RepositoryHandle.open(path)) as handle:
        complete_index(handle)
        assert not handle.index.read(pending.is_pending)
        return said(handle.index)


@pytest.mark.parametrize("revision", REVISIONS[:-1])
def test_an_index_of_every_older_schema_gets_the_rows_that_commits_would_have_made(
    path: Path, wanted: dict[str, set[tuple[Any, ...]]], revision: str
) -> None:
    _older(path, revision)
    with closing(RepositoryHandle.open(path)) as handle:
        assert handle.index.read(pending.is_pending)
        assert any(said(handle.index).values()) == (revision >= "0004")
    assert _completed(path) == wanted
    assert check_url(path).problems == ()


def test_fsck_adds_rows_that_wait_and_finds_nothing_wrong(path: Path, wanted: dict[str, set[tuple[Any, ...]]]) -> None:
    _older(path)
    RepositoryHandle.open(path).close()
    with closing(RepositoryHandle.open(path, read_only=True)) as handle:
        assert check_open(handle).ok
        assert handle.index.read(pending.is_pending)
    assert check_url(path).problems == ()
    with closing(RepositoryHandle.open(path)) as handle:
        assert not handle.index.read(pending.is_pending)
        assert said(handle.index) == wanted


def test_fsck_does_not_blame_the_index_for_rows_that_wait_for_a_damaged_pack(
    path: Path, wanted: dict[str, set[tuple[Any, ...]]]
) -> None:
    _older(path)
    meta_pack = sorted((path / "packs").glob("*/*.meta"))[0]
    whole = meta_pack.read_bytes()
    with closing(RepositoryHandle.open(path)) as handle:
        node = read_directory(handle.store, f"packs/{meta_pack.parent.name}/{meta_pack.name}")[1][0]
    at = node.offset + node.header_bytes
    meta_pack.write_bytes(whole[:at] + bytes(8) + whole[at + 8 :])
    assert {problem.kind for problem in check_url(path).problems} == {ProblemKind.ENTRIES}
    meta_pack.write_bytes(whole)
    assert check_url(path).ok
    assert _completed(path) == wanted


def test_a_rebuild_makes_the_same_rows(path: Path, wanted: dict[str, set[tuple[Any, ...]]]) -> None:
    rebuild_index(path)
    with closing(RepositoryHandle.open(path)) as handle:
        assert said(handle.index) == wanted
        assert not handle.index.read(pending.is_pending)


@pytest.mark.parametrize("revision", REVISIONS[:-1])
def test_what_a_damaged_index_of_an_older_schema_remembers_is_kept_by_a_rebuild(
    path: Path, wanted: dict[str, set[tuple[Any, ...]]], revision: str
) -> None:
    with closing(RepositoryHandle.open(path)) as handle:
        handle.index.set_generation(7)
        handle.index.write(integrity.write_scrub, Scrub(next(iter(handle.index.packs())), 5, 6))
        remembered = handle.index.read(meta.read_refs), handle.index.read(integrity.read_scrubs)
    _older(path, revision)
    with closing(sqlite3.connect(path / INDEX_PATH)) as raw:
        (page_bytes,) = raw.execute("PRAGMA page_size").fetchone()
        table = "t_locations" if revision >= "0004" else "locations"  # one that the upgrade reads
        (root,) = raw.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    damaged = bytearray((path / INDEX_PATH).read_bytes())
    damaged[(root - 1) * page_bytes] ^= 0x40  # the kind of the page
    (path / INDEX_PATH).write_bytes(damaged)
    with pytest.raises(CorruptionError, match="index rebuild"):
        RepositoryHandle.open(path)
    rebuild_index(path)
    with closing(RepositoryHandle.open(path)) as handle:
        assert said(handle.index) == wanted
        assert handle.index.generation == 7
        scrubs = remembered[1] if revision >= "0003" else {}  # earlier ones had no such table
        assert (handle.index.read(meta.read_refs), handle.index.read(integrity.read_scrubs)) == (remembered[0], scrubs)


def test_commits_bring_their_rows_while_older_ones_wait(path: Path, wanted: dict[str, set[tuple[Any, ...]]]) -> None:
    _older(path)
    with closing(RepositoryHandle.open(path)) as handle:
        commit(handle, {"new": numbers(30, 30, seed=99)})
        assert any(row[2] == "new" for row in said(handle.index)["t_entries"])
        assert handle.index.read(pending.is_pending)
    found = _completed(path)
    assert found["t_entries"] > wanted["t_entries"]
    rebuild_index(path)
    assert _completed(path) == found


def _die(path: Path, batch: int, *, before_commit: bool) -> None:
    """Complete the index, two packs at a time, and die in the `batch`-th transaction or right after it."""
    packs.PACKS_PER_BATCH = 2
    count = 0
    whole = pending.complete

    def complete(connection: Connection, records: Sequence[PackRecord]) -> None:
        nonlocal count
        if count == batch and not before_commit:
            os._exit(9)
        whole(connection, records)
        if count == batch:
            os._exit(9)
        count += 1

    pending.complete = complete
    with closing(RepositoryHandle.open(path)) as handle:
        complete_index(handle)


@pytest.mark.parametrize("before_commit", [True, False])
@pytest.mark.parametrize("batch", [0, 1, 3, 5])
def test_a_process_that_dies_in_any_step_leaves_what_is_done_and_the_next_one_goes_on(
    path: Path, wanted: dict[str, set[tuple[Any, ...]]], batch: int, before_commit: bool
) -> None:
    _older(path)
    with closing(RepositoryHandle.open(path)) as handle:
        before = len(handle.index.read(pending.pending_packs))
    with Forked(partial(_die, before_commit=before_commit), path, batch) as process:
        assert process.wait(60) == 9
    with closing(RepositoryHandle.open(path)) as handle:
        assert len(handle.index.read(pending.pending_packs)) == before - 2 * batch
    assert _completed(path) == wanted


def _complete(path: Path) -> None:
    packs.PACKS_PER_BATCH = 1
    with closing(RepositoryHandle.open(path)) as handle:
        complete_index(handle)


@pytest.mark.parametrize("revision", ["0001", "0003"])
def test_processes_that_upgrade_one_index_at_once_do_nothing_wrong(
    path: Path, wanted: dict[str, set[tuple[Any, ...]]], revision: str
) -> None:
    _older(path, revision)
    with ExitStack() as stack:
        processes = [stack.enter_context(Forked(_complete, path)) for _ in range(3)]
        assert [process.wait(120) for process in processes] == [0, 0, 0]
    assert _completed(path) == wanted


def test_packs_that_go_meanwhile_need_no_rows(path: Path) -> None:
    _older(path)
    with closing(RepositoryHandle.open(path)) as handle:
        noted = handle.index.read(pending.pending_packs)
        delete_branch(handle, "side", force=True)
        collect_garbage(handle, GcOptions(min_age_s=0, reflog_expire_s=0, max_unused=0))
        assert set(handle.index.read(pending.pending_packs)) < set(noted)
        complete_index(handle)
        found = said(handle.index)
        assert handle.index.read(integrity.stray_rows) == []
    rebuild_index(path)
    assert _completed(path) == found


def test_what_was_collected_leaves_no_rows_and_has_them_again_when_it_comes_back(path: Path) -> None:
    layout = compose_layout({"w": Division((over(mesh(2), "S(0)"),))}, world_size=2, aliases=(("a", "b"),))
    with closing(RepositoryHandle.open(path)) as handle:
        for at in range(3):
            commit(
                handle, {"w": numbers(40, 40, seed=at), "a\0b": "x", "big": numbers(900, 900, seed=at)}, branch="side"
            )
            write_nodes(handle.store, [layout_node(layout)])
            handle.sync()
            before = said(handle.index)
            assert before["t_layout_aliases"] and before["t_layout_axes"] and before["t_placements"]
            delete_branch(handle, "side", force=True)
            collect_garbage(handle, GcOptions(min_age_s=0, reflog_expire_s=0, max_unused=0))
            assert handle.index.read(integrity.stray_rows) == []
            after = said(handle.index)
            assert all(after[table] < before[table] for table in ("t_trees", "t_entries", "t_raw_names", "t_tensors"))
            assert all(not rows for table, rows in after.items() if table in _OF_DIVISIONS)
            assert check_open(handle).ok
    rebuild_index(path)
    with closing(RepositoryHandle.open(path)) as handle:
        assert said(handle.index) == after


_OF_DIVISIONS = (
    "t_layout_meshes",
    "t_layout_axes",
    "t_layout_aliases",
    "t_placements",
    "t_divisions",
    "t_division_axes",
)


def test_a_damaged_pack_stays_noted_and_the_others_get_their_rows(
    path: Path, wanted: dict[str, set[tuple[Any, ...]]], caplog: pytest.LogCaptureFixture
) -> None:
    _older(path)
    meta = sorted((path / "packs").glob("*/*.meta"))[0]
    whole = meta.read_bytes()
    with closing(RepositoryHandle.open(path)) as handle:
        node = read_directory(handle.store, f"packs/{meta.parent.name}/{meta.name}")[1][0]
    at = node.offset + node.header_bytes
    meta.write_bytes(whole[:at] + bytes(8) + whole[at + 8 :])
    with closing(RepositoryHandle.open(path)) as handle, caplog.at_level(logging.WARNING):
        complete_index(handle)
        complete_index(handle)
        key = f"packs/{meta.parent.name}/{meta.name}"
        assert list(handle.index.read(pending.pending_packs)) == [key]
        assert sum(key in line for line in caplog.messages) == 1
        found = said(handle.index)
    assert found["t_entries"] < wanted["t_entries"]
    meta.write_bytes(whole)
    assert _completed(path) == wanted


@pytest.mark.parametrize("upgraded", [True, False], ids=["its tables are upgraded", "nothing is"])
def test_what_may_only_be_read_is_completed_in_memory(
    path: Path, wanted: dict[str, set[tuple[Any, ...]]], upgraded: bool
) -> None:
    _older(path)
    if upgraded:
        RepositoryHandle.open(path).close()
    before = (path / INDEX_PATH).read_bytes()
    with closing(RepositoryHandle.open(path, read_only=True)) as handle:
        complete_index(handle)
        assert said(handle.index) == wanted
    assert (path / INDEX_PATH).read_bytes() == before


def _die_migrating(path: Path, statement: int) -> None:
    """Open the repository, and die after so many statements."""
    count = 0

    def seen(*_: object) -> None:
        nonlocal count
        if count == statement:
            os._exit(9)
        count += 1

    event.listen(Engine, "after_cursor_execute", seen)
    RepositoryHandle.open(path).close()


@pytest.mark.parametrize("statement", [1, 8, 30, 55, 75])
def test_a_process_that_dies_in_the_migration_leaves_the_older_index(
    path: Path, wanted: dict[str, set[tuple[Any, ...]]], statement: int
) -> None:
    _older(path, REVISIONS[0])
    with Forked(_die_migrating, path, statement) as process:
        assert process.wait(60) == 9
    assert _completed(path) == wanted


def test_an_index_that_lacks_objects_besides_says_that_it_is_damaged(path: Path) -> None:
    _older(path)
    RepositoryHandle.open(path).close()
    with closing(sqlite3.connect(path / INDEX_PATH)) as raw, raw:
        raw.execute("DELETE FROM t_objects WHERE kind = 1")
    with closing(RepositoryHandle.open(path)) as handle:
        with pytest.raises(CorruptionError, match="index rebuild"):
            complete_index(handle)
        assert handle.index.read(pending.is_pending)


class _Seen:
    """A Progress that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def start(self, phase: str, total_bytes: int | None) -> None:
        self.told.append((phase, total_bytes))

    def advance(self, num_bytes: int) -> None:
        self.told.append(num_bytes)

    def finish(self) -> None:
        self.told.append("finished")


def test_progress_counts_the_bytes_of_packs(path: Path) -> None:
    _older(path)
    seen = _Seen()
    with closing(RepositoryHandle.open(path)) as handle:
        total = sum(handle.index.read(pending.pending_packs).values())
        complete_index(handle, progress=seen)
        assert seen.told[0] == ("upgrading the index", total) and seen.told[-1] == "finished"
        assert sum(each for each in seen.told[1:-1]) == total
        complete_index(handle, progress=seen)
    assert seen.told.count("finished") == 1


def test_of_packs_of_nodes_few_are_in_memory_and_in_one_transaction() -> None:
    """25,000 entries are a pack of 2 MiB, and take 25 MiB as rows, or 50 if somebody means harm."""
    metas = [(f"packs/{at}.meta", 2 << 20) for at in range(5)]
    assert [len(batch) for batch in pack_batches(metas)] == [2, 2, 1]
    datas = [(f"packs/{at}.data", 200 << 20) for at in range(7)]
    assert [len(batch) for batch in pack_batches(datas)] == [5, 2]
    large = [("packs/1.meta", 1), ("packs/2.meta", 1 << 30), ("packs/3.meta", 1)]
    assert [len(batch) for batch in pack_batches(large)] == [1, 1, 1]
    assert [len(batch) for batch in pack_batches((f"packs/{at}.meta", 900) for at in range(300))] == [256, 44]
    assert list(pack_batches([])) == []
