"""A repository in a folder that a group shares: nobody's reading locks the others out. Other users are processes."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from cas_ckpt import Repository
from tests.processes import Forked

OWNER, COLLEAGUE, GROUP = 61_001, 61_002, 61_000

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be other users")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A repository in a group's folder; not below one that is root's alone, as those of pytest are."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        folder = Path(name) / "team"
        folder.mkdir()
        os.chmod(folder, 0o2775)
        os.chown(folder, OWNER, GROUP)
        before = os.umask(0o002)
        try:
            commit(folder)
        finally:
            os.umask(before)
        for path in folder.rglob("*"):
            os.chown(path, OWNER, GROUP)
        yield folder


def _as_user(user: int, work: Callable[[Path], object], path: Path) -> None:
    own = path.parent / str(user)
    shutil.copytree(path, own)
    work(own)  # imports what it takes: modules may be where root alone may read
    shutil.rmtree(own)
    os.setgroups([])
    os.setgid(GROUP)
    os.setuid(user)
    os.umask(0o002)
    work(path)


def as_user(user: int, work: Callable[[Path], object], path: Path) -> None:
    with Forked(_as_user, user, work, path) as process:
        assert process.wait(timeout=60) == 0


def commit(path: Path) -> None:
    with Repository.open(path, create=True, group=None) as repo:
        repo.commit({"w": np.arange(10)})


def read(path: Path) -> None:
    from cas_ckpt.cli.main import main

    assert main(["-C", str(path), "log"]) == 0
    for read_only in (True, False):
        with Repository.open(path, read_only=read_only, group=None) as repo:
            assert len(list(repo.log())) == len(list(repo.find("w"))) == 1


def users_of(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_uid for path in folder.iterdir()}


@pytest.mark.slow
def test_a_new_index_may_be_written_by_the_group_that_may_write_the_folder(shared: Path) -> None:
    assert stat.S_IMODE((shared / "index" / "index.sqlite").stat().st_mode) == 0o664
    as_user(COLLEAGUE, commit, shared)
    as_user(OWNER, commit, shared)


@pytest.mark.slow
@pytest.mark.parametrize("died", [False, True], ids=["closed", "left behind by a process that died"])
def test_reading_an_index_that_one_may_not_write_leaves_nothing_beside_it(shared: Path, died: bool) -> None:
    index = shared / "index" / "index.sqlite"
    index.chmod(0o644)  # as earlier versions made it
    if died:
        for suffix in ("-wal", "-shm"):
            beside = index.with_name(index.name + suffix)
            beside.touch(0o644)
            os.chown(beside, OWNER, GROUP)
    before = users_of(index.parent)
    as_user(COLLEAGUE, read, shared)
    assert users_of(index.parent) == before
    as_user(OWNER, commit, shared)


def test_an_index_in_a_folder_of_ones_own_stays_ones_own(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        commit(tmp_path / "repo")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "repo" / "index" / "index.sqlite").stat().st_mode) == 0o600
