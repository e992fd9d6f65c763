"""Fine-tunes the base model on a part of the library with LoRA, on a branch of its own.

python -m examples.demo.finetune REPO BRANCH PATTERN
"""

from __future__ import annotations

import argparse

import torch

from cas_ckpt import Repository, RNGState, StateDict
from examples.demo.lora import LoraGPT
from examples.demo.model import GPT, make_deterministic, next_byte_loss
from examples.demo.pretrain import NUM_STREAMS, SHAPE
from examples.demo.reporting import commit_and_tell
from examples.demo.text import Corpus

NUM_STEPS = 18
COMMIT_EVERY = 6
RANK = 4


def finetune(repo: Repository, branch: str, text: Corpus) -> None:
    """Train adapters on top of the commit `base`; the base itself is declared frozen."""
    base = GPT(SHAPE)
    repo.checkout("base", into={"model": base}, keys="model/**")
    model = LoraGPT(base, rank=RANK)
    optim = torch.optim.AdamW(model.adapters.parameters(), lr=5e-3)
    progress = StateDict(step=0, position=0)
    state = {"model": model, "optim": optim, "progress": progress, "rng": RNGState()}
    losses = []
    repo.branch(branch, start="base")
    for step in range(1, NUM_STEPS + 1):
        batch, progress["position"] = text.batch(progress["position"], context=SHAPE.context)
        progress["step"] = step
        loss = next_byte_loss(model, batch)
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.item())
        if step % COMMIT_EVERY == 0:
            message = f"{branch}, step {step}"
            commit_and_tell(
                repo, state, losses=losses, step=step, message=message, branch=branch, frozen="model/base/**"
            )
            losses = []


def main() -> None:
    """One fine-tune."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repo")
    parser.add_argument("branch")
    parser.add_argument("pattern")
    arguments = parser.parse_args()

    make_deterministic(seed=2)
    finetune(Repository.open(arguments.repo), arguments.branch, Corpus(arguments.pattern, num_streams=NUM_STREAMS))


if __name__ == "__main__":
    main()
