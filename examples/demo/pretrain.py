"""Trains the base model, from the beginning or from where the last commit left it.

python -m examples.demo.pretrain REPO [--wait-in-commit-at STEP] [--from REVISION --branch NAME --skip BYTES]
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from cas_ckpt import Repository, RNGState, StateDict
from cas_ckpt.errors import NotFoundError
from examples.demo.model import GPT, Shape, make_deterministic, next_byte_loss
from examples.demo.reporting import WaitHalfWay, commit_and_tell, tell
from examples.demo.text import Corpus

NUM_STEPS = 48
COMMIT_EVERY = 12
NUM_STREAMS = 8
SHAPE = Shape()


def new_state() -> dict[str, Any]:
    """Everything that the training depends on, as it is before the first step."""
    model = GPT(SHAPE)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optim, max_lr=2e-3, total_steps=NUM_STEPS + 1, pct_start=0.2)
    progress = StateDict(step=0, position=0)
    return {"model": model, "optim": optim, "schedule": schedule, "progress": progress, "rng": RNGState()}


def train(repo: Repository, state: dict[str, Any], *, wait_at: int | None = None, branch: str | None = None) -> None:
    """Train to the last step and commit on the way; wait for the end in the commit of step `wait_at`.

    Args:
        branch: Where commits go: the branch that was checked out if not given. A new one begins at the commit
            that the state came from.
    """
    text = Corpus("*.py", num_streams=NUM_STREAMS)
    model, progress = state["model"], state["progress"]
    losses = []
    while progress["step"] < NUM_STEPS:
        batch, progress["position"] = text.batch(progress["position"], context=SHAPE.context)
        loss = next_byte_loss(model, batch)
        loss.backward()
        state["optim"].step()
        state["optim"].zero_grad()
        state["schedule"].step()
        progress["step"] += 1
        losses.append(loss.item())
        if progress["step"] % COMMIT_EVERY == 0:
            step = progress["step"]
            options = {"progress": WaitHalfWay(step)} if step == wait_at else {}
            message = f"{branch or 'pretrain'}, step {step}"
            commit_and_tell(repo, state, losses=losses, step=step, message=message, branch=branch, **options)
            losses = []


def main() -> None:
    """Resume if there is something to resume, then train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repo")
    parser.add_argument("--wait-in-commit-at", type=int)
    parser.add_argument("--from", dest="revision", default="main")
    parser.add_argument("--branch")
    parser.add_argument("--skip", type=int, default=0, help="bytes of text to leave out, of every stream")
    arguments = parser.parse_args()

    make_deterministic(seed=1)
    repo = Repository.open(arguments.repo)
    state = new_state()
    try:
        repo.checkout(arguments.revision, into=state)
        tell("resumed", step=state["progress"]["step"], position=state["progress"]["position"])
    except NotFoundError:
        tell("started")
    state["progress"]["position"] += arguments.skip
    state["model"].train()
    train(repo, state, wait_at=arguments.wait_in_commit_at, branch=arguments.branch)


if __name__ == "__main__":
    main()
