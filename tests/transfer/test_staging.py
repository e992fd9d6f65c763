"""Memory that states are staged in: what a pool holds."""

from __future__ import annotations

import os

import pytest

from cas_ckpt.transfer.staging import GRANULE_BYTES, StagingPool


def test_a_pool_holds_no_more_than_a_budget_that_became_smaller() -> None:
    pool = StagingPool()
    for arena in [pool.take(6 * GRANULE_BYTES, budget_bytes=12 * GRANULE_BYTES) for _ in range(2)]:
        assert arena is not None
        pool.give(arena)
    assert pool.take(4 * GRANULE_BYTES, budget_bytes=10 * GRANULE_BYTES) is not None
    assert pool.held_bytes <= 10 * GRANULE_BYTES
    pool.close()


@pytest.mark.parametrize(("kept_by_children", "found"), [(False, 0), (True, 7)])
def test_a_forked_child_still_has_the_mapping(kept_by_children: bool, found: int) -> None:
    """Were it a hole there, the child's own memory would come to lie in it, and be unmapped with the arena."""
    pool = StagingPool(kept_by_children=kept_by_children)
    arena = pool.take(1000, budget_bytes=GRANULE_BYTES)
    assert arena is not None
    _, memory = arena.room(1000)
    memory[:] = 7
    child = os.fork()
    if not child:
        os._exit(0 if (memory == found).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (memory == 7).all()
