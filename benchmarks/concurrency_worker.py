"""One process of `benchmarks.concurrency`: commits, or collects, for so many seconds, and says what that came to.

    python -m benchmarks.concurrency_worker commit PATH BRANCH NUMBER SECONDS CHANGED_BYTES [INDEX_URL]
    python -m benchmarks.concurrency_worker gc PATH INTERVAL_S SECONDS

Says "ready", begins when it is told to on stdin, ends with one line of JSON.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cas_ckpt import limits
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.errors import ConflictError
from cas_ckpt.objects.spec import Spec
from cas_ckpt.objects.state import Container, TensorItem
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.gc.plan import GcOptions
from cas_ckpt.ops.retention.forget import forget_by_policy
from cas_ckpt.ops.retention.policy import Policy, Retention
from tests.builders import ArrayMemory

NUM_TENSORS, TENSOR_BYTES = 8, 64 * 1024
"""What never changes of the committed state: half a megabyte, hashed at every commit."""

KEPT = 20
"""Commits of each branch that the collecting process does not forget."""


def commit_again_and_again(
    path: Path, branch: str, number: int, seconds: float, changed_bytes: int, index_url: str | None
) -> dict[str, Any]:
    handle = RepositoryHandle.open(path, index_url=index_url)
    constant = [np.random.default_rng(n).integers(0, 255, TENSOR_BYTES, np.uint8) for n in range(NUM_TENSORS)]
    changing = np.random.default_rng(100 + number).integers(0, 255, changed_bytes, np.uint8)
    arrays = [*constant, changing]
    items = {
        f"w{n}": TensorItem(Spec("uint8", array.shape), ArrayMemory(array), "numpy") for n, array in enumerate(arrays)
    }
    state = Container("dict", {**items})
    request = CommitRequest(branch=branch)
    with limits(num_threads=1):
        commit_tree(handle, state, request)

    def once() -> None:
        changing[:8] = np.frombuffer(np.random.default_rng().bytes(8), np.uint8)[: len(changing)]
        with limits(num_threads=1):
            commit_tree(handle, state, request)

    return {"branch": branch, **_repeat(once, seconds)}


def collect_again_and_again(path: Path, interval_s: float, seconds: float) -> dict[str, Any]:
    handle = RepositoryHandle.open(path)
    deleted, lost = [], 0

    def once() -> None:
        nonlocal lost
        began = time.perf_counter()
        forget_by_policy(handle, Retention(Policy(keep_last=KEPT)))
        try:
            deleted.append(collect_garbage(handle, GcOptions(min_age_s=30.0, reflog_expire_s=0.0)).deleted_packs)
        except ConflictError:
            lost += 1
        time.sleep(max(0.0, interval_s - (time.perf_counter() - began)))

    told = _repeat(once, seconds)
    return {"deleted": sum(deleted), "conflicts": lost, **told}


def _repeat(work: Callable[[], None], seconds: float) -> dict[str, Any]:
    print("ready", flush=True)
    sys.stdin.readline()
    took = []
    before = resource.getrusage(resource.RUSAGE_SELF)
    began = now = time.perf_counter()
    while now - began < seconds:
        work()
        now, last = time.perf_counter(), now
        took.append(now - last)
    used = resource.getrusage(resource.RUSAGE_SELF)
    processor_s = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    return {"count": len(took), "seconds": now - began, "took": took, "processor_s": processor_s}


def main(arguments: list[str]) -> None:
    work, path, *rest = arguments
    if work == "commit":
        branch, number, seconds, changed, *index = rest
        index_url = index[0] if index else None
        found = commit_again_and_again(Path(path), branch, int(number), float(seconds), int(changed), index_url)
    else:
        found = collect_again_and_again(Path(path), float(rest[0]), float(rest[1]))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
