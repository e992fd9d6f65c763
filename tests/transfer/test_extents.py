"""A chunk that is stored in parts: put together and verified, or refused when parts are missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cas_ckpt.errors import CorruptionError, NotFoundError
from cas_ckpt.index import contents
from cas_ckpt.native import leaf_digests, runs_of_boxes
from cas_ckpt.objects import pack
from cas_ckpt.objects.digest import ObjectKind, chunk_id
from cas_ckpt.objects.pack import ExtentInfo, Location
from cas_ckpt.objects.spec import Box, raw_dtype
from cas_ckpt.progress import SILENT
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.transfer.chunk_reader import ChunkFiller, ChunkPart, ChunkReader, NewArray, StoredChunk, leaves_touched
from tests.builders import commit, new_repository, numbers

DATA = bytes(range(250))
LEAF = 100
DIGESTS = leaf_digests(memoryview(DATA), LEAF)
CHUNK = chunk_id(len(DATA), DIGESTS)
HEADER_OF_ONE = pack.entry_header_bytes(1)


def placed(store: MemoryStore, pack_name: str, first: int, count: int, *, flip: bool = False) -> Location:
    """An extent alone in a pack of its own."""
    payload = bytearray(DATA[first * LEAF : (first + count) * LEAF])
    header_bytes = pack.entry_header_bytes(len(DIGESTS) // 32)
    info = ExtentInfo(CHUNK, ObjectKind.CHUNK, 0, len(DATA), len(payload), LEAF, first, count, 0, header_bytes)
    payload[0] ^= flip
    store.put(pack_name, pack.encode_entry_header(info, DIGESTS) + bytes(payload))
    return Location(pack_name, ObjectKind.CHUNK, len(DATA), first, count, LEAF, 0, header_bytes, len(payload), 0, None)


def test_a_chunk_in_two_extents_is_put_together_and_verified() -> None:
    store = MemoryStore()
    reader = ChunkReader(store)
    extents = reader.verify(CHUNK, [placed(store, "b", 2, 1), placed(store, "a", 0, 2)], num_bytes=250)
    target = bytearray(len(DATA))
    reader.read(extents, memoryview(target))
    assert bytes(target) == DATA


@pytest.mark.parametrize("parts", [[(0, 2)], [(1, 2)], [(0, 1), (2, 1)]])
def test_a_chunk_of_which_a_part_is_missing_is_refused(parts: list[tuple[int, int]]) -> None:
    store = MemoryStore()
    places = [placed(store, f"p{first}", first, count) for first, count in parts]
    with pytest.raises(CorruptionError, match="do not cover"):
        ChunkReader(store).intact(CHUNK, places, num_bytes=len(DATA))


def test_a_damaged_part_is_found() -> None:
    store = MemoryStore()
    places = [placed(store, "a", 0, 2), placed(store, "b", 2, 1, flip=True)]
    with pytest.raises(CorruptionError, match="leaf 2"):
        ChunkReader(store).verify(CHUNK, places, num_bytes=len(DATA))


def read_back(store: MemoryStore, places: list[Location]) -> bytes:
    reader, target = ChunkReader(store), bytearray(len(DATA))
    reader.read(reader.verify(CHUNK, places, num_bytes=len(DATA)), memoryview(target))
    return bytes(target)


def test_another_copy_of_a_damaged_part_is_taken() -> None:
    store = MemoryStore()
    bad, good = placed(store, "b", 2, 1, flip=True), placed(store, "c", 2, 1)
    assert read_back(store, [placed(store, "a", 0, 2), bad, good]) == DATA


def test_a_part_whose_pack_is_gone_is_taken_from_another() -> None:
    store = MemoryStore()
    places = [placed(store, "a", 0, 2), placed(store, "b", 2, 1), placed(store, "c", 2, 1)]
    store.delete("b")
    assert read_back(store, places) == DATA


def test_parts_stand_in_for_a_damaged_whole_copy() -> None:
    store = MemoryStore()
    parts = [placed(store, "b", 0, 1), placed(store, "c", 1, 2)]
    assert read_back(store, [placed(store, "a", 0, 3, flip=True), *parts]) == DATA


def test_parts_that_overlap_stand_in_for_one_another() -> None:
    store = MemoryStore()
    places = [placed(store, "a", 0, 2), placed(store, "b", 1, 2, flip=True), placed(store, "c", 2, 1)]
    assert read_back(store, places) == DATA


def test_what_was_wrong_first_is_told_when_no_copies_are_left() -> None:
    store = MemoryStore()
    places = [placed(store, "a", 0, 2), placed(store, "b", 2, 1, flip=True), placed(store, "c", 2, 1)]
    store.delete("c")
    with pytest.raises(CorruptionError, match=r"leaf 2, in b"):
        ChunkReader(store).verify(CHUNK, places, num_bytes=len(DATA))
    with pytest.raises(NotFoundError, match="in no pack"):
        ChunkReader(store).verify(CHUNK, [], num_bytes=len(DATA))


def test_an_index_that_says_other_leaves_than_the_pack_is_not_believed() -> None:
    store = MemoryStore()
    lying = placed(store, "a", 1, 2)._replace(first_leaf=0, num_leaves=3)
    with pytest.raises(CorruptionError, match="rebuild_index"):
        ChunkReader(store).verify(CHUNK, [lying], num_bytes=len(DATA))


def chunk_for(places: list[Location], *item_bytes: int) -> tuple[StoredChunk, list[np.ndarray[Any, Any]]]:
    arrays = [np.zeros(len(DATA) // size, raw_dtype(size)) for size in item_bytes]
    parts = [ChunkPart("t", NewArray(array), array.itemsize, Box((0,), array.shape)) for array in arrays]
    return StoredChunk("t", CHUNK, len(DATA), parts, len(arrays) * len(DATA), places=places), arrays


@pytest.mark.parametrize("is_verified", [False, True])
def test_a_chunk_of_one_leaf_fills_tensors_of_any_items_whatever_leaves_it_was_stored_with(is_verified: bool) -> None:
    store, digests = MemoryStore(), leaf_digests(memoryview(DATA), 255)
    info = ExtentInfo(chunk_id(len(DATA), digests), ObjectKind.CHUNK, 0, 250, 250, 255, 0, 1, 0, HEADER_OF_ONE)
    store.put("a", pack.encode_entry_header(info, digests) + DATA)
    chunk, arrays = chunk_for([Location("a", ObjectKind.CHUNK, 250, 0, 1, 255, 0, HEADER_OF_ONE, 250, 0, None)], 2, 5)
    chunk.digest, filler = info.digest, ChunkFiller(store, SILENT, None)
    if is_verified:
        filler.verify(chunk)
        filler.fill(chunk)
    else:
        filler.fill_once(chunk)
    assert [array.tobytes() for array in arrays] == [DATA, DATA]


def test_leaves_that_cut_elements_are_refused() -> None:
    store = MemoryStore()
    chunk, (array,) = chunk_for([placed(store, "a", 0, 3)], 125)
    with pytest.raises(CorruptionError, match=r"t: .*elements would be cut"):
        ChunkFiller(store, SILENT, None).fill_once(chunk)
    assert not any(array.tobytes())


@pytest.mark.parametrize("leaf", [0, 1, 2])
def test_nothing_of_a_damaged_leaf_or_behind_it_comes_into_strided_targets(leaf: int) -> None:
    store = MemoryStore()
    places = [placed(store, str(number), number, 1, flip=number == leaf) for number in range(3)]
    chunk, _ = chunk_for(places)
    wide = np.zeros((len(DATA), 2), np.uint8)
    chunk.parts.append(ChunkPart("t", NewArray(wide[:, 1]), 1, Box((0,), (len(DATA),))))
    with pytest.raises(CorruptionError, match=f"t: .*leaf {leaf}, in {leaf}"):
        ChunkFiller(store, SILENT, None).fill_once(chunk)
    assert bytes(wide[:, 1]) == DATA[: leaf * LEAF].ljust(len(DATA), b"\0") and not wide[:, 0].any()


def test_a_region_touches_exactly_the_leaves_that_hold_it() -> None:
    whole = Box((0, 0), (4, 16))
    assert leaves_touched((4, 16), whole, item_bytes=4, leaf_bytes=64) == [0, 1, 2, 3]
    assert leaves_touched((4, 16), Box((1, 0), (1, 16)), item_bytes=4, leaf_bytes=64) == [1]
    assert leaves_touched((4, 16), Box((1, 8), (2, 1)), item_bytes=4, leaf_bytes=32) == [3, 5]


def test_an_entry_of_another_chunk_is_not_taken_for_the_one_that_is_wanted(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    commit(handle, {"a": numbers(500, seed=1), "b": numbers(500, seed=2)})
    one, two = list(handle.index.read(contents.chunk_digests))
    place = handle.index.read(contents.locate, [two])[two][0]
    with pytest.raises(CorruptionError, match="wanted"):
        ChunkReader(handle.store).open_extent(one, place)  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_boxes_of_a_run_are_its_elements_in_order(sizes: list[int], data: st.DataObject) -> None:
    cell = np.arange(int(np.prod(sizes, dtype=int))).reshape(sizes)
    stop = data.draw(st.integers(1, cell.size))
    first = data.draw(st.integers(0, stop - 1))
    boxes = [Box(*run) for run in runs_of_boxes(tuple(sizes), first, stop)]
    found = np.concatenate([cell[box.slices].reshape(-1) for box in boxes])
    assert found.tolist() == list(range(first, stop))
    assert len(boxes) <= max(1, 2 * len(sizes) - 1)
