"""What does history cost the index? Two million chunk rows in a thousand commits, one of which is forgotten.

    python -m benchmarks.history --write         everything, and docs/benchmarks/history.md, some minutes
    python -m benchmarks.history --commits 100   a small one; prints only

The index is built through `Index.add_packs` from shapes alone (history_shapes.py): there is no store and
no pack, so "deletes" are those of rows. Each step runs in a process of its own, whose resident size counts.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.harness.machine import describe
from benchmarks.history_shapes import FROZEN, HOT, LAYOUT, TURNING, commit_id, packs_of, root_id, state_of
from cas_ckpt.index import garbage, usage
from cas_ckpt.index.index import Index
from cas_ckpt.index.rows import PackRecord
from cas_ckpt.objects.digest import Digest, ObjectKind

REPORT = Path(__file__).parent.parent / "docs" / "benchmarks" / "history.md"
STORE = "store"
ROUNDS = 9
COLLECTIONS = 5
SAMPLED = FROZEN + HOT + TURNING
_COMMITS_PER_ADD = 20

Figures: TypeAlias = dict[str, float]


# --- steps, each in a process of its own ---------------------------------------------------


def build(place: Path, num_commits: int) -> Figures:
    """Make the index."""
    start = time.perf_counter()
    with Index.open(place, store_id=STORE) as index:
        for first in range(0, num_commits, _COMMITS_PER_ADD):
            some = range(first, min(num_commits, first + _COMMITS_PER_ADD))
            index.add_packs([record for number in some for record in packs_of(number)])
        stats = index.read(usage.read_stats)
    return {
        "seconds": time.perf_counter() - start,
        "chunks": stats.objects[ObjectKind.CHUNK][0],
        "edges": stats.num_edges,
        "bytes": place.stat().st_size,
    }


def first_pass(place: Path, num_commits: int) -> Figures:
    """Examine every pack, as after a rebuild."""
    commits, roots = _live(num_commits, [])
    with (
        Index.open(place, store_id=STORE) as index,
        _timed() as figures,
        garbage.living(index, commits=commits, roots=roots),
    ):
        pass
    return figures


def collect(place: Path, num_commits: int, forgotten: Sequence[int]) -> Figures:
    """Forget the last of `forgotten`, find what died, write what lives in its packs anew, drop them."""
    commits, roots = _live(num_commits, forgotten)
    meta = {digest: children for digest, children in packs_of(forgotten[-1])[1].edges}
    rows = packs_of(forgotten[-1])[1].commits
    with Index.open(place, store_id=STORE) as index:
        with _timed() as figures, garbage.living(index, commits=commits, roots=roots, published=commits) as living:
            found = living.packs()
            lost = living.missing()
            dead = living.summary()
            living.needed([pack.name for pack in found])
            entries = living.live_entries([pack.name for pack in found])
            kept = {pack: entries[pack.name] for pack in found}
        with _timed() as copying:
            index.add_packs(
                [
                    PackRecord(
                        f"{pack.name}+", pack.kind, pack.size_bytes, entries,
                        [(entry.digest, meta[entry.digest]) for entry in entries if entry.digest in meta],
                        [row for row in rows if row.digest in {entry.digest for entry in entries}],
                    )
                    for pack, entries in kept.items()
                ]
            )  # fmt: skip
        with _timed() as dropping:
            index.drop_packs([pack.name for pack in found])
    return figures | {
        "add_s": copying["seconds"], "drop_s": dropping["seconds"], "dead": dead.num_objects, "missing": len(lost),
        "packs": len(found), "cpu_s": sum(each["cpu_s"] for each in (figures, copying, dropping)),
        "total_s": sum(each["seconds"] for each in (figures, copying, dropping)), "rss_bytes": _rss(),
    }  # fmt: skip


def questions(place: Path, num_commits: int) -> dict[str, Any]:
    """The median of each question, asked several times."""
    now = _live(num_commits, [])
    middle = num_commits // 2
    few = _live(num_commits, range(middle, middle + 5))
    state = state_of(middle)
    sample = [tensor.chunks()[0] for tensor in state]
    frozen, hot = next(each for each in state if each.version == 0 and each.name.startswith("frozen")), state[0]
    recent, older = now[0][-10:], now[0][:-10]
    asked: dict[str, Callable[[Index], object]] = {
        "freed by 1 commit": lambda index: garbage.freed(index, now, _live(num_commits, [middle])),
        "freed by 5 commits": lambda index: garbage.freed(index, now, few),
        "unique to the last 10 commits": lambda index: garbage.unique(index, recent, older),
        f"nearest, {SAMPLED} chunks of which {FROZEN} are in every commit": lambda index: index.read(
            usage.nearest, sample
        ),
        "nearest, 256 chunks of one tensor": lambda index: index.read(usage.nearest, hot.chunks()[:256]),
        "commits that hold a chunk of all": lambda index: index.read(usage.commits_holding, frozen.chunks()[0]),
        "commits that hold a tensor of all": lambda index: index.read(usage.commits_holding, frozen.node),
        "commits that hold a chunk of one": lambda index: index.read(usage.commits_holding, hot.chunks()[0]),
        "liveness, nothing dead": lambda index: _ask_liveness(index, now),
    }
    with Index.open(place, store_id=STORE) as index:
        found = {name: _medians(index, ask) for name, ask in asked.items()}
    return {"asked": found, "rss_bytes": _rss()}


def _ask_liveness(index: Index, live: tuple[list[Digest], list[Digest]]) -> None:
    with garbage.living(index, commits=live[0], roots=live[1]) as living:
        living.packs()


def _medians(index: Index, ask: Callable[[Index], object]) -> Figures:
    found = []
    for _ in range(ROUNDS):
        with _timed() as figures:
            ask(index)
        found.append(figures)
    return {key: statistics.median(each[key] for each in found) for key in ("seconds", "cpu_s")}


def _live(num_commits: int, forgotten: Sequence[int]) -> tuple[list[Digest], list[Digest]]:
    gone = set(forgotten)
    roots = [root_id(number) for number in range(num_commits) if number not in gone]
    return [commit_id(number) for number in range(num_commits)], [*roots, LAYOUT]


@contextmanager
def _timed() -> Iterator[Figures]:
    figures: Figures = {}
    start, cpu = time.perf_counter(), time.process_time()
    yield figures
    figures |= {"seconds": time.perf_counter() - start, "cpu_s": time.process_time() - cpu, "rss_bytes": _rss()}


def _rss() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# --- the whole -----------------------------------------------------------------------------


def run_step(step: str, place: Path, num_commits: int, forgotten: Sequence[int] = ()) -> dict[str, Any]:
    """One step in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.history", "--step", step, "--index", str(place)]
    command += ["--commits", str(num_commits), "--forgotten", *map(str, forgotten)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(place: Path, num_commits: int, show: Callable[[str], None]) -> dict[str, Any]:
    """All steps, one after another."""
    found: dict[str, Any] = {}
    for name, step in (("build", "build"), ("first", "first"), ("questions", "questions")):
        found[name] = run_step(step, place, num_commits)
        show(f"{name}: {found[name]}")
    found["collections"] = []
    middle = num_commits // 2
    for number in range(COLLECTIONS):
        found["collections"].append(run_step("collect", place, num_commits, range(middle, middle + number + 1)))
        show(f"collect: {found['collections'][-1]}")
    return found


def page(found: dict[str, Any], num_commits: int, folder: Path) -> str:
    """The document."""
    machine, built = describe(folder), found["build"]
    text = [
        "# History in the index",
        "",
        "Written by `python -m benchmarks.history --write`, figures as they came. Shapes alone, no store: what the",
        "index takes, not what reading and writing packs takes.",
        f"Machine: {machine['processor']}, {machine['memory']}, Python {machine['python']}; commit "
        f"{machine['commit']}. Load when it ended (1, 5, 15 minutes; 1 is this process alone): {_load()}.",
        "",
        f"{num_commits:,} commits, {built['chunks']:,} chunks, {built['edges']:,} edges, {built['bytes'] / 1e6:.0f} MB "
        f"of SQLite, built in {built['seconds']:.0f} s. A state has {FROZEN} tensors that all commits share, {HOT}",
        f"that every commit changes and {TURNING} that take turns: 2,000 new chunks a commit, 1,600 of",
        "which no other commit has.",
        "",
        "## Targets",
        "",
        _table(("what", "wanted", "measured", "verdict"), list(_verdicts(found))),
        "",
        "## Forgetting one commit",
        "",
        f"{COLLECTIONS} times, each in a fresh process and one commit further: `liveness` with all its answers, then",
        "`add_packs` of what lives in the packs with something dead (the copies of a repack), then `drop_packs`.",
        "",
        _collections(found["collections"]),
        "",
        "## Questions",
        "",
        f"Medians of {ROUNDS}, in one process ({found['questions']['rss_bytes'] / 1e6:.0f} MB resident at its end).",
        "",
        _table(
            ("question", "ms", "ms of CPU"),
            [
                (name, f"{each['seconds'] * 1e3:.0f}", f"{each['cpu_s'] * 1e3:.0f}")
                for name, each in found["questions"]["asked"].items()
            ],
        ),
        "",
        "## After a rebuild",
        "",
        f"The first collection looks at every entry once: {found['first']['seconds']:.1f} s "
        f"({found['first']['cpu_s']:.1f} s of CPU), {found['first']['rss_bytes'] / 1e6:.0f} MB resident, in "
        "transactions of 200,000 entries.",
        "",
    ]
    return "\n".join(text)


def _collections(rounds: Sequence[Figures]) -> str:
    head = ("objects dead", "packs", "liveness s", "add_packs s", "drop_packs s", "together s", "CPU s", "peak MB")
    lines = [
        (
            f"{each['dead']:.0f}", f"{each['packs']:.0f}", *(f"{each[key]:.3f}" for key in
            ("seconds", "add_s", "drop_s", "total_s", "cpu_s")), f"{each['rss_bytes'] / 1e6:.0f}",
        )
        for each in rounds
    ]  # fmt: skip
    return _table(head, lines)


def _verdicts(found: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    rounds = found["collections"]
    total = statistics.median(each["total_s"] for each in rounds)
    peak = max(each["rss_bytes"] for each in rounds) / 1e6
    yield "1 commit of many forgotten: index's part of gc", "<= 2 s", f"{total:.3f} s", _met(total <= 2)
    yield "the same: peak of resident memory", "<= 300 MB", f"{peak:.0f} MB", _met(peak <= 300)
    for name, each in found["questions"]["asked"].items():
        if not name.startswith("liveness"):
            yield name, "<= 200 ms", f"{each['seconds'] * 1e3:.0f} ms", _met(each["seconds"] <= 0.2)


def _met(met: bool) -> str:
    return "met" if met else "**not met**"


def _load() -> str:
    return ", ".join(Path("/proc/loadavg").read_text().split()[:3])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])


def _step(chosen: argparse.Namespace) -> dict[str, Any]:
    if chosen.step == "build":
        return build(chosen.index, chosen.commits)
    if chosen.step == "first":
        return first_pass(chosen.index, chosen.commits)
    if chosen.step == "questions":
        return questions(chosen.index, chosen.commits)
    return collect(chosen.index, chosen.commits, chosen.forgotten)


def main(show: Callable[[str], None] = print) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description="Build an index of many commits; forget one; ask who holds what.")
    parser.add_argument("--commits", type=int, default=1000)
    parser.add_argument("--write", action="store_true", help=f"write {REPORT.name}")
    parser.add_argument("--step", choices=("build", "first", "questions", "collect"), help=argparse.SUPPRESS)
    parser.add_argument("--index", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--forgotten", type=int, nargs="*", default=[], help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.step:
        show(json.dumps(_step(chosen)))
        return
    with tempfile.TemporaryDirectory(prefix="cas-ckpt-history-") as folder:
        found = measure(Path(folder) / "index.sqlite", chosen.commits, show)
        text = page(found, chosen.commits, Path(folder))
    show(text)
    if chosen.write:
        REPORT.write_text(text)


if __name__ == "__main__":
    main()
