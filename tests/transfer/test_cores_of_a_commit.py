"""A commit beside training leaves the core that trains to it, and runs somewhere in any case."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from cas_ckpt import Repository
from cas_ckpt.parallel.workers import core_of_main_thread, leave_core
from cas_ckpt.progress import Silent

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores are not told apart here")


def cores_after_leaving(*cores: int | None, allowed: set[int]) -> set[int]:
    """Where a thread that may run on `allowed` may run after it left these, one after the other."""

    def work() -> set[int]:
        os.sched_setaffinity(0, allowed)
        for core in cores:
            leave_core(core, pid=os.getpid())
        return os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_a_commit_leaves_the_core_of_the_training_if_it_has_others() -> None:
    allowed = os.sched_getaffinity(0)
    core = min(allowed)
    assert cores_after_leaving(core, allowed=allowed) == (allowed - {core} or allowed)
    assert os.sched_getaffinity(0) == allowed, "other threads run where they did"


def test_a_core_that_the_training_has_left_is_taken_again() -> None:
    allowed = os.sched_getaffinity(0)
    first, last = min(allowed), max(allowed)
    assert cores_after_leaving(first, last, allowed=allowed) == (allowed - {last} or allowed)


def test_without_knowing_the_core_of_the_training_it_runs_where_it_may() -> None:
    allowed = os.sched_getaffinity(0)
    assert cores_after_leaving(None, allowed=allowed) == allowed


def test_the_core_of_the_main_thread_is_one_that_it_may_run_on() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    os.sched_setaffinity(0, {core})
    try:
        assert core_of_main_thread() == core
        assert cores_after_leaving(core, allowed=before) == before, "the process has no other core"
    finally:
        os.sched_setaffinity(0, before)


def test_the_thread_of_a_pending_commit_leaves_a_core_to_its_caller(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    seen = []

    class Seeing(Silent):
        def start(self, *args: object, **kwargs: object) -> None:
            seen.append(os.sched_getaffinity(0))

    with Repository.init(tmp_path / "r", group=None) as repo:
        repo.commit_async({"w": np.zeros(10)}, progress=Seeing()).result()
    assert {len(cores) for cores in seen} == {max(1, len(allowed) - 1)}
    assert os.sched_getaffinity(0) == allowed
