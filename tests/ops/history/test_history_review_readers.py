"""What a review of history and collection looked at: restores whose packs are collected under them."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pytest

from cas_ckpt.objects.digest import Digest
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.gc.plan import REPACK
from cas_ckpt.storage.url import open_store
from tests.builders import commit, numbers, same_bytes
from tests.committing import new_store, on
from tests.ops.checkout.rank_targets import divided_by, mesh, restore, saved
from tests.ops.gc.test_gc_readers import Disturbed


def weights(seed: int) -> np.ndarray[Any, Any]:
    return numbers(64, 64, seed=seed)


@pytest.mark.parametrize("at", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [64, 40], ids=["whole", "a part"])
def test_dcp_load_finds_the_copy_of_a_pack_that_is_collected_under_it(at: int, rows: int) -> None:
    torch = pytest.importorskip("torch")
    from cas_ckpt.core.tree import find_entry
    from cas_ckpt.objects.spec import Box
    from cas_ckpt.objects.state import StoredTensor, TensorCopy
    from cas_ckpt.ops.checkout.checkout import fetch_tensors
    from cas_ckpt.training.capture.tensors import target_of

    inner = new_store()
    writer = on(inner)
    info = commit(writer, {"w": weights(1)})
    commit(writer, {"w": weights(2)})
    reader = on(Disturbed(inner, at, lambda: collect_garbage(on(inner), REPACK)))
    stored = find_entry(reader, Digest(bytes.fromhex(info.root)), "w")
    assert isinstance(stored, StoredTensor)
    target = torch.zeros((rows, 64))
    fetch_tensors(reader, [TensorCopy(("w",), stored, target_of(target), box=Box((0, 0), (rows, 64)))], num_threads=1)
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
        return Disturbed(inner, at, happening)

    over = divided_by(mesh(2), 0)
    restore(state, 2, {"w": over, "v": None}, wrap=wrap)
