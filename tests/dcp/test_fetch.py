"""Boxes of stored tensors: the right elements, and no more bytes than they need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cas_ckpt import Repository, limits
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import commit_of
from cas_ckpt.core.revisions import resolve
from cas_ckpt.core.tree import find_entry
from cas_ckpt.errors import CorruptionError
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.spec import Box
from cas_ckpt.objects.state import StoredTensor, TensorCopy, parse_key
from cas_ckpt.ops.checkout.checkout import fetch_tensors
from cas_ckpt.storage.file import FileStore
from cas_ckpt.training.capture.tensors import elements_of
from tests.searches import tries
from tests.wrapped_stores import CountingStore, FaultyStore, flip_bit

STATE = {
    "wide": torch.arange(1500 * 3000, dtype=torch.int32).reshape(1500, 3000),
    "again": torch.arange(1500 * 3000, dtype=torch.int32).reshape(1500, 3000),
    "long": torch.arange(3_000_000, dtype=torch.int16),
    "cube": torch.arange(40 * 50 * 60, dtype=torch.float64).reshape(40, 50, 60),
    "small": torch.arange(12, dtype=torch.int64).reshape(3, 4),
    "scalar": torch.tensor(7.0),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("boxes") / "repo"
    with Repository.init(path, encoding="raw") as repo:
        repo.commit(STATE)
    return path


@pytest.fixture
def counting(place: Path) -> Iterator[tuple[RepositoryHandle, CountingStore]]:
    store = CountingStore(FileStore(place))
    handle = RepositoryHandle.on_store(store, index_url=str(place / "index" / "index.sqlite"))
    yield handle, store
    handle.close()


def read_of(handle: RepositoryHandle, key: str, box: Box, target: torch.Tensor) -> TensorCopy:
    root = Digest(commit_of(handle, resolve(handle, "HEAD")).root)
    stored = find_entry(handle, root, key)
    assert isinstance(stored, StoredTensor)
    return TensorCopy(parse_key(key), stored, elements_of(target), box=box)


@st.composite
def wanted(draw: st.DrawFn) -> tuple[str, Box]:
    key = draw(st.sampled_from(list(STATE)))
    shape = STATE[key].shape
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    return key, Box(offsets, tuple(draw(st.integers(1, size - at)) for size, at in zip(shape, offsets, strict=True)))


@given(st.lists(wanted(), min_size=1, max_size=6))
@settings(max_examples=tries(5, 20))
def test_every_box_gets_its_elements(place: Path, boxes: list[tuple[str, Box]]) -> None:
    with Repository.open(place) as repo:
        targets = [torch.zeros(box.sizes, dtype=STATE[key].dtype) for key, box in boxes]
        reads = [read_of(repo._handle, key, box, at) for (key, box), at in zip(boxes, targets, strict=True)]
        with limits(num_threads=2):
            fetch_tensors(repo._handle, reads)
    for (key, box), found in zip(boxes, targets, strict=True):
        assert torch.equal(found, STATE[key][box.slices])


def test_a_few_elements_cost_leaves_not_chunks(counting: tuple[RepositoryHandle, CountingStore]) -> None:
    handle, store = counting
    target = torch.zeros(1, 10, dtype=torch.int32)
    read = read_of(handle, "wide", Box((700, 5), (1, 10)), target)
    store.reset()
    with limits(num_threads=1):
        fetch_tensors(handle, [read])
    assert torch.equal(target, STATE["wide"][700:701, 5:15])
    assert store.bytes_read < 4 * 64 * 1024 < STATE["wide"].nbytes / 50


def test_a_chunk_that_many_boxes_want_is_read_once(counting: tuple[RepositoryHandle, CountingStore]) -> None:
    handle, store = counting
    targets = [torch.zeros(750, 3000, dtype=torch.int32) for _ in range(4)]
    boxes = [("wide", 0), ("again", 0), ("wide", 750), ("again", 750)]
    reads = [
        read_of(handle, key, Box((at, 0), (750, 3000)), target)
        for (key, at), target in zip(boxes, targets, strict=True)
    ]
    store.reset()
    with limits(num_threads=2):
        fetch_tensors(handle, reads)
    assert all(torch.equal(found, STATE["wide"][at : at + 750]) for (_, at), found in zip(boxes, targets, strict=True))
    # Verified once and copied once, and a little for headers and nodes.
    assert store.bytes_read < 2.1 * STATE["wide"].nbytes


@pytest.mark.parametrize("sizes", [(1, 10), (1500, 3000)])
def test_damage_is_found_before_any_target_is_touched(place: Path, sizes: tuple[int, int]) -> None:
    store = FaultyStore(FileStore(place))
    handle = RepositoryHandle.on_store(store, index_url=str(place / "index" / "index.sqlite"))
    whole = torch.zeros(40, 50, 60, dtype=torch.float64)
    part = torch.zeros(sizes, dtype=torch.int32)
    reads = [read_of(handle, "cube", Box((0, 0, 0), (40, 50, 60)), whole)]
    reads.append(read_of(handle, "wide", Box((0, 0), sizes), part))
    wide = np.asarray(STATE["wide"])[0, :10].tobytes()
    for name in handle.index.packs():
        at = bytes(store.inner.get_range(name, 0, store.inner.head(name))).find(wide)
        if at >= 0:
            store.damage[name] = flip_bit(at + 4)
    with pytest.raises(CorruptionError, match="wide: chunk"), limits(num_threads=2):
        fetch_tensors(handle, reads)
    assert not whole.any() and not part.any()
    handle.close()
