"""Several ranks commit together: one commit, the same root as that of one process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cas_ckpt import limits
from cas_ckpt.core.records import CommitInfo
from cas_ckpt.errors import ConflictError, InvalidInputError, PeerError
from cas_ckpt.index import contents
from cas_ckpt.objects.spec import Box, BoxPlacement, Placement, Spec
from cas_ckpt.objects.state import Container, TensorItem, ValueItem
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.frozen import FrozenMemory
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.parallel.peers import Peers
from tests import committing
from tests.builders import ArrayMemory, commit, numbers, same_bytes, stored_arrays
from tests.committing import new_store, on
from tests.divided import boxes_by_rank, divided, mesh, over, state_of
from tests.searches import tries
from tests.thread_peers import run_ranks

Placements = dict[str, Placement]


together = partial(committing.together, outcomes=False, timeout_s=20)

ITEMS = {
    "model": {
        "w": numbers(1500, 700, seed=1),
        "b": numbers(700, seed=2),
        "tiny": numbers(7, seed=3),
        "scalar": np.array(3.5, np.float32),
        "empty": numbers(0, 5),
    },
    "step": 12,
    "names": ["a", "b"],
}


def placed(size: int, *splits: str) -> Placements:
    return {f"model/{name}": over(mesh(size), *splits) for name in ("w", "b", "tiny")}


CASES: dict[str, tuple[int, Placements]] = {
    "whole on every rank": (4, {}),
    "rows over two": (2, placed(2, "S(0)")),
    "rows over three, uneven": (3, placed(3, "S(0)")),
    "rows over eight, some empty": (8, placed(8, "S(0)")),
    "columns over four": (4, {"model/w": over(mesh(4), "S(1)")}),
    "columns over three, off the cells": (3, {"model/w": over(mesh(3), "S(1)")}),
    "rows and columns": (6, {"model/w": over(mesh(3, 2), "S(0)", "S(1)")}),
    "hybrid: rows twice": (4, {"model/w": over(mesh(2, 2), "R", "S(0)")}),
    "strided": (4, {"model/w": over(mesh(2, 2), "SS(0,2)", "S(0)")}),
    "replicated on a mesh": (2, {"model/w": over(mesh(2), "R")}),
    "boxes": (3, {"model/w": boxes_by_rank((1500, 700), [(3, 700, 1300), (13, 333)], 3)}),
    "a mesh of some ranks": (4, {"model/w": over(mesh(2, first=1), "S(0)")}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_division_has_the_root_and_the_chunks_of_the_undivided_state(case: str) -> None:
    size, placements = CASES[case]
    alone, store = new_store(), new_store()
    wanted = commit(on(alone), ITEMS)
    infos = together(store, size, lambda rank: state_of(ITEMS, placements, rank))
    assert {info.id for info in infos} == {infos[0].id}
    assert infos[0].root == wanted.root
    handle = on(store)
    handle.sync()
    assert same_bytes(stored_arrays(handle, wanted.root)["model/w"], ITEMS["model"]["w"])  # type: ignore[index]
    assert infos[0].stats.total_bytes == wanted.stats.total_bytes
    assert infos[0].stats.num_chunks == wanted.stats.num_chunks
    assert infos[0].stats.num_new_chunks == wanted.stats.num_new_chunks
    assert abs(infos[0].stats.new_bytes - wanted.stats.new_bytes) < 1024


@pytest.mark.parametrize("case", CASES)
def test_a_second_save_under_another_division_writes_no_chunk(case: str) -> None:
    size, placements = CASES[case]
    store = new_store()
    first = commit(on(store), ITEMS)
    infos = together(store, size, lambda rank: state_of(ITEMS, placements, rank))
    assert infos[0].root == first.root
    assert infos[0].stats.num_new_chunks == 0
    assert infos[0].stats.new_bytes < 1024


def test_what_was_saved_in_parts_is_known_afterwards() -> None:
    store = new_store()
    placements = {"model/w": over(mesh(3), "S(1)")}
    first = together(store, 3, lambda rank: state_of(ITEMS, placements, rank))
    again = together(store, 3, lambda rank: state_of(ITEMS, placements, rank))
    assert first[0].stats.num_new_chunks > 0
    assert again[0].stats.num_new_chunks == 0
    assert again[0].parents == (first[0].id,)
    assert commit(on(store), ITEMS).stats.num_new_chunks == 0


def test_parts_of_a_commit_that_died_are_not_taken_for_whole_chunks() -> None:
    store = new_store()
    placements = {"model/w": over(mesh(2), "S(0)")}
    together(store, 2, lambda rank: state_of(ITEMS, placements, rank))
    packs = [key for key, _ in store.list("packs/") if key.endswith(".data")]
    store.delete(packs[0])
    fresh = on(store)
    info = commit(fresh, ITEMS)
    assert info.stats.num_new_chunks > 0
    assert same_bytes(stored_arrays(fresh, info.root)["model/w"], ITEMS["model"]["w"])  # type: ignore[index]


def stage(rank: int) -> Container:
    items = {"layers": {str(at): {"w": numbers(300, 300, seed=at)} for at in range(4) if at // 2 == rank}, "step": 1}
    return state_of(items, {}, rank)


def test_pipeline_stages_are_united() -> None:
    store, alone = new_store(), new_store()
    info = together(store, 2, stage)[0]
    items = {"layers": {str(at): {"w": numbers(300, 300, seed=at)} for at in range(4)}, "step": 1}
    assert info.root == commit(on(alone), items).root


def ranks_of(rank: int, size: int, value: Any) -> Container:
    return Container("ranks", {rank: ValueItem(value)}, {"world_size": size})


def test_values_of_each_rank_are_kept_apart() -> None:
    store = new_store()

    def state(rank: int) -> Container:
        noise = divided(numbers(900, seed=rank), over(mesh(1, first=rank), "R"), rank)
        own = Container("dict", {"position": ValueItem(rank * 10), "noise": noise})
        shared = state_of({"w": numbers(5)}, {}, rank)
        return Container("dict", {"w": shared, "loader": Container("ranks", {rank: own}, {"world_size": 3})})

    info = together(store, 3, state)[0]
    handle = on(store)
    handle.sync()
    arrays = stored_arrays(handle, info.root)
    assert [same_bytes(arrays[f"loader/{rank}/noise"], numbers(900, seed=rank)) for rank in range(3)] == [True] * 3
    assert together(store, 3, state)[0].stats.num_new_chunks == 0


# --- disagreement ---------------------------------------------------------------------------


def refusals(size: int, state: Callable[[int], Container], **request: Any) -> list[Any]:
    store = new_store()
    commit(on(store), {"a": 1})
    before = dict(store.list("refs/"))
    found = together(store, size, state, outcomes=True, **request)
    assert dict(store.list("refs/")) == before
    assert commit(on(store), ITEMS).parents
    return found


@pytest.mark.parametrize(
    ("name", "odd"),
    [
        ("the shape", {"w": numbers(300, 3)}),
        ("the dtype", {"w": numbers(300, 4, dtype="float64")}),
        ("a value", {"w": numbers(300, 4), "lr": 0.2}),
        ("a kind", {"w": {"x": 1}}),
    ],
)
def test_a_rank_that_disagrees_makes_all_raise(name: str, odd: dict[str, Any]) -> None:
    even = {"w": numbers(300, 4), "lr": 0.1}
    found = refusals(3, lambda rank: state_of(odd if rank == 1 else even, {}, rank))
    assert all(isinstance(error, PeerError) for error in found), name
    assert all("rank" in str(error) and ("w" in str(error) or "lr" in str(error)) for error in found)


def test_a_missing_key_of_a_mesh_is_named() -> None:
    placement = over(mesh(3), "S(0)")
    full, less = {"w": numbers(30, 40)}, {"v": 1}
    found = refusals(3, lambda rank: state_of(less if rank == 2 else full, {"w": placement}, rank))
    assert all(isinstance(error, PeerError) and "w: ranks [2] do not have this key" in str(error) for error in found)


def test_a_region_that_no_rank_holds_is_named() -> None:
    whole = boxes_by_rank((30, 400), [(10, 20), ()], 2)
    short = BoxPlacement(whole.boxes[:2])
    found = refusals(2, lambda rank: state_of({"w": numbers(30, 400)}, {"w": short}, rank))
    assert all("do not hold all of" in str(error) and "w" in str(error) for error in found)


@pytest.mark.parametrize("request_of", [{"message": "ab"}, {"branch": "ab"}, {"step": 1}])
def test_ranks_that_say_different_things_are_named(request_of: dict[str, Any]) -> None:
    store = new_store()
    ((field, value),) = request_of.items()

    def work(peers: Peers) -> CommitInfo:
        own = value[: peers.rank + 1] if isinstance(value, str) else value + peers.rank
        return commit_tree(on(store), state_of({"w": 1}, {}, peers.rank), CommitRequest(**{field: own}), peers=peers)

    found = run_ranks(2, work, timeout_s=20, outcomes=True)
    assert all(isinstance(error, PeerError) and f"disagree on the {field}" in str(error) for error in found)
    assert not list(store.list("refs/"))


def test_replicas_that_drifted_apart_are_found() -> None:
    even, odd = numbers(3000, 40), numbers(3000, 40)
    odd += 1e-3
    found = refusals(3, lambda rank: state_of({"w": odd if rank == 2 else even}, {}, rank))
    assert all(isinstance(error, PeerError) for error in found)
    assert all("w: ranks 2 hold other bytes than rank 0" in str(error) for error in found)


def test_a_single_element_that_drifted_is_found_when_all_is_compared() -> None:
    even, odd = numbers(3000, 40), numbers(3000, 40)
    odd[1234, 5] += 1
    found = refusals(2, lambda rank: state_of({"w": odd if rank else even}, {}, rank), replica_audit=1.0)
    assert all(isinstance(error, PeerError) and "hold other bytes" in str(error) for error in found)


def test_a_divergence_may_be_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    store = new_store()
    with caplog.at_level(logging.WARNING, "cas_ckpt"):
        drifted = [state_of({"w": numbers(90, 90, seed=rank), "lr": rank}, {}, rank) for rank in range(2)]
        infos = together(store, 2, lambda rank: drifted[rank], on_divergence="warn")
    assert infos[0].id == infos[1].id
    assert "w: ranks 1 hold other bytes" in caplog.text
    assert "lr" in caplog.text


def test_an_error_of_one_rank_is_told_to_all() -> None:
    store = new_store()

    def work(peers: Peers) -> CommitInfo:
        step = "no number" if peers.rank == 1 else 1
        return commit_tree(on(store), state_of({"w": 1}, {}, peers.rank), CommitRequest(step=step), peers=peers)  # type: ignore[arg-type]

    found = run_ranks(3, work, timeout_s=20, outcomes=True)
    assert isinstance(found[1], InvalidInputError)
    assert all(isinstance(found[rank], PeerError) and "rank 1" in str(found[rank]) for rank in (0, 2))


def test_a_conflict_is_told_to_all() -> None:
    store = new_store()
    commit(on(store), {"a": 1})

    def work(peers: Peers) -> CommitInfo:
        handle = on(store)
        if peers.rank == 0:
            original = handle.refs.swap

            def late(*args: Any, **kwargs: Any) -> Any:
                handle.refs.swap = original  # type: ignore[method-assign]
                commit(on(store), {"a": 2})
                return original(*args, **kwargs)

            handle.refs.swap = late  # type: ignore[method-assign]
        request = CommitRequest(on_conflict="raise")
        return commit_tree(handle, state_of({"w": 1}, {}, peers.rank), request, peers=peers)

    found = run_ranks(2, work, timeout_s=20, outcomes=True)
    assert isinstance(found[0], ConflictError)
    assert isinstance(found[1], PeerError)


# --- cost -----------------------------------------------------------------------------------


class CountedMemory(ArrayMemory):
    """An array that counts the bytes that are read of it."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        super().__init__(array)
        self.num_bytes = 0

    def read(self, box: Box) -> np.ndarray[Any, Any]:
        self.num_bytes += box.num_elements * self.array.itemsize
        return super().read(box)


def test_replicas_are_hashed_and_written_about_once_over_all_ranks() -> None:
    arrays = [numbers(2048, 1024, seed=seed) for seed in range(6)]
    state_bytes = sum(array.nbytes for array in arrays)
    store = new_store()
    memories = [[CountedMemory(array) for array in arrays] for _ in range(4)]

    def state(rank: int) -> Container:
        spec = Spec("float32", (2048, 1024))
        items = {f"w{n}": TensorItem(spec, memory, "numpy") for n, memory in enumerate(memories[rank])}
        return Container("dict", {**items})

    info = together(store, 4, state, replica_check="sample")[0]
    read = [sum(memory.num_bytes for memory in each) for each in memories]
    assert state_bytes <= sum(read) <= 1.1 * state_bytes
    assert max(read) <= 1.2 * sum(read) / 4
    assert state_bytes <= info.stats.new_bytes <= 1.01 * state_bytes


def test_frozen_tensors_are_not_hashed_again() -> None:
    array = numbers(2048, 1024, seed=1)
    store, memories = new_store(), [CountedMemory(array) for _ in range(2)]
    kept = [FrozenMemory(), FrozenMemory()]
    placement = over(mesh(2), "S(0)")

    def work(peers: Peers) -> CommitInfo:
        item = TensorItem(Spec("float32", (2048, 1024)), memories[peers.rank], "numpy", ("memory", 1), placement)
        request = CommitRequest(frozen="w", frozen_check=check, frozen_audit=0.0)
        state = Container("dict", {"w": item})
        with limits(num_threads=1):
            return commit_tree(on(store), state, request, peers=peers, memory=kept[peers.rank])

    roots, read = set(), []
    for check in ("checksum", "checksum", "version"):  # noqa: B007 - `work` reads it
        roots.add(run_ranks(2, work, timeout_s=20)[0].root)
        read.append([memory.num_bytes for memory in memories])
    half = array.nbytes // 2
    assert read == [[2 * half] * 2, [3 * half] * 2, [3 * half] * 2]  # summed and hashed, summed, believed
    assert len(roots) == 1


# --- any mesh -------------------------------------------------------------------------------


@st.composite
def divisions(draw: st.DrawFn) -> tuple[np.ndarray[Any, Any], int, Placement]:
    shape = tuple(draw(st.lists(st.integers(1, 90), min_size=1, max_size=3)))
    dtype = draw(st.sampled_from(["uint8", "float16", "float32", "complex128"]))
    ranks = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    splits = []
    for _ in ranks:
        dim = draw(st.integers(-1, len(shape) - 1))
        stride = draw(st.sampled_from([1, 1, 2, 3]))
        splits.append("R" if dim < 0 else f"S({dim})" if stride == 1 else f"SS({dim},{stride})")
    array = np.random.default_rng(draw(st.integers(0, 5))).integers(0, 100, shape).astype(dtype)
    return array, int(np.prod(ranks)), over(mesh(*ranks), *splits)


@settings(max_examples=tries(20, 60), deadline=None)
@example((numbers(2, 101, 331), 2, over(mesh(2), "S(1)")))  # leaves of several boxes each, which the ranks share
@given(divisions())
def test_the_same_state_has_the_same_root_and_chunks_under_any_mesh(case: tuple[Any, int, Placement]) -> None:
    array, size, placement = case
    alone, store = new_store(), new_store()
    wanted_handle = on(alone)
    wanted = commit(wanted_handle, {"w": array})
    info = together(store, size, lambda rank: state_of({"w": array}, {"w": placement}, rank))[0]
    assert info.root == wanted.root
    handle = on(store)
    handle.sync()
    assert handle.known([bytes(each) for each in wanted_handle.index.read(contents.chunk_digests)]) == [True] * len(
        wanted_handle.index.read(contents.chunk_digests)
    )
    assert same_bytes(stored_arrays(handle, info.root)["w"], array)
