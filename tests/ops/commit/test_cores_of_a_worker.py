"""A worker process leaves the core that trains to the training, and runs somewhere in any case."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from cas_ckpt.ops.commit.process.child import _leave
from cas_ckpt.ops.commit.process.worker import _core_of_main_thread

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are not told apart here")


def cores_after_leaving(core: int | None, allowed: set[int]) -> set[int]:
    """Where a thread that may run on `allowed` may run after that."""

    def work() -> set[int]:
        os.sched_setaffinity(0, allowed)
        _leave(core)
        return os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_a_worker_leaves_the_core_of_the_training_if_it_has_others() -> None:
    allowed = os.sched_getaffinity(0)
    core = min(allowed)
    assert cores_after_leaving(core, allowed) == (allowed - {core} or allowed)
    assert os.sched_getaffinity(0) == allowed, "other threads run where they did"


def test_a_worker_with_one_core_or_without_knowing_the_trainings_runs_where_it_may() -> None:
    allowed = os.sched_getaffinity(0)
    core = min(allowed)
    assert cores_after_leaving(core, {core}) == {core}
    assert cores_after_leaving(None, allowed) == allowed


def test_the_core_of_the_main_thread_is_one_that_it_may_run_on() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    os.sched_setaffinity(0, {core})
    try:
        assert _core_of_main_thread() == core
    finally:
        os.sched_setaffinity(0, before)
