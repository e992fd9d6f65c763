"""Every verb works as people start it, and starts without what it does not need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cas_ckpt import CommitOptions, Repository
from cas_ckpt.cli.main import PLACES
from tests.cli.running import environment, run
from tests.processes import PIPE, Forked, run_module
from tests.signing.keys import key_file, public_line

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COMMANDS = [
    "init new",
    "clone repo copy",
    "remote add origin copy",
    "push",
    "fetch",
    "pull",
    "ls-remote origin",
    "watch --push origin --once",
    "bundle create main.bundle main -f",
    "import model.safetensors -b in",
    "export main out.safetensors -f",
    "checkout main --to out.pt -f",
    "read main w --region 0:1",
    "log --graph --all",
    "reflog",
    "merge-base main main",
    "lineage",
    "holders main w",
    "find w",
    "shards main",
    "restores",
    "sql VALUES(1)",
    "nearest main --json",
    "unique main",
    "freed main",
    "metrics",
    "best loss",
    "status",
    "show",
    "ls -l",
    "resolve main",
    "plan main --mesh dp=4",
    "stats",
    "du --by branch",
    "branch",
    "tag",
    "pin main",
    "unpin paper",
    "diff main",
    "forget -n --keep-last 1",
    "policy show",
    "verify main --trust allowed",
    "signers show",
    "gc",
    "repack -n",
    "fsck",
    "index rebuild",
    "store check memory://",
    "cache show",
]
COMMANDS += [f"{name} --help" for name in PLACES if name not in {line.split()[0] for line in COMMANDS}]
"""A verb that was added later is imported at least; what it does, its own test sees in this process."""

LOOKING = [
    "log", "log --since 2d", "reflog", "merge-base main v1", "best loss", "branch", "resolve HEAD", "ls", "show",
    "status", "stats", "du", "--help", "log --help",
]  # fmt: skip
"""Command lines that only look."""

IMPORTED = ("torch", "rich", "alembic.command", "cas_ckpt.training.verbs", "cas_ckpt.repository")
"""What most commands need, once for all that do not look alone: 0.4 s each."""

HEAVY = ("torch", "alembic", "rich", "hypothesis", "pytest", "psycopg", "cas_ckpt.testing", "cas_ckpt.training")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository in `repo`, and a model beside it."""
    folder = tmp_path_factory.mktemp("processes")
    with Repository.init(folder / "repo") as repo:
        (folder / "allowed").write_text(public_line())
        repo.commit(
            {"w": torch.ones(30, 40)}, message="one", metrics={"loss": 1.0}, options=CommitOptions(sign=key_file())
        )
        repo.tag("v1")
        repo.pin("v1", name="paper")
    save_file({"w": torch.ones(3)}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def started(place: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """How each of the command lines ended, started one after the other; those that look, without what they skip."""
    ended = {}
    for lines, imported in ((COMMANDS, IMPORTED), (LOOKING, ())):
        done = subprocess.run(
            [sys.executable, "-m", "tests.cli.starting", tmp_path_factory.mktemp("outputs"), *imported],
            input=json.dumps(lines), cwd=place, env=environment(CAS_CKPT_REPO="repo"), capture_output=True, text=True,
            timeout=280, check=True,
        )  # fmt: skip
        ended |= dict(zip(lines, json.loads(done.stdout), strict=True))
    return ended


def test_the_program_starts_as_people_start_it(place: Path) -> None:
    ran = run("log", cwd=place, CAS_CKPT_REPO="repo")
    assert (ran.code, ran.err, "one" in ran.out) == (0, "", True)


@pytest.mark.parametrize("line", COMMANDS)
def test_the_command_runs(line: str, started: dict[str, dict[str, Any]]) -> None:
    ran = started[line]
    assert (ran["code"], ran["err"], ran["out"] != "") == (0, "", True)


@pytest.mark.parametrize("line", LOOKING)
def test_a_verb_that_only_looks_imports_nothing_heavy(line: str, started: dict[str, dict[str, Any]]) -> None:
    heavy = {*HEAVY, "numpy"} if line.startswith("log") else set(HEAVY)
    ran = started[line]
    assert "cas_ckpt.cli.main" in ran["modules"]
    assert (ran["code"], heavy & set(ran["modules"])) == (0, set())


def test_a_shell_can_complete_command_lines() -> None:
    ran = run(_CAS_CKPT_COMPLETE="bash_source")
    assert (ran.code, "complete" in ran.out) == (0, True)


def answered(folder: Path, told: dict[str, str]) -> tuple[str, str]:
    """What the program says to a shell, in a process that was forked."""
    with Forked(_answer, folder, told, stdout=PIPE, stderr=PIPE) as process:
        out, err = process.communicate()
    return out, err


def _answer(folder: Path, told: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.update(told)
    run_module("cas_ckpt")


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("log ma", ["main"]), ("show v", ["v1"]), ("read main ", ["w"]), ("log -k w", ["w"]), ("show zzz", []),
        ("holders main w", ["w"]), ("lo", ["log"]), ("remote re", ["remove", "rename"]),
    ],
)  # fmt: skip
def test_a_shell_is_offered_refs_keys_and_verbs(place: Path, line: str, offered: list[str]) -> None:
    words = ["cas-ckpt", "-C", "repo", *line.split(" ")]
    told = {"_CAS_CKPT_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    out, err = answered(place, told)
    assert (err, [item.partition(",")[2] for item in out.split()]) == ("", offered)


def test_completion_where_there_is_no_repository_offers_nothing(tmp_path: Path) -> None:
    told = {"_CAS_CKPT_COMPLETE": "bash_complete", "COMP_WORDS": "cas-ckpt log ma", "COMP_CWORD": "2"}
    assert answered(tmp_path, told)[0].strip() == ""
