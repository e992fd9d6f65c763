"""Tensors of the CPU that go the way of those on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from cas_ckpt.objects.spec import Box
from cas_ckpt.training.capture import tensors
from cas_ckpt.training.capture.tensors import CopiedTensor
from cas_ckpt.training.device import copies
from cas_ckpt.training.device.copies import on_own_stream
from cas_ckpt.training.device.hasher import HASHERS, DeviceHasher
from tests.training.device.hashing import CPU


@contextmanager
def hashed_on_device(kernels: Any) -> Iterator[Any]:
    """Tensors of the CPU go the way of those on a GPU, hashed by `kernels`."""
    with patch.dict(HASHERS, {CPU: DeviceHasher(CPU, lambda: kernels)}):
        yield kernels


@contextmanager
def counted_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Box]]:
    """The boxes that are brought to the host."""
    found: list[Box] = []
    read = CopiedTensor.read

    def counted(self: CopiedTensor, box: Box) -> Any:
        found.append(box)
        return read(self, box)

    with monkeypatch.context() as patched:
        patched.setattr(CopiedTensor, "read", counted)
        yield found


@contextmanager
def counted_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.device]]:
    """The device of each wait for copies to the host."""
    found: list[torch.device] = []

    @contextmanager
    def counted(device: torch.device) -> Iterator[None]:
        with on_own_stream(device):
            yield
        found.append(device)

    with monkeypatch.context() as patched:
        for module in (tensors, copies):
            patched.setattr(module, "on_own_stream", counted)
        yield found


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same, NaNs and all."""
    first, second = (each.cpu().clone(memory_format=torch.contiguous_format).view(torch.uint8) for each in (a, b))
    return a.shape == b.shape and torch.equal(first, second)
