"""Bytes between the memory of a device and that of the host, beside what the device does meanwhile.

    1. Each thread copies on a stream of its own, which waits for no other: what trains is not in the way.
    2. Host memory is pinned, so that the device copies by itself; that of arenas is registered once (`pin`).
    3. A copy is over when its function returns. While one thread waits for its copy, others hash, read and write: with
       two threads or more, copies run beside everything else.

Invariant: whoever calls has waited for the work that writes a source or uses a target (`wait_for_devices`). Nothing
that was begun goes on after an error. Knows nothing of tensors' meaning.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from cas_ckpt.transfer.staging import Arena

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
