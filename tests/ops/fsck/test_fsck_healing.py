"""What is lost is found by its id: in other repositories, in other packs, in the next commit of the same state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.packs import read_directory
from cas_ckpt.core.refs import RefKind
from cas_ckpt.index import history
from cas_ckpt.ops.fsck.check import check_open
from cas_ckpt.ops.fsck.report import Effect
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.gc.plan import REPACK, GcOptions
from cas_ckpt.storage.file import FileStore
from tests.builders import commit, new_repository, numbers, same_bytes, stored_arrays, weights, with_new_index
from tests.index.building import remove_ref
from tests.ops.fsck.fsck_cases import READ_ALL, check, copy_of, flip, repair, repair_as_told

STATE = {"model": {"w": numbers(1100, 1000, seed=1), "b": numbers(70, 70, seed=2)}, "step": 7}
NOW = GcOptions(reflog_expire_s=0, max_unused=0, min_age_s=0)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    handle = new_repository(tmp_path / "repo", encoding="raw")
    commit(handle, STATE)
    handle.close()
    return tmp_path / "repo"


def data_pack(path: Path) -> Path:
    return max((path / "packs").glob("*/*.data"), key=lambda one: one.stat().st_size)


def test_a_repository_that_came_by_the_same_state_otherwise_heals_this_one(repo: Path, tmp_path: Path) -> None:
    other = new_repository(tmp_path / "other", encoding="zstd", pack_bytes=1 << 20)
    commit(other, {"model": {"b": numbers(70, 70, seed=2)}})
    commit(other, {"x": STATE["model"]}, message="the same tensors under another name")
    other.close()
    pack = data_pack(repo)
    flip(pack, 100_000)
    flip(pack, 4_300_000)
    report = check(repo)
    assert report.problems[0].effect is Effect.LOST
    assert repair_as_told(repo, report, other=tmp_path / "other").ok
    assert check(repo).ok
    assert same_bytes(read(repo)["model/w"], STATE["model"]["w"].view("uint32"))


def read(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    handle = RepositoryHandle.open(path)
    row = handle.index.read(history.read_commit, handle.refs.get(RefKind.BRANCH, "main").target or b"")
    assert row is not None
    return stored_arrays(handle, row.root.hex())


def inside_the_largest(path: Path, pack: Path, at: int) -> int:
    """Where byte `at` of the payload of a pack's largest entry stands."""
    _, entries = read_directory(FileStore(path), str(pack.relative_to(path)))
    largest = max(entries, key=lambda entry: entry.stored_bytes)
    return largest.offset + largest.header_bytes + at


def test_a_source_that_is_damaged_itself_helps_as_far_as_it_is_intact(repo: Path, tmp_path: Path) -> None:
    copy = copy_of(repo, tmp_path / "copy")
    (copy / "index" / "index.sqlite").write_bytes(b"not a database")
    flip(data_pack(repo), 100_000)
    flip(data_pack(repo), 4_300_000)
    flip(data_pack(copy), 4_300_000)
    done = repair(repo, "chunks", other=copy, read_data=True)
    assert not done.ok and "1 objects have no intact copy" in done.left[0].what
    assert [len(problem.objects) for problem in check(repo).problems] == [1]


def test_the_next_commit_of_the_same_state_heals_after_the_damaged_pack_is_out_of_use(repo: Path) -> None:
    flip(data_pack(repo), 100_000)
    check(repo)
    assert not repair(repo, "chunks").ok
    assert not check(repo).ok
    handle = RepositoryHandle.open(repo)
    assert commit(handle, STATE).stats.num_new_chunks == 1
    assert check_open(handle, READ_ALL).ok


def test_two_damaged_copies_of_a_chunk_heal_each_other_leaf_by_leaf(repo: Path, tmp_path: Path) -> None:
    other = new_repository(tmp_path / "other", encoding="raw")
    commit(other, STATE)
    other.close()
    second = data_pack(tmp_path / "other")
    target = repo / second.relative_to(tmp_path / "other")
    target.parent.mkdir(exist_ok=True)
    first = data_pack(repo)
    target.write_bytes(second.read_bytes())
    flip(first, inside_the_largest(repo, first, 100_000))
    flip(target, inside_the_largest(repo, target, 1_000_000))
    report = check(repo)
    assert {problem.effect for problem in report.problems} == {Effect.LOST}
    assert repair(repo, "packs").ok
    assert check(repo).ok
    assert same_bytes(read(repo)["model/w"], STATE["model"]["w"].view("uint32"))


def test_damage_of_which_another_copy_is_intact_is_harmless_and_repaired_without_help(
    repo: Path, tmp_path: Path
) -> None:
    other = new_repository(tmp_path / "other", encoding="raw")
    commit(other, STATE)
    other.close()
    second = data_pack(tmp_path / "other")
    target = repo / second.relative_to(tmp_path / "other")
    target.parent.mkdir(exist_ok=True)
    target.write_bytes(second.read_bytes())
    flip(target, 1_000_000)
    report = check(repo)
    assert [(problem.effect, problem.hits) for problem in report.problems] == [(Effect.HARMLESS, ())]
    assert repair_as_told(repo, report).ok
    assert check(repo).ok


def test_an_entry_header_that_points_elsewhere_is_damage_and_not_followed(repo: Path) -> None:
    store = FileStore(repo)
    key = str(data_pack(repo).relative_to(repo))
    _, entries = read_directory(store, key)
    for entry in entries:
        flip(repo / key, entry.offset + 12)
    assert len(check(repo).problems[0].objects) == len(entries)


def test_damage_that_nobody_needs_is_told_and_hits_nobody(repo: Path) -> None:
    handle = RepositoryHandle.open(repo)
    before = set((repo / "packs").glob("*/*.data"))
    commit(handle, {"junk": numbers(300, 300, seed=5)}, branch="junk")
    remove_ref(handle.index, "refs/heads/junk.ref")  # else it would be a lost ref
    handle.close()
    for key in ("refs/heads/junk.ref", "names/heads/junk.ref"):
        (repo / key).unlink()
    (junk,) = set((repo / "packs").glob("*/*.data")) - before
    flip(junk, 5000)
    report = check(repo)
    assert [(problem.effect, problem.hits) for problem in report.problems] == [(Effect.HARMLESS, ())]
    assert repair_as_told(repo, report).ok
    assert check(repo).ok


def test_a_repository_that_lost_all_packs_and_its_index_comes_back_whole_from_a_copy(
    repo: Path, tmp_path: Path
) -> None:
    handle = RepositoryHandle.open(repo)
    commit(handle, STATE | {"step": 8}, message="another on top")
    handle.close()
    copy = copy_of(repo, tmp_path / "copy")
    for path in [*(repo / "packs").glob("*/*"), *(repo / "index").iterdir()]:
        path.unlink()
    report = check(repo)
    assert [(problem.effect, problem.hits[0].keys) for problem in report.problems] == [(Effect.LOST, ("**",))]
    assert repair_as_told(repo, report, other=copy).ok
    assert check(repo).ok
    assert len(RepositoryHandle.open(repo).index.read(history.read_links)) == 2
    assert same_bytes(read(repo)["model/w"], STATE["model"]["w"].view("uint32"))


@pytest.mark.parametrize("rotten", [0, 1])
@pytest.mark.parametrize("told", [False, True], ids=["unknown", "in the scrub log"])
def test_of_two_copies_the_intact_one_is_not_given_up_for_a_damaged_one(
    handle: RepositoryHandle, tmp_path: Path, rotten: int, told: bool
) -> None:
    for seed in range(10, 40):
        commit(handle, {"w": weights(seed)}, branch=f"b{seed}")
    other = RepositoryHandle.open(tmp_path / "repo", index_url=":memory:")
    other.begin_writing()
    handle.begin_writing()
    before = {key for key, _ in handle.store.list("packs/")}
    info = commit(handle, {"w": weights(2)}, branch="x")
    commit(other, {"w": weights(2)}, branch="y")
    twins = sorted({key for key, _ in handle.store.list("packs/") if key.endswith(".data")} - before)
    assert len(twins) == 2
    flip(tmp_path / "repo" / twins[rotten], 3000)
    handle.sync()
    if told:
        assert check_open(handle, READ_ALL).problems
    collect_garbage(handle, GcOptions(many_small=10_000, max_unused=0.02))
    collect_garbage(handle, NOW)
    collect_garbage(handle, REPACK)
    assert same_bytes(stored_arrays(with_new_index(tmp_path / "repo"), info.root)["w"], weights(2))
