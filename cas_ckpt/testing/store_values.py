"""Conformance: whole values, their names, their listing."""

from __future__ import annotations

from collections.abc import Callable

from cas_ckpt.errors import InvalidInputError, NotFoundError
from cas_ckpt.storage.store import Store, delete_many
from cas_ckpt.testing.expect import at_once, expect, expect_raises, expect_same
from cas_ckpt.testing.store_case import BAD_KEYS, BAD_PREFIXES, StoreCase, noise


class ValueChecks(StoreCase):
    """put, get, head, delete, list."""

    def test_a_value_read_back_is_the_value_put(self) -> None:
        store = self.store()
        for size in (0, 1, 4095, 4096, 4097, (1 << 20) + 1):
            value = noise(size, seed=size)
            store.put(self.key(), value)
            expect_same(store.get(self.key()), value, f"a value of {size} bytes comes back")
            expect_same(store.head(self.key()), size, "head tells the size")

    def test_any_contiguous_buffer_is_a_value(self) -> None:
        store = self.store()
        value = noise(4096)
        for data in (bytearray(value), memoryview(value), memoryview(value).cast("Q"), memoryview(b"x" + value)[1:]):
            store.put(self.key(), data)
            expect_same(store.get(self.key()), value, "a value is the bytes of the buffer")

    def test_a_buffer_with_gaps_is_refused(self) -> None:
        store = self.store()
        expect_raises(InvalidInputError, "a buffer with gaps", store.put, self.key(), memoryview(b"abcd")[::2])
        expect_same(list(store.list(self.prefix)), [], "a refused value leaves nothing")

    def test_a_value_does_not_change_with_the_callers_buffer(self) -> None:
        store = self.store()
        buffer = bytearray(b"first")
        store.put(self.key("put"), buffer)
        store.put(self.key("other"), buffer)
        buffer[:] = b"other"
        expect_same(store.get(self.key("put")), b"first", "put must not keep the caller's buffer")

    def test_put_replaces_the_older_value(self) -> None:
        store = self.store()
        for value in (b"a longer value", b"short", b""):
            store.put(self.key(), value)
            expect_same(store.get(self.key()), value, "put replaces, and leaves no rest of a longer value")

    def test_a_replaced_value_is_served_new_by_every_way_of_reading(self) -> None:
        store = self.store()
        for value in (noise(3 << 20, seed=1), noise(3 << 20, seed=2), noise(2 << 20, seed=3)):
            store.put(self.key(), value)
            expect_reads_agree(store, self.key(), value)

    def test_a_key_deleted_and_made_again_serves_its_new_bytes(self) -> None:
        store = self.store()
        for value in (noise(3 << 20, seed=1), noise(3 << 20, seed=2)):
            store.delete(self.key())
            with store.open_writer(self.key()) as writer:
                writer.write(value)
                writer.commit()
            expect_reads_agree(store, self.key(), value)

    def test_a_missing_key_is_not_found_by_any_read(self) -> None:
        store = self.store()
        store.put(self.key("folder/value"), b"x")
        for key in (self.key("absent"), self.key("absent/below"), self.key("folder"), self.key("folder/value/below")):
            for name, read in reads_of(store, key):
                expect_raises(NotFoundError, f"{name} of a key that is not there", read)

    def test_delete_is_final_and_may_be_repeated(self) -> None:
        store = self.store()
        store.put(self.key(), b"x")
        for _ in range(2):
            store.delete(self.key())
            expect_raises(NotFoundError, "a deleted key", store.get, self.key())
            expect_same(list(store.list(self.prefix)), [], "a deleted key is not listed")

    def test_keys_that_are_deleted_together_are_gone_and_no_others(self) -> None:
        store = self.store()
        names = ("a/1", "a/2", "b/1", "b/2", "c")
        for name in names:
            store.put(self.key(name), b"x")
        for _ in range(2):
            delete_many(store, [self.key(name) for name in ("a/1", "b/2", "c", "d/never", "b")])
            expect_same([key for key, _ in store.list(self.prefix)], [self.key("a/2"), self.key("b/1")], "what stays")
            expect_raises(NotFoundError, "a deleted key", store.get_range, self.key("c"), 0, 1)

    def test_deleting_a_key_leaves_those_below_its_name(self) -> None:
        store = self.store()
        store.put(self.key("a/b"), b"x")
        store.delete(self.key("a"))
        expect_same(store.get(self.key("a/b")), b"x", "a delete is of one key")

    def test_a_second_handle_sees_what_the_first_did(self) -> None:
        store = self.store()
        other = self.reopened(store)
        for value in (b"one", b"two"):
            store.put(self.key(), value)
            expect_same(other.get(self.key()), value, "get answers the newest value")
        store.delete(self.key())
        expect_raises(NotFoundError, "deleted through another handle", other.get, self.key())

    def test_bad_keys_are_refused_by_every_method(self) -> None:
        store = self.store()
        for key in BAD_KEYS:
            for name, call in [*reads_of(store, key), *writes_of(store, key)]:
                expect_raises(InvalidInputError, f"{name} of the key {key!r:.40}", call)

    def test_the_longest_key_is_taken(self) -> None:
        store = self.store()
        room = 1024 - len(self.prefix)
        key = self.prefix + ("/".join(["k" * 200] * 6))[:room].rstrip("/")
        store.put(key, b"x")
        expect_same([found for found, _ in store.list(self.prefix)], [key], "a key of 1024 characters")

    def test_a_reader_never_sees_part_of_a_value(self) -> None:
        store = self.store()
        values = [bytes([number]) * (100_000 * (number + 1)) for number in range(4)]
        store.put(self.key(), values[0])
        other = self.reopened(store)

        def act(role: str) -> set[bytes]:
            if role == "reader":
                return {other.get(self.key()) for _ in range(30)}
            for value in values * 4:
                store.put(self.key(), value)
            return set()

        for seen in at_once(act, ["writer", "reader", "reader"]):
            expect(isinstance(seen, set), f"reading while another writes: {seen!r:.200}")
            expect(isinstance(seen, set) and seen <= set(values), "a reader saw a value that nobody put")


class ListChecks(StoreCase):
    """list."""

    def test_a_listing_is_sorted_by_key_and_tells_sizes(self) -> None:
        store = self.store()
        names = ["b", "a/b", "a-b", "a.b", "a0", "a_", "aa/a", "a/a/a", "Z", "0"]
        for size, name in enumerate(names):
            store.put(self.key(name), b"x" * size)
        wanted = sorted((self.key(name), size) for size, name in enumerate(names))
        expect_same(list(store.list(self.prefix)), wanted, "keys in order of code points, with sizes in bytes")

    def test_a_prefix_is_the_beginning_of_a_string(self) -> None:
        store = self.store()
        for name in ("ref", "refs/a", "refs/ab", "refs/b", "refs-old/a"):
            store.put(self.key(name), b"")
        for prefix, wanted in {
            "ref": ["ref", "refs-old/a", "refs/a", "refs/ab", "refs/b"],
            "refs/": ["refs/a", "refs/ab", "refs/b"],
            "refs/a": ["refs/a", "refs/ab"],
            "refs/ab/": [],
            "none/": [],
            "refs/c": [],
        }.items():
            found = [key.removeprefix(self.prefix) for key, _ in store.list(self.key(prefix))]
            expect_same(found, wanted, f"keys that start with {prefix!r}")

    def test_a_prefix_that_no_key_has_is_refused_at_once(self) -> None:
        store = self.store()
        for prefix in BAD_PREFIXES:
            expect_raises(InvalidInputError, f"prefix {prefix!r}", store.list, prefix)

    def test_a_long_listing_is_complete(self) -> None:
        store = self.store()
        wanted = [self.key(f"{number:05}") for number in range(self.num_listed)]
        for key in wanted:
            store.put(key, b"")
        expect_same([key for key, _ in store.list(self.prefix)], wanted, "every key is listed, past one page too")


def reads_of(store: Store, key: str) -> list[tuple[str, Callable[[], object]]]:
    """Every way to read `key`, by name."""
    return [
        ("get", lambda: store.get(key)),
        ("get_range", lambda: store.get_range(key, 0, 0)),
        ("get_tail", lambda: store.get_tail(key, 1)),
        ("read_into", lambda: store.read_into(key, 0, memoryview(bytearray(1)))),
        ("head", lambda: store.head(key)),
    ]


def writes_of(store: Store, key: str) -> list[tuple[str, Callable[[], object]]]:
    """Every way to change `key`, by name."""
    return [
        ("put", lambda: store.put(key, b"")),
        ("open_writer", lambda: store.open_writer(key)),
        ("put_if_absent", lambda: store.put_if_absent(key, b"")),
        ("compare_and_swap", lambda: store.compare_and_swap(key, b"", b"")),
        ("delete", lambda: store.delete(key)),
    ]


def expect_reads_agree(store: Store, key: str, value: bytes) -> None:
    """Every way to read `key` answers `value`."""
    size = len(value)
    target = bytearray(size)
    expect_same(store.get(key), value, "get")
    expect_same(bytes(store.get_range(key, 0, size)), value, "get_range of the whole value")
    expect_same(bytes(store.get_range(key, 5, 100)), value[5:105], "get_range of a few bytes")
    expect_same(store.get_tail(key, 10), (size, value[-10:]), "get_tail")
    expect(store.read_into(key, 0, memoryview(target)), "read_into answers True")
    expect_same(bytes(target), value, "read_into")
    expect_same(store.head(key), size, "head")
