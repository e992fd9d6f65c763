"""Kernels with the interface of kernels.py that read the same tables and hash with the package blake3: quick.

They look at memory by address, word by word as the tables say, so that a wrong row of a table gives wrong digests here
too. What differs from BLAKE3 in kernels.py itself, test_kernels.py finds.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch
from blake3 import blake3

TABLE_COLUMNS = 6


class Launches:
    """A module of kernels; counts what was launched, and can be made to fail or lie."""

    TABLE_COLUMNS = TABLE_COLUMNS

    def __init__(self, *, error: Exception | None = None, lies: bool = False) -> None:
        self.error = error
        self.lies = lies
        self.num_leaves = 0
        self.shapes: set[tuple[bool, bool]] = set()

    @property
    def chunk_values(self) -> dict[Any, Any]:
        return _Grid(self._chunk_values)

    @property
    def parent_values(self) -> dict[Any, Any]:
        return _Grid(lambda *_, **__: None)

    def _chunk_values(
        self, base: torch.Tensor, table: torch.Tensor, cell_of: torch.Tensor, values: torch.Tensor,
        counts: torch.Tensor, num_leaves: int, chunks_per_leaf: int, num_blocks: int, *, whole: bool, rows: bool,
        **_: Any,
    ) -> None:  # fmt: skip
        if self.error is not None:
            raise self.error
        self.num_leaves += num_leaves
        self.shapes.add((whole, rows))
        out = values.view(torch.int32).numpy().view(np.uint32).reshape(num_leaves, chunks_per_leaf, 8)
        for leaf, cell in enumerate(cell_of.tolist()):
            data = _leaf_bytes(base.data_ptr(), table[cell].tolist(), leaf, rows=rows)
            assert len(data) <= chunks_per_leaf * 1024 and (not whole or len(data) % 1024 == 0)
            digest = np.frombuffer(blake3(data).digest(), np.uint32)
            out[leaf, 0] = digest ^ 1 if self.lies else digest


class _Grid(dict[Any, Any]):
    """`kernel[grid]`, whatever the grid."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self._call = call

    def __missing__(self, grid: Any) -> Any:
        return self._call


def _leaf_bytes(base: int, row: list[int], leaf: int, *, rows: bool) -> bytes:
    word, num_bytes, leaf_bytes, row_bytes, row_words, first_leaf = row
    start = (leaf - first_leaf) * leaf_bytes
    stop = min(start + leaf_bytes, num_bytes)
    found = []
    for at in range(start, stop, 64):
        line = at // row_bytes if rows else 0
        place = base + 4 * (word + line * row_words) + at - line * row_bytes
        assert place % 4 == 0
        found.append(ctypes.string_at(place, min(64, stop - at)))
    return b"".join(found)
