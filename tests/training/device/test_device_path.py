"""Commits whose tensors are hashed on their device: the same ids, fewer bytes read; and what happens when it cannot."""

from __future__ import annotations

import logging
from itertools import count
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from cas_ckpt import Repository, errors
from cas_ckpt.training.device import hasher
from cas_ckpt.training.device.hasher import HASHERS, DeviceHasher
from cas_ckpt.transfer import save
from tests.training.device.hashing import CPU, random_tensor
from tests.training.device.host_kernels import Launches
from tests.training.device.paths import counted_reads, hashed_on_device, same_bits
from tests.training.fake_world import fake_world


def state(seed: int = 0) -> dict[str, Any]:
    """Tensors of several dtypes and strides, tied ones, a long value and an array."""
    weight = random_tensor(torch.float32, 700, 512, seed=seed)
    return {
        "model": {"weight": weight, "tied": weight, "transposed": weight.t(), "part": weight[3:90, 7:300]},
        "half": random_tensor(torch.bfloat16, 3, 1001, seed=seed), "flags": random_tensor(torch.uint8, 5000, seed=seed),
        "conj": random_tensor(torch.complex64, 900, seed=seed).conj(), "few": torch.arange(5), "none": torch.empty(0),
        "long": "x" * 5000, "array": random_tensor(torch.float64, 800, seed=seed).numpy(),
    }  # fmt: skip


_numbers = count()


def root_of(states: list[dict[str, Any]]) -> list[str]:
    """The roots of commits of these states, one after another."""
    with Repository.init(f"memory://device-path-{next(_numbers)}") as repo:
        commits = [repo.commit(each, message="m") for each in states]
        assert not repo.fsck().problems
        for each, commit in zip(states, commits, strict=True):
            loaded = repo.load(commit.id)
            assert same_bits(loaded["model"]["part"], each["model"]["part"])
            assert same_bits(loaded["half"], each["half"])
    return [commit.root for commit in commits]


def test_the_same_state_has_the_same_id_whoever_hashes() -> None:
    states = [state(), state(), {**state(), "half": state(1)["half"]}]
    on_host = root_of(states)
    with hashed_on_device(Launches()) as kernels:
        assert root_of(states) == on_host
    assert kernels.num_leaves > 0


def test_what_is_unchanged_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with hashed_on_device(Launches()), Repository.init("memory://unread") as repo:
        monkeypatch.setattr(hasher, "AUDIT_SHARE", 0)
        matrix = random_tensor(torch.float32, 2048, 2048)  # 16 MB
        repo.commit({"matrix": matrix, "other": random_tensor(torch.float32, 9000)}, message="first")
        repo.commit({"matrix": matrix}, message="the device is looked at")
        with counted_reads(monkeypatch) as reads:
            repo.commit({"matrix": matrix}, message="unchanged")
            assert reads == []
            matrix[1, 1] = 1.5
            changed = repo.commit({"matrix": matrix}, message="changed")
        assert len(reads) == 1
        assert same_bits(repo.load(changed.id)["matrix"], matrix)


def test_shards_are_hashed_on_their_device_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hasher, "AUDIT_SHARE", 0)
    local = random_tensor(torch.float32, 96, 700)
    with hashed_on_device(Launches()), fake_world(0, 1), Repository.init("memory://shards") as repo:
        sharded = DTensor.from_local(local, init_device_mesh("cpu", (1,)), [Shard(0)])
        first = repo.commit({"x": local})
        repo.commit({"x": sharded})
        with counted_reads(monkeypatch) as reads:
            assert repo.commit({"x": sharded}).root == first.root
        assert reads == []


def test_what_is_new_is_named_by_the_bytes_that_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with hashed_on_device(Launches()) as kernels, Repository.init("memory://written") as repo:
        monkeypatch.setattr(hasher, "AUDIT_SHARE", 0)
        first = random_tensor(torch.float32, 9000)
        repo.commit({"x": first}, message="first")
        repo.commit({"x": first}, message="the device is looked at")
        kernels.lies = True
        repo.commit({"x": random_tensor(torch.float32, 9000, seed=1)}, message="second")
        assert not repo.fsck().problems
        assert torch.equal(repo.load("main")["x"].view(torch.int32), random_tensor(torch.int32, 9000, seed=1))


def test_what_came_from_a_device_is_hashed_and_written_without_another_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    def copied(*_: Any) -> Any:
        raise AssertionError("it was copied once more")

    with hashed_on_device(Launches()), Repository.init("memory://uncopied") as repo:
        tensor = random_tensor(torch.float32, 500, 700)
        with monkeypatch.context() as patch:
            patch.setattr(save.Buffers, "take", copied)
            first = repo.commit({"x": tensor.t()})
        assert same_bits(repo.load(first.id)["x"], tensor.t())


FAULTS = {
    "no compiler": (Launches(error=OSError("no C compiler\nand more")), "OSError: no C compiler"),
    "other digests": (Launches(lies=True), "gives other digests than the host"),
    "no triton": (ImportError("No module named 'triton'"), "Triton is not installed"),
}


@pytest.mark.parametrize(("kernels", "told"), FAULTS.values(), ids=FAULTS)
def test_a_device_that_cannot_be_trusted_is_named_once_and_the_host_hashes(
    kernels: Any, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    def imported() -> Any:
        if isinstance(kernels, ImportError):
            raise kernels
        return kernels

    states = [state(), state(), state(1), state()]
    on_host = root_of(states)
    with patch.dict(HASHERS, {CPU: DeviceHasher(CPU, imported)}), caplog.at_level(logging.WARNING, "cas_ckpt"):
        assert root_of(states) == on_host
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1 and told in warnings[0] and "cpu: leaves are hashed on the host" in warnings[0]


def test_memory_that_is_short_for_once_is_no_reason_to_give_up(caplog: pytest.LogCaptureFixture) -> None:
    kernels = Launches(error=torch.OutOfMemoryError("CUDA out of memory"))
    with hashed_on_device(kernels), Repository.init("memory://short") as repo:
        first = repo.commit({"x": random_tensor(torch.float32, 9000)}, message="first")
        repo.commit({"x": random_tensor(torch.float32, 9000)}, message="short of memory")
        kernels.error = None
        again = repo.commit({"x": random_tensor(torch.float32, 9000)}, message="enough")
        assert again.root == first.root and kernels.num_leaves > 0
    assert ["no memory to hash on the device" in record.getMessage() for record in caplog.records] == [True]


def test_a_device_that_goes_wrong_later_fails_the_commit_and_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hasher, "AUDIT_SHARE", 1)
    with hashed_on_device(Launches()) as kernels, Repository.init("memory://later") as repo:
        tensor = random_tensor(torch.float32, 9000)
        first = repo.commit({"x": tensor}, message="first")
        repo.commit({"x": tensor}, message="the device is looked at")
        kernels.lies = True
        with pytest.raises(errors.InternalError, match="commit again"):
            repo.commit({"x": tensor}, message="audited")
        assert repo.commit({"x": tensor}, message="by the host").root == first.root
    assert len(caplog.records) == 1
