"""A check while others commit, forget and collect: it finds no damage that is none."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cas_ckpt.core.forgotten import write_forgotten
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.index import history
from cas_ckpt.objects.digest import Digest
from cas_ckpt.ops.fsck import check as fsck
from cas_ckpt.ops.fsck.check import check_open, check_url
from cas_ckpt.ops.fsck.repair import rebuild_index
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.gc.plan import GcOptions
from cas_ckpt.ops.refs import delete_branch
from cas_ckpt.ops.retention.forget import forget_by_policy
from cas_ckpt.ops.retention.policy import Policy, Retention
from cas_ckpt.storage.file import FileStore
from tests.builders import commit, new_repository, numbers
from tests.index.building import remove_ref
from tests.meddling import MeddledStore
from tests.ops.fsck.fsck_cases import READ_ALL, check

EAGER = GcOptions(min_age_s=-1.0, reflog_expire_s=-1.0, max_unused=0.0, many_small=2)


def somebody_else(path: Path) -> None:
    """Commits, forgets, and collects with a vengeance, so that packs come and go."""
    handle = RepositoryHandle.open(path)
    commit(handle, {"w": numbers(60, 60, seed=99), "kept": numbers(50, 50, seed=1)})
    delete_branch(handle, "doomed", force=True)
    old = [digest for digest, link in handle.index.read(history.read_links).items() if not link.parents]
    write_forgotten(handle.store, map(Digest, old), author="test")
    done = collect_garbage(handle, EAGER)
    assert done.deleted_packs
    handle.close()


@pytest.mark.parametrize("at", range(1, 12, 2))
def test_a_check_beside_a_commit_and_a_collection_finds_no_damage(tmp_path: Path, at: int) -> None:
    path = tmp_path / "repo"
    handle = new_repository(path)
    for seed in range(4):
        commit(handle, {"w": numbers(60, 60, seed=seed), "kept": numbers(50, 50, seed=1)})
    commit(handle, {"junk": numbers(70, 70, seed=50)}, branch="doomed")
    handle.close()
    store = MeddledStore(FileStore(path), lambda: somebody_else(path), before="get_tail", at=at)
    checked = RepositoryHandle.on_store(store, index_url=str(path / "index" / "index.sqlite"))
    report = check_open(checked, READ_ALL)
    assert report.problems == ()
    assert store.happened
    assert check(path).problems == ()


def test_what_nobody_needs_is_told_as_a_note(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    commit(handle, {"w": numbers(60, 60)})
    commit(handle, {"junk": numbers(70, 70, seed=50)}, branch="doomed")
    for key in ("refs/heads/doomed.ref", "names/heads/doomed.ref"):
        handle.store.delete(key)
    remove_ref(handle.index, "refs/heads/doomed.ref")  # else it would be a lost ref, and the commit an orphan
    report = check_open(handle)
    assert report.ok
    assert ["hold nothing that a commit needs" in note.what for note in report.notes] == [True]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with closing(new_repository(tmp_path / "repo")) as handle:
        for step in range(4):
            commit(handle, {"w": numbers(40, 40, seed=step)})
    return tmp_path / "repo"


def forget_all_but_a_new_commit(handle: RepositoryHandle, *, seed: int) -> None:
    """What the branch named before is forgotten and collected."""
    commit(handle, {"w": numbers(40, 40, seed=seed)})
    forget_by_policy(handle, Retention(Policy(keep_last=1)), branches=["main"])
    collect_garbage(handle, EAGER)


def test_a_commit_that_comes_while_a_check_looks_at_what_is_missing_is_not_called_missing(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the check began with was forgotten and collected meanwhile, and the branch went on to a new commit."""
    real, looks = fsck.catch_up, []

    def catch_up(*args: Any) -> None:
        real(*args)
        if len(looks) < 2:
            forget_all_but_a_new_commit(other, seed=100 + len(looks))
        looks.append(1)

    with closing(RepositoryHandle.open(path)) as other:
        monkeypatch.setattr(fsck, "catch_up", catch_up)
        report = check_url(path)
    assert report.ok, report.problems
    assert len(looks) > 2


def test_an_index_made_anew_between_the_two_looks_of_a_check_makes_it_begin_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first look has numbers of the old index, which mean other objects in the new one."""
    began: list[str] = []
    real, names = fsck.check_records, fsck.reread_names

    def check_records(*args: Any) -> Any:
        records = real(*args)
        if not began:  # what the check began with is gone when it looks for what is missing
            forget_all_but_a_new_commit(other, seed=100)
        began.append("check")
        return records

    def reread_names(*args: Any) -> Any:
        rebuild_index(path)
        began.append("rebuild")
        return names(*args)

    with closing(RepositoryHandle.open(path)) as other:
        monkeypatch.setattr(fsck, "check_records", check_records)
        monkeypatch.setattr(fsck, "reread_names", reread_names)
        report = check_url(path)
    assert report.ok, report.problems
    assert began == ["check", "rebuild", "check"]
