"""A `CasCheckpointManager` in place of one of torch_checkpointing: the same calls, the same answers, by commits."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch_checkpointing")

import torch
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.checkpoint_layout import LayoutInfo, TorchSerialization
from torch_checkpointing.config import SyncCheckpointSaverConfig

from cas_ckpt import (
    CommitInfo,
    CommitOptions,
    InvalidInputError,
    MismatchError,
    NotFoundError,
    PermissionDeniedError,
    Repository,
)
from cas_ckpt.integrations.torch_checkpointing import CasCheckpointManager
from tests.frameworks import torch_checkpointing_cases as cases
from tests.frameworks.programs import roots_of
from tests.ranks import Outcome, results, run_processes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # those of the framework
]


def run(folder: Path, *args: Any, size: int = 1) -> list[Outcome]:
    return run_processes(size, f"{cases.__name__}:train", str(folder), *args, hanging=range(1, size) if args[0] else ())


def train(folder: Path, *, size: int = 1, asynchronous: bool = False) -> list[CommitInfo]:
    commits: list[CommitInfo] = results(run(folder, None, asynchronous, size=size))[0]
    return commits


def kill(folder: Path, step: int, path: str | None, *, size: int = 1, asynchronous: bool = False) -> list[int | None]:
    """Train until rank 0 is killed; the steps that are there."""
    assert run(folder, (step, path), asynchronous, size=size)[0].exit_code == -signal.SIGKILL
    with Repository.open(folder / "ckpts", group=None) as repository:
        return [each.step for each in repository.log()]


def roots(commits: list[CommitInfo]) -> list[tuple[int | None, str]]:
    return [(each.step, each.root) for each in commits]


def synchronous(**given: Any) -> CheckpointManager.Config:
    return CheckpointManager.Config(save=SyncCheckpointSaverConfig(), **given)


# ------------------------------------------------------------ trainings


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_training_that_is_killed_inside_and_between_saves_goes_on_exactly(
    tmp_path: Path, size: int, asynchronous: bool
) -> None:
    given: dict[str, Any] = {"size": size, "asynchronous": asynchronous}
    whole = train(tmp_path / "whole", **given)
    assert [each.step for each in whole] == [6, 4, 2]
    for number, path in enumerate((None, ".data", "refs/heads")):
        left = kill(tmp_path / str(number), 5 if path is None else 4, path, **given)
        made = [4, 2] if path is None else [2]
        assert left == made or (asynchronous and left == made[1:])  # the last one was not made yet
        assert roots(train(tmp_path / str(number), **given)) == roots(whole)


def test_items_with_a_resharder_go_on_with_another_number_of_ranks_and_others_do_not(tmp_path: Path) -> None:
    train(tmp_path, size=2)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1))
    manager = CasCheckpointManager(tmp_path / "ckpts", cases.config())
    found = manager.load("step_6", into={"model": model.state_dict(), "optimizer": None, "place": {"at": 9}})
    stored = manager.repository.load()
    assert all(torch.equal(value, stored["model"][name]) for name, value in model.state_dict().items())
    assert found["place"] == {"at": 9} and stored["place"] == {0: {"at": 12}, 1: {"at": 13}}
    assert found["optimizer"]["state"]["0.weight"]["step"] == 7  # get_state_dict makes one, for the state to be there
    manager.close()


def test_of_what_fewer_ranks_had_for_themselves_no_rank_makes_a_new_object(tmp_path: Path) -> None:
    train(tmp_path, size=2)
    errors = results(run_processes(3, f"{cases.__name__}:load_anew", str(tmp_path)))
    assert all(each.startswith("MismatchError: place: each rank's own, of 2 ranks") for each in errors)


def test_the_program_of_the_docs_goes_on_after_a_kill(tmp_path: Path) -> None:
    whole = roots_of("torch_checkpointing", tmp_path / "whole")
    assert len(whole) == 4 and roots_of("torch_checkpointing", tmp_path / "killed", kill_at=3) == whole


# ------------------------------------------------------------ the interface


@pytest.mark.parametrize("way", ["theirs", "ours"])
def test_both_managers_answer_alike(tmp_path: Path, way: str) -> None:
    config = synchronous(items={"model": ItemSpec(), "extra": ItemSpec(required=False)})
    path = str(tmp_path / "step_3")
    manager: Any = CheckpointManager(config) if way == "theirs" else CasCheckpointManager(tmp_path / "repo", config)
    state = {"model": {"w": torch.arange(3.0), "list": [1, (2, 3)]}, "step": 3, "name": "run"}
    assert manager.save(path, state) is None
    weight = torch.zeros(3)
    found = manager.load(path, into={"model": {"w": weight, "list": [0, (0, 0)]}, "step": 0})
    assert found["model"]["w"] is weight and torch.equal(weight, torch.arange(3.0))
    assert found["model"]["list"] == [1, (2, 3)] and found["step"] == 3 and "name" not in found
    assert torch.equal(manager.load(path, into={"model": None})["model"]["w"], weight)
    part = manager.load(path, into={"model": {"w": torch.ones(3), "unknown": torch.ones(1)}})["model"]
    assert torch.equal(part["w"], weight) and torch.equal(part["unknown"], torch.ones(1))
    with pytest.raises(Exception, match="unknown"):
        manager.load(path, into={"model": {"w": torch.ones(3), "unknown": torch.ones(1)}}, strict=True)
    with pytest.raises(Exception, match="model"):
        manager.save(path, {"step": 4})
    with manager.lock():
        pass
    manager.prewarm_staging(state)
    manager.close()
    manager.close()
    with pytest.raises(Exception, match="closed"):
        manager.save(path, state)


def test_a_save_in_the_background_returns_a_future_and_the_state_may_change(tmp_path: Path) -> None:
    manager = CasCheckpointManager(tmp_path / "repo")
    assert manager.latest() is None
    weight = torch.zeros(1 << 20)
    pending = manager.save("a", {"w": weight})
    weight.fill_(1)
    assert pending is not None and pending.result().meta["checkpoint_id"] == "a"
    manager.save("b", {"w": weight})
    assert manager.latest() == "b"
    assert manager.load("a", into={"w": None})["w"].sum() == 0
    assert manager.load("b")["w"].sum() == 1 << 20
    manager.close()


def test_live_objects_are_items_too_and_a_fresh_optimizer_gets_its_state(tmp_path: Path) -> None:
    def training(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 2)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    manager, state, fresh = CasCheckpointManager(tmp_path / "repo", synchronous()), training(1), training(2)
    state["model"](torch.ones(3)).sum().backward()
    state["optimizer"].step()
    manager.save("step_1", state)
    assert manager.load("step_1", into=fresh)["model"] is fresh["model"]
    assert torch.equal(fresh["model"].weight, state["model"].weight)
    assert len(fresh["optimizer"].state) == 2
    manager.close()


def test_what_is_saved_after_an_earlier_state_was_loaded_says_so_and_the_newest_of_a_name_counts(
    tmp_path: Path,
) -> None:
    manager = CasCheckpointManager(tmp_path / "repo", synchronous())
    for step in (1, 2):
        manager.save(f"step_{step}", {"x": step, "step": step})
    first = manager.repository.log()[-1]
    again = CasCheckpointManager(tmp_path / "repo", synchronous())
    assert again.load("step_1", into={"x": 0})["x"] == 1
    again.save("step_2", {"x": 20, "step": 2})
    assert again.load("step_2", into={"x": 0})["x"] == 20
    log = again.repository.log()
    assert [each.step for each in log] == [2, 2, 1]
    assert [(edge.kind, edge.target) for edge in log[0].lineage] == [("continued-from", first.id)]
    for each in (manager, again):
        each.close()


def test_a_save_goes_on_top_of_what_another_process_saved_since_and_keeps_the_repositorys_options(
    tmp_path: Path,
) -> None:
    old = CasCheckpointManager(tmp_path / "repo", synchronous())
    old.save("step_1", {"x": 1, "step": 1})
    options = CommitOptions(provenance=True)
    new = CasCheckpointManager(Repository.open(tmp_path / "repo", commit_options=options), synchronous())
    new.load("step_1", into={"x": 0})
    old.save("step_2", {"x": 2, "step": 2})
    for step in (2, 3):
        new.save(f"step_{step}", {"x": 10 * step, "step": step})
    assert new.last_commit is not None and new.repository.show(new.last_commit).provenance
    assert [each.step for each in new.repository.log()] == [3, 2, 2, 1]
    for each in (old, new):
        each.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_fails_is_logged_or_raised(
    tmp_path: Path, asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    Repository.init(tmp_path / "repo").close()
    config = None if asynchronous else synchronous()

    def broken(way: Any) -> CasCheckpointManager:
        repository = Repository.open(tmp_path / "repo", read_only=True)
        return CasCheckpointManager(repository, config, on_save_error=way)

    manager = broken("warn")
    assert manager.save("a", {"x": 1}) is None
    assert isinstance(manager.last_error, PermissionDeniedError) and caplog.records[-1].levelno == logging.ERROR
    manager.close()
    with pytest.raises(PermissionDeniedError):
        broken("raise").save("a", {"x": 1})


def test_misuse_is_told(tmp_path: Path) -> None:
    layout = ItemSpec(layout=LayoutInfo(file_path="x.pt", serialization_format=TorchSerialization()))
    for config in (CheckpointManager.Config(finalize_callback=print), CheckpointManager.Config(items={"x": layout})):
        with pytest.raises(InvalidInputError, match="a commit has no files"):
            CasCheckpointManager(tmp_path / "repo", config)
    with pytest.raises(InvalidInputError, match="give 'warn' or 'raise'"):
        CasCheckpointManager(tmp_path / "repo", on_save_error="ignore")  # type: ignore[arg-type]
    manager = CasCheckpointManager(tmp_path / "repo", synchronous(items={"x": ItemSpec()}, default=None))
    with pytest.raises(InvalidInputError, match="'y'.* have no ItemSpec"):
        manager.save("a", {"x": 1, "y": 2})
    with pytest.raises(InvalidInputError, match="'x'.* are required"):
        manager.save("a", {})
    with pytest.raises(NotFoundError, match="was saved as this"):
        manager.load("a")
    manager.save("a", {"x": torch.ones(2)})
    with pytest.raises(MismatchError):
        manager.load("a", into={"x": torch.ones(3)})
    with pytest.raises(InvalidInputError, match="metadata_format"):
        manager.load("a", metadata_format=object)
    manager.close()
