"""Forgetting beside others: what a branch names by now is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cas_ckpt.core.forgotten import read_forgotten, write_forgotten
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.index import history
from cas_ckpt.objects.digest import Digest
from cas_ckpt.ops.refs import create_branch
from cas_ckpt.ops.retention import forget as forget_module
from cas_ckpt.ops.retention.forget import forget, forget_revisions
from cas_ckpt.ops.retention.policy import Policy
from tests.builders import commit, numbers


def weights(seed: int) -> np.ndarray[Any, Any]:
    return numbers(64, 64, seed=seed)


def test_a_commit_that_a_branch_names_by_now_is_not_forgotten(
    handle: RepositoryHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = commit(handle, {"w": weights(1)})
    commit(handle, {"w": weights(2)})

    def a_moment_later(store: Any, ids: Any, **about: Any) -> Any:
        create_branch(handle, "from-here", start=old.id)
        return write_forgotten(store, ids, **about)

    monkeypatch.setattr(forget_module, "write_forgotten", a_moment_later)
    forget_revisions(handle, [old.id])
    commit(handle, {"w": weights(3)}, branch="from-here")  # and so its base would lose its data
    assert Digest(bytes.fromhex(old.id)) not in read_forgotten(handle.store)


def test_an_index_that_is_made_anew_while_history_is_read_is_no_damage(
    handle: RepositoryHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [commit(handle, {"w": weights(seed)}).id for seed in range(3)]
    read, left = history.log, [1, 2]

    def beside_a_rebuild(*args: Any, **how: Any) -> Any:
        if left:
            left.pop()
            handle.index.drop_packs(list(handle.index.packs()))
        return read(*args, **how)

    monkeypatch.setattr(history, "log", beside_a_rebuild)
    assert sorted(forget(handle, Policy(keep_last=1)).forgotten) == sorted(ids[:2])
    assert not left
