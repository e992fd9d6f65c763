"""How do plans grow? Restores and commits of real models at 8 to 2048 ranks, from shapes alone.

    python -m benchmarks.scale              all tables, and docs/benchmarks/scale.md, some minutes
    python -m benchmarks.scale --short      DCP's planners beside ours up to 64 ranks only
    python -m benchmarks.scale --no-dcp     without DCP's planners; prints only

Every plan is made for all ranks in this one process and proven with `check()`; seconds are the
processor time of planning and proving, shards given: neither planner starts threads or waits.
What the columns mean stands above the tables.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import scale_dcp
from benchmarks.harness.machine import describe
from benchmarks.scale_shapes import EIGHTH, MIXTRAL, Division, Tensor, state
from cas_ckpt.layout.holdings import leaf_map
from cas_ckpt.layout.restore_plan import PlanSummary, ReadPlan, RestoreRequest, Template, plan_restore_reads, summarize
from cas_ckpt.layout.save_plan import Held, SavePlan
from cas_ckpt.objects.spec import grid_for
from tests.divided import written_bytes

REPORT = Path(__file__).parent.parent / "docs" / "benchmarks" / "scale.md"

CASES: tuple[tuple[str, tuple[Division, ...]], ...] = (
    (EIGHTH, (Division("replicate=64"), Division("replicate=8,dp=8"), Division("dp=64"), Division("dp=8,tp=8"))),
    (
        "llama3-8B",
        (
            Division("dp=8"), Division("tp=8"), Division("dp=64"), Division("replicate=8,dp=8"), Division("dp=8,tp=8"),
            Division("dp=8", stages=8), Division("dp=512"), Division("dp=2048"),
        ),
    ),
    (
        "llama3-70B",
        (
            Division("dp=64"), Division("dp=32,tp=8"), Division("dp=8,tp=4", stages=8), Division("dp=512"),
            Division("replicate=8,dp=256"),
        ),
    ),
    (
        "llama3-405B",
        (
            Division("dp=512"), Division("dp=768"), Division("dp=96,tp=8"), Division("dp=1024"),
            Division("dp=128,tp=8"), Division("dp=8,tp=8", stages=16), Division("dp=2048"),
            Division("replicate=8,dp=256"),
        ),
    ),
    (MIXTRAL, (Division("dp=64"), Division("dp=8,ep=8"), Division("dp=48,ep=8"))),
)  # fmt: skip

BESIDE_DCP = (("llama3-8B", 16, 12), ("llama3-8B", 32, 24), ("llama3-8B", 64, 48), ("llama3-8B", 128, 96),
              ("llama3-405B", 16, 12), ("llama3-405B", 64, 48), ("llama3-405B", 128, 96))  # fmt: skip
"""(model, ranks that save, ranks that load), FSDP; DCP stays under about a minute each."""

SHORT_RANKS = 64


@dataclass(frozen=True, slots=True)
class Timed:
    """A restore plan, what it says, and how long planning and proving took."""

    plan: ReadPlan
    summary: PlanSummary
    seconds: float


def plan_restore(tensors: Sequence[Tensor], world_size: int) -> Timed:
    """Plan and prove a restore."""
    wanted = [RestoreRequest(tensor.key, tensor.spec, tensor.shards) for tensor in tensors]
    gc.collect()
    start = time.process_time()
    plan = plan_restore_reads(wanted, world_size)
    plan.check()
    seconds = time.process_time() - start
    return Timed(plan, summarize(plan), seconds)


def plan_save(tensors: Sequence[Tensor], world_size: int) -> tuple[SavePlan, float]:
    """Plan a commit."""
    held = [Held(tensor.key, tensor.spec, grid_for(tensor.spec), tensor.shards, disjoint=True) for tensor in tensors]
    gc.collect()
    start = time.process_time()
    plan = SavePlan(held, world_size)
    return plan, time.process_time() - start


@dataclass(slots=True)
class Straddle:
    """What a commit has to put together: of all bytes, and of all chunks."""

    num_bytes: int = 0
    num_extents: int = 0

    def add(self, template: Template) -> None:
        """Count one template, all its tensors."""
        leaf_items = template.grid.leaf_bytes // template.item_bytes
        for cell, found in enumerate(template.touches):
            if len(found) < 2:
                self.num_extents += len(template.members)
                continue
            box = template.grid.box(cell)
            leaves = leaf_map(box.sizes, leaf_items, tuple(touch.box.relative_to(box) for touch in found))
            changes = sum(before != after for before, after in zip(leaves.owners, leaves.owners[1:], strict=False))
            self.num_extents += len(template.members) * (1 + changes)
            straddled = sum(piece.box.num_elements for pieces in leaves.pieces.values() for piece in pieces)
            self.num_bytes += len(template.members) * straddled * template.item_bytes


def restore_and_commit(model: str, division: Division) -> list[str]:
    """One line of the first table."""
    tensors, world_size = state(model, division), division.num_ranks
    restored = plan_restore(tensors, world_size)
    straddle = Straddle()
    for template in restored.plan.templates:
        straddle.add(template)
    save, save_s = plan_save(tensors, world_size)
    written = written_bytes(save, world_size)
    summary = restored.summary
    return [
        model, str(division), str(world_size), str(summary.num_chunks), f"{summary.chunk_bytes / 1e9:.1f}",
        f"{restored.seconds:.3f}", f"{summary.metadata_bytes.most / 1e3:.0f}", f"{summary.read_amplification:.4f}",
        f"{summary.read_bytes.balance:.3f}", f"{summary.received_bytes.mean / max(summary.read_bytes.mean, 1):.2f}",
        f"{save_s:.3f}", f"{max(written) * world_size / sum(written):.3f}",
        f"{100 * straddle.num_bytes / summary.chunk_bytes:.2f}", f"{straddle.num_extents / summary.num_chunks:.2f}",
    ]  # fmt: skip


HEAD = ("model", "mesh", "ranks", "chunks", "GB", "restore s", "metadata KB", "amplification", "balance", "received",
        "commit s", "write balance", "straddled %", "extents")  # fmt: skip

DCP_HEAD = ("model", "ranks", "load: DCP, all ranks s", "one rank s", "ours, all ranks s", "all ranks", "one rank",
            "save: DCP coordinator s", "ours s", "ratio", ".metadata MB", "ours KB")  # fmt: skip


def beside_dcp(model: str, saving: int, loading: int) -> tuple[list[str], float]:
    """One line of the second table, and how many times faster all ranks' restores are planned."""
    saved, wanted = state(model, Division(f"dp={saving}")), state(model, Division(f"dp={loading}"))
    ours = plan_restore(wanted, loading)
    theirs = scale_dcp.plan_load(saved, wanted, range(loading))
    _, save_s = plan_save(saved, saving)
    their_save = scale_dcp.plan_save(saved, saving)
    ratio = theirs.all_ranks_s / ours.seconds
    return [
        model, f"{saving} -> {loading}", f"{theirs.all_ranks_s:.2f}", f"{theirs.most_per_rank_s:.3f}",
        f"{ours.seconds:.3f}", f"{ratio:.0f}x", f"{theirs.most_per_rank_s / ours.seconds:.1f}x",
        f"{their_save.all_ranks_s:.2f}", f"{save_s:.3f}", f"{their_save.all_ranks_s / save_s:.0f}x",
        f"{scale_dcp.metadata_bytes(saved) / 1e6:.1f}", f"{ours.summary.metadata_bytes.most / 1e3:.0f}",
    ], ratio  # fmt: skip


def one_large_rank() -> str:
    """DCP's load planning of a single rank at the size that the target names."""
    saved, wanted = state("llama3-405B", Division("dp=1024")), state("llama3-405B", Division("dp=768"))
    theirs, ours = scale_dcp.plan_load(saved, wanted, [400]), plan_restore(wanted, 768)
    return (
        f"llama3-405B from 1024 to 768 ranks: DCP plans the load of rank 400 alone in {theirs.all_ranks_s:.2f} s "
        f"({theirs.num_items} items; every rank does this for itself, at the same time); ours plans and proves all 768 "
        f"ranks in {ours.seconds:.3f} s (and every rank does that, too). DCP's `.metadata`, which every rank reads: "
        f"{scale_dcp.metadata_bytes(saved) / 1e6:.0f} MB."
    )


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A markdown table with aligned columns."""
    widths = [max(len(line[i]) for line in (head, *lines)) for i in range(len(head))]
    body = [head, ["-" * width for width in widths], *lines]
    return "\n".join("| " + " | ".join(f"{c:<{w}}" for c, w in zip(line, widths, strict=True)) + " |" for line in body)


def verdicts(lines: Sequence[Sequence[str]], largest_ratio: str) -> Iterator[tuple[str, str, str, str]]:
    """What was wanted and what was measured."""
    found = [dict(zip(HEAD, line, strict=True)) for line in lines]
    large = [each for each in found if each["model"] == "llama3-405B" and each["ranks"] == "768"]
    slowest = max(float(each["restore s"]) for each in large)
    yield "plan 405B, 1024 -> 768 ranks, all ranks, one core", "<= 5 s", f"{slowest:.3f} s", _met(slowest <= 5)
    metadata = max(float(each["metadata KB"]) for each in found)
    yield "metadata of a rank beyond its chunks' ids, any line", "<= 2 MB", f"{metadata:.0f} KB", _met(metadata <= 2000)
    replicas = [each for each in found if each["model"] == EIGHTH and "replicate" in each["mesh"]]
    most = max(float(each["amplification"]) for each in replicas)
    yield "read amplification, 64 ranks with replicas", "<= 1.01", f"{most:.4f}", _met(most <= 1.01)
    balance = max(float(each["balance"]) for each in replicas)
    yield "balance of reads, the same", "<= 1.05", f"{balance:.3f}", _met(balance <= 1.05)
    if largest_ratio:
        met = _met(float(largest_ratio.rstrip("x")) >= 100)
        yield "restore planning beside DCP's, all ranks, the largest size of both", ">= 100x", largest_ratio, met


def _met(met: bool) -> str:
    return "met" if met else "**not met**"


LEGEND = """\
States: fp32 weights and two AdamW moments under torchtitan's names; sharded by the rules of `cas-ckpt plan` (dp:
dimension 0 of everything; tp: q, k, v, gate, up and vocabularies by output, attention output and down by input;
replicate: replicas; ep: experts; pp: layers in stages, each on ranks of its own). A commit holds no trace of the
ranks that made it, so a restore from 1024 to 768 ranks is planned from the 768 alone.

`restore s`: planning the restore of all ranks and proving its cover (`check()`), processor time of one core (all
seconds here are). `metadata KB`: what the rank with the most needs to know besides the ids of its own chunks,
serialised (keys, own pieces, who reads them, who gets what it reads). `amplification`: bytes read over all ranks per
byte of chunks that anybody wants. `balance`: most bytes read over the mean. `received`: bytes that come from other
ranks per byte read, mean. `commit s`: planning a commit of the same state. `write balance`: most bytes written over
the mean, were everything new. `straddled %`: bytes in leaves that several shards share. `extents`: parts in which a
chunk is written, mean.
"""

DCP_LEGEND = """\
FSDP. Load: DCP's resharding (`create_read_items_for_chunk_list`, as `create_default_local_load_plan` calls it) of
every tensor on every rank, added up over the ranks, and of the slowest rank; ours plans all ranks at once, and every
rank does that for itself. So "all ranks" compares one core that plans for everybody, "one rank" what a rank waits
for. Save: what the coordinator does while all wait (`DefaultSavePlanner.create_global_plan`; local plans and
gathering not counted). The last two: metadata that every rank reads in DCP, and what a rank needs with us. DCP grows
with ranks times ranks.
"""


def report(show: Callable[[str], None], beside: Sequence[tuple[str, int, int]]) -> str:
    """The whole document; lines are shown as they come."""
    machine = describe(Path())
    lines, others, ratio, large = [], [], "", ""
    for model, divisions in CASES:
        for division in divisions:
            lines.append(restore_and_commit(model, division))
            show(" ".join(lines[-1]))
    for case in beside:
        line, _ = beside_dcp(*case)
        others.append(line)
        ratio = line[5]
        show(" ".join(line))
    if beside:
        large = one_large_rank()
        show(large)
    text = [
        "# Plans at scale",
        "",
        "Written by `python -m benchmarks.scale`, figures as they came; one process, no tensor.",
    ]
    text += [
        f"Machine: {machine['processor']}, {machine['memory']}, Python {machine['python']}, torch "
        f"{torch.__version__}; commit {machine['commit']}. Load when it ended (1, 5, 15 minutes; 1 is this process "
        f"alone): {_load()}.",
        "",
    ]
    text += ["## Targets", "", table(("what", "wanted", "measured", "verdict"), list(verdicts(lines, ratio))), ""]
    text += ["## Restores and commits", "", LEGEND, table(HEAD, lines), ""]
    if beside:
        text += ["## Beside DCP", "", DCP_LEGEND, table(DCP_HEAD, others), "", large, ""]
    return "\n".join(text)


def _load() -> str:
    return ", ".join(Path("/proc/loadavg").read_text().split()[:3])


def main(show: Callable[[str], None] = print) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description="Plan restores and commits of large models, from shapes alone.")
    parser.add_argument("--no-dcp", action="store_true", help="leave DCP's planners out, and write no document")
    parser.add_argument("--short", action="store_true", help=f"DCP's planners up to {SHORT_RANKS} ranks only")
    chosen = parser.parse_args()
    if chosen.no_dcp:
        report(show, ())
        return
    REPORT.write_text(report(show, [case for case in BESIDE_DCP if not chosen.short or case[1] <= SHORT_RANKS]))


if __name__ == "__main__":
    main()
