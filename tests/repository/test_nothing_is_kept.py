"""What a verb was given, or returned, is kept by nobody once the caller lets go of it, without Python's collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cas_ckpt import Repository


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    """A repository with one commit on main; the collector is off."""
    with Repository.init(tmp_path / "repo", group=None) as opened:
        opened.commit({"w": torch.arange(1000.0)})
        gc.collect()
        gc.disable()
        try:
            yield opened
        finally:
            gc.enable()


def test_a_checkout_by_name_keeps_no_target(repo: Repository) -> None:
    target = {"w": torch.zeros(1000)}
    repo.checkout("main", into=target)
    kept = weakref.ref(target["w"])
    del target
    assert kept() is None


def test_a_load_by_name_keeps_nothing_that_it_returned(repo: Repository) -> None:
    loaded = repo.load("main")
    kept = weakref.ref(loaded["w"])
    del loaded
    assert kept() is None


def test_a_commit_keeps_nothing_of_the_state(repo: Repository) -> None:
    state = {"w": torch.ones(1000)}
    repo.commit(state)
    kept = weakref.ref(state["w"])
    del state
    assert kept() is None
