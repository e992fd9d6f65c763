"""A disk that is really full, and one that really may not be written."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from cas_ckpt import Repository
from cas_ckpt.errors import OutOfSpaceError, PermissionDeniedError
from tests.media import on_medium

pytestmark = pytest.mark.slow


def state(number: int, size: int = 200_000) -> dict[str, Any]:
    return {"w": torch.rand(size, generator=torch.Generator().manual_seed(number)), "number": number}


def is_whole(repo: Repository, number: int) -> bool:
    loaded = repo.load("main")
    return loaded["number"] == number and torch.equal(loaded["w"], state(number)["w"])


def no_leftovers(path: Path) -> bool:
    return not [file for file in (path / "tmp").iterdir() if not file.name.startswith("lock")]


def fill(folder: Path) -> None:
    """Commit until the disk is full; free some space, and go on."""
    path = folder / "repo"
    (folder / "ballast").write_bytes(bytes(2_000_000))
    last, said = -1, ""
    with Repository.init(path, encoding="raw") as repo:
        try:
            for number in range(100):
                repo.commit(state(number), step=number)
                last = number
        except OutOfSpaceError as error:
            said = str(error)
        assert 5 < last < 99
        assert "free some" in said
        assert is_whole(repo, last)
        with pytest.raises(OutOfSpaceError):
            repo.commit(state(101, size=3_000_000))
        assert no_leftovers(path)
    with Repository.open(path) as repo:
        assert [info.step for info in repo.log()] == list(range(last, -1, -1))
        assert is_whole(repo, last)
    os.truncate(folder / "ballast", 0)
    with Repository.open(path) as repo:
        info = repo.commit(state(last + 1), step=last + 1)
        assert len(info.parents) == 1
        assert is_whole(repo, last + 1)


def fill_exactly(folder: Path) -> None:
    """One commit after another with a little more space each: refused whole or done whole."""
    path = folder / "repo"
    with Repository.init(path, encoding="raw") as repo:
        repo.commit(state(0), step=0)
    head, refused = 0, 0
    for attempt, kib in enumerate((0, 4, 8, 16, 64, 200, 700, 780, 784, 788, 792, 800, 900), 1):
        leave_free(folder, kib)
        try:
            with Repository.open(path) as repo:
                repo.commit(state(attempt), step=attempt)
            head = attempt
        except OutOfSpaceError:
            refused += 1
        os.truncate(folder / "ballast", 0)
        with Repository.open(path) as repo:
            found = repo.log()[0].step
            assert found in (head, attempt)
            head = found
            assert is_whole(repo, head)
        assert no_leftovers(path)
    assert refused > 4
    assert head > 0


def leave_free(folder: Path, kib: int) -> None:
    """Let a ballast file take all of the disk but `kib` KiB."""
    free = shutil.disk_usage(folder).free
    with open(folder / "ballast", "wb") as ballast:
        ballast.write(bytes(max(0, free - kib * 1024)))


def fill_in_background(folder: Path, worker: Literal["thread", "process"]) -> None:
    """A commit that the disk has no room for, made in the background; the next one goes through the same worker."""
    logging.disable(logging.ERROR)  # the failure is logged at once, too; in this process alone
    path = folder / "repo"
    with Repository.init(path, encoding="raw") as repo:
        repo.commit(state(0), step=0)
        refused = repo.commit_async(state(1, size=4_000_000), step=1, worker=worker)
        with pytest.raises(OutOfSpaceError, match="free some"):
            refused.result()
        assert no_leftovers(path)
        assert is_whole(repo, 0)
        repo.commit_async(state(2), step=2, worker=worker).result()
        assert is_whole(repo, 2)
        assert [info.step for info in repo.log()] == [2, 0]


def read_only(folder: Path) -> None:
    """Everything can be read, with or without an index; whatever writes says so."""
    for name in ("with-index", "without-index"):
        with pytest.raises(PermissionDeniedError):
            Repository.open(folder / name)
        with Repository.open(folder / name, read_only=None) as repo:
            assert [info.step for info in repo.log()] == [1, 0]
            assert is_whole(repo, 1)
            into = state(5)
            repo.checkout("main~1", into=into)
            assert torch.equal(into["w"], state(0)["w"])
            writers = [
                lambda repo=repo: repo.commit(state(2), branch="other"), lambda repo=repo: repo.branch("new"),
                lambda repo=repo: repo.tag("t"), lambda repo=repo: repo.branch("main", start="main~1", force=True),
            ]  # fmt: skip
            for write in writers:
                with pytest.raises(PermissionDeniedError):
                    write()
            assert is_whole(repo, 1)
    with pytest.raises(PermissionDeniedError):
        Repository.init(folder / "new")


@pytest.mark.parametrize("work", [fill, fill_exactly])
def test_a_disk_that_runs_full_loses_nothing_and_works_again_with_space(
    tmp_path: Path, work: Callable[[Path], None]
) -> None:
    on_medium("small", tmp_path, work, tmp_path)


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_a_disk_that_runs_full_under_a_commit_in_the_background_fails_that_commit_alone(
    tmp_path: Path, worker: Literal["thread", "process"]
) -> None:
    on_medium("small", tmp_path, fill_in_background, tmp_path, worker)


def test_a_medium_that_may_not_be_written_can_be_read_and_refuses_the_rest(tmp_path: Path) -> None:
    for name in ("with-index", "without-index"):
        with Repository.init(tmp_path / name) as repo:
            repo.commit(state(0), step=0)
            repo.commit(state(1), step=1)
    shutil.rmtree(tmp_path / "without-index" / "index")
    on_medium("read-only", tmp_path, read_only, tmp_path)
