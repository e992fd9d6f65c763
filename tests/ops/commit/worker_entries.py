"""Worker processes that die, in their own process.

ENTRY = "tests.ops.commit.worker_entries:die_after_7"     SIGKILL right after the seventh effect on the store
ENTRY = "tests.ops.commit.worker_entries:starve"          little memory, from the first commit on
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from cas_ckpt.core import handle
from cas_ckpt.ops.commit.process import child
from cas_ckpt.storage.file import FileStore
from cas_ckpt.testing import Effects, FaultyStore, die_after

MODULE = "tests.ops.commit.worker_entries"


class _Killing(Effects):
    def _die(self, where: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()


def __getattr__(name: str) -> Callable[[int, int], None]:
    head, _, number = name.rpartition("_")
    if head != "die_after":
        raise AttributeError(name)

    def die(descriptor: int, parent: int) -> None:
        effects = _Killing(die_after(int(number)))
        handle.open_store = lambda url: FaultyStore(FileStore(Path(url.removeprefix("file://"))), effects=effects)
        child.main(descriptor, parent)

    return die
