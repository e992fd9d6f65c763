"""cas-ckpt restores, and what log, show and forget say of restores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cas_ckpt import Repository, StateDict
from cas_ckpt.errors import CorruptionError
from tests.cli.running import Ran, call, ok
from tests.ops.fsck.fsck_cases import flip


def state(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {"model": torch.nn.Linear(100, 100), "progress": StateDict(step=seed)}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Three commits; of the first two states only the first was restored whole."""
    with Repository.init(tmp_path / "repo") as repo:
        for seed in range(3):
            repo.commit(state(seed), message=f"c{seed}", step=seed)
        repo.load("main~2")
        repo.load("main~1", keys="model")
        repo.plan("main~2", "dp=1")
    return tmp_path / "repo"


def test_restores_are_listed_the_last_one_first(place: Path) -> None:
    assert [line.split()[-1] for line in ok("-C", place, "restores").splitlines()] == ["result", "part", "whole"]
    only = ok("-C", place, "restores", "main~2").splitlines()
    assert len(only) == 2
    assert only[1].split()[3:5] == ["load", "1"]
    assert len(ok("-C", place, "restores", "-n", "1").splitlines()) == 2
    assert call("-C", place, "restores", "main") == Ran(0, "", "no restores of main yet\n")
    found = call("-C", place, "restores", "--json").json
    assert [each["complete"] for each in found] == [False, True]
    assert found[1]["estimated_s"] > 0
    assert found[0]["estimated_s"] is None
    assert call("-C", place, "restores", "nowhere").code == 15


def test_a_checkout_into_a_file_is_one(place: Path, tmp_path: Path) -> None:
    ok("-C", place, "checkout", "main", "--to", tmp_path / "state.pt")
    last = call("-C", place, "restores", "main", "--json").json[0]
    assert (last["verb"], last["complete"], last["error"]) == ("load", True, None)


def test_what_failed_is_said_without_control_characters(place: Path) -> None:
    for pack in (place / "packs").rglob("*.data"):
        flip(pack, pack.stat().st_size // 2)
    with Repository.open(place) as repo, pytest.raises(CorruptionError):
        repo.load("main")
    shown = ok("-C", place, "restores", "main")
    assert "CorruptionError: " in shown
    assert shown.count("\n") == 2


def test_log_and_show_say_when_a_state_was_last_restored(place: Path) -> None:
    log = ok("-C", place, "log")
    assert log.count("Restored: ") == 1
    assert log.index("    c1") < log.index("Restored: ") < log.index("    c0")
    assert "Restored: " in ok("-C", place, "show", "main~2")
    assert "Restored: " not in ok("-C", place, "show", "main~1")
    times = [each["restored_s"] for each in call("-C", place, "log", "--json").json]
    assert times[:2] == [None, None]
    assert times[2] == call("-C", place, "restores", "main~2", "--json").json[0]["time_s"]
    assert call("-C", place, "show", "main~2", "--json").json["commit"]["restored_s"] == times[2]


def test_the_commit_that_was_restored_last_is_kept(place: Path) -> None:
    shown = ok("-C", place, "forget", "--keep-last-restored", "1")
    assert "last restored of main" in shown
    assert "2 commits kept, 1 forgotten" in shown
    kept = {each["message"]: each["forgotten"] for each in call("-C", place, "log", "--json").json}
    assert kept == {"c2": False, "c1": True, "c0": False}
    ok("-C", place, "policy", "set", "--keep-last-restored", "unlimited")
    assert "--keep-last-restored unlimited" in ok("-C", place, "policy", "show")
    assert call("-C", place, "policy", "show", "--json").json["default"] == {"keep_last_restored": -1}


def test_an_index_that_knows_of_no_restore_keeps_nothing_by_it(place: Path, tmp_path: Path) -> None:
    ran = call("-C", place, "--index", tmp_path / "other.sqlite", "forget", "--keep-last-restored", "1")
    assert (ran.code, ran.out) == (15, "")
    assert "keep_last_restored would keep nothing" in ran.err
    assert "c1" in ok("-C", place, "log", "--oneline")
