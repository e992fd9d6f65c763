"""`commit_async` commits the state of the moment of the call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from cas_ckpt import CommitOptions, InvalidInputError, Repository, RNGState, StateDict
from cas_ckpt.errors import BackgroundCommitError, ConflictError, UnsupportedValueError

_NUMBERS = count()


@pytest.fixture
def repo() -> Iterator[Repository]:
    with Repository.init(f"memory://async-{next(_NUMBERS)}") as made:
        yield made


def training(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(200, 300), torch.nn.Linear(300, 200))
    optim = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(4, 200)).square().mean().backward()
    optim.step()
    return {"model": model, "optim": optim, "progress": StateDict(step=0), "rng": RNGState(), "log": [1, {"a": 2}]}


def spoil(state: dict[str, Any]) -> None:
    with torch.no_grad():
        for tensor in (*state["model"].parameters(), *(t for s in state["optim"].state.values() for t in s.values())):
            tensor.fill_(-1.0)
    state["progress"]["step"] = 99
    state["log"][1]["a"] = 3
    torch.manual_seed(77)


@pytest.mark.parametrize("staging_bytes", [None, 1 << 30, 300_000, 0])
def test_the_commit_is_the_state_at_the_call(repo: Repository, staging_bytes: int | None) -> None:
    with Repository.init(f"memory://async-{next(_NUMBERS)}") as other:
        wanted = other.commit(training(3)).root
    state = training(3)
    pending = repo.commit_async(state, step=5, message="soon", options=CommitOptions(staging_bytes=staging_bytes))
    assert pending.staged
    spoil(state)
    made = pending.result()
    assert (made.root, made.step, made.message) == (wanted, 5, "soon")
    assert pending.done()
    assert pending.exception() is None
    progress = pending.progress
    assert progress.staged_bytes == progress.total_bytes > 0
    assert repo.head.commit == made.id
    repo.checkout("main", into=state)
    assert repo.commit(state).root == wanted


def test_commits_land_in_the_order_of_the_calls(repo: Repository) -> None:
    state = {"w": torch.zeros(300, 300)}
    made = []
    for step in range(6):
        state["w"].fill_(step)
        if step == 3:
            made.append(repo.commit(state, step=step))
        else:
            made.append(repo.commit_async(state, step=step, options=CommitOptions(max_in_flight=4)))
    assert repo.drain()
    assert [each.step for each in repo.log("main")] == [5, 4, 3, 2, 1, 0]
    for step in range(6):
        assert repo.load(f"step:{step}")["w"][0, 0].item() == step


def test_what_cannot_be_expressed_is_raised_by_the_call(repo: Repository) -> None:
    with pytest.raises(UnsupportedValueError, match="deep/x"):
        repo.commit_async({"deep": {"x": object()}, "w": torch.zeros(9)})
    with pytest.raises(InvalidInputError, match="snapshot"):
        repo.commit_async({}, snapshot="now")
    assert repo.latest() is None


def test_a_failure_is_raised_by_the_result_and_then_no_more(repo: Repository, caplog: pytest.LogCaptureFixture) -> None:
    state = {"w": torch.ones(400)}
    repo.commit(state)
    with Repository.open(repo.url) as other:
        other.checkout("main", into=state)
        other.commit(state, step=2)
    pending = repo.commit_async(state, options=CommitOptions(on_conflict="raise"))
    with pytest.raises(ConflictError):
        pending.result()
    assert "failed: ConflictError" in caplog.text
    repo.commit(state, branch="again")


def test_a_failure_that_nobody_asked_for_is_raised_by_the_next_commit_once(repo: Repository) -> None:
    state = {"w": torch.ones(400)}
    first = repo.commit(state)
    for verb in (repo.commit, repo.commit_async):
        with Repository.open(repo.url) as other:
            other.checkout("main", into=state)
            other.commit(state, step=2)
        repo.commit_async(state, options=CommitOptions(on_conflict="raise"))
        with pytest.raises(BackgroundCommitError, match="ConflictError") as found:
            verb(state, branch="again")
        assert isinstance(found.value.__cause__, ConflictError)
        repo.checkout("main", into=state)
    assert first.id != repo.latest("main").id  # type: ignore[union-attr]


def test_close_raises_what_nobody_asked_for() -> None:
    repo = Repository.init(f"memory://async-{next(_NUMBERS)}")
    state = {"w": torch.ones(400)}
    repo.commit(state)
    with Repository.open(repo.url) as other:
        other.checkout("main", into=state)
        other.commit(state, step=2)
    repo.commit_async(state, options=CommitOptions(on_conflict="raise"))
    with pytest.raises(BackgroundCommitError, match="ConflictError"):
        repo.close()
    repo.close()


def test_close_waits_for_what_is_pending(tmp_path: Any) -> None:
    with Repository.init(tmp_path / "repo") as repo:
        state = {"w": torch.ones(1000, 1000), "a": np.arange(5000)}
        repo.commit_async(state, step=3)
    with Repository.open(tmp_path / "repo") as repo:
        assert repo.latest().step == 3  # type: ignore[union-attr]


def test_a_callback_hears_of_the_end_and_may_not_wait_for_itself(repo: Repository) -> None:
    heard: list[Any] = []
    go = threading.Event()

    def callback(pending: Any) -> None:
        go.wait(30)
        heard.append(pending.result().step)
        try:
            repo.commit({"w": torch.zeros(3)})
        except InvalidInputError as error:
            heard.append(str(error))
        raise ValueError("from the callback")

    pending = repo.commit_async({"w": torch.ones(400)}, step=4)
    pending.add_done_callback(callback)
    go.set()
    repo.drain()
    assert heard[0] == 4
    if len(heard) > 1:
        assert "callback" in heard[1]
