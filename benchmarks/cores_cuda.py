"""Tensors on a GPU: commits, checkouts and pauses beside PCIe, and many small tensors (a part of benchmarks/cores.py).

PCIe is measured in each round, by copies between the device and 64 MiB of pinned memory.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu import model, random_words, seconds
from benchmarks.harness.page import reached, verdict
from cas_ckpt import Repository

State = dict[str, torch.Tensor]
PINNED_BYTES = 64 << 20
SMALL_BYTES = 16 << 10
FIRST_GB_S, CHECKOUT_GB_S, PAUSE_OF_PCIE = 12.0, 10.0, 0.9
SMALL_PAUSE_S, SMALL_UNCHANGED_S = 0.15, 0.10
PAUSES = 3


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of the state of large tensors, and how many small ones the other has."""

    num_bytes: int
    num_small: int


def measure(sizes: Sizes, rounds: Sequence[bool], memory: Path) -> Iterator[str]:
    """The lines of this part; the GPU's memory is free again afterwards."""
    yield from large(sizes.num_bytes, rounds, memory)
    torch.cuda.empty_cache()
    yield ""
    yield from many_small(sizes.num_small, rounds, memory)
    torch.cuda.empty_cache()


def change(state: State) -> None:
    """Change every element of every tensor."""
    torch._foreach_add_([each.view(torch.int32) for each in state.values()], 1)
    torch.cuda.synchronize()


def pcie(size: int) -> tuple[float, float]:
    """Seconds in which as many bytes come to pinned memory, and go from it."""
    pinned = torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(PINNED_BYTES, dtype=torch.uint8, device="cuda")
    copies = max(1, size // PINNED_BYTES)
    whole = size / (copies * PINNED_BYTES)
    down = seconds(lambda: [pinned.copy_(there, non_blocking=True) for _ in range(copies)])
    return down * whole, seconds(lambda: [there.copy_(pinned, non_blocking=True) for _ in range(copies)]) * whole


def pauses(repo: Repository, state: State) -> Iterator[float]:
    """How long `commit_async` takes to return, time after time; all is changed before, and nothing pending."""
    while True:
        change(state)
        start = time.perf_counter()
        pending = repo.commit_async(state)
        pause = time.perf_counter() - start
        pending.result()
        yield pause


def in_rounds(rounds: Sequence[bool], one: Callable[[], dict[str, list[float]]]) -> dict[str, list[float]]:
    """What `one` found in all rounds that count, together."""
    found: dict[str, list[float]] = defaultdict(list)
    for counts in rounds:
        for name, values in one().items():
            found[name] += values if counts else []
    return found


def large(num_bytes: int, rounds: Sequence[bool], memory: Path) -> Iterator[str]:
    """Matrices of a transformer."""
    state = model(min(num_bytes, torch.cuda.mem_get_info()[0] // 2))
    size = sum(each.nbytes for each in state.values())

    def one() -> dict[str, list[float]]:
        down, up = pcie(size)
        found = {"down": [down], "up": [up]}
        with Repository.init("memory://", encoding="raw", group=None) as repo:
            found["memory"] = [seconds(lambda: repo.commit(state))]
        with Repository.init(memory / "cuda", encoding="raw", group=None) as repo:
            found["first"] = [seconds(lambda: repo.commit(state))]
            found["checkout"] = [seconds(lambda: repo.checkout("main", into=state)) for _ in range(2)][1:]
            found["one pass"] = [seconds(lambda: repo.checkout("main", into=state, atomic=False))]
            found["unchanged"] = [seconds(lambda: repo.commit(state))]
        shutil.rmtree(memory / "cuda")
        with Repository.init(memory / "cuda", encoding="raw", group=None) as repo:
            every = pauses(repo, state)
            found["pause 1"], found["pause 2"] = [next(every)], [next(every)]
        shutil.rmtree(memory / "cuda")
        return found

    found = in_rounds(rounds, one)

    def row(what: str, name: str, limit: str, wanted: str = "") -> str:
        share = statistics.median(theirs / ours for theirs, ours in zip(found[limit], found[name], strict=True))
        judged = f"{reached(share, PAUSE_OF_PCIE)} of PCIe" if wanted == "pcie" else wanted
        middle = statistics.median(found[name])
        return f"| {what} | {middle:.3f} | {size / middle / 1e9:.1f} | {share:.2f} | {judged} |"

    first, checkout = (size / statistics.median(found[name]) / 1e9 for name in ("first", "checkout"))
    yield f"| {size / 1e9:.1f} GB in {len(state)} tensors | s | GB/s | beside PCIe | at least |"
    yield "| --- | --- | --- | --- | --- |"
    yield row("PCIe, to pinned memory", "down", "down")
    yield row("PCIe, from pinned memory", "up", "up")
    yield row("first commit to /dev/shm", "first", "down", f"{reached(first, FIRST_GB_S)}, GB/s")
    yield row("first commit to `memory://`", "memory", "down")
    yield row("checkout, verified first", "checkout", "up", f"{reached(checkout, CHECKOUT_GB_S)}, GB/s")
    yield row("checkout, one pass", "one pass", "up")
    yield row("unchanged commit", "unchanged", "down")
    yield row("pause of `commit_async`, first call, all changed", "pause 1", "down")
    yield row("pause of `commit_async`, second call, all changed", "pause 2", "down", "pcie")


def many_small(num_tensors: int, rounds: Sequence[bool], memory: Path) -> Iterator[str]:
    """Tensors of 16 KB."""
    state = {str(number): random_words(SMALL_BYTES) for number in range(num_tensors)}

    def one() -> dict[str, list[float]]:
        with Repository.init(memory / "small", encoding="raw", group=None) as repo:
            found = {"first": [seconds(lambda: repo.commit(state))]}
            found["unchanged"] = [seconds(lambda: repo.commit(state)) for _ in range(2)]
            found["checkout"] = [seconds(lambda: repo.checkout("main", into=state))]
            every = pauses(repo, state)
            found["pause 1"], found["pause 2"] = [next(every)], [next(every) for _ in range(PAUSES - 1)]
        shutil.rmtree(memory / "small")
        return found

    found = {name: statistics.median(times) for name, times in in_rounds(rounds, one).items()}
    yield f"| {num_tensors:,} tensors of 16 KB | s | at most |"
    yield "| --- | --- | --- |"
    yield f"| first commit to /dev/shm | {found['first']:.3f} | |"
    yield f"| unchanged commit | {found['unchanged']:.3f} | {verdict(found['unchanged'], SMALL_UNCHANGED_S)} |"
    yield f"| checkout | {found['checkout']:.3f} | |"
    yield f"| pause of `commit_async`, first call, all changed | {found['pause 1']:.3f} | |"
    yield f"| the same, later calls | {found['pause 2']:.3f} | {verdict(found['pause 2'], SMALL_PAUSE_S)} |"
