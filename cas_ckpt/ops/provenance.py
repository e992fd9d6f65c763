"""Where and by what a commit is made: captured only when somebody asks.

Invariant: nothing here makes a commit fail; what cannot be found out is left out. No environment
variables are read, so that no secret is kept by default; the command line is kept as it is.
"""

from __future__ import annotations

import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import cas_ckpt

GIT_TIMEOUT_S = 10
"""A working directory on a slow network disk must not hold up a commit for long."""


def capture_provenance(given: Mapping[str, Any]) -> dict[str, Any]:
    """Host, command line, versions, and the git commit of the working directory; `given` goes over it."""
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "command": [_as_text(word) for word in sys.argv],
        "python": platform.python_version(),
        "cas_ckpt": cas_ckpt.__version__,
    }
    try:
        found["torch"] = version("torch")  # without importing it
    except PackageNotFoundError:
        pass  # torch is not needed to import safetensors, or to commit arrays
    git = git_state()
    if git is not None:
        found["git"] = git
    return found | dict(given)


def git_state(folder: Path | None = None) -> dict[str, Any] | None:
    """{"commit": id, "dirty": whether tracked files differ from it}, or None where git knows nothing.

    Args:
        folder: None is the working directory.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(folder: Path | None, *words: str) -> str | None:
    program = shutil.which("git")
    if program is None:
        return None
    try:
        done = subprocess.run(  # noqa: S603  # fixed words, no shell
            [program, "--no-optional-locks", *words],
            cwd=folder, capture_output=True, stdin=subprocess.DEVNULL, timeout=GIT_TIMEOUT_S, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace").strip()


def _as_text(word: str) -> str:
    """`word` without the lone surrogates that stand for bytes which are no UTF-8."""
    return word.encode("utf-8", "backslashreplace").decode()
