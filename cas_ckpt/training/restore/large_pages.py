"""Asks the kernel for large pages under new tensors: to give memory that was never touched takes long, page by page.

Measured for 1 GiB: see docs/decisions/004-two-passes.md. NumPy asks by itself for its arrays.

Invariant: a hint; where it is not followed (other systems, kernels without large pages, `never` in
/sys/kernel/mm/transparent_hugepage/enabled) nothing changes but the time. No byte is read or written. Must not know
what a tensor is for.
"""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

import torch

WORTH_BYTES = 1 << 20
"""Shorter tensors are left alone; from here on most are mapped by themselves, and the kernel joins neighbours."""


def ask_for_large_pages(tensor: torch.Tensor) -> None:
    """Say that the memory of `tensor`, which is dense and not touched yet, may be of large pages."""
    num_bytes = tensor.nbytes
    if num_bytes < WORTH_BYTES or tensor.device.type != "cpu":
        return
    if (advise := _madvise()) is not None:
        # Whole pages that are the tensor's alone.
        first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (tensor.data_ptr() + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        advise(ctypes.c_void_p(first), ctypes.c_size_t(stop - first), mmap.MADV_HUGEPAGE)


@cache
def _madvise() -> Any:
    """The call of the system; None where it is not there."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        return ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
