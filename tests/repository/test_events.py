"""Handlers of events: told of the end of each verb, and unable to change it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cas_ckpt import CommitInfo, Event, NotFoundError, PendingCommit, Repository, on_event

STATE = {"w": np.arange(100)}


@pytest.fixture
def events() -> Iterator[list[Event]]:
    seen: list[Event] = []
    remove = on_event(seen.append)
    yield seen
    remove()


def test_a_handler_is_told_of_each_verb_when_it_has_ended(tmp_path: Path, events: list[Event]) -> None:
    with Repository.init(tmp_path / "repo", group=None) as repo:
        made = repo.commit(STATE, step=3)
        with pytest.raises(NotFoundError) as raised:
            repo.checkout("nowhere", into={"w": np.zeros(100, int)})
        assert [(each.verb, each.repository) for each in events] == [("commit", repo.url), ("checkout", repo.url)]
        committed, failed = events
        assert committed.result is made and isinstance(made, CommitInfo) and committed.error is None
        assert failed.error is raised.value and failed.result is None
        assert all(0 < each.seconds < 100 for each in events)


def test_of_a_commit_in_the_background_it_is_told_when_it_is_made(tmp_path: Path, events: list[Event]) -> None:
    steps: list[int | None] = []
    with Repository.init(tmp_path / "repo", group=None) as repo:
        repo.commit_async(STATE, step=7)
        (event,) = events
        assert isinstance(event.result, PendingCommit)
        event.result.add_done_callback(lambda pending: steps.append(pending.result().step))
    assert steps == [7]


def test_a_clone_names_the_repository_that_was_made(tmp_path: Path, events: list[Event]) -> None:
    with Repository.init(tmp_path / "repo", group=None) as repo:
        repo.commit(STATE)
    with Repository.clone(tmp_path / "repo", tmp_path / "clone") as clone:
        assert [(each.verb, each.repository) for each in events][-1] == ("clone", clone.url)
    with pytest.raises(NotFoundError):
        Repository.clone(tmp_path / "nowhere", tmp_path / "other")
    assert (events[-1].verb, events[-1].repository) == ("clone", "")


def test_a_handler_that_fails_is_logged_and_others_are_told(
    tmp_path: Path, events: list[Event], caplog: pytest.LogCaptureFixture
) -> None:
    def fails(event: Event) -> None:
        raise ValueError("no connection")

    remove = on_event(fails)
    with Repository.init(tmp_path / "repo", group=None) as repo, caplog.at_level(logging.ERROR, "cas_ckpt"):
        made = repo.commit(STATE)
        remove()
        remove()  # twice is once
        assert repo.log()[0].id == made.id
    assert [each.verb for each in events] == ["commit", "log"]
    assert [record.getMessage() for record in caplog.records] == ["a handler of events failed at the end of commit"]
    assert "no connection" in caplog.text


@pytest.mark.slow
def test_packages_bring_handlers_to_processes_that_train(tmp_path: Path) -> None:
    """By entry points, as an installed package has them: one that works, and one that cannot be imported."""
    (tmp_path / "monitor.py").write_text("def told(event):\n    print(event.verb, event.error)\n")
    folder = tmp_path / "monitor-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: monitor\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[cas_ckpt.event_handlers]\na = monitor:told\nb = nothing_here:told\n")
    program = "from cas_ckpt import Repository\nwith Repository.init('repo', group=None) as repo: repo.commit({'x': 1})"
    place = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).resolve().parents[2]}"}

    def run(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
        folder.mkdir()
        return subprocess.run(
            [sys.executable, "-c", text], cwd=folder, env=place, capture_output=True, text=True, check=True
        )

    trained = run(f"import torch\n{program}", tmp_path / "trained")
    assert trained.stdout == "commit None\n"
    assert "the handler of events nothing_here:told cannot be imported" in trained.stderr
    assert run(program, tmp_path / "plain").stdout == ""
