"""The wrappers: planned deaths and failures strike where they say, counts are true."""

from __future__ import annotations

import pytest

from cas_ckpt.errors import CorruptionError, OutOfSpaceError, StorageError, TransientStorageError
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.storage.store import Store
from tests.effects import CrashNow, Effects, FaultPlan, die_after, die_before, fail_at, lose_reply, no_space_from
from tests.wrapped_stores import CountingStore, FaultyStore, flip_bit, truncate

EFFECTS = ["put a", "write b", "commit b", "put_if_absent c", "compare_and_swap c", "delete a"]


def work(store: Store) -> None:
    """Six effects, one of each name."""
    store.put("a", b"1")
    with store.open_writer("b") as writer:
        writer.write(b"2")
        writer.commit()
    store.put_if_absent("c", b"3")
    store.compare_and_swap("c", b"3", b"4")
    store.delete("a")


def state(store: MemoryStore) -> dict[str, bytes]:
    return {key: store.get(key) for key, _ in store.list("")}


STATES: list[dict[str, bytes]] = [
    {},
    {"a": b"1"},
    {"a": b"1"},
    {"a": b"1", "b": b"2"},
    {"a": b"1", "b": b"2", "c": b"3"},
    {"a": b"1", "b": b"2", "c": b"4"},
    {"b": b"2", "c": b"4"},
]


def test_every_effect_is_counted_and_named() -> None:
    store = FaultyStore(MemoryStore())
    work(store)
    assert [f"{effect.name} {effect.where}" for effect in store.effects.log] == EFFECTS


@pytest.mark.parametrize("k", range(1, 7))
def test_death_before_the_kth_effect_leaves_the_effects_before_it(k: int) -> None:
    inner = MemoryStore()
    with pytest.raises(CrashNow):
        work(FaultyStore(inner, die_before(k)))
    assert state(inner) == STATES[k - 1]


@pytest.mark.parametrize("k", range(1, 7))
def test_death_after_the_kth_effect_leaves_that_too(k: int) -> None:
    inner = MemoryStore()
    with pytest.raises(CrashNow):
        work(FaultyStore(inner, die_after(k)))
    assert state(inner) == STATES[k]


def test_after_death_nothing_works_any_more() -> None:
    store = FaultyStore(MemoryStore(), die_after(1))
    writer = store.open_writer("w")
    with pytest.raises(CrashNow):
        store.put("a", b"1")
    for call in (
        lambda: store.get("a"),
        lambda: store.get_range("a", 0, 1),
        lambda: store.get_tail("a", 1),
        lambda: store.read_into("a", 0, memoryview(bytearray(1))),
        lambda: store.prefetch("a", 0, 1),
        lambda: store.head("a"),
        lambda: store.list(""),
        lambda: store.put("a", b""),
        lambda: store.delete("a"),
        lambda: store.open_writer("b"),
        lambda: writer.write(b"x"),
        writer.abort,
    ):
        with pytest.raises(CrashNow):
            call()
    assert store.effects.count == 1, "what a dead process asks for does not count"


def test_work_beyond_the_last_effect_is_not_struck() -> None:
    inner = MemoryStore()
    work(FaultyStore(inner, die_before(7)))
    assert state(inner) == STATES[6]


def test_a_failure_strikes_once_and_the_effect_is_not_done() -> None:
    inner = MemoryStore()
    store = FaultyStore(inner, fail_at(1, lambda where: StorageError(f"{where} by plan")))
    with pytest.raises(StorageError, match="a by plan"):
        store.put("a", b"1")
    assert state(inner) == {}
    work(store)
    assert state(inner) == STATES[6]


def test_a_full_disk_stays_full_but_can_be_cleared() -> None:
    inner = MemoryStore()
    inner.put("old", b"x")
    store = FaultyStore(inner, no_space_from(2))
    with pytest.raises(OutOfSpaceError):
        work(store)
    with pytest.raises(OutOfSpaceError):
        store.put("more", b"")
    store.delete("old")
    assert state(inner) == {"a": b"1"}


def test_a_writer_that_ran_full_is_poisoned() -> None:
    store = FaultyStore(MemoryStore(), no_space_from(1))
    writer = store.open_writer("a")
    with pytest.raises(OutOfSpaceError):
        writer.write(b"x")
    with pytest.raises(StorageError, match="poisoned"):
        writer.commit()


def test_a_lost_reply_hides_what_was_done() -> None:
    inner = MemoryStore()
    store = FaultyStore(inner, lose_reply(2))
    store.put_if_absent("c", b"3")
    with pytest.raises(TransientStorageError):
        store.compare_and_swap("c", b"3", b"4")
    assert store.get("c") == b"4"


def test_a_store_and_an_index_can_share_one_count() -> None:
    effects = Effects(FaultPlan(at=2))
    first, second = (FaultyStore(MemoryStore(), effects=effects) for _ in range(2))
    first.put("a", b"")
    with pytest.raises(StorageError):
        effects.perform("index", "rows", lambda: None)
    second.put("a", b"")
    assert effects.count == 3


def every_reading(store: Store, key: str, size: int) -> list[bytes]:
    target = bytearray(size)
    store.read_into(key, 0, memoryview(target))
    return [store.get(key), bytes(store.get_range(key, 0, size)), store.get_tail(key, size)[1], bytes(target)]


def test_a_flipped_bit_shows_in_every_reading_and_is_not_stored() -> None:
    inner = MemoryStore()
    inner.put("a", b"\0\0\0\0")
    store = FaultyStore(inner)
    store.damage["a"] = flip_bit(-1, bit=3)
    assert every_reading(store, "a", 4) == [b"\0\0\0\x08"] * 4
    assert inner.get("a") == b"\0\0\0\0"
    del store.damage["a"]
    assert every_reading(store, "a", 4) == [b"\0\0\0\0"] * 4


def test_a_truncated_value_is_short_in_every_answer() -> None:
    store = FaultyStore(MemoryStore())
    store.put("a", b"abcd")
    store.damage["a"] = truncate(-1)
    assert every_reading(store, "a", 3) == [b"abc"] * 4
    assert (store.head("a"), list(store.list(""))) == (3, [("a", 3)])
    for read in (lambda: store.get_range("a", 0, 4), lambda: store.read_into("a", 0, memoryview(bytearray(4)))):
        with pytest.raises(CorruptionError):
            read()


def test_calls_and_bytes_are_counted_by_method() -> None:
    store = CountingStore(MemoryStore())
    work(store)
    assert store.bytes_written == 4
    assert (store.tally("write").num_bytes, store.tally("commit").calls, store.tally("delete").calls) == (1, 1, 1)
    store.reset()
    assert store.num_calls == 0
    assert every_reading(store, "b", 1) == [b"2"] * 4
    assert store.bytes_read == 4
    assert store.tally("read_into").num_bytes == 1
    assert (store.num_calls, store.bytes_written) == (4, 0)
    with pytest.raises(CorruptionError):
        store.get_range("b", 0, 100)
    assert store.bytes_read == 4, "what failed moved nothing"
