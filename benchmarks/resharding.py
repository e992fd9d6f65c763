"""One state saved under many divisions: equal roots, next to nothing new? And what do first saves look like?

    python -m benchmarks.resharding              docs/benchmarks/resharding.md, some minutes
    python -m benchmarks.resharding --layers 2   smaller, printed only

Virtual ranks are threads of one process with the real protocol between them (tests/thread_peers.py), over one set of
arrays; the commits, packs and index are real files. Duty: the runs and the page; the state is resharding_state.py.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import disk, machine
from benchmarks.resharding_state import LAYERS, Array, Division, fill, num_layers_of, specs, state_of
from cas_ckpt import limits
from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import CommitInfo
from cas_ckpt.index import usage
from cas_ckpt.layout import save_plan
from cas_ckpt.layout.save_plan import Held, SavePlan
from cas_ckpt.objects.spec import Spec, grid_for
from cas_ckpt.ops.commit import merge_states as union
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.parallel.peers import Peers
from tests.divided import written_bytes
from tests.thread_peers import run_ranks

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks" / "resharding.md"
TIMEOUT_S = 1200.0
MANY_LAYERS = 1
"""Of the state that a thousand virtual ranks save, which share one interpreter."""

WHOLE = Division("one rank")
DIVISIONS = (
    Division("FSDP 8", "dp=8"),
    Division("FSDP 48", "dp=48"),
    Division("FSDP 96", "dp=96"),
    Division("TP 2", "tp=2"),
    Division("TP 4", "tp=4"),
    Division("TP 8", "tp=8"),
    Division("FSDP 8 x TP 4", "dp=8,tp=4"),
    Division("FSDP 12 x TP 8", "dp=12,tp=8"),
    Division("PP 4", "dp=1", stages=4),
    Division("PP 4 x FSDP 4", "dp=4", stages=4),
    Division("HSDP 4 x 8", "dp_replicate=4,dp=8"),
    Division("FSDP 1024", "dp=1024", layers=MANY_LAYERS),
)


@dataclass(frozen=True, slots=True)
class Save:
    """One commit of all ranks and what it left in the files."""

    root: str
    seconds: float
    cpu_s: float
    new_file_bytes: int
    new_chunks: int
    chunks: int
    extents: int


@dataclass(frozen=True, slots=True)
class Row:
    """One division: its second save, its first save into a repository of its own, its plan."""

    division: Division
    state_bytes: int
    second: Save
    first: Save
    whole_root: str
    straddled_bytes: int
    written: Sequence[int]
    most_alone: int
    plan_s: float

    @property
    def equal(self) -> bool:
        """Whether all three roots are one."""
        return self.whole_root == self.second.root == self.first.root

    @property
    def new_share(self) -> float:
        """Bytes that the second save added to the files, of the state's."""
        return self.second.new_file_bytes / self.state_bytes

    @property
    def balance(self) -> float:
        """Most over mean of what ranks write."""
        return max(self.written) / statistics.mean(self.written)

    @property
    def least_balance(self) -> float:
        """The least that any plan could reach: what one rank alone holds, it writes."""
        return max(1.0, self.most_alone / statistics.mean(self.written))


@dataclass(frozen=True, slots=True)
class State:
    """The weights that everybody saves."""

    specs: dict[str, Spec]
    arrays: dict[str, Array]

    @property
    def num_bytes(self) -> int:
        """Plain bytes."""
        return sum(spec.num_bytes for spec in self.specs.values())


def save(handle: RepositoryHandle, packs: Path, division: Division, state: State) -> Save:
    """A commit of `division` by one thread per rank, which share the handle."""
    before, cpu, start = disk.length_bytes(packs), os.times(), time.perf_counter()
    request = CommitRequest(message=division.name, author="benchmark")

    def work(peers: Peers) -> CommitInfo:
        with limits(num_threads=1 if division.size > 1 else 2):
            return commit_tree(handle, state_of(division, state.arrays, state.specs, peers.rank), request, peers=peers)

    infos = run_ranks(division.size, work, timeout_s=TIMEOUT_S)
    seconds, cpu_s = time.perf_counter() - start, sum(os.times()[:2]) - sum(cpu[:2])
    if len({info.id for info in infos}) != 1:
        raise SystemExit(f"{division.name}: the ranks got different commits")
    chunks, extents = handle.index.read(usage.count_extents, bytes.fromhex(infos[0].root))
    new_bytes = disk.length_bytes(packs) - before
    return Save(infos[0].root, seconds, cpu_s, new_bytes, infos[0].stats.num_new_chunks, chunks, extents)


def _shared(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` once for equal arguments, whichever virtual rank asks; shards are compared by identity."""
    lock, found = threading.Lock(), {}

    def answer(first: Any, second: Any) -> Any:
        by_value = isinstance(first, tuple)  # holdings(shape, placements), else touches(grid, shards)
        key = (first, tuple(second)) if by_value else (first, id(second))
        with lock:
            if key not in found:
                found[key] = function(first, second), second  # kept: its identity is the key
            return found[key][0]

    return answer


@contextmanager
def shared_plans() -> Iterator[None]:
    """Who holds what, and which cells that touches, found out once for all virtual ranks.

    Each rank of a real job finds that out on its own machine, at the same time as the others; here a thousand would
    do it one after another. Both functions are pure, and equal on all ranks.
    """
    kept = union.holdings, save_plan.touches
    union.holdings, save_plan.touches = _shared(union.holdings), _shared(save_plan.touches)
    try:
        yield
    finally:
        union.holdings, save_plan.touches = kept


def rows_of(state: State, divisions: Sequence[Division], scratch: Path) -> Iterator[Row]:
    """Save whole, then under every division: into the same repository, and into a new one of its own."""
    for name in ("whole", "own"):
        shutil.rmtree(scratch / name, ignore_errors=True)
    handle = init_repository(scratch / "whole")
    root = save(handle, scratch / "whole", WHOLE, state).root
    for division in divisions:
        own = init_repository(scratch / "own")
        with shared_plans():
            second = save(handle, scratch / "whole", division, state)
            first = save(own, scratch / "own", division, state)
        own.close()
        shutil.rmtree(scratch / "own")
        yield Row(division, state.num_bytes, second, first, root, *plan_of(division, state.specs))
    handle.close()
    shutil.rmtree(scratch / "whole")


def plan_of(division: Division, found: dict[str, Spec]) -> tuple[int, list[int], int, float]:
    """(straddled bytes, bytes each rank would write, most that one alone holds, seconds of planning), from shapes."""
    num_layers = num_layers_of(found)
    start = time.perf_counter()
    held = [
        Held(name, spec, grid_for(spec), division.shards(name, spec, division.stage_of(name, num_layers)), True)
        for name, spec in found.items()
    ]  # disjoint: one mesh divides each of them
    plan = SavePlan(held, division.size)
    seconds = time.perf_counter() - start
    whole = {(tensor, cell) for rank in range(division.size) for tensor, cells in plan.whole_cells(rank).items()
             for cell in cells}  # fmt: skip
    straddled = sum(spec.num_bytes for spec in found.values()) - sum(
        held[tensor].grid.cell_elements(cell) * held[tensor].spec.item_bytes for tensor, cell in whole
    )
    return straddled, written_bytes(plan, division.size), _most_alone(held, division.size), seconds


def _most_alone(held: Sequence[Held], size: int) -> int:
    """Bytes of which one rank has the only copy, for the rank that has most: it writes no less, whatever the plan."""
    alone = [0] * size
    for tensor in held:
        for shard in tensor.shards:
            if len(shard.ranks) == 1:
                elements = sum(piece.num_elements for piece in shard.pieces)
                alone[shard.ranks[0]] += elements * tensor.spec.item_bytes
    return max(alone)


_HEAD = """\
# One state, many divisions

Written by `python -m benchmarks.resharding`, figures as they came. A state is saved once by one process, then again
under each division into the same repository (*second save*), and besides into a new repository (*first save*). Ranks
are virtual: threads of one process with the real protocol of `Peers` between them, each allowed to read only what it
holds; packs and index are real files, fsynced. New: growth of all files of the repository, the commit's own objects
and the index included. Extents per chunk: of the first save, whose straddled chunks are written in parts by several
ranks. Straddled: bytes in cells that no rank holds whole. Written: what each rank writes of a first save; "any plan's
least" is most over mean if every rank writes nothing but what it alone holds (DTensor's parts are not always even,
pipeline stages never are). Plan: seconds of one rank's SavePlan with the holdings, made apart from the saves. Seconds
of the saves are of all virtual ranks in one interpreter: they say nothing about as many machines. What is pure and
equal on all ranks (holdings, cells touched) is computed once for all virtual ranks.
"""


def page(rows: Sequence[Row], about: dict[str, str], note: str) -> str:
    """The whole page."""
    small = [row for row in rows if row.division.layers is not None]
    sizes = [f"{row.division.layers or LAYERS} layers: {row.state_bytes / 1e9:.3f} GB" for row in rows]
    state = "State: Llama 3 8B with hidden sizes times 3/8 and vocabulary times 1/8, bfloat16 weights, no moments"
    where = f"Machine: {about['processor']}, {about['memory']}. {note}"
    lines = [_HEAD, f"{state} ({'; '.join(dict.fromkeys(sizes))}). {where}\n"]
    if small:
        names = ", ".join(row.division.name for row in small)
        lines.append(f"Fewer layers for {names}: so many threads in one interpreter plan one after another.\n")
    lines += ["## Targets\n", _targets(rows), "\n## Divisions\n", _divisions(rows)]
    lines += ["\n## Costs here\n", _costs(rows)]
    lines += ["\n## Machine\n", _table(("what", "which"), about.items())]
    return "\n".join(lines) + "\n"


def _targets(rows: Sequence[Row]) -> str:
    unequal = [row.division.name for row in rows if not row.equal]
    new, balance = max(rows, key=lambda row: row.new_share), max(rows, key=lambda row: row.balance)
    most_new = f"{new.new_share:.4%} ({new.division.name})"
    worst = f"{balance.balance:.3f} ({balance.division.name}; no plan can do better than {balance.least_balance:.3f})"
    listed = (
        ("roots of second and first saves", "that of the whole save", ", ".join(unequal) or "all equal", not unequal),
        ("new bytes of a second save", "<= 0.5 %", most_new, new.new_share <= 0.005),
        ("bytes written, most over mean", "<= 1.1", worst, balance.balance <= 1.1),
    )  # fmt: skip
    return _table(
        ("what", "wanted", "worst", "verdict"), [(*row[:3], "met" if row[3] else "**not met**") for row in listed]
    )


def _divisions(rows: Sequence[Row]) -> str:
    head = ("division", "ranks", "root", "new bytes", "of the state", "new chunks", "chunks",
            "extents per chunk, first save", "straddled", "written MB, least to most", "most / mean",
            "any plan's least")  # fmt: skip
    return _table(head, [_division(row) for row in rows])


def _division(row: Row) -> tuple[str, ...]:
    second, first = row.second, row.first
    return (
        row.division.name, str(row.division.size), "equal" if row.equal else "**DIFFERENT**",
        f"{second.new_file_bytes:,}", f"{row.new_share:.4%}", str(second.new_chunks), str(second.chunks),
        f"{first.extents / first.chunks:.3f}", f"{row.straddled_bytes / row.state_bytes:.2%}",
        f"{min(row.written) / 1e6:.2f} to {max(row.written) / 1e6:.2f}", f"{row.balance:.3f}",
        f"{row.least_balance:.3f}",
    )  # fmt: skip


def _costs(rows: Sequence[Row]) -> str:
    head = ("division", "second save s", "its CPU s", "first save s", "its CPU s", "plan of one rank s")
    return _table(head, [
        (row.division.name, f"{row.second.seconds:.2f}", f"{row.second.cpu_s:.2f}", f"{row.first.seconds:.2f}",
         f"{row.first.cpu_s:.2f}", f"{row.plan_s:.3f}")
        for row in rows
    ])  # fmt: skip


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])


def main() -> int:
    """Run all divisions, write the page; 0 when all roots are equal."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resharding", description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, help="a smaller state, printed only")
    parser.add_argument("--only", help="divisions whose name begins so")
    parser.add_argument("--scratch", type=Path, default=ROOT / "bench-out" / "resharding")
    parser.add_argument("--note", default="", help="a sentence on how the run went, for the page")
    options = parser.parse_args()
    options.scratch.mkdir(parents=True, exist_ok=True)
    chosen = [division for division in DIVISIONS if division.name.startswith(options.only or "")]
    rows: list[Row] = []
    about = machine.describe(options.scratch)
    for layers in dict.fromkeys(division.layers for division in chosen):
        found = specs(options.layers or layers or LAYERS)
        same = [division for division in chosen if division.layers == layers]
        for row in rows_of(State(found, fill(found)), same, options.scratch):
            rows.append(row)
            print(" | ".join(_division(row)), f"| {row.second.seconds:.2f} s, {row.first.seconds:.2f} s", flush=True)
            if not options.layers and not options.only:  # after every row: the last ones take longest
                PAGE.write_text(page(rows, about, options.note))
    if options.layers or options.only:
        print(page(rows, about, options.note))
    return int(not all(row.equal for row in rows))


if __name__ == "__main__":
    sys.exit(main())
