"""Commits of `CasCallback` in Trainer's own files; `write_checkpoint` makes the folder that any Trainer resumes from.

    write_checkpoint(repo, "main", "out/checkpoint-500")
    trainer.train(resume_from_checkpoint="out/checkpoint-500")  # without a callback

Invariant: what a commit holds of a training is what these files hold of it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from typing import IO, Any

import torch
from transformers import TrainerState

from cas_ckpt import CommitInfo, ConflictError, InvalidInputError, NotFoundError, Repository, StorageError
from cas_ckpt.formats.folders import OutputFiles

MARK = "cas_ckpt.json"
"""A file in each of Trainer's folders whose weights were removed: which commit of which repository has them."""

NOT_OF_THE_STATE = ("is_local_process_zero", "is_world_process_zero", "best_model_checkpoint", "log_history")
"""Of a TrainerState: what differs between ranks, folders and clocks, so that equal trainings have equal roots."""


def write_checkpoint(
    repository: Repository, ref: str, folder: str | os.PathLike[str], *, adapter: str = "default"
) -> CommitInfo:
    """Write the commit as `checkpoint-N` of a Trainer, of one process or data parallel ranks; the commit.

    Weights are written in bounded memory, the state of the optimizer is in memory once. What is in the folder already
    and no commit holds stays: configs, the tokenizer. By one process; a later call goes on where one was killed.

    Args:
        folder: Made if it is not there.
        adapter: Of a PeftModel: the adapter to write. The folder has its adapter_config.json, as Trainer's own have.
    Raises:
        InvalidInputError: the commit is of no `CasCallback`.
        ConflictError: the folder has weights already.
        CkptError: see `Repository.export`.
    """
    (commit,) = repository.log(ref, limit=1)
    if not is_ours(commit):
        raise InvalidInputError(f"{commit.short_id} is not of a CasCallback: Repository.export writes its tensors")
    place = Path(folder)
    written = sorted(path.name for path in (*place.glob("*model*.safetensors"), *place.glob("pytorch_model*")))
    if written:
        raise ConflictError(f"{place} has {', '.join(written)} already: give another folder, or remove them")
    place.mkdir(parents=True, exist_ok=True)
    (place / MARK).unlink(missing_ok=True)  # what it says of these files holds no more
    stored = repository.load(commit, keys=["optimizer", "scheduler", "trainer", "rng"])
    with suppress(NotFoundError):  # most trainings have none
        stored.update(repository.load(commit, keys="scaler"))
    best = place.parent / f"checkpoint-{commit.meta['best']}"
    named = {"best_model_checkpoint": str(best) if best.is_dir() else None}
    text = json.dumps({**trainer_state(repository, commit, stored), **named})
    values = {f"{name}.pt": stored[name] for name in ("scheduler", "scaler") if name in stored}
    values |= {**rng_files(stored["rng"]), "optimizer.pt": _by_number(stored["optimizer"])}
    files: dict[str, Callable[[IO[bytes]], object]] = {name: partial(torch.save, each) for name, each in values.items()}
    write_files(place, {**files, "trainer_state.json": lambda file: file.write(text.encode())})
    if (place / "adapter_config.json").exists():
        repository.export(commit, place, keys="model", adapter=adapter)
    else:
        repository.export(commit, place / "model.safetensors", keys="model")
    return commit


def write_files(folder: Path, files: Mapping[str, Callable[[IO[bytes]], object]]) -> None:
    """Write files of a folder, each by what is given for it, in place of those that are there; all appear, or none.

    Raises:
        StorageError: one cannot be written.
    """
    with OutputFiles(folder, [*files], force=True) as output:
        for name, write in files.items():
            with output.open(name) as file:
                try:
                    write(file)
                except RuntimeError as error:  # torch's own for a disk that is full
                    raise StorageError(f"{folder / name} cannot be written: {error}") from error


def _by_number(stored: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an optimizer by the numbers of its parameters, as torch counts them through the groups."""
    numbers = count()
    groups, number_of = [], {}
    for group in stored["param_groups"]:
        number_of.update({name: next(numbers) for name in group["params"]})
        groups.append({**group, "params": [number_of[name] for name in group["params"]]})
    return {"state": {number_of[name]: state for name, state in stored["state"].items()}, "param_groups": groups}


def plain(state: TrainerState) -> dict[str, Any]:
    """The trainer's state as plain values, without its place and without its history: see `saves`."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(state)))
    return {name: value for name, value in plain.items() if name not in NOT_OF_THE_STATE}


def metrics_of(state: TrainerState) -> dict[str, float]:
    """Numbers that were logged at this step, but for those that the clock made."""
    found = {}
    for entry in (each for each in state.log_history if each.get("step") == state.global_step):
        for name, value in entry.items():
            if isinstance(value, (int, float)) and name != "step" and not name.endswith(("_runtime", "_per_second")):
                with suppress(OverflowError):  # an integer that is no float
                    found[name] = float(value)
    return found


def best_step(state: TrainerState) -> int | None:
    """The step of the checkpoint that Trainer takes for the best one, which need not be that of the best evaluation."""
    found = re.search(r"checkpoint-([0-9]+)$", Path(state.best_model_checkpoint or "").name)
    return int(found[1]) if found else None


def read_mark(folder: Path) -> dict[str, str]:
    """What the mark in one of Trainer's folders says; empty if there is none that can be read."""
    try:
        found = json.loads((folder / MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {name: said for name, said in found.items() if isinstance(said, str)} if isinstance(found, dict) else {}


def is_ours(commit: CommitInfo) -> bool:
    """Whether a `CasCallback` made it."""
    return isinstance(commit.meta, dict) and {"save", "log", "best", "mark"} <= commit.meta.keys()


def saves(repository: Repository, last: CommitInfo) -> list[CommitInfo]:
    """The commits of one training up to `last`, the youngest first; each has as `meta` what was logged since another.

    It is outside of the root, as it tells times, and counts that some trainers begin anew when they resume; and in
    parts, as the whole of 10,000 entries would take each commit a second.
    """
    line = [each for each in repository.log(last, first_parent=True) if is_ours(each)]
    begun = next((number for number, each in enumerate(line) if each.meta["save"] == 0), len(line))
    return line[: begun + 1]


def trainer_state(repository: Repository, commit: CommitInfo, stored: Mapping[str, Any]) -> dict[str, Any]:
    """What trainer_state.json holds, of the state that `commit` stores, but for the folder of the best model."""
    history = [entry for each in reversed(saves(repository, commit)) for entry in each.meta["log"]]
    return {**stored["trainer"], "log_history": history}


def rng_files(stored: Mapping[Any, Any]) -> dict[str, dict[str, Any]]:
    """Trainer's files of random states, with what each holds, of a stored `RNGState`: one, or one of each rank."""
    if "torch" in stored:
        return {"rng_state.pth": _rng_of_trainer(stored, all_devices=False)}
    return {f"rng_state_{rank}.pth": _rng_of_trainer(each, all_devices=True) for rank, each in stored.items()}


def _rng_of_trainer(stored: Mapping[str, Any], *, all_devices: bool) -> dict[str, Any]:
    """A stored `RNGState` in the form of Trainer's rng_state.pth."""
    cuda = [state for _, state in sorted(stored["cuda"].items())]
    form = {"python": stored["python"], "numpy": stored["numpy"], "cpu": stored["torch"]}
    return {**form, "cuda": cuda if all_devices else cuda[0]} if cuda else form
