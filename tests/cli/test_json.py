"""--json: one name for one thing, whatever verb says it; errors are JSON too."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cas_ckpt import Repository
from tests.cli.running import call, command, environment
from tests.docs.json_page import VERBS, make

IDS = {
    "commit_id", "old_commit_id", "new_commit_id", "first_commit_id", "last_commit_id", "parent_ids", "target_id",
    "commit_ids", "kept_commit_ids", "forgotten_commit_ids", "prerequisite_ids",
}  # fmt: skip
"""Fields whose values are ids of commits."""

BY_NAME = {"branches", "tags", "pins", "remote_branches", "refs", "existing"}
"""Fields that hold an object from names to ids of commits."""

WORDS = [*VERBS, ["log", "--all"], ["branch", "-a"], ["merge-base", "main", "ft"], ["nearest", "ft"]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("json") / "repo"
    make(path)
    return path


def named(value: Any, field: str = "", holder: str = "") -> Iterator[tuple[str, str, str]]:
    """(value, its field, the field of the object that it is in) of every text."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from named(each, key, field)
    elif isinstance(value, list):
        for each in value:
            yield from named(each, field, holder)
    elif isinstance(value, str):
        yield value, field, holder


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_an_id_of_a_commit_is_called_so_by_every_verb(place: Path, words: list[str]) -> None:
    with Repository.open(place) as repo:
        commits = {commit.id for commit in repo.log(all_refs=True)}
    ran = call("-C", place, "--json", *words, cwd=place)
    assert (ran.code, ran.err) == (0, "")
    if words[0] == "merge-base":
        assert set(ran.json) <= commits
        return
    by_name = BY_NAME | {""} if words[0] in ("branch", "tag", "ls-remote") else BY_NAME
    wrong = [(field, holder) for value, field, holder in named(ran.json)
             if value in commits and field not in IDS and holder not in by_name]  # fmt: skip
    assert wrong == []


def test_an_error_is_an_object_on_standard_error(place: Path) -> None:
    ran = call("-C", place, "--json", "show", "mian")
    assert (ran.code, ran.out) == (15, "")
    told = json.loads(ran.err)
    assert (told["error"], told["exit_code"]) == ("NotFoundError", 15)
    assert "did you mean 'main'" in told["message"]
    assert told.keys() == {"error", "message", "exit_code"}
    assert "Traceback" in json.loads(call("-C", place, "--json", "--debug", "show", "mian").err)["traceback"][0]


@pytest.mark.parametrize("words", [["lgo", "--json"], ["--json", "log", "--nothing"], ["log", "-n", "x", "--json"]],
                         ids=str)  # fmt: skip
def test_what_cannot_be_parsed_is_an_object_too(place: Path, words: list[str]) -> None:
    ran = call("-C", place, *words)
    assert (ran.code, json.loads(ran.err)["exit_code"]) == (2, 2)


def test_an_interrupt_is_an_object_too(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "here") as repo:
        repo.commit({"x": 1})
        repo.add_remote("there", tmp_path / "there")
    Repository.init(tmp_path / "there").close()
    child = subprocess.Popen(
        command("-C", tmp_path / "here", "--json", "watch", "--push", "there"), env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None and child.stderr is not None
    child.stdout.readline()  # it has pushed, and waits
    child.send_signal(signal.SIGINT)
    with child.stdout, child.stderr:
        assert json.loads(child.stderr.read()) == {"error": "interrupted", "message": "interrupted", "exit_code": 130}
    assert child.wait() == 130
