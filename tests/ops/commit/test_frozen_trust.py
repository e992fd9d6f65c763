"""What is declared frozen is still checked against the packs that are really there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cas_ckpt.core.protocol import GC_STATE_KEY, GcState, encode_gc_state
from cas_ckpt.core.refs import Generation
from cas_ckpt.errors import FrozenChangedError, PeerError
from cas_ckpt.objects.spec import Spec
from cas_ckpt.objects.state import Container, Item, Name, TensorItem
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.frozen import FrozenMemory
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.parallel.peers import Peers
from tests.builders import ArrayMemory, new_repository, numbers, same_bytes, stored_arrays, tensor
from tests.committing import TIMEOUT_S, new_store, on, one, root_alone
from tests.divided import divided, mesh, over
from tests.thread_peers import run_ranks


def test_a_frozen_tensor_whose_packs_were_collected_is_written_again(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    memory = FrozenMemory()
    base = numbers(1 << 20)
    request = CommitRequest(frozen="base", frozen_audit=0)

    def again(head: float) -> str:
        items: dict[Name, Item] = {"base": tensor(base, identity=("here", 1)), "head": tensor(np.full(1000, head))}
        return commit_tree(handle, Container("dict", items), request, memory=memory).root

    again(1.0)
    for key, _ in list(handle.store.list("packs/")):
        if key.endswith(".data"):
            handle.store.delete(key)
    handle.store.put(GC_STATE_KEY, encode_gc_state(GcState(Generation(1))))
    root = again(2.0)
    assert same_bytes(stored_arrays(handle, root)["base"], base)


def test_frozen_memory_that_is_believed_is_not_read_while_its_packs_are_there(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    memory = FrozenMemory()
    base = numbers(1 << 20)
    boxes: list[object] = []

    class Counting(ArrayMemory):
        def read(self, box):  # type: ignore[no-untyped-def]
            boxes.append(box)
            return super().read(box)

    for _ in range(2):
        boxes.clear()
        item = tensor(base, identity=("here", 1))
        item = type(item)(item.spec, Counting(base), item.flavor, item.identity)
        commit_tree(
            handle, Container("dict", {"base": item}),
            CommitRequest(frozen="base", frozen_check="version", frozen_audit=0), memory=memory,
        )  # fmt: skip
    assert boxes == []


@pytest.mark.parametrize("split", ["S(0)", "S(1)"])
def test_frozen_tensors_that_changed_are_found_however_they_are_divided(split: str) -> None:
    store, kept = new_store(), [FrozenMemory(), FrozenMemory()]
    placement, array = over(mesh(2), split), numbers(2048, 1024)
    sources = [divided(array, placement, rank).source for rank in range(2)]

    def work(peers: Peers) -> Any:
        item = TensorItem(Spec("float32", array.shape), sources[peers.rank], "numpy", ("memory", 1), placement)
        request = CommitRequest(frozen="w", frozen_audit=1.0)
        return commit_tree(on(store), one(item), request, peers=peers, memory=kept[peers.rank])

    run_ranks(2, work, timeout_s=TIMEOUT_S)
    sources[1].pieces[0][1][:] += 1  # type: ignore[attr-defined]
    found = run_ranks(2, work, timeout_s=TIMEOUT_S, outcomes=True)
    assert all(isinstance(error, (FrozenChangedError, PeerError)) and "frozen" in str(error) for error in found)


def test_a_frozen_pattern_may_name_what_each_rank_keeps() -> None:
    store = new_store()

    def work(peers: Peers) -> Any:
        own = Container("ranks", {peers.rank: tensor(numbers(900))}, {"world_size": 2})
        return commit_tree(on(store), one(own, "own"), CommitRequest(frozen="own/*"), peers=peers)

    assert len({getattr(info, "root", info) for info in run_ranks(2, work, timeout_s=TIMEOUT_S, outcomes=True)}) == 1


def test_frozen_cells_that_move_to_another_rank_are_hashed_there() -> None:
    store, kept = new_store(), [FrozenMemory(), FrozenMemory()]
    w, big = numbers(2048, 1024), numbers(1100, 1024, seed=3)

    def commit_of(items: dict[str, np.ndarray[Any, Any]]) -> str:
        def work(peers: Peers) -> Any:
            children = {name: tensor(array, identity=(name, 1)) for name, array in items.items()}
            request = CommitRequest(frozen="w", frozen_audit=0.0)
            state = Container("dict", {**children})
            return commit_tree(on(store), state, request, peers=peers, memory=kept[peers.rank])

        return str(run_ranks(2, work, timeout_s=TIMEOUT_S)[0].root)

    for items in ({"w": w}, {"a": big, "w": w}, {"w": w, "x": big[:7], "y": big[:1050]}):
        assert commit_of(items) == root_alone(items)


def test_a_rank_trusts_frozen_memory_only_for_what_it_hashed_there_itself() -> None:
    store, kept = new_store(), [FrozenMemory(), FrozenMemory()]
    arrays = [numbers(2048, 1024), numbers(2048, 1024)]
    arrays[1][1500:] += 1  # cells that rank 1 hashes: not what rank 0 has there

    def commit_of(names: dict[int, str]) -> str:
        def work(peers: Peers) -> Any:
            children = {name: tensor(arrays[peers.rank], identity=(name, 1)) for name in names[peers.rank]}
            children["x"] = tensor(numbers(7))
            request = CommitRequest(frozen="w", frozen_audit=0.0, replica_check="sample", replica_audit=0.0)
            state = Container("dict", {**children})
            return commit_tree(on(store), state, request, peers=peers, memory=kept[peers.rank])

        return str(run_ranks(2, work, timeout_s=TIMEOUT_S)[0].root)

    commit_of({0: "w", 1: "w"})
    assert commit_of({0: "w", 1: ""}) == root_alone({"w": arrays[0], "x": numbers(7)})
