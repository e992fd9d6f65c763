"""Runs the command line: in this process, which is quick, or in one of its own, as people do."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import cas_ckpt
from cas_ckpt.cli.main import main

ROOT = Path(cas_ckpt.__file__).parents[1]
OURS = ("CAS_CKPT_REPO", "CAS_CKPT_INDEX", "NO_COLOR")


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def environment(**changes: str) -> dict[str, str]:
    """The environment without what would change the outcome, and with the package in reach."""
    plain = {name: value for name, value in os.environ.items() if name not in OURS}
    return plain | {"PYTHONPATH": str(ROOT)} | changes


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "cas_ckpt", *map(str, words)]


def run(*words: str | Path, cwd: Path | None = None, **env: str) -> Ran:
    """Run `cas-ckpt WORDS` in a process of its own."""
    done = subprocess.run(command(*words), cwd=cwd, env=environment(**env), capture_output=True, text=True, timeout=60)
    return Ran(done.returncode, done.stdout, done.stderr)


def call(*words: str | Path, cwd: Path | None = None, **env: str) -> Ran:
    """The same in this process."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        contextlib.chdir(cwd or Path.cwd()),
        mock.patch.dict(os.environ, environment(**env), clear=True),
    ):
        code = main(list(map(str, words)))
    return Ran(code, out.getvalue(), err.getvalue())


def ok(*words: str | Path, cwd: Path | None = None, **env: str) -> str:
    """What a command printed; it must succeed and complain of nothing."""
    ran = call(*words, cwd=cwd, **env)
    assert (ran.code, ran.err) == (0, ""), ran
    return ran.out
