"""Numbers of a change: how many elements of tensors differ, and by how much, streamed cell by cell.

    1. tensors in groups, so that their nodes are read together: the ids of all their chunks
    2. of each, the changed cells (all of them, where the cells of the two sides are not the same)
       in stretches; some stretches at a time: locate the chunks of both sides
    3. threads: read and verify a cell of both sides, widen it block by block, add up in float64
    4. the sums of the stretches, in the order of cells: the answer is the same whatever the threads did

Invariant: memory is bounded by threads times cells and by the ids of one group, whatever the tensors hold, and no more
than a block is ever held as wide numbers; no byte is counted that was not verified. Pairs of which one is NaN or
infinite count, and enter no other sum. Widening to float64 or complex128 is exact, but for integers of 64 bits beyond
2^53 and numpy's long doubles; a dtype without a rule here holds no numbers. Knows no torch, which is why bfloat16 and
the kinds of float8 are widened by their bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from itertools import islice
from typing import Any, TypeAlias

import numpy as np

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.tree import chunk_ids, tensor_nodes
from cas_ckpt.errors import CkptError
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.pack import Location
from cas_ckpt.objects.spec import NUMPY_PREFIX, Box, Grid
from cas_ckpt.objects.state import StoredTensor, render_key
from cas_ckpt.ops.checkout.checkout import inline_array
from cas_ckpt.ops.diff.walk import ChunkChange, TensorNumbers, TensorPair, together_or_named
from cas_ckpt.parallel.workers import run_all, thread_count
from cas_ckpt.progress import SILENT, Progress, phase
from cas_ckpt.storage.store import Store
from cas_ckpt.transfer.chunk_reader import named
from cas_ckpt.transfer.fetch import read_region

CHUNKS_AT_A_TIME = 16 * 1024
"""Tensors whose ids are in memory together have about so many chunks, unless one alone has more."""

CELLS_PER_STRETCH = 16
MOST_REQUESTS = 8
"""So many cells of both sides are read over a network and compared at one time: each takes some 20 MB."""

STRETCHES_AT_A_TIME = 64
"""Bounds the places in packs that are held in memory, and the sums."""


@dataclass(frozen=True, slots=True)
class _Side:
    """One side of a tensor: where each of its cells is."""

    tensor: StoredTensor
    grid: Grid
    chunks: Sequence[Digest]

    def needed(self, box: Box) -> list[Digest]:
        """The chunks that `box` touches."""
        return [self.chunks[cell] for cell, _ in self.grid.cells_in(box)] if self.chunks else []

    def read(self, store: Store, box: Box, located: Mapping[bytes, Sequence[Location]]) -> Raw:
        """The bytes of the elements of `box`, verified."""
        item_bytes = self.tensor.spec.item_bytes
        if self.tensor.inline is not None:
            found = np.ascontiguousarray(inline_array(self.tensor)[box.slices])
        else:
            found = read_region(
                store, box, grid=self.grid, item_bytes=item_bytes, chunk_of=self.chunks.__getitem__, located=located
            )
        return found.reshape(-1).view(np.uint8)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Some cells of one tensor that are compared in one go.

    Attributes:
        number: Which of the tensors it is.
        cells: Numbers of cells in the grid of `after`.
    """

    number: int
    key: str
    before: _Side
    after: _Side
    cells: tuple[int, ...]

    @property
    def boxes(self) -> Iterator[Box]:
        return map(self.after.grid.box, self.cells)

    def needed(self) -> set[Digest]:
        """The chunks of both sides."""
        return {digest for box in self.boxes for side in (self.before, self.after) for digest in side.needed(box)}


def tensor_numbers(
    handle: RepositoryHandle, tensors: Sequence[tuple[TensorPair, ChunkChange]], *, progress: Progress = SILENT
) -> list[TensorNumbers]:
    """The numbers of each of these tensors; the two sides of each have equal shapes.

    Raises:
        CorruptionError, NotFoundError: a chunk is damaged or gone; names the tensor.
    """
    sums = [NumberSums() for _ in tensors]
    stretches = _stretches(handle, tensors)
    num_bytes = sum(
        2 * change.num_bytes
        if _compares_changed_cells(pair, change)
        else pair.before.spec.num_bytes + pair.after.spec.num_bytes
        for pair, change in tensors
    )
    with phase(progress, "comparing", num_bytes):
        while batch := list(islice(stretches, STRETCHES_AT_A_TIME)):
            found: dict[int, NumberSums] = {}
            located = together_or_named(
                lambda needed: handle.locate(set().union(*needed)),
                [stretch.needed() for stretch in batch],
                [stretch.key for stretch in batch],
            )
            measurer = partial(_measurer, handle.store, located, found, progress)
            at_once = max(thread_count(), min(handle.num_requests, MOST_REQUESTS))
            run_all(enumerate(batch), measurer, num_threads=min(at_once, len(batch)))
            for at, stretch in enumerate(batch):
                sums[stretch.number].add(found[at])
    specs = [(pair.before.spec, pair.after.spec) for pair, _ in tensors]
    return [
        total.numbers(new.num_elements, are_numbers=are_numbers(old.dtype, new.dtype))
        for (old, new), total in zip(specs, sums, strict=True)
    ]


def _compares_changed_cells(pair: TensorPair, change: ChunkChange) -> bool:
    """Whether the cells of both sides are the same, so that unchanged ones need not be read."""
    return pair.before.spec == pair.after.spec and change.num_chunks > 0


def _stretches(handle: RepositoryHandle, tensors: Sequence[tuple[TensorPair, ChunkChange]]) -> Iterator[_Stretch]:
    numbered = list(enumerate(tensors))
    while numbered:
        size = _group_size([change for _, (_, change) in numbered])
        group, numbered = numbered[:size], numbered[size:]
        entries = [entry for _, (pair, _) in group for entry in (pair.before, pair.after)]
        nodes = tensor_nodes(handle, entries)
        ids = chunk_ids(handle, [(node, None) for node in nodes])
        cuts = [_Side(entry, node.grid, each) for entry, node, each in zip(entries, nodes, ids, strict=True)]
        for (number, (pair, change)), before, after in zip(group, cuts[::2], cuts[1::2], strict=True):
            aligned = _compares_changed_cells(pair, change) and before.grid == after.grid
            cells = change.cells() if aligned else iter(range(after.grid.num_cells))
            while part := tuple(islice(cells, CELLS_PER_STRETCH)):
                yield _Stretch(number, render_key(pair.path), before, after, part)


def _group_size(changes: Sequence[ChunkChange]) -> int:
    """How many tensors make up `CHUNKS_AT_A_TIME`, one at least."""
    num_chunks = 0
    for at, change in enumerate(changes):
        num_chunks += change.num_chunks
        if num_chunks > CHUNKS_AT_A_TIME:
            return max(at, 1)
    return len(changes)


def _measurer(
    store: Store, located: Mapping[bytes, Sequence[Location]], found: dict[int, NumberSums], progress: Progress
) -> Callable[[tuple[int, _Stretch]], None]:
    def run(item: tuple[int, _Stretch]) -> None:
        at, stretch = item
        sums = NumberSums()
        sides = stretch.before, stretch.after
        specs = [side.tensor.spec for side in sides]
        for box in stretch.boxes:
            try:
                old, new = (side.read(store, box, located) for side in sides)
            except CkptError as error:
                raise named(error, stretch.key) from error
            sums.add(measure(old, new, (specs[0].dtype, specs[1].dtype), (specs[0].item_bytes, specs[1].item_bytes)))
            progress.advance(len(old) + len(new))
        found[at] = sums

    return run


Raw: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
"""Elements as their bytes, one after the other."""

Numbers: TypeAlias = np.ndarray[Any, Any]
"""One float64 or complex128 for each element."""

Widen: TypeAlias = Callable[[Raw], Numbers]

_PLAIN = {
    "bool": "?", "uint8": "u1", "int8": "i1", "uint16": "<u2", "int16": "<i2", "uint32": "<u4", "int32": "<i4",
    "uint64": "<u8", "int64": "<i8", "float16": "<f2", "float32": "<f4", "float64": "<f8",
    "complex64": "<c8", "complex128": "<c16",
    # Quantized tensors: their integers, so that differences count steps.
    "qint8": "i1", "quint8": "u1", "qint32": "<i4",
}  # fmt: skip

_LONG_INTEGERS = {"int64": "<i8", "uint64": "<u8", "np:<i8": "<i8", "np:<u8": "<u8"}
"""Those that float64 cannot hold exactly, as numpy calls them."""


# --- elements as numbers, and their sums ------------------------------------------------------------


def widening(dtype: str) -> Widen | None:
    """How raw elements of `dtype` become numbers; None if they are none, or there is no rule for it."""
    if dtype in _PLAIN:
        return _by_numpy(np.dtype(_PLAIN[dtype]))
    if dtype == "bfloat16":
        return lambda raw: (raw.view("<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
    if dtype == "complex32":
        return lambda raw: raw.view("<f2").astype(np.float64).view(np.complex128)
    if dtype in _FLOAT8:
        table = _float8_table(dtype)
        return lambda raw: table[raw]
    if dtype.startswith(NUMPY_PREFIX):
        found = np.dtype(dtype[len(NUMPY_PREFIX) :])
        return _by_numpy(found) if found.kind in "biufc" else None
    return None


def _by_numpy(dtype: np.dtype[Any]) -> Widen:
    wide = np.complex128 if dtype.kind == "c" else np.float64
    return lambda raw: raw.view(dtype).astype(wide)


_FLOAT8 = {
    # bits of the mantissa, bias of the exponent, codes that are NaN
    "float8_e4m3fn": (3, 7, (0x7F, 0xFF)),
    "float8_e4m3fnuz": (3, 8, (0x80,)),
    "float8_e5m2": (2, 15, (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF)),
    "float8_e5m2fnuz": (2, 16, (0x80,)),
    "float8_e8m0fnu": (0, 127, (0xFF,)),
}


@lru_cache(maxsize=8)
def _float8_table(dtype: str) -> Numbers:
    """The number that each of the 256 codes means (IEEE P3109's predecessors: OCP FP8 and MX, Graphcore's fnuz)."""
    mantissa_bits, bias, nans = _FLOAT8[dtype]
    codes = np.arange(256)
    if dtype == "float8_e8m0fnu":  # a power of two: no sign, no mantissa, no zero
        table = np.ldexp(1.0, codes - bias)
    else:
        sign = np.where(codes & 0x80, -1.0, 1.0)
        exponent = (codes & 0x7F) >> mantissa_bits
        mantissa = codes & ((1 << mantissa_bits) - 1)
        hidden = np.where(exponent > 0, 1 << mantissa_bits, 0)
        table = sign * np.ldexp((hidden + mantissa).astype(np.float64), np.maximum(exponent, 1) - bias - mantissa_bits)
    table[list(nans)] = np.nan
    if dtype == "float8_e5m2":
        table[[0x7C, 0xFC]] = (np.inf, -np.inf)
    return table


BLOCK_ELEMENTS = 64 * 1024
"""Elements that are widened at a time: they stay in the second-level cache."""


@dataclass(slots=True)
class NumberSums:
    """Sums over some pairs of elements; `left_out` are the pairs that are not both finite."""

    compared: int = 0
    changed: int = 0
    left_out: int = 0
    nan_before: int = 0
    nan_after: int = 0
    inf_before: int = 0
    inf_after: int = 0
    deltas: float = 0.0
    squares: float = 0.0
    squares_before: float = 0.0
    squares_after: float = 0.0
    products: float = 0.0
    max_delta: float = 0.0

    def add(self, other: NumberSums) -> None:
        """Add the sums of other elements."""
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            setattr(self, each.name, max(mine, theirs) if each.name == "max_delta" else mine + theirs)

    def numbers(self, num_elements: int, *, are_numbers: bool) -> TensorNumbers:
        """The numbers of a tensor of so many elements."""
        if not are_numbers:
            return TensorNumbers(num_elements, self.compared, self.changed)
        before, after = math.sqrt(self.squares_before), math.sqrt(self.squares_after)
        delta_norm = math.sqrt(self.squares)
        cosine = _ratio(self.products, before * after)
        return TensorNumbers(
            num_elements, self.compared, self.changed,
            self.max_delta, self.deltas / max(num_elements - self.left_out, 1), delta_norm,
            _ratio(delta_norm, before), None if cosine is None else max(-1.0, min(1.0, cosine)),
            self.nan_before, self.nan_after, self.inf_before, self.inf_after,
        )  # fmt: skip


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole and math.isfinite(part) and math.isfinite(whole) else None


def are_numbers(before: str, after: str) -> bool:
    """Whether elements of these two dtypes can be compared as numbers."""
    return widening(before) is not None and widening(after) is not None


def measure(before: Raw, after: Raw, dtypes: tuple[str, str], item_bytes: tuple[int, int]) -> NumberSums:
    """The sums over two stretches of as many elements, given as bytes.

    Args:
        dtypes, item_bytes: Of the two sides.
    """
    sums = NumberSums()
    for first in range(0, len(before) // item_bytes[0], BLOCK_ELEMENTS):
        old, new = (
            raw[first * size : (first + BLOCK_ELEMENTS) * size]
            for raw, size in zip((before, after), item_bytes, strict=True)
        )
        # Signalling NaNs are numbers like others here; the squares of the largest ones count as infinite.
        with np.errstate(invalid="ignore", over="ignore"):
            _measure_block(sums, old, new, dtypes, item_bytes[0])
    return sums


def _measure_block(sums: NumberSums, old: Raw, new: Raw, dtypes: tuple[str, str], item_bytes: int) -> None:
    num_elements = len(old) // item_bytes
    sums.compared += num_elements
    if dtypes[0] == dtypes[1]:
        sums.changed += _differing(old, new, item_bytes)
    wide = widening(dtypes[0]), widening(dtypes[1])
    if wide[0] is not None and wide[1] is not None:
        _add_block(sums, old, new, dtypes, (wide[0], wide[1]))
    elif dtypes[0] != dtypes[1]:
        sums.changed += num_elements  # two kinds of things that have no common measure


def _differing(old: Raw, new: Raw, item_bytes: int) -> int:
    """Elements whose bytes are not the same."""
    if item_bytes in (1, 2, 4, 8):
        width = f"<u{item_bytes}"
        return int(np.count_nonzero(old.view(width) != new.view(width)))
    return int(np.count_nonzero((old != new).reshape(-1, item_bytes).any(axis=1)))


def _add_block(sums: NumberSums, old: Raw, new: Raw, dtypes: tuple[str, str], widen: tuple[Widen, Widen]) -> None:
    before, after = widen[0](old), widen[1](new)
    if dtypes[0] != dtypes[1]:
        same = (before == after) | (np.isnan(before) & np.isnan(after))
        sums.changed += len(same) - int(np.count_nonzero(same))
    finite = np.isfinite(before) & np.isfinite(after)
    if finite.all():
        deltas = None
        if dtypes[0] == dtypes[1] and dtypes[0] in _LONG_INTEGERS:
            # |new - old|, rounded once: as float64 they would be rounded before.
            first, second = (raw.view(_LONG_INTEGERS[dtypes[0]]) for raw in (old, new))
            deltas = (np.maximum(first, second).view("<u8") - np.minimum(first, second).view("<u8")).astype(np.float64)
        _add_finite(sums, before, after, deltas)
        return
    sums.left_out += len(finite) - int(np.count_nonzero(finite))
    # A complex number of which any part is NaN is NaN.
    nan_before, nan_after = np.isnan(before), np.isnan(after)
    sums.nan_before += int(np.count_nonzero(nan_before))
    sums.nan_after += int(np.count_nonzero(nan_after))
    sums.inf_before += int(np.count_nonzero(np.isinf(before) & ~nan_before))
    sums.inf_after += int(np.count_nonzero(np.isinf(after) & ~nan_after))
    _add_finite(sums, before[finite], after[finite], None)


def _add_finite(sums: NumberSums, before: Numbers, after: Numbers, deltas: Numbers | None) -> None:
    if before.dtype != after.dtype:  # one of them is complex
        before, after = before.astype(np.complex128), after.astype(np.complex128)
    deltas = np.abs(after - before) if deltas is None else deltas
    if not len(deltas):
        return
    sums.max_delta = max(sums.max_delta, float(deltas.max()))
    sums.deltas += float(deltas.sum())
    sums.squares += _dot(deltas, deltas)
    sums.squares_before += _dot(before, before)
    sums.squares_after += _dot(after, after)
    sums.products += _dot(before, after)


def _dot(one: Numbers, other: Numbers) -> float:
    """The real part of the inner product.

    Not by BLAS, whose own threads would fight with ours: measured 50 times slower on two busy cores.
    """
    return float(np.einsum("i,i->", one.view(np.float64), other.view(np.float64)))
