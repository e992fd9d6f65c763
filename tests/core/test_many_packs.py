"""An index that lacks many packs reads the next ones while it takes in the ones before."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from cas_ckpt.core import handle as handles
from cas_ckpt.core import packs
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.errors import TransientStorageError
from cas_ckpt.ops.fsck.check import check_open
from cas_ckpt.storage.file import FileStore
from tests.builders import commit, numbers


@pytest.fixture
def path(handle: RepositoryHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of 20 packs, of which few rows are read at a time."""
    for step in range(10):
        commit(handle, {"w": numbers(64, 64, seed=step)})
    monkeypatch.setattr(handles, "PACKS_PER_BATCH", 3)
    monkeypatch.setattr(packs, "PACKS_PER_BATCH", 3)
    monkeypatch.setattr(packs, "_MOST_ROWS", 5)
    return tmp_path / "repo"


def test_all_of_many_packs_are_taken_in_but_a_damaged_one(path: Path) -> None:
    damaged = sorted(path.glob("packs/*/*.data"))[5]
    damaged.write_bytes(damaged.read_bytes()[:-10])
    other = RepositoryHandle.open(path, index_url=":memory:")
    assert other.sync() == 19
    assert len(other.index.packs()) == 19
    assert other.damaged.keys() == {str(damaged.relative_to(path))}
    assert not [problem for problem in check_open(other).problems if "index" in str(problem.kind)]
    other.close()


def test_a_store_that_fails_in_the_middle_ends_it_with_its_error_and_no_thread_goes_on(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = RepositoryHandle.open(path, index_url=":memory:")
    get_tail, count = FileStore.get_tail, [0]

    def failing(store: FileStore, *asked: Any) -> Any:
        count[0] += 1
        if count[0] == 10:
            raise TransientStorageError("out of reach")
        return get_tail(store, *asked)

    monkeypatch.setattr(FileStore, "get_tail", failing)
    with pytest.raises(TransientStorageError, match="out of reach"):
        other.sync()
    assert not [thread for thread in threading.enumerate() if thread.name == "cas-ckpt-ahead"]
    assert 0 < len(other.index.packs()) < 20
    other.sync()
    assert len(other.index.packs()) == 20
    other.close()
