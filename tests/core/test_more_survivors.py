"""Breaks that a second mutation run found unnoticed; each of these fails under its break."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cas_ckpt.core.chunks import tensor_nodes
from cas_ckpt.core.config import Config
from cas_ckpt.core.create import new_store_id, write_config
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.refs import RefKind
from cas_ckpt.core.tree import find, load_tree
from cas_ckpt.errors import ConflictError, CorruptionError, OutOfSpaceError, StorageError
from cas_ckpt.index import contents, history
from cas_ckpt.objects.digest import chunk_id, leaf_digests
from cas_ckpt.objects.spec import Box, Spec
from cas_ckpt.objects.state import StoredTensor
from cas_ckpt.ops.checkout.read import read_array
from cas_ckpt.storage.file import FileStore
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.testing import FaultyStore, fail_at, no_space_from
from cas_ckpt.transfer.chunk_reader import ChunkReader
from cas_ckpt.transfer.pack_writer import ChunkSink, EncodedChunk
from tests.builders import commit, new_repository, numbers


def chunk(number: int, released: list[int]) -> EncodedChunk:
    data = bytes([number]) * 5000
    digests = leaf_digests(memoryview(data), 65536)
    return EncodedChunk(chunk_id(5000, digests), 5000, 65536, digests, 0, data, lambda: released.append(number))


def test_1024_bytes_stand_inline_and_1025_do_not(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    assert commit(handle, {"a": np.ones(1024, np.uint8)}).stats.num_chunks == 0
    assert commit(handle, {"a": np.ones(1025, np.uint8)}).stats.num_chunks == 1


@pytest.mark.parametrize("k", [4, 5, 6])
def test_an_error_that_only_the_end_of_a_pack_meets_is_raised_by_finish(k: int) -> None:
    sink = ChunkSink(FaultyStore(MemoryStore(), fail_at(k)), pack_bytes=1 << 20)
    sink.put(chunk(1, []))
    with pytest.raises(StorageError):
        sink.finish()


class StuckStore(MemoryStore):
    """Refuses to write, but only once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def open_writer(self, key: str) -> Any:
        self.go_on.wait(30)
        raise OutOfSpaceError(f"writing {key}: no space left")


def test_chunks_that_wait_when_a_writer_fails_give_their_buffers_back() -> None:
    store, released = StuckStore(), []
    sink = ChunkSink(store, pack_bytes=1 << 20)
    for number in range(5):
        sink.put(chunk(number, released))
    store.go_on.set()
    with pytest.raises(OutOfSpaceError):
        sink.finish()
    assert sorted(released) == [0, 1, 2, 3, 4]


def test_a_writer_that_fails_at_its_first_chunk_leaves_no_temporary_file(tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir()
    sink = ChunkSink(FaultyStore(FileStore(root), no_space_from(2)), pack_bytes=1 << 20)
    sink.put(chunk(1, []))
    with pytest.raises(OutOfSpaceError):
        sink.finish()
    assert [path.name for path in root.rglob("*") if path.is_file() and path.name != "lock"] == []


def test_an_entry_of_another_chunk_is_not_taken_for_the_one_that_is_wanted(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    commit(handle, {"a": numbers(500, seed=1), "b": numbers(500, seed=2)})
    one, two = list(handle.index.read(contents.chunk_digests))
    place = handle.index.read(contents.locate, [two])[two][0]
    with pytest.raises(CorruptionError, match="wanted"):
        ChunkReader(handle.store).open_extent(one, place)  # type: ignore[arg-type]


class LostReplyStore(MemoryStore):
    """Does one swap of a ref, lets somebody commit on top, and answers that it was refused."""

    def __init__(self) -> None:
        super().__init__()
        self.armed = False

    def compare_and_swap(self, key: str, expected: bytes, data: Any) -> None:
        super().compare_and_swap(key, expected, data)
        if self.armed:
            self.armed = False
            commit(RepositoryHandle.on_store(self, index_url=":memory:"), {"theirs": 1}, message="theirs")
            raise ConflictError("refused, says a retry whose first try was done")


def test_an_own_commit_on_which_others_have_built_is_not_made_twice() -> None:
    store = LostReplyStore()
    write_config(store, Config(new_store_id()))
    handle = RepositoryHandle.on_store(store, index_url=":memory:")
    commit(handle, {"a": 1}, message="base")
    store.armed = True
    ours = commit(handle, {"a": 2}, message="ours")
    handle.sync()
    head = handle.refs.get(RefKind.BRANCH, "main").target
    assert head is not None
    messages = [row.message for row in history.log(handle.index, [head])]
    assert messages == ["theirs", "ours", "base"]
    assert handle.index.read(history.read_commit, head).parents == (bytes.fromhex(ours.id),)  # type: ignore[union-attr]


def test_a_tensor_node_of_another_spec_than_its_entry_is_refused(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    root = commit(handle, {"w": numbers(3000, 1000)}).root
    item = find(load_tree(handle, bytes.fromhex(root)), "w")  # type: ignore[arg-type]
    assert isinstance(item, StoredTensor)
    other = replace(item, spec=Spec("float32", (1000, 3000)))
    with pytest.raises(CorruptionError, match="is stored where"):
        tensor_nodes(handle, [other])
    with pytest.raises(CorruptionError, match="is stored where"):
        read_array(handle, other, Box((0, 0), (2, 2)))
