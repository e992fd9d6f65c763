"""The training processes of the story, and how one of them is killed in the middle of a commit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from examples.demo.reporting import events

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def child(module: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that runs `module`, gone when the block is left, however it is left."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"examples.demo.{module}", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def lines_of(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """What the process tells, until it ends; a process that fails ends the demo.

    Raises:
        SystemExit: it ended with an error.
    """
    assert process.stdout is not None
    yield from events(process.stdout)
    if process.wait() != 0:
        sys.exit(f"a training process failed with exit status {process.returncode}: {process.args!r}")


def kill_inside_commit(process: subprocess.Popen[str]) -> None:
    """SIGKILL: no handler runs, nothing is flushed. The process said that it is inside a commit and waits there.

    Raises:
        SystemExit: it did not die of it.
    """
    os.kill(process.pid, signal.SIGKILL)
    if process.wait() != -signal.SIGKILL:
        sys.exit(f"the process ended with {process.returncode} instead of being killed")
