"""What a review of history and collection looked at: each test is one way to lose a byte or to get a wrong answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cas_ckpt import clock
from cas_ckpt.config import read_gc_state
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.state import RANKS, Container
from cas_ckpt.ops import publish
from cas_ckpt.ops.branch import create_branch, delete_branch
from cas_ckpt.ops.commit import commit_tree
from cas_ckpt.ops.gc import Collection, collect_garbage
from cas_ckpt.ops.gc_plan import GcOptions
from cas_ckpt.ops.rename import rename_ref
from cas_ckpt.ops.request import CommitRequest
from cas_ckpt.refs import RefKind
from cas_ckpt.repository import RepositoryHandle
from cas_ckpt.transfer.peers import Peers
from cas_ckpt.transfer.thread_peers import run_ranks
from tests.builders import commit, new_repository, numbers, same_bytes, stored_arrays, tensor
from tests.committing import TIMEOUT_S

EXPIRED = GcOptions(reflog_expire_s=0, max_unused=0)
NOW = GcOptions(reflog_expire_s=0, max_unused=0, min_age_s=0)


def weights(seed: int) -> np.ndarray[Any, Any]:
    return numbers(64, 64, seed=seed)


@pytest.fixture
def handle(tmp_path: Path) -> Iterator[RepositoryHandle]:
    made = new_repository(tmp_path / "repo")
    yield made
    made.close()


def fresh(tmp_path: Path) -> RepositoryHandle:
    """The repository with an index of its own, which knows the store alone."""
    found = RepositoryHandle.open(tmp_path / "repo", index_url=":memory:")
    found.sync()
    return found


# --- LOSS ---------------------------------------------------------------------------------------


def test_chunks_of_per_rank_values_are_looked_for_again_when_a_collection_began(
    handle: RepositoryHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(handle, {"w": weights(1)})
    commit(handle, {"w": weights(2)}, branch="side")
    delete_branch(handle, "side")
    first = [True]

    def after_a_collection(store: Any) -> Any:
        if first and first.pop():
            with_own_index = RepositoryHandle.open(tmp_path / "repo", index_url=":memory:")
            report = collect_garbage(with_own_index, EXPIRED)
            assert report.deleted_packs
        return read_gc_state(store)

    monkeypatch.setattr(publish, "read_gc_state", after_a_collection)

    def work(peers: Peers) -> Any:
        mine = RepositoryHandle.open(tmp_path / "repo", index_url=str(tmp_path / f"index{peers.rank}"))
        own = Container(RANKS, {peers.rank: tensor(weights(2) if peers.rank else weights(3))})
        return commit_tree(mine, Container("dict", {"own": own}), CommitRequest(num_threads=1), peers=peers)

    infos = run_ranks(2, work, timeout_s=TIMEOUT_S)
    arrays = stored_arrays(fresh(tmp_path), infos[0].root)
    assert same_bytes(arrays["own/1"], weights(2))


def test_chunks_whose_rows_go_while_the_known_ones_are_read_are_not_relied_on(
    handle: RepositoryHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes share an index: the collector drops rows between two reads of a writer."""
    commit(handle, {"w": weights(1)})
    commit(handle, {"w": weights(2)}, branch="side")
    delete_branch(handle, "side")
    writer = RepositoryHandle.open(tmp_path / "repo")
    collection = Collection(handle, EXPIRED)
    seen: list[Any] = []
    delete = collection.delete

    def later(state: Any) -> Any:
        seen.append(state)
        return state

    collection.delete = later  # type: ignore[method-assign]
    collection.run()  # until before g8
    ids_of = writer.index.all_chunk_digests

    def then_they_go() -> set[bytes]:
        found = ids_of()
        if seen:
            delete(seen.pop())
        return found

    monkeypatch.setattr(writer.index, "all_chunk_digests", then_they_go)
    info = commit(writer, {"w": weights(2)}, branch="again")
    assert not seen
    assert same_bytes(stored_arrays(fresh(tmp_path), info.root)["w"], weights(2))
