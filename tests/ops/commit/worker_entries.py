"""Worker processes that meet bad luck, in their own process.

ENTRY = "tests.ops.commit.worker_entries:die_after_7"         SIGKILL right after the seventh effect on the store
ENTRY = "tests.ops.commit.worker_entries:die_once_published"  SIGKILL once the commit is made (rank 0) or it is told so
ENTRY = "tests.ops.commit.worker_entries:die_before_told"     SIGKILL where rank 0 tells what came of the commit
ENTRY = "tests.ops.commit.worker_entries:die_before_compared" SIGKILL where rank 0 tells whether small tensors agree
ENTRY = "tests.ops.commit.worker_entries:full_index"          no commit's rows go into the index
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cas_ckpt.core import handle
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.errors import OutOfSpaceError
from cas_ckpt.index.index import Index
from cas_ckpt.ops.commit import commit
from cas_ckpt.ops.commit.process import child
from cas_ckpt.storage.file import FileStore
from cas_ckpt.testing import Effects, FaultyStore, die_after

MODULE = "tests.ops.commit.worker_entries"


class _Killing(Effects):
    def _die(self, where: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()


def die_once_published(descriptor: int, parent: int) -> None:
    """SIGKILL before the index hears of the commit; on another rank than 0 once rank 0 has told of it."""
    RepositoryHandle.add_written = _die  # type: ignore[method-assign]
    RepositoryHandle.note_written = _die  # type: ignore[method-assign]
    child.main(descriptor, parent)


def die_before_told(descriptor: int, parent: int) -> None:
    """SIGKILL once rank 0 has all that it needs to make the commit."""
    commit.tell_ranks = _die
    child.main(descriptor, parent)


def die_before_compared(descriptor: int, parent: int) -> None:
    """SIGKILL once rank 0 has the small tensors that are divided over ranks."""
    child.AskedPeers.broadcast = _die  # type: ignore[method-assign]
    child.main(descriptor, parent)


def _die(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def full_index(descriptor: int, parent: int) -> None:
    """The disk of the index is full."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OutOfSpaceError("no space left for the index")

    Index.add_packs = refuse  # type: ignore[method-assign]
    child.main(descriptor, parent)


def __getattr__(name: str) -> Callable[[int, int], None]:
    head, _, number = name.rpartition("_")
    if head != "die_after":
        raise AttributeError(name)

    def die(descriptor: int, parent: int) -> None:
        effects = _Killing(die_after(int(number)))
        handle.open_store = lambda url: FaultyStore(FileStore(Path(url.removeprefix("file://"))), effects=effects)
        child.main(descriptor, parent)

    return die
