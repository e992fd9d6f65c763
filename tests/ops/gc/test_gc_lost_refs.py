"""Collections of repositories whose refs were lost: nothing is concluded from what is left."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.errors import CorruptionError
from cas_ckpt.ops.fsck.check import check_open
from cas_ckpt.ops.fsck.repair import repair_open
from cas_ckpt.ops.fsck.report import RepairRequest
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.gc.plan import GcOptions
from cas_ckpt.storage.file import FileStore
from tests.builders import commit, numbers, stored_arrays

NOW = GcOptions(min_age_s=0, reflog_expire_s=0, max_unused=0)
"""Spare nothing."""


def packs(handle: RepositoryHandle) -> set[str]:
    return {key for key, _ in handle.store.list("packs/")}


def weights(seed: int) -> np.ndarray:
    return numbers(64, 64, seed=seed)


def _root(handle: RepositoryHandle) -> Path:
    assert isinstance(handle.store, FileStore)
    return handle.store.root


@pytest.mark.parametrize("lost", [["refs/heads/main.ref"], ["refs/heads/main.ref", "refs/heads/side.ref"]])
def test_a_ref_that_is_lost_ends_a_collection_before_anything_is_deleted(
    handle: RepositoryHandle, lost: list[str]
) -> None:
    commit(handle, {"w": weights(1)})
    commit(handle, {"w": weights(2)}, branch="side")
    before = packs(handle)
    for key in lost:
        handle.store.delete(key)
    with pytest.raises(CorruptionError, match=r"heads/main\.ref is gone"):
        collect_garbage(handle, NOW)
    assert packs(handle) == before


def test_refs_that_are_all_lost_are_missed_without_an_index_too(handle: RepositoryHandle) -> None:
    commit(handle, {"w": weights(1)})
    before = packs(handle)
    handle.store.delete("refs/heads/main.ref")
    with pytest.raises(CorruptionError, match=r"main\.ref is gone"):
        collect_garbage(RepositoryHandle.open(_root(handle), index_url=":memory:"), NOW)
    handle.store.delete("names/heads/main.ref")
    with pytest.raises(CorruptionError, match="refs/ is lost"):
        collect_garbage(RepositoryHandle.open(_root(handle), index_url=":memory:"), NOW)
    assert packs(handle) == before


def test_a_branch_whose_record_was_lost_is_not_begun_again(handle: RepositoryHandle) -> None:
    commit(handle, {"w": weights(1)})
    handle.store.delete("refs/heads/main.ref")
    with pytest.raises(CorruptionError, match=r"main\.ref is gone"):
        commit(handle, {"w": weights(2)})


def test_fsck_misses_a_lost_ref_and_repair_makes_it_again(handle: RepositoryHandle) -> None:
    info = commit(handle, {"w": weights(1)})
    handle.store.delete("refs/heads/main.ref")
    report = check_open(handle)
    assert [problem.where for problem in report.problems] == ["refs/heads/main.ref"]
    repair_open(handle, RepairRequest(frozenset(["refs"]), refs={"refs/heads/main": info.id}))
    assert not check_open(handle).problems
    assert stored_arrays(handle, info.root)
