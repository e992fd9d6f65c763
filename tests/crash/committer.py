"""A process that commits again and again until it is killed; says on stdout what it did.

The state of step n is a function of n, so that whoever reads a commit knows what it must hold.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.request import CommitRequest
from tests.builders import state


def state_of(step: int) -> dict[str, Any]:
    """What step `step` commits: one tensor that changes, one that never does, one value."""
    changing = np.random.default_rng(step).integers(0, 255, 3_000_000, np.uint8)
    constant = np.random.default_rng(7).integers(0, 255, 2_000_000, np.uint8)
    return {"changing": changing, "constant": constant, "step": step, "text": f"step {step} " * 300}


def commits(path: Path, start: int, count: int, branch: str) -> None:
    handle = RepositoryHandle.open(path)
    for step in range(start, start + count):
        print(f"begin {step}", flush=True)
        info = commit_tree(handle, state(state_of(step)), CommitRequest(step=step, branch=branch))
        print(f"done {step} {info.id}", flush=True)
