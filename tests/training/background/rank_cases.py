"""What single ranks do in test_ranks.py: each public function is one rank of a real gloo job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from cas_ckpt import CkptError, CommitOptions, Repository, RNGState
from cas_ckpt.training.background.commits import _Stager
from cas_ckpt.training.background.staged import Snapshot
from tests.ranks import die
from tests.training.training_cases import ddp, fsdp, plain, train, whole

BUDGETS = {"all fits": None, "half fits": 2 << 20, "nothing fits": 0}


def spoil(*owners: Any) -> None:
    """Change every tensor of these modules and optimizers."""
    with torch.no_grad():
        for owner in owners:
            if isinstance(owner, torch.nn.Module):
                tensors = [*owner.parameters(), *owner.buffers()]
            else:
                tensors = [each for state in owner.state.values() for each in state.values() if torch.is_tensor(each)]
            for tensor in tensors:
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
                local.fill_(-3)


def commits(path: str) -> dict[str, Any]:
    """Each division under each budget: the root at the call, while the trainer's own collectives go on."""
    found: dict[str, Any] = {}
    with Repository.open(path, timeout_s=60) as repo:
        for name, budget in BUDGETS.items():
            for kind, make in {"fsdp": lambda: fsdp(2), "ddp": ddp}.items():
                model, optim = make()
                train(model, optim)
                state = {"model": model, "optim": optim, "rng": RNGState()}
                branch = f"{kind}-{name}".replace(" ", "-")
                wanted = repo.commit(state, branch=f"{branch}-sync", options=CommitOptions(orphan=True)).root
                pending = repo.commit_async(
                    state, branch=branch, options=CommitOptions(orphan=True, staging_bytes=budget), step=3
                )
                assert pending.staged
                spoil(model, optim)
                for _ in range(20):  # of the training, over connections of its own
                    dist.all_reduce(torch.ones(1000))
                made = pending.result(60)
                again = make()
                repo.checkout(branch, into={"model": again[0], "optim": again[1], "rng": RNGState()})
                found[f"{kind}, {name}"] = (made.root == wanted, made.id, repo.head.commit == made.id)
    return found


def lazily(path: str, worker: str) -> dict[str, Any]:
    """Roots of lazy commits while training steps on; and a change on rank 1 that no hook sees."""
    rank, found, go_on = dist.get_rank(), dict[str, Any](), threading.Event()
    run, check = _Stager._run, Snapshot.check

    def run_when_told(stager: Any) -> None:
        go_on.wait(60)
        run(stager)

    _Stager._run = run_when_told  # type: ignore[method-assign]
    with Repository.open(path, timeout_s=60) as repo:
        for kind, make in {"fsdp": lambda: fsdp(2), "ddp": ddp}.items():
            model, optim = make()
            train(model, optim)
            state = {"model": model, "optim": optim, "rng": RNGState()}
            wanted = repo.commit(state, branch=kind).root
            for outcome in ("the same", "changed late", "changed"):
                go_on.clear()
                Snapshot.check = check  # type: ignore[method-assign]
                if outcome == "changed late" and rank == 1:
                    Snapshot.check = _counted_before(model)  # type: ignore[method-assign]
                pending = repo.commit_async(state, branch=kind, snapshot="lazy", worker=worker)
                is_lazy = not pending.staged
                if outcome == "changed" and rank == 1:
                    spoil(model)
                go_on.set()
                if outcome == "the same":
                    train(model, optim)
                    made = pending.result(60)
                    found[kind] = (is_lazy, made.root == wanted, made.id)
                else:
                    found[f"{kind}, {outcome}"] = error_of(partial(pending.result, 60))
            found[f"{kind}, in the end"] = repo.latest(kind).id
    return found


def _counted_before(model: torch.nn.Module) -> Callable[[Snapshot], None]:
    """A look at a snapshot, right before which operations end that torch counts as changes; the values stay."""
    check = Snapshot.check

    def counted(snapshot: Snapshot) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0)
        check(snapshot)

    return counted


def failures(path: str) -> dict[str, Any]:
    """What one rank fails of, at the call or behind it, is an error of all; then all goes on."""
    rank, found = dist.get_rank(), {}
    with Repository.open(path, timeout_s=60) as repo:
        model, optim = fsdp(2)
        state: dict[str, Any] = {"model": model, "optim": optim}
        repo.commit_async(state, step=1).result(60)

        found["at the call"] = error_of(lambda: call_and_wait(repo, state | ({"x": object()} if rank else {})))
        found["an argument"] = error_of(lambda: call_and_wait(repo, state, snapshot="copy" if rank else "now"))

        if rank:
            repo._handle.begin_writing = breaking(repo)  # type: ignore[method-assign]
        pending = repo.commit_async(state, step=2, options=CommitOptions(staging_bytes=0 if rank else None))
        found["behind it"] = error_of(lambda: pending.result(60)) if rank == 0 else ""
        found["the next"] = error_of(lambda: repo.commit(state, step=3))
        found["after that"] = repo.commit_async(state, step=4).result(60).step
        found["in the end"] = repo.commit_async(state, step=7).result(60).step
        found["steps"] = [each.step for each in repo.log("main")]
    return found


def breaking(repo: Repository) -> Callable[[], Any]:
    """What is in the place of the first step of a commit, once."""
    real = repo._handle.begin_writing

    def begin_writing() -> Any:
        repo._handle.begin_writing = real  # type: ignore[method-assign]
        raise OSError("the device is gone")

    return begin_writing


def call_and_wait(repo: Repository, state: dict[str, Any], **options: Any) -> int:
    return repo.commit_async(state, **options).result(60).step or 0


def error_of(call: Any) -> str:
    """What it raises, within a time that says that nobody waited for the timeout."""
    start = time.monotonic()
    try:
        call()
    except CkptError as error:
        took = time.monotonic() - start
        return f"{type(error).__name__}: {error}" if took < 40 else f"after {took} s: {error}"
    return "nothing"


def killed(path: str, when: str) -> list[str]:
    """Rank 1 dies while rank 0 stages, or while the commit is made: rank 0 hears of it, and goes on alone."""
    rank = dist.get_rank()
    repo = Repository.open(path, timeout_s=60)
    model, optim = plain()
    train(model, optim)
    state = {"model": model, "optim": optim}
    repo.commit_async(state, step=1).result(60)
    if rank and when == "before":
        die()
    if rank:
        ThreadPoolExecutor(1).submit(repo._committing.acquire).result()  # its commit does not begin
    pending = repo.commit_async(state, step=2)
    if rank:
        die()
    spoil(model, optim)
    found = [error_of(lambda: pending.result(60)), error_of(lambda: repo.commit_async(state, step=3).result(60))]
    found.append(error_of(repo.close))
    with Repository.open(path, group=None) as alone:
        found.append(str([each.step for each in alone.log("main")]))
        assert whole is not None
    return found
