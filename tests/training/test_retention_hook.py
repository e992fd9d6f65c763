"""The trainer's hook applies the policy now and then, on one rank, and never ends a training run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from cas_ckpt import InvalidInputError, Policy, Repository, RetentionHook
from cas_ckpt.core.config import POLICY_KEY


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with Repository.init(tmp_path / "repo") as repo:
        yield repo


def train(repo: Repository, hook: RetentionHook, *, commits: int) -> list[int]:
    """Commit so often; how many commits each call of the hook forgot, where it did anything."""
    reports = [hook(repo.commit({"step": step}, step=step)) for step in range(commits)]
    return [len(report.forgotten) for report in reports if report is not None]


def test_the_policy_is_applied_after_every_so_many_commits(repo: Repository) -> None:
    repo.set_policy(Policy(keep_last=2))
    hook = RetentionHook(repo, every_commits=3, gc=False)
    assert train(repo, hook, commits=10) == [1, 3, 3]
    assert hook.last_error is None and hook.last_report is not None
    assert len(repo.log()) == 10


def test_a_failure_is_told_and_training_goes_on(repo: Repository, caplog: pytest.LogCaptureFixture) -> None:
    hook = RetentionHook(repo, every_commits=1, gc=False)
    assert train(repo, hook, commits=2) == []
    assert isinstance(hook.last_error, InvalidInputError)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert "training goes on" in caplog.text and "has no policy" in caplog.text
    repo.set_policy(Policy(keep_last=1))
    assert train(repo, hook, commits=1) == [2]
    assert hook.last_error is None


def test_damage_that_nobody_thought_of_does_not_end_training_either(repo: Repository) -> None:
    repo.set_policy(Policy(keep_last=1))
    repo._handle.store.put(POLICY_KEY, b"")
    hook = RetentionHook(repo, every_commits=1, gc=False)
    assert train(repo, hook, commits=1) == []
    repo._handle.close()
    assert hook.run() is None and hook.last_error is not None


def test_errors_are_raised_if_that_is_wanted(repo: Repository) -> None:
    hook = RetentionHook(repo, every_commits=1, raise_errors=True)
    with pytest.raises(InvalidInputError, match="has no policy"):
        hook()


def test_only_rank_0_works(repo: Repository) -> None:
    repo.set_policy(Policy(keep_last=1))
    other = RetentionHook(repo, every_commits=1, gc=False, rank=1)
    assert train(repo, other, commits=3) == []
    assert train(repo, RetentionHook(repo, every_commits=1, gc=False, rank=0), commits=1) == [3]


def test_the_rank_is_that_of_torch_distributed(repo: Repository, tmp_path: Path) -> None:
    repo.set_policy(Policy(keep_last=1))
    hook = RetentionHook(repo, every_commits=1, gc=False)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        assert hook() is not None
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_an_impossible_interval_is_refused(repo: Repository, every: object) -> None:
    with pytest.raises(InvalidInputError, match="every_commits"):
        RetentionHook(repo, every_commits=every)  # type: ignore[arg-type]
