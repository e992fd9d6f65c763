"""What does a process that commits alone save by not being a world of one rank? (docs/decisions/006-ranks.md)

    python -m benchmarks.alone

The same state is committed to two repositories in turns: to one by `save_alone`, as a process without ranks does, to
the other by `save_on_ranks` with `SOLO`, which describes, agrees and plans like any rank. Processor time, medians of
the ratio of neighbouring commits, so that a busy machine is as busy for one as for the other.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from cas_ckpt import Repository
from cas_ckpt.ops.commit import commit as frame
from cas_ckpt.ops.commit.ranks import save_on_ranks
from cas_ckpt.ops.commit.request import checked_fields
from cas_ckpt.parallel.peers import SOLO

WARM_UP = 2
CASES = ((1, 512 * 512, "one", 40), (1000, 1024, "all", 15), (1000, 1024, "one", 15), (4, 16 << 20, "none", 7))
"""(Tensors, elements of four bytes in each, how many of them change between two commits, rounds)."""


def as_a_world_of_one(handle: Any, state: Any, request: Any, session: Any, *, num_bytes: int, **options: Any) -> Any:
    """`save_on_ranks`, with the arguments of `save_alone`."""
    return save_on_ranks(handle, state, request, checked_fields(request), session, peers=SOLO, **options)


def seconds(commit: Callable[[], object]) -> float:
    """Processor time of one commit."""
    begin = time.process_time()
    commit()
    return time.process_time() - begin


def compare(num_tensors: int, num_elements: int, change: str, rounds: int) -> str:
    """One line of the report."""
    state = {f"t{number}": torch.randn(num_elements) for number in range(num_tensors)}
    changing = {"all": list(state), "one": ["t0"], "none": []}[change]
    alone: list[float] = []
    ranks: list[float] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        one, other = (Repository.init(Path(folder) / name) for name in ("alone", "ranks"))
        for turn in range(WARM_UP + rounds):
            for name in changing:
                state[name].add_(1)
            for is_alone in (True, False) if turn % 2 else (False, True):
                if is_alone:
                    alone.append(seconds(lambda: one.commit(state, message="alone")))
                else:
                    with patch.object(frame, "save_alone", as_a_world_of_one):
                        ranks.append(seconds(lambda: other.commit(state, message="a world of one")))
    alone, ranks = alone[WARM_UP:], ranks[WARM_UP:]
    ratio = statistics.median(late / early for early, late in zip(alone, ranks, strict=True))
    first, second = (statistics.median(times) * 1e3 for times in (alone, ranks))
    what = f"{num_tensors} of {num_elements * 4 / 1024:,.0f} KiB, {change} changed"
    return f"| {what} | {first:.1f} | {second:.1f} | {ratio:.2f} |"


def main() -> None:
    """Print the table."""
    print("| tensors | alone, ms | a world of one, ms | ratio |\n| --- | --- | --- | --- |")
    for case in CASES:
        print(compare(*case))


if __name__ == "__main__":
    main()
