"""What could not be opened, or was closed, holds no file of the repository open."""

from __future__ import annotations

import copy
import gc
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cas_ckpt import CkptError, Repository


def open_below(folder: Path) -> list[str]:
    """Files below `folder` that this process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return sorted(path for path in found if path.startswith(str(folder)))


REFUSED: dict[str, dict[str, Any]] = {
    "whom to trust": {"trust": ["nobody"]},
    "whom to trust, made if need be": {"trust": "nowhere/at/all", "create": True},
    "where the index is": {"index_url": "oracle://nowhere"},
}


@pytest.mark.parametrize("wrong", REFUSED.values(), ids=REFUSED)
def test_what_could_not_be_opened_holds_no_file_open(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with Repository.init(tmp_path / "repo", group=None) as repo:
        repo.commit({"w": np.arange(5000)})
    with pytest.raises(CkptError) as caught:
        Repository.open(tmp_path / "repo", group=None, **wrong)
    assert open_below(tmp_path) == []
    assert caught.value  # and with it whatever the call had at hand


def test_a_bundle_that_was_made_and_taken_holds_no_file_open(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "repo", group=None) as repo:
        repo.commit({"w": np.arange(5000)})
        repo.create_bundle(tmp_path / "one.bundle", ["main"])
        repo.verify_bundle(tmp_path / "one.bundle")
    assert open_below(tmp_path) == []


def averaged(repo: Repository) -> object:
    module = torch.nn.Linear(2, 2)
    module.checkpoints = repo  # type: ignore[assignment]
    return torch.optim.swa_utils.AveragedModel(module)


COPIES: dict[str, Callable[[Any], object]] = {
    "copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickle.dumps, "a module's": averaged,
}  # fmt: skip


@pytest.mark.parametrize("made", COPIES.values(), ids=COPIES)
def test_a_copy_is_refused_and_what_there_was_of_it_closes_nothing(
    tmp_path: Path, made: Callable[[Any], object]
) -> None:
    with Repository.init(tmp_path / "repo", group=None) as repo:
        pending = repo.commit_async({"w": np.arange(50_000)})
        pending.result()
        repo.load("HEAD")
        before = open_below(tmp_path)
        assert any("packs" in path for path in before)
        handle = repo._handle
        for owner in (repo, handle, handle.store, handle.index, handle.index._database.open_lock, pending):
            with pytest.raises(TypeError, match=f"a {type(owner).__name__} is neither copied nor pickled"):
                made(owner)
        gc.collect()
        assert open_below(tmp_path) == before
