"""Narrow ways to be wrong: what must not be believed, relied on, or reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from cas_ckpt.core.packs import read_directory
from cas_ckpt.core.protocol import GC_STATE_KEY, GcState, encode_gc_state, read_gc_state
from cas_ckpt.core.refs import Generation
from cas_ckpt.errors import ConflictError
from cas_ckpt.objects import pack
from cas_ckpt.ops.fsck.repair import repair_store
from cas_ckpt.ops.fsck.report import Effect, RepairRequest
from cas_ckpt.ops.refs import create_branch
from cas_ckpt.storage.file import FileStore
from tests.builders import commit, new_repository, numbers
from tests.meddling import MeddledStore
from tests.ops.fsck.fsck_cases import check, copy_of, flip, repair

STATE = {"a": numbers(60, 60, seed=1), "b": numbers(60, 60, seed=2)}


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    handle = new_repository(tmp_path / "repo")
    commit(handle, STATE)
    handle.close()
    return tmp_path / "repo"


def data_pack(path: Path) -> str:
    return str(next((path / "packs").glob("*/*.data")).relative_to(path))


def test_an_intact_entry_in_the_place_of_another_is_damage(repo: Path) -> None:
    store = FileStore(repo)
    key = data_pack(repo)
    trailer, entries = read_directory(store, key)
    one, two = sorted(entries, key=lambda entry: entry.offset)
    data = bytearray((repo / key).read_bytes())
    assert one.end - one.offset == two.end - two.offset
    data[one.offset : one.end] = data[two.offset : two.end]
    (repo / key).write_bytes(bytes(data))
    report = check(repo)
    assert [problem.objects for problem in report.problems] == [(one.digest.hex(),)]
    assert (trailer.kind, trailer.size_bytes) == (pack.PackKind.DATA, len(data))


@pytest.mark.parametrize("gone", [".data", ".meta", ""])
def test_a_former_head_of_which_something_was_collected_is_no_damage(tmp_path: Path, gone: str) -> None:
    handle = new_repository(tmp_path / "repo")
    commit(handle, STATE)
    second = commit(handle, {"c": numbers(60, 60, seed=3)})
    before = {key for key, _ in handle.store.list("packs/")}
    commit(handle, {"d": numbers(60, 60, seed=4)}, branch="other")
    fresh = {key for key, _ in handle.store.list("packs/")} - before
    create_branch(handle, "other", start="main", force=True)
    for key in fresh:
        if key.endswith(gone):
            handle.store.delete(key)
    handle.sync()
    handle.close()
    report = check(tmp_path / "repo")
    assert report.ok and second.id


def test_a_damaged_former_head_is_named_all_the_same(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    commit(handle, STATE)
    before = {key for key, _ in handle.store.list("packs/")}
    old = commit(handle, {"d": numbers(60, 60, seed=4)}, branch="other")
    (data,) = (key for key in {key for key, _ in handle.store.list("packs/")} - before if key.endswith(".data"))
    create_branch(handle, "other", start="main", force=True)
    handle.close()
    flip(tmp_path / "repo" / data, 3000)
    report = check(tmp_path / "repo")
    assert [(problem.effect, [hit.commit for hit in problem.hits]) for problem in report.problems] == [
        (Effect.LOST, [old.id])
    ]


def test_a_ref_is_not_made_to_name_what_a_collection_is_about_to_delete(repo: Path, tmp_path: Path) -> None:
    copy = copy_of(repo, tmp_path / "copy")
    store = FileStore(repo)
    store.put(GC_STATE_KEY, encode_gc_state(GcState(Generation(1), "condemned", (data_pack(repo),))))
    flip(repo / "refs/heads/main.ref", 60)
    done = repair(repo, "refs", other=copy)
    assert not done.actions and "about to be collected" in done.left[0].what


def test_a_collection_that_begins_meanwhile_ends_the_repair_before_anything_is_removed(
    repo: Path, tmp_path: Path
) -> None:
    copy = copy_of(repo, tmp_path / "copy")
    key = data_pack(repo)
    flip(repo / key, 3000)
    check(repo)
    request = RepairRequest(frozenset({"chunks"}), (str(copy),))
    inner = FileStore(repo)

    def begin_a_collection() -> None:
        inner.put(GC_STATE_KEY, encode_gc_state(GcState(read_gc_state(inner).generation.next(), "idle")))

    store = MeddledStore(inner, begin_a_collection, before="open_writer", key="damaged/*", times=99)
    with pytest.raises(ConflictError, match="repair again"):
        repair_store(store, request, index_url=str(repo / "index" / "index.sqlite"))
    assert store.happened
    assert (repo / key).exists()
    assert repair(repo, "chunks", other=copy).ok
    assert check(repo).ok and not (repo / key).exists()


def test_a_repair_takes_over_from_a_collector_that_died_after_it_condemned_the_damaged_pack(
    repo: Path, tmp_path: Path
) -> None:
    key = data_pack(repo)
    flip(repo / key, (repo / key).stat().st_size - 30)
    FileStore(repo).put(GC_STATE_KEY, encode_gc_state(GcState(Generation(1), "condemned", (key,))))
    assert repair(repo, "packs").ok
    assert check(repo).problems == ()
    assert read_gc_state(FileStore(repo)).phase == "idle"


def test_the_intact_header_of_another_pack_is_damage(repo: Path, tmp_path: Path) -> None:
    copy = copy_of(repo, tmp_path / "copy")
    path = repo / data_pack(repo)
    path.write_bytes(pack.encode_header(bytes(16), pack.PackKind.DATA) + path.read_bytes()[pack.HEADER_BYTES :])
    report = check(repo)
    assert [(problem.effect, "its header says" in problem.what) for problem in report.problems] == [
        (Effect.HARMLESS, True)
    ]
    assert repair(repo, "packs", other=copy).ok
    assert check(repo).ok
