"""What does a commit cost beside torch.save + fsync, for small states, and after long histories?

    python -m benchmarks.small --write      everything, and docs/benchmarks/small.md, ten minutes or so
    python -m benchmarks.small --quick      fewer rounds and a short history; prints only

Everything that is compared is done in turns, in one process and one run, so that a busy machine is as busy
for one as for the other, and commit and torch.save take turns at being the first. "alone" is what no
commit can do without: to hash the bytes, with two threads, and to write them and have them synced, with the
file store's own writer.
torch changes the state with one thread: those that it keeps beside spin for a while afterwards, on a core
that whoever comes next would have used.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.harness.page import heading, run
from cas_ckpt import Repository
from cas_ckpt.native import leaf_digests
from cas_ckpt.objects.digest import LEAF_BYTES
from cas_ckpt.storage.file import FileStore

MIB = 1 << 20

SIZES = ((16, 16, 1.3), (64, 200, 1.3), (250, 60, 1 / 1.2))
"""(MiB, tensors, how many times the time of torch.save a commit may take)."""

HISTORIES = (100, 1_000, 6_000)
COMMITS_A_TURN = 10


@dataclass(slots=True)
class Times:
    """Seconds of wall clock and of processor, one for each round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Add what the block takes."""
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)

    @property
    def ms(self) -> float:
        """Median of the wall clock."""
        return 1e3 * statistics.median(self.wall)

    @property
    def cpu_ms(self) -> float:
        """Median of the processor's time."""
        return 1e3 * statistics.median(self.cpu)


def save_durably(state: dict[str, torch.Tensor], path: Path) -> None:
    """torch.save as a careful user writes it: temporary, fsync, rename, fsync of the folder."""
    unnamed = path.with_suffix(".tmp")
    with open(unnamed, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unnamed, path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def hash_all(pool: ThreadPoolExecutor, state: dict[str, torch.Tensor]) -> None:
    """The leaf digests of every tensor, by two threads."""
    views = [memoryview(tensor.numpy()).cast("B") for tensor in state.values()]
    list(pool.map(lambda view: leaf_digests(view, LEAF_BYTES), views))


def write_all(store: FileStore, key: str, state: dict[str, torch.Tensor]) -> None:
    """The bytes of every tensor in one durable file."""
    with store.open_writer(key) as writer:
        for tensor in state.values():
            writer.write(memoryview(tensor.numpy()).cast("B"))
        writer.commit()


@dataclass(slots=True)
class Size:
    """One size of state, measured in turns."""

    mib: int
    num_tensors: int
    wanted: float
    changed: Times = field(default_factory=Times)
    unchanged: Times = field(default_factory=Times)
    saved: Times = field(default_factory=Times)
    hashed: Times = field(default_factory=Times)
    written: Times = field(default_factory=Times)

    def measure(self, folder: Path, rounds: int) -> None:
        """Fill in the times; the first round is not counted."""
        elements = self.mib * MIB // self.num_tensors // 4
        state = {f"layer.{number}.weight": torch.randn(elements) for number in range(self.num_tensors)}
        store = FileStore(folder / "raw")
        with Repository.init(folder / "repo", group=None) as repo, ThreadPoolExecutor(2) as pool:
            repo.commit(state)
            save_durably(state, folder / "saved.pt")
            for step in range(rounds):
                for tensor in state.values():
                    tensor.add_(1e-3)
                rivals: list[tuple[Times, Callable[[], object]]] = [
                    (self.changed, lambda: repo.commit(state, step=step)),  # noqa: B023
                    (self.saved, lambda: save_durably(state, folder / "saved.pt")),
                ]
                turns: list[tuple[Times, Callable[[], object]]] = [
                    *(rivals if step % 2 else rivals[::-1]),
                    (self.unchanged, lambda: repo.commit(state, step=step)),  # noqa: B023
                    (self.hashed, lambda: hash_all(pool, state)),
                    (self.written, lambda: write_all(store, f"raw-{step}", state)),  # noqa: B023
                ]
                for times, turn in turns:
                    with times.measured():
                        turn()
                store.delete(f"raw-{step}")

    @property
    def ratio(self) -> float:
        """Median over the rounds of: commit of a changed state / torch.save + fsync beside it."""
        return statistics.median(ours / theirs for ours, theirs in zip(self.changed.wall, self.saved.wall, strict=True))

    @property
    def line(self) -> str:
        """A line of the table."""
        each = (self.changed, self.saved, self.unchanged, self.hashed, self.written)
        shown = " | ".join(f"{times.ms:.1f} ({times.cpu_ms:.0f})" for times in each)
        verdict = "met" if self.ratio <= self.wanted else "missed"
        return f"| {self.mib} MiB in {self.num_tensors} | {shown} | {self.ratio:.2f} | {self.wanted:.2f} {verdict} |"


@dataclass(slots=True)
class History:
    """A repository that holds so many commits."""

    name: str
    folder: Path
    times: Times = field(default_factory=Times)

    def grow(self, num_commits: int) -> None:
        """Make the commits, each of a tiny state that changed."""
        with Repository.init(self.folder, group=None) as repo:
            tensor = torch.randn(1024)
            for step in range(num_commits):
                repo.commit({"w": tensor.add_(1e-3), "step": step}, step=step, metrics={"loss": 1 / (step + 1)})

    def collect(self) -> None:
        """Forget all commits but every tenth, and collect."""
        from cas_ckpt import Policy

        with Repository.open(self.folder, group=None) as repo:
            repo.forget(Policy(keep_every_steps=10))
            repo.gc(min_age_s=0)


def measure_histories(histories: Sequence[History], turns: int) -> None:
    """Commits of a tiny state into each, in turns."""
    repos = [Repository.open(each.folder, group=None) for each in histories]
    tensor = torch.randn(1024)
    for each in repos:  # a handle's first commit compares index and packs
        each.commit({"w": tensor, "step": 0})
    for turn in range(turns):
        for history, repo in zip(histories, repos, strict=True):
            for at in range(COMMITS_A_TURN):
                state = {"w": tensor.add_(1), "step": at}
                with history.times.measured():
                    repo.commit(state, step=turn, metrics={"loss": 0.5})
    for each in repos:
        each.close()


def _page(sizes: Sequence[Size], histories: Sequence[History], scratch: Path) -> str:
    first = histories[0].times
    lines = [
        *heading("Small states and long histories", "small", scratch),
        "## Beside torch.save + fsync",
        "",
        "Medians in milliseconds, in brackets those of processor time; done in turns, one of each a round. `ratio`:",
        "median over the rounds of a commit of the changed state / torch.save, fsync, rename, fsync of the folder.",
        "",
        "| state | commit, all changed | torch.save + fsync | commit, unchanged | hash alone | write + fsync alone "
        "| ratio | wanted |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *(size.line for size in sizes),
        "",
        "## After long histories",
        "",
        f"Commits of a tiny state (one tensor of 4 KB, changed) into each repository, {COMMITS_A_TURN} at a time, in "
        "turns.",
        "",
        "| repository | commits a second (median) | processor ms | beside the first |",
        "| --- | --- | --- | --- |",
        *(
            f"| {each.name} | {1e3 / each.times.ms:.0f} | {each.times.cpu_ms:.2f} | "
            f"{first.ms / each.times.ms:.2f} ({first.cpu_ms / each.times.cpu_ms:.2f} by processor time) |"
            for each in histories
        ),
        "",
        "What a commit's cost grows with: [costs.md](../costs.md). What was tried: "
        "[decisions/008-small-states.md](../decisions/008-small-states.md).",
        "",
    ]
    return "\n".join(lines)


def _measured(scratch: Path, quick: bool) -> str:
    torch.set_num_threads(1)
    rounds, turns, lengths = (5, 5, (20, 100)) if quick else (21, 20, HISTORIES)
    sizes = [Size(*size) for size in SIZES]
    for size in sizes:
        place = scratch / f"{size.mib}"
        place.mkdir()
        size.measure(place, rounds if size.mib < 100 else max(rounds // 2, 3))
        shutil.rmtree(place)
        print(size.line, flush=True)
    histories = [History(f"{length:,} commits", scratch / f"history-{length}") for length in lengths]
    for each, length in zip(histories, lengths, strict=True):
        each.grow(length)
    collected = History(f"{lengths[-1]:,} commits, collected to a tenth", scratch / "collected")
    shutil.copytree(histories[-1].folder, collected.folder)
    collected.collect()
    histories.append(collected)
    measure_histories(histories, turns)
    return _page(sizes, histories, scratch)


if __name__ == "__main__":
    raise SystemExit(run(None, __doc__, "small", _measured))
