"""What one worker process does for one operation: build the state, prepare the files, measure.

Every function takes a `Task` and returns figures (seconds, bytes) as they came; several timings of one
process are kept as lists under `samples`, with their median as `seconds`.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import disk, history, limits, ours
from benchmarks.harness.meter import io_counters, measured, seconds_of
from benchmarks.harness.peers import PEERS
from benchmarks.harness.sizes import Size
from benchmarks.harness.state import State, build, step, wrong_tensors

_ALL = PEERS | {"cas_ckpt": ours.CasCkpt, "cas_ckpt-frozen": ours.CasCkptFrozen}
_ALL["cas_ckpt-one-pass"] = ours.CasCkptOnePass
_IN_PROCESS_ROUNDS = 5
_SECOND_SAVES = 3
_SLICES = 50
_SLICE_ROWS = 8

Figures = dict[str, Any]


class WrongBytesError(Exception):
    """A load did not bring back what was saved."""


@dataclass(frozen=True, slots=True)
class Task:
    """One operation of one peer on one size; files of the chain's earlier operations are in `folder`."""

    size: Size
    peer: str
    folder: Path

    def state(self, *, blank: bool = False) -> State:
        """The state to save, or the zeroed target of a load."""
        return build(self.size, blank=blank)

    def open(self) -> Any:
        """The peer on this folder."""
        return _ALL[self.peer](self.folder)


def save(task: Task) -> Figures:
    """The first save into an empty folder."""
    state, peer, out = task.state(), task.open(), Figures()
    with measured(out):
        peer.save(state, 1)
    return out | {"state_bytes": state.num_bytes} | _weigh(task.folder)


def _weigh(folder: Path) -> Figures:
    return {"disk_bytes": disk.used_bytes(folder), "file_bytes": disk.length_bytes(folder)}


def recommit(task: Task) -> Figures:
    """The same state again in a fresh process."""
    state, before = task.state(), disk.used_bytes(task.folder)
    peer, out = task.open(), Figures()
    with measured(out):
        peer.save(state, 2)
    return out | {"new_disk_bytes": disk.used_bytes(task.folder) - before}


def load_cold(task: Task) -> Figures:
    """Into a live state, files not in the page cache."""
    target = task.state(blank=True)
    left = disk.evict(task.folder)
    return _load(task, target) | {"resident_before": left}


def load_warm(task: Task) -> Figures:
    """Into a live state, files read once before; BLAKE3 over the same bytes right after it."""
    target = task.state(blank=True)
    disk.warm(task.folder)
    out = _load(task, target)
    return out | {"blake3_s": _hash_seconds(target)} if task.peer.startswith("cas_ckpt") else out


def _load(task: Task, target: State) -> Figures:
    peer, out = task.open(), Figures()
    with measured(out):
        peer.load(target)
    wrong = _wrong_entries(task, target) if task.size.kind == "entries" else wrong_tensors(target)
    if wrong:
        raise WrongBytesError(f"{task.peer} brought back other bytes for {', '.join(wrong[:3])}")
    return out | {"state_bytes": target.num_bytes}


def _wrong_entries(task: Task, target: State) -> list[str]:
    found, wanted = target.tensors(), task.state().tensors()
    return [name for name, tensor in wanted.items() if not torch.equal(tensor, found[name])]


def _hash_seconds(state: State) -> float:
    return limits.hash_seconds(state.views())


def unchanged(task: Task) -> Figures:
    """Commits of a state that did not change since the commit before, BLAKE3 over the same bytes in between."""
    state, peer = task.state(), task.open()
    first = seconds_of(lambda: peer.save(state, 1))
    runs = [_one_more(task, peer, state, number + 2) for number in range(_IN_PROCESS_ROUNDS)]
    return _merge(runs) | {"first_s": first, "state_bytes": state.num_bytes}


def _one_more(task: Task, peer: Any, state: State, number: int) -> Figures:
    before, out = disk.used_bytes(task.folder), Figures()
    with measured(out):
        peer.save(state, number)
    out["new_disk_bytes"] = disk.used_bytes(task.folder) - before
    return out | {"blake3_s": _hash_seconds(state)}


def _merge(runs: list[Figures]) -> Figures:
    """Medians of all figures of several timings, and the timings themselves."""
    merged: Figures = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    return merged | {"samples": [run["seconds"] for run in runs]}


def changed(task: Task) -> Figures:
    """Commits after one element changed in 1 % of the cells, each next to a commit of unchanged state."""
    state, peer = task.state(), task.open()
    peer.save(state, 1)
    runs = []
    for number in range(_SECOND_SAVES):
        still = _one_more(task, peer, state, 10 * number + 2)
        cells, touched = ours.touch_cells(state, 0.01, seed=number)
        run = _one_more(task, peer, state, 10 * number + 3)
        runs.append(run | {"unchanged_s": still["seconds"], "cells": cells, "changed_bytes": touched})
    return _merge(runs)


def second(task: Task) -> Figures:
    """Saves after a training step that changed only what is trained; the first save is not counted."""
    state, peer = task.state(), task.open()
    peer.save(state, 1)
    runs = []
    for number in range(_SECOND_SAVES):
        touched = step(state, number)
        runs.append(_one_more(task, peer, state, number + 2) | {"changed_bytes": touched})
    return _merge(runs) | {"state_bytes": state.num_bytes}


def count(task: Task) -> Figures:
    """Open what was saved and list its entries; files warm."""
    disk.warm(task.folder)
    state, out = State({}), Figures()
    task.open()  # a peer's own imports are not what is measured
    with measured(out):
        entries = task.open().count(state)
    return out | {"entries": entries}


def one_entry(task: Task) -> Figures:
    """A commit after one of the small entries changed, in a fresh process."""
    state, before = task.state(), disk.used_bytes(task.folder)
    lengths = disk.length_bytes(task.folder)
    peer, out = task.open(), Figures()
    ours.change_one_entry(state)
    with measured(out):
        peer.save(state, 2)
    out["new_file_bytes"] = disk.length_bytes(task.folder) - lengths
    return out | {"new_disk_bytes": disk.used_bytes(task.folder) - before}


def slices(task: Task) -> Figures:
    """64 KB slices (8 whole rows) of one tensor at random offsets, warm; bytes that read() brought in."""
    disk.warm(task.folder)
    reader = _slice_reader(task)
    offsets = [random.Random(3 + index).randrange(task.size.rows - _SLICE_ROWS) for index in range(_SLICES)]
    runs = [_one_slice(reader, offset) for offset in offsets]
    most = {f"most_{name}": max(run[name] for run in runs[1:]) for name in ("rchar", "seconds")}
    return _merge(runs[1:]) | most | {"first_s": runs[0]["seconds"], "first_rchar": runs[0]["rchar"]}


def _one_slice(reader: Callable[[int], object], offset: int) -> Figures:
    before = io_counters()["rchar"]
    seconds = seconds_of(lambda: reader(offset))
    return {"seconds": seconds, "rchar": io_counters()["rchar"] - before}


def _slice_reader(task: Task) -> Callable[[int], object]:
    if task.peer == "safetensors":
        return _safetensors_slices(task.folder)
    repo = task.open().repo
    return lambda row: repo.read("main", "model/weight", region=np.s_[row : row + _SLICE_ROWS, 0 : task.size.width])


def _safetensors_slices(folder: Path) -> Callable[[int], object]:
    from safetensors import safe_open

    handle = safe_open(next(disk.files(folder)), framework="pt")
    view = handle.get_slice("model.weight")
    return lambda row: view[row : row + _SLICE_ROWS].clone()


OPERATIONS: dict[str, Callable[[Task], Figures]] = {
    "save": save,
    "recommit": recommit,
    "load-cold": load_cold,
    "load-warm": load_warm,
    "unchanged": unchanged,
    "changed": changed,
    "second": second,
    "count": count,
    "one-entry": one_entry,
    "slices": slices,
    "write-history": lambda task: history.write(task.folder, task.size.num_entries),
    "log": lambda task: history.log(task.folder),
    "limits": lambda task: dict(limits.all_rates(task.folder)),
}
