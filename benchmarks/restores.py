"""How near do checkout and load come to what the machine can do?

    python -m benchmarks.restores --write --scratch FOLDER     everything, and docs/benchmarks/restores.md; minutes
    python -m benchmarks.restores --quick                      a third of the state, fewer rounds; prints only

A GPT with AdamW. Files in memory: beside BLAKE3 over the same bytes, and beside bare loops of two threads that read
and hash, and do nothing else. Files that are not in memory: beside the disk's own rate for the same files, and beside
`torch.load(mmap=True)` and a copy; right after the files were dropped from memory, and `IDLE_S` seconds after it, when
the host of a virtual machine has taken back what was free. All in turns; targets were touched before.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from blake3 import blake3

from benchmarks.harness import disk, limits
from benchmarks.harness.meter import seconds_of
from benchmarks.harness.page import heading, reached, run
from benchmarks.harness.sizes import SIZES
from benchmarks.harness.state import State, build, copy_into
from cas_ckpt import Repository
from cas_ckpt.memory import new_buffer

STEP_BYTES, LEAF_BYTES, BLOCK_BYTES = 2 << 20, 128 << 10, 8 << 20
IDLE_S = 4
REPOSITORY, TORCH_FILE = "repo", "torch/state.pt"
Seconds = dict[str, list[float]]

WANTED_WARM = {"checkout": 0.5, "checkout, one pass": 0.65}
WANTED_OF_DISK, WANTED_OF_TORCH = 0.95, 1.0


def prepare(folder: Path, size: str) -> None:
    """The state as a commit, and as a file of torch."""
    state = build(SIZES[size], blank=False)
    with Repository.init(folder / REPOSITORY, group=None) as repo:
        repo.commit(state.parts)
    (folder / TORCH_FILE).parent.mkdir()
    torch.save(state.plain(), folder / TORCH_FILE)
    disk.sync_tree(folder)


def measure(folder: Path, size: str, rounds: int) -> tuple[Seconds, dict[int, Seconds], int]:
    """Seconds of each way in each round: files in memory; files dropped so many seconds before; bytes of the state."""
    target = build(SIZES[size], blank=True)
    for tensor in target.tensors().values():
        tensor.detach().fill_(1)
    views = target.views()
    packs = [path for path in disk.files(folder / REPOSITORY) if path.suffix == ".data"]
    with Repository.open(folder / REPOSITORY, group=None) as repo:
        ways = _ways(repo, target)
        in_memory = {
            "BLAKE3": lambda: limits.hash_seconds(views),
            "bare loop, one pass": lambda: bare_seconds(packs, views, into_place=True),
            "bare loop, two passes": lambda: (
                bare_seconds(packs, views, into_place=False) + refill_seconds(packs, views)
            ),
            **ways,
        }
        cold = {
            "disk, through the page cache": lambda: seconds_of(lambda: disk.warm(folder / REPOSITORY)),
            "disk, past it": lambda: direct_seconds(packs),
            **ways,
            "torch.load(mmap) and copy": lambda: seconds_of(
                lambda: copy_into(target.plain(), torch.load(folder / TORCH_FILE, mmap=True, weights_only=True))
            ),
        }
        warm_s: Seconds = {}
        cold_s: dict[int, Seconds] = {0: {}, IDLE_S: {}}
        disk.warm(folder / REPOSITORY)
        for number in range(rounds + 1):
            for name, way in in_memory.items():
                _note(warm_s, name, way, counts=number > 0)
        for _ in range(rounds):
            for idle_s, found in cold_s.items():
                for name, way in cold.items():
                    disk.evict(folder)
                    time.sleep(idle_s)
                    _note(found, name, way)
    return warm_s, cold_s, target.num_bytes


def _note(found: Seconds, name: str, way: Callable[[], float], *, counts: bool = True) -> None:
    seconds = way()
    if counts:
        found.setdefault(name, []).append(seconds)


def _ways(repo: Repository, target: State) -> dict[str, Callable[[], float]]:
    return {
        "checkout": lambda: seconds_of(lambda: repo.checkout("main", into=target.parts)),
        "checkout, one pass": lambda: seconds_of(lambda: repo.checkout("main", into=target.parts, atomic=False)),
        "load": lambda: seconds_of(lambda: repo.load("main")),
    }


def bare_seconds(packs: list[Path], views: list[memoryview], *, into_place: bool) -> float:
    """Two threads read as much as the views have, step by step, and hash it leaf by leaf, in place or in a buffer."""

    def work(descriptor: int, offset: int, place: memoryview, buffer: memoryview) -> None:
        for start in range(0, len(place), STEP_BYTES):
            step = place[start : start + STEP_BYTES] if into_place else buffer[: min(STEP_BYTES, len(place) - start)]
            os.preadv(descriptor, [step], offset + start)
            for leaf in range(0, len(step), LEAF_BYTES):
                blake3(step[leaf : leaf + LEAF_BYTES]).digest()

    return _shared(packs, views, work)


def refill_seconds(packs: list[Path], views: list[memoryview], threads: int = 2) -> float:
    """The second pass: the same bytes into place, nothing hashed."""
    return _shared(packs, views, lambda descriptor, offset, place, _: os.preadv(descriptor, [place], offset), threads)


def _shared(
    packs: list[Path],
    views: list[memoryview],
    work: Callable[[int, int, memoryview, memoryview], object],
    threads: int = 2,
) -> float:
    """Seconds in which threads bring consecutive bytes of the packs into all pieces of the views."""
    files = [(os.open(path, os.O_RDONLY), path.stat().st_size) for path in packs]
    pieces = iter(list(_placed(files, limits.pieces(views))))
    turn = threading.Lock()

    def loop() -> None:
        buffer = memoryview(bytearray(STEP_BYTES))
        while True:
            with turn:
                piece = next(pieces, None)
            if piece is None:
                return
            work(*piece, buffer)

    seconds = seconds_of(lambda: _in_threads(loop, threads))
    for descriptor, _ in files:
        os.close(descriptor)
    return seconds


def _placed(files: list[tuple[int, int]], pieces: list[memoryview]) -> Iterator[tuple[int, int, memoryview]]:
    """Each piece, and where its bytes are read; what is too long for the end of a file is read from the next."""
    number, offset = 0, 0
    for piece in pieces:
        while offset + len(piece) > files[number % len(files)][1]:
            number, offset = number + 1, 0
        yield files[number % len(files)][0], offset, piece
        offset += len(piece)


def direct_seconds(packs: list[Path]) -> float:
    """Two threads read all of the packs past the page cache, 8 MiB at a time, into large pages."""
    files = [(os.open(path, os.O_RDONLY | os.O_DIRECT), path.stat().st_size) for path in packs]
    blocks = iter([(each, start) for each, size in files for start in range(0, size, BLOCK_BYTES)])
    turn = threading.Lock()

    def loop() -> None:
        with new_buffer(BLOCK_BYTES) as buffer:
            while True:
                with turn:
                    block = next(blocks, None)
                if block is None:
                    return
                os.preadv(block[0], [buffer], block[1])

    seconds = seconds_of(lambda: _in_threads(loop))
    for descriptor, _ in files:
        os.close(descriptor)
    return seconds


def _in_threads(loop: Callable[[], None], number: int = 2) -> None:
    others = [threading.Thread(target=loop) for _ in range(number - 1)]
    for other in others:
        other.start()
    loop()
    for other in others:
        other.join()


def page(found: tuple[Seconds, dict[int, Seconds], int], scratch: Path) -> str:
    warm_s, cold_s, num_bytes = found
    rounds = len(warm_s["BLAKE3"])
    lines = [
        *heading("Checkout and load beside what the machine can do", "restores", scratch),
        f"A GPT with AdamW, {num_bytes / 1e9:.2f} GB; two threads; medians of {rounds} rounds, each way in turn. What",
        "bounds the figures: [performance.md](../performance.md#speed-of-a-checkout-and-of-a-load).",
        "",
        "## Files in memory",
        "",
        f"The bare loops read steps of {STEP_BYTES >> 20} MiB and hash leaves of 128 KiB, and do nothing else: one",
        "pass into place; or one into a buffer, and a second one, into place, that hashes nothing. Share: of BLAKE3's",
        "rate.",
        "",
        "| way | seconds | least to most | share | wanted |",
        "| --- | --- | --- | --- | --- |",
        *(_row(name, times, [warm_s["BLAKE3"]], [WANTED_WARM.get(name)]) for name, times in warm_s.items()),
        "",
        "## Files that are not in memory",
        "",
        "Of the disk's own rate: past the page cache, in the same round. Of torch: its seconds over these.",
    ]
    for idle_s, found_s in cold_s.items():
        lines += [
            "",
            f"### {f'{idle_s} s' if idle_s else 'Right'} after the files were dropped from memory",
            "",
            "| way | seconds | least to most | of the disk's rate | wanted | of torch.load(mmap) and copy | wanted |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        others = [found_s["disk, past it"], found_s["torch.load(mmap) and copy"]]
        for name, times in found_s.items():
            ours = name in ("checkout", "checkout, one pass", "load")
            lines.append(_row(name, times, others, [WANTED_OF_DISK, WANTED_OF_TORCH] if ours else [None, None]))
    return "\n".join([*lines, ""])


def _row(name: str, times: list[float], others: list[list[float]], wanted: list[float | None]) -> str:
    cells = [f"| {name} | {statistics.median(times):.3f} | {min(times):.3f} to {max(times):.3f}"]
    for other, least in zip(others, wanted, strict=True):
        share = statistics.median(them / us for them, us in zip(other, times, strict=True))
        judged = "" if least is None else reached(share, least)
        cells.append(f" | {share:.2f} | {judged}")
    return "".join(cells) + " |"


def measured(scratch: Path, quick: bool) -> str:
    size = "gpt-1g-total" if quick else "gpt-1g"
    prepare(scratch, size)
    return page(measure(scratch, size, 2 if quick else 5), scratch)


if __name__ == "__main__":
    raise SystemExit(run(None, __doc__, "restores", measured))
