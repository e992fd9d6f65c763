"""Small tensors of a device come to the host together; here with tensors of the CPU that go that way."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cas_ckpt import Repository
from cas_ckpt.training.capture.tensors import CopiedTensor, host_bits, spec_of
from cas_ckpt.training.device import copies
from cas_ckpt.training.device.copies import BATCH_BYTES, SMALL_BYTES, Batches
from tests.training.device.hashing import dtypes, random_bytes, random_tensor
from tests.training.device.host_kernels import Launches
from tests.training.device.paths import counted_waits, hashed_on_device, same_bits


def tensors() -> list[torch.Tensor]:
    """Of all dtypes, of no dimension, and of lengths that no alignment divides; some are parts of others."""
    found = [random_tensor(dtype, *shape) for dtype in dtypes() for shape in [(), (3,), (5, 7), (1, 64, 9)]]
    base = random_bytes(4000, seed=1)
    return [*found, base[1:1000], base[1000:1001], base[7:3999]]


def sources(chosen: Sequence[torch.Tensor]) -> list[CopiedTensor]:
    batches = Batches()
    return [CopiedTensor(each, batches.add(each)) for each in chosen]


def check(made: Sequence[CopiedTensor]) -> None:
    """Each gives the bytes of its tensor, as array of the same shape and items."""
    for each in made:
        assert each.batch is not None
        found, wanted = each.read(spec_of(each.tensor).box), host_bits(each.tensor)
        assert (found.dtype, found.shape, found.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())


def test_all_of_a_batch_have_their_bytes_by_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    made = sources(tensors())
    with counted_waits(monkeypatch) as waits:
        check(made)
    assert len(waits) == 1


def test_a_device_that_is_short_of_memory_packs_fewer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, cat = [], torch.cat

    def tight(pieces: list[torch.Tensor]) -> torch.Tensor:
        if sum(map(len, pieces)) > 2000:
            raise torch.OutOfMemoryError("CUDA out of memory")
        packed.append(len(pieces))
        return cat(pieces)

    made = sources(tensors())
    monkeypatch.setattr(copies.torch, "cat", tight)
    check(made)
    assert packed and len(packed) < len(made)
    monkeypatch.setattr(copies.torch, "cat", lambda _: tight([torch.empty(2001)]))
    check(sources(tensors()))


def test_memory_of_a_batch_is_freed_with_its_readers_and_made_again_when_it_is_asked_for() -> None:
    made = sources([random_bytes(1000), random_bytes(500)])
    read: list[weakref.ref[Any]] = []

    def look() -> None:
        read.append(weakref.ref(made[0].read(spec_of(made[0].tensor).box).base))
        assert read[0]() is not None  # the thread keeps it for the next

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    gc.collect()
    assert len(read) == 1 and read[0]() is None
    check(made)


def test_what_is_large_empty_or_not_contiguous_is_copied_alone() -> None:
    flat = random_bytes(SMALL_BYTES + 1)
    alone = [flat, flat[:0], flat[:100].view(10, 10).t(), random_tensor(torch.complex64, 9).conj()]
    assert [each.batch for each in sources(alone)] == [None] * 4
    batches = {id(each.batch[0]) for each in sources([flat[1:]] * 20) if each.batch is not None}
    assert len(batches) == -(-20 * SMALL_BYTES // BATCH_BYTES)


@pytest.mark.parametrize("snapshot", ["copy", "lazy"])
def test_commits_of_many_small_tensors_wait_once_a_batch(monkeypatch: pytest.MonkeyPatch, snapshot: str) -> None:
    def state(seed: int) -> dict[str, Any]:
        return {
            f"layer{layer}": {
                str(number): random_tensor(torch.float32, 1 + 97 * number, seed=seed + 100 * layer + number)
                for number in range(30)
            }
            for layer in range(10)
        }  # fmt: skip

    with Repository.init(f"memory://host-together-{snapshot}") as repo:
        wanted = [repo.commit(state(seed)).root for seed in (0, 5000)]
    with hashed_on_device(Launches()), Repository.init(f"memory://together-{snapshot}") as repo:
        with counted_waits(monkeypatch) as waits:
            assert repo.commit(state(0)).root == wanted[0]
            found = repo.commit_async(state(5000), snapshot=snapshot).result()
            assert found.root == wanted[1]
        assert len(waits) < 30  # of 600 tensors
        assert same_bits(repo.load(found.id)["layer3"]["29"], state(5000)["layer3"]["29"])


def test_a_conjugated_tensor_of_complex32_is_committed_without_a_warning_of_torch() -> None:
    half, other = torch.arange(80, dtype=torch.float16).view(40, 2), torch.ones(7, 2, dtype=torch.float16)
    torch.set_warn_always(True)  # a second time too; the suite takes warnings for errors
    try:
        with Repository.init("memory://complex32") as repo:
            repo.commit({"x": torch.view_as_complex(half).conj(), "y": torch.view_as_complex(other)})
            loaded = repo.load("main")
            found = [torch.view_as_real(loaded[name]) for name in ("x", "y")]
            target = {"x": torch.view_as_complex(half + 1).conj(), "y": torch.view_as_complex(other + 1)}
            repo.checkout("main", into=target)
    finally:
        torch.set_warn_always(False)
    assert same_bits(found[0], half * torch.tensor([1, -1], dtype=torch.float16)) and same_bits(found[1], other)
    assert same_bits(torch.view_as_real(target["x"].conj()), half)
