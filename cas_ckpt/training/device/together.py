"""Small tensors of one device, brought to the host many at a time.

    1. `Batches.add` puts each small tensor that is contiguous into a batch, in the order in which they will be read.
    2. The first read of one of a batch packs all of it on the device, and copies that to the host: one copy and one
       wait where there were hundreds. The others are read of the same memory.
    3. Each thread keeps the batch that it read last; what nobody keeps or looks at is freed, and packed once more if it
       is asked for again.

Invariant: what a batch gives is what the tensors held at some time between the call that made it and the read; whoever
calls has waited for the work that writes them, and keeps them as they are until all is read. Knows no state.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from cas_ckpt.training.device.copies import on_own_stream

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

SMALL_BYTES = 1 << 20
"""Tensors up to here are brought over together: a copy alone takes as long as some ten megabytes more."""

BATCH_BYTES = 8 << 20
"""A batch is closed when it holds so many bytes: each thread may keep one in pinned memory."""

ALIGNED_BYTES = 16
"""Where tensors begin in a batch."""


class _Kept(threading.local):
    """The batch that a thread read last."""

    host: Bytes | None = None


class Batch:
    """Tensors that are brought to the host together. Threads may share it."""

    def __init__(self, device: torch.device, kept: _Kept) -> None:
        self._device, self._kept = device, kept
        self._lock = threading.Lock()
        self._pieces: list[tuple[torch.UntypedStorage, int, int]] = []
        self._starts = [0]
        self._host: weakref.ref[Bytes] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes in host memory."""
        return self._starts[-1]

    def add(self, storage: torch.UntypedStorage, start: int, num_bytes: int) -> int:
        """Take these bytes too, before anything is read; their number here."""
        self._pieces.append((storage, start, num_bytes))
        self._starts.append(self.num_bytes + -(-num_bytes // ALIGNED_BYTES) * ALIGNED_BYTES)
        return len(self._pieces) - 1

    def read(self, number: int) -> Bytes:
        """The bytes of a tensor in host memory, which nobody changes."""
        with self._lock:
            host = None if self._host is None else self._host()
            if host is None:
                host = self._brought()
                self._host = weakref.ref(host)
        self._kept.host = host
        start = self._starts[number]
        return host[start : start + self._pieces[number][2]]

    def _brought(self) -> Bytes:
        host = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        with torch.no_grad(), on_own_stream(self._device):
            _pack([self._bytes(*piece) for piece in self._pieces], self._starts, host)
        found: Bytes = host.numpy()
        return found

    def _bytes(self, storage: torch.UntypedStorage, start: int, num_bytes: int) -> torch.Tensor:
        empty = torch.empty(0, dtype=torch.uint8, device=self._device)
        return empty.set_(storage, start, (num_bytes,), (1,))


def _pack(pieces: Sequence[torch.Tensor], starts: Sequence[int], host: torch.Tensor) -> None:
    """Queue the copy of `pieces` to where they begin in `host`: one copy; several if the device is short of memory."""
    if len(pieces) == 1:
        host[starts[0] : starts[0] + len(pieces[0])].copy_(pieces[0], non_blocking=True)
        return
    try:
        packed = _end_to_end(pieces)
    except torch.OutOfMemoryError:
        half = len(pieces) // 2
        _pack(pieces[:half], starts[: half + 1], host)
        _pack(pieces[half:], starts[half:], host)
        return
    host[starts[0] : starts[0] + len(packed)].copy_(packed, non_blocking=True)


def _end_to_end(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of all pieces in one tensor of their device, each from a multiple of `ALIGNED_BYTES` on."""
    found, gap = [], None
    for piece in pieces:
        found.append(piece)
        rest = -len(piece) % ALIGNED_BYTES
        if rest:
            gap = torch.zeros(ALIGNED_BYTES, dtype=torch.uint8, device=piece.device) if gap is None else gap
            found.append(gap[:rest])
    return torch.cat(found)


class Batches:
    """The batches of one state, by device."""

    def __init__(self) -> None:
        self._open: dict[torch.device, Batch] = {}
        self._kept: dict[torch.device, _Kept] = {}

    def add(self, tensor: torch.Tensor) -> tuple[Batch, int] | None:
        """The batch that brings `tensor` over, and its number there; None: it is to be copied alone."""
        num_bytes, device = tensor.nbytes, tensor.device
        if not 0 < num_bytes <= SMALL_BYTES or tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
            return None
        batch = self._open.get(device)
        if batch is None or batch.num_bytes + num_bytes > BATCH_BYTES:
            batch = self._open[device] = Batch(device, self._kept.setdefault(device, _Kept()))
        start = int(tensor.storage_offset()) * tensor.element_size()
        return batch, batch.add(tensor.untyped_storage(), start, num_bytes)
