"""An index of an older schema is upgraded and filled anew, whatever happens meanwhile."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, event

from cas_ckpt.core import packs
from cas_ckpt.core.config import INDEX_PATH
from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.packs import pack_batches, read_directory
from cas_ckpt.errors import CorruptionError
from cas_ckpt.index import integrity, remembered
from cas_ckpt.index.integrity import Scrub
from cas_ckpt.index.rows import REVISIONS
from cas_ckpt.objects.layouts import Division, compose_layout, layout_node
from cas_ckpt.ops.fsck.check import check_open, check_url
from cas_ckpt.ops.fsck.repair import rebuild_index
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.gc.plan import GcOptions
from cas_ckpt.ops.refs import delete_branch
from cas_ckpt.transfer.pack_writer import write_nodes
from tests.builders import commit, numbers
from tests.divided import mesh, over
from tests.index.manifest_rows import make_older, said
from tests.media import on_medium
from tests.processes import Forked

pytestmark = pytest.mark.slow

NUM_COMMITS = 6


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("made") / "repo"
    with closing(init_repository(place)) as handle:
        for step in range(NUM_COMMITS):
            small = {f"step {at}": at + step for at in range(300)}
            commit(handle, {"w": numbers(900, 2000, seed=step), "b": numbers(3, seed=1), "more": small})
            odd = {"w": numbers(40, 40, seed=step), "a\0b": "x", "long": "y" * 40}
            commit(handle, odd, branch="side", meta={"step": step}, provenance=True)
    return place


@pytest.fixture
def path(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "repo")


@pytest.fixture(scope="module")
def wanted(made: Path) -> dict[str, set[tuple[Any, ...]]]:
    with closing(RepositoryHandle.open(made)) as handle:
        found = said(handle.index)
    assert found["t_entries"] and found["t_tensors"] and found["t_raw_names"] and found["t_layouts"]
    return found


def _older(path: Path, revision: str = "0003") -> None:
    with closing(RepositoryHandle.open(path)) as handle:
        store_id = handle.config.store_id
    make_older(path / INDEX_PATH, store_id, revision)


def _filled(path: Path) -> dict[str, set[tuple[Any, ...]]]:
    with closing(RepositoryHandle.open(path)) as handle:
        return said(handle.index)


@pytest.mark.parametrize("revision", REVISIONS[:-1])
def test_an_index_of_every_older_schema_is_filled_anew_and_keeps_what_packs_do_not_hold(
    path: Path, wanted: dict[str, set[tuple[Any, ...]]], revision: str
) -> None:
    with closing(RepositoryHandle.open(path)) as handle:
        refs = handle.index.read(remembered.read_refs)
    _older(path, revision)
    with closing(RepositoryHandle.open(path)) as handle:
        assert said(handle.index) == wanted
        assert (handle.index.is_behind, handle.index.read(remembered.read_refs)) == (False, refs)
    assert check_url(path).problems == ()


def test_a_check_that_is_the_first_after_an_upgrade_finds_a_sound_older_index_sound(
    path: Path, wanted: dict[str, set[tuple[Any, ...]]]
) -> None:
    _older(path)
    on_medium("read-only", path.parent, _find_sound, path)
    _find_sound(path)
    with closing(RepositoryHandle.open(path, read_only=True)) as handle:
        assert handle.index.in_memory is False
        assert said(handle.index) == wanted


def _find_sound(path: Path) -> None:
    report = check_url(path)
    assert report.problems == (), report.problems


def test_of_processes_that_opened_after_an_upgrade_one_fills_the_index(
    path: Path, wanted: dict[str, set[tuple[Any, ...]]]
) -> None:
    _older(path)
    with closing(RepositoryHandle.open(path)) as first, closing(RepositoryHandle.open(path)) as later:
        made = first.index.made()
        assert said(later.index) == wanted
        assert later.index.made() == made


def _die_filling(path: Path) -> None:
    packs.replace_rows = lambda *_: os._exit(9)
    _filled(path)


def test_a_process_that_dies_as_it_fills_an_index_leaves_that_to_the_next_one(
    path: Path, wanted: dict[str, set[tuple[Any, ...]]]
) -> None:
    _older(path)
    with Forked(_die_filling, path) as process:
        assert process.wait(60) == 9
    assert _filled(path) == wanted


def test_processes_that_upgrade_one_index_at_once_do_nothing_wrong(
    path: Path, wanted: dict[str, set[tuple[Any, ...]]]
) -> None:
    _older(path)
    with ExitStack() as stack:
        processes = [stack.enter_context(Forked(_filled, path)) for _ in range(3)]
        assert [process.wait(120) for process in processes] == [0, 0, 0]
    assert _filled(path) == wanted


def test_an_index_that_lacks_packs_and_objects_besides_has_them_again(
    path: Path, wanted: dict[str, set[tuple[Any, ...]]]
) -> None:
    _older(path)
    with closing(sqlite3.connect(path / INDEX_PATH)) as raw, raw:
        raw.execute("DELETE FROM objects WHERE kind = 1")
    assert _filled(path) == wanted


@pytest.mark.parametrize("upgraded", [True, False], ids=["its tables are upgraded", "nothing is"])
def test_what_may_only_be_read_is_filled_in_memory(
    path: Path, wanted: dict[str, set[tuple[Any, ...]]], upgraded: bool
) -> None:
    _older(path)
    if upgraded:
        RepositoryHandle.open(path).close()
    before = (path / INDEX_PATH).read_bytes()
    with closing(RepositoryHandle.open(path, read_only=True)) as handle:
        assert said(handle.index) == wanted
    assert (path / INDEX_PATH).read_bytes() == before


def test_a_pack_that_is_damaged_is_named_and_left_out_until_it_is_whole_again(
    path: Path, wanted: dict[str, set[tuple[Any, ...]]], caplog: pytest.LogCaptureFixture
) -> None:
    _older(path)
    meta_pack = sorted((path / "packs").glob("*/*.meta"))[0]
    whole = meta_pack.read_bytes()
    with closing(RepositoryHandle.open(path)) as handle:
        node = read_directory(handle.store, f"packs/{meta_pack.parent.name}/{meta_pack.name}")[1][0]
    at = node.offset + node.header_bytes
    meta_pack.write_bytes(whole[:at] + bytes(8) + whole[at + 8 :])
    with closing(RepositoryHandle.open(path)) as handle:
        assert said(handle.index)["t_entries"] < wanted["t_entries"]
        assert list(handle.damaged) == [f"packs/{meta_pack.parent.name}/{meta_pack.name}"]
    assert meta_pack.name in caplog.text and "fsck says" in caplog.text
    meta_pack.write_bytes(whole)
    with closing(RepositoryHandle.open(path)) as handle:
        handle.sync()
        assert said(handle.index) == wanted
    assert check_url(path).ok


def test_a_rebuild_makes_the_same_rows(path: Path, wanted: dict[str, set[tuple[Any, ...]]]) -> None:
    rebuild_index(path)
    with closing(RepositoryHandle.open(path)) as handle:
        assert said(handle.index) == wanted


@pytest.mark.parametrize("revision", REVISIONS[:-1])
def test_what_a_damaged_index_of_an_older_schema_remembers_is_kept_by_a_rebuild(
    path: Path, wanted: dict[str, set[tuple[Any, ...]]], revision: str
) -> None:
    with closing(RepositoryHandle.open(path)) as handle:
        handle.index.set_generation(7)
        handle.index.write(integrity.write_scrub, Scrub(next(iter(handle.index.packs())), 5, 6))
        before = handle.index.read(remembered.read_refs), handle.index.read(integrity.read_scrubs)
    _older(path, revision)
    with closing(sqlite3.connect(path / INDEX_PATH)) as raw:
        (page_bytes,) = raw.execute("PRAGMA page_size").fetchone()
        table = "locations" if revision < "0004" else "t_locations" if revision < "0007" else "t_pending"
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
        scrubs = before[1] if revision >= "0003" else {}  # earlier ones had no such table
        assert (handle.index.read(remembered.read_refs), handle.index.read(integrity.read_scrubs)) == (
            before[0],
            scrubs,
        )


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
    assert _filled(path) == wanted


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
