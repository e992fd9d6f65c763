"""Real text without a download: the sources of Python's own standard library, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

MAX_BYTES = 4_000_000


class Corpus:
    """The sources that match a glob, one after another, cut into batches in order.

    Args:
        pattern: Relative to the standard library's folder, as in `asyncio/*.py`.
    """

    def __init__(self, pattern: str) -> None:
        data = b"".join(_sources(pattern))[:MAX_BYTES]
        self._bytes = torch.from_numpy(np.frombuffer(data, np.uint8).astype(np.int64))

    @property
    def num_bytes(self) -> int:
        """Bytes of text."""
        return len(self._bytes)

    def batch(self, position: int, *, rows: int, context: int) -> tuple[Tensor, int]:
        """Rows of context + 1 bytes from `position` on, and the position after them; wraps at the end."""
        length = rows * (context + 1)
        start = position if position + length <= self.num_bytes else 0
        return self._bytes[start : start + length].view(rows, context + 1), start + length


def _sources(pattern: str) -> Iterator[bytes]:
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.glob(pattern)):
        yield path.read_bytes()
