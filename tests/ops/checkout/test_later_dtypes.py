"""A dtype that a later version stored: that entry needs the later version, and nothing else does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cas_ckpt import Repository
from cas_ckpt.errors import UnsupportedVersionError
from cas_ckpt.objects.spec import DTYPE_BYTES, Spec
from cas_ckpt.objects.state import TensorItem
from tests.builders import ArrayMemory, commit, new_repository, numbers, same_bytes

LATER = "float31_later"
SIZES = {"small": 7, "large": 5000, "many chunks": 3_000_000}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two commits with tensors of a dtype that is forgotten again."""
    handle = new_repository(tmp_path / "repo")
    with monkeypatch.context() as later:
        later.setitem(DTYPE_BYTES, LATER, 4)
        for seed in (1, 2):
            items: dict[str, Any] = {"known": numbers(900, seed=seed), "value": seed}
            for name, size in SIZES.items():
                items[name] = TensorItem(Spec(LATER, (size,)), ArrayMemory(numbers(size, seed=seed)), "torch", None)
            commit(handle, items)
    handle.close()
    return tmp_path / "repo"


def test_other_entries_are_read(place: Path) -> None:
    with Repository.open(place) as repo:
        assert same_bytes(repo.load("main", keys="known")["known"], numbers(900, seed=2))
        assert repo.read("main", "value") == 2
        target = {"known": np.zeros(900, "float32"), "value": 0}
        repo.checkout("main~1", into=target, keys=["known", "value"])
        assert same_bytes(target["known"], numbers(900, seed=1))


@pytest.mark.parametrize("name", SIZES)
def test_the_entry_needs_a_newer_version_and_is_named(place: Path, name: str) -> None:
    with Repository.open(place) as repo:
        for work in (lambda: repo.read("main", name), lambda: repo.load("main", keys=name), repo.load):
            with pytest.raises(UnsupportedVersionError, match=LATER):
                work()
        with pytest.raises(UnsupportedVersionError, match=f"{name}.*{LATER}"):
            repo.read("main", name)


def test_what_does_not_decode_it_works(place: Path) -> None:
    with Repository.open(place) as repo:
        listed = {entry.key: entry for entry in repo.ls("main")}
        assert listed["large"].dtype == LATER and listed["large"].shape == (5000,) and listed["known"].num_bytes == 3600
        assert {entry.key for entry in repo.diff("main").changed} >= {"known", "value", *SIZES}
        assert repo.show("main").parts
        assert repo.fsck(read_data=True).ok
        repo.tag("v1", "main")
        assert repo.gc().dead_objects == 0
        assert repo.du(by="tensor", ref="main") and repo.commit_stats("main").usage.total_bytes > 0
        assert [info.id for info in repo.log(keys="large")] == [info.id for info in repo.log()]
        assert repo.commit({"known": numbers(900, seed=2)}).stats.num_new_chunks == 0
