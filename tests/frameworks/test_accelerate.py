"""Accelerate: a loop of one's own resumes exactly; `save_state` leaves weights to the repository."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("accelerate")

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DataLoaderConfiguration, DistributedType
from torch.utils.data import DataLoader

from cas_ckpt import InvalidInputError, PermissionDeniedError, PerRank, Repository
from cas_ckpt.integrations.accelerate import CasCheckpoints, commit_saves, state
from tests.frameworks.accelerate_cases import prepared, train
from tests.frameworks.programs import roots_of
from tests.processes import Forked
from tests.ranks import results, run_processes

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.fixture(autouse=True)
def _a_new_accelerator() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)


def killed(folder: str, step: int, kill_in: str) -> None:
    train(Path(folder), step, kill_in=kill_in)


@pytest.mark.parametrize(
    ("step", "kill_in"), [(3, ""), (7, ""), (4, "/packs/"), (8, "refs/heads")]
)  # after steps 2 and 6, which is the end of an epoch
def test_a_loop_that_is_killed_goes_on_exactly(tmp_path: Path, step: int, kill_in: str) -> None:
    whole = train(tmp_path / "whole")
    with Forked(killed, str(tmp_path), step, kill_in) as process:
        process.wait(60)
    assert process.returncode == -signal.SIGKILL
    with Repository.open(tmp_path / "ckpts") as repo:
        assert [each.step for each in repo.log(limit=1)] == [2 if step < 6 else 6]
    commits = train(tmp_path, seed=9)
    assert len(commits) == 6 and [each.root for each in commits] == [each.root for each in whole]


def test_two_ranks_of_which_one_is_killed_go_on_exactly_sharded_or_not(tmp_path: Path) -> None:
    case = "tests.frameworks.accelerate_cases:train_rank"
    whole = results(run_processes(2, case, str(tmp_path / "whole"), None, 1, "", False))[0]
    for sharded in (False, True):
        folder = str(tmp_path / str(sharded))
        ranks = run_processes(2, case, folder, 4, 1, "refs/heads", sharded, hanging=(1,))
        assert ranks[0].exit_code == -signal.SIGKILL
        commits = results(run_processes(2, case, folder, None, 9, "", sharded))[0]
        assert len(commits) == 3 and [each.root for each in commits] == [each.root for each in whole]


def test_what_one_rank_fails_of_ends_the_training_of_none(tmp_path: Path) -> None:
    errors = results(run_processes(2, "tests.frameworks.accelerate_cases:fail_on_one_rank", str(tmp_path)))
    assert errors == [["PeerError"], ["ValueError"]]


def resumed(folder: Path, caplog: pytest.LogCaptureFixture, *, batch_size: int, seedable: bool = True) -> list[str]:
    """What is logged where a loop of 6 steps an epoch is resumed in the middle of one."""
    loading = DataLoaderConfiguration(use_seedable_sampler=seedable, data_seed=7)
    accelerator = Accelerator(cpu=True, dataloader_config=loading)
    data = torch.utils.data.TensorDataset(torch.rand(24, 4))
    model, loader = accelerator.prepare(torch.nn.Linear(4, 1), DataLoader(data, batch_size=batch_size, shuffle=True))
    checkpoints = CasCheckpoints(accelerator, folder, model=model)
    caplog.clear()
    with checkpoints.repository:
        step = checkpoints.resume()
        for number, _ in enumerate(checkpoints.batches(loader, step // len(loader)), step + 1):
            if number == 2:
                checkpoints.save(number)
    return [record.getMessage() for record in caplog.records if record.name == "cas_ckpt"]


@pytest.mark.parametrize(
    ("batch_size", "seedable", "said"), [(4, True, ""), (2, True, "had 6 when step 2"), (4, False, "is drawn anew")]
)
def test_batches_that_are_not_those_which_follow_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, batch_size: int, seedable: bool, said: str
) -> None:
    assert resumed(tmp_path, caplog, batch_size=4) == []
    told = resumed(tmp_path, caplog, batch_size=batch_size, seedable=seedable)
    assert len(told) == bool(said) and all(said in each for each in told)


def test_a_loader_without_a_length_is_refused_by_name(tmp_path: Path) -> None:
    class Endless(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(torch.nn.Linear(4, 1), DataLoader(Endless()))
    checkpoints = CasCheckpoints(accelerator, tmp_path, model=model)
    with checkpoints.repository, pytest.raises(InvalidInputError, match="has no length"):
        next(checkpoints.batches(loader, 0))


def test_a_save_of_a_process_that_was_thought_dead_ends_no_later_ones(tmp_path: Path) -> None:
    def opened() -> tuple[torch.nn.Linear, CasCheckpoints]:
        model = torch.nn.Linear(2, 2)
        return model, CasCheckpoints(Accelerator(cpu=True), tmp_path, model=model, on_save_error="raise")

    _, old = opened()
    resumed = old.save(1)
    model, new = opened()
    with old.repository, new.repository:
        assert resumed is not None and new.resume() == 1
        old.save(2)
        torch.nn.init.zeros_(model.weight)
        made = new.save(2), new.save(3)
        assert [each.step for each in new.repository.log()] == [3, 2, 2, 1]
        assert made[0] is not None and [(each.kind, each.target) for each in made[0].lineage] == [
            ("continued-from", resumed.id)
        ]


def test_the_program_of_the_docs_goes_on_after_a_kill(tmp_path: Path) -> None:
    whole = roots_of("Accelerate", tmp_path / "whole")
    assert len(whole) == 9 and roots_of("Accelerate", tmp_path / "killed", kill_at=4) == whole


def test_a_save_that_fails_is_told_and_the_training_goes_on_unless_it_is_not_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator, model, *_ = prepared()
    CasCheckpoints(accelerator, tmp_path / "ckpts", model=model).save(1)
    with Repository.open(tmp_path / "ckpts", read_only=True) as repo:
        checkpoints = CasCheckpoints(accelerator, repo, model=model)
        assert checkpoints.resume() == 1
        assert checkpoints.save(2) is None
        assert isinstance(checkpoints.last_error, PermissionDeniedError)
        [told] = [each for each in caplog.records if "step 2 was not" in each.message]
        assert told.levelno == logging.ERROR and not told.exc_info
        with pytest.raises(PermissionDeniedError):
            CasCheckpoints(accelerator, repo, on_save_error="raise", model=model).save(3)
        assert CasCheckpoints(accelerator, repo, branch="other", model=model).resume() == 0
    broken = SimpleNamespace(state_dict=lambda: 1 // 0, load_state_dict=print)
    assert CasCheckpoints(accelerator, tmp_path / "ckpts", broken=broken).save(4) is None
    told = caplog.records[-1]  # of what is no error of cas_ckpt, where it was raised, too
    assert "step 4 was not" in told.message and told.exc_info and told.exc_info[0] is ZeroDivisionError


def test_the_state_is_what_was_prepared_unwrapped(tmp_path: Path) -> None:
    accelerator, model, optimizer, loader, scheduler = prepared()
    accelerator.step, accelerator.scaler = 5, torch.amp.GradScaler("cpu", init_scale=8.0)
    live = state(accelerator, model=model, optimizer=optimizer, scheduler=scheduler, epoch=3)
    assert live["optimizer"] is optimizer.optimizer and live["scheduler"] is scheduler.scheduler
    with Repository.init(tmp_path / "ckpts") as repo:
        repo.commit(live)
        accelerator.step = 0
        repo.checkout("main", into=live)
        assert accelerator.step == 5 and repo.load(keys="scaler")["scaler"]["scale"] == 8.0
    with pytest.raises(InvalidInputError, match="a data loader without a state"):
        state(accelerator, loader=loader)
    with pytest.raises(InvalidInputError, match="another name"):
        state(accelerator, rng=3)


def test_a_data_loader_with_a_state_is_kept_by_rank() -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    loader = accelerator.prepare(DataLoader(list(range(8)), batch_size=2))
    assert isinstance(state(accelerator, loader=loader)["loader"], PerRank)


# ------------------------------------------------------------ save_state and load_state


def test_saves_leave_weights_to_the_repository_and_load_them_from_there(tmp_path: Path) -> None:
    accelerator, model, *_ = prepared()
    with Repository.init(tmp_path / "ckpts") as repo:
        hooks = commit_saves(accelerator, repo)
        folders = [str(tmp_path / name) for name in ("first", "second")]
        kept = []
        for number, folder in enumerate(folders):
            torch.nn.init.constant_(model[0].weight, number + 1.0)
            accelerator.save_state(folder)
            kept.append({name: value.clone() for name, value in model.state_dict().items()})
            assert not list(Path(folder).glob("*.safetensors")) and Path(folder, "optimizer.bin").exists()
        assert [each.message for each in repo.log()] == ["second", "first"]
        torch.nn.init.zeros_(model[0].weight)
        accelerator.load_state(folders[0])
        assert all(torch.equal(kept[0][name], value) for name, value in model.state_dict().items())
        accelerator.save_state(str(tmp_path / "third"))  # a line of its own: the second save stays the newest of main
        assert hooks.last_error is None and repo.latest("main") == repo.log("main")[0]
        assert [each.message for each in repo.log(f"main-{repo.log('main')[1].id[:8]}")] == ["third", "first"]
        accelerator.load_state(folders[1])
        assert all(torch.equal(kept[1][name], value) for name, value in model.state_dict().items())
        with Repository.open(tmp_path / "ckpts") as other:
            other.commit({"model": model}, message="late", branch="main")  # by a process that was thought dead
        accelerator.save_state(str(tmp_path / "fourth"))
        assert hooks.last_error is None and [each.message for each in repo.log("main", limit=2)] == ["fourth", "late"]
        hooks.remove()
        accelerator.save_state(str(tmp_path / "plain"))
        assert list((tmp_path / "plain").glob("*.safetensors"))


def test_weights_that_cannot_be_committed_stay_in_the_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accelerator, model, *_ = prepared()
    hooks = commit_saves(accelerator, tmp_path / "ckpts")
    accelerator.save_state(str(tmp_path / "save"))  # of which nothing may be taken for part of the next
    hooks.remove()
    torch.nn.init.ones_(model[0].weight)
    with Repository.open(tmp_path / "ckpts", read_only=True) as repo:
        hooks = commit_saves(accelerator, repo)
        accelerator.save_state(str(tmp_path / "save"))
        assert isinstance(hooks.last_error, PermissionDeniedError)
        assert any(each.levelno == logging.ERROR and "not committed" in each.message for each in caplog.records)
        before = model[0].weight.detach().clone()
        torch.nn.init.zeros_(model[0].weight)
        accelerator.load_state(str(tmp_path / "save"))
        assert torch.equal(model[0].weight, before)
        hooks.remove()
        commit_saves(accelerator, repo, on_save_error="raise")
        with pytest.raises(PermissionDeniedError):
            accelerator.save_state(str(tmp_path / "save"))


def test_a_folder_that_was_saved_into_with_and_without_hooks_has_what_was_saved_last(tmp_path: Path) -> None:
    accelerator, model, *_ = prepared()
    folder = str(tmp_path / "save")

    def saved(value: float, *, by_hooks: bool) -> None:
        torch.nn.init.constant_(model[0].weight, value)
        hooks = commit_saves(accelerator, repo) if by_hooks else None
        accelerator.save_state(folder)
        if hooks is not None:
            hooks.remove()

    def loaded() -> float:
        torch.nn.init.zeros_(model[0].weight)
        hooks = commit_saves(accelerator, repo)
        accelerator.load_state(folder)
        hooks.remove()
        return float(model[0].weight.max())

    with Repository.init(tmp_path / "ckpts") as repo:
        for value, by_hooks in enumerate([True, False, True], start=1):
            saved(float(value), by_hooks=by_hooks)
            assert loaded() == value
        assert not list(Path(folder).glob("*.safetensors"))  # those of the save without hooks would be loaded without


def test_an_earlier_save_that_is_loaded_twice_goes_on_twice(tmp_path: Path) -> None:
    """As a training does that crashes again and again."""
    accelerator, *_ = prepared()
    with Repository.init(tmp_path / "ckpts") as repo:
        hooks = commit_saves(accelerator, repo)
        accelerator.save_state(str(tmp_path / "first"))
        accelerator.save_state(str(tmp_path / "second"))
        hooks.remove()
        for name in ("third", "fourth"):
            hooks = commit_saves(accelerator, repo)
            accelerator.load_state(str(tmp_path / "first"))
            accelerator.save_state(str(tmp_path / name))
            assert hooks.last_error is None
            hooks.remove()
        hooks = commit_saves(accelerator, repo)
        accelerator.load_state(str(tmp_path / "fourth"))  # the newest of its branch, which goes on
        accelerator.save_state(str(tmp_path / "fifth"))
        begun = f"main-{repo.log('main')[1].id[:8]}"
        found = {name: [each.message for each in repo.log(name)] for name in repo.branches()}
        assert found == {
            "main": ["second", "first"], begun: ["third", "first"], f"{begun}-2": ["fifth", "fourth", "first"],
        }  # fmt: skip


def test_a_commit_in_the_middle_of_accumulated_gradients_is_refused(tmp_path: Path) -> None:
    accelerator, model, optimizer, *_ = prepared(gradient_accumulation_steps=2)
    live = state(accelerator, model=model, optimizer=optimizer)
    with Repository.init(tmp_path / "ckpts") as repo:
        for is_whole in (False, True):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(2, 4)).sum())
                optimizer.step()
            if is_whole:
                repo.commit(live)
            else:
                with pytest.raises(InvalidInputError, match="gradients are being accumulated"):
                    repo.commit(live)


def test_misuse_is_told(tmp_path: Path) -> None:
    accelerator, *_ = prepared()
    with pytest.raises(InvalidInputError, match="give 'warn' or 'raise'"):
        commit_saves(accelerator, tmp_path / "ckpts", on_save_error="")  # type: ignore[arg-type]
    accelerator.state.distributed_type = DistributedType.FSDP
    with pytest.raises(InvalidInputError, match=r"commit state\(...\) instead"):
        commit_saves(accelerator, tmp_path / "ckpts")
