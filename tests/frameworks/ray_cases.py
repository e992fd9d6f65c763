"""The program of docs/integrations.md for ray.train, run whole and with workers that are killed.

    python -m tests.frameworks.ray_cases FOLDER

It leaves FOLDER/whole/runs and FOLDER/killed/runs, and a file for each worker that was killed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import ray.train.torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.frameworks.programs import program

IN_A_COMMIT, BETWEEN_COMMITS = 3, 7
"""Rank 0 is killed at this rename of a commit's pack (two each); rank 1 as many steps after it resumed."""


def killed(train: Callable[[Any], None], folder: Path) -> Callable[[Any], None]:
    """`train`, in a worker that is killed."""

    def die(mark: str) -> None:
        (folder / mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def in_worker(config: Any) -> None:
        rank = ray.train.get_context().get_world_rank()
        counts = {"commits": 0, "steps": 0}

        def on_event(event: str, args: tuple[Any, ...]) -> None:
            if event == "os.rename" and str(args[1]).endswith(".meta"):  # before the branch leads to it
                counts["commits"] += 1
                if counts["commits"] == IN_A_COMMIT and not (folder / "in a commit").exists():
                    die("in a commit")

        def on_step(*_: Any) -> None:
            counts["steps"] += 1
            known = ray.train.CheckpointConsistencyMode.COMMITTED  # Ray has taken note of the last report
            ray.train.get_all_reported_checkpoints(known)
            is_second = (folder / "in a commit").exists() and not (folder / "between commits").exists()
            if is_second and rank == 1 and counts["steps"] == BETWEEN_COMMITS:
                die("between commits")

        sys.addaudithook(on_event)
        register_optimizer_step_post_hook(on_step)
        train(config)

    return in_worker


def main(folder: Path) -> None:
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    trainer = ray.train.torch.TorchTrainer
    for name in ("whole", "killed"):
        (folder / name).mkdir()
        os.chdir(folder / name)
        if name == "killed":
            ray.train.torch.TorchTrainer = lambda train, **options: trainer(killed(train, folder), **options)
        exec(compile(program("ray.train"), "<docs>", "exec"), {"__name__": "__main__"})
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
