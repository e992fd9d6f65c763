"""Whoever mistypes, or knows git or restic, is told what is meant here; nothing found is no failure."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cas_ckpt import NotFoundError, Repository
from cas_ckpt.cli.command import OTHER_NAMES
from cas_ckpt.cli.main import PLACES, main
from tests.cli.running import Ran, call, ok


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mistyped") / "repo"
    with Repository.init(path) as repo:
        state = {"model": {"weight": np.zeros(4000), "bias": 1}, **{f"part{at:03}": at for at in range(300)}}
        repo.commit(state, metrics={"loss": 1.0})
        repo.branch("ft-math")
    return path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lgo"], "there is no verb 'lgo' (did you mean 'log'?): see cas-ckpt --help"),
        (["remote", "lst"], "there is no verb 'lst' (did you mean 'list'?): see cas-ckpt remote --help"),
        (["check"], "there is no verb 'check': see cas-ckpt fsck"),
        (["prune"], "there is no verb 'prune': see cas-ckpt forget, and cas-ckpt gc"),
        (["snapshots"], "there is no verb 'snapshots': see cas-ckpt log"),
        (["log", "--onelin"], "--oneline"),
        (["log", "mian"], "(did you mean 'main'?)"),
        (["show", "ft-maths"], "(did you mean 'ft-math'?)"),
        (["unique", "ft-maths"], "(did you mean 'ft-math'?)"),
        (["reflog", "mian"], "(did you mean 'main'?)"),
        (["best", "los"], "(did you mean 'loss'?)"),
        (["read", "main", "model/wieght"], "(did you mean 'model/weight'?) (model is there)"),
        (["read", "main", "part_280"], "(did you mean 'part280'?)"),
    ],
)
def test_what_is_mistyped_is_answered_with_what_is_similar(place: Path, words: list[str], said: str) -> None:
    ran = call("-C", place, *words)
    assert said in ran.err
    assert ran.err.count("\n") == 1
    assert ran.code in (2, 15)


def test_what_resembles_nothing_is_answered_without_a_guess(place: Path) -> None:
    assert "did you mean" not in call("-C", place, "log", "zzzz").err
    assert "did you mean" not in call("xyzzy").err


def test_a_live_state_has_the_same_answers(place: Path) -> None:
    with (
        Repository.open(place, read_only=True) as repo,
        pytest.raises(NotFoundError, match="did you mean 'model/bias'"),
    ):
        repo.load("main", keys="model/bais")


def test_a_deleted_branch_is_not_what_was_meant(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "r") as repo:
        repo.commit({"x": 1})
        repo.branch("trunk")
        repo.delete_branch("trunk", force=True)
        with pytest.raises(NotFoundError, match="no branch, tag or commit 'trunks': see"):
            repo.resolve("trunks")


def test_names_of_git_and_restic_are_none_of_ours() -> None:
    assert [name for name in OTHER_NAMES if name in PLACES] == []


@pytest.mark.parametrize("words", [[], ["policy"], ["bundle"], ["cache"], ["store"], ["signers"], ["index"]], ids=str)
def test_a_group_by_itself_prints_its_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("Usage: ")
    assert "\nCommands:\n" in printed.out or not words
    assert printed.err == ""


def test_remote_by_itself_lists_the_remotes_as_git_does(place: Path, tmp_path: Path) -> None:
    ok("-C", place, "remote", "add", "usb", tmp_path / "usb")
    assert ok("-C", place, "remote", "-v") == ok("-C", place, "remote") == ok("-C", place, "remote", "list") != ""


@pytest.mark.parametrize("words", [["-h"], ["log", "-h"], ["remote", "add", "-h"]], ids=" ".join)
def test_the_short_option_of_help_is_understood(words: list[str]) -> None:
    assert ok(*words).startswith("Usage: ")


@pytest.mark.parametrize(
    "path", ["models/Llama", "model.safetensors", "state.pt"], ids=["folder", "safetensors", "torch"]
)
def test_a_path_that_is_not_there_is_called_missing(place: Path, tmp_path: Path, path: str) -> None:
    ran = call("-C", place, "import", tmp_path / path, "--branch", "new")
    assert ran == Ran(2, "", f"cas-ckpt: error: {tmp_path / path}: No such file or folder\n")


NOTHING_THERE = (
    ["find", "zzz"], ["find", "--commits", "zzz"], ["log", "-k", "zzz"], ["tag"], ["pin"], ["restores", "main"],
)  # fmt: skip


@pytest.mark.parametrize("words", NOTHING_THERE, ids=" ".join)
def test_a_list_of_nothing_prints_nothing_and_ends_well(place: Path, words: list[str]) -> None:
    ran = call("-C", place, *words)
    assert (ran.code, ran.out) == (0, "")
    assert call("--json", "-C", place, *words).json in ([], {})
