"""An export or a bundle whose process is killed leaves nothing beside its place."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cas_ckpt import Repository
from cas_ckpt.storage import disk
from tests.processes import Forked


class Killing:
    """Shows nothing, and ends the process once something was written."""

    def start(self, phase: str, total_bytes: int | None) -> None:
        pass

    def advance(self, num_bytes: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def finish(self) -> None:
        pass


WRITTEN: dict[str, tuple[str, dict[str, Any]]] = {
    "one file": ("out.safetensors", {}),
    "shards": ("out", {"max_shard_bytes": 1 << 20}),
    "in the place of another": ("out.safetensors", {"force": True}),
    "dcp": ("out", {"format": "dcp"}),
    "bundle": ("out.bundle", {}),
}


def write(repo: Repository, place: Path, how: dict[str, Any], progress: Any) -> None:
    if place.suffix == ".bundle":
        repo.create_bundle(place, ["main"], progress=progress, **how)
    else:
        repo.export("main", place, progress=progress, **how)


def _write_until_killed(path: Path, place: Path, how: dict[str, Any]) -> None:
    with Repository.open(path, group=None) as repo:
        write(repo, place, how, Killing())


@pytest.mark.parametrize(("name", "how"), WRITTEN.values(), ids=WRITTEN)
def test_what_was_killed_while_it_wrote_leaves_no_file(tmp_path: Path, name: str, how: dict[str, Any]) -> None:
    place = tmp_path / "there" / name
    place.parent.mkdir()
    with Repository.init(tmp_path / "repo", group=None) as repo:
        repo.commit({"model": {str(n): torch.from_numpy(np.arange(n, n + 400_000)) for n in range(4)}})
        with Forked(_write_until_killed, tmp_path / "repo", place, how) as process:
            assert process.wait(timeout=60) == -signal.SIGKILL
        assert [path for path in place.parent.rglob("*") if path.is_file()] == []
        write(repo, place, {**how, "force": True} if place.is_dir() else how, False)
        assert place.exists()


@pytest.mark.parametrize(("name", "how"), WRITTEN.values(), ids=WRITTEN)
def test_where_every_file_has_a_name_it_is_taken_away_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, how: dict[str, Any]
) -> None:
    monkeypatch.setattr(disk, "_OPEN_FILES", str(tmp_path / "nowhere"))  # as on a system without /proc
    place = tmp_path / "there" / name
    place.parent.mkdir()
    with Repository.init(tmp_path / "repo", group=None) as repo:
        repo.commit({"model": {str(n): torch.from_numpy(np.arange(n, n + 400_000)) for n in range(4)}})
        write(repo, place, how, False)
    assert not list(place.parent.rglob("*.tmp"))
    assert place.exists()


@pytest.mark.parametrize("end", [".safetensors", ".bundle"])
def test_a_name_as_long_as_the_system_takes_is_written_in_the_place_of_another(tmp_path: Path, end: str) -> None:
    place = tmp_path / ("é" * ((255 - len(end)) // 2) + end)
    place.write_bytes(b"another")
    with Repository.init(tmp_path / "repo", group=None) as repo:
        repo.commit({"model": {"w": torch.ones(3)}})
        write(repo, place, {"force": True}, False)
    assert place.read_bytes() != b"another"
    assert len(list(tmp_path.iterdir())) == 2
