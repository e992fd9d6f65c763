"""Bytes between the memory of a device and that of the host, beside what the device does meanwhile.

    1. Each thread copies on a stream of its own, which waits for no other: what trains is not in the way.
    2. Host memory is pinned, so that the device copies by itself; that of arenas is registered once (`pin`).
    3. A copy is over when its function returns. While one thread waits for its copy, others hash, read and write: with
       two threads or more, copies run beside everything else.
    4. Small tensors come to the host many at a time: `Batches.add` puts each that is contiguous into a batch, in the
       order in which they will be read. The first read of one of a batch packs all of it on the device, and copies that
       to the host: one copy and one wait where there were hundreds. The others are read of the same memory.
    5. Each thread keeps the batch that it read last; what nobody keeps or looks at is freed, and packed once more if it
       is asked for again.

Invariant: whoever calls has waited for the work that writes a source or uses a target (`wait_for_devices`), and keeps
tensors in a batch as they are until all is read. Nothing that was begun goes on after an error. Knows nothing of
tensors' meaning.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import numpy as np
import torch

from cas_ckpt.transfer.staging import Arena

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

_LOGGER = logging.getLogger("cas_ckpt")


class _Streams(threading.local):
    """Streams of one thread, by device."""

    def __init__(self) -> None:
        self.of: dict[torch.device, Any] = {}


_streams = _Streams()


@contextmanager
def on_own_stream(device: torch.device) -> Iterator[None]:
    """Run the block on this thread's own stream of `device`, and wait for it at the end, also after an error.

    On other devices than CUDA it runs as it always does.
    """
    if device.type != "cuda":
        yield
        return
    stream = _streams.of.get(device)
    if stream is None:
        stream = _streams.of[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(stream):
        try:
            yield
        finally:
            stream.synchronize()


def to_device(host: torch.Tensor, place: torch.Tensor) -> None:
    """Copy `host` to `place`, with any strides; it is there then."""
    with torch.no_grad(), on_own_stream(place.device):
        place.copy_(host, non_blocking=True)


# ------------------------------------------------------------ memory of the host that devices copy from and to


def pin(arena: Arena) -> None:
    """Let CUDA devices copy from and to `arena` by themselves, if there are any. Touches all of its memory.

    If the system refuses (`ulimit -l`), copies are slower, and that is said.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return
    address, num_bytes = arena.place
    cudart: Any = torch.cuda.cudart  # without types
    code = cudart().cudaHostRegister(address, num_bytes, 0)
    if int(code):
        _LOGGER.warning("%d bytes of memory for staging could not be pinned (CUDA error %d)", num_bytes, int(code))
        _forget_error()
    else:
        _pinned[address] = weakref.finalize(arena, _unregister, address)  # before its memory is unmapped
        _pinned[address].atexit = False


def unpin(arena: Arena) -> None:
    """Undo `pin`: `arena` is unmapped, or moves."""
    address, _ = arena.place
    registered = _pinned.get(address)
    if registered is not None:
        registered()


def _unregister(address: int) -> None:
    del _pinned[address]
    cudart: Any = torch.cuda.cudart
    cudart().cudaHostUnregister(address)


def _forget_error() -> None:
    """CUDA keeps the error of a call for whoever asks next: the next kernel of the training would raise it."""
    with suppress(Exception):  # this kernel raises it, and has asked
        torch.empty(1, device="cuda").fill_(0)


_pinned: dict[int, weakref.finalize[Any, Any]] = {}
"""Addresses of arenas that are registered, and what undoes that."""


# ------------------------------------------------------------ small tensors, many at a time

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
