"""A check while others commit, forget and collect: it finds no damage that is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from cas_ckpt.forgotten import write_forgotten
from cas_ckpt.objects.digest import Digest
from cas_ckpt.ops.branch import delete_branch
from cas_ckpt.ops.fsck import check_open
from cas_ckpt.ops.gc import collect_garbage
from cas_ckpt.ops.gc_plan import GcOptions
from cas_ckpt.repository import RepositoryHandle
from cas_ckpt.storage.file import FileStore
from tests.builders import commit, new_repository, numbers
from tests.ops.fsck_cases import READ_ALL, check

EAGER = GcOptions(min_age_s=-1.0, reflog_expire_s=-1.0, max_unused=0.0, many_small=2)


class BusyStore(FileStore):
    """Somebody else does something at the k-th read of a pack's end."""

    def __init__(self, root: Path, at: int, path: Path) -> None:
        super().__init__(root)
        self.left = at
        self.path = path

    def get_tail(self, key: str, length: int) -> tuple[int, bytes]:
        self.left -= 1
        if self.left == 0:
            somebody_else(self.path)
        return super().get_tail(key, length)


def somebody_else(path: Path) -> None:
    """Commits, forgets, and collects with a vengeance, so that packs come and go."""
    handle = RepositoryHandle.open(path)
    commit(handle, {"w": numbers(60, 60, seed=99), "kept": numbers(50, 50, seed=1)})
    delete_branch(handle, "doomed")
    old = [digest for digest, link in handle.index.commit_links().items() if not link.parents]
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
    checked = RepositoryHandle.on_store(BusyStore(path, at, path), index_url=str(path / "index" / "index.sqlite"))
    report = check_open(checked, READ_ALL)
    assert report.problems == ()
    assert checked.store.left <= 0  # type: ignore[attr-defined]
    assert check(path).problems == ()


def test_what_nobody_needs_is_told_as_a_note(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    commit(handle, {"w": numbers(60, 60)})
    commit(handle, {"junk": numbers(70, 70, seed=50)}, branch="doomed")
    for key in ("refs/heads/doomed.ref", "names/heads/doomed.ref"):
        handle.store.delete(key)
    handle.index.drop_ref("refs/heads/doomed.ref")  # else it would be a lost ref, and the commit an orphan
    report = check_open(handle)
    assert report.ok
    assert ["hold nothing that a commit needs" in note.what for note in report.notes] == [True]
