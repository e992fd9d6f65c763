"""Commit, change, commit again, look, go back: the whole of it in thirty lines."""

from __future__ import annotations

import sys

import numpy as np
import torch

from cas_ckpt import Repository, RNGState, StateDict

repo = Repository.open(sys.argv[1] if len(sys.argv) > 1 else "memory://quickstart", create=True)

model = torch.nn.Linear(1024, 1024)
optim = torch.optim.AdamW(model.parameters())
progress = StateDict(step=0)
state = {"model": model, "optim": optim, "progress": progress, "rng": RNGState()}

if repo.latest():  # a run before this one left something: go on from there
    repo.checkout("main", into=state)
first = repo.commit(state, message="before the first step", step=progress["step"])

model(torch.randn(8, 1024)).square().mean().backward()
optim.step()
progress["step"] += 1
second = repo.commit(state, message="after it", step=progress["step"], metrics={"loss": 0.5})
print(f"{second.short_id}: {second.stats.total_bytes:,} bytes of state, {second.stats.stored_bytes:,} written")

repo.checkout(first, into=state)  # in place: the same model, the same tensors, older bytes
assert progress["step"] == first.step
print(f"head: branch {repo.head.branch}, commit {repo.head.commit}")  # detached: the next commit needs a branch

corner = repo.read("main", "model/weight", region=np.s_[0:2, 0:2])  # only what it touches is read
print(f"a corner of the newer weight: {corner.tolist()}")
print("history:", [commit.message for commit in repo.log("main", limit=2)])
