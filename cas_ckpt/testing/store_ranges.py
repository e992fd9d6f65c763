"""Conformance: ranges, tails, reads into the caller's memory."""

from __future__ import annotations

import random
from array import array

from cas_ckpt.errors import CorruptionError, InvalidInputError
from cas_ckpt.storage.store import Store
from cas_ckpt.testing.expect import at_once, expect, expect_raises, expect_same
from cas_ckpt.testing.store_case import StoreCase, noise

_SIZE = (3 << 20) + 123


class RangeChecks(StoreCase):
    """get_range, get_tail, read_into, prefetch."""

    def test_a_range_is_exactly_the_bytes_asked_for(self) -> None:
        store = self.store()
        value = noise(_SIZE)
        store.put(self.key(), value)
        for offset, length in _ranges():
            found = memoryview(store.get_range(self.key(), offset, length))
            expect_same(found.nbytes, length, "the length of a range")
            expect_same(bytes(found), value[offset : offset + length], f"range {offset}+{length}")

    def test_a_range_cannot_be_written_through(self) -> None:
        store = self.store()
        store.put(self.key(), noise(_SIZE))
        for length in (100, _SIZE):
            expect(memoryview(store.get_range(self.key(), 0, length)).readonly, "a range is read-only")

    def test_a_range_stays_valid_after_its_key_is_gone(self) -> None:
        store = self.store()
        value = noise(_SIZE)
        store.put(self.key(), value)
        large = store.get_range(self.key(), 1, _SIZE - 1)
        small = store.get_range(self.key(), 1, 10)
        store.delete(self.key())
        store.close()
        expect_same(bytes(large), value[1:], "a large range outlives its key and its handle")
        expect_same(bytes(small), value[1:11], "a small range outlives its key and its handle")

    def test_a_range_past_the_end_is_never_answered_short(self) -> None:
        store = self.store()
        store.put(self.key(), noise(_SIZE))
        for offset, length in ((0, _SIZE + 1), (_SIZE, 1), (_SIZE - 5, 10), (_SIZE + 1, 0), (5, 1 << 40)):
            error = expect_raises(CorruptionError, "past the end", store.get_range, self.key(), offset, length)
            expect(self.key() in str(error) and str(_SIZE) in str(error), f"the error names key and size: {error}")

    def test_reading_into_memory_past_the_end_is_never_short(self) -> None:
        store = self.store()
        store.put(self.key(), noise(100))
        for offset, length in ((0, 101), (100, 1), (95, 10)):
            target = memoryview(bytearray(length))
            expect_raises(CorruptionError, "past the end", store.read_into, self.key(), offset, target)
            expect_raises(
                CorruptionError, "past the end", store.read_into, self.key(), offset, target, cached_only=True
            )

    def test_a_negative_range_is_refused(self) -> None:
        store = self.store()
        store.put(self.key(), b"abc")
        expect_raises(InvalidInputError, "negative offset", store.get_range, self.key(), -1, 1)
        expect_raises(InvalidInputError, "negative length", store.get_range, self.key(), 1, -1)
        expect_raises(InvalidInputError, "negative tail", store.get_tail, self.key(), -1)
        expect_raises(InvalidInputError, "negative offset", store.read_into, self.key(), -1, memoryview(bytearray(1)))

    def test_a_tail_comes_with_the_size_of_the_value(self) -> None:
        store = self.store()
        value = noise(_SIZE)
        store.put(self.key(), value)
        for length in (0, 1, 4096, _SIZE - 1, _SIZE, _SIZE + 1, 1 << 40):
            expect_same(
                store.get_tail(self.key(), length), (_SIZE, value[max(0, _SIZE - length) :]), f"tail of {length}"
            )

    def test_memory_is_filled_whole_and_nothing_beside_it(self) -> None:
        store = self.store()
        value = noise(_SIZE)
        store.put(self.key(), value)
        for offset, length in _ranges():
            around = bytearray(b"\xee" * (length + 14))
            expect(store.read_into(self.key(), offset, memoryview(around)[7 : 7 + length]), "read_into answers True")
            wanted = b"\xee" * 7 + value[offset : offset + length] + b"\xee" * 7
            expect(around == wanted, f"read_into of {offset}+{length}: other bytes than the range's")

    def test_memory_of_any_item_size_can_be_filled(self) -> None:
        store = self.store()
        value = noise(8000)
        store.put(self.key(), value)
        target = array("d", bytes(8000))
        store.read_into(self.key(), 0, memoryview(target))
        expect_same(target.tobytes(), value, "read_into a view of doubles")

    def test_memory_that_cannot_be_written_is_refused(self) -> None:
        store = self.store()
        store.put(self.key(), b"abcd")
        for target in (memoryview(b"abcd"), memoryview(bytearray(8))[::2]):
            expect_raises(InvalidInputError, "read-only or with gaps", store.read_into, self.key(), 0, target)

    def test_what_is_said_to_be_cached_is_the_right_bytes(self) -> None:
        store = self.store()
        value = noise(_SIZE)
        store.put(self.key(), value)
        for offset, length in _ranges():
            target = bytearray(length)
            if store.read_into(self.key(), offset, memoryview(target), cached_only=True):
                expect_same(bytes(target), value[offset : offset + length], "an answer of True means filled whole")

    def test_a_hint_never_fails(self) -> None:
        store = self.store()
        store.put(self.key(), b"abc")
        store.prefetch(self.key(), 0, 3)
        store.prefetch(self.key(), 2, 1 << 40)
        store.prefetch(self.key("absent"), 0, 3)

    def test_many_threads_read_the_bytes_they_asked_for(self) -> None:
        store = self.store()
        values = {self.key(f"v{number}"): noise(_SIZE, seed=number) for number in range(6)}
        for key, value in values.items():
            store.put(key, value)

        def read(seed: int) -> bool:
            chosen = random.Random(seed)
            return all(_reads_right(store, values, chosen) for _ in range(40))

        answers = at_once(read, range(6))
        expect_same(answers, [True] * 6, "threads that read at once")


def _reads_right(store: Store, values: dict[str, bytes], chosen: random.Random) -> bool:
    key = chosen.choice(list(values))
    offset = chosen.randrange(_SIZE)
    length = chosen.randrange(_SIZE - offset)
    return bytes(store.get_range(key, offset, length)) == values[key][offset : offset + length]


def _ranges() -> list[tuple[int, int]]:
    chosen = random.Random(7)
    fixed = [(0, 0), (_SIZE, 0), (0, _SIZE), (0, 1), (_SIZE - 1, 1), (4095, 2), (4096, 1 << 20), (4097, 2 << 20)]
    return fixed + [(at, chosen.randrange(_SIZE - at)) for at in (chosen.randrange(_SIZE) for _ in range(12))]
