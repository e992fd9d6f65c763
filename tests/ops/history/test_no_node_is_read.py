"""What needs no byte of a state is answered from the index: of the store, refs and records alone are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cas_ckpt import Repository
from cas_ckpt.core.config import INDEX_PATH
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.objects.state import Container
from cas_ckpt.storage.file import FileStore
from tests.builders import commit, new_repository, numbers, tensor
from tests.wrapped_stores import CountingStore

OF_PACKS = ("get_range", "get_tail", "read_into")
"""How packs are read; refs and records are read whole."""

VERBS: dict[str, Callable[[Repository], Any]] = {
    "ls": lambda repo: repo.ls(),
    "ls of keys": lambda repo: repo.ls("main~1", ["model/l1*", "e*"]),
    "entry": lambda repo: repo.entry("main", "model/l17.weight"),
    "entry of a container": lambda repo: repo.entry("main", "model"),
    "log": lambda repo: repo.log(keys="model/l7*"),
    "holders": lambda repo: repo.holders("main", "model/l1.weight"),
    "du by commit": lambda repo: repo.du(),
    "du by tensor": lambda repo: repo.du("tensor", keys="model/*"),
    "du by dtype": lambda repo: repo.du("dtype"),
    "commit_stats": lambda repo: repo.commit_stats("main"),
    "best": lambda repo: repo.best("loss"),
    "diff": lambda repo: repo.diff("main~1", "main").entries,
    "find": lambda repo: repo.find("model/l7*", dtype="float32", shape=(300,)),
    "find_commits": lambda repo: repo.find_commits(dtype="float32", min_bytes=1000),
    "nearest": lambda repo: repo.nearest("main"),
}


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Repository, CountingStore]]:
    """Three commits of 300 tensors on main, one more on a branch; the index is that of the repository."""
    path = tmp_path_factory.mktemp("watched") / "repo"
    handle = new_repository(path)
    for number in range(4):
        model = {f"l{at}.weight": numbers(300, seed=at + (number if at == 7 else 0)) for at in range(300)}
        parts = {"values": tensor(numbers(300)), "indices": tensor(numbers(3))}
        model["big"] = numbers(3000, 700)  # several chunks
        state = {"model": model, "emb": Container("sparse_coo", parts, {"shape": (9, 9)}), "step": number}
        branch = "main" if number < 3 else "side"
        commit(handle, state, metrics={"loss": 1.0 / (number + 1)}, branch=branch)
    handle.close()
    store = CountingStore(FileStore(path))
    with Repository(RepositoryHandle.on_store(store, index_url=str(path / INDEX_PATH))) as repo:
        yield repo, store


@pytest.mark.parametrize("verb", VERBS)
def test_no_node_is_read(watched: tuple[Repository, CountingStore], verb: str) -> None:
    repo, store = watched
    store.reset()
    assert VERBS[verb](repo)
    assert {method: store.tally(method).calls for method in OF_PACKS} == dict.fromkeys(OF_PACKS, 0)
    assert store.tally("get").calls


def test_what_needs_bytes_reads_nodes(watched: tuple[Repository, CountingStore]) -> None:
    repo, store = watched
    store.reset()
    assert repo.load(keys="step") == {"step": 2}
    assert store.tally("get_range").calls
