"""Readers whose packs are collected under them: they find the copy, or are told; never wrong bytes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest

from cas_ckpt import limits
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import CommitInfo
from cas_ckpt.errors import NotFoundError
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.gc.plan import REPACK, GcOptions
from cas_ckpt.ops.refs import delete_branch
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.storage.store import Store
from cas_ckpt.storage.url import open_store
from tests.builders import commit, numbers, same_bytes, stored_arrays
from tests.committing import new_store, on
from tests.meddling import MeddledStore
from tests.ops.checkout.rank_targets import divided_by, mesh, restore, saved

NOW = GcOptions(min_age_s=0, reflog_expire_s=0, max_unused=0)


def disturbed(inner: Store, at: int, happening: Callable[[], object]) -> MeddledStore:
    """A store in which something happens right before the n-th look at a data pack."""
    return MeddledStore(inner, happening, before="get_range read_into", key="*.data", at=at)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def opened(store: MemoryStore) -> RepositoryHandle:
    return RepositoryHandle.on_store(store, index_url=":memory:")


def two_commits(store: MemoryStore) -> tuple[RepositoryHandle, CommitInfo, CommitInfo]:
    from cas_ckpt.core.config import Config
    from cas_ckpt.core.create import new_store_id, write_config

    write_config(store, Config(new_store_id()))
    handle = opened(store)
    gone = commit(handle, {"w": numbers(64, 64, seed=1), "x": numbers(64, 64, seed=3)}, branch="side")
    kept = commit(handle, {"w": numbers(64, 64, seed=1), "v": numbers(64, 64, seed=2)})
    delete_branch(handle, "side", force=True)
    return handle, kept, gone


@pytest.mark.parametrize("at", range(1, 7))
def test_a_restore_goes_on_in_the_copies_when_its_packs_are_repacked(store: MemoryStore, at: int) -> None:
    _, kept, _ = two_commits(store)
    reader = opened(store)
    reader.sync()
    collector = opened(store)
    reader.store = read = disturbed(store, at, lambda: collect_garbage(collector, REPACK))
    found = stored_arrays(reader, kept.root)
    assert read.happened
    assert np.array_equal(found["w"].view("float32"), numbers(64, 64, seed=1))
    assert np.array_equal(found["v"].view("float32"), numbers(64, 64, seed=2))


@pytest.mark.parametrize("at", range(1, 5))
def test_a_restore_of_what_is_collected_is_told_so_or_has_the_right_bytes(store: MemoryStore, at: int) -> None:
    _, _, gone = two_commits(store)
    reader = opened(store)
    reader.sync()
    collector = opened(store)
    reader.store = disturbed(store, at, lambda: collect_garbage(collector, NOW))
    try:
        found = stored_arrays(reader, gone.root)
    except NotFoundError:
        return
    assert np.array_equal(found["x"].view("float32"), numbers(64, 64, seed=3))


def test_a_node_is_found_in_its_copy_when_its_pack_was_repacked(store: MemoryStore) -> None:
    _, kept, _ = two_commits(store)
    reader = opened(store)
    reader.sync()
    collect_garbage(opened(store), REPACK)
    root = Digest(bytes.fromhex(kept.root))
    assert reader.read_node(ObjectKind.TREE, root)


def weights(seed: int) -> np.ndarray[Any, Any]:
    return numbers(64, 64, seed=seed)


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("rows", [64, 40], ids=["whole", "a part"])
def test_dcp_load_finds_the_copy_of_a_pack_that_is_collected_under_it(at: int, rows: int) -> None:
    torch = pytest.importorskip("torch")
    from cas_ckpt.core.tree import find_entry
    from cas_ckpt.objects.spec import Box
    from cas_ckpt.objects.state import StoredTensor, TensorCopy
    from cas_ckpt.ops.checkout.checkout import fetch_tensors
    from cas_ckpt.training.capture.tensors import elements_of

    inner = new_store()
    writer = on(inner)
    info = commit(writer, {"w": weights(1)})
    commit(writer, {"w": weights(2)})
    read = disturbed(inner, at, lambda: collect_garbage(on(inner), REPACK))
    reader = on(read)
    stored = find_entry(reader, Digest(bytes.fromhex(info.root)), "w")
    assert isinstance(stored, StoredTensor)
    target = torch.zeros((rows, 64))
    with limits(num_threads=1):
        fetch_tensors(reader, [TensorCopy(("w",), stored, elements_of(target), box=Box((0, 0), (rows, 64)))])
    assert read.happened
    assert same_bytes(target.numpy(), weights(1)[:rows])


@pytest.mark.parametrize("at", range(1, 9))
def test_a_collective_checkout_finds_the_copy_of_a_pack_that_is_collected_under_it(at: int) -> None:
    arrays = {"w": numbers(2000, 1000, seed=1), "v": numbers(64, 64, seed=3)}
    state = saved(arrays)
    commit(state.handle, {"w": weights(2)})
    number = count()
    collector = on(open_store(state.url))

    def wrap(inner: Any) -> Any:
        happening = (lambda: collect_garbage(collector, REPACK)) if next(number) == 0 else (lambda: None)
        return disturbed(inner, at, happening)

    over = divided_by(mesh(2), 0)
    restore(state, 2, {"w": over, "v": None}, wrap=wrap)
