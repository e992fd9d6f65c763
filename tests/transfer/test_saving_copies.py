"""What a save copies, and the memory that it copies into."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cas_ckpt.native import leaf_digests
from cas_ckpt.objects.digest import chunk_id
from cas_ckpt.objects.spec import Box, Spec, grid_for
from cas_ckpt.progress import SILENT
from cas_ckpt.transfer import save as module
from cas_ckpt.transfer.pack_writer import ChunkSink, EncodedChunk
from cas_ckpt.transfer.save import BATCH_BYTES, Buffers, Claims, TensorWork, save_tensors
from tests.builders import ArrayMemory, numbers


class Private(ArrayMemory):
    """Memory that belongs to the commit alone."""

    is_private = True

    def saved(self) -> None:
        """It is of one moment."""


class Elsewhere(ArrayMemory):
    """Memory of a device: each read is a copy, which belongs to the commit, and somebody writes between two reads."""

    is_private = True

    def read(self, box: Box) -> np.ndarray[Any, Any]:
        self.array += 1
        return super().read(box).copy()


class Kept(ChunkSink):
    """Keeps what it is handed, and the bytes of it."""

    def __init__(self) -> None:
        self.chunks: list[EncodedChunk] = []
        self.bytes: list[bytes] = []

    def put(self, *chunks: EncodedChunk) -> None:
        self.chunks += chunks
        self.bytes += [bytes(chunk.payload) for chunk in chunks]


def saved(source: ArrayMemory, *, expect_new: bool) -> tuple[Kept, TensorWork]:
    spec = Spec("float32", source.array.shape)
    work, sink = TensorWork(spec, grid_for(spec), source), Kept()
    save_tensors(
        [work], sink, claims=Claims(lambda ids: [False] * len(ids)), policy="raw", num_threads=1,
        buffers=Buffers(), expect_new=expect_new, progress=SILENT, read_later=lambda _: False,
    )  # fmt: skip
    return sink, work


def inside(chunk: EncodedChunk, array: np.ndarray[Any, Any]) -> bool:
    return bool(np.shares_memory(np.frombuffer(chunk.payload, np.uint8), array))


@pytest.mark.parametrize("expect_new", [False, True])
def test_memory_that_nobody_changes_is_written_where_it_is_and_live_memory_is_copied(expect_new: bool) -> None:
    array = numbers(3000, 700)
    own, work = saved(Private(array), expect_new=expect_new)
    live, other = saved(ArrayMemory(array), expect_new=expect_new)
    assert [chunk.digest for chunk in own.chunks] == [chunk.digest for chunk in live.chunks] == work.chunks
    assert other.chunks == work.chunks
    assert all(inside(chunk, array) for chunk in own.chunks)
    assert not any(inside(chunk, array) for chunk in live.chunks)


def test_private_cells_that_do_not_lie_in_one_piece_are_gathered() -> None:
    array = numbers(1024, 4096)
    own, work = saved(Private(array), expect_new=False)
    assert len(own.chunks) == work.grid.num_cells > 1
    for number, (chunk, written) in enumerate(zip(own.chunks, own.bytes, strict=True)):
        data = np.ascontiguousarray(array[work.grid.box(number).slices]).reshape(-1).view(np.uint8).data
        assert written == bytes(data)
        assert chunk.digest == chunk_id(len(data), leaf_digests(data, work.grid.leaf_bytes))
        assert not inside(chunk, array)


def test_memory_that_nobody_changes_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from cas_ckpt import native

    hashed: list[int] = []

    def counted(array: Any, leaf_bytes: int, copy: Any = None) -> bytes:
        hashed.append(memoryview(array).nbytes)
        return leaf_digests(array, leaf_bytes, copy)

    monkeypatch.setattr(native, "leaf_digests", counted)
    array = numbers(3000, 700)
    saved(Private(array), expect_new=False)
    assert sum(hashed) == array.nbytes


def test_a_copy_that_is_made_anew_to_be_written_is_hashed_anew() -> None:
    made, work = saved(Elsewhere(numbers(3000, 700)), expect_new=False)
    assert work.chunks == [chunk.digest for chunk in made.chunks]
    for chunk, written in zip(made.chunks, made.bytes, strict=True):
        assert chunk.digest == chunk_id(len(written), leaf_digests(written, work.grid.leaf_bytes))


def test_buffers_are_used_again_by_the_next_commit() -> None:
    first = Buffers()
    taken = first.take()
    first.give(taken)
    first.keep()
    assert Buffers().take() is taken
    assert len(taken) == BATCH_BYTES
    assert module.KEPT_BUFFERS * BATCH_BYTES < 64 << 20
