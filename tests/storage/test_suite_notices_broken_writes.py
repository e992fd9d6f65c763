"""A store that breaks a rule of streams or conditions fails the check that is for it."""

from __future__ import annotations

import threading
from types import TracebackType

import pytest

from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import CkptError, ConflictError
from cas_ckpt.memory import new_buffer
from cas_ckpt.storage.memory import MemoryStore, MemoryWriter
from cas_ckpt.storage.store import Abilities
from cas_ckpt.testing import StoreConformance
from cas_ckpt.testing.store_suite import ConditionChecks, WriterChecks

GROUPS = (WriterChecks, ConditionChecks)

# Each class breaks one rule; its docstring names the checks that must notice.


class ReopensEmpty(MemoryStore):
    """a_swap_sees_what_another_handle_did"""


class WriterOf(MemoryWriter):
    """The base of writers that break a rule."""

    pieces: list[memoryview]

    def __init__(self, store: MemoryStore, key: str) -> None:
        super().__init__(store, key)
        self.pieces = []


class ShowsUnfinishedStreams(MemoryStore):
    """nothing_is_visible_before_commit, an_aborted_stream_leaves_nothing,
    leaving_the_block_without_commit_leaves_nothing"""

    class Writer(WriterOf):
        def write(self, data: Buffer) -> None:
            super().write(data)
            self._store.put(self._key, memoryview(self._data)[: self._filled])

    def open_writer(self, key: str) -> MemoryWriter:
        return self.Writer(self, key)


class ReplacesByStreams(MemoryStore):
    """a_streamed_key_is_written_once, of_streams_to_one_key_exactly_one_wins"""

    class Writer(WriterOf):
        def commit(self) -> None:
            self._leave_open()
            self._store.put(self._key, memoryview(self._data)[: self._filled])

    def open_writer(self, key: str) -> MemoryWriter:
        return self.Writer(self, key)


class KeepsThePieces(MemoryStore):
    """a_writer_does_not_keep_the_callers_buffer"""

    class Writer(WriterOf):
        def write(self, data: Buffer) -> None:
            self.pieces.append(memoryview(data))

        def commit(self) -> None:
            for piece in self.pieces:
                super().write(piece)
            super().commit()

    def open_writer(self, key: str) -> MemoryWriter:
        return self.Writer(self, key)


class LosesTheLastPiece(MemoryStore):
    """a_streamed_value_is_its_pieces_in_order"""

    class Writer(WriterOf):
        def write(self, data: Buffer) -> None:
            if memoryview(data).nbytes != 2:
                super().write(data)

    def open_writer(self, key: str) -> MemoryWriter:
        return self.Writer(self, key)


class MakesNothingOfAnEmptyStream(MemoryStore):
    """a_stream_of_nothing_is_an_empty_value"""

    class Writer(WriterOf):
        def commit(self) -> None:
            if self._filled:
                super().commit()

    def open_writer(self, key: str) -> MemoryWriter:
        return self.Writer(self, key)


class CommitsOnExit(MemoryStore):
    """leaving_the_block_without_commit_leaves_nothing, an_error_in_the_block_leaves_nothing_and_is_raised"""

    class Writer(WriterOf):
        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None:
            if self._open:
                self.commit()

    def open_writer(self, key: str) -> MemoryWriter:
        return self.Writer(self, key)


class UndoesCommits(MemoryStore):
    """abort_after_commit_changes_nothing"""

    class Writer(WriterOf):
        def abort(self) -> None:
            super().abort()
            self._store.delete(self._key)

    def open_writer(self, key: str) -> MemoryWriter:
        return self.Writer(self, key)


class NeverRefusesWriters(MemoryStore):
    """a_finished_writer_refuses_more, a_writer_that_failed_once_commits_nothing"""

    class Writer(WriterOf):
        def _leave_open(self) -> None:
            return

    def open_writer(self, key: str) -> MemoryWriter:
        return self.Writer(self, key)


class SharesOneBuffer(MemoryStore):
    """streams_at_once_do_not_mix"""

    class Writer(WriterOf):
        shared = new_buffer(1 << 20)

        def __init__(self, store: MemoryStore, key: str) -> None:
            super().__init__(store, key)
            self._data = self.shared

    def open_writer(self, key: str) -> MemoryWriter:
        return self.Writer(self, key)


class CreatesTwice(MemoryStore):
    """a_value_is_created_once"""

    def put_if_absent(self, key: str, data: Buffer) -> None:
        self.put(key, data)


class TakesEmptyForAbsent(MemoryStore):
    """a_value_is_created_once"""

    def put_if_absent(self, key: str, data: Buffer) -> None:
        if self._values.get(key):
            raise ConflictError(key)
        self.put(key, data)


class RemembersDeletedKeys(MemoryStore):
    """a_deleted_key_can_be_created_again"""

    def __init__(self) -> None:
        super().__init__()
        self.created: set[str] = set()

    def put_if_absent(self, key: str, data: Buffer) -> None:
        if key in self.created:
            raise ConflictError(key)
        super().put_if_absent(key, data)
        self.created.add(key)


class SwapsBlindly(MemoryStore):
    """a_stale_swap_changes_nothing, a_swap_of_a_missing_key_creates_nothing"""

    def compare_and_swap(self, key: str, expected: bytes, data: Buffer) -> None:
        self.put(key, data)


class ComparesTheBeginning(MemoryStore):
    """a_stale_swap_changes_nothing"""

    def compare_and_swap(self, key: str, expected: bytes, data: Buffer) -> None:
        if not self._values.get(key, b"").startswith(expected):
            raise ConflictError(key)
        self.put(key, data)


class SwapsNothing(MemoryStore):
    """a_swap_replaces_what_was_expected"""

    def compare_and_swap(self, key: str, expected: bytes, data: Buffer) -> None:
        super().compare_and_swap(key, expected, expected)


class ChecksThenWrites(MemoryStore):
    """of_racing_creates_exactly_one_wins, racing_swaps_lose_no_update"""

    def __init__(self) -> None:
        super().__init__()
        self.creators, self.swappers = threading.Barrier(8), threading.Barrier(4)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        if key in self._values:
            raise ConflictError(key)
        self.creators.wait(timeout=10)
        self.put(key, data)

    def compare_and_swap(self, key: str, expected: bytes, data: Buffer) -> None:
        if self._values.get(key) != expected:
            raise ConflictError(key)
        self.swappers.wait(timeout=10)
        self.put(key, data)


class DeclaresNoConditionsAndIgnoresThem(CreatesTwice):
    """a_condition_that_cannot_be_kept_is_refused"""

    abilities = Abilities(durable=False, local=True, conditional=False)


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
