"""docs/benchmarks/ranks.md, from the results of `benchmarks.ranks`: targets, medians with their spread, the machine.

Duty: text from records. Must not know: how anything was measured beyond what it says in the head.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.ranks_state import state_bytes

Record = dict[str, Any]

_HEAD = """\
# Four ranks on one machine: commit and checkout against DCP

Written by `make bench-ranks` (`python -m benchmarks.ranks`), figures as they came. Four gloo processes, started as
torchrun starts them (one OpenMP thread each); every operation in fresh processes; cas_ckpt and DCP alternate within a
round, the order changes from round to round. Seconds: from the first rank's start to the last rank's end, after a
barrier. fsdp: DTensors, Shard(0) over a mesh of four. ddp: every rank has all. DCP is stock: `dcp.save` (which fsyncs
its files) and `dcp.load` into the live tensors. Both are imported before the timed call; our group between the ranks
is made inside it. Every load is compared with what was saved, tensor by tensor in a sample. Cold: files not in the page
cache. Peak: VmHWM of a rank during the operation, less what was resident before it (its tensors and torch); the worst
rank. A ratio is the median of the rounds' own ratios. Hashed: what BLAKE3 was fed on all ranks (leaves, chunk ids and
nodes), counted in a launch of its own by wrapping `blake3` in objects/digest.py. Written: growth of the files' lengths.
Both over the state's bytes, each element counted once.
"""

_LAYOUTS = {"fsdp": "FSDP", "ddp": "DDP"}
_OPERATIONS = {
    "save": "first save, fsynced", "unchanged": "second commit, nothing changed", "load-cold": "load, cold",
    "load-warm": "load, warm",
}  # fmt: skip


class _Found:
    """The records, asked by (layout, peer, operation)."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._by_key: dict[tuple[str, str, str], dict[int, Record]] = {}
        self.errors = [record for record in records if "error" in record]
        for record in records:
            if "operation" in record and "error" not in record:
                key = (record["layout"], record["peer"], record["operation"])
                self._by_key.setdefault(key, {})[record["round"]] = record

    def values(self, layout: str, peer: str, operation: str, figure: str = "seconds") -> dict[int, float]:
        rounds = self._by_key.get((layout, peer, operation), {})
        return {number: record[figure] for number, record in rounds.items() if figure in record}

    def ratio(self, layout: str, operation: str, ours: str) -> float | None:
        """DCP's seconds over ours, the median of the rounds'."""
        top, bottom = self.values(layout, "dcp", operation), self.values(layout, "cas_ckpt", ours)
        shared = [top[number] / bottom[number] for number in top if number in bottom]
        return statistics.median(shared) if shared else None


def page(records: Sequence[Record], *, note: str = "") -> str:
    """The whole page."""
    about, found = records[0], _Found(records[1:])
    num_bytes = state_bytes(about["layers"])
    parts = [_HEAD]
    parts.append(
        f"State: GPT-2 of width 768 and {about['layers']} layers, fp32 weights and two moments, "
        f"{num_bytes / 1e9:.2f} GB in all (under ddp on each rank). "
        f"Machine: {about['machine']['processor']}, {about['machine']['memory']}. "
        f"{about['date']}.\n"
    )
    loads = [record["load"] for record in records if "load" in record]
    parts.append(
        f"Load average (one minute) before the run {about['load']:.1f}, after each operation "
        f"{min(loads):.1f} to {max(loads):.1f}; four ranks on two cores are a part of that. {note}\n"
    )
    parts += ["## Targets\n", _targets(found, num_bytes), "\n## Figures\n", _figures(found)]
    parts += ["\n## Bytes\n", _bytes(found, num_bytes)]
    parts += ["\n## Failed\n", "\n".join(f"- {each}" for each in map(_failure, found.errors)) or "Nothing."]
    parts += ["\n## Machine\n", _table(("what", "which"), about["machine"].items())]
    return "\n".join(parts) + "\n"


def _targets(found: _Found, num_bytes: int) -> str:
    rows = []
    for layout, name in _LAYOUTS.items():
        for ours, text in _OPERATIONS.items():
            ratio = found.ratio(layout, "save" if ours == "unchanged" else ours, ours)
            least = 1.0 if (layout, ours[:4]) == ("fsdp", "load") else 1.5  # parts of a rank are what DCP is made for
            verdict = "" if ratio is None else "met" if ratio >= least else "**not met**"
            rows.append((f"{name}: {text}", f"{least}x DCP", _text(ratio, ".2f", "x"), verdict))
        for operation, text in _OPERATIONS.items():
            peaks = found.values(layout, "cas_ckpt", operation, "peak_bytes").values()
            most = max(peaks) / 1e6 if peaks else None
            verdict = _verdict(most, lambda x: x <= 300)
            rows.append((f"{name}: peak above the shard, {text}", "<= 300 MB", _text(most, ".0f", " MB"), verdict))
    for text, operation, figure in (("hashed", "count", "hashed_bytes"), ("written", "save", "file_bytes")):
        share = _share(found, "ddp", operation, figure, num_bytes)
        verdict = _verdict(share, lambda x: x <= 1.05)
        rows.append((f"DDP: {text} over all ranks / state", "about 1", _text(share, ".3f"), verdict))
    return _table(("operation", "wanted", "measured", "verdict"), rows)


def _share(found: _Found, layout: str, operation: str, figure: str, num_bytes: int) -> float | None:
    values = found.values(layout, "cas_ckpt", operation, figure).values()
    return statistics.median(values) / num_bytes if values else None


def _figures(found: _Found) -> str:
    rows = []
    for layout, name in _LAYOUTS.items():
        for operation, text in _OPERATIONS.items():
            for peer in ("cas_ckpt", "dcp"):
                seconds = list(found.values(layout, peer, operation).values())
                if seconds:
                    both = (found.values(layout, peer, operation, each).values() for each in ("cpu_s", "peak_bytes"))
                    cpu, peak = (statistics.median(values) for values in both)
                    spread = f"{statistics.median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f})"
                    rows.append((f"{name}: {text}", peer, spread, str(len(seconds)), f"{cpu:.2f}", f"{peak / 1e6:.0f}"))
    head = ("operation", "who", "seconds: median (least to most)", "rounds", "CPU s, all ranks", "peak MB, worst rank")
    return _table(head, rows)


def _bytes(found: _Found, num_bytes: int) -> str:
    rows = []
    for layout, name in _LAYOUTS.items():
        for text, peer, operation, figure in (
            ("hashed, first commit", "cas_ckpt", "count", "hashed_bytes"),
            ("written, first commit", "cas_ckpt", "save", "file_bytes"),
            ("written, second commit, nothing changed", "cas_ckpt", "unchanged", "file_bytes"),
            ("written, dcp.save", "dcp", "save", "file_bytes"),
        ):
            values = list(found.values(layout, peer, operation, figure).values())
            if values:
                median = statistics.median(values)
                rows.append((f"{name}: {text}", f"{median:,.0f}", f"{median / num_bytes:.5f}"))
    return _table(("what", "bytes, median", "of the state"), rows)


def _failure(record: Record) -> str:
    return f"{record['layout']} {record['peer']} {record['operation']}, round {record['round'] + 1}: {record['error']}"


def _text(value: float | None, form: str, unit: str = "") -> str:
    return "not measured" if value is None else f"{value:{form}}{unit}"


def _verdict(value: float | None, met: Callable[[float], bool]) -> str:
    return "" if value is None else "met" if met(value) else "**not met**"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])
