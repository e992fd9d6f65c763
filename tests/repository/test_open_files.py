"""What could not be opened, or was closed, holds no file of the repository open."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
