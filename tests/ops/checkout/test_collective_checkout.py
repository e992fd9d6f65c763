"""A commit made by one process is restored on any number of ranks, divided in any way."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from cas_ckpt import limits
from cas_ckpt.errors import CorruptionError, InvalidInputError, MismatchError, PeerError
from cas_ckpt.objects.spec import Box, BoxPlacement, Placement
from cas_ckpt.objects.state import TensorCopy
from cas_ckpt.parallel.peers import Peers
from cas_ckpt.progress import Silent
from cas_ckpt.storage.store import Store
from cas_ckpt.transfer.scatter import PARTLY_WRITTEN
from tests.builders import numbers
from tests.ops.checkout.rank_targets import (
    UNTOUCHED,
    DividedTarget,
    Saved,
    StridedTarget,
    divided_by,
    fetch_on_ranks,
    mesh,
    restore,
    saved,
    targets_of,
)
from tests.thread_peers import run_ranks
from tests.wrapped_stores import CountingStore, FaultyStore, flip_bit

ARRAYS: dict[str, Any] = {
    "wide": numbers(600, 4096, seed=1),
    "tall": numbers(2500, 600, seed=2, dtype="float64"),
    "cube": numbers(30, 70, 90, seed=3, dtype="float16"),
    "line": numbers(3 << 19, seed=4),
    "few": numbers(7, 100, seed=5),
    "tiny": numbers(5, 3, seed=6),
    "scalar": numbers(seed=7),
    "empty": numbers(0, 8, seed=8),
}


@pytest.fixture(scope="module")
def state() -> Saved:
    return saved(ARRAYS)


def by_all_ways(size: int) -> list[tuple[str, Any]]:
    every = mesh(size)
    ways: list[tuple[str, Any]] = [
        ("whole", None),
        ("rows", divided_by(every, 0)),
        ("replicas", divided_by(every, None)),
    ]
    if size % 2 == 0:
        grid = mesh(2, size // 2)
        ways += [
            ("rows of replicas", divided_by(grid, None, 0)),
            ("rows twice", divided_by(grid, 0, 0)),
            ("strided", divided_by(grid, (0, size // 2), 0)),
            ("some ranks", divided_by(mesh(size // 2, ranks=range(1, size, 2)), 0)),
        ]
    return ways


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_every_element_arrives_however_rows_are_divided(state: Saved, size: int) -> None:
    for _, way in by_all_ways(size):
        vectors = {key: way for key, array in ARRAYS.items() if array.ndim}
        restore(state, size, {**vectors, "scalar": None})


@pytest.mark.parametrize("size", [2, 4, 6])
def test_every_element_arrives_however_columns_are_divided(state: Saved, size: int) -> None:
    matrices = [key for key, array in ARRAYS.items() if array.ndim >= 2]
    restore(state, size, dict.fromkeys(matrices, divided_by(mesh(size), 1)))
    for dims in [(0, 1), (1, 0), (1, 1), (None, 1), ((1, size // 2), 1)]:
        restore(state, size, dict.fromkeys(matrices, divided_by(mesh(2, size // 2), *dims)))


def test_more_ranks_than_rows_leave_some_with_nothing(state: Saved) -> None:
    restore(state, 8, {"few": divided_by(mesh(8), 0), "tiny": divided_by(mesh(8), 1)})


def test_targets_in_any_memory_order_are_filled(state: Saved) -> None:
    for way in (None, divided_by(mesh(3), 1)):
        restore(state, 3, {"wide": way, "tall": way, "cube": way}, kind=StridedTarget)


def test_encoded_chunks_are_restored_too() -> None:
    state = saved({**ARRAYS, "zeros": np.zeros((3000, 2000), np.float32)}, encoding="zstd")
    for way in (None, divided_by(mesh(3), 0)):
        restore(state, 3, {"wide": way, "zeros": way, "line": way, "few": way})


def test_each_rank_may_want_other_tensors_and_other_parts(state: Saved) -> None:
    boxes = BoxPlacement(((Box((5, 7), (300, 2000)), (2,)), (Box((305, 0), (10, 4096)), (2,))))
    restore(
        state, 4,
        [
            {"wide": None, "line": divided_by(mesh(2), 0)},
            {"line": divided_by(mesh(2), 0), "tall": None},
            {"wide": boxes, "cube": None, "tiny": None},
            {},
        ],
    )  # fmt: skip


def test_a_rank_may_name_its_own_boxes_alone(state: Saved) -> None:
    cuts = [0, 130, 131, 400, 600]
    boxes = [Box((start, 0), (stop - start, 4096)) for start, stop in pairwise(cuts)]
    alone = [{"wide": BoxPlacement(((box, (rank,)),))} for rank, box in enumerate(boxes)]
    restore(state, 4, alone)
    together = BoxPlacement(tuple((box, (rank,)) for rank, box in enumerate(boxes)))
    restore(state, 4, {"wide": together})


def test_a_mesh_that_names_ranks_which_do_not_ask_serves_those_that_ask(state: Saved) -> None:
    way = divided_by(mesh(4), 0)
    restore(state, 4, [{"wide": way}, {}, {"wide": way, "few": None}, {"wide": way}])


class _Counted:
    """Stores that count what all ranks together read."""

    def __init__(self) -> None:
        self.stores: list[CountingStore] = []

    def __call__(self, store: Store) -> Store:
        self.stores.append(CountingStore(store))
        return self.stores[-1]


def chunk_bytes_read(state: Saved, size: int, way: Placement | None) -> int:
    """Payload bytes that all ranks together read from the store for `line`; both passes."""
    counted = _Counted()
    restore(state, size, {"line": way}, wrap=counted)
    return sum(store.tally("read_into").num_bytes for store in counted.stores)


@pytest.mark.parametrize("size", [2, 5])
def test_every_chunk_is_read_once_however_many_ranks_want_it(state: Saved, size: int) -> None:
    # Once from the medium to verify it, once from what the medium's cache holds to copy it.
    twice = 2 * ARRAYS["line"].nbytes
    headers = 16 << 10  # which are read with the first bytes of their chunks
    assert twice <= chunk_bytes_read(state, size, None) <= twice + headers
    assert twice <= chunk_bytes_read(state, size, divided_by(mesh(size), 0)) <= twice + headers


def test_ranks_share_the_reading_of_what_all_want(state: Saved) -> None:
    counted = _Counted()
    restore(state, 4, {"wide": None, "line": None, "tall": None}, wrap=counted)
    loads = [store.tally("read_into").num_bytes for store in counted.stores]
    assert max(loads) <= 2 * min(loads)


def data_pack(store: Store) -> str:
    return next(key for key, _ in store.list("packs/") if key.endswith(".data"))


def failing(state: Saved, size: int, work: Any) -> tuple[list[Any], list[list[DividedTarget]]]:
    """What `work(peers, handle store wrapper)` raised on each rank, and every rank's targets."""
    targets: list[list[DividedTarget]] = [[] for _ in range(size)]

    def run(peers: Peers) -> None:
        work(peers, targets[peers.rank])

    outcomes: list[Any] = run_ranks(size, run, timeout_s=20, outcomes=True)
    return outcomes, targets


def fetch(
    state: Saved, peers: Peers, store: Store, divided: dict[str, Any], targets: list[DividedTarget], **options: Any
) -> None:
    handle = state.open(lambda inner: store)
    found = targets_of(handle, state.root, divided, peers.rank)
    targets += [target for _, target in found.values()]
    with limits(num_threads=2):
        fetch_on_ranks(handle, [copy for copy, _ in found.values()], peers=peers, **options)


def untouched(targets: Sequence[Sequence[DividedTarget]]) -> bool:
    arrays = [target.array for each in targets for target in each]
    return bool(arrays) and all((np.ascontiguousarray(a).reshape(-1).view(np.uint8) == UNTOUCHED).all() for a in arrays)


@pytest.mark.parametrize("way", [None, divided_by(mesh(4), 0)], ids=["replicas", "rows"])
@pytest.mark.parametrize("bad", [0, 2])
def test_damage_that_one_rank_meets_raises_on_all_and_touches_nothing(state: Saved, way: Any, bad: int) -> None:
    def work(peers: Peers, targets: list[DividedTarget]) -> None:
        store = FaultyStore(state.open().store)
        if peers.rank == bad:
            pack = data_pack(store)
            size = store.head(pack)
            store.damage[pack] = lambda value: _flipped_everywhere(value, size)
        fetch(state, peers, store, {"wide": way, "line": way, "tall": way, "tiny": None}, targets)

    outcomes, targets = failing(state, 4, work)
    assert isinstance(outcomes[bad], CorruptionError)
    for rank, error in enumerate(outcomes):
        assert rank == bad or (isinstance(error, PeerError) and error.ranks == (bad,))
        assert PARTLY_WRITTEN not in str(error)
        assert any(key in str(error) for key in ARRAYS)
    assert untouched(targets)


def _flipped_everywhere(value: bytes, size: int) -> bytes:
    """A bit of every 32 KiB is another: every chunk is damaged."""
    damaged = bytearray(value)
    for at in range(1 << 14, size, 1 << 15):
        damaged[at] ^= 1
    return bytes(damaged)


class _Dropped(Silent):
    """A progress that raises when a phase begins: the rank fails there."""

    def __init__(self, phase: str) -> None:
        self.phase = phase

    def start(self, phase: str, total_bytes: int | None) -> None:
        if phase == self.phase:
            raise KeyboardInterrupt


class _Stubborn(DividedTarget):
    """A target that refuses to be filled."""

    def open(self, box: Box) -> Any:
        raise OSError("the device is gone")


def test_a_rank_that_fails_before_it_told_what_it_wants_fails_all(state: Saved) -> None:
    def work(peers: Peers, targets: list[DividedTarget]) -> None:
        handle = state.open()
        found = targets_of(handle, state.root, {"wide": None, "few": None}, peers.rank)
        targets += [target for _, target in found.values()]
        copies: list[Any] = [copy for copy, _ in found.values()]
        fetch_on_ranks(handle, [*copies, None] if peers.rank == 1 else copies, peers=peers)

    outcomes, targets = failing(state, 3, work)
    assert [type(error) for error in outcomes] == [PeerError, AttributeError, PeerError]
    assert untouched(targets)


def test_a_rank_that_is_interrupted_while_it_verifies_fails_all_with_nothing_touched(state: Saved) -> None:
    def work(peers: Peers, targets: list[DividedTarget]) -> None:
        progress = _Dropped("verifying" if peers.rank == 2 else "")
        fetch(state, peers, state.open().store, {"wide": None, "line": None}, targets, progress=progress)

    outcomes, targets = failing(state, 3, work)
    assert [type(error) for error in outcomes] == [PeerError, PeerError, KeyboardInterrupt]
    assert all("rank 2" in str(error) and PARTLY_WRITTEN not in str(error) for error in outcomes[:2])
    assert untouched(targets)


@pytest.mark.parametrize("way", [None, divided_by(mesh(3), 0)], ids=["replicas", "rows"])
def test_a_rank_that_fails_while_it_copies_fails_all_and_they_say_what_that_means(state: Saved, way: Any) -> None:
    def work(peers: Peers, targets: list[DividedTarget]) -> None:
        handle = state.open()
        kind = _Stubborn if peers.rank == 1 else DividedTarget
        found = targets_of(handle, state.root, {"wide": way, "line": way}, peers.rank, kind)
        with limits(num_threads=2):
            fetch_on_ranks(handle, [copy for copy, _ in found.values()], peers=peers)

    outcomes, _ = failing(state, 3, work)
    assert [type(error) for error in outcomes] == [PeerError, OSError, PeerError]
    told = [str(outcomes[rank]) for rank in (0, 2)]
    assert all("the device is gone" in text and PARTLY_WRITTEN in text for text in told)


class _FailsLate(FaultyStore):
    """Damages what is read once the targets are being filled."""

    def read_into(self, key: str, offset: int, target: memoryview, *, cached_only: bool = False) -> bool:
        if cached_only:
            self.damage[key] = flip_bit(offset)
            return False
        return super().read_into(key, offset, target)


def test_bytes_that_change_between_the_passes_are_found_and_all_ranks_are_told(state: Saved) -> None:
    def work(peers: Peers, targets: list[DividedTarget]) -> None:
        inner = state.open().store
        store = _FailsLate(inner) if peers.rank == 0 else inner
        fetch(state, peers, store, {"wide": None, "line": None}, targets)

    outcomes, _ = failing(state, 3, work)
    assert [type(error) for error in outcomes] == [CorruptionError, PeerError, PeerError]
    assert all(PARTLY_WRITTEN in str(error) for error in outcomes)
    assert str(outcomes[1]).count(PARTLY_WRITTEN) == 1


def test_ranks_that_check_out_different_commits_are_told_so(state: Saved) -> None:
    other = saved({**ARRAYS, "wide": numbers(600, 4096, seed=99)})

    def work(peers: Peers, targets: list[DividedTarget]) -> None:
        mine = other if peers.rank == 1 else state
        fetch(mine, peers, mine.open().store, {"wide": None, "few": None}, targets)

    outcomes, targets = failing(state, 3, work)
    assert [type(error) for error in outcomes] == [MismatchError] * 3
    assert all("wide" in str(error) and "ranks 0, 2" in str(error) and "rank 1" in str(error) for error in outcomes)
    assert untouched(targets)


def test_ranks_whose_small_tensors_differ_are_told_so(state: Saved) -> None:
    other = saved({**ARRAYS, "tiny": numbers(5, 3, seed=99)})

    def work(peers: Peers, targets: list[DividedTarget]) -> None:
        mine = other if peers.rank == 0 else state
        fetch(mine, peers, mine.open().store, {"wide": None, "tiny": None}, targets)

    outcomes, targets = failing(state, 2, work)
    assert [type(error) for error in outcomes] == [MismatchError] * 2
    assert all("tiny" in str(error) for error in outcomes) and untouched(targets)


def test_one_key_with_two_targets_on_one_rank_is_refused(state: Saved) -> None:
    def work(peers: Peers, targets: list[DividedTarget]) -> None:
        handle = state.open()
        copies = [copy for _ in "ab" for copy, _ in targets_of(handle, state.root, {"few": None}, peers.rank).values()]
        fetch_on_ranks(handle, copies[: 2 if peers.rank else 1], peers=peers)

    outcomes, _ = failing(state, 2, work)
    assert [type(error) for error in outcomes] == [InvalidInputError] * 2
    assert "few" in str(outcomes[0]) and "rank 1" in str(outcomes[0])


def test_the_group_works_again_after_a_checkout_that_failed(state: Saved) -> None:
    def work(peers: Peers) -> None:
        handle = state.open()
        found = targets_of(handle, state.root, {"wide": None}, peers.rank)
        copies = [copy for copy, _ in found.values()]
        with pytest.raises((PeerError, KeyboardInterrupt)):
            fetch_on_ranks(handle, copies, peers=peers, progress=_Dropped("verifying" if peers.rank else ""))
        fetch_on_ranks(handle, copies, peers=peers)
        found["wide"][1].check(ARRAYS["wide"])

    run_ranks(2, work, timeout_s=20)


class _Told:
    """Peers that count the messages of this rank to all others that are longer than a few digests."""

    def __init__(self, inner: Peers) -> None:
        self.inner = inner
        self.num_long = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def gather_all(self, message: Any) -> list[bytes]:
        self.num_long += len(message) > 128
        return self.inner.gather_all(message)


def test_ranks_that_want_the_same_tell_one_another_nothing_but_a_digest(state: Saved) -> None:
    keys = list(ARRAYS)

    def num_long(peers: Peers, *, stage: bool) -> int:
        told, handle = _Told(peers), state.open()
        mine = keys[:4] if stage and peers.rank >= 2 else keys
        found = targets_of(handle, state.root, dict.fromkeys(mine), peers.rank)
        copies: list[TensorCopy] = [copy for copy, _ in found.values()]
        order = np.random.default_rng(peers.rank).permutation(len(copies))
        fetch_on_ranks(handle, [copies[at] for at in order], peers=told)
        return told.num_long

    assert run_ranks(4, lambda peers: num_long(peers, stage=False), timeout_s=20) == [0] * 4
    assert run_ranks(4, lambda peers: num_long(peers, stage=True), timeout_s=20) == [1, 0, 1, 0]
