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
    """The sources that match a glob, one after another, as equally long streams read side by side.

    Args:
        pattern: Relative to the standard library's folder, as in `asyncio/*.py`.
        num_streams: Rows of every batch.
    """

    def __init__(self, pattern: str, *, num_streams: int) -> None:
        data = np.frombuffer(b"".join(_sources(pattern))[:MAX_BYTES], np.uint8).astype(np.int64)
        length = len(data) // num_streams
        self._streams = torch.from_numpy(data[: length * num_streams]).view(num_streams, length)

    def batch(self, position: int, *, context: int) -> tuple[Tensor, int]:
        """Of every stream context + 1 bytes from `position` on; and the position after them. Wraps at the end."""
        start = position if position + context < self._streams.shape[1] else 0
        return self._streams[:, start : start + context + 1], start + context


def _sources(pattern: str) -> Iterator[bytes]:
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.glob(pattern)):
        yield path.read_bytes()
