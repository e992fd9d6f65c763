"""What people see on a terminal: lines that fit, a pager, colours, summaries."""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path

import pytest

from cas_ckpt import Repository
from cas_ckpt.cli.log import line_of
from cas_ckpt.ops.retention.policy import Policy
from tests.builders import commit, new_repository
from tests.cli.running import command, environment, ok

WIDTH = 60


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty commits with long messages."""
    folder = tmp_path_factory.mktemp("terminal") / "repo"
    handle = new_repository(folder)
    for number in range(30):
        loss = 1.0 + number * 1e-9
        commit(handle, {"x": number}, message=f"number {number} {'x' * 200}", step=number, metrics={"loss": loss})
    handle.close()
    return folder


def on_a_terminal(*words: str | Path, **env: str) -> str:
    """What `cas-ckpt WORDS` writes to a terminal of 60 columns."""
    ours, theirs = pty.openpty()
    env = environment(COLUMNS=str(WIDTH), LINES="24", TERM="xterm", **env)
    process = subprocess.Popen(command(*words), stdout=theirs, stderr=theirs, stdin=theirs, env=env)
    os.close(theirs)
    written = b""
    try:
        while block := os.read(ours, 1 << 16):
            written += block
    except OSError:
        pass  # how Linux says that nobody has the terminal open any more
    finally:
        os.close(ours)
    assert process.wait(timeout=60) == 0, written
    return written.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("words", [["log", "--oneline"], ["log", "--graph"], ["metrics"], ["best", "loss", "-n", "5"],
                                   ["reflog"], ["forget", "-n", "--keep-last", "3"]], ids=" ".join)  # fmt: skip
def test_a_commit_is_one_line_of_the_terminal(place: Path, words: list[str]) -> None:
    lines = on_a_terminal("-C", place, *words, PAGER="cat", NO_COLOR="1").splitlines()
    rows = [line for line in lines if "commits kept" not in line]
    assert len(rows) > 3 and max(map(len, rows)) <= WIDTH


def test_nothing_is_cut_where_no_terminal_reads(place: Path) -> None:
    assert max(map(len, ok("-C", place, "log", "--oneline").splitlines())) > 200


def test_a_cut_keeps_colours_out_of_its_count(place: Path) -> None:
    with Repository.open(place) as repo:
        info = repo.log(limit=1)[0]
    plain = line_of(info, ["main"], width=40)
    assert len(plain) == 40 and plain.endswith("…") and "(main)" in plain
    coloured = line_of(info, ["main"], width=40, colour=True)
    assert coloured.startswith("\x1b[33m") and len(coloured) > 40 and coloured.endswith("…")
    assert on_a_terminal("-C", place, "log", "--oneline", PAGER="cat").startswith("\x1b[33m")


def test_long_output_goes_through_the_pager_of_a_terminal(place: Path, tmp_path: Path) -> None:
    seen, pager = tmp_path / "seen", tmp_path / "pager"  # click 8.1 takes a program, and no arguments of it
    pager.write_text(f"#!/bin/sh\nexec tee {seen}\n")
    pager.chmod(0o700)
    on_a_terminal("-C", place, "log", PAGER=str(pager))
    assert seen.read_text().count("Author:") == 30
    seen.unlink()
    on_a_terminal("-C", place, "--no-pager", "log", PAGER=str(pager))
    on_a_terminal("-C", place, "log", "--json", PAGER=str(pager))
    ok("-C", place, "log", PAGER=str(pager))
    assert not seen.exists()


def test_forget_lists_ten_of_each_kind_and_all_if_asked(place: Path) -> None:
    words = ("-C", place, "forget", "-n", "--keep-last", "12")
    lines = ok(*words).splitlines()
    assert len(lines) < 30 and "  and 2 more (--long lists all)" in lines and "  and 8 more (--long lists all)" in lines
    assert sum("number " in line for line in ok(*words, "--long").splitlines()) == 30


def test_the_best_commits_have_headings(place: Path) -> None:
    lines = ok("-C", place, "best", "loss").splitlines()
    assert lines[0].split() == ["commit", "step", "loss", "message"] and "number 0" in lines[1]


def test_a_difference_is_shown_in_as_many_digits_as_it_takes(place: Path) -> None:
    assert "metrics/loss: 1.000000028 -> 1.000000029" in ok("-C", place, "diff")


def test_reports_have_a_repr_that_fits_on_a_screen(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "repo") as repo:
        for number in range(40):
            repo.commit({f"k{key}": number for key in range(100)}, step=number, message="long " * 50)
        reports = [repo.diff("main"), repo.forget(Policy(keep_last=2)), repo.fsck(), repo.gc(), repo.show()]
        for report in [*reports, repo.log()[0], repo.lineage("main"), repo.freed("main~20")]:
            assert len(repr(report)) < 1000, repr(report)
        assert repr(repo.log()[0]).startswith(f"CommitInfo({repo.log()[0].short_id}, step=39, message='long ")
