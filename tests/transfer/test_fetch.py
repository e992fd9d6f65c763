"""Restoring: cached or not, contiguous or not, every target gets its bytes or none is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.tree import load_tree, stored_tensors
from cas_ckpt.errors import CorruptionError
from cas_ckpt.native import read_leaves
from cas_ckpt.objects.spec import Box
from cas_ckpt.objects.state import TensorCopy
from cas_ckpt.ops.checkout.checkout import fetch_tensors
from cas_ckpt.storage.file import FileStore
from tests.builders import ArrayMemory, commit, new_repository, numbers, same_bytes

STATE = {"wide": numbers(600, 4096, seed=1), "tall": numbers(3000, 700, seed=2), "small": numbers(20, seed=3)}


class ForgetfulStore(FileStore):
    """A file store whose medium keeps nothing in memory; may damage what it is asked a second time."""

    damage_later = False
    intact_reads = 0
    bytes_read = 0

    def read_leaves(self, key: str, offset: int, *rest: Any) -> int:
        first, size, leaf_bytes, digests, parts, cached_only = rest
        if cached_only:
            self.asked = True
            return 0
        self.bytes_read += size
        data = bytearray(self.get_range(key, offset, size))
        if self.damage_later and getattr(self, "asked", False):
            self.intact_reads -= 1
            data[0] ^= self.intact_reads < 0
        return read_leaves(data, 0, first, size, leaf_bytes, digests, parts)


def restored(handle: RepositoryHandle, root: str, targets: dict[str, np.ndarray[Any, Any]]) -> None:
    copies = [
        TensorCopy(path, stored, ArrayMemory(targets[str(path[0])]))
        for path, stored in stored_tensors(load_tree(handle, bytes.fromhex(root)))
    ]
    fetch_tensors(handle, copies)


def empty_targets(order: str = "C") -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.zeros(array.shape, array.dtype, order=order) for name, array in STATE.items()}  # type: ignore[call-overload]


@pytest.fixture(params=["raw", "zstd"])
def repo(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, str]:
    handle = new_repository(tmp_path / "repo", encoding=request.param)
    info = commit(handle, STATE)
    handle.close()
    return tmp_path / "repo", info.root


@pytest.mark.parametrize("order", ["C", "F"])
def test_targets_are_filled_whatever_their_strides(repo: tuple[Path, str], order: str) -> None:
    targets = empty_targets(order)
    restored(RepositoryHandle.open(repo[0]), repo[1], targets)
    assert all(same_bytes(targets[name], array) for name, array in STATE.items())


def test_what_left_the_cache_is_read_and_verified_again(repo: tuple[Path, str]) -> None:
    store = ForgetfulStore(repo[0])
    handle = RepositoryHandle.on_store(store, index_url=":memory:")
    targets = empty_targets()
    restored(handle, repo[1], targets)
    assert all(same_bytes(targets[name], array) for name, array in STATE.items())


def test_a_medium_that_changes_its_mind_between_the_passes_is_found(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    info = commit(handle, STATE)
    store = ForgetfulStore(tmp_path / "repo")
    store.damage_later = True
    with pytest.raises(CorruptionError, match=r"wide|tall"):
        restored(RepositoryHandle.on_store(store, index_url=":memory:"), info.root, empty_targets())


def test_what_was_written_into_before_a_medium_changed_its_mind_is_named(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo", encoding="raw")
    info = commit(handle, STATE)
    store = ForgetfulStore(tmp_path / "repo")
    store.damage_later, store.intact_reads, targets = True, 2, empty_targets()
    with pytest.raises(CorruptionError) as caught:
        restored(RepositoryHandle.on_store(store, index_url=":memory:"), info.root, targets)
    written = {name for name, target in targets.items() if target.any()}
    assert written and written <= set(caught.value.overwritten)


def test_one_chunk_fills_every_tensor_that_has_it(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    array = numbers(1 << 18)
    info = commit(handle, {"a": array, "b": array.copy()})
    targets = {"a": np.zeros_like(array), "b": np.zeros_like(array)}
    restored(handle, info.root, targets)
    assert same_bytes(targets["a"], array) and same_bytes(targets["b"], array)


def test_a_chunk_of_which_several_want_parts_is_read_once_more_after_it_was_verified(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo", encoding="raw")
    array = numbers(1 << 18)
    info = commit(handle, {"a": array})
    store = ForgetfulStore(tmp_path / "repo")
    ((path, stored),) = stored_tensors(load_tree(handle, bytes.fromhex(info.root)))
    parts = [np.zeros(len(array) // 8, array.dtype) for _ in range(8)]
    copies = [
        TensorCopy(path, stored, ArrayMemory(part), box=Box((at * len(part),), (len(part),)))
        for at, part in enumerate(parts)
    ]
    fetch_tensors(RepositoryHandle.on_store(store, index_url=":memory:"), copies)
    assert same_bytes(np.concatenate(parts), array)
    assert store.bytes_read == 2 * array.nbytes, "once to verify it, once to fill all parts"
