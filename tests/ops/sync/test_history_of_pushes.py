"""The log of a bucket that was only ever pushed to takes few requests, too."""

from __future__ import annotations

from pathlib import Path

import pytest

from cas_ckpt.core.handle import RepositoryHandle
from tests.builders import commit, new_repository, numbers
from tests.core.test_history_pages import cold
from tests.ops.sync.test_cost_of_sync import Far, push


def steps(far: Far, most: int) -> list[int | None]:
    repo, store = cold(far.bucket)
    with repo:
        found = [each.step for each in repo.log()]
        assert repo.read("main", "w")[0] == pytest.approx(numbers(50, seed=len(found) - 1)[0])
    assert store.requests <= most, store.asked
    return found


def more(ours: RepositoryHandle, number: int) -> None:
    commit(ours, {"w": numbers(50, seed=number), "big": numbers(5000, seed=number % 3)}, step=number)


def test_of_one_push_of_many_commits(tmp_path: Path) -> None:
    ours, far = new_repository(tmp_path / "ours"), Far(tmp_path)
    for number in range(200):
        more(ours, number)
    push(ours, far)
    assert steps(far, 10) == list(range(199, -1, -1))


def test_of_many_pushes_of_one_commit(tmp_path: Path) -> None:
    ours, far = new_repository(tmp_path / "ours"), Far(tmp_path)
    for number in range(40):
        more(ours, number)
        push(ours, far)
    assert steps(far, 10) == list(range(39, -1, -1))


def test_of_pushes_of_several_commits(tmp_path: Path) -> None:
    ours, far = new_repository(tmp_path / "ours"), Far(tmp_path)
    for number in range(30):
        more(ours, number)
        if number % 5 == 4:
            push(ours, far)
    assert steps(far, 16) == list(range(29, -1, -1))
