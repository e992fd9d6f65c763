"""Checks that could be taken out of the code without any other test noticing: one test for each."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.protocol import GC_STATE_KEY, GcState, Generation, encode_gc_state
from cas_ckpt.errors import CorruptionError
from cas_ckpt.objects import codec, pack
from cas_ckpt.objects.digest import LEAF_BYTES, ObjectKind, chunk_id, leaf_digests
from cas_ckpt.objects.pack import ExtentInfo, PackKind
from cas_ckpt.objects.spec import Box, Spec
from cas_ckpt.objects.state import TensorItem
from cas_ckpt.storage.file import FileStore
from tests.builders import commit, new_repository, numbers, same_bytes, stored_arrays

DATA = numbers(512).tobytes()
LEAVES = leaf_digests(memoryview(DATA), LEAF_BYTES)


@pytest.mark.parametrize(("first_leaf", "num_leaves"), [(1, 1), (0, 2)])
def test_an_entry_that_claims_leaves_beyond_its_chunk_is_refused(first_leaf: int, num_leaves: int) -> None:
    info = ExtentInfo(
        chunk_id(len(DATA), LEAVES), ObjectKind.CHUNK, codec.RAW, len(DATA), len(DATA), LEAF_BYTES,
        first_leaf, num_leaves, pack.HEADER_BYTES, pack.entry_header_bytes(1),
    )  # fmt: skip
    with pytest.raises(CorruptionError, match="leaves that its chunk does not have"):
        pack.decode_entry_header(pack.encode_entry_header(info, LEAVES), offset=info.offset)


@pytest.mark.parametrize("more", [-1, 1])
def test_a_trailer_that_tells_another_length_than_the_pack_has_is_refused(more: int) -> None:
    trailer = pack.encode_trailer(bytes(16), PackKind.DATA, b"", directory_offset=1000)
    size = 1000 + len(trailer)
    assert pack.decode_trailer(trailer, size_bytes=size, key="k").size_bytes == size
    with pytest.raises(CorruptionError, match="bytes long where its trailer says"):
        pack.decode_trailer(trailer, size_bytes=size + more, key="k")


class _NeverTheSame:
    """A tensor that somebody writes all the time: every look at it finds other numbers."""

    num_reads = 0

    def read(self, box: Box) -> np.ndarray[Any, Any]:
        self.num_reads += 1
        return np.full(box.sizes, self.num_reads, np.float32)


@pytest.mark.parametrize("before", [{}, {"other": numbers(1 << 16)}], ids=["a first commit", "a later commit"])
def test_a_tensor_that_changes_during_the_commit_is_stored_under_the_id_of_what_was_stored(
    tmp_path: Path, before: dict[str, Any]
) -> None:
    handle = new_repository(tmp_path / "repo")
    if before:
        commit(handle, before)
    info = commit(handle, {"w": TensorItem(Spec("float32", (1 << 20,)), _NeverTheSame(), "numpy")})
    assert stored_arrays(handle, info.root)["w"].shape == (1 << 20,)


def test_chunks_that_turn_out_to_be_stored_give_their_buffers_back(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    same = numbers(2000)
    # New and known in turn: every known one is copied first, because the one before it was new.
    items = {f"{at:03}": same.copy() if at % 2 else numbers(2000, seed=at + 1) for at in range(60)}
    committing = threading.Thread(target=commit, args=(handle, items), kwargs={"num_threads": 1}, daemon=True)
    committing.start()
    committing.join(30)
    assert not committing.is_alive(), "the commit waits for a buffer that nobody gives back"


class _CollectedMeanwhile(FileStore):
    """A garbage collection condemns every pack at the moment when a commit reads its branch."""

    condemned: tuple[str, ...] = ()

    def get(self, key: str) -> bytes:
        if key.endswith("main.ref") and not self.condemned:
            self.condemned = tuple(key for key, _ in self.list("packs/"))
            self.put(GC_STATE_KEY, encode_gc_state(GcState(Generation(1), "condemned", self.condemned)))
        return super().get(key)


def test_a_commit_under_which_a_collection_began_relies_on_nothing_that_it_condemned(tmp_path: Path) -> None:
    old = numbers(1 << 18)
    first = new_repository(tmp_path / "repo")
    commit(first, {"w": old})
    first.close()
    store = _CollectedMeanwhile(tmp_path / "repo")
    info = commit(RepositoryHandle.on_store(store), {"w": old})
    assert store.condemned
    for key in store.condemned:
        store.delete(key)
    assert same_bytes(stored_arrays(RepositoryHandle.open(tmp_path / "repo"), info.root)["w"], old)
