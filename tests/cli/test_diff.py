"""`cas-ckpt diff`: how two commits differ, as git would show it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from cas_ckpt import CommitOptions, Repository
from cas_ckpt.cli.command import Settings
from cas_ckpt.cli.main import cli
from tests.cli.running import call, ok

WEIGHT = torch.arange(3000.0).reshape(30, 100)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository that nobody changes: three commits on main, a tag at the first."""
    folder = tmp_path_factory.mktemp("diff") / "repo"
    first = {"model": {"w": WEIGHT, "b": torch.zeros(4), "old": torch.ones(700)}, "step": 1, "bad\n": 1}
    changed = WEIGHT.clone()
    changed[0, 0] = float("nan")
    changed[1] += 1
    model = {"w": changed, "b": torch.zeros(5), "new": torch.ones(700)}
    second = {"model": model, "step": 2, "bad\n": "\x1b[1m", "e": {}}
    with Repository.init(folder) as repo:
        repo.commit(
            first, message="first\n\nat length", step=1, metrics={"loss": 2.5}, options=CommitOptions(author="ann")
        )
        repo.tag("v1")
        repo.commit(
            second, message="second", step=2, metrics={"loss": 2.25, "acc": 0.5}, options=CommitOptions(author="ann")
        )
        repo.commit(second, message="same", step=2, options=CommitOptions(author="ann"))
    return folder


def ids(place: Path) -> list[str]:
    with Repository.open(place) as repo:
        return [commit.short_id for commit in repo.log()]


def test_a_diff_has_a_line_for_each_entry_and_one_for_all(place: Path) -> None:
    _, second, first = ids(place)
    assert ok("-C", place, "diff", "v1", "main~1").splitlines() == [
        f"--- {first} first",
        f"+++ {second} second",
        "step: 1 -> 2",
        r"message: first\x0a\x0aat length -> second",
        "metrics/loss: 2.5 -> 2.25",
        "metrics/acc: nothing -> 0.5",
        "",
        r"~ bad\x0a  1 -> '\x1b[1m'",
        "+ e  dict",
        "~ model/b  float32[4] -> float32[5], 20 B",
        "> model/new  from model/old",
        "~ model/w  float32[30, 100], 1 of 1 chunks, 12.0 KB",
        "~ step  1 -> 2",
        "1 added (0 B), 4 changed (1 of 1 chunks, 12.0 KB), 1 moved",
    ]


def test_revisions_can_be_given_in_all_the_ways_that_git_has(place: Path) -> None:
    wanted = ok("-C", place, "diff", "v1", "main")
    for words in (["v1..main"], ["v1.."], ["v1", "HEAD"]):
        assert ok("-C", place, "diff", *words) == wanted, words
    assert ok("-C", place, "diff", "main~1") == ok("-C", place, "diff", "v1", "main~1")
    assert ok("-C", place, "diff", "..v1") == ok("-C", place, "diff", "main", "v1")
    assert ok("-C", place, "diff") == ok("-C", place, "diff", "main~1", "main")
    assert "--- nothing\n" in ok("-C", place, "diff", "v1")
    assert call("-C", place, "diff", "v1...main").code == 2


def test_keys_limit_what_is_told(place: Path) -> None:
    keys = ["model/w", "step"]
    for words in (["v1", "main", *keys], ["v1..main", *keys], ["v1..main", "-k", "model/w", "-k", "step"]):
        lines = ok("-C", place, "diff", *words).splitlines()
        assert [line.split()[1] for line in lines if line[0:1] in "+-~>" and line[1:2] == " "] == keys, words
    missing = call("-C", place, "diff", "v1", "main", "modle")
    assert (missing.code, "no entry matches modle" in missing.err) == (15, True)


def test_sums_for_each_name_are_told_if_that_is_wanted(place: Path) -> None:
    lines = ok("-C", place, "diff", "v1", "main", "--stat").splitlines()
    assert [line.split() for line in lines[lines.index("") + 1 :]] == [
        ["name", "added", "removed", "changed", "moved", "chunks", "size"],
        [r"bad\x0a", "0", "0", "1", "0", "0/0", "5", "B"],
        ["e", "1", "0", "0", "0", "0/0", "0", "B"],
        ["model", "0", "0", "2", "1", "1/1", "12.0", "KB"],
        ["step", "0", "0", "1", "0", "0/0", "1", "B"],
        ["total", "1", "0", "4", "1", "1/1", "12.0", "KB"],
    ]


def test_numbers_are_told_below_their_tensors(place: Path) -> None:
    lines = ok("-C", place, "diff", "v1", "main", "--numbers").splitlines()
    below = {line.split()[1]: after.strip() for line, after in pairwise(lines) if after[:1] == " "}
    assert below["model/b"] == "no numbers: the shapes differ"
    assert below["model/w"].startswith("3.37 % of elements (101), |delta| max 1 mean 0.0333444, relative norm ")
    assert below["model/w"].endswith(", NaN 0 -> 1")


def test_a_diff_as_json_has_entries_chunks_numbers_and_sums(place: Path) -> None:
    found = json.loads(ok("-C", place, "diff", "v1", "main~1", "--json", "--numbers"))
    assert (found["before"]["message"], found["after"]["message"]) == ("first\n\nat length", "second")
    assert {"name": "step", "before": 1, "after": 2} in found["fields"]
    entries = {entry["key"]: entry for entry in found["entries"]}
    assert {key: entry["change"] for key, entry in entries.items()} == {
        "bad\n": "changed", "e": "added", "model/b": "changed", "model/new": "moved", "model/w": "changed",
        "step": "changed",
    }  # fmt: skip
    assert entries["model/w"]["chunks"]["runs"] == [[0, 1]]
    assert entries["model/w"]["numbers"]["changed_elements"] == 101
    assert entries["model/new"]["moved_from"] == "model/old"
    assert (entries["step"]["before"]["text"], entries["step"]["after"]["text"]) == ("1", "2")
    assert (found["sums"]["changed"], found["by_name"]["model"]["moved"]) == (4, 1)
    assert "entries" not in json.loads(ok("-C", place, "diff", "v1", "main", "--json", "--stat"))


def test_equal_states_have_no_lines_and_the_exit_code_can_tell(place: Path) -> None:
    assert ok("-C", place, "diff", "main~1", "main").splitlines()[-1] == "no entry differs"
    assert call("-C", place, "diff", "main~1", "main", "--exit-code").code == 0
    differ = call("-C", place, "diff", "v1", "main", "--exit-code", "--stat")
    assert (differ.code, differ.err) == (1, "")
    assert call("-C", place, "diff", "v1", "main").code == 0
    assert call("-C", place, "diff", "v1", "nobody").code == 15


def test_entries_are_coloured_on_a_terminal_only(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for colour in (True, False):
        with cli.make_context("x", ["diff", "v1", "main"], obj=Settings(repo=str(place), colour=colour)) as context:
            cli.invoke(context)
        text = capsys.readouterr().out
        assert ("\x1b[32m+ e\x1b[0m" in text, "\x1b[" in text) == (colour, colour)
