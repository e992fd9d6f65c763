"""Worker processes that meet bad luck, in their own process.

ENTRY = "tests.ops.commit.worker_entries:die_after_7"         SIGKILL right after the seventh effect on the store
ENTRY = "tests.ops.commit.worker_entries:kill_trainer_after_7"  the same for the process that the worker works for
ENTRY = "tests.ops.commit.worker_entries:die_once_published"  SIGKILL once the commit is made (rank 0) or it is told so
ENTRY = "tests.ops.commit.worker_entries:die_before_told"     SIGKILL where rank 0 tells what came of the commit
ENTRY = "tests.ops.commit.worker_entries:die_after_gather"    SIGKILL once rank 0 has gathered, before it tells
ENTRY = "tests.ops.commit.worker_entries:die_of_peer_error"   SIGKILL where rank 0 fails before it tells
ENTRY = "tests.ops.commit.worker_entries:refuse"              rank 0 refuses to publish
ENTRY = "tests.ops.commit.worker_entries:fail_to_publish"     rank 0 cannot publish
ENTRY = "tests.ops.commit.worker_entries:full_index"          no commit's rows go into the index
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cas_ckpt.arguments import Buffer
from cas_ckpt.core import handle
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.errors import CkptError, OutOfSpaceError, PeerError, StorageError
from cas_ckpt.index.index import Index
from cas_ckpt.ops.commit import commit, worker_process
from cas_ckpt.parallel.peers import Peers
from cas_ckpt.storage.file import FileStore
from tests.effects import Effects, FaultPlan, die_after
from tests.wrapped_stores import FaultyStore

MODULE = "tests.ops.commit.worker_entries"


class _Killing(Effects):
    def __init__(self, plan: FaultPlan, victim: int) -> None:
        super().__init__(plan)
        self._victim = victim

    def _die(self, where: str) -> None:
        os.kill(self._victim, signal.SIGKILL)
        signal.pause()  # the worker must not outlive whom it works for either, wherever it is


def die_once_published(descriptor: int, parent: int) -> None:
    """SIGKILL before the index hears of the commit; on another rank than 0 once rank 0 has told of it."""
    RepositoryHandle.add_written = _die  # type: ignore[method-assign]
    RepositoryHandle.note_written = _die  # type: ignore[method-assign]
    worker_process.main(descriptor, parent)


def die_before_told(descriptor: int, parent: int) -> None:
    """SIGKILL once rank 0 has all that it needs to make the commit."""
    commit.broadcast_outcome = _die
    worker_process.main(descriptor, parent)


def die_after_gather(descriptor: int, parent: int) -> None:
    """SIGKILL once rank 0 has gathered for the first time: the small tensors that are divided over ranks."""
    gather = worker_process.RemotePeers.gather

    def gather_and_die(peers: worker_process.RemotePeers, message: Buffer) -> list[bytes] | None:
        gather(peers, message)
        return _die()  # type: ignore[no-any-return]

    worker_process.RemotePeers.gather = gather_and_die  # type: ignore[method-assign]
    worker_process.main(descriptor, parent)


def die_of_peer_error(descriptor: int, parent: int) -> None:
    """SIGKILL once it is heard that another rank has failed."""
    tell = commit.broadcast_outcome

    def hear_or_die(peers: Peers, message: bytes | None) -> bytes:
        try:
            return tell(peers, message)
        except PeerError:
            return _die()  # type: ignore[no-any-return]

    commit.broadcast_outcome = hear_or_die
    worker_process.main(descriptor, parent)


def refuse(descriptor: int, parent: int) -> None:
    """Rank 0 finds that all ranks have to raise."""
    commit.publish_commit = _raising(PeerError("rank 1 has not written what it says", (1,)))
    worker_process.main(descriptor, parent)


def fail_to_publish(descriptor: int, parent: int) -> None:
    """Rank 0 fails by itself."""
    commit.publish_commit = _raising(StorageError("the disk is out"))
    worker_process.main(descriptor, parent)


def _raising(error: CkptError) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def _die(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def full_index(descriptor: int, parent: int) -> None:
    """The disk of the index is full."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OutOfSpaceError("no space left for the index")

    Index.add_packs = refuse  # type: ignore[method-assign]
    worker_process.main(descriptor, parent)


def __getattr__(name: str) -> Callable[[int, int], None]:
    head, _, number = name.rpartition("_")
    if head not in ("die_after", "kill_trainer_after"):
        raise AttributeError(name)

    def die(descriptor: int, parent: int) -> None:
        effects = _Killing(die_after(int(number)), os.getpid() if head == "die_after" else os.getppid())
        handle.open_store = lambda url: FaultyStore(FileStore(Path(url.removeprefix("file://"))), effects=effects)
        worker_process.main(descriptor, parent)

    return die
