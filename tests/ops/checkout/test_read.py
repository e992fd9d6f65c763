"""Slices: the right elements, from few bytes, all of them verified."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.tree import find_entry
from cas_ckpt.errors import CorruptionError, InvalidInputError
from cas_ckpt.objects.spec import Box, Spec
from cas_ckpt.objects.state import StoredTensor
from cas_ckpt.ops.checkout.checkout import Part, part_of, read_array
from cas_ckpt.storage.file import FileStore
from tests.builders import commit, new_repository, numbers, same_bytes
from tests.searches import tries
from tests.wrapped_stores import CountingStore


def stored(handle: RepositoryHandle, array: np.ndarray[Any, Any]) -> StoredTensor:
    item = find_entry(handle, bytes.fromhex(commit(handle, {"t": array}).root), "t")
    assert isinstance(item, StoredTensor)
    return item


SHAPES = [(700, 4096), (5000, 257), (6, 300, 700), (2_000_000,), (9, 9)]
ARRAYS = [*(numbers(*shape) for shape in SHAPES), np.array(5.0)]
SHARED = init_repository("memory://")
STORED = [stored(SHARED, array) for array in ARRAYS]


@settings(max_examples=tries(35, 120), deadline=None)
@given(st.integers(0, len(ARRAYS) - 1), st.data())
def test_any_region_equals_the_slice_of_the_whole(number: int, data: st.DataObject) -> None:
    array = ARRAYS[number]
    offsets = tuple(data.draw(st.integers(0, size - 1)) for size in array.shape)
    sizes = tuple(data.draw(st.integers(1, min(size - at, 600))) for size, at in zip(array.shape, offsets, strict=True))
    box = Box(offsets, sizes)
    assert same_bytes(read_array(SHARED, STORED[number], box), array[box.slices])


def test_an_empty_region_is_an_empty_array() -> None:
    assert read_array(SHARED, STORED[0], Box((5, 5), (0, 3))).shape == (0, 3)


def test_a_64_kb_slice_reads_little(tmp_path: Path) -> None:
    made = new_repository(tmp_path / "repo")
    item = stored(made, numbers(40_000, 1024, seed=5))
    counting = CountingStore(FileStore(tmp_path / "repo"))
    handle = RepositoryHandle.on_store(counting, index_url=str(tmp_path / "repo" / "index" / "index.sqlite"))
    counting.reset()
    read_array(handle, item, Box((20_000, 0), (16, 1024)))
    assert counting.bytes_read < 300_000


def test_only_a_damaged_leaf_that_is_touched_is_refused(tmp_path: Path) -> None:
    made = new_repository(tmp_path / "repo")
    array = numbers(2000, 512)
    item = stored(made, array)
    path = next((tmp_path / "repo" / "packs").glob("*/*.data"))
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    path.write_bytes(bytes(data))
    handle = RepositoryHandle.open(tmp_path / "repo")
    assert same_bytes(read_array(handle, item, Box((0, 0), (16, 512))), array[:16])
    with pytest.raises(CorruptionError, match="leaf"):
        read_array(handle, item, Box((0, 0), (2000, 512)))


INDEX = st.one_of(st.integers(-12, 12), st.slices(9).map(lambda given: slice(given.start, given.stop)), st.just(...))


@settings(max_examples=tries(80, 300), deadline=None)
@given(st.lists(INDEX, max_size=4).map(tuple), st.sampled_from([(9, 9), (6, 3, 7), (12,), ()]))
def test_a_region_means_what_the_same_index_means_in_numpy(index: tuple[Any, ...], shape: tuple[int, ...]) -> None:
    array = numbers(*shape) if shape else np.array(5.0)
    try:
        wanted = array[index]
    except IndexError:
        with pytest.raises(InvalidInputError, match="w: "):
            part_of(Spec("float64", shape), index, key="w")
        return
    part = part_of(Spec("float64", shape), index, key="w")
    assert same_bytes(array[part.box.slices].reshape(part.shape), np.asarray(wanted))


@pytest.mark.parametrize("region", [True, np.s_[::2], np.s_[::-1], None, "0", 1.0, np.array([1]), slice("a", None)])
def test_what_no_basic_index_is_is_refused(region: Any) -> None:
    with pytest.raises(InvalidInputError, match="model/w"):
        part_of(STORED[0].spec, (region,), key="model/w")


@pytest.mark.parametrize("region", [[(5, 4), (100, 64)], ((5, 4), (100, 64)), [[5, 4], [100, 64]]])
def test_pairs_of_offset_and_size_are_answered_with_their_spelling(region: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"w: .*write np\.s_\[5:9, 100:164\]"):
        part_of(STORED[0].spec, region, key="w")


def test_dimensions_left_out_are_taken_whole() -> None:
    assert part_of(STORED[0].spec, np.s_[3:5], key="w") == Part(Box((3, 0), (2, 4096)), (2, 4096))
    assert part_of(STORED[0].spec, np.s_[..., -1], key="w") == Part(Box((0, 4095), (700, 1)), (700,))
