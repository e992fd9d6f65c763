"""Replicas: every byte that several ranks hold is compared, and a tensor is stored as one of them had it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cas_ckpt.errors import PeerError
from cas_ckpt.objects.spec import Box, BoxPlacement, Mesh, MeshPlacement, parse_split
from cas_ckpt.objects.state import Container, TensorItem
from cas_ckpt.ops.commit.ranks import MOST_TOLD
from tests.builders import numbers, same_bytes, tensor
from tests.committing import new_store, one, root_alone, stored, together
from tests.divided import divided, mesh, over, state_of

Array = np.ndarray[Any, Any]


def drifted(array: Array, *places: tuple[int, ...]) -> Array:
    """A copy in which one bit of each of these elements is another."""
    copy = array.copy()
    raw = copy.view(np.uint32)
    for place in places:
        raw[place] ^= 1
    return copy


def refused(found: list[Any], key: str) -> bool:
    return all(isinstance(error, PeerError) and f"{key}: ranks " in str(error) for error in found)


def test_one_bit_of_one_element_is_found_at_every_commit() -> None:
    # Two ranks, another element each: what one of them does not write, the other one does.
    array = numbers(2048, 1024)
    for seed in range(4):
        chance = np.random.default_rng(seed)
        own = [drifted(array, (int(chance.integers(2048)), int(chance.integers(1024)))) for _ in range(2)]
        store = new_store()
        assert refused(together(store, 2, lambda rank, own=own: state_of({"w": own[rank]}, {}, rank)), "w")
        assert not list(store.list("refs/"))


@pytest.mark.parametrize("shape", [(300,), (333, 7), (5, 40_000), (3, 5, 7, 11)], ids=str)
@pytest.mark.parametrize("dtype", ["uint8", "float16", "complex128"])
def test_a_difference_is_found_in_any_shape_and_width(shape: tuple[int, ...], dtype: str) -> None:
    array = (numbers(*shape) * 9).astype(dtype)
    other = array.copy()
    other.reshape(-1)[-1] += 1
    found = together(new_store(), 2, lambda rank: state_of({"w": other if rank else array}, {}, rank), replica_audit=0)
    assert all(isinstance(error, PeerError) and "w" in str(error) for error in found)


def test_signs_of_zero_and_payloads_of_nan_are_bytes() -> None:
    zeros, nans = np.zeros((2, 1000), "float32"), np.full((2, 1000), np.nan, "float32")
    for array in (zeros, nans):
        other = array.copy()
        other.view(np.uint32)[1, 999] ^= 1 << 31
        found = together(new_store(), 2, lambda rank, pair=(array, other): state_of({"w": pair[rank]}, {}, rank))
        assert refused(found, "w")


def test_replicas_that_lie_differently_in_memory_are_equal() -> None:
    array = numbers(600, 700)
    own = [array, np.asfortranarray(array), np.repeat(array, 2, axis=1)[:, ::2]]
    infos = together(new_store(), 3, lambda rank: state_of({"w": own[rank]}, {}, rank), replica_audit=1.0)
    assert {info.root for info in infos} == {root_alone({"w": array})}


def test_samples_alone_are_compared_by_who_says_so() -> None:
    array = numbers(2048, 1024)
    other = drifted(array, (1000, 1000))
    state: Callable[[int], Container] = lambda rank: state_of({"w": other if rank else array}, {}, rank)  # noqa: E731
    infos = together(new_store(), 2, state, replica_check="sample", replica_audit=0)
    assert infos[0].root == infos[1].root
    assert refused(together(new_store(), 2, state, replica_check="sample", replica_audit=1.0), "w")


# --- one replica, whole ------------------------------------------------------------------------


def hybrid(placement: MeshPlacement, arrays: list[Array]) -> Callable[[int], Container]:
    """Rank -> its part, cut out of an array of its own."""
    return lambda rank: one(divided(arrays[rank], placement, rank))


@pytest.mark.parametrize(("ranks", "kept"), [((0, 1, 2, 3), (0, 1)), ((0, 3, 2, 1), (0, 3))])
def test_a_warning_stores_the_tensor_as_one_row_of_the_mesh_had_it(
    ranks: tuple[int, ...], kept: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    # Both shards differ between the two rows of the mesh; in the second case the lowest ranks stand in other rows.
    grid = Mesh(("replica", "shard"), (2, 2), ranks)
    placement = MeshPlacement(grid, (parse_split("R"), parse_split("S(0)")))
    array = numbers(1000, 700)
    row_of = {rank: at // 2 for at, rank in enumerate(ranks)}
    rows = [array, drifted(array, (1, 1), (999, 699))]
    store = new_store()
    with caplog.at_level(logging.WARNING, "cas_ckpt"):
        infos = together(store, 4, hybrid(placement, [rows[row_of[rank]] for rank in range(4)]), on_divergence="warn")
    assert same_bytes(stored(store, infos[0].root)["w"], rows[0])
    assert f"the commit holds the whole tensor as ranks {kept[0]}, {kept[1]} had it" in caplog.text


def test_a_warning_keeps_one_replica_of_each_of_very_many_tensors() -> None:
    arrays = {f"w{at}": numbers(300, seed=at) for at in range(MOST_TOLD + 20)}
    others = {name: drifted(array, (0,), (299,)) for name, array in arrays.items()}
    big = numbers(2048, 1024)
    arrays["z"], others["z"] = big, drifted(big, *((at, 0) for at in range(0, 2048, 64)))
    store = new_store()
    state: Callable[[int], Container] = lambda rank: state_of(others if rank else arrays, {}, rank)  # noqa: E731
    infos = together(store, 2, state, on_divergence="warn")
    assert infos[0].root == root_alone(arrays)


def test_small_tensors_of_a_mesh_are_stored_as_one_row_of_it_had_them() -> None:
    grid = Mesh(("replica", "shard"), (2, 2), (0, 3, 2, 1))
    placement = MeshPlacement(grid, (parse_split("R"), parse_split("S(0)")))
    rows = [numbers(10), numbers(10, seed=1)]
    store = new_store()
    state = hybrid(placement, [rows[0], rows[1], rows[1], rows[0]])
    infos = together(store, 4, state, on_divergence="warn")
    assert infos[0].root == root_alone({"w": rows[0]})


# --- parts that overlap ------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, 1200], ids=["inline", "in chunks"])
def test_boxes_of_several_ranks_are_compared_where_they_overlap(size: int) -> None:
    boxes = ((Box((0, 0), (3, size)), (0,)), (Box((2, 0), (3, size)), (1,)))
    array = numbers(5, size)
    own = [array, drifted(array, (2, size - 1))]

    def state(rank: int) -> Container:
        return one(divided(own[rank], BoxPlacement(boxes), rank))

    assert all(isinstance(error, PeerError) and "w" in str(error) for error in together(new_store(), 2, state))
    own[1] = array
    assert together(new_store(), 2, state)[0].root == root_alone({"w": array})


def test_shards_of_two_meshes_that_cross_are_compared() -> None:
    array = numbers(600, 700)
    rows, columns = over(mesh(2), "S(0)"), over(mesh(2, first=2), "S(1)")
    own = [array] * 3 + [drifted(array, (300, 699))]

    def state(rank: int) -> Container:
        return one(divided(own[rank], rows if rank < 2 else columns, rank))

    assert refused(together(new_store(), 4, state), "w")
    own[3] = array
    assert together(new_store(), 4, state)[0].root == root_alone({"w": array})


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
