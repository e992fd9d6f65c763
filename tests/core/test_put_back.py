"""Files that were put back from an older copy, or under another name: refused or repaired, never obeyed."""

from __future__ import annotations

from pathlib import Path

import pytest

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.protocol import GC_STATE_KEY
from cas_ckpt.errors import CorruptionError
from cas_ckpt.ops.fsck.check import check_open
from cas_ckpt.ops.fsck.repair import repair_open
from cas_ckpt.ops.fsck.report import RepairRequest
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.gc.plan import GcOptions
from cas_ckpt.ops.refs import create_branch, delete_branch
from tests.builders import commit, numbers, stored_arrays
from tests.ops.fsck.fsck_cases import repair_as_told

NOW = GcOptions(min_age_s=0, reflog_expire_s=0, max_unused=0)
"""Spare nothing."""


def again(handle: RepositoryHandle) -> RepositoryHandle:
    """Another process."""
    return RepositoryHandle.open(handle.store.url)


def collected(handle: RepositoryHandle) -> None:
    """Some garbage is made and collected: a generation begins."""
    commit(handle, {"w": numbers(64, 64, seed=99)}, branch="garbage")
    delete_branch(handle, "garbage", force=True)
    assert collect_garbage(handle, NOW).deleted_packs


def swap_files(handle: RepositoryHandle, one: str, other: str) -> None:
    mine, theirs = handle.store.get(one), handle.store.get(other)
    handle.store.put(one, theirs)
    handle.store.put(other, mine)


# --- a record under another name ----------------------------------------------------------


def test_refs_whose_files_were_swapped_are_refused_and_found(handle: RepositoryHandle) -> None:
    first = commit(handle, {"w": numbers(64, 64, seed=1)})
    second = commit(handle, {"w": numbers(64, 64, seed=2)}, branch="side")
    swap_files(handle, "refs/heads/main.ref", "refs/heads/side.ref")
    with pytest.raises(CorruptionError, match=r"main\.ref .*side\.ref.*repair\(.refs.\)"):
        commit(again(handle), {"w": numbers(64, 64, seed=3)})
    with pytest.raises(CorruptionError, match=r"side\.ref"):
        collect_garbage(again(handle), NOW)
    report = check_open(handle)
    assert [problem.where for problem in report.problems] == ["refs/heads/main.ref", "refs/heads/side.ref"]
    repair_open(handle, RepairRequest(frozenset(["refs"]), refs={"main": first.id, "side": second.id}))
    assert not check_open(handle).problems
    assert handle.refs.get(*named("main")).target == bytes.fromhex(first.id)
    assert handle.refs.get(*named("side")).target == bytes.fromhex(second.id)


@pytest.mark.parametrize("key", ["refs/tags/v1.ref", "forgotten/" + "0" * 32, "policy", "config", GC_STATE_KEY])
def test_a_copy_of_a_record_under_another_key_is_never_read_as_its_own(handle: RepositoryHandle, key: str) -> None:
    commit(handle, {"w": numbers(64, 64, seed=1)})
    handle.store.put(key, handle.store.get("refs/heads/main.ref"))
    assert {problem.where for problem in check_open(handle).problems} == {key}


# --- gc/state -----------------------------------------------------------------------------


def named(name: str):  # type: ignore[no-untyped-def]
    from cas_ckpt.core.refs import RefKind

    return RefKind.BRANCH, name


def test_an_older_gc_state_is_refused_by_commit_branch_gc_and_fsck_until_it_is_made_anew(
    handle: RepositoryHandle,
) -> None:
    first = commit(handle, {"w": numbers(64, 64, seed=1)})
    older = handle.store.get(GC_STATE_KEY)
    collected(handle)
    handle.store.put(GC_STATE_KEY, older)
    for process in (handle, again(handle)):
        with pytest.raises(CorruptionError, match=r"repo\.repair\(.state.\)"):
            commit(process, {"w": numbers(64, 64, seed=2)})
        with pytest.raises(CorruptionError, match=r"repo\.repair\(.state.\)"):
            create_branch(process, "new", start="main")
        with pytest.raises(CorruptionError, match=r"repo\.repair\(.state.\)"):
            collect_garbage(process, NOW)
    report = check_open(handle)
    assert {problem.where for problem in report.problems} == {GC_STATE_KEY}
    assert any("--repair state" in command for command in report.commands)
    repair_as_told(Path(handle.store.url.removeprefix("file://")), report)
    assert not check_open(again(handle)).problems
    commit(handle, {"w": numbers(64, 64, seed=2)})
    collected(handle)
    assert stored_arrays(again(handle), first.root)


def test_an_older_gc_state_is_refused_without_an_index_too(handle: RepositoryHandle) -> None:
    commit(handle, {"w": numbers(64, 64, seed=1)})
    older = handle.store.get(GC_STATE_KEY)
    collected(handle)
    handle.store.put(GC_STATE_KEY, older)
    for verb in (
        lambda process: commit(process, {"w": numbers(64, 64, seed=2)}),
        lambda process: collect_garbage(process, NOW),
    ):
        with pytest.raises(CorruptionError, match=r"repo\.repair\(.state.\)"):
            verb(RepositoryHandle.open(handle.store.url, index_url=":memory:"))


def test_a_generation_is_not_taken_for_another_of_the_same_number(handle: RepositoryHandle) -> None:
    """The state of before a collection, put back with the refs of that time, and collected again: the handle that
    saw the first collection must not believe that it saw the second one."""
    commit(handle, {"w": numbers(64, 64, seed=1)})
    commit(handle, {"w": numbers(64, 64, seed=7)}, branch="other")
    files = {key: handle.store.get(key) for key in (GC_STATE_KEY, "refs/heads/main.ref", "refs/heads/other.ref")}
    collected(handle)
    sleeper = again(handle)
    sleeper.begin_writing()  # has seen generation 1, and the data of `other`
    for key, record in files.items():
        handle.store.put(key, record)
    for prefix in ("refs", "names"):
        handle.store.delete(f"{prefix}/heads/garbage.ref")
    process = RepositoryHandle.open(handle.store.url, index_url=":memory:")
    delete_branch(process, "other", force=True)
    assert collect_garbage(process, NOW).deleted_packs  # generation 1 again, another one
    info = commit(sleeper, {"w": numbers(64, 64, seed=7)})
    assert stored_arrays(again(handle), info.root)["w"].size
