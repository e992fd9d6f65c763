"""A store that breaks a rule of values, listings or ranges fails the check that is for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import CkptError, NotFoundError, StorageError
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.storage.store import ListedVersion
from cas_ckpt.testing import StoreConformance
from cas_ckpt.testing.store_values import ListChecks, RangeChecks, ValueChecks

GROUPS = (ValueChecks, ListChecks, RangeChecks)

# Each class breaks one rule; its docstring names the checks that must notice.


class AnswersShort(MemoryStore):
    """a_range_past_the_end_is_never_answered_short, reading_into_memory_past_the_end_is_never_short"""

    def get_range(self, key: str, offset: int, length: int) -> memoryview:
        return memoryview(self.get(key))[offset : offset + length]

    def read_into(self, key: str, offset: int, target: memoryview, *, cached_only: bool = False) -> bool:
        found = self.get_range(key, offset, target.nbytes)
        target.cast("B")[: found.nbytes] = found
        return True


class AnswersTheWrongOffset(MemoryStore):
    """a_range_is_exactly_the_bytes_asked_for, many_threads_read_the_bytes_they_asked_for"""

    def get_range(self, key: str, offset: int, length: int) -> memoryview:
        found = super().get_range(key, offset, length)
        return super().get_range(key, offset - offset % 4096, length) if length else found


class ReadsLongRangesFromOnePart(MemoryStore):
    """a_value_of_many_parts_is_whole"""

    def get_range(self, key: str, offset: int, length: int) -> memoryview:
        found = super().get_range(key, offset, length)
        part = bytes(found[: 8 << 20])
        return memoryview(part + part + bytes(found[16 << 20 :])) if length > 16 << 20 else found


class TellsTheSizeForAVersion(MemoryStore):
    """versions_in_a_listing_tell_what_changed"""

    def list_versions(self, prefix: str) -> Iterator[ListedVersion]:
        return (ListedVersion(key, size, str(size)) for key, size in self.list(prefix))


class AnswersWritableRanges(MemoryStore):
    """a_range_cannot_be_written_through"""

    def get_range(self, key: str, offset: int, length: int) -> memoryview:
        return memoryview(bytearray(super().get_range(key, offset, length)))


class ClearsRangesWhenTheKeyGoes(MemoryStore):
    """a_range_stays_valid_after_its_key_is_gone"""

    def __init__(self) -> None:
        super().__init__()
        self.handed_out: list[bytearray] = []

    def get_range(self, key: str, offset: int, length: int) -> memoryview:
        self.handed_out.append(bytearray(super().get_range(key, offset, length)))
        return memoryview(self.handed_out[-1]).toreadonly()

    def delete(self, key: str) -> None:
        super().delete(key)
        for data in self.handed_out:
            data[:] = bytes(len(data))


class RemembersWhatItRead(MemoryStore):
    """a_replaced_value_is_served_new_by_every_way_of_reading, a_key_deleted_and_made_again_serves_its_new_bytes"""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[tuple[str, int, int], memoryview] = {}

    def get_range(self, key: str, offset: int, length: int) -> memoryview:
        return self.seen.setdefault((key, offset, length), super().get_range(key, offset, length))


class TellsTheTailsOwnSize(MemoryStore):
    """a_tail_comes_with_the_size_of_the_value"""

    def get_tail(self, key: str, length: int) -> tuple[int, bytes]:
        _, tail = super().get_tail(key, length)
        return len(tail), tail


class FillsBesideTheTarget(MemoryStore):
    """memory_is_filled_whole_and_nothing_beside_it"""

    def read_into(self, key: str, offset: int, target: memoryview, *, cached_only: bool = False) -> bool:
        super().read_into(key, offset, target[: target.nbytes - 1])
        return True


class SaysCachedWithoutReading(MemoryStore):
    """what_is_said_to_be_cached_is_the_right_bytes"""

    def read_into(self, key: str, offset: int, target: memoryview, *, cached_only: bool = False) -> bool:
        return cached_only or super().read_into(key, offset, target)


class FailsOnHints(MemoryStore):
    """a_hint_never_fails"""

    def prefetch(self, key: str, offset: int, length: int) -> None:
        self.get(key)


class AnswersNothingForAMissingKey(MemoryStore):
    """a_missing_key_is_not_found_by_any_read, delete_is_final_and_may_be_repeated"""

    def get(self, key: str) -> bytes:
        try:
            return super().get(key)
        except NotFoundError:
            return b""


class ChecksNoKeys(MemoryStore):
    """bad_keys_are_refused_by_every_method"""

    def delete(self, key: str) -> None:
        self._values.pop(key, None)


class RefusesLongKeys(MemoryStore):
    """the_longest_key_is_taken"""

    def put(self, key: str, data: Buffer) -> None:
        if len(key) > 1000:
            raise StorageError("too long for me")
        super().put(key, data)


class KeepsTheCallersBuffer(MemoryStore):
    """a_value_does_not_change_with_the_callers_buffer"""

    def put(self, key: str, data: Buffer) -> None:
        super().put(key, data)
        self._values[key] = data if isinstance(data, bytearray) else self._values[key]  # type: ignore[assignment]


class KeepsTheRestOfALongerValue(MemoryStore):
    """put_replaces_the_older_value"""

    def put(self, key: str, data: Buffer) -> None:
        new, old = bytes(memoryview(data).cast("B")), self._values.get(key, b"")
        super().put(key, new + old[len(new) :])


class TakesBuffersWithGaps(MemoryStore):
    """a_buffer_with_gaps_is_refused"""

    def put(self, key: str, data: Buffer) -> None:
        super().put(key, bytes(memoryview(data)))


class TakesItemsForBytes(MemoryStore):
    """any_contiguous_buffer_is_a_value"""

    def put(self, key: str, data: Buffer) -> None:
        super().put(key, memoryview(data)[: len(memoryview(data)) // memoryview(data).itemsize])


class FailsToDeleteTwice(MemoryStore):
    """delete_is_final_and_may_be_repeated"""

    def delete(self, key: str) -> None:
        self.get(key)
        super().delete(key)


class DeletesWhatIsBelow(MemoryStore):
    """deleting_a_key_leaves_those_below_its_name"""

    def delete(self, key: str) -> None:
        for found, _ in [(key, 0), *self.list(key + "/")]:
            super().delete(found)


class WritesInTwoSteps(MemoryStore):
    """a_reader_never_sees_part_of_a_value"""

    def __init__(self) -> None:
        super().__init__()
        self.half_done, self.was_read = threading.Event(), threading.Event()

    def get(self, key: str) -> bytes:
        self.half_done.wait(timeout=10)
        value = super().get(key)
        self.was_read.set()
        return value

    def put(self, key: str, data: Buffer) -> None:
        if key in self._values and not self.half_done.is_set():
            super().put(key, bytes(memoryview(data)[:10]))
            self.half_done.set()
            self.was_read.wait(timeout=10)
        super().put(key, data)


class PadsToBlocks(MemoryStore):
    """a_value_read_back_is_the_value_put"""

    def put(self, key: str, data: Buffer) -> None:
        value = bytes(memoryview(data).cast("B"))
        super().put(key, value + bytes(-len(value) % 4096))


class CountsFromTheEnd(MemoryStore):
    """a_negative_range_is_refused"""

    def get_range(self, key: str, offset: int, length: int) -> memoryview:
        return super().get_range(key, offset % max(1, self.head(key)), length)


class FillsBytesOnly(MemoryStore):
    """memory_of_any_item_size_can_be_filled"""

    def read_into(self, key: str, offset: int, target: memoryview, *, cached_only: bool = False) -> bool:
        target[:] = self.get_range(key, offset, len(target))
        return True


class FillsNothingIfItCannot(MemoryStore):
    """memory_that_cannot_be_written_is_refused"""

    def read_into(self, key: str, offset: int, target: memoryview, *, cached_only: bool = False) -> bool:
        return target.readonly or super().read_into(key, offset, target)


class ListsByLength(MemoryStore):
    """a_listing_is_sorted_by_key_and_tells_sizes"""

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        return iter(sorted(super().list(prefix), key=lambda item: (len(item[0]), item[0])))


class ListsOnePage(MemoryStore):
    """a_long_listing_is_complete"""

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        return iter(list(super().list(prefix))[:1000])


class ListsFolders(MemoryStore):
    """a_prefix_is_the_beginning_of_a_string"""

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        folder = prefix.rstrip("/") + "/"
        return iter([item for item in super().list(prefix) if item[0].startswith(folder)])


class ChecksPrefixesLate(MemoryStore):
    """a_prefix_that_no_key_has_is_refused_at_once"""

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        yield from super().list(prefix)


class DeletesWholeFolders(MemoryStore):
    """keys_that_are_deleted_together_are_gone_and_no_others"""

    def delete_many(self, keys: Sequence[str]) -> None:
        folders = tuple(key.rpartition("/")[0] + "/" for key in keys)
        for key in [key for key in self._values if key.startswith(folders)]:
            self.delete(key)


class DeletesOneOfMany(MemoryStore):
    """keys_that_are_deleted_together_are_gone_and_no_others"""

    def delete_many(self, keys: Sequence[str]) -> None:
        self.delete(keys[0])


class ReopensEmpty(MemoryStore):
    """a_second_handle_sees_what_the_first_did"""


BROKEN = [kind for kind in globals().values() if isinstance(kind, type) and issubclass(kind, MemoryStore)]
CASES = [
    (kind, check.strip())
    for kind in BROKEN
    if kind is not MemoryStore
    for check in (kind.__doc__ or "").replace("\n", " ").split(",")
]


def run(kind: type[MemoryStore], check: str) -> None:
    class Case(StoreConformance):
        def store(self) -> MemoryStore:
            return kind()

        def reopened(self, store: object) -> MemoryStore:
            return kind() if kind is ReopensEmpty else store  # type: ignore[return-value]

    getattr(Case(), f"test_{check}")()


@pytest.mark.parametrize(("kind", "check"), CASES, ids=[f"{kind.__name__}-{check}" for kind, check in CASES])
def test_a_store_that_breaks_a_rule_is_noticed(kind: type[MemoryStore], check: str) -> None:
    with pytest.raises((AssertionError, CkptError, ValueError)):
        run(kind, check)


def test_every_check_has_a_store_that_fails_it() -> None:
    assert {f"test_{check}" for _, check in CASES} == {
        name for group in GROUPS for name in vars(group) if name.startswith("test_")
    }
