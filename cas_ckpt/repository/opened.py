"""What every group of verbs works on: a repository that is open, and the ranks that it works together with."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.repository.ranks import AUTO, TIMEOUT_S, Ranks
from cas_ckpt.transfer.peers import collective_errors

if TYPE_CHECKING:
    from cas_ckpt.ops.commit.frozen import FrozenMemory
    from cas_ckpt.ops.sync.tier import BackgroundPushes


class Opened:
    """An open repository, without verbs."""

    def __init__(
        self, handle: RepositoryHandle, *, group: Any = AUTO, timeout_s: float = TIMEOUT_S, ranks: Ranks | None = None
    ) -> None:
        """Take over `handle`, and `ranks` if the group is made already."""
        self._handle = handle
        self._ranks = ranks or Ranks(group, timeout_s)
        self._frozen: FrozenMemory | None = None
        self._pushes: BackgroundPushes | None = None
        self._committing = threading.Lock()

    @contextmanager
    def _common_work(self, verb: str) -> Iterator[None]:
        """Where a verb runs (see `reads_arguments`): one commit or checkout at a time, each one work of all ranks."""
        if verb not in ("commit", "checkout"):
            yield
            return
        with self._committing, collective_errors(self._ranks.peers):
            yield
