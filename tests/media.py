"""Media that tests mount: a disk of 12 MB, a folder that may not be written.

Each is mounted by a process of its own, for itself, and ends with it. Where the system lets nobody mount the test is
skipped; tests/crash/test_every_effect.py has the same with a faulty store.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from tests.processes import Forked

MOUNTS = {
    "small": "mount -t tmpfs -o size=12m tmpfs {folder}",
    "read-only": "mount --bind {folder} {folder} && mount -o remount,ro,bind {folder}",
}
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
NOT_MOUNTED = 77


def on_medium(medium: str, folder: Path, function: Callable[..., object], *args: Any) -> None:
    """Call `function(*args)` in a process for which `folder` is on that medium; fails with its traceback."""
    with Forked(_mounted, medium, folder, function, args, stderr=PIPE) as process:
        told = process.stderr.read()
    if process.returncode == NOT_MOUNTED:
        pytest.skip("this system lets nobody mount; the faulty store covers the same")
    assert (process.returncode, told) == (0, "")


def _mounted(medium: str, folder: Path, function: Callable[..., object], args: tuple[Any, ...]) -> None:
    mount = f"mount --make-rprivate / && {MOUNTS[medium].format(folder=folder)}"
    if not _own_mounts() or subprocess.run(["sh", "-c", mount], capture_output=True, check=False).returncode:
        os._exit(NOT_MOUNTED)
    function(*args)


def _own_mounts() -> bool:
    """Leave the mounts of the others, as a user with rights over these alone unless the process is root's."""
    user, group = os.getuid(), os.getgid()
    flags = CLONE_NEWNS if user == 0 else CLONE_NEWNS | CLONE_NEWUSER
    if ctypes.CDLL(None).unshare(flags):
        return False
    if user != 0:
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            Path(f"/proc/self/{name}").write_text(text)
    return True
