"""The plot of the report: seconds of every peer's save and loads on the GPT, with the machine's limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.harness.results import Results
from benchmarks.harness.sizes import SIZES

_PANELS = {"save": "first commit / save, fsynced", "load-cold": "load in place, cold", "load-warm": "load, warm"}
_OURS, _THEIRS = "#c0392b", "#7f8c8d"


def write_plot(found: Results, gpt: str, path: Path) -> None:
    """Three panels of bars, one per peer, with the range of the rounds as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(_PANELS), figsize=(15, 4.2))
    for axis, operation in zip(axes, _PANELS, strict=True):
        _panel(axis, found, gpt, operation)
    figure.suptitle(f"{SIZES[gpt].text}: seconds (median, least to most)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(axis: Any, found: Results, gpt: str, operation: str) -> None:
    keys = [key for key in found.keys if key[0] == gpt and key[2] == operation]
    spreads = {key[1]: spread for key in keys if (spread := found.spread(key, "seconds"))}
    names = sorted(spreads, key=lambda name: -spreads[name].median)
    medians = [spreads[name].median for name in names]
    reach = [
        [spreads[name].median - spreads[name].least for name in names],
        [spreads[name].most - spreads[name].median for name in names],
    ]
    colors = [_OURS if name.startswith("cas_ckpt") else _THEIRS for name in names]
    axis.barh(names, medians, xerr=reach if names else None, color=colors, ecolor="black", capsize=2)
    axis.set_title(_PANELS[operation])
    axis.set_xlabel("seconds")
    _limit_line(axis, found, gpt, operation)


def _limit_line(axis: Any, found: Results, gpt: str, operation: str) -> None:
    """How long the disk alone (save, cold) or BLAKE3 alone (warm) takes for as many bytes."""
    name = {"save": "write_direct", "load-cold": "read_cold", "load-warm": "blake3"}[operation]
    rate = found.median(("raw", "limit", "limits"), name)
    if rate:
        axis.axvline(
            SIZES[gpt].state_bytes / rate, color="black", linestyle=":", label=f"{name.replace('_', ' ')} alone"
        )
        axis.legend(loc="lower right", fontsize=8)
