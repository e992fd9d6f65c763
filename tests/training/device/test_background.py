"""`commit_async` of tensors that are hashed on their device: only what is new is staged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cas_ckpt import Repository, errors, limits
from cas_ckpt.objects.spec import Box
from cas_ckpt.training.capture.tensors import CopiedTensor
from cas_ckpt.training.device import hasher
from tests.training.device.hashing import random_tensor
from tests.training.device.host_kernels import Launches
from tests.training.device.paths import hashed_on_device, same_bits


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> list[Box]:
    """The boxes that are copied from the device into staging memory; no others are brought over."""
    found: list[Box] = []
    copy_into = CopiedTensor.copy_into

    def counted(self: CopiedTensor, box: Box, target: Any) -> None:
        found.append(box)
        copy_into(self, box, target)

    monkeypatch.setattr(CopiedTensor, "copy_into", counted)
    monkeypatch.setattr(hasher, "AUDIT_SHARE", 0)
    return found


def test_what_the_last_commit_stored_is_not_staged_again(staged: list[Box]) -> None:
    matrix = random_tensor(torch.float32, 2048, 2048)  # 16 MB: four cells
    with hashed_on_device(Launches()), Repository.init("memory://staged-new") as repo:
        first = repo.commit_async({"matrix": matrix, "few": torch.arange(9)}).result()
        staged.clear()
        second = repo.commit_async({"matrix": matrix, "few": torch.arange(9)})
        assert [box for box in staged if box.num_elements > 9] == []
        assert second.result().root == first.root
        staged.clear()
        matrix[1, 1] = 1.5
        wanted = matrix.clone()
        third = repo.commit_async({"matrix": matrix})
        matrix.zero_()
        assert len(staged) == 1
        assert same_bits(repo.load(third.result().id)["matrix"], wanted)
        assert not repo.fsck().problems


def test_the_first_commit_of_a_repository_may_hold_the_same_bytes_twice(staged: list[Box]) -> None:
    """Half of the chunks turn out to be there: from then on whole bands of columns are hashed where they are."""
    matrix = random_tensor(torch.float32, 256, 8192)  # eight cells beside one another
    state = {"model": matrix, "average": matrix.clone(), "last": matrix.clone()}
    with hashed_on_device(Launches()), Repository.init("memory://first") as repo:
        with limits(num_threads=1):
            made = repo.commit_async(state).result()
        assert staged
        assert same_bits(repo.load(made.id)["last"], matrix)
        assert repo.commit(state).root == made.root


def test_a_tensor_that_is_declared_frozen_for_the_first_time_is_staged_whole(staged: list[Box]) -> None:
    state = {"x": random_tensor(torch.float32, 5000)}
    with hashed_on_device(Launches()), Repository.init("memory://staged-whole") as repo:
        first = repo.commit_async(state).result()
        staged.clear()
        assert repo.commit_async(state, frozen="x").result().root == first.root  # its checksums want every byte
        assert len(staged) == 1


def test_a_chunk_that_was_collected_after_the_call_fails_the_commit_and_the_next_one_stages_it(
    staged: list[Box], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"x": random_tensor(torch.float32, 5000), "y": random_tensor(torch.float32, 5000, seed=1)}
    with hashed_on_device(Launches()), Repository.init("memory://collected") as repo:
        first = repo.commit_async(state).result()
        with monkeypatch.context() as patch:
            patch.setattr(repo._handle, "known_to_commit", lambda: lambda ids: [False] * len(ids))
            pending = repo.commit_async(state)
            with pytest.raises(errors.ConflictError, match="were not staged, nothing was published"):
                pending.result()
        staged.clear()
        assert repo.commit_async(state).result().root == first.root
        assert len(staged) == 2
