"""Checksums at the speed of memory: what they certainly find, and that only the elements count, not how they lie."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cas_ckpt import native
from cas_ckpt.objects.spec import Box
from cas_ckpt.transfer.hashing import (
    ROW_BYTES,
    ROW_WORDS,
    SMALL_BYTES,
    STRETCH_BYTES,
    SUM_BYTES,
    Summed,
    checksums,
    stretches,
)
from tests.builders import ArrayMemory, numbers

Array = np.ndarray[Any, Any]

NUM_WORDS = 5 * ROW_WORDS + 100
BASE = np.random.default_rng(0).integers(0, 2**64, NUM_WORDS, np.uint64)
PLACES = st.integers(0, NUM_WORDS - 1)
WORDS = st.one_of(st.sampled_from([0, 1, 1 << 63, 1 << 52, 2**64 - 1]), st.integers(0, 2**64 - 1))


def checksum(array: Array, *, num_threads: int = 1) -> bytes:
    box = Box((0,) * array.ndim, array.shape)
    return checksums([Summed(ArrayMemory(array), box, array.itemsize)], num_threads=num_threads)[0]


def sums_of(words: Array) -> bytes:
    return native.word_sums(words, ROW_WORDS)


@given(st.lists(st.tuples(PLACES, WORDS), min_size=1, max_size=3, unique_by=lambda pair: pair[0]))
def test_any_change_of_up_to_three_words_is_found(changes: list[tuple[int, int]]) -> None:
    words = BASE.copy()
    for place, word in changes:
        words[place] = word
    assert (sums_of(words) == sums_of(BASE)) == np.array_equal(words, BASE)


@given(PLACES, PLACES, WORDS, WORDS)
def test_two_words_that_change_places_are_found(one: int, other: int, first: int, second: int) -> None:
    words = BASE.copy()
    words[[one, other]] = [first, second if one != other else first]
    swapped = words.copy()
    swapped[[one, other]] = words[[other, one]]
    assert (sums_of(words) == sums_of(swapped)) == np.array_equal(words, swapped)


@given(st.integers(1, 6 * ROW_BYTES), st.data())
def test_a_change_of_any_one_byte_is_found_whatever_the_length(length: int, data: st.DataObject) -> None:
    before = BASE.view(np.uint8)[: min(length, BASE.nbytes)].copy()
    after = before.copy()
    after[data.draw(st.integers(0, len(before) - 1))] ^= data.draw(st.integers(1, 255))
    assert checksum(before) != checksum(after)


@pytest.mark.parametrize("shape", [(512, 512), (1 << 18,), (64, 64, 64)])
def test_that_all_signs_turn_round_is_found(shape: tuple[int, ...]) -> None:
    # Each word changes by 2^63, and an even number of them would vanish from a sum: rows are odd.
    array = numbers(*shape, dtype="float64")
    assert checksum(array) != checksum(-array)
    assert checksum(array) != checksum(array * 2)
    assert checksum(np.ones(shape)) != checksum(np.full(shape, 2.0))


@pytest.mark.parametrize("array", [
    numbers(300, 400), numbers(300, 401).astype(np.float16), np.arange(200_001, dtype=np.uint8).reshape(3, -1),
    numbers(40, 50, 60, dtype="float64"), numbers(90_000).astype(np.complex128).reshape(300, 300), np.array(7.5),
    np.zeros((0, 4)), numbers(3 << 20),
], ids=str)  # fmt: skip
def test_only_the_elements_count_not_how_they_lie(array: Array) -> None:
    wanted = checksum(array)
    memory = np.empty(array.nbytes + 3, np.uint8)
    odd = np.ndarray(array.shape, array.dtype, memory, offset=3 if array.nbytes else 0)
    odd[...] = array
    assert len(wanted) == SUM_BYTES
    assert checksum(odd) == checksum(np.asfortranarray(array)) == wanted
    assert checksum(np.repeat(array[..., None], 2, axis=-1)[..., 0]) == wanted
    assert checksum(array, num_threads=3) == wanted


@given(st.lists(st.integers(0, 9), max_size=4), st.integers(1, 60))
def test_stretches_cover_a_region_in_the_order_of_its_elements(shape: list[int], most: int) -> None:
    box = Box((3,) * len(shape), tuple(shape))
    found = list(stretches(box, most))
    array = np.arange(math.prod(each + 3 for each in shape)).reshape([each + 3 for each in shape])
    assert all(each.num_elements <= most for each in found)
    joined = np.concatenate([array[each.slices].reshape(-1) for each in found])
    assert np.array_equal(joined, array[box.slices].reshape(-1))


def test_no_more_than_a_stretch_is_gathered_at_once() -> None:
    class Watched(ArrayMemory):
        most = 0

        def read(self, box: Box) -> Array:
            self.most = max(self.most, box.num_elements * self.array.itemsize)
            return super().read(box)

    array = np.zeros((6, 3 << 20), np.float32).T
    source = Watched(array)
    checksums([Summed(source, Box((0, 0), array.shape), 4)], num_threads=1)
    assert STRETCH_BYTES // 2 < source.most <= STRETCH_BYTES


def test_parts_of_every_size_are_answered_in_order() -> None:
    arrays = [numbers(size, seed=size) for size in (0, 1, SMALL_BYTES // 4, SMALL_BYTES // 4 + 1, 5_000_000, 3)]
    parts = [Summed(ArrayMemory(array), Box((0,), array.shape), 4) for array in arrays]
    assert checksums(parts, num_threads=2) == [checksum(array) for array in arrays]
    assert len(set(checksums(parts, num_threads=2))) == len(arrays)
