"""Conformance: values written in pieces."""

from __future__ import annotations

from collections.abc import Callable

from cas_ckpt.errors import ConflictError, InvalidInputError, NotFoundError, StorageError
from cas_ckpt.storage.store import Store, StreamWriter
from cas_ckpt.testing.expect import at_once, expect, expect_raises, expect_same
from cas_ckpt.testing.store_case import StoreCase, noise

_PIECES = (0, 1, 31, 4096, 4095, 70_000, 1 << 20, (1 << 20) + 1, 3 << 20, (5 << 20) + 17, 9 << 20, 2)
"""Sizes in bytes: small and large, odd and even, together above any buffer that we know of."""


class WriterChecks(StoreCase):
    """open_writer."""

    def test_a_streamed_value_is_its_pieces_in_order(self) -> None:
        store = self.store()
        pieces = [noise(size, seed=number) for number, size in enumerate(_PIECES)]
        _stream(store, self.key(), *pieces)
        expect(store.get(self.key()) == b"".join(pieces), "the value is the pieces, one after the other")

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
        expect(store.get(self.key()) == wanted, "a piece was kept after write returned")

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
        answers = at_once(lambda key: _stream(store, key, *_cut(values[key])), list(values))
        expect_same(answers, [None] * 4, "streams written at once")
        expect(all(store.get(key) == value for key, value in values.items()), "each stream is its own")

    def test_of_streams_to_one_key_exactly_one_wins(self) -> None:
        store = self.store()
        values = [bytes([number]) * 100_000 for number in range(4)]
        answers = at_once(lambda value: _stream(store, self.key(), value), values)
        won = [value for value, answer in zip(values, answers, strict=True) if answer is None]
        lost = [answer for answer in answers if isinstance(answer, ConflictError)]
        expect_same((len(won), len(lost)), (1, 3), f"one stream wins: {answers!r:.300}")
        expect_same(store.get(self.key()), won[0], "the winner's bytes")

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


def _cut(value: bytes) -> list[bytes]:
    return [value[at : at + 300_000] for at in range(0, len(value), 300_000)]
