"""What a review of commits by several ranks looked at: each test is one way to lose a byte, an error or a rank."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cas_ckpt.core.protocol import GC_STATE_KEY, GcState, Generation, encode_gc_state
from cas_ckpt.errors import CkptError, PeerError, PermissionDeniedError
from cas_ckpt.objects.spec import Box, BoxPlacement, Spec
from cas_ckpt.objects.state import Container, TensorItem, ValueItem
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.transfer.peers import Peers
from tests.builders import ArrayMemory, numbers, same_bytes, tensor
from tests.committing import TIMEOUT_S, new_store, on, one, root_alone, stored, together
from tests.divided import LocalPieces, boxes_by_rank, divided, holdings, mesh, over, state_of
from tests.thread_peers import run_ranks

NOWHERE = BoxPlacement(())


def first_fails_then_works(size: int, bad: Callable[[int], Container], **request: Any) -> list[tuple[Any, Any]]:
    """(error of a commit of `bad`, root of the commit that follows it on the same group) of every rank."""
    store = new_store()

    def work(peers: Peers) -> tuple[Any, Any]:
        handle = on(store)
        try:
            commit_tree(handle, bad(peers.rank), CommitRequest(num_threads=1, **request), peers=peers)
            found: Any = None
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            found = error
        return found, commit_tree(handle, state_of({"a": 1}, {}, peers.rank), CommitRequest(), peers=peers).root

    return run_ranks(size, work, timeout_s=TIMEOUT_S)


# --- bytes -------------------------------------------------------------------------------------


def test_tensors_that_are_tied_on_one_rank_alone_keep_the_bytes_of_the_others() -> None:
    placement = over(mesh(2), "S(0)")
    a, b = numbers(40, 50, seed=1), numbers(40, 50, seed=2)
    b[:20] = a[:20]  # rank 0 holds the same rows of both: one memory

    def state(rank: int) -> Container:
        children: dict[Any, Any] = {}
        for name, array in (("a", a), ("b", b)):
            item = divided(array, placement, rank)
            memory = ("one memory", 1) if rank == 0 else (f"memory of {name}", 1)
            children[name] = TensorItem(item.spec, item.source, "numpy", memory, placement)
        return Container("dict", children)

    store = new_store()
    infos = together(store, 2, state)
    arrays = stored(store, infos[0].root)
    assert same_bytes(arrays["a"], a)
    assert same_bytes(arrays["b"], b)
    assert infos[0].root == root_alone({"a": a, "b": b})


def test_after_a_warning_the_tensor_is_that_of_one_rank_and_no_mixture() -> None:
    arrays = [numbers(2048, 1024, seed=rank) for rank in range(2)]
    store = new_store()
    infos = together(store, 2, lambda rank: state_of({"w": arrays[rank]}, {}, rank), on_divergence="warn")
    assert same_bytes(stored(store, infos[0].root)["w"], arrays[0])


def test_small_tensors_that_every_rank_of_a_mesh_holds_are_compared() -> None:
    placement = over(mesh(2), "R")
    found = together(new_store(), 2, lambda rank: one(divided(numbers(7, seed=rank), placement, rank)))
    assert all(isinstance(error, PeerError) and "w" in str(error) for error in found)


def test_a_whole_copy_is_compared_with_the_shards_of_other_ranks() -> None:
    placement = over(mesh(2, first=1), "S(0)")

    def state(rank: int) -> Container:
        array = numbers(64, 64, seed=0 if rank == 0 else 1)
        return one(tensor(array) if rank == 0 else divided(array, placement, rank))

    found = together(new_store(), 3, state, replica_audit=1.0)
    assert all(isinstance(error, PeerError) and "w" in str(error) for error in found)


def test_a_rank_may_hold_whole_what_others_hold_in_shards() -> None:
    array, placement = numbers(500, 700), over(mesh(2, first=1), "S(1)")
    store = new_store()
    infos = together(store, 3, lambda rank: one(tensor(array) if rank == 0 else divided(array, placement, rank)))
    assert infos[2].root == root_alone({"w": array})
    assert same_bytes(stored(store, infos[0].root)["w"], array)


def test_parts_that_overlap_and_cover_the_tensor_are_taken() -> None:
    array = numbers(30, 50)
    placement = BoxPlacement((((Box((0, 0), (20, 50))), (0,)), (Box((10, 0), (20, 50)), (1,))))
    infos = together(new_store(), 2, lambda rank: one(divided(array, placement, rank)))
    assert [getattr(info, "root", info) for info in infos] == [root_alone({"w": array})] * 2


@pytest.mark.parametrize("name", ["w\udc80", "", "7", 7, -3, "a/b~"], ids=ascii)
def test_any_name_may_be_divided(name: Any) -> None:
    array, placement = numbers(60, 70), over(mesh(2), "S(0)")
    infos = together(new_store(), 2, lambda rank: one(divided(array, placement, rank), name))
    assert infos[1].root == root_alone({name: array})


def test_lists_of_different_lengths_are_a_disagreement() -> None:
    def state(rank: int) -> Container:
        items = {at: tensor(numbers(300, seed=at)) for at in range(1 + rank)}
        return one(Container("list", {**items}))

    found = together(new_store(), 2, state)
    assert all(isinstance(error, PeerError) and "w" in str(error) for error in found)


def test_an_ordered_dict_that_is_empty_on_one_rank_is_united_with_that_of_another() -> None:
    def state(rank: int) -> Container:
        return one(ValueItem(OrderedDict()) if rank else Container("odict", {"w": tensor(numbers(900))}))

    infos = together(new_store(), 2, state)
    wanted = commit_tree(on(new_store()), state(0), CommitRequest()).root
    assert [getattr(info, "root", info) for info in infos] == [wanted] * 2


def test_the_root_of_an_optimizer_is_that_of_one_process_also_when_stages_are_interleaved() -> None:
    def state(names: list[str]) -> Container:
        group = Container("dict", {"params": ValueItem(names)})
        return one(Container("dict", {"param_groups": Container("list", {0: group})}), "optimizer")

    infos = together(new_store(), 2, lambda rank: state([f"layers.{rank}.weight", f"layers.{rank + 2}.weight"]))
    wanted = commit_tree(on(new_store()), state([f"layers.{at}.weight" for at in range(4)]), CommitRequest()).root
    assert [getattr(info, "root", info) for info in infos] == [wanted] * 2


def test_what_nobody_has_a_part_of_is_refused() -> None:
    def state(rank: int) -> Container:
        return one(TensorItem(Spec("float32", (900,)), LocalPieces(numbers(900), (), rank), "numpy", None, NOWHERE))

    found = together(new_store(), 2, state)
    assert all(isinstance(error, CkptError) and "do not hold all of" in str(error) for error in found)


def test_boxes_that_follow_no_rule_have_the_root_of_the_whole() -> None:
    array = numbers(90, 80)
    placement = boxes_by_rank(array.shape, [(7, 50), (1, 30)], 3)
    own = [BoxPlacement(tuple(box for box in placement.boxes if rank in box[1])) for rank in range(3)]
    infos = together(new_store(), 3, lambda rank: one(divided(array, own[rank], rank)))
    assert [getattr(info, "root", info) for info in infos] == [root_alone({"w": array})] * 3


# --- ranks in step -----------------------------------------------------------------------------


def test_a_hole_in_a_small_tensor_is_told_on_all_ranks_and_the_group_goes_on() -> None:
    hole = BoxPlacement(((Box((0,), (4,)), (0,)), (Box((5,), (3,)), (1,))))
    found = first_fails_then_works(2, lambda rank: one(divided(numbers(8), hole, rank)))
    assert all("do not hold all of" in str(error) for error, _ in found)
    assert found[0][1] == found[1][1]


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
                outcomes.append(commit_tree(handle, items, CommitRequest(num_threads=1), peers=peers).root)
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
    class Full(MemoryStore):
        def open_writer(self, key: str) -> Any:
            raise OSError("no space")

    base = new_store()
    full = Full()
    full.__dict__.update(base.__dict__)

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


# --- errors say what is wrong ------------------------------------------------------------------


def test_a_missing_key_of_a_small_divided_tensor_is_named_and_the_group_goes_on() -> None:
    placement = over(mesh(3), "S(0)")
    full, less = {"w": numbers(9)}, {"v": 1}
    found = first_fails_then_works(3, lambda rank: state_of(less if rank == 2 else full, {"w": placement}, rank))
    assert all("w: ranks [2] do not have this key" in str(error) for error, _ in found)


def test_small_divided_tensors_of_different_shapes_are_named_and_the_group_goes_on() -> None:
    placement = over(mesh(2), "S(0)")
    found = first_fails_then_works(2, lambda rank: one(divided(numbers(8 + 4 * rank), placement, rank)))
    assert all("w: rank 0: numpy tensor" in str(error) for error, _ in found)


def test_a_divided_tensor_among_what_each_rank_keeps_is_refused_with_its_key() -> None:
    def state(rank: int) -> Container:
        item = divided(numbers(900), over(mesh(2), "S(0)"), rank)
        return one(Container("ranks", {rank: item}, {"world_size": 2}), "own")

    found = together(new_store(), 2, state)
    assert all(isinstance(error, CkptError) and "own/" in str(error) for error in found)


def test_metrics_that_differ_in_the_sign_of_zero_are_named() -> None:
    store = new_store()

    def work(peers: Peers) -> Any:
        request = CommitRequest(metrics={"loss": -0.0 if peers.rank else 0.0})
        return commit_tree(on(store), state_of({"a": 1}, {}, peers.rank), request, peers=peers)

    found = run_ranks(2, work, timeout_s=TIMEOUT_S, outcomes=True)
    assert all(isinstance(error, PeerError) and "disagree on the metrics" in str(error) for error in found)
