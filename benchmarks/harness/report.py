"""docs/benchmarks/commit-checkout.md: the targets, every median with its spread, the machine, what was not possible."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.harness.results import Key, Results, read_results
from benchmarks.harness.sizes import SIZES
from benchmarks.harness.targets import Judge

_NAME = "commit-checkout"

_HEAD = """\
# Commit and checkout, measured

Written by `make bench` (`python -m benchmarks.harness`), figures as they came. Each operation ran in a
process of its own, peers and cas_ckpt interleaved round by round. A save counts when its files and folders
are fsynced; a load when the bytes are in the live tensors (which are checked against what was saved).
Cold: the files were not in the page cache. Warm: they were read once before. Peak: VmHWM during the
operation minus the resident size before it; pages of memory-mapped files count. Written: bytes given to
write(); on disk: growth of the folder's blocks. A ratio is the median of the rounds' own ratios.
"""


def write_report(results: Path, folder: Path, *, gpt: str) -> list[Path]:
    """Write the table and the plot into `folder`; returns their paths."""
    from benchmarks.harness.plot import write_plot

    found = read_results(results)
    folder.mkdir(parents=True, exist_ok=True)
    text, picture = folder / f"{_NAME}.md", folder / f"{_NAME}.png"
    write_plot(found, gpt, picture)
    text.write_text("\n".join(_sections(found, gpt, picture.name)) + "\n")
    return [text, picture]


def _sections(found: Results, gpt: str, picture: str) -> Iterable[str]:
    yield _HEAD
    yield f"Size: {SIZES[gpt].text}. Machine: {found.machine.get('processor')}, {found.machine.get('memory')}.\n"
    if gpt == "tiny":
        yield "**Tiny sizes, to see that everything runs: no figure below answers a target.**\n"
    yield "## Targets\n"
    yield _targets(found, gpt)
    yield f"\n![Seconds of each save and load]({picture})\n"
    yield "## The machine's own limits, in the same rounds\n"
    yield _limits(found)
    for size in dict.fromkeys(key[0] for key in found.keys if key[0] != "raw"):
        yield f"\n## {size}: {SIZES[size].text}\n"
        yield _figures(found, [key for key in found.keys if key[0] == size])
    yield "\n## Not possible, failed, left out\n"
    yield "\n".join(f"- {line}" for line in found.trouble()) or "Nothing."
    yield "\n## Machine\n"
    yield _table(("what", "which"), found.machine.items())


def _targets(found: Results, gpt: str) -> str:
    rows = [
        (verdict.operation, verdict.wanted, verdict.measured, verdict.figures, verdict.word)
        for verdict in Judge(found, gpt).verdicts()
    ]
    return _table(("operation", "wanted", "measured", "medians, or least to most", "verdict"), rows)


def _limits(found: Results) -> str:
    key = ("raw", "limit", "limits")
    texts = {
        "blake3": "BLAKE3, 2 threads, 4 MiB pieces", "memcpy": "memcpy, 2 threads",
        "write_direct": "write O_DIRECT + fsync", "write_buffered": "write buffered + fsync", "read_cold": "read, cold",
    }  # fmt: skip
    rows = [(text, _spread(found, key, name, 1e-9, ".2f")) for name, text in texts.items()]
    return _table(("limit", "GB/s: median (least to most)"), rows)


def _figures(found: Results, keys: Sequence[Key]) -> str:
    head = ("operation", "peer", "seconds: median (least to most)", "rounds", "CPU s", "peak MB", "read MB",
            "written MB", "on disk MB")  # fmt: skip
    rows = [_row(found, key) for key in sorted(keys, key=lambda key: (key[2], _time(found, key)))]
    return _table(head, [row for row in rows if row])


def _time(found: Results, key: Key) -> float:
    return found.median(key, "seconds") or float("inf")


def _row(found: Results, key: Key) -> tuple[str, ...]:
    spread = found.spread(key, "seconds")
    if spread is None:
        return ()
    grown = "new_disk_bytes" if found.median(key, "new_disk_bytes") is not None else "disk_bytes"
    times = (_spread(found, key, "seconds", 1, ".4g"), str(spread.count), _one(found, key, "cpu_s", 1, ".2f"))
    sizes = (_one(found, key, name, 1e-6, ".4g") for name in ("peak_bytes", "rchar", "wchar", grown))
    return (key[2], key[1], *times, *sizes)


def _one(found: Results, key: Key, figure: str, scale: float, form: str) -> str:
    value = found.median(key, figure)
    return "" if value is None else format(value * scale, form)


def _spread(found: Results, key: Key, figure: str, scale: float, form: str) -> str:
    spread = found.spread(key, figure)
    if spread is None:
        return "not measured"
    median, least, most = (format(value * scale, form) for value in (spread.median, spread.least, spread.most))
    return f"{median} ({least} to {most})"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
