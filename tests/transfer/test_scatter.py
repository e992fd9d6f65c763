"""What is sent is cut into rounds of bounded size; neighbours take from their common cache instead."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cas_ckpt import limits
from cas_ckpt.errors import CkptError, CorruptionError, InternalError, PeerError, StorageError
from cas_ckpt.memory import ALIGN_BYTES, aligned
from cas_ckpt.objects.spec import Box, Delivery, Placement
from cas_ckpt.parallel.peers import Peers
from cas_ckpt.storage.file import FileStore
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.storage.probe import NO_TOKEN, cache_token
from cas_ckpt.storage.store import Store
from cas_ckpt.transfer import scatter, sources
from cas_ckpt.transfer.hashing import stretches
from cas_ckpt.transfer.scatter import (
    Incoming,
    Neighbourhood,
    Streams,
    TargetTensor,
    cut_rounds,
    quota_bytes,
    unpack_pointers,
)
from tests.builders import numbers
from tests.far import FarStore
from tests.ops.checkout.rank_targets import Saved, divided_by, fetch_on_ranks, mesh, restore, saved, targets_of
from tests.thread_peers import run_ranks
from tests.wrapped_stores import CountingStore

KIB = 1024
ARRAYS = {"wide": numbers(600, 4096, seed=1), "line": numbers(3 << 19, seed=2), "few": numbers(40, 100, seed=3)}

boxes = st.lists(st.integers(1, 60), min_size=1, max_size=3).map(lambda sizes: Box((3,) * len(sizes), tuple(sizes)))


@given(boxes, st.sampled_from([1, 4, 16]), st.integers(16, 4000))
def test_the_parts_of_a_box_are_short_and_follow_one_another(box: Box, item_bytes: int, limit: int) -> None:
    parts = list(stretches(box, limit // item_bytes))
    assert all(part.num_elements * item_bytes <= limit for part in parts)
    whole = np.arange(box.num_elements).reshape(box.sizes)
    pieces = [whole[part.relative_to(box).slices].reshape(-1) for part in parts]
    assert (np.concatenate(pieces) == whole.reshape(-1)).all()


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 700)), max_size=5), max_size=12),
    st.lists(st.integers(1, 9), min_size=4, max_size=4),
)
def test_no_round_exceeds_the_budget_or_a_quota_and_nothing_is_lost(
    wanted: list[list[tuple[int, int]]], senders: list[int]
) -> None:
    budget = 256 * KIB
    quotas = [quota_bytes(number, budget) for number in senders]
    reads = [
        (at, KIB, [Delivery(rank, Box((0,), (size,))) for rank, size in sends])
        for at, sends in enumerate(wanted)
        if sends
    ]
    rounds = cut_rounds(reads, quotas=quotas, budget_bytes=budget)
    sent: Counter[tuple[int, int]] = Counter()
    for each in rounds:
        assert sum(aligned(parts[-1].stop) for parts in each.parts.values()) <= budget
        for receiver, parts in each.parts.items():
            assert parts[-1].stop <= quotas[receiver]
            assert all(part.start % ALIGN_BYTES == 0 and part.stop > part.start for part in parts)
            for part in parts:
                sent[part.read, receiver] += part.box.num_elements
    expected: Counter[tuple[int, int]] = Counter()
    for at, _, sends in reads:
        for send in sends:
            expected[at, send.rank] += send.box.num_elements
    assert sent == expected
    assert all(each.parts for each in rounds)


@pytest.fixture(scope="module")
def state() -> Saved:
    return saved(ARRAYS)


@pytest.fixture(scope="module")
def small() -> Saved:
    """Some tensors of a chunk each besides a larger one; two of them are equal."""
    arrays = {f"small {number}": numbers(80, 91, seed=min(number, 78)) for number in range(80)}
    return saved({"wide": ARRAYS["wide"], **arrays}, encoding="raw")


@pytest.mark.parametrize("budget", [64 * KIB, 300 * KIB, 5000 * KIB])
def test_a_small_budget_changes_nothing_but_the_number_of_rounds(
    state: Saved, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scatter.verify_and_scatter, "__kwdefaults__", {"budget_bytes": budget})
    for way in (None, divided_by(mesh(3), 0), divided_by(mesh(3), 1)):
        restore(state, 3, {"wide": way, "few": way, "line": None})


def test_what_does_not_follow_the_plan_is_refused() -> None:
    box = Box((0,), (10,))
    tensor = TargetTensor("w", 4, None)
    streams = Streams([Incoming(1, tensor, box, box)], 64 * KIB)
    with pytest.raises(InternalError, match="rank 1 sent 39 bytes"):
        streams.take(0, [b"", bytes(39)])
    waiting = Streams([Incoming(1, tensor, box, box)], 64 * KIB)
    with pytest.raises(InternalError, match="rank 1 still owes 1"):
        waiting.check_empty()
    assert len(waiting.take(0, [b"", bytes(40)])) == 1
    with pytest.raises(InternalError, match="rank 1 sent 40"):
        waiting.take(0, [b"", bytes(40)])
    with pytest.raises(InternalError, match="points at 0 chunks"):
        unpack_pointers(b"", keys=["w"], reader=2)
    with pytest.raises(CorruptionError):
        unpack_pointers(b"\xff\xff", keys=["w"], reader=2)


def test_only_stores_in_one_folder_share_a_cache(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    token = cache_token(FileStore(tmp_path / "a"))
    assert token == cache_token(FileStore(tmp_path / "link")) != NO_TOKEN
    assert token != cache_token(FileStore(tmp_path / "b"))
    assert cache_token(MemoryStore()) == cache_token(CountingStore(FileStore(tmp_path / "a"))) == NO_TOKEN


def test_neighbours_are_pointed_at_large_parts_only() -> None:
    cell = Box((0,), (100,))
    around = Neighbourhood((1, 1, 1, 1), (b"x" * 16, b"x" * 16, b"y" * 16, NO_TOKEN))
    assert around.points(0, 1, cell=cell, box=Box((0,), (25,)))
    assert not around.points(0, 1, cell=cell, box=Box((0,), (24,)))
    assert not around.points(0, 2, cell=cell, box=cell) and not around.points(3, 3, cell=cell, box=cell)
    assert not around.is_empty and Neighbourhood((1, 1), (NO_TOKEN, NO_TOKEN)).is_empty


class _Watched(FileStore):
    """A file store that counts what is asked of the medium; it may forget everything between the passes.

    The kernel may find a page busy and say that it is not cached; this one remembers for certain.
    """

    forgets = False

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.fresh = 0

    def read_leaves(self, key: str, offset: int, first: int, size: int, *rest: Any) -> int:
        *rest, cached_only = rest
        if cached_only and self.forgets:
            return 0
        self.fresh += 0 if cached_only else size
        return super().read_leaves(key, offset, first, size, *rest)


class _Forgetful(_Watched):
    forgets = True


@pytest.mark.parametrize("kind", [_Watched, _Forgetful])
@pytest.mark.parametrize("encoding", ["raw", "zstd"])
def test_neighbours_take_what_one_of_them_verified_from_their_common_cache(
    tmp_path: Path, kind: type[_Watched], encoding: str
) -> None:
    state = saved(ARRAYS, folder=tmp_path / "repo", encoding=encoding)
    stores: list[_Watched] = []

    def watched(_: object) -> _Watched:
        stores.append(kind(tmp_path / "repo"))
        return stores[-1]

    for way in (None, divided_by(mesh(3), 0), divided_by(mesh(3), 1)):
        stores.clear()
        restore(state, 3, {"wide": way, "line": None, "few": way}, wrap=watched)
        if kind is _Watched and encoding == "raw":
            total = sum(array.nbytes for array in ARRAYS.values())
            assert sum(store.fresh for store in stores) == total


def test_a_neighbour_that_finds_other_bytes_where_it_was_pointed_raises_on_all(tmp_path: Path) -> None:
    state = saved(ARRAYS, folder=tmp_path / "repo")

    class Changed(_Forgetful):
        """What is read afresh in the second pass is damaged."""

        second = False

        def read_leaves(self, *asked: Any) -> int:
            cached_only = asked[-1]
            self.second |= cached_only
            return 0 if self.second and not cached_only else super().read_leaves(*asked)

    def work(peers: Peers) -> None:

        kind = Changed if peers.rank == 1 else _Watched
        handle = state.open(lambda _: kind(tmp_path / "repo"))
        found = targets_of(handle, state.root, {"wide": None, "line": None}, peers.rank)
        with limits(num_threads=2):
            fetch_on_ranks(handle, [copy for copy, _ in found.values()], peers=peers)

    outcomes = run_ranks(3, work, timeout_s=20, outcomes=True)
    assert [type(error) for error in outcomes] == [PeerError, CorruptionError, PeerError]
    assert all(scatter.PARTLY_WRITTEN in str(error) for error in outcomes)


@pytest.mark.parametrize("way", [None, divided_by(mesh(3), 0), divided_by(mesh(3), 1)])
def test_ranks_read_each_byte_of_a_store_far_away_once_together(state: Saved, way: Placement | None) -> None:
    stores: list[FarStore] = []

    def far(store: Store) -> Store:
        stores.append(FarStore(store))
        return stores[-1]

    restore(state, 3, {"wide": way, "few": way, "line": None}, wrap=far)
    read = [each for store in stores for each in store.data_reads]
    assert len(stores) == 3 and len(read) == len(set(read))
    ranges = sorted(read)
    assert all(a[0] != b[0] or a[1] + a[2] <= b[1] for a, b in pairwise(ranges))
    stored = sum(array.nbytes for array in ARRAYS.values())
    assert stored <= sum(length for _, _, length in read) <= 1.01 * stored


@pytest.mark.parametrize("way", [None, divided_by(mesh(3), 0), divided_by(mesh(3), 1)])
def test_what_ranks_cannot_stage_they_read_twice_and_together(
    small: Saved, way: Placement | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "temporary_folders", list)
    stores: list[FarStore] = []

    def far(store: Store) -> Store:
        stores.append(FarStore(store))
        return stores[-1]

    restore(small, 3, {key: way if key == "wide" else None for key in small.arrays}, wrap=far)
    read = [each for store in stores for each in store.data_reads]
    stored = sum(array.nbytes for array in small.arrays.values())
    assert 1.99 * stored < sum(length for _, _, length in read) <= 2.1 * stored
    assert len(read) < len(small.arrays), "not one for each chunk"


def test_one_rank_whose_connection_breaks_leaves_all_targets_of_all_ranks_untouched(state: Saved) -> None:
    targets = {}

    def work(peers: Peers) -> None:
        handle = state.open(FarStore)
        assert isinstance(handle.store, FarStore)
        found = targets_of(handle, state.root, dict.fromkeys(ARRAYS, divided_by(mesh(3), 0)), peers.rank)
        targets[peers.rank] = found
        if peers.rank == 1:
            handle.store.before_read = broken
        with limits(num_threads=2):
            fetch_on_ranks(handle, [copy for copy, _ in found.values()], peers=peers)

    def broken(key: str, number: int) -> None:
        if key.endswith(".data"):
            raise StorageError(f"{key}: connection reset")

    outcomes = run_ranks(3, work, outcomes=True)
    assert all(isinstance(each, CkptError) and "connection reset" in str(each) for each in outcomes)
    assert not any(target.opened for found in targets.values() for _, target in found.values())
