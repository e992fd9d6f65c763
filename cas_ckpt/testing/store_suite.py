"""The storage contract as running checks: one suite for every store, ours and yours.

In a test file (pytest finds the inherited `test_...` methods; `docs/adding-a-store.md`):

    class TestMyStore(StoreConformance):
        def store(self) -> Store:
            return MyStore(...)

On a store as it is, for example a bucket in use: `run_store_checks(open_store(url))`.

Invariant: both ways run the same checks, under keys of their own, which the second way deletes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from unittest import SkipTest

from cas_ckpt.errors import CkptError, ConflictError, InvalidInputError, NotFoundError, StorageError
from cas_ckpt.storage.store import Store, StreamWriter
from cas_ckpt.testing.store_values import (
    ListChecks,
    RangeChecks,
    StoreCase,
    ValueChecks,
    at_once,
    expect,
    expect_raises,
    expect_reads_agree,
    expect_same,
    noise,
    skip,
)

# --- values written in pieces ---------------------------------------------------------------

_PIECES = (0, 1, 31, 4096, 4095, 70_000, 1 << 20, (1 << 20) + 1, 3 << 20, (5 << 20) + 17, 9 << 20, 2)
"""Sizes in bytes: small and large, odd and even, together above any buffer that we know of."""


class WriterChecks(StoreCase):
    """open_writer."""

    def test_a_streamed_value_is_its_pieces_in_order(self) -> None:
        store = self.store()
        pieces = [noise(size, seed=number) for number, size in enumerate(_PIECES)]
        _stream(store, self.key(), *pieces)
        expect_reads_agree(store, self.key(), b"".join(pieces))

    def test_a_stream_of_nothing_is_an_empty_value(self) -> None:
        store = self.store()
        _stream(store, self.key())
        expect_same(store.get(self.key()), b"", "a stream of nothing")

    def test_a_writer_does_not_keep_the_callers_buffer(self) -> None:
        store = self.store()
        buffer = bytearray(2 << 20)
        with store.open_writer(self.key()) as writer:
            for number in range(12):
                buffer[:] = bytes([number]) * len(buffer)
                writer.write(memoryview(buffer))
            buffer[:] = b"\xff" * len(buffer)
            writer.commit()
        wanted = b"".join(bytes([number]) * len(buffer) for number in range(12))
        found = store.get_range(self.key(), 0, len(wanted))
        expect(bytes(found) == wanted, "a piece was kept after write returned")

    def test_nothing_is_visible_before_commit(self) -> None:
        store = self.store()
        other = self.reopened(store)
        with store.open_writer(self.key()) as writer:
            writer.write(noise(20 << 20))
            self._expect_absent(other)
            writer.commit()
            expect_same(other.head(self.key()), 20 << 20, "visible when commit returned")

    def test_an_aborted_stream_leaves_nothing(self) -> None:
        store = self.store()
        writer = store.open_writer(self.key())
        writer.write(noise(1000))
        for _ in range(2):
            writer.abort()
            self._expect_absent(store)
        _stream(store, self.key(), b"again")
        expect_same(store.get(self.key()), b"again", "the key is free after an abort")

    def test_leaving_the_block_without_commit_leaves_nothing(self) -> None:
        store = self.store()
        with store.open_writer(self.key()) as writer:
            writer.write(b"x")
        self._expect_absent(store)

    def test_an_error_in_the_block_leaves_nothing_and_is_raised(self) -> None:
        store = self.store()

        def interrupted() -> None:
            with store.open_writer(self.key()) as writer:
                writer.write(b"x")
                raise ZeroDivisionError

        expect_raises(ZeroDivisionError, "the error of the block", interrupted)
        self._expect_absent(store)

    def test_abort_after_commit_changes_nothing(self) -> None:
        store = self.store()
        with store.open_writer(self.key()) as writer:
            writer.write(b"x")
            writer.commit()
            writer.abort()
        expect_same(store.get(self.key()), b"x", "committed")

    def test_a_finished_writer_refuses_more(self) -> None:
        store = self.store()
        for name, finish in _FINISHES.items():
            writer = store.open_writer(self.key(name))
            writer.write(b"x")
            finish(writer)
            expect_raises(StorageError, f"write after {name}", writer.write, b"y")
            expect_raises(StorageError, f"commit after {name}", writer.commit)

    def test_a_streamed_key_is_written_once(self) -> None:
        store = self.store()
        _stream(store, self.key(), b"first")
        writer = store.open_writer(self.key())
        writer.write(b"second")
        expect_raises(ConflictError, "commit of a key that is there", writer.commit)
        expect_raises(StorageError, "a writer that failed is poisoned", writer.commit)
        writer.abort()
        expect_same(store.get(self.key()), b"first", "the first value stays")

    def test_a_writer_that_failed_once_commits_nothing(self) -> None:
        store = self.store()
        writer = store.open_writer(self.key())
        writer.write(b"abcd")
        expect_raises(InvalidInputError, "a piece with gaps", writer.write, memoryview(b"abcd")[::2])
        expect_raises(StorageError, "commit after a write that failed", writer.commit)
        writer.abort()
        self._expect_absent(store)

    def test_streams_at_once_do_not_mix(self) -> None:
        store = self.store()
        values = {self.key(f"v{number}"): noise((3 << 20) + number, seed=number) for number in range(4)}
        cut = {key: [value[at : at + 300_000] for at in range(0, len(value), 300_000)] for key, value in values.items()}
        answers = at_once(lambda key: _stream(store, key, *cut[key]), list(values))
        expect_same(answers, [None] * 4, "streams written at once")
        expect(all(store.get(key) == value for key, value in values.items()), "each stream is its own")

    def test_of_streams_to_one_key_exactly_one_wins(self) -> None:
        store = self.store()
        values = [bytes([number]) * 100_000 for number in range(4)]
        answers = at_once(lambda value: _stream(store, self.key(), value), values)
        _expect_one_winner(store.get(self.key()), values, answers)

    def _expect_absent(self, store: Store) -> None:
        expect_raises(NotFoundError, "get of what was not committed", store.get, self.key())
        expect_raises(NotFoundError, "head of what was not committed", store.head, self.key())
        expect_same(list(store.list(self.prefix)), [], "what was not committed is not listed")


_FINISHES: dict[str, Callable[[StreamWriter], None]] = {
    "commit": lambda writer: writer.commit(),
    "abort": lambda writer: writer.abort(),
}


def _stream(store: Store, key: str, *pieces: bytes) -> None:
    with store.open_writer(key) as writer:
        for piece in pieces:
            writer.write(piece)
        writer.commit()


def _expect_one_winner(found: bytes, values: Sequence[bytes], answers: Sequence[object]) -> None:
    """Of writes of `values` at once one was done, the others were refused, and its value is `found`."""
    won = [value for value, answer in zip(values, answers, strict=True) if answer is None]
    lost = [answer for answer in answers if isinstance(answer, ConflictError)]
    expect_same((len(won), len(lost)), (1, len(values) - 1), f"one write wins: {answers!r:.300}")
    expect_same(found, won[0], "the winner's bytes")


# --- writes that depend on what is there ----------------------------------------------------


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
        _expect_one_winner(store.get(self.key()), values, answers)

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


# --- the whole suite ------------------------------------------------------------------------


class StoreConformance(ValueChecks, ListChecks, RangeChecks, WriterChecks, ConditionChecks):
    """Every check of the contract; override `store()`, and `reopened()` where it makes sense."""


class Outcome(enum.StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check of one store.

    Attributes:
        name: The rule, as a sentence.
        detail: What was wanted and found when it failed, why when it was skipped, else empty.
    """

    name: str
    outcome: Outcome
    detail: str = ""

    @property
    def ok(self) -> bool:
        """True unless the store broke the rule."""
        return self.outcome is not Outcome.FAILED


def check_names() -> list[str]:
    """Names of the check methods, in the order in which they are read and run."""
    return [name for group in StoreConformance.__bases__ for name in vars(group) if name.startswith("test_")]


def run_store_checks(
    store: Store, *, progress: Callable[[CheckResult], None] | None = None, num_listed: int = StoreCase.num_listed
) -> list[CheckResult]:
    """The result of every check on `store`; its other keys are left alone, those of the checks deleted.

    Args:
        store: Any store that can be written.
        progress: Called with each result as it comes.
        num_listed: Keys to make for the check of a long listing.
    """
    results = []
    for name in check_names():
        results.append(_run(_OnStore(store, num_listed), name))
        if progress is not None:
            progress(results[-1])
    return results


class _OnStore(StoreConformance):
    def __init__(self, given: Store, num_listed: int) -> None:
        self.given = given
        self.num_listed = num_listed

    def store(self) -> Store:
        return self.given


def _run(case: _OnStore, name: str) -> CheckResult:
    sentence = name.removeprefix("test_").replace("_", " ")
    try:
        try:
            getattr(case, name)()
        finally:
            _tidy(case)
    except SkipTest as reason:
        return CheckResult(sentence, Outcome.SKIPPED, str(reason))
    except Exception as error:  # noqa: BLE001 - whatever a store raises is a result
        kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        return CheckResult(sentence, Outcome.FAILED, f"{kind}{error}")
    return CheckResult(sentence, Outcome.PASSED)


def _tidy(case: _OnStore) -> None:
    """Delete the keys of one check; a store that cannot even do that shows it in other checks."""
    try:
        for key, _ in list(case.given.list(case.prefix)):
            case.given.delete(key)
    except CkptError:
        return
