"""What the ranks of test_restore_log.py do: commit and check out models that are divided in every way."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from cas_ckpt import CommitOptions, PerRank, Repository, RNGState, StateDict
from cas_ckpt.errors import CkptError
from tests.training.training_cases import KINDS, fsdp, train

PLANNED = "fsdp over four"
"""The kind that is planned before it is checked out."""


def checks_out_every_division(path: str) -> dict[str, str]:
    """Commit and check out each kind; the commits, by kind."""
    found = {}
    with Repository.open(path, timeout_s=60) as repo:
        for name, make in KINDS.items():
            model, optim = make()
            train(model, optim)
            torch.manual_seed(dist.get_rank())  # generators of no two ranks are alike
            np.random.seed(dist.get_rank())
            state = {"model": model, "optim": optim, "rng": RNGState(), "loader": PerRank(StateDict(position=1))}
            state["kind"] = name  # a state of its own
            found[name] = repo.commit(state, branch=name.replace(" ", "-"), options=CommitOptions(orphan=True)).id
            if name == PLANNED and dist.get_rank() == 0:
                repo.plan(found[name], "fsdp=4")
            repo.checkout(found[name], into=state)
        repo.checkout(found["ddp"], into={"model": model}, keys="model")
        repo.load(found["ddp"])
    return found


def checks_out_what_is_damaged(path: str) -> str:
    """All ranks check out; what each got."""
    model, optim = fsdp(dist.get_world_size(), seed=3)
    train(model, optim)
    with Repository.open(path, timeout_s=60) as repo:
        try:
            repo.checkout("fsdp-over-four", into={"model": model, "optim": optim}, keys=["model", "optim"])
        except CkptError as error:
            return f"{type(error).__name__}: {error}"
    return "nothing was raised"
