"""cas-ckpt fsck: what it prints, its exit codes, and that the printed commands work as they stand."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.cli.running import call, ok
from tests.ops.fsck.fsck_cases import build, copy_of, flip


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    build(tmp_path / "repo")
    return tmp_path / "repo"


def damage(repo: Path) -> Path:
    pack = max((repo / "packs").glob("*/*.data"), key=lambda one: one.stat().st_size)
    flip(pack, 100_000)
    return pack


def test_an_intact_repository_is_told_as_such(repo: Path) -> None:
    assert "no damage found" in ok("-C", repo, "fsck")
    assert "packs read whole" in ok("-C", repo, "fsck", "--read-data")
    assert ok("-C", repo, "fsck", "-q") == ""


def test_damage_is_named_and_the_printed_command_repairs_it(repo: Path, tmp_path: Path) -> None:
    copy = copy_of(repo, tmp_path / "copy")
    damage(repo)
    assert call("-C", repo, "fsck").code == 0
    ran = call("-C", repo, "fsck", "--read-data")
    assert ran.code == 13
    assert "LOST" in ran.out and "model/big" in ran.out and "branch main" in ran.out
    line = next(line for line in ran.out.splitlines() if line.strip().startswith("cas-ckpt "))
    words = [str(copy) if word == "OTHER" else word for word in shlex.split(line)[1:]]
    assert "would be repaired" in ok(*words, "-n")
    assert "repaired: chunks" in ok(*words)
    assert "no damage found" in ok("-C", repo, "fsck", "--read-data")


def test_json_has_everything(repo: Path) -> None:
    pack = damage(repo)
    found = call("-C", repo, "fsck", "--read-data", "--json").json
    assert found["ok"] is False
    problem = found["problems"][0]
    assert problem["where"] == str(pack.relative_to(repo))
    assert (problem["kind"], problem["effect"]) == ("entries", "lost")
    assert problem["hits"][0]["keys"] == ["model/big"]
    assert problem["repair"] == found["commands"][0]


def test_what_cannot_be_repaired_ends_with_code_3(repo: Path) -> None:
    damage(repo)
    call("-C", repo, "fsck", "--read-data")
    ran = call("-C", repo, "fsck", "--repair", "chunks")
    assert ran.code == 3
    assert "not repaired: chunks" in ran.out
    assert call("-C", repo, "fsck", "--repair", "chunks", "--json").json["ok"] is False


def test_a_damaged_config_or_index_does_not_keep_fsck_from_working(repo: Path, tmp_path: Path) -> None:
    copy = copy_of(repo, tmp_path / "copy")
    flip(repo / "config", 60)
    (repo / "index" / "index.sqlite").write_bytes(b"nonsense")
    ran = call("-C", repo, "fsck")
    assert ran.code == 13 and "--repair config --from OTHER" in ran.out
    ok("-C", repo, "fsck", "--repair", "config", "--from", copy)
    assert call("-C", repo, "fsck").code == 13
    ok("-C", repo, "fsck", "--repair", "index")
    assert "no damage found" in ok("-C", repo, "fsck")


@pytest.mark.parametrize(
    "words",
    [
        ["--read-data-subset", "8/7"],
        ["--max-age", "7d"],
        ["--max-age", "soon", "--read-data"],
        ["--from", "x"],
        ["-n"],
        ["--repair", "everything"],
        ["--repair", "refs", "--ref", "main"],
        ["--repair", "packs", "--read-data-subset", "5%"],
    ],
)
def test_options_that_make_no_sense_are_refused(repo: Path, words: list[str]) -> None:
    assert call("-C", repo, "fsck", *words).code == 2


def test_options_of_reading_are_taken(repo: Path) -> None:
    out = ok("-C", repo, "fsck", "--read-data-subset", "1/1", "--max-age", "7d", "--max-duration", "30m")
    assert "packs read whole" in out
    again = ok("-C", repo, "fsck", "--read-data", "--max-age", "7d")
    assert "0 packs read whole" in again
