"""Small builders for commits by several ranks: stores in memory, ranks that are threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cas_ckpt import limits
from cas_ckpt.core.config import Config
from cas_ckpt.core.create import new_store_id, write_config
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import CommitInfo
from cas_ckpt.objects.state import Container, ValueItem
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.parallel.peers import Peers
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.storage.store import Store
from tests.builders import commit, stored_arrays
from tests.thread_peers import run_ranks

TIMEOUT_S = 8


def new_store() -> MemoryStore:
    store = MemoryStore()
    write_config(store, Config(new_store_id(), pack_bytes=1 << 20))
    return store


def on(store: Store, **options: Any) -> RepositoryHandle:
    return RepositoryHandle.on_store(store, index_url=":memory:", **options)


def together(
    store: Store, size: int, state: Callable[[int], Container], *,
    outcomes: bool = True, timeout_s: float = TIMEOUT_S, **request: Any,
) -> list[Any]:  # fmt: skip
    """What every rank gets when it commits `state(rank)` on a handle of its own; `outcomes`: its error included."""

    def work(peers: Peers) -> CommitInfo:
        with limits(num_threads=1):
            return commit_tree(on(store), state(peers.rank), CommitRequest(**request), peers=peers)

    return run_ranks(size, work, timeout_s=timeout_s, outcomes=outcomes)


def first_fails_then_works(size: int, bad: Callable[[int], Container], **request: Any) -> list[tuple[Any, Any]]:
    """(error of a commit of `bad`, root of the commit that follows it on the same group) of every rank."""
    store = new_store()

    def work(peers: Peers) -> tuple[Any, Any]:
        handle = on(store)
        try:
            with limits(num_threads=1):
                commit_tree(handle, bad(peers.rank), CommitRequest(**request), peers=peers)
            found: Any = None
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            found = error
        return found, commit_tree(handle, one(ValueItem(1), "a"), CommitRequest(), peers=peers).root

    return run_ranks(size, work, timeout_s=TIMEOUT_S)


def stored(store: Store, root: str) -> dict[str, np.ndarray[Any, Any]]:
    handle = on(store)
    handle.sync()
    return stored_arrays(handle, root)


def root_alone(items: dict[Any, Any]) -> str:
    return commit(on(new_store()), items).root


def one(item: Any, name: Any = "w") -> Container:
    return Container("dict", {name: item})
