"""The storage contract as running checks, first part: values, their names, their listing, their ranges.

What every group of checks shares is here too: a store, expectations, calls at the same moment.

Invariant: checks use keys under `prefix` only, so that they can run on a bucket in use. A check that finds nothing to
check says so (skip), it never passes in silence. Expectations hold under `python -O`, and need no pytest, so that
`cas-ckpt store check` runs where only the package is installed.
"""

from __future__ import annotations

import random
import secrets
import threading
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn, ParamSpec, TypeVar
from unittest import SkipTest

import numpy as np

from cas_ckpt.errors import CorruptionError, InvalidInputError, NotFoundError
from cas_ckpt.native import DIGEST_BYTES, Part, leaf_digests
from cas_ckpt.storage.store import MOST_VALUE_BYTES, ListsVersions, ReadsLeaves, Store, delete_many


class StoreCase:
    """Override `store`, and `reopened` where a second handle can see the same values."""

    num_listed = 1001
    """Keys made to see a listing whole: above the page of the usual object stores."""

    def store(self) -> Store:
        """The store under test; called once per check."""
        raise NotImplementedError("a conformance test overrides store()")

    def reopened(self, store: Store) -> Store:
        """Another handle on the values of `store`, as another process would have."""
        return store

    @property
    def prefix(self) -> str:
        """Prefix of the keys of this check alone."""
        # Several threads may be the first to ask, and `cached_property` has no lock since Python 3.12.
        return str(self.__dict__.setdefault("_prefix", f"conformance/{secrets.token_hex(8)}/"))

    def key(self, name: str = "value") -> str:
        """A key of this check."""
        return self.prefix + name


def noise(num_bytes: int, *, seed: int = 0) -> bytes:
    """Reproducible bytes in which no run repeats, so that a wrong offset shows."""
    return random.Random(seed).randbytes(num_bytes)


BAD_KEYS = (
    "", "/", "/a", "a/", "a//b", ".", "..", "a/..", "../a", "a/../b", "./a", "a/./b", "a\\b", "a b", "a\0b", "a\nb",
    "ä", "a:b", "~a", "a*", "%2e%2e/a", "tmp", "tmp/a", "a" * 256, "/".join(["a" * 200] * 6),
)  # fmt: skip
"""Keys that every store refuses: path tricks, control characters, over-long, reserved."""

BAD_PREFIXES = ("/", "//", "a//", "../", "a/../", "a b", "a\0", "tmp/", "ä", "*")
"""Prefixes that no key has."""


# --- expectations, and calls at the same moment ---------------------------------------------

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")
E = TypeVar("E", bound=BaseException)


class ExpectationFailed(AssertionError):
    """A store does not keep a rule of the contract."""


def expect(condition: bool, rule: str) -> None:
    """Raise, quoting `rule`, unless `condition` holds."""
    if not condition:
        raise ExpectationFailed(rule)


def expect_same(found: object, wanted: object, rule: str) -> None:
    """Raise unless both are equal; long values are cut short in the message."""
    if found != wanted:
        raise ExpectationFailed(f"{rule}: wanted {wanted!r:.100}, found {found!r:.100}")


def expect_raises(kind: type[E], rule: str, call: Callable[P, object], *arguments: P.args, **named: P.kwargs) -> E:
    """The error that `call(*arguments, **named)` raised, which must be of `kind`."""
    try:
        answer = call(*arguments, **named)
    except kind as error:
        return error
    except Exception as error:
        raise ExpectationFailed(f"{rule}: wanted {kind.__name__}, found {error!r:.200}") from error
    raise ExpectationFailed(f"{rule}: wanted {kind.__name__}, found the answer {answer!r:.100}")


def skip(reason: str) -> NoReturn:
    """Leave this check: it is not about this store (pytest reports it as skipped)."""
    raise SkipTest(reason)


def at_once(call: Callable[[A], T], arguments: Sequence[A]) -> list[T | Exception]:
    """Results or errors of `call` for each argument, all calls started at the same time."""
    start = threading.Barrier(len(arguments))

    def run(argument: A) -> T | Exception:
        start.wait()
        try:
            return call(argument)
        except Exception as error:  # noqa: BLE001 - handed to the check, which judges it
            return error

    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(run, arguments))


_LONG = (17 << 20) + 7
"""Longer than the parts that object storages are written and read in."""


class ValueChecks(StoreCase):
    """put, get, head, delete, list."""

    def test_a_value_read_back_is_the_value_put(self) -> None:
        store = self.store()
        for size in (0, 1, 4095, 4096, 4097, (1 << 20) + 1):
            value = noise(size, seed=size)
            store.put(self.key(), value)
            expect_same(store.get(self.key()), value, f"a value of {size} bytes comes back")
            expect_same(store.head(self.key()), size, "head answers the size")

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

    def test_a_value_of_many_parts_is_whole(self) -> None:
        store = self.store()
        value = noise(_LONG)
        for name in ("put", "streamed"):
            if name == "put":
                store.put(self.key(name), value)
            else:
                with store.open_writer(self.key(name)) as writer:
                    for at in range(0, _LONG, 3 << 20):
                        writer.write(value[at : at + (3 << 20)])
                    writer.commit()
            expect_reads_agree(store, self.key(name), value)
        spans = [(at, min(9 << 20, _LONG - at)) for at in range(0, _LONG, 5 << 20)]
        answers = at_once(lambda span: bytes(store.get_range(self.key("put"), *span)), spans)
        for (at, length), found in zip(spans, answers, strict=True):
            expect(found == value[at : at + length], f"range {at}+{length}, read beside others: {found!r:.100}")

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
        room = store.abilities.max_key_bytes - len(self.prefix)
        key = self.prefix + ("/".join(["k" * 200] * 6))[:room].rstrip("/")
        store.put(key, b"x")
        expect_same([found for found, _ in store.list(self.prefix)], [key], "the longest key that the store declares")

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
            expect(isinstance(seen, set) and seen <= set(values), "a reader saw a value that was never put")


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

    def test_versions_in_a_listing_tell_what_changed(self) -> None:
        store = self.store()
        if not isinstance(store, ListsVersions):
            skip("this store has no versions in its listings")
        for name in ("a/1", "a/2", "b"):
            store.put(self.key(name), b"old")
        before = {found.key: found for found in store.list_versions(self.key("a/"))}
        store.put(self.key("a/2"), b"new")
        after = {found.key: found for found in store.list_versions(self.key("a/"))}
        expect_same(list(after), [self.key("a/1"), self.key("a/2")], "keys, as list has them")
        expect_same([found.num_bytes for found in after.values()], [3, 3], "sizes, as list has them")
        expect_same(after[self.key("a/1")], before[self.key("a/1")], "what did not change")
        expect(after[self.key("a/2")].version != before[self.key("a/2")].version, "a new value has a new version")


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
    if len(value) <= MOST_VALUE_BYTES:
        expect_same(store.get(key), value, "get")
    else:
        expect_raises(CorruptionError, "get of what is longer than any record", store.get, key)
    expect_same(bytes(store.get_range(key, 0, size)), value, "get_range of the whole value")
    expect_same(bytes(store.get_range(key, 5, 100)), value[5:105], "get_range of a few bytes")
    expect_same(store.get_tail(key, 10), (size, value[-10:]), "get_tail")
    expect(store.read_into(key, 0, memoryview(target)), "read_into answers True")
    expect_same(bytes(target), value, "read_into")
    if isinstance(store, ReadsLeaves):
        _check_leaves(store, key, value)
    expect_same(store.head(key), size, "head")


def _check_leaves(store: ReadsLeaves, key: str, value: bytes) -> None:
    """read_leaves brings what has its digests into place, stops before what has not, refuses what ends behind it."""
    rest, leaf = value[2:], 1 << 16
    digests = leaf_digests(rest, leaf)
    whole, later = np.zeros(len(rest), np.uint8), np.zeros(len(rest) // 2, np.uint8)
    parts: list[Part] = [whole, (later, whole.shape, (len(rest) - len(later),))]
    num_leaves = len(digests) // DIGEST_BYTES
    expect_same(store.read_leaves(key, 2, 0, len(rest), leaf, digests, parts), num_leaves, "leaves that are intact")
    expect_same(whole.tobytes(), rest, "read_leaves into all of a cell")
    expect_same(later.tobytes(), rest[len(rest) - len(later) :], "read_leaves into a part of a cell")
    wrong = digests[:-1] + bytes([digests[-1] ^ 1])
    expect_same(store.read_leaves(key, 2, 0, len(rest), leaf, wrong, ()), num_leaves - 1, "leaves before another one")
    expect_raises(CorruptionError, "past the end", store.read_leaves, key, 0, 0, len(value) + 1, leaf, None, ())


# --- ranges, tails, reads into the caller's memory ------------------------------------------

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
            if store.abilities.local:
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
