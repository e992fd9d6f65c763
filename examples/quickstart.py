"""Commit, change, commit again, look, go back: the whole of it in thirty lines."""

from __future__ import annotations

import sys

import numpy as np
import torch

from cas_ckpt import Repository, RNGState, StateDict

repo = Repository.init(sys.argv[1] if len(sys.argv) > 1 else "memory://quickstart")

model = torch.nn.Linear(1024, 1024)
optim = torch.optim.AdamW(model.parameters())
progress = StateDict(step=0)
state = {"model": model, "optim": optim, "progress": progress, "rng": RNGState()}

first = repo.commit(state, message="before the first step")

model(torch.randn(8, 1024)).square().mean().backward()
optim.step()
progress["step"] = 1
second = repo.commit(state, message="after it", step=1, metrics={"loss": 0.5})
print(f"{second.short_id}: {second.stats.total_bytes:,} bytes of state, {second.stats.stored_bytes:,} written")

repo.checkout("main~1", into={"model": model, "progress": progress}, keys=["model/**", "progress/**"])
assert progress["step"] == 0  # in place: the same model, the same tensors, older bytes

corner = repo.read("main", "model/weight", region=np.s_[0:2, 0:2])  # only what it touches is read
print(f"a corner of the newer weight: {corner.tolist()}")
print("history:", [commit.message for commit in repo.log("main")])
