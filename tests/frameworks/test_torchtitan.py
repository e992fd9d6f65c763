"""torchtitan's Trainer with a `CasCheckpointManager`: what is killed goes on as if it had not been."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan")

from cas_ckpt import CommitInfo, Repository
from tests.frameworks import torchtitan_cases as cases
from tests.frameworks.torchtitan_cases import STEPS
from tests.ranks import Outcome, results, run_processes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # those of the framework
]


def run(folder: Path, *, size: int = 1, kill_at: tuple[int, str | None] | None = None, **given: Any) -> list[Outcome]:
    hanging = () if kill_at is None else range(1, size)
    return run_processes(size, f"{cases.__name__}:train", str(folder), kill_at, given, hanging=hanging)


def train(folder: Path, *, size: int = 1, **given: Any) -> list[CommitInfo]:
    commits: list[CommitInfo] = results(run(folder, size=size, **given))[0]
    return commits


def kill(folder: Path, step: int, path: str | None = None, **given: Any) -> int | None:
    """Train until rank 0 is killed; the step of the newest commit."""
    assert run(folder, kill_at=(step, path), **given)[0].exit_code == -signal.SIGKILL
    with Repository.open(folder / "ckpts", group=None) as repository:
        newest = repository.latest()
        return newest.step if newest else None


def roots(commits: list[CommitInfo]) -> list[tuple[int | None, str]]:
    return [(each.step, each.root) for each in commits]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[CommitInfo]:
    return train(tmp_path_factory.mktemp("uninterrupted"))


# ------------------------------------------------------------ resuming


@pytest.mark.parametrize("step", [3, 6])
def test_a_training_that_is_killed_between_saves_goes_on_exactly(
    tmp_path: Path, uninterrupted: list[CommitInfo], step: int
) -> None:
    assert kill(tmp_path, step) == 2 * ((step - 1) // 2)
    commits = train(tmp_path)
    assert roots(commits) == roots(uninterrupted)
    assert [each.step for each in commits] == [STEPS, 6, 4, 2]


@pytest.mark.parametrize("path", [".data", ".meta", "refs/heads"])  # before the pack, the commit and the ref are there
def test_a_training_that_is_killed_inside_a_save_goes_on_exactly(
    tmp_path: Path, uninterrupted: list[CommitInfo], path: str
) -> None:
    assert kill(tmp_path, 6, path) == 4
    assert roots(train(tmp_path)) == roots(uninterrupted)
