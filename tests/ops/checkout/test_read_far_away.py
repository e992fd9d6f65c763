"""Reading values, regions and whole files' worth over a network: few requests, and the next while one is used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from cas_ckpt import KeyMap
from cas_ckpt.core.tree import load_tree
from cas_ckpt.errors import StorageError
from cas_ckpt.formats.safetensors import export_safetensors
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.state import ValueItem
from cas_ckpt.ops.checkout import checkout
from cas_ckpt.ops.checkout.checkout import with_values
from cas_ckpt.storage.memory import MemoryStore
from tests.builders import commit, numbers, same_bytes
from tests.committing import new_store, on
from tests.far import FarStore

ARRAYS = {f"w{n}": numbers(700, 600 + n, seed=n) for n in range(12)}
VALUES = {f"v{n}": bytes([n]) * (5000 + n) for n in range(30)}


@pytest.fixture(scope="module")
def stored() -> tuple[MemoryStore, Digest]:
    store = new_store()
    return store, Digest(bytes.fromhex(commit(on(store), {"model": ARRAYS, "values": VALUES}).root))


def test_long_values_are_read_together(stored: tuple[MemoryStore, Digest]) -> None:
    far = FarStore(stored[0])
    handle = on(far, cache=None)
    handle.sync()
    tree = load_tree(handle, stored[1])
    far.reads.clear()
    values = with_values(handle, tree).children["values"].children  # type: ignore[union-attr]
    assert {name: item.value for name, item in values.items() if isinstance(item, ValueItem)} == VALUES
    assert len(far.data_reads) <= 3 and far.bytes_read_twice() == 0


def test_an_export_reads_each_byte_once_and_many_tensors_at_a_time(
    stored: tuple[MemoryStore, Digest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkout, "BATCH_BYTES", 5 << 20)
    far = FarStore(stored[0])
    handle = on(far, cache=None)
    handle.sync()
    far.reads.clear()
    export_safetensors(handle, stored[1], tmp_path / "m.safetensors", keys="model")
    found = load_file(tmp_path / "m.safetensors")
    assert all(same_bytes(found[name], array) for name, array in ARRAYS.items())
    sizes = sum(array.nbytes for array in ARRAYS.values())
    assert sum(length for _, _, length in far.data_reads) < 1.02 * sizes
    assert len(set(far.data_reads)) == len(far.data_reads)


def test_an_export_by_a_key_map_reads_what_it_joins_and_turns_in_few_requests(
    stored: tuple[MemoryStore, Digest], tmp_path: Path
) -> None:
    far = FarStore(stored[0])
    handle = on(far, cache=None)
    handle.sync()
    key_map = KeyMap([
        {"split": "model/w1", "to": ["model/w1", "rest"], "ratios": [600, 1], "dim": 1},
        {"split": "model/w2", "to": ["model/w2", "rest 2"], "ratios": [600, 2], "dim": 1},
        {"fuse": ["model/w1", "model/w2"], "to": "model/w", "dim": 1},
        {"interleave": "model/w3", "shape": [7, 4, -1]},
    ])  # fmt: skip
    mapped = key_map.applied(load_tree(handle, stored[1]), lambda items, *_: items)
    far.reads.clear()
    export_safetensors(handle, stored[1], tmp_path / "m.safetensors", keys="model", tree=mapped.tree)
    found = load_file(tmp_path / "m.safetensors")
    assert same_bytes(found["w"], np.concatenate([ARRAYS["w1"][:, :600], ARRAYS["w2"][:, :600]], axis=1))
    assert same_bytes(found["w3"], ARRAYS["w3"].reshape(7, 4, 25, 603).swapaxes(1, 2).reshape(700, 603))
    assert len(far.data_reads) <= 20


def test_an_export_whose_connection_breaks_leaves_nothing(stored: tuple[MemoryStore, Digest], tmp_path: Path) -> None:
    far = FarStore(stored[0])
    handle = on(far, cache=None)
    handle.sync()

    def break_off(key: str, number: int) -> None:
        if key.endswith(".data") and number > 6:
            raise StorageError(f"{key}: connection reset")

    far.reads.clear()
    far.before_read = break_off
    with pytest.raises(StorageError, match="connection reset"):
        export_safetensors(handle, stored[1], tmp_path / "m.safetensors", keys="model")
    assert not list(tmp_path.iterdir())


def test_one_tensor_of_many_takes_one_request_of_little_more_than_its_bytes(stored: tuple[MemoryStore, Digest]) -> None:
    far = FarStore(stored[0])
    handle = on(far, cache=None)
    handle.sync()
    tree = load_tree(handle, stored[1])
    item = tree.children["model"].children["w3"]  # type: ignore[union-attr]
    far.reads.clear()
    (array,) = checkout.read_arrays(handle, [(("model", "w3"), item, item.spec.box)])  # type: ignore[union-attr,list-item]
    assert np.array_equal(array.view("float32"), ARRAYS["w3"])
    assert len(far.data_reads) <= 2, "cells of 2 MiB"
    assert sum(length for _, _, length in far.data_reads) < 1.01 * ARRAYS["w3"].nbytes
