"""A rank that fails within a commit: all ranks raise, the group goes on, and nothing half is published."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from cas_ckpt import limits
from cas_ckpt.core.protocol import GC_STATE_KEY, GcState, encode_gc_state
from cas_ckpt.core.refs import Generation, RefKind
from cas_ckpt.errors import PeerError, PermissionDeniedError
from cas_ckpt.objects.digest import short
from cas_ckpt.objects.spec import Box, Spec
from cas_ckpt.objects.state import Container, TensorItem, ValueItem
from cas_ckpt.ops.commit import commit
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.parallel.peers import Peers
from tests.builders import ArrayMemory, numbers, same_bytes
from tests.committing import TIMEOUT_S, first_fails_then_works, new_store, on, one, root_alone, stored, together
from tests.divided import LocalPieces, divided, holdings, mesh, over, state_of
from tests.meddling import MeddledStore
from tests.thread_peers import run_ranks


def test_an_error_that_is_raised_twice_is_told_twice() -> None:
    broken = OSError("the same object each time")

    class Broken:
        def read(self, box: Box) -> np.ndarray[Any, Any]:
            raise broken

    def state(rank: int) -> Container:
        memory: Any = Broken() if rank == 1 else ArrayMemory(numbers(3))
        return one(TensorItem(Spec("float32", (3,)), memory, "numpy"))

    store = new_store()

    def work(peers: Peers) -> list[Any]:
        handle, outcomes = on(store), []
        for items in (state(peers.rank), state(peers.rank), one(ValueItem(1))):
            try:
                with limits(num_threads=1):
                    outcomes.append(commit_tree(handle, items, CommitRequest(), peers=peers).root)
            except (PeerError, OSError) as error:
                outcomes.append(type(error))
        return outcomes

    found = run_ranks(2, work, timeout_s=TIMEOUT_S, outcomes=True)
    root = root_alone({"w": 1})
    assert found == [[PeerError, PeerError, root], [OSError, OSError, root]]


def test_an_interrupted_rank_lets_the_others_go() -> None:
    class Interrupted(ArrayMemory):
        def read(self, box: Box) -> np.ndarray[Any, Any]:
            raise KeyboardInterrupt

    def bad(rank: int) -> Container:
        source = Interrupted(numbers(900)) if rank == 1 else ArrayMemory(numbers(900))
        return one(TensorItem(Spec("float32", (900,)), source, "numpy", None, over(mesh(1, first=rank), "R")), rank)

    found = first_fails_then_works(3, bad)
    assert [type(error) for error, _ in found] == [PeerError, KeyboardInterrupt, PeerError]
    assert all("rank 1 failed: KeyboardInterrupt" in str(found[rank][0]) for rank in (0, 2))
    assert len({root for _, root in found}) == 1


def test_a_writer_thread_that_fails_on_one_rank_fails_the_commit_on_all() -> None:
    def refuse() -> None:
        raise OSError("no space")

    base = new_store()
    full = MeddledStore(base, refuse, before="open_writer", times=99)

    def work(peers: Peers) -> Any:
        array, placement = numbers(300, 700), over(mesh(2), "S(0)")
        handle = on(full if peers.rank == 1 else base)
        return commit_tree(handle, one(divided(array, placement, peers.rank)), CommitRequest(), peers=peers)

    found = run_ranks(2, work, timeout_s=TIMEOUT_S, outcomes=True)
    assert isinstance(found[0], PeerError)
    assert "no space" in str(found[0])
    assert "no space" in str(found[1])
    assert not list(base.list("refs/"))
    infos = together(base, 2, lambda rank: one(divided(numbers(300, 700), over(mesh(2), "S(0)"), rank)))
    assert same_bytes(stored(base, infos[0].root)["w"], numbers(300, 700))


def test_a_rank_that_may_not_write_makes_all_raise() -> None:
    store = new_store()

    def work(peers: Peers) -> Any:
        handle = on(store, read_only=peers.rank == 1)
        return commit_tree(handle, state_of({"a": 1}, {}, peers.rank), CommitRequest(), peers=peers)

    found = run_ranks(2, work, timeout_s=TIMEOUT_S, outcomes=True)
    assert isinstance(found[0], PeerError)
    assert isinstance(found[1], PermissionDeniedError)


def test_ranks_that_fail_after_the_branch_moved_are_told_so() -> None:
    store = new_store()

    def work(peers: Peers) -> Any:
        handle = on(store)
        if peers.rank == 0:
            handle.add_written = _interrupted  # type: ignore[method-assign]
        return commit_tree(handle, state_of({"a": 1}, {}, peers.rank), CommitRequest(), peers=peers)

    found = run_ranks(2, work, timeout_s=TIMEOUT_S, outcomes=True)
    assert isinstance(found[0], KeyboardInterrupt)
    assert isinstance(found[1], PeerError)
    assert "branch" in str(found[1])


def _interrupted(*args: Any, **named: Any) -> None:
    raise KeyboardInterrupt


def test_of_a_commit_that_is_made_and_not_heard_of_everywhere_the_error_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tell = commit.broadcast_outcome

    def fails_to_hear(peers: Peers, message: bytes | None) -> bytes:
        if peers.rank == 1:
            raise OSError("the network is gone")
        return tell(peers, message)

    monkeypatch.setattr(commit, "broadcast_outcome", fails_to_hear)
    store = new_store()

    def work(peers: Peers) -> Any:
        return commit_tree(on(store), one(ValueItem(1)), CommitRequest(), peers=peers)

    found = run_ranks(2, work, timeout_s=TIMEOUT_S, outcomes=True)
    made = on(store).refs.get(RefKind.BRANCH, "main").target
    assert made is not None and isinstance(found[0], PeerError)
    assert re.search(f"{short(made)} is made and the branch main names it.*rank 1 failed.*network", str(found[0]))


def test_a_garbage_collection_that_begins_meanwhile_makes_all_ranks_begin_anew() -> None:
    store, array = new_store(), numbers(2048, 1024)
    split, cut = over(mesh(2), "S(0)"), over(mesh(2), "S(1)")
    items = {"w": array, "v": array[:301, :700].copy()}
    together(store, 2, lambda rank: state_of(items, {"w": split, "v": cut}, rank))
    condemned = tuple(key for key, _ in store.list("packs/"))
    begun: list[int] = []

    class Collected(LocalPieces):
        def read(self, box: Box) -> np.ndarray[Any, Any]:
            if not begun:
                begun.append(1)
                store.put(GC_STATE_KEY, encode_gc_state(GcState(Generation(1), "condemned", condemned)))
            return super().read(box)

    def state(rank: int) -> Container:
        made = state_of(items, {"w": split, "v": cut}, rank)
        item = made.children["w"]
        assert isinstance(item, TensorItem)
        source = Collected(array, holdings(array.shape, [split]), rank) if rank == 1 else item.source
        made.children["w"] = TensorItem(item.spec, source, "numpy", None, split)
        return made

    infos = together(store, 2, state)
    assert infos[0].id == infos[1].id
    for key in condemned:
        store.delete(key)
    arrays = stored(store, infos[0].root)
    assert all(same_bytes(arrays[key], items[key]) for key in items)
