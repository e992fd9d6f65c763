"""Whatever changes right after the call, the commit is the state of the call: all dtypes, strides, ties, budgets."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cas_ckpt import CommitOptions, Repository
from cas_ckpt.core.create import init_repository
from cas_ckpt.errors import ConflictError
from cas_ckpt.objects.spec import Box
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.training.background.staged import Snapshot
from cas_ckpt.training.capture.capture import capture_state
from cas_ckpt.training.capture.tensors import TORCH_DTYPES, host_bits
from cas_ckpt.transfer.staging import StagingPool
from tests.searches import tries

SHAPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda t: t,
    "transposed": lambda t: t.t(),
    "strided": lambda t: t[::2, 1::3],
    "expanded": lambda t: t[:1].expand(5, -1),
    "0-d": lambda t: t[0, 0],
    "empty": lambda t: t[:0],
    "offset": lambda t: t[3:7, 5:],
    "large": lambda t: t.repeat(40, 40),
    "channels last": lambda t: t.reshape(1, 2, -1, 20).contiguous(memory_format=torch.channels_last),
}


RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def random_tensor(dtype: torch.dtype, seed: int, form: str) -> torch.Tensor:
    """Random bits: every dtype is a view of integers, for torch cannot cut or copy some of them."""
    made = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (40, 40 * dtype.itemsize), generator=made)
    return SHAPES[form](raw.to(torch.uint8).view(RAW[dtype.itemsize])).view(dtype)


TENSORS = st.builds(
    random_tensor,
    st.sampled_from([each for name, each in TORCH_DTYPES.items() if not name.startswith("q")]),
    st.integers(0, 5),
    st.sampled_from(sorted(SHAPES)),
)
ARRAYS = st.builds(
    lambda dtype, n, step: np.arange(n * 3).astype(dtype)[::step],
    st.sampled_from([">f8", "<i2", "u1", "c16", "<U3", "M8[s]"]), st.integers(0, 2000), st.sampled_from([1, 2, -1]),
)  # fmt: skip
VALUES = st.one_of(
    st.integers(), st.text(max_size=3), st.lists(st.integers(), max_size=4), st.builds(lambda: {"a": [1]})
)
STATES = st.dictionaries(st.text("abc/", min_size=1, max_size=3), st.one_of(TENSORS, ARRAYS, VALUES), max_size=6)


def spoil(value: Any) -> None:
    """Change everything that can be changed, in place."""
    if isinstance(value, torch.Tensor):
        memory = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
        memory.bitwise_xor_(0x5A)
    elif isinstance(value, np.ndarray):
        base = value if value.base is None else value.base
        base.view(np.uint8 if base.flags.c_contiguous else base.dtype)[...] = 0
    elif isinstance(value, list):
        value.append("more")
    elif isinstance(value, dict):
        for each in value.values():
            spoil(each)
        value["new"] = 1


def tied_too(state: dict[str, Any]) -> dict[str, Any]:
    """With a part that is tied to the rest, and a part that overlaps with it."""
    tensors = [each for each in state.values() if isinstance(each, torch.Tensor)]
    return {"all": state, "tied": tensors, "views": [each[..., :1] for each in tensors if each.ndim and each.numel()]}


@given(STATES, st.sampled_from([None, 1 << 30, 1 << 21, 0]))
@settings(max_examples=tries(10, 40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_commit_has_the_id_of_the_state_at_the_call(parts: dict[str, Any], budget: int | None) -> None:
    state = tied_too(parts)
    with Repository.init(f"memory://any-{secrets.token_hex(8)}") as repo:
        for _ in range(2):  # the second time into warm memory
            wanted = repo.commit(state).root
            pending = repo.commit_async(state, options=CommitOptions(staging_bytes=budget))
            spoil(state)
            assert pending.result().root == wanted


# ------------------------------------------------------------ buffers


class Paused:
    """A source that stops while it is read for the first time, until it may go on."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        self.is_reading, self.may_read = threading.Event(), threading.Event()

    def read(self, box: Box) -> np.ndarray[Any, Any]:
        self.is_reading.set()
        assert self.may_read.wait(30)
        return self.array[box.slices]


@pytest.fixture
def pool() -> Iterator[StagingPool]:
    made = StagingPool()
    yield made
    made.close()


def test_memory_is_used_by_nobody_else_before_its_commit_has_ended(pool: StagingPool) -> None:
    first, second = {"w": torch.full((700, 700), 1.0)}, {"w": torch.full((700, 700), 2.0)}
    one, two = Snapshot(capture_state(first)), Snapshot(capture_state(second))
    assert one.take_room(pool, 1 << 30)
    assert two.take_room(pool, 1 << 30)
    one.stage_all(num_threads=1)
    two.stage_all(num_threads=1)
    box = one.tensors[0].boxes[0]
    assert not np.shares_memory(one.tensors[0].read(box), two.tensors[0].read(box))
    assert (one.tensors[0].read(box).view("<f4") == 1.0).all()
    one.release()
    three = Snapshot(capture_state(second))
    assert three.take_room(pool, 1 << 30)
    assert pool.held_bytes == 2 * three.arenas[0].num_bytes
    three.release()
    two.release()


def test_a_pool_never_holds_more_than_the_budget(pool: StagingPool) -> None:
    granule = 2 << 20
    first = pool.take(3 * granule, budget_bytes=4 * granule)
    second = pool.take(3 * granule, budget_bytes=4 * granule)
    assert first and second
    assert (first.num_bytes, second.num_bytes) == (3 * granule, granule)
    assert pool.take(1, budget_bytes=4 * granule) is None
    pool.give(first)
    pool.give(second)
    grown = pool.take(4 * granule, budget_bytes=4 * granule)
    assert grown and grown.num_bytes == 4 * granule
    assert pool.held_bytes == 4 * granule
    pool.give(grown)
    assert pool.take(granule, budget_bytes=2 * granule)
    assert pool.held_bytes <= 2 * granule


def test_warm_memory_stays_warm_when_it_grows(pool: StagingPool) -> None:
    first = pool.take(1 << 21, budget_bytes=1 << 30)
    assert first
    first.room(100)[1][:] = 7
    pool.give(first)
    second = pool.take(3 << 21, budget_bytes=1 << 30)
    assert second is first
    assert (second.room(100)[1] == 7).all()
    pool.give(second)


def test_what_was_saved_from_live_memory_is_not_read_again() -> None:
    snapshot = Snapshot(capture_state({"w": torch.ones(500, 500)}))
    source = snapshot.tensors[0]
    source.read(source.boxes[0])
    source.saved()
    with pytest.raises(ConflictError, match="staging_bytes"):
        source.read(source.boxes[0])


def test_a_copy_that_ends_after_its_tensor_was_saved_is_not_taken_for_the_tensor(pool: StagingPool) -> None:
    snapshot = Snapshot(capture_state({"w": torch.ones(500, 500)}))
    source = snapshot.tensors[0]
    paused = Paused(host_bits(torch.ones(500, 500)))
    source._live = paused
    snapshot.take_room(pool, 1 << 30)
    stager = threading.Thread(target=snapshot.stage_from_back, kwargs={"num_threads": 1})
    stager.start()
    assert paused.is_reading.wait(30)
    source.saved()
    with pytest.raises(ConflictError):
        source.read(source.boxes[0])
    paused.may_read.set()
    stager.join()
    with pytest.raises(ConflictError):
        source.read(source.boxes[0])
    snapshot.release()


def test_a_snapshot_that_broke_raises_before_anything_is_published() -> None:
    with closing(init_repository("memory://broken-snapshot")) as handle:
        snapshot = Snapshot(capture_state({"v": torch.zeros(900, 900), "w": torch.ones(900, 900)}))
        real = snapshot.tensors[1]._live
        assert real is not None

        class Breaking:
            def read(self, box: Box) -> np.ndarray[Any, Any]:
                snapshot.abort(ConflictError("somebody wrote it"))
                return real.read(box)

        snapshot.tensors[1]._live = Breaking()
        with pytest.raises(ConflictError, match="somebody"):
            commit_tree(handle, snapshot.tree, CommitRequest())
        assert not list(handle.refs.list())
