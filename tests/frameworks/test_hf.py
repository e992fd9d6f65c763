"""transformers.Trainer with a `CasCallback`: what is killed goes on as if it had not been; nothing is kept twice."""

from __future__ import annotations

import json
import logging
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from accelerate.optimizer import AcceleratedOptimizer
from transformers import Trainer, TrainerCallback, TrainerState

from cas_ckpt import (
    CommitInfo,
    FrozenChangedError,
    InvalidInputError,
    PermissionDeniedError,
    Repository,
    RNGState,
    StorageError,
)
from cas_ckpt.integrations.hf import HEAVY, CasCallback, CasTrainerMixin
from cas_ckpt.integrations.hf_files import saves
from tests.frameworks.hf_cases import STEPS, gpt2, llama_with_lora, sft_trainer, train, train_until_killed, trainer_of
from tests.frameworks.programs import program, roots_of, run
from tests.processes import Forked
from tests.ranks import Outcome, results, run_processes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # those of the frameworks
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[CommitInfo]:
    return train(tmp_path_factory.mktemp("uninterrupted"))


def kill(folder: Path, step: int, path: str | None = None, touches: int = 1, **given: Any) -> int | None:
    """Train in a process until it is killed; the step of the newest commit."""
    with Forked(train_until_killed, folder, step, path, touches, given) as process:
        process.wait(60)
    assert process.returncode == -signal.SIGKILL
    with Repository.open(folder / "ckpts") as repository:
        newest = repository.latest()
        return newest.step if newest else None


def heavy_files(folder: Path) -> list[str]:
    found = [path for pattern in HEAVY for path in folder.glob(f"checkpoint-*/{pattern}")]
    return sorted(str(path.relative_to(folder)) for path in found)


# ------------------------------------------------------------ resuming


@pytest.mark.parametrize("step", [3, 5, 7])  # after 2, 4 and 6 steps were saved; the sixth is the end of an epoch
def test_a_training_that_is_killed_between_saves_goes_on_exactly(
    tmp_path: Path, uninterrupted: list[CommitInfo], step: int
) -> None:
    assert kill(tmp_path, step) == step - 1
    commits = train(tmp_path, seed=9)  # of this model nothing remains
    assert [each.root for each in commits] == [each.root for each in uninterrupted]
    assert [each.step for each in commits] == [8, 6, 4, 2]


@pytest.mark.parametrize("path", [".data", ".meta", "refs/heads"])  # before the pack, the commit and the ref are there
def test_a_training_that_is_killed_inside_a_save_goes_on_exactly(
    tmp_path: Path, uninterrupted: list[CommitInfo], path: str
) -> None:
    assert kill(tmp_path, 6, path) == 4
    assert [each.root for each in train(tmp_path, seed=9)] == [each.root for each in uninterrupted]
    assert heavy_files(tmp_path / "out") == []


def test_what_a_kill_between_commit_and_removal_leaves_is_removed_by_the_next_save(
    tmp_path: Path, uninterrupted: list[CommitInfo]
) -> None:
    assert kill(tmp_path, 6, "checkpoint-6/cas_ckpt.json", 2) == 6
    assert "checkpoint-6/optimizer.pt" in heavy_files(tmp_path / "out")
    assert train(tmp_path, seed=9)[0].root == uninterrupted[0].root
    assert heavy_files(tmp_path / "out") == []


def test_accumulated_gradients_workers_and_a_cosine_schedule_resume_exactly(tmp_path: Path) -> None:
    given = {
        "gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine", "warmup_steps": 2, "optim": "adafactor",
        "eval_strategy": "steps", "eval_steps": 1,
    }  # fmt: skip
    whole = train(tmp_path / "whole", **given)
    assert kill(tmp_path, 5, **given) == 4
    assert train(tmp_path, seed=9, **given)[0].root == whole[0].root


def test_an_empty_repository_gives_nothing_to_resume(tmp_path: Path) -> None:
    cb = CasCallback(tmp_path / "ckpts")
    trainer_of(tmp_path, cb)
    assert cb.latest() is None


def test_a_resume_warns_of_nothing_and_its_folder_goes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path, max_steps=2)
    cb = CasCallback(tmp_path / "ckpts")
    trainer = trainer_of(tmp_path, cb, max_steps=3, seed=9)
    first, folder = cb.latest(), cb.latest()
    assert folder == first is not None and [each.name for each in (tmp_path / "out").glob("cas*")] == [
        Path(folder).name
    ]
    assert sum(each.stat().st_size for each in Path(folder).iterdir()) < 20_000
    logging.getLogger("transformers").addHandler(caplog.handler)
    trainer.train(resume_from_checkpoint=folder)
    logging.getLogger("transformers").removeHandler(caplog.handler)
    assert [each.message for each in caplog.records if each.levelno >= logging.WARNING] == []
    assert not Path(folder).exists()


def test_a_trainer_without_the_callback_warns_of_what_it_did_not_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, max_steps=2)
    cb = CasCallback(tmp_path / "ckpts")
    trainer_of(tmp_path, cb)
    other = trainer_of(tmp_path, CasCallback(tmp_path / "elsewhere"), max_steps=2)
    logging.getLogger("transformers").addHandler(caplog.handler)
    other.train(resume_from_checkpoint=cb.latest())
    logging.getLogger("transformers").removeHandler(caplog.handler)
    assert "restored by cas_ckpt.integrations.hf.CasCallback" in caplog.text


def test_the_history_of_logs_goes_on_where_logs_and_saves_do_not_meet(tmp_path: Path) -> None:
    given: dict[str, Any] = {"logging_steps": 4, "eval_strategy": "steps", "eval_steps": 3}
    whole = train(tmp_path / "whole", **given)
    assert kill(tmp_path, 7, **given) == 6
    cb = CasCallback(tmp_path / "ckpts")
    trainer = trainer_of(tmp_path, cb, **given)
    trainer.train(resume_from_checkpoint=cb.latest())
    *logged, _ = [(entry["step"], "eval_runtime" in entry) for entry in trainer.state.log_history]
    assert logged == [(3, True), (4, False), (6, True), (8, False), (8, True)]  # but for a summary at the end
    assert cb.last_commit is not None and cb.last_commit.root == whole[0].root


def test_another_branch_is_another_training(tmp_path: Path, uninterrupted: list[CommitInfo]) -> None:
    with Repository.open(tmp_path / "ckpts", create=True) as repository:
        for branch, steps in (("main", 4), ("retry", 2)):
            cb = CasCallback(repository, branch=branch)
            trainer_of(tmp_path, cb, max_steps=steps).train(resume_from_checkpoint=cb.latest())
        assert [each.step for each in repository.log("main")] == [4, 2]
        assert repository.log("retry", limit=1)[0].step == 2


# ------------------------------------------------------------ files and failures


def test_what_is_committed_is_removed_from_trainers_folders(tmp_path: Path) -> None:
    commits = train(tmp_path)
    out = tmp_path / "out"
    assert heavy_files(out) == []
    for commit in commits:
        folder = out / f"checkpoint-{commit.step}"
        assert json.loads((folder / "cas_ckpt.json").read_text())["commit"] == commit.id
        assert TrainerState.load_from_json(str(folder / "trainer_state.json")).global_step == commit.step
    assert commits[0].metrics["loss"] > 0


def test_files_are_kept_if_asked_for(tmp_path: Path) -> None:
    cb = CasCallback(tmp_path / "ckpts", keep_files=True)
    trainer_of(tmp_path, cb, max_steps=2).train()
    assert heavy_files(tmp_path / "out") == [
        f"checkpoint-2/{name}" for name in ("model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt")
    ]


class LightTrainer(CasTrainerMixin, Trainer):
    """Its saves write no weights."""


def test_with_the_mixin_no_weights_are_ever_written(tmp_path: Path, uninterrupted: list[CommitInfo]) -> None:
    seen: list[str] = []

    class Files(TrainerCallback):
        def on_save(self, *_: Any, **__: Any) -> None:
            seen.extend(heavy_files(tmp_path / "out"))

    commits = train(tmp_path, Files(), kind=LightTrainer, save_only_model=True)
    assert seen == [] and commits[0].root == uninterrupted[0].root
    trainer = trainer_of(tmp_path, CasCallback(tmp_path / "ckpts"), kind=LightTrainer)
    trainer.save_model(str(tmp_path / "mine"))
    assert (tmp_path / "mine" / "model.safetensors").exists()


def broken(cb: CasCallback) -> TrainerCallback:
    """From step 4 on nothing can be committed."""

    class Breaks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 4:
                assert cb.repository is not None
                cb.repository = Repository.open(cb.repository.url, read_only=True)

    return Breaks()


def test_a_save_that_fails_is_logged_and_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cb = CasCallback(tmp_path / "ckpts")
    trainer = trainer_of(tmp_path, cb, broken(cb), max_steps=4)
    assert trainer.train().global_step == 4
    assert isinstance(cb.last_error, PermissionDeniedError) and cb.last_commit and cb.last_commit.step == 2
    assert any(each.levelno == logging.ERROR and "step 4 was not committed" in each.message for each in caplog.records)
    assert "checkpoint-4/model.safetensors" in heavy_files(tmp_path / "out")  # Trainer's own save is whole


def test_a_save_that_fails_ends_the_training_if_asked_for(tmp_path: Path) -> None:
    cb = CasCallback(tmp_path / "ckpts", on_save_error="raise")
    with pytest.raises(PermissionDeniedError):
        trainer_of(tmp_path, cb, broken(cb), max_steps=4).train()


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    train(tmp_path, max_steps=2)
    cb = CasCallback(tmp_path / "ckpts")
    trainer_of(tmp_path, cb)
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "out").touch()
    with pytest.raises(StorageError, match="no folder to resume from"):
        cb.latest()


def test_misuse_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="no Trainer has this callback yet"):
        CasCallback(tmp_path / "ckpts").latest()
    with pytest.raises(InvalidInputError, match="give 'warn' or 'raise'"):
        CasCallback(tmp_path / "ckpts", on_save_error="ignore")  # type: ignore[arg-type]
    cb = CasCallback(tmp_path / "ckpts")
    trainer_of(tmp_path, cb)
    assert cb.repository is not None
    cb.repository.commit({"x": 1})
    with pytest.raises(InvalidInputError, match="is not of a CasCallback"):
        cb.latest()


# ------------------------------------------------------------ rotation and the best model

BEST = {
    "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "loss",
    "greater_is_better": True,
}  # fmt: skip
"""The highest loss is that of the first evaluation, so the best model is not the last one."""


def test_save_total_limit_keeps_so_many_commits_and_the_best(tmp_path: Path) -> None:
    given = {"save_total_limit": 1, **BEST}
    cb = CasCallback(tmp_path / "ckpts")
    trainer = trainer_of(tmp_path, cb, **given)
    trainer.train()
    best = trainer.state.best_global_step
    assert best == 2 and cb.repository is not None
    with cb.repository as repository:
        kept = [each.step for each in repository.log() if not each.forgotten]
        assert kept == [STEPS, best]
        assert repository.resolve("main-best") == repository.resolve(f"main@step:{best}")
        weights = repository.load("main-best", keys="model")["model"]
    assert all(torch.equal(weights[name], value) for name, value in trainer.model.state_dict().items())
    # Trainer removes all folders but the best one's at the end.
    assert heavy_files(tmp_path / "out") == [f"checkpoint-{best}/model.safetensors"]


def test_rotation_spares_what_the_training_did_not_commit(tmp_path: Path) -> None:
    given = {"save_steps": 1, "save_total_limit": 1, "max_steps": 3}
    with Repository.open(tmp_path / "ckpts", create=True) as repository:
        others = [repository.commit({"x": number}).id for number in range(3)]
        trainer_of(tmp_path / "before", CasCallback(repository), **given).train()
        trainer_of(tmp_path, CasCallback(repository), **given).train()
        for steps in (4, 5):
            cb = CasCallback(repository)
            trainer = trainer_of(tmp_path, cb, **{**given, "max_steps": steps})
            trainer.train(resume_from_checkpoint=cb.latest())
            if steps == 4:
                assert cb.last_commit is not None
                repository.tag("mine", cb.last_commit)
        assert [entry["step"] for entry in trainer.state.log_history] == [1, 2, 3, 4, 5, 5]
        kept = [each for each in repository.log() if not each.forgotten]
        assert [each.step for each in kept] == [5, 4, 3, None, None, None]  # the tag keeps 4
        assert [each.id for each in kept[3:]] == others[::-1]


@pytest.mark.parametrize("model", [gpt2, llama_with_lora])
def test_the_best_model_is_loaded_at_the_end_even_if_its_folder_was_lost(tmp_path: Path, model: Any) -> None:
    given = {"model": model, "max_steps": 6, **BEST}
    whole = trainer_of(tmp_path / "whole", CasCallback(tmp_path / "whole" / "ckpts"), **given)
    whole.train()
    assert whole.state.best_global_step == 2
    assert kill(tmp_path, 5, **given) == 4
    shutil.rmtree(tmp_path / "out")
    cb = CasCallback(tmp_path / "ckpts")
    trainer = trainer_of(tmp_path, cb, seed=9, **given)
    trainer.train(resume_from_checkpoint=cb.latest())
    assert trainer.state.best_global_step == 2
    ours = trainer.model.state_dict()
    assert all(torch.equal(ours[name], value) for name, value in whole.model.state_dict().items())


# ------------------------------------------------------------ PEFT, TRL, mixed precision


def test_the_base_of_an_adapter_is_stored_once_and_adapters_resume_exactly(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", model=llama_with_lora)
    first, *later = [each.stats for each in reversed(whole)]
    base = 4 * sum(each.numel() for each in llama_with_lora(1).parameters() if not each.requires_grad)
    assert first.new_bytes > base
    assert all(each.new_bytes < base / 4 for each in later)
    assert kill(tmp_path, 6, "refs/heads", model=llama_with_lora) == 4
    assert train(tmp_path, model=llama_with_lora, seed=9)[0].root == whole[0].root
    assert heavy_files(tmp_path / "out") == []


@pytest.mark.parametrize("frozen", ["requires_grad", None])
def test_a_base_that_changes_is_an_error_unless_it_is_said_to_change(tmp_path: Path, frozen: str | None) -> None:
    class Merges(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.global_step == 3:
                next(each for each in model.parameters() if not each.requires_grad).data.add_(1)

    cb = CasCallback(tmp_path / "ckpts", frozen=frozen)
    trainer_of(tmp_path, cb, Merges(), model=llama_with_lora, max_steps=4).train()
    assert isinstance(cb.last_error, FrozenChangedError) == (frozen is not None)


def test_trainers_of_trl_resume_exactly(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", make=sft_trainer)
    assert whole[0].metrics["num_tokens"] > 0
    assert kill(tmp_path, 5, make=sft_trainer) == 4
    assert [each.root for each in train(tmp_path, make=sft_trainer, seed=9)] == [each.root for each in whole]


def test_the_gradient_scaler_is_committed(tmp_path: Path) -> None:
    cb = CasCallback(tmp_path / "ckpts")
    trainer = trainer_of(tmp_path, cb, max_steps=2)
    trainer.train()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    live = {
        "model": trainer.model, "lr_scheduler": trainer.lr_scheduler,
        "optimizer": AcceleratedOptimizer(torch.optim.SGD(trainer.model.parameters()), scaler=scaler),
    }  # fmt: skip
    cb.on_save(trainer.args, trainer.state, trainer.control, **live)
    assert cb.last_error is None and cb.repository is not None
    assert cb.repository.load(keys="scaler")["scaler"]["scale"] == 8.0


def test_the_program_of_the_docs_goes_on_after_a_kill(tmp_path: Path) -> None:
    whole = roots_of("transformers.Trainer", tmp_path / "whole")
    assert len(whole) == 4 and roots_of("transformers.Trainer", tmp_path / "killed", kill_at=4) == whole
    with Forked(run, program("transformers.Trainer", 1), str(tmp_path / "whole"), None) as process:  # back to files
        assert process.wait(60) == 0
    assert {"model.safetensors", "optimizer.pt"} <= {
        each.name for each in (tmp_path / "whole" / "runs" / "out" / "checkpoint-20").iterdir()
    }


def test_importing_the_package_imports_no_framework() -> None:
    program = "import sys, cas_ckpt, cas_ckpt.integrations; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


# ------------------------------------------------------------ ranks


def ranks(
    folder: Path, step: int | None = None, path: str | None = None, *, case: str = "train_rank", **given: Any
) -> list[Outcome]:
    case = f"tests.frameworks.hf_cases:{case}"
    return run_processes(2, case, str(folder), step, path, given, hanging=() if step is None else (1,))


@pytest.mark.parametrize(("step", "path"), [(5, None), (6, "refs/heads")])
def test_two_ranks_of_which_one_is_killed_go_on_exactly(
    tmp_path: Path, ranks_uninterrupted: list[CommitInfo], step: int, path: str | None
) -> None:
    assert ranks(tmp_path, step, path)[0].exit_code == -signal.SIGKILL
    with Repository.open(tmp_path / "ckpts", group=None) as repository:
        assert [each.step for each in repository.log()] == [4, 2]
    first, second = results(ranks(tmp_path, seed=9))
    assert first == second
    assert [each.root for each in first] == [each.root for each in ranks_uninterrupted]
    assert heavy_files(tmp_path / "out") == []


def test_one_process_goes_on_with_what_two_ranks_committed(
    tmp_path: Path, ranks_uninterrupted: list[CommitInfo], caplog: pytest.LogCaptureFixture
) -> None:
    assert ranks_uninterrupted[0].step == STEPS
    results(ranks(tmp_path, max_steps=4))
    assert [each.step for each in train(tmp_path, seed=9)] == [8, 6, 4, 2]


def test_shards_of_fsdp_resume_exactly_and_have_the_roots_of_data_parallel_ranks(
    tmp_path: Path, ranks_uninterrupted: list[CommitInfo]
) -> None:
    case = "train_sharded_rank"
    assert ranks(tmp_path, 6, "refs/heads", case=case)[0].exit_code == -signal.SIGKILL
    commits = results(ranks(tmp_path, seed=9, case=case))[0]
    assert [each.root for each in commits] == [each.root for each in ranks_uninterrupted]
    assert heavy_files(tmp_path / "out") == []


@pytest.fixture(scope="module")
def ranks_uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[CommitInfo]:
    commits: list[CommitInfo] = results(ranks(tmp_path_factory.mktemp("ranks")))[0]
    return commits


# ------------------------------------------------------------ what must stay


class Losses(Trainer):
    """Its evaluations give these losses, by step."""

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        metrics = {"eval_loss": [9.0, 1.0, 0.5, 7.0, 8.0, 9.0][self.state.global_step - 1]}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def by_each_step(**given: Any) -> dict[str, Any]:
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": False}
    return {"kind": Losses, "max_steps": 6, "eval_strategy": "steps", "eval_steps": 1, **best, **given}


def test_rotation_leaves_what_another_branch_leads_to(tmp_path: Path) -> None:
    with Repository.open(tmp_path / "ckpts", create=True) as repository:
        trainer_of(tmp_path / "one", CasCallback(repository), save_steps=1, max_steps=5).train()
        repository.branch("retry", start="main~2")
        cb = CasCallback(repository, branch="retry")
        trainer = trainer_of(tmp_path / "two", cb, save_steps=1, max_steps=6, save_total_limit=1)
        trainer.train(resume_from_checkpoint=cb.latest())
        assert [each.step for each in repository.log("main") if not each.forgotten] == [5, 4, 3, 2, 1]
        assert [each.step for each in repository.log("retry") if not each.forgotten] == [6, 3, 2, 1]


def test_the_checkpoint_that_trainer_takes_for_the_best_keeps_its_weights(tmp_path: Path) -> None:
    """The best evaluation, at step 3, was not at a save."""
    plain = trainer_of(tmp_path / "plain", CasCallback(tmp_path / "unused"), **by_each_step())
    plain.remove_callback(CasCallback)
    plain.train()
    cb = CasCallback(tmp_path / "ckpts")
    trainer = trainer_of(tmp_path, cb, **by_each_step())
    trainer.train()
    named = [str(each.state.best_model_checkpoint).rpartition("/")[2] for each in (plain, trainer)]
    assert named[0] == named[1] and trainer.state.best_global_step == plain.state.best_global_step
    for one, other in zip(plain.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert cb.repository is not None
    assert f"checkpoint-{cb.repository.log('main-best', limit=1)[0].step}" == named[0]


def test_a_folder_that_has_weights_alone_is_not_resumed_from(tmp_path: Path) -> None:
    class Stops(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 2

    given = by_each_step(eval_steps=2)
    trainer_of(tmp_path, CasCallback(tmp_path / "ckpts"), Stops(), **given).train()
    assert heavy_files(tmp_path / "out") == ["checkpoint-2/model.safetensors"]
    with pytest.raises((ValueError, OSError)):
        trainer_of(tmp_path, CasCallback(tmp_path / "ckpts"), **given).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    "stale", ["written since", "another repository", "an unknown commit", "a save that failed", "no text"]
)
def test_files_that_no_commit_of_this_training_holds_stay(tmp_path: Path, stale: str) -> None:
    cb = CasCallback(tmp_path / "ckpts")
    trainer_of(tmp_path, cb, max_steps=2).train()
    assert cb.repository is not None
    folder = tmp_path / "out" / "checkpoint-2"
    mark = json.loads((folder / "cas_ckpt.json").read_text())
    if stale == "another repository":
        mark["repository"] += "-2"
    if stale == "an unknown commit":
        mark["commit"] = "0" * 64
    if stale == "no text":
        mark["commit"] = [mark["commit"]]
    if stale == "a save that failed":
        mark = {"pending": "0" * 32}
    if stale == "written since":
        torch.save({}, folder / "optimizer.pt")
    else:
        torch.save({}, folder / "optimizer.pt")
        (folder / "cas_ckpt.json").write_text(json.dumps(mark))
    train(tmp_path, max_steps=4)
    assert heavy_files(tmp_path / "out") == ["checkpoint-2/optimizer.pt"]


def test_files_of_others_in_trainers_folder_stay(tmp_path: Path) -> None:
    names = {"model_ema.safetensors", "optimizer_ema.pt", "pytorch_model_ema.bin"}

    class Ema(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            for name in names:
                (tmp_path / "out" / f"checkpoint-{state.global_step}" / name).write_bytes(b"mine")

    train(tmp_path, Ema(), max_steps=4)
    assert all(names <= {each.name for each in folder.iterdir()} for folder in (tmp_path / "out").glob("checkpoint-*"))


def test_a_training_that_begins_again_when_memory_runs_out_goes_on_committing(tmp_path: Path) -> None:
    class RunsOut(TrainerCallback):
        has_run_out = False

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 5 and not self.has_run_out:
                RunsOut.has_run_out = True
                raise RuntimeError("CUDA out of memory.")

    train(tmp_path, max_steps=2)
    cb = CasCallback(tmp_path / "ckpts")
    trainer = trainer_of(tmp_path, cb, RunsOut(), max_steps=8, auto_find_batch_size=True)
    trainer.train(resume_from_checkpoint=cb.latest())
    assert cb.last_error is None and cb.repository is not None
    assert [each.step for each in cb.repository.log()] == [8, 6, 4, 2]
    (left,) = [name for name in cb.repository.branches() if name != "main"]
    assert [each.step for each in cb.repository.log(left)] == [4, 2]  # what it saved before


def test_a_foreign_commit_on_the_branch_takes_nothing_out_of_the_history_of_logs(tmp_path: Path) -> None:
    newest = train(tmp_path, max_steps=4)[0]
    with Repository.open(tmp_path / "ckpts") as repository:
        repository.checkout(newest, into={"rng": RNGState()}, keys="rng")
        foreign = repository.commit({"note": 1}, branch="main")
        assert [each.step for each in saves(repository, foreign)] == [4, 2]
    cb = CasCallback(tmp_path / "ckpts")
    trainer_of(tmp_path, cb)
    with pytest.raises(InvalidInputError, match="is not of a CasCallback"):
        cb.latest()


def test_a_disk_that_is_full_for_torch_too_is_an_error_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, max_steps=2)
    cb = CasCallback(tmp_path / "ckpts")
    trainer_of(tmp_path, cb)

    def full(*_: Any) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(StorageError, match="rng_state.pth cannot be written"):
        cb.latest()


def test_a_number_that_is_no_float_is_no_metric(tmp_path: Path) -> None:
    class Logs(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            state.log_history[-1]["tokens"] = 10**400

    (commit,) = train(tmp_path, Logs(), max_steps=2)
    assert "tokens" not in commit.metrics and "loss" in commit.metrics
