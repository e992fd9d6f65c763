"""One state of many ranks: the tree is that of one process, and what does not fit together is refused by its key."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest

from cas_ckpt.errors import CkptError, PeerError
from cas_ckpt.objects.spec import Box, BoxPlacement, Spec
from cas_ckpt.objects.state import Container, TensorItem, ValueItem
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.parallel.peers import Peers
from tests.builders import numbers, same_bytes, tensor
from tests.committing import TIMEOUT_S, first_fails_then_works, new_store, on, one, root_alone, stored, together
from tests.divided import LocalPieces, boxes_by_rank, divided, mesh, over, state_of
from tests.thread_peers import run_ranks

NOWHERE = BoxPlacement(())


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


def test_a_hole_in_a_small_tensor_is_told_on_all_ranks_and_the_group_goes_on() -> None:
    hole = BoxPlacement(((Box((0,), (4,)), (0,)), (Box((5,), (3,)), (1,))))
    found = first_fails_then_works(2, lambda rank: one(divided(numbers(8), hole, rank)))
    assert all("do not hold all of" in str(error) for error, _ in found)
    assert found[0][1] == found[1][1]


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


def test_ranks_agree_on_a_metric_that_is_nan() -> None:
    store = new_store()

    def work(peers: Peers) -> Any:
        request = CommitRequest(metrics={"loss": -float("nan") if peers.rank else float("nan")})
        return commit_tree(on(store), state_of({"a": 1}, {}, peers.rank), request, peers=peers)

    first, second = run_ranks(2, work, timeout_s=TIMEOUT_S)
    assert first.id == second.id


def test_metrics_that_differ_in_the_sign_of_zero_are_named() -> None:
    store = new_store()

    def work(peers: Peers) -> Any:
        request = CommitRequest(metrics={"loss": -0.0 if peers.rank else 0.0})
        return commit_tree(on(store), state_of({"a": 1}, {}, peers.rank), request, peers=peers)

    found = run_ranks(2, work, timeout_s=TIMEOUT_S, outcomes=True)
    assert all(isinstance(error, PeerError) and "disagree on the metrics" in str(error) for error in found)
