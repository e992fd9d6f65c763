"""A state larger than its staging memory: what the commit still reads of live memory may not change yet."""

from __future__ import annotations

import threading

import numpy as np
import torch

from cas_ckpt.training.background.staged import Snapshot
from cas_ckpt.training.capture.capture import capture_state
from cas_ckpt.transfer.staging import StagingPool

TIMEOUT_S = 60


def snapshot_of(*tensors: torch.Tensor) -> tuple[Snapshot, list[torch.Tensor]]:
    snapshot = Snapshot(capture_state({"t": list(tensors)}))
    snapshot.take_room(StagingPool(), 1 << 30)
    return snapshot, list(tensors)


def staging(snapshot: Snapshot) -> threading.Thread:
    """The call that stages, which returns when the state may change."""
    thread = threading.Thread(target=snapshot.stage_from_back, kwargs={"num_threads": 1})
    thread.start()
    return thread


def wait_until_staged(snapshot: Snapshot) -> None:
    with snapshot._changed:
        assert snapshot._changed.wait_for(lambda: not snapshot._num_live, TIMEOUT_S)


def test_a_tensor_is_not_free_while_the_commit_looks_at_its_live_memory() -> None:
    snapshot, (tensor,) = snapshot_of(torch.ones(100_000))
    (staged,) = snapshot.tensors
    box = staged.boxes[0]
    view = staged.read(box)
    call = staging(snapshot)
    wait_until_staged(snapshot)
    call.join(0.05)
    assert call.is_alive() and not snapshot.settled
    assert np.shares_memory(view, tensor.numpy())
    assert not np.shares_memory(staged.read(box), tensor.numpy())  # the view before it is looked at no more
    call.join(TIMEOUT_S)
    assert snapshot.settled


def test_what_another_thread_looked_at_is_free_once_its_tensor_is_saved() -> None:
    snapshot, _ = snapshot_of(torch.ones(100_000), torch.ones(100_000))
    first, second = snapshot.tensors
    reader = threading.Thread(target=first.read, args=(first.boxes[0],))
    reader.start()
    reader.join(TIMEOUT_S)
    call = staging(snapshot)
    wait_until_staged(snapshot)
    second.saved()
    call.join(0.05)
    assert call.is_alive()
    first.saved()
    call.join(TIMEOUT_S)
    assert snapshot.settled


def test_a_commit_that_ends_lets_go_of_all_that_it_looked_at() -> None:
    snapshot, _ = snapshot_of(torch.ones(100_000))
    (staged,) = snapshot.tensors
    staged.read(staged.boxes[0])
    call = staging(snapshot)
    snapshot.release()
    call.join(TIMEOUT_S)
    assert not call.is_alive()
