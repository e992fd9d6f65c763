"""What the processes of tests/ops/checkout/test_collective_processes.py do; each function runs on every rank."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.errors import CkptError
from cas_ckpt.objects.digest import Digest
from cas_ckpt.parallel.peers import Peers
from cas_ckpt.storage.file import FileStore
from cas_ckpt.training.process_group import GroupPeers
from tests.builders import numbers
from tests.ops.checkout.rank_targets import UNTOUCHED, divided_by, fetch_on_ranks, mesh, targets_of
from tests.ranks import die
from tests.wrapped_stores import CountingStore

ARRAYS = {"wide": numbers(600, 4096, seed=1), "line": numbers(3 << 19, seed=2), "few": numbers(40, 100, seed=3)}
VICTIM = 2


class DyingPeers:
    """Peers of a rank that is killed instead of making its `number`-th call of `method`."""

    def __init__(self, inner: Peers, method: str, number: int) -> None:
        self._inner = inner
        self._method = method
        self._left = number

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            self._left -= 1
            if self._left == 0:
                die()
        return getattr(self._inner, name)


def handle_of(folder: str, *, counted: bool) -> RepositoryHandle:
    """A handle whose store shares no page cache with others if it is `counted`: all goes through messages."""
    if not counted:
        return RepositoryHandle.open(folder, read_only=True)
    index = str(Path(folder) / "index" / "index.sqlite")
    return RepositoryHandle.on_store(CountingStore(FileStore(Path(folder))), index_url=index, read_only=True)


def restores(folder: str, root: str) -> int:
    """Every way of dividing, with and without a common cache; how many were checked."""
    peers, checked = GroupPeers(timeout_s=60), 0
    for counted in (False, True):
        handle = handle_of(folder, counted=counted)
        ways = (None, divided_by(mesh(4), 0), divided_by(mesh(2, 2), None, 1), divided_by(mesh(2, ranks=(1, 3)), 0))
        for way in ways:
            divided = {"wide": way, "few": way, "line": None}
            found = targets_of(handle, Digest(bytes.fromhex(root)), divided, peers.rank)
            fetch_on_ranks(handle, [copy for copy, _ in found.values()], peers=peers)
            for key, (_, target) in found.items():
                target.check(ARRAYS[key])
                checked += 1
    return checked


def loses_a_rank(folder: str, root: str, method: str, number: int) -> tuple[str, str, tuple[int, ...], bool]:
    """Kind, text and blamed ranks of what this rank raised, and whether its targets are as they were."""
    peers: Any = GroupPeers(timeout_s=30)
    return _restored(DyingPeers(peers, method, number) if peers.rank == VICTIM else peers, folder, root)


def _restored(peers: Any, folder: str, root: str) -> tuple[str, str, tuple[int, ...], bool]:
    handle = handle_of(folder, counted=True)
    found = targets_of(handle, Digest(bytes.fromhex(root)), {"wide": None, "line": None}, peers.rank)
    try:
        fetch_on_ranks(handle, [copy for copy, _ in found.values()], peers=peers)
    except CkptError as error:
        untouched = all((target.array.view(np.uint8) == UNTOUCHED).all() for _, target in found.values())
        return type(error).__name__, str(error), getattr(error, "ranks", ()), untouched
    return "", "", (), False


def begins_after_a_loss(folder: str, root: str, late: int) -> tuple[str, str, tuple[int, ...], bool]:
    """As `loses_a_rank` at the first call; rank `late` begins when another has stopped.

    Rank 0 comes first, so it waits for rank `late` when it is 1, and not for the one that is killed; rank 3 comes
    when that one has been killed.
    """
    peers: Any = GroupPeers(timeout_s=30)
    pause = threading.Event()
    if peers.rank == late:
        while not peers._reports.has_stopped():
            pause.wait(0.02)
    else:
        pause.wait({VICTIM: 0.5, 3: 1.5}.get(peers.rank, 0))
    return _restored(DyingPeers(peers, "gather_all", 1) if peers.rank == VICTIM else peers, folder, root)
