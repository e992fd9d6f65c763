"""Trainer and Fabric of Lightning: what is killed goes on as if it had not been; what is removed is freed."""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.tuner import Tuner

from cas_ckpt import (
    CkptError,
    CommitInfo,
    CommitOptions,
    InvalidInputError,
    NoRepositoryError,
    NotFoundError,
    PermissionDeniedError,
    Repository,
    UnsupportedValueError,
)
from cas_ckpt.integrations.lightning import CasCheckpointIO, CasModelCheckpoint
from cas_ckpt.integrations.lightning_shards import CasShards
from tests.frameworks.lightning_cases import (
    Net,
    batches,
    fabric_loop,
    save_until_killed,
    train,
    train_until_killed,
    trainer_of,
)
from tests.frameworks.programs import roots_of
from tests.processes import ROOT, Forked
from tests.ranks import Outcome, results, run_processes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # those of the frameworks
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[CommitInfo]:
    return train(tmp_path_factory.mktemp("uninterrupted"))


def kill(folder: Path, step: int, path: str | None = None, **given: Any) -> int | None:
    """Train in a process until it is killed; the step of the newest commit."""
    with Forked(train_until_killed, folder, step, path, given) as process:
        process.wait(60)
    assert process.returncode == -signal.SIGKILL
    with Repository.open(folder / "ckpts") as repository:
        newest = repository.latest()
        return newest.step if newest else None


def roots(commits: list[CommitInfo]) -> list[str]:
    return [each.root for each in commits]


def kept(folder: Path) -> list[int | None]:
    """Steps of the commits in ckpts that are not forgotten, the newest first; each other one has lost its data."""
    with Repository.open(folder / "ckpts") as repository:
        commits = repository.log()
        for each in [each for each in commits if each.forgotten]:
            with pytest.raises(NotFoundError):
                repository.load(each)
        return [each.step for each in commits if not each.forgotten]


def files(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


# ------------------------------------------------------------ resuming


@pytest.mark.parametrize("step", [3, 7, 11])  # after 2, 6 and 10 steps were saved; the tenth is the end of an epoch
def test_a_training_that_is_killed_between_saves_goes_on_exactly(
    tmp_path: Path, uninterrupted: list[CommitInfo], step: int
) -> None:
    assert kill(tmp_path, step) == step - 1
    commits = train(tmp_path, seed=9)  # of this model nothing remains
    assert roots(commits) == roots(uninterrupted)
    assert [each.step for each in commits] == [14, 12, 10, 8, 6, 4, 2]
    assert all(each.metrics["loss"] > 0 for each in commits)


@pytest.mark.parametrize(
    ("step", "path"),
    # before the pack, the commit and the ref are there
    [(6, ".data"), (6, ".meta"), (10, "refs/heads")],
)
def test_a_training_that_is_killed_inside_a_save_goes_on_exactly(
    tmp_path: Path, uninterrupted: list[CommitInfo], step: int, path: str
) -> None:
    assert kill(tmp_path, step, path) == step - 2
    assert roots(train(tmp_path, seed=9)) == roots(uninterrupted)


@pytest.mark.parametrize("path", ["refs/tags", "step=6.ckpt", "step=10.ckpt"])
def test_a_training_that_is_killed_before_a_file_names_its_commit_goes_on_with_the_commit(
    tmp_path: Path, uninterrupted: list[CommitInfo], path: str
) -> None:
    step = 10 if "10" in path else 6
    assert kill(tmp_path, step, path) == step
    names = files(tmp_path / "ckpts-files")
    assert not any(name.endswith(f"step={step}.ckpt") for name in names)
    assert roots(train(tmp_path, seed=9)) == roots(uninterrupted)
    assert [name for name in files(tmp_path / "ckpts-files") if name.endswith(f"step={step}.ckpt")]


@pytest.mark.parametrize("limit", [{"max_steps": 17}, {"max_steps": -1, "max_epochs": 4}])
@pytest.mark.parametrize("validate", [False, True])
@pytest.mark.parametrize("every", [None, 5])  # at the end of each epoch, by its number and by that of steps
def test_a_plain_shuffled_loader_goes_on_exactly_after_an_epoch(
    tmp_path: Path, limit: dict[str, int], validate: bool, every: int | None
) -> None:
    given = {"every_n_train_steps": every, "data": "plain", "trainer": limit, "validate": validate}
    whole = train(tmp_path / "whole", **given)
    assert kill(tmp_path, 12, **given) == 10
    assert roots(train(tmp_path, seed=9, **given)) == roots(whole)


def test_a_loader_that_knows_where_it_is_goes_on_exactly_inside_of_an_epoch(tmp_path: Path) -> None:
    given = {"data": "shuffled", "trainer": {"accumulate_grad_batches": 2, "max_steps": 7}, "every_n_train_steps": 1}
    whole = train(tmp_path / "whole", **given)
    assert kill(tmp_path, 5, "refs/heads", **given) == 4
    assert roots(train(tmp_path, seed=9, **given))[:2] == roots(whole)[:2]


def test_a_finished_training_is_not_continued(tmp_path: Path, uninterrupted: list[CommitInfo]) -> None:
    train(tmp_path)
    assert roots(train(tmp_path, seed=9)) == roots(uninterrupted)


def test_a_trainer_is_left_with_its_limit_of_steps(tmp_path: Path) -> None:
    train(tmp_path, every_n_train_steps=5, trainer={"max_steps": 5})
    seen: list[int] = []

    class Limit(Callback):
        def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
            seen.append(trainer.max_steps)

    train(tmp_path, Limit(), every_n_train_steps=5, trainer={"max_steps": 10})
    cb = CasModelCheckpoint(tmp_path / "ckpts")
    trainer = trainer_of(tmp_path, cb, max_steps=20, limit_train_batches=0)
    trainer.fit(Net(), batches("plain"), ckpt_path="last")
    assert seen == [10] and trainer.max_steps == 20

    class NoData:
        def __iter__(self) -> Iterator[Any]:
            raise KeyError("x")

    trainer = trainer_of(tmp_path, cb, max_steps=20)
    with pytest.raises(KeyError):
        trainer.fit(Net(), NoData(), ckpt_path="last")
    assert trainer.max_steps == 20


def test_a_search_for_a_learning_rate_and_a_validation_leave_a_training_as_it_was(
    tmp_path: Path, uninterrupted: list[CommitInfo]
) -> None:
    given: dict[str, Any] = {"every_n_train_steps": 2, "save_top_k": -1}

    class WithRate(Net):
        lr = 0.1

    searching = trainer_of(tmp_path, CasModelCheckpoint(tmp_path / "other", **given))
    Tuner(searching).lr_find(WithRate(), batches("plain"), num_training=6)  # by hidden files, which it removes
    assert not (tmp_path / "other").exists()

    train(tmp_path, trainer={"max_steps": 4})
    trainer = trainer_of(tmp_path, CasModelCheckpoint(tmp_path / "ckpts", **given))
    trainer.validate(Net(), batches("plain"), ckpt_path="last")
    seed_everything(6, verbose=False)
    trainer.fit(model := Net(), batches("stateful"))  # begins anew
    seed_everything(6, verbose=False)
    alone = trainer_of(tmp_path, CasModelCheckpoint(tmp_path / "alone", **given))
    alone.fit(other := Net(), batches("stateful"))
    assert torch.equal(model.head.weight, other.head.weight)


def test_a_training_goes_on_in_another_place(tmp_path: Path, uninterrupted: list[CommitInfo]) -> None:
    assert kill(tmp_path / "here", 7) == 6
    (tmp_path / "here").rename(tmp_path / "there")
    assert roots(train(tmp_path / "there", seed=9)) == roots(uninterrupted)
    assert files(tmp_path) == ["there"]


@pytest.mark.parametrize("section", ["Lightning", "Fabric"])
def test_the_program_of_the_docs_goes_on_after_a_kill(tmp_path: Path, section: str) -> None:
    whole = roots_of(section, tmp_path / "whole")
    assert len(whole) == 4 and roots_of(section, tmp_path / "killed", kill_at=3) == whole


class Steps(Callback):
    """The steps at which something is saved."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def on_save_checkpoint(self, trainer: Trainer, *_: Any) -> None:
        self.found.append(trainer.global_step)


@pytest.mark.parametrize(
    ("given", "trainer"),
    [
        ({"every_n_train_steps": 5}, {}), ({"every_n_train_steps": 2}, {"val_check_interval": 0.4}), ({}, {}),
        ({"every_n_epochs": 2}, {}), ({"every_n_train_steps": 5, "monitor": "quality"}, {"val_check_interval": 0.4}),
        ({"every_n_train_steps": 5, "monitor": "quality"}, {"check_val_every_n_epoch": 2}),
        ({"every_n_train_steps": 5, "monitor": "loss"}, {}), ({"train_time_interval": timedelta(0)}, {}),
        ({"every_n_train_steps": 5, "monitor": "quality", "save_on_train_epoch_end": False}, {}),
    ],
)  # fmt: skip
def test_it_saves_when_lightnings_own_callback_does(
    tmp_path: Path, given: dict[str, Any], trainer: dict[str, Any]
) -> None:
    saved = []
    own = ModelCheckpoint(tmp_path / "files", save_top_k=-1, enable_version_counter=False, **given)
    ours = CasModelCheckpoint(tmp_path / "ckpts", save_top_k=-1, enable_version_counter=False, **given)
    for cb in (own, ours):
        steps = Steps()
        limits = {"max_epochs": 4, "max_steps": -1, "num_sanity_val_steps": 0, **trainer}
        trainer_of(tmp_path, steps, cb, **limits).fit(Net(), batches("plain"), batches("plain"))
        saved.append(steps.found)
    assert saved[0] == saved[1] != []


def test_two_callbacks_keep_the_limit_of_steps(tmp_path: Path) -> None:
    second = {"monitor": "loss", "every_n_train_steps": 5, "filename": "best-{step}"}
    train(tmp_path, CasModelCheckpoint(tmp_path / "ckpts", **second), every_n_train_steps=5, trainer={"max_steps": 5})
    limits: list[int] = []

    class Limit(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            limits.append(trainer.max_steps)
            trainer.should_stop = trainer.global_step > 12

    both = [Limit(), CasModelCheckpoint(tmp_path / "ckpts", **second)]
    train(tmp_path, *both, every_n_train_steps=5, trainer={"max_steps": 10})
    assert limits == [10] * 5


def test_of_two_callbacks_with_folders_of_their_own_each_goes_on_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fit(steps: int, *names: str) -> CommitInfo | None:
        given: dict[str, Any] = {"save_top_k": -1}
        every = {"a": 1, "b": 2}
        cbs = [
            CasModelCheckpoint(tmp_path / "ckpts", dirpath=tmp_path / name, every_n_train_steps=every[name], **given)
            for name in names
        ]
        trainer_of(tmp_path, *cbs, max_steps=steps).fit(Net(), batches("stateful"), ckpt_path="last")
        return cbs[0].io.loaded

    fit(2, "a", "b")
    assert fit(4, "a", "b") is not None
    assert not caplog.records
    assert fit(4, "a") is not None and fit(4, "b") is not None


def test_a_folder_of_files_that_goes_on_with_another_branch_names_that_one(tmp_path: Path) -> None:
    def fit(branch: str | None, steps: int, path: str) -> CommitInfo | None:
        io = CasCheckpointIO(tmp_path / "ckpts", branch=branch)
        cb = CasModelCheckpoint(io, dirpath=tmp_path / "files", every_n_train_steps=2, save_top_k=-1)
        trainer_of(tmp_path, cb, max_steps=steps).fit(Net(), batches("stateful"), ckpt_path=path)
        return cb.io.loaded

    fit(None, 4, "last")
    fit("retry", 6, "cas:main@step:2")
    loaded = fit("retry", 8, "last")
    assert loaded is not None and loaded.step == 6


def test_a_commit_that_another_training_put_on_the_branch_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, trainer={"max_steps": 4})
    other = CasModelCheckpoint(tmp_path / "ckpts", dirpath=tmp_path / "other", every_n_train_steps=2)
    trainer_of(tmp_path, other, max_steps=8).fit(Net(), batches("stateful"))
    train(tmp_path, trainer={"max_steps": 8})
    assert "last.ckpt is the newest commit of main, which was saved as" in caplog.text


def test_what_was_saved_last_is_newer_than_what_an_exception_left(tmp_path: Path) -> None:
    def fit(*callbacks: Any) -> CommitInfo | None:
        cb = CasModelCheckpoint(tmp_path / "ckpts", every_n_train_steps=2, save_top_k=-1)
        left = OnExceptionCheckpoint(tmp_path / "exception")
        left.teardown = lambda *_, **__: None  # type: ignore[method-assign]  # as if the process was killed before it
        trainer = trainer_of(tmp_path, left, *callbacks, cb, max_steps=12)
        trainer.fit(Net(), batches("stateful"), ckpt_path="last")
        return cb.io.loaded

    class Raises(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 5:
                raise KeyError("x")

    with pytest.raises(KeyError):
        fit(Raises())
    assert [found.step for found in (fit(), fit()) if found is not None] == [5, 12]


# ------------------------------------------------------------ what is stored


class Keeps(Callback):
    """What a save was given, and what a load gave."""

    def __init__(self) -> None:
        self.saved: list[dict[str, Any]] = []
        self.loaded: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        named = OrderedDict([("z", 1), ("a", torch.ones(2))])
        return {"z": {"b": 1, "a": (1, [2.5, {"y": 0, "x": None}])}, "a": float("nan"), 3: named, "path": Path("x")}

    def on_save_checkpoint(self, trainer: Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        self.saved.append(dict(checkpoint))

    def on_load_checkpoint(self, trainer: Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        self.loaded.append(checkpoint)


def differences(ours: Any, theirs: Any, key: str = "") -> Iterator[str]:
    """Where two values differ, in their types and in the order of dicts as well."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        by_key = key.startswith(("/loops", "/optimizer_states", "/lr_schedulers", "/state_dict", "/cas_ckpt.rng"))
        if (set(ours) != set(theirs)) if by_key else (list(ours) != list(theirs)):
            yield f"{key}: {list(ours)} for {list(theirs)}"
        for name in theirs:
            yield from differences(ours.get(name), theirs[name], f"{key}/{name}")
        if hasattr(theirs, "_metadata"):  # of the modules that have tensors
            versions = {name: theirs._metadata[name]["version"] for name in ours._metadata}
            yield from differences({name: each["version"] for name, each in ours._metadata.items()}, versions, key)
    elif type(ours) is not type(theirs):
        yield f"{key}: {type(ours)} for {type(theirs)}"
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for at, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(one, other, f"{key}/{at}")
    elif isinstance(theirs, torch.Tensor):
        if ours.dtype != theirs.dtype or not torch.equal(ours, theirs):
            yield key
    elif repr(ours) != repr(theirs):
        yield f"{key}: {ours!r} for {theirs!r}"


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    keeps = Keeps()
    given: dict[str, Any] = {"plugins": [CasCheckpointIO(tmp_path / "ckpts")], "max_steps": 4}
    cb = ModelCheckpoint(tmp_path / "files", monitor="loss", save_top_k=2, every_n_train_steps=2, save_last=True)
    trainer_of(tmp_path, cb, keeps, **given).fit(Net(sizes={"out": 1, "in": 2}), batches("plain"))
    trainer_of(tmp_path, cb, keeps, **given).fit(Net(), batches("plain"), ckpt_path=tmp_path / "files" / "last.ckpt")
    saved, loaded = keeps.saved[-1], keeps.loaded[0]
    # Lightning changes both: the one after it was saved, the other when it was loaded.
    assert [each for each in differences(loaded, saved) if "optimizer_states" not in each] == []
    assert list(loaded["hyper_parameters"]["sizes"]) == ["out", "in"]
    assert loaded["pytorch-lightning_version"] == saved["pytorch-lightning_version"]


def test_a_value_that_cannot_be_stored_is_named_and_pickled_if_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    io = CasCheckpointIO(tmp_path / "ckpts")
    checkpoint = {"state_dict": {}, "hyper_parameters": {"activation": torch.nn.functional.relu}}
    io.save_checkpoint(checkpoint, tmp_path / "a.ckpt")
    assert isinstance(io.last_error, UnsupportedValueError) and not (tmp_path / "a.ckpt").exists()
    assert "hyper_parameters/activation" in caplog.text
    with pytest.raises(UnsupportedValueError, match="hyper_parameters/activation"):
        CasCheckpointIO(tmp_path / "ckpts", on_save_error="raise").save_checkpoint(checkpoint, tmp_path / "a.ckpt")

    trusting = CasCheckpointIO(tmp_path / "ckpts", options=CommitOptions(allow_pickle=True))
    trusting.save_checkpoint(checkpoint, tmp_path / "a.ckpt")
    loaded = trusting.load_checkpoint(tmp_path / "a.ckpt", weights_only=False)
    assert loaded["hyper_parameters"]["activation"] is torch.nn.functional.relu
    for reader, weights_only in ((trusting, True), (io, None), (io, False)):
        with pytest.raises(UnsupportedValueError, match="pickle"):
            reader.load_checkpoint(tmp_path / "a.ckpt", weights_only=weights_only)


def test_a_live_object_in_a_checkpoint_is_refused_as_no_more_than_its_state_would_be_kept(tmp_path: Path) -> None:
    io = CasCheckpointIO(tmp_path / "ckpts", on_save_error="raise", options=CommitOptions(allow_pickle=True))
    with pytest.raises(UnsupportedValueError, match="hyper_parameters/layers/0 is a ReLU"):
        io.save_checkpoint({"hyper_parameters": {"layers": [torch.nn.ReLU()]}}, tmp_path / "a.ckpt")


def test_lightnings_own_files_are_read_and_removed(tmp_path: Path) -> None:
    cb = ModelCheckpoint(tmp_path / "files", save_last=True, every_n_train_steps=2)
    trainer_of(tmp_path, cb, max_steps=4).fit(Net(), batches("plain"))
    commits = train(tmp_path, path=str(tmp_path / "files" / "last.ckpt"), trainer={"max_steps": 8})
    assert [each.step for each in commits] == [8, 6]
    io = CasCheckpointIO(tmp_path / "ckpts")
    io.remove_checkpoint(tmp_path / "files" / "last.ckpt")
    io.remove_checkpoint(tmp_path / "files" / "nothing.ckpt")
    assert files(tmp_path / "files") == ["epoch=0-step=4.ckpt"]
    torch.save({"x": os.getcwd}, tmp_path / "pickled.ckpt")
    for weights_only in (None, True):
        with pytest.raises(pickle.UnpicklingError):
            io.load_checkpoint(tmp_path / "pickled.ckpt", weights_only=weights_only)
    assert io.load_checkpoint(tmp_path / "pickled.ckpt", weights_only=False) == {"x": os.getcwd}


@pytest.mark.parametrize("said", ['{"cas_ckpt": 1, "repo', '{"cas_ckpt": 1}', '{"cas_ckpt": 1, "commit": [2]}'])
def test_a_damaged_file_that_names_a_commit_is_told(tmp_path: Path, said: str) -> None:
    (tmp_path / "a.ckpt").write_text(said)
    with pytest.raises(InvalidInputError, match="is to name a commit, and is damaged"):
        CasCheckpointIO(tmp_path / "ckpts").load_checkpoint(tmp_path / "a.ckpt")


def test_a_revision_is_a_path_and_another_branch_another_training(
    tmp_path: Path, uninterrupted: list[CommitInfo]
) -> None:
    train(tmp_path)
    io = CasCheckpointIO(tmp_path / "ckpts", branch="retry")
    cb = CasModelCheckpoint(io, every_n_train_steps=2, save_top_k=-1)
    trainer_of(tmp_path, cb, max_steps=8).fit(Net(9), batches("stateful"), ckpt_path="cas:main@step:4")
    with Repository.open(tmp_path / "ckpts") as repository:
        assert [each.step for each in repository.log("retry")] == [8, 6, 4, 2]
        assert roots(repository.log("retry"))[2:] == roots(repository.log("main"))[-2:] == roots(uninterrupted)[-2:]
        assert repository.latest("main").step == 14  # type: ignore[union-attr]
    assert (tmp_path / "ckpts-files" / "retry" / "last.ckpt").exists()


# ------------------------------------------------------------ what is removed


def test_save_top_k_frees_what_it_removes(tmp_path: Path) -> None:
    given: dict[str, Any] = {"every_n_train_steps": None, "data": "plain", "validate": True, "save_top_k": 2}
    train(tmp_path, monitor="quality", mode="max", trainer={"max_steps": -1, "max_epochs": 6}, **given)
    # Qualities are 1, 0, 1, 0, 1, 0 of equal ones the first stays
    assert kept(tmp_path) == [15, 5]
    assert files(tmp_path / "ckpts-files") == ["epoch=0-step=5.ckpt", "epoch=2-step=15.ckpt", "last.ckpt"]
    cb = CasModelCheckpoint(tmp_path / "ckpts", monitor="quality", mode="max", save_top_k=2)
    trainer = trainer_of(tmp_path, cb)
    trainer.fit(Net(), batches("plain"), batches("plain"), ckpt_path="last")
    assert Path(cb.best_model_path).name == "epoch=0-step=5.ckpt"
    trainer.test(Net(), batches("plain"), ckpt_path="best")
    assert cb.io.loaded is not None and cb.io.loaded.step == 5


def test_ties_are_decided_after_a_kill_as_without(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "every_n_train_steps": None, "data": "plain", "validate": True, "save_top_k": 2, "monitor": "quality",
        "trainer": {"max_steps": -1, "max_epochs": 6}, "filename": "{quality:.0f}-{step:02d}", "mode": "min",
    }  # fmt: skip
    whole = train(tmp_path / "whole", **given)
    assert kill(tmp_path, 22, **given) == 20
    assert roots(train(tmp_path, seed=9, **given)) == roots(whole)
    assert files(tmp_path / "ckpts-files") == files(tmp_path / "whole" / "ckpts-files")


def test_one_commit_stays_if_one_is_wanted_even_after_a_kill(tmp_path: Path) -> None:
    assert kill(tmp_path, 6, "step=6.ckpt", save_top_k=1) == 6
    train(tmp_path, save_top_k=1)
    assert kept(tmp_path) == [14, 4]  # 4 is what Lightning would have removed when it was killed
    assert files(tmp_path / "ckpts-files") == ["epoch=0-step=4.ckpt", "epoch=2-step=14.ckpt", "last.ckpt"]
    CasCheckpointIO(tmp_path / "ckpts").remove_checkpoint(tmp_path / "ckpts-files" / "epoch=0-step=4.ckpt")
    assert kept(tmp_path) == [14]


def test_what_a_user_has_tagged_stays_when_lightning_removes_it(tmp_path: Path) -> None:
    class Tags(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 5:
                with Repository.open(tmp_path / "ckpts") as repository:
                    repository.tag("mine")

    train(tmp_path, Tags(), save_top_k=1)
    assert kept(tmp_path) == [14, 4]
    with Repository.open(tmp_path / "ckpts") as repository:
        tags = repository.tags()
    assert [re.sub("-[0-9a-f]{12}$", "", each) for each in tags] == ["main/epoch-2-step-14", "mine"]


def test_what_another_branch_leads_to_stays_when_lightning_removes_it(tmp_path: Path) -> None:
    io = CasCheckpointIO(tmp_path / "ckpts")
    for step in (1, 2, 3):
        io.save_checkpoint({"step": step}, tmp_path / f"{step}.ckpt")
        if step == 2:
            with Repository.open(tmp_path / "ckpts") as repository:
                repository.branch("keep", start="main~1")
                repository.checkout("keep", into=repository.load("keep"))
                repository.commit({"x": 1})
    for step in (1, 2):
        io.remove_checkpoint(tmp_path / f"{step}.ckpt")
    with Repository.open(tmp_path / "ckpts") as repository:
        assert [(each.step, each.forgotten) for each in repository.log("keep")] == [(None, False), (1, False)]
        assert [(each.step, each.forgotten) for each in repository.log()] == [(3, False), (2, True), (1, False)]


@pytest.mark.parametrize("name", ["a..b", "x" * 200])
def test_a_file_may_have_a_name_that_a_tag_cannot_have(tmp_path: Path, name: str) -> None:
    io = CasCheckpointIO(tmp_path / "ckpts", on_save_error="raise")
    io.save_checkpoint({"step": 1}, tmp_path / f"{name}.ckpt")
    assert io.load_checkpoint(tmp_path / f"{name}.ckpt") == {"step": 1}


@pytest.mark.parametrize(("last", "asynchronous"), [(True, False), (True, True), ("link", False)])
def test_lightnings_own_callback_works_with_files_that_name_commits(
    tmp_path: Path, last: Any, asynchronous: bool
) -> None:
    def fit(steps: int) -> ModelCheckpoint:
        io = CasCheckpointIO(tmp_path / "ckpts", asynchronous=asynchronous)
        cb = ModelCheckpoint(tmp_path / "files", save_last=last, every_n_train_steps=2)
        trainer = trainer_of(tmp_path, cb, plugins=[io], max_steps=steps)
        trainer.fit(Net(), batches("stateful"), ckpt_path="last")
        assert io.last_error is None
        assert trainer.global_step == steps
        return cb

    for steps in (4, 8):
        cb = fit(steps)
        assert files(tmp_path / "files") == [f"epoch={(steps - 1) // 5}-step={steps}.ckpt", "last.ckpt"]
        assert (tmp_path / "files" / "last.ckpt").is_symlink() == (last == "link")
        assert kept(tmp_path) == ([steps] if last == "link" else [steps, steps])
        trainer_of(tmp_path, cb, plugins=[CasCheckpointIO(tmp_path / "ckpts")]).test(
            Net(), batches("plain"), ckpt_path=cb.best_model_path
        )


def test_links_to_files_that_are_not_there_yet_are_refused(tmp_path: Path) -> None:
    io = CasCheckpointIO(tmp_path / "ckpts", asynchronous=True)
    cb = ModelCheckpoint(tmp_path / "files", save_last="link", every_n_train_steps=2)
    with pytest.raises(InvalidInputError, match="say save_last=True"):
        trainer_of(tmp_path, cb, plugins=[io]).fit(Net(), batches("stateful"))


def test_a_checkpoint_on_an_exception_is_gone_when_a_later_training_has_ended(tmp_path: Path) -> None:
    class Raises(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 3:
                raise KeyError("x")

    def parts() -> list[Any]:
        return [CasCheckpointIO(tmp_path / "ckpts"), OnExceptionCheckpoint(tmp_path / "files")]

    io, cb = parts()
    with pytest.raises(KeyError):
        trainer_of(tmp_path, cb, Raises(), plugins=[io], max_steps=5).fit(Net(), batches("stateful"))
    assert kept(tmp_path) == [3]
    io, cb = parts()
    trainer = trainer_of(tmp_path, cb, plugins=[io], max_steps=5)
    trainer.fit(Net(), batches("stateful"))  # resumes by itself
    assert io.loaded is not None and files(tmp_path / "files") == []
    io.save_checkpoint({"state_dict": {}}, tmp_path / "files" / "x.ckpt")
    assert kept(tmp_path) == [None]  # the newest commit of a branch stayed until then


def test_links_go_alone_and_copies_do_not_matter(tmp_path: Path) -> None:
    io = CasCheckpointIO(tmp_path / "ckpts", on_save_error="raise")
    file, link = tmp_path / "a.ckpt", tmp_path / "b.ckpt"
    for path, step in ((file, 1), (tmp_path / "c.ckpt", 2)):
        io.save_checkpoint({"step": step}, path)
    link.symlink_to(file)
    io.remove_checkpoint(link)
    assert not link.is_symlink() and kept(tmp_path) == [2, 1]
    link.symlink_to(file)
    io.save_checkpoint({"step": 3}, link)
    assert not link.is_symlink() and kept(tmp_path) == [3, 2, 1]


def test_what_a_killed_process_committed_and_did_not_name_is_replaced_by_the_next_save_there(tmp_path: Path) -> None:
    with Forked(save_until_killed, tmp_path) as process:
        process.wait(60)
    assert process.returncode == -signal.SIGKILL
    io = CasCheckpointIO(tmp_path / "ckpts")
    assert kept(tmp_path) == [None, None] and io.load_checkpoint(tmp_path / "a.ckpt")["x"][0] == 1
    io.save_checkpoint({"x": torch.full((300,), 3)}, tmp_path / "a.ckpt")
    assert kept(tmp_path) == [None]


def test_garbage_is_left_to_its_collection_if_asked_for(tmp_path: Path) -> None:
    io = CasCheckpointIO(tmp_path / "ckpts", collect=False)
    for number in range(2):
        io.save_checkpoint({"x": torch.full((300,), number)}, tmp_path / "a.ckpt")
    with Repository.open(tmp_path / "ckpts") as repository:
        assert [each.forgotten for each in repository.log()] == [False, True]
        assert repository.load("main~1")["x"].sum() == 0
        repository.gc()
    assert len(kept(tmp_path)) == 1


# ------------------------------------------------------------ failures and misuse


class Fails(Callback):
    """From a step on nothing can be committed, until another."""

    def __init__(self, io: CasCheckpointIO, begin: int, end: int) -> None:
        self.io, self.begin, self.end = io, begin, end

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step in (self.begin, self.end):
            self.io.teardown()  # when what is under way has ended
            packs = Path(self.io.url, "packs")
            other = packs.with_name("moved")
            if trainer.global_step == self.begin:
                packs.rename(other)
                packs.touch()
            else:
                packs.unlink()
                other.rename(packs)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_fails_is_logged_and_what_was_saved_before_stays_until_one_succeeds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, asynchronous: bool
) -> None:
    def fit(steps: int) -> CasCheckpointIO:
        io = CasCheckpointIO(tmp_path / "ckpts", asynchronous=asynchronous)
        cb = CasModelCheckpoint(io, every_n_train_steps=2)
        trainer = trainer_of(tmp_path, Fails(io, 3, 7), cb, max_steps=steps)
        trainer.fit(Net(), batches("stateful"), ckpt_path="last")
        assert trainer.global_step == steps
        return io

    io = fit(7)
    assert io.last_error is not None and io.last_commit is not None and io.last_commit.step == 2
    errors = [each.message for each in caplog.records if each.levelno == logging.ERROR]
    assert any("step=6.ckpt was not committed" in each for each in errors)
    assert files(tmp_path / "ckpts-files") == ["epoch=0-step=2.ckpt", "last.ckpt"]
    assert kept(tmp_path) == [2]
    io = fit(9)  # fails again from 3 to 7
    assert io.last_error is None and kept(tmp_path) == [8]
    assert files(tmp_path / "ckpts-files") == ["epoch=1-step=8.ckpt", "last.ckpt"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_fails_ends_the_training_if_asked_for(tmp_path: Path, asynchronous: bool) -> None:
    io = CasCheckpointIO(tmp_path / "ckpts", asynchronous=asynchronous, on_save_error="raise")
    cb = CasModelCheckpoint(io, every_n_train_steps=2)
    with pytest.raises(CkptError, match="is a folder of other keys"):
        trainer_of(tmp_path, Fails(io, 3, 99), cb, max_steps=8).fit(Net(), batches("stateful"))


def test_nothing_is_removed_before_a_save_in_the_background_if_one_before_it_ends_meanwhile(tmp_path: Path) -> None:
    may_end = threading.Event()

    class Holds(CasCheckpointIO):
        def _settle(self, file: str, *rest: Any) -> None:
            if file.endswith("2.ckpt"):
                may_end.wait()
                repository, packs = self._open(), tmp_path / "ckpts" / "packs"
                super()._settle(file, *rest)
                assert repository.latest() is not None
                packs.rename(packs.with_name("moved"))
                packs.touch()
            else:
                super()._settle(file, *rest)

    io = Holds(tmp_path / "ckpts", asynchronous=True)
    for step in (1, 2):
        io.save_checkpoint({"x": torch.full((300,), step)}, tmp_path / f"{step}.ckpt")
    timer = threading.Timer(0.3, may_end.set)
    timer.start()
    io.save_checkpoint({"x": torch.full((300,), 3)}, tmp_path / "3.ckpt")  # waits for the one before, and fails
    io.remove_checkpoint(tmp_path / "1.ckpt")
    io.teardown()
    assert io.last_error is not None and (tmp_path / "1.ckpt").exists()


def test_async_checkpoint_io_is_refused(tmp_path: Path) -> None:
    io = AsyncCheckpointIO(CasCheckpointIO(tmp_path / "ckpts"))
    cb = ModelCheckpoint(tmp_path / "files", every_n_train_steps=1)
    with pytest.raises(InvalidInputError, match="asynchronous=True"):
        trainer_of(tmp_path, cb, plugins=[io], max_steps=4).fit(Net(), batches("plain"))
    with pytest.raises(InvalidInputError, match="asynchronous=True"):
        trainer_of(tmp_path, CasModelCheckpoint(tmp_path / "ckpts"), plugins=[io]).fit(Net(), batches("plain"))


def test_a_strategy_with_files_of_its_own_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, CasModelCheckpoint(tmp_path / "ckpts"), strategy=ModelParallelStrategy())
    try:
        with pytest.raises(InvalidInputError, match="ModelParallelStrategy reads and writes files of its own"):
            trainer.fit(Net(), batches("plain"))
    finally:
        torch.distributed.destroy_process_group()


def test_misuse_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="give 'warn' or 'raise'"):
        CasCheckpointIO(tmp_path / "ckpts", on_save_error="ignore")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="dirpath="):
        CasModelCheckpoint("s3://bucket/run")
    io = CasCheckpointIO(tmp_path / "ckpts", on_save_error="raise")
    with pytest.raises(InvalidInputError, match="storage_options"):
        io.save_checkpoint({"x": 1}, tmp_path / "a.ckpt", storage_options={})
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(NoRepositoryError):
        io.load_checkpoint("cas:main")
    with Repository.open(tmp_path / "ckpts", create=True) as repository:
        repository.commit({"x": 1})
    with pytest.raises(InvalidInputError, match="is no checkpoint of Lightning"):
        io.load_checkpoint("cas:main")
    io.save_checkpoint({"x": 1}, tmp_path / "a.ckpt")
    other = CasCheckpointIO(tmp_path / "other", on_save_error="raise")
    other.save_checkpoint({"x": 2}, tmp_path / "b.ckpt")
    with pytest.raises(NotFoundError):
        io.load_checkpoint(tmp_path / "b.ckpt")
    io.remove_checkpoint(tmp_path / "b.ckpt")
    assert not (tmp_path / "b.ckpt").exists() and other.load_checkpoint("cas:main") == {"x": 2}
    two = [CasModelCheckpoint(tmp_path / name, every_n_epochs=len(name)) for name in ("ckpts", "others")]
    with pytest.raises(InvalidInputError, match="give one CasCheckpointIO to all"):
        trainer_of(tmp_path, *two, EarlyStopping("loss")).fit(Net(), batches("plain"))


def test_a_file_says_which_commit_it_names(tmp_path: Path) -> None:
    io = CasCheckpointIO(tmp_path / "ckpts", branch="b")
    io.save_checkpoint({"x": 1}, tmp_path / "files" / "a.ckpt")
    said = json.loads((tmp_path / "files" / "a.ckpt").read_text())
    with Repository.open(tmp_path / "ckpts") as repository:
        assert said == {"cas_ckpt": 1, "repository": repository.url, "commit": repository.resolve("b")}


def test_importing_the_module_of_fabric_imports_no_trainer() -> None:
    program = "import sys, cas_ckpt.integrations as i; sys.exit('lightning' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


# ------------------------------------------------------------ Fabric


def test_a_loop_of_fabric_goes_on(tmp_path: Path) -> None:
    whole = fabric_loop(str(tmp_path / "whole"), 6)
    fabric_loop(str(tmp_path), 4)
    model = fabric_loop(str(tmp_path), 6, seed=9)
    assert torch.equal(model.weight, whole.weight)
    with Repository.open(tmp_path / "ckpts") as repository:
        assert [(each.step, each.forgotten) for each in repository.log()] == [(6, False), (4, True), (2, True)]
        assert set(repository.load(keys="model")["model"]) == {"weight", "bias"}


# ------------------------------------------------------------ ranks


def ranks(folder: Path, step: int | None = None, path: str | None = None, **given: Any) -> list[Outcome]:
    given = {"every_n_train_steps": 3, "trainer": {"max_steps": 9}, **given}
    case = "tests.frameworks.lightning_cases:train_rank"
    return run_processes(2, case, str(folder), step, path, given, hanging=() if step is None else (1,))


@pytest.mark.parametrize(("step", "path"), [(5, None), (6, "refs/heads"), (6, "step=6.ckpt")])
def test_two_ranks_of_which_one_is_killed_go_on_exactly(
    tmp_path: Path, ranks_uninterrupted: list[CommitInfo], step: int, path: str | None
) -> None:
    assert ranks(tmp_path, step, path)[0].exit_code == -signal.SIGKILL
    assert kept(tmp_path)[0] == (6 if path == "step=6.ckpt" else 3)
    first, second = results(ranks(tmp_path, seed=9))
    assert first == second
    assert roots(first) == roots(ranks_uninterrupted)


@pytest.fixture(scope="module")
def ranks_uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[CommitInfo]:
    return results(ranks(tmp_path_factory.mktemp("ranks")))[0]  # type: ignore[no-any-return]


def test_one_process_goes_on_with_what_two_ranks_committed(
    tmp_path: Path, ranks_uninterrupted: list[CommitInfo], caplog: pytest.LogCaptureFixture
) -> None:
    results(ranks(tmp_path, trainer={"max_steps": 3}))
    commits = train(tmp_path, seed=9, data="plain", every_n_train_steps=5, trainer={"max_steps": 10})
    assert [each.step for each in commits][-1] == ranks_uninterrupted[-1].step == 3
    assert "2 ranks saved random states, 1 load" in caplog.text


def test_a_save_that_fails_on_rank_0_ends_all_ranks_if_asked_for(tmp_path: Path) -> None:
    first, second = run_processes(
        2, "tests.frameworks.lightning_cases:fail_on_rank_0", str(tmp_path), timeout_s=40, hanging=(1,)
    )
    assert first.error is not None and first.error.startswith("ConflictError")
    assert second.error is not None


def test_two_ranks_of_fabric_go_on(tmp_path: Path) -> None:
    case = "tests.frameworks.lightning_cases:fabric_rank"
    whole = results(run_processes(2, case, str(tmp_path / "whole"), 6, 1))
    results(run_processes(2, case, str(tmp_path), 4, 1))
    assert roots(results(run_processes(2, case, str(tmp_path), 6, 9))[0])[0] == roots(whole[0])[0]


def test_ranks_that_lightning_spawns_save_and_hand_over(tmp_path: Path) -> None:
    call = f"if __name__ == '__main__': spawn_and_test({str(tmp_path)!r})"
    (tmp_path / "program.py").write_text(f"from tests.frameworks.lightning_cases import *\n{call}")
    subprocess.run(
        [sys.executable, str(tmp_path / "program.py")], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, check=True, timeout=100
    )
    assert kept(tmp_path) == [6]


def test_shards_are_committed_by_a_callback_and_go_on_exactly(tmp_path: Path) -> None:
    case = "tests.frameworks.lightning_cases:train_shards"
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = results(run_processes(2, case, str(tmp_path / "whole"), None, 1))[0]
    killed = run_processes(2, case, str(tmp_path / "killed"), 8, 1, hanging=(1,))
    assert killed[0].exit_code == -signal.SIGKILL
    again = results(run_processes(2, case, str(tmp_path / "killed"), None, 9))[0]
    assert [each.step for each in again] == [9, 6, 3] and roots(again) == roots(whole)
    alone = results(run_processes(1, case, str(tmp_path / "killed"), None, 9, 4))[
        0
    ]  # with all five batches of an epoch
    assert [each.step for each in alone] == [14, 9, 6, 3] and roots(alone)[1:] == roots(whole)


def test_a_training_by_shards_goes_on_without_saves_that_fail_and_has_one_place_to_resume_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given: dict[str, Any] = {"max_epochs": 2, "max_steps": -1}
    shards = CasShards(tmp_path / "ckpts", every_n_epochs=2)
    trainer_of(tmp_path, shards, **given).fit(Net(), batches("plain"))
    assert shards.repository is not None and [each.step for each in shards.repository.log()] == [10]
    with Repository.open(tmp_path / "ckpts", read_only=True) as repository:
        shards = CasShards(repository)
        trainer = trainer_of(tmp_path, shards, **{**given, "max_epochs": 3})
        trainer.fit(Net(), batches("plain"))
        assert trainer.global_step == 15 and isinstance(shards.last_error, PermissionDeniedError)
        assert "step 15 was not committed, training goes on" in caplog.text
        trainer = trainer_of(tmp_path, CasShards(repository, on_save_error="raise"), **{**given, "max_epochs": 3})
        with pytest.raises(PermissionDeniedError):
            trainer.fit(Net(), batches("plain"))
    own = ModelCheckpoint(tmp_path / "files", every_n_epochs=1)
    trainer_of(tmp_path, own, **given).fit(Net(), batches("plain"))
    trainer = trainer_of(tmp_path, CasShards(tmp_path / "ckpts"), **{**given, "max_epochs": 3})
    with pytest.raises(InvalidInputError, match="leave one out"):
        trainer.fit(Net(), batches("plain"), ckpt_path=own.best_model_path)
