"""`cas-ckpt log` on a long history: make the history by the public face, time the command from process start."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness import disk
from benchmarks.harness.meter import seconds_of
from benchmarks.harness.ours import CasCkpt, write_history

_RUNS = 5
_MARK = "complete.json"


def write(folder: Path, num_commits: int) -> dict[str, Any]:
    """A repository with `num_commits` commits in `folder`; one that stands there whole is kept."""
    mark = folder / _MARK
    if mark.exists() and json.loads(mark.read_text())["commits"] == num_commits:
        return {"commits": num_commits, "kept": True, "disk_bytes": disk.used_bytes(folder)}
    shutil.rmtree(folder / "repo", ignore_errors=True)
    repo = CasCkpt(folder).repo
    seconds = seconds_of(lambda: write_history(repo, num_commits))
    repo.close()
    mark.write_text(json.dumps({"commits": num_commits}))
    return {"commits": num_commits, "seconds": seconds, "disk_bytes": disk.used_bytes(folder)}


def log(folder: Path) -> dict[str, Any]:
    """Wall seconds of `cas-ckpt log`, output to a pipe, from process start to exit; files warm."""
    command = [*_command(), "-C", str(folder / "repo"), "log"]
    output = _run([sys.executable, *command]).stdout
    samples = [seconds_of(lambda: _run([sys.executable, *command])) for _ in range(_RUNS)]
    return {
        "seconds": statistics.median(samples),
        "samples": samples,
        "output_bytes": len(output),
        "output_lines": output.count(b"\n"),
        "imports_torch": "torch" in _imported(command),
    }


class CommandError(Exception):
    """A command of cas-ckpt did not work; says what it said."""


def _run(command: list[str]) -> subprocess.CompletedProcess[bytes]:
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise CommandError(f"exit {done.returncode}: {done.stderr.decode(errors='replace').strip()[-200:]}")
    return done


def _command() -> list[str]:
    """What python is to run: the installed script; in a checkout that is not installed, the module."""
    script = Path(sys.executable).with_name("cas-ckpt")
    return [str(script)] if script.exists() else ["-m", "cas_ckpt"]


def _imported(command: list[str]) -> set[str]:
    """Top-level modules that the command imports."""
    lines = _run([sys.executable, "-X", "importtime", *command]).stderr
    names = (line.rpartition("|")[2].strip() for line in lines.decode().splitlines() if line.startswith("import time:"))
    return {name.partition(".")[0] for name in names}
