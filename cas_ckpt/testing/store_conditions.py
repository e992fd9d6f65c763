"""Conformance: writes that depend on what is there."""

from __future__ import annotations

from cas_ckpt.errors import ConflictError, NotFoundError, StorageError
from cas_ckpt.storage.store import Store
from cas_ckpt.testing.expect import at_once, expect_raises, expect_same, skip
from cas_ckpt.testing.store_case import StoreCase


class ConditionChecks(StoreCase):
    """put_if_absent and compare_and_swap."""

    def test_a_condition_that_cannot_be_kept_is_refused(self) -> None:
        store = self.store()
        if store.abilities.conditional:
            skip("this store declares conditional writes")
        expect_raises(StorageError, "put_if_absent", store.put_if_absent, self.key(), b"")
        expect_raises(StorageError, "compare_and_swap", store.compare_and_swap, self.key(), b"", b"")

    def test_a_value_is_created_once(self) -> None:
        store = self._conditional()
        for name, value in (("some", b"first"), ("empty", b"")):
            store.put_if_absent(self.key(name), value)
            expect_raises(ConflictError, "created twice", store.put_if_absent, self.key(name), b"")
            expect_same(store.get(self.key(name)), value, "the first value stays")

    def test_a_deleted_key_can_be_created_again(self) -> None:
        store = self._conditional()
        store.put_if_absent(self.key(), b"first")
        store.delete(self.key())
        store.put_if_absent(self.key(), b"second")
        expect_same(store.get(self.key()), b"second", "created again")

    def test_a_swap_replaces_what_was_expected(self) -> None:
        store = self._conditional()
        store.put_if_absent(self.key(), b"")
        for before, after in ((b"", b"one"), (b"one", b"a longer one"), (b"a longer one", b"")):
            store.compare_and_swap(self.key(), before, after)
            expect_same(store.get(self.key()), after, "swapped")

    def test_a_stale_swap_changes_nothing(self) -> None:
        store = self._conditional()
        store.put(self.key(), b"current")
        for stale in (b"", b"curren", b"current ", b"CURRENT"):
            expect_raises(ConflictError, "stale swap", store.compare_and_swap, self.key(), stale, b"new")
            expect_same(store.get(self.key()), b"current", "a refused swap changes nothing")

    def test_a_swap_of_a_missing_key_creates_nothing(self) -> None:
        store = self._conditional()
        store.put(self.key("folder/value"), b"x")
        for name in ("absent", "folder"):
            key = self.key(name)
            expect_raises(ConflictError, "swap of nothing", store.compare_and_swap, key, b"", b"new")
            expect_raises(NotFoundError, "a refused swap creates nothing", store.get, key)

    def test_a_swap_sees_what_another_handle_did(self) -> None:
        store = self._conditional()
        other = self.reopened(store)
        store.put(self.key(), b"one")
        other.compare_and_swap(self.key(), b"one", b"two")
        expect_raises(ConflictError, "stale swap", store.compare_and_swap, self.key(), b"one", b"three")
        store.compare_and_swap(self.key(), b"two", b"three")
        expect_same(other.get(self.key()), b"three", "the last swap")

    def test_of_racing_creates_exactly_one_wins(self) -> None:
        store = self._conditional()
        handles = [store, self.reopened(store)]
        values = [f"nonce {number}".encode() for number in range(8)]
        answers = at_once(lambda n: handles[n % 2].put_if_absent(self.key(), values[n]), range(8))
        won = [value for value, answer in zip(values, answers, strict=True) if answer is None]
        lost = [answer for answer in answers if isinstance(answer, ConflictError)]
        expect_same((len(won), len(lost)), (1, 7), f"one create wins: {answers!r:.300}")
        expect_same(store.get(self.key()), won[0], "the winner's bytes")

    def test_racing_swaps_lose_no_update(self) -> None:
        store = self._conditional()
        store.put(self.key(), b"")
        handles = [store, self.reopened(store)]
        answers = at_once(lambda n: _append(handles[n % 2], self.key(), b"%d," % n, times=6), range(4))
        expect_same(answers, [None] * 4, "swaps that are retried succeed in the end")
        found = sorted(store.get(self.key()).split(b",")[:-1])
        expect_same(found, sorted([b"0", b"1", b"2", b"3"] * 6), "every swap that succeeded is in the value")

    def _conditional(self) -> Store:
        store = self.store()
        if not store.abilities.conditional:
            skip("this store declares that it has no conditional writes")
        return store


def _append(store: Store, key: str, mark: bytes, *, times: int) -> None:
    """Append `mark` by swaps, each retried until it goes through."""
    while times:
        current = store.get(key)
        try:
            store.compare_and_swap(key, current, current + mark)
        except ConflictError:
            continue
        times -= 1
