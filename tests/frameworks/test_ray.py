"""ray.train: workers that are killed resume exactly; what else `CasCheckpoints` does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

import ray.train
import ray.train.torch
import torch

from cas_ckpt import InvalidInputError, NotFoundError, PermissionDeniedError, Repository
from cas_ckpt.integrations.ray import COMMIT, RUN, CasCheckpoints

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # those of the framework
]

ROOT = Path(__file__).resolve().parents[2]
QUIET = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2"}


def test_workers_that_are_killed_inside_and_between_commits_resume_exactly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.frameworks.ray_cases", str(tmp_path)]
    ran = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **QUIET, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "in a commit").exists() and (tmp_path / "between commits").exists()
    roots = []
    for name in ("whole", "killed"):
        with Repository.open(tmp_path / name / "runs" / "ckpts") as repository:
            commits = repository.log()
            assert [each.step for each in commits] == [20, 15, 10, 5]
            assert [each.forgotten for each in commits] == [False, False, False, True]  # Ray keeps two, one is new
            assert commits[0].id in ran.stdout and repository.fsck(read_data=True).ok
            roots.append([each.root for each in commits])
    assert roots[0] == roots[1]


# ------------------------------------------------------------ in this process, as Ray's local mode has it


def fit(function: Callable[[], None]) -> Any:
    """What Ray gives for a trainer without worker processes, which calls `function` here."""
    scaling = ray.train.ScalingConfig(num_workers=0)
    return ray.train.torch.TorchTrainer(lambda config: function(), scaling_config=scaling).fit()


def checkpoint_of(folder: Path, metadata: dict[str, Any]) -> Callable[[], Any]:
    """As `ray.train.get_checkpoint`."""
    folder.mkdir()
    checkpoint = ray.train.Checkpoint.from_directory(folder)
    checkpoint.set_metadata(metadata)
    return lambda: checkpoint


def test_it_resumes_what_ray_knows_and_a_commit_that_ray_does_not_know_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"x": torch.zeros(3)}

    def first() -> None:
        checkpoints = CasCheckpoints(tmp_path / "repo", branch="runs")
        assert checkpoints.resume(state) is None
        for step in (1, 2):
            state["x"] += 1
            checkpoints.report({"loss": step, "kind": "text"}, state, step)
        checkpoints.repository.close()

    def second() -> None:
        checkpoints, live = CasCheckpoints(tmp_path / "repo", branch="runs"), state["x"]
        assert checkpoints.resume(state) == 1 and state["x"] is live and live.tolist() == [1, 1, 1]
        checkpoints.report({"loss": 3}, state, 3)
        checkpoints.report({"loss": 4}, state, 4)
        checkpoints.repository.close()

    assert fit(first).metrics == {"loss": 2, "kind": "text"}
    with Repository.open(tmp_path / "repo") as repository:
        unknown, known = repository.log("runs")
        assert [each.metrics for each in (unknown, known)] == [{"loss": 2}, {"loss": 1}]
        monkeypatch.setattr(ray.train, "get_checkpoint", checkpoint_of(tmp_path / "a", {COMMIT: known.id}))
        fit(second)
        newest, other, *_ = repository.log("runs")
        assert repository.log("runs") == [newest, other, unknown, known] and not unknown.forgotten
        assert {each.meta[RUN] for each in repository.log("runs")} == {known.meta[RUN]}
        (origin,) = repository.lineage(other).origins
        assert (origin.kind, origin.target) == ("continued-from", known.id) and not repository.lineage(known).origins


def test_what_ray_has_deleted_is_forgotten_of_this_training_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []

    def reported(mode: Any) -> list[Any]:
        return [SimpleNamespace(checkpoint=SimpleNamespace(path=f"/runs/{each.id}")) for each in kept]

    def train() -> None:
        checkpoints = CasCheckpoints(tmp_path / "repo")
        for step in range(4):
            checkpoints.report({}, {"x": step}, step)
            assert checkpoints.last_commit is not None
            kept[:] = [*kept, checkpoints.last_commit][-2:]
        checkpoints.repository.close()

    monkeypatch.setattr(ray.train, "get_all_reported_checkpoints", reported)
    fit(train)
    with Repository.open(tmp_path / "repo") as repository:
        assert [each.forgotten for each in repository.log()] == [False, False, False, True]
        fit(train)
        assert [each.forgotten for each in repository.log()] == [False, False, False, True] * 2


@pytest.mark.parametrize("way", ["warn", "raise"])
def test_a_save_that_fails_is_reported_without_a_checkpoint_or_raised(
    tmp_path: Path, way: Any, caplog: pytest.LogCaptureFixture
) -> None:
    Repository.init(tmp_path / "repo").close()

    def train() -> None:
        with Repository.open(tmp_path / "repo", read_only=True) as repository:
            checkpoints = CasCheckpoints(repository, on_save_error=way)
            checkpoints.report({"loss": 1}, {"x": 1}, 1)
            assert isinstance(checkpoints.last_error, PermissionDeniedError) and checkpoints.last_commit is None

    if way == "raise":
        with pytest.raises(PermissionDeniedError):
            fit(train)
        return
    result = fit(train)
    assert result.metrics == {"loss": 1} and result.checkpoint is None
    assert "training goes on" in caplog.text


def test_misuse_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened() -> None:
        CasCheckpoints("runs/ckpts")

    def resumed() -> None:
        with Repository.open(tmp_path / "repo", create=True) as repository:
            CasCheckpoints(repository).resume({"x": torch.zeros(3)})

    def misspelt() -> None:
        CasCheckpoints(tmp_path / "repo", on_save_error="ignore")  # type: ignore[arg-type]

    with pytest.raises(InvalidInputError, match="'runs/ckpts' is in the folder of this Ray session"):
        fit(opened)
    with pytest.raises(InvalidInputError, match="give 'warn' or 'raise'"):
        fit(misspelt)
    monkeypatch.setattr(ray.train, "get_checkpoint", checkpoint_of(tmp_path / "a", {}))
    with pytest.raises(InvalidInputError, match="names no commit"):
        fit(resumed)
    monkeypatch.setattr(ray.train, "get_checkpoint", checkpoint_of(tmp_path / "b", {COMMIT: "ab" * 32}))
    with pytest.raises(NotFoundError, match="abababababab"):
        fit(resumed)
    context = SimpleNamespace(get_world_size=lambda: 2)
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    with pytest.raises(InvalidInputError, match="2 workers and 1 ranks"):
        fit(opened)
