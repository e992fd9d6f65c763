"""A repository on a medium that cannot be written: what can be told is told, and what cannot be done is said."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import pytest

from cas_ckpt.core.config import INDEX_PATH
from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.errors import PermissionDeniedError
from cas_ckpt.ops.fsck.check import check_open, check_url
from cas_ckpt.ops.fsck.packs import DataOptions
from cas_ckpt.ops.fsck.repair import rebuild_index, refill_index
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.gc.plan import GcOptions
from cas_ckpt.ops.history.log import log_commits
from cas_ckpt.ops.refs import delete_branch
from tests.builders import commit, numbers
from tests.media import on_medium

pytestmark = pytest.mark.slow

EAGER = GcOptions(min_age_s=0, reflog_expire_s=0, max_unused=0)
STATES = ("whole", "behind", "none", "log left by a process that died")


def _make(path: Path, state: str) -> None:
    """A repository with garbage, and an index in `state`."""
    index = path / INDEX_PATH
    with closing(init_repository(path)) as handle:
        commit(handle, {"w": numbers(64, 64, seed=1)}, branch="side")
        delete_branch(handle, "side", force=True)
        if state == "behind":
            handle.index.close()
            shutil.copytree(index.parent, path.parent / "kept")
            handle = RepositoryHandle.open(path)
        commit(handle, {"w": numbers(64, 64, seed=2)})
        if state.startswith("log"):
            shutil.copytree(index.parent, path.parent / "kept")
        handle.index.close()
    if state == "none" or (path.parent / "kept").exists():
        shutil.rmtree(index.parent)
    if (path.parent / "kept").exists():
        shutil.move(path.parent / "kept", index.parent)
        index.with_name(index.name + "-shm").unlink(missing_ok=True)


def _look(folder: Path, state: str) -> None:
    path = folder / "repo"
    for options in (None, DataOptions()):
        report = check_url(path, options)
        assert report.ok, report.problems
        assert report.num_commits == 2
        told = [note.what for note in report.notes if "no index" in note.what]
        assert len(told) == (state == "none")
    with closing(RepositoryHandle.open(path)) as handle:
        assert len(list(log_commits(handle))) == 1
        foreseen = collect_garbage(handle, EAGER, dry_run=True)
        assert (foreseen.dead_objects, foreseen.deleted_packs) == (3, 2)
        assert check_open(handle).ok
        for write in (collect_garbage, refill_index):
            with pytest.raises(PermissionDeniedError):
                write(handle)
    with pytest.raises(PermissionDeniedError):
        rebuild_index(path)


@pytest.mark.parametrize("state", STATES)
def test_what_can_be_known_of_a_medium_that_cannot_be_written_is_told(tmp_path: Path, state: str) -> None:
    _make(tmp_path / "repo", state)
    on_medium("read-only", tmp_path, _look, tmp_path, state)


def test_the_index_of_such_a_repository_can_be_kept_elsewhere(tmp_path: Path) -> None:
    _make(tmp_path / "medium" / "repo", "none")
    on_medium("read-only", tmp_path / "medium", _keep_elsewhere, tmp_path / "medium", str(tmp_path / "index.sqlite"))


def _keep_elsewhere(folder: Path, index: str) -> None:
    assert rebuild_index(folder / "repo", index_url=index).stats.num_commits == 2
    report = check_url(folder / "repo", index_url=index)
    assert report.ok
    assert not [note for note in report.notes if "no index" in note.what]
