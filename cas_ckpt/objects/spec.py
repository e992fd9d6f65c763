"""Specs, boxes, grids and placements: the shape arithmetic that every room shares.

`grid_for` is the canonical grid: a pure function of the global shape and the item size. The same tensor has the same
cells on every rank, mesh, machine and version, so equal bytes have equal ids however they are placed; a change of this
rule is a change of the format. Why this rule: docs/decisions/001-grid.md, with the simulation in benchmarks/grid.py.

Invariant: everything here is a value. Knows nothing of torch: dtypes are names with a width in bits.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeAlias

from cas_ckpt.errors import InvalidInputError, UnsupportedValueError, UnsupportedVersionError
from cas_ckpt.objects.digest import LEAF_BYTES

if TYPE_CHECKING:
    import numpy as np


NUMPY_PREFIX = "np:"
"""Head of the dtype names that only numpy has, e.g. `np:<M8[ns]`."""

DTYPE_BYTES: dict[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "qint8": 1, "quint8": 1, "qint32": 4, "quint4x2": 1, "quint2x4": 1,
    **{f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 8)},
    "bits8": 1, "bits16": 2, "bits1x8": 1, "bits2x4": 1, "bits4x2": 1,
}  # fmt: skip
"""Bytes per element of each named dtype, as torch stores it."""

CELL_BYTES = 4 * 1024 * 1024
"""No cell is longer; a full cell of a large tensor has more than half of it."""

MIN_PIECE_BYTES = 512 * 1024
"""A matrix is not cut along its columns into pieces (all rows of a column range) shorter than this."""

MIN_RUN_BYTES = 1024
"""Columns are never cut into runs shorter than this."""

MAX_PIECES = 8
"""Column pieces of a matrix: the largest usual tensor-parallel degree."""

_MAX_LEAF_SEARCH = 4
"""A long row is cut into equal leaves of at least about LEAF_BYTES / 4, or not into equal ones."""


def dtype_bytes(name: str) -> int:
    """Bytes per element of the dtype called `name`.

    Raises:
        UnsupportedVersionError: this version knows no such dtype. InvalidInputError: it holds Python objects.
    """
    known = DTYPE_BYTES.get(name)
    if known is not None:
        return known
    if name.startswith(NUMPY_PREFIX):
        return _numpy_dtype(name).itemsize
    raise UnsupportedVersionError(f"dtype {name!r} is not known to this version of cas_ckpt: upgrade cas_ckpt")


def check_known(spec: Spec, key: str) -> None:
    """Refuse an entry whose dtype a later version stored, or of a shape that no array can have, by its key.

    Raises:
        UnsupportedVersionError, UnsupportedValueError.
    """
    try:
        dtype_bytes(spec.dtype)
    except UnsupportedVersionError as error:
        raise UnsupportedVersionError(f"{key}: {error}") from error
    if not spec.fits_array:
        raise UnsupportedValueError(f"{key}: {spec} has no elements, and sizes that no array can have: reshape it")


def _numpy_dtype(name: str) -> np.dtype[np.void]:
    import numpy as np  # not above: `cas-ckpt log` has no use for it

    try:
        dtype = np.dtype(name[len(NUMPY_PREFIX) :])
    except (TypeError, ValueError, SyntaxError) as error:
        raise UnsupportedVersionError(
            f"dtype {name!r} is not known to this version of numpy ({error}): upgrade cas_ckpt and numpy"
        ) from error
    if dtype.hasobject:
        raise InvalidInputError(f"numpy dtype {name!r} holds Python objects, which are never stored as bytes")
    return dtype


@lru_cache(maxsize=64)
def raw_dtype(item_bytes: int) -> np.dtype[Any]:
    """The numpy dtype that stands for raw items of this width in bytes."""
    import numpy as np

    return np.dtype({1: "u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}.get(item_bytes, f"V{item_bytes}"))


def as_raw(array: np.ndarray[Any, Any], item_bytes: int) -> np.ndarray[Any, Any]:
    """`array` as raw items: same memory, dtype by width alone."""
    raw = raw_dtype(item_bytes)
    return array if array.dtype == raw else array.view(raw)


@dataclass(frozen=True, slots=True)
class Box:
    """A region of a tensor: offsets and sizes in elements, one pair per dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice | EllipsisType, ...]:
        """The box as an index for numpy and torch; always gives a view, of a 0-d array too."""
        ranges = [slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True)]
        return (*ranges, Ellipsis)

    @property
    def num_elements(self) -> int:
        """Elements inside the box (1 for a 0-d box)."""
        return math.prod(self.sizes)

    def intersect(self, other: Box) -> Box | None:
        """The common box, or None when nothing is common."""
        offsets, sizes = [], []
        for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            start, stop = max(a, b), min(a + n, b + m)
            if stop <= start:
                return None
            offsets.append(start)
            sizes.append(stop - start)
        return Box(tuple(offsets), tuple(sizes))

    def without(self, *others: Box) -> list[Box]:
        """The parts that none of `others` touches, as disjoint boxes; none of them is empty."""
        left = [self] if self.num_elements else []
        for other in others:
            left = [rest for box in left for rest in box._without(other)]
        return left

    def _without(self, other: Box) -> list[Box]:
        """The difference to `other`: before and behind it along each dimension."""
        common = self.intersect(other)
        if common is None:
            return [self]
        found, offsets, sizes = [], list(self.offsets), list(self.sizes)
        for dim, (start, size) in enumerate(zip(common.offsets, common.sizes, strict=True)):
            for first, last in ((offsets[dim], start), (start + size, offsets[dim] + sizes[dim])):
                if first < last:
                    at = (*offsets[:dim], first, *offsets[dim + 1 :])
                    found.append(Box(at, (*sizes[:dim], last - first, *sizes[dim + 1 :])))
            offsets[dim], sizes[dim] = start, size
        return found

    def span_in(self, outer: Sequence[int]) -> tuple[int, int] | None:
        """(start, stop) of its elements in a box of sizes `outer`, in C order; None if they are not consecutive.

        Offsets are relative to that box.
        """
        first = next((dim for dim, size in enumerate(self.sizes) if size > 1), len(self.sizes))
        if any(self.sizes[dim] != outer[dim] for dim in range(first + 1, len(self.sizes))):
            return None
        start = 0
        for size, offset in zip(outer, self.offsets, strict=True):
            start = start * size + offset
        return start, start + self.num_elements

    def relative_to(self, outer: Box) -> Box:
        """This box in the coordinates of `outer`."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.sizes)


@dataclass(frozen=True, slots=True)
class Delivery:
    """A part of a tensor, and the rank that gets it."""

    rank: int
    box: Box


@dataclass(frozen=True)
class Spec:
    """Global shape (elements) and dtype name of a tensor; what follows from them is found once."""

    dtype: str
    shape: tuple[int, ...]

    @cached_property
    def item_bytes(self) -> int:
        """Bytes per element."""
        return dtype_bytes(self.dtype)

    @cached_property
    def is_known(self) -> bool:
        """Whether this version knows the dtype; a later one may have stored another."""
        if self.dtype in DTYPE_BYTES:
            return True
        try:
            dtype_bytes(self.dtype)
        except UnsupportedVersionError:
            return False
        return True

    @property
    def shown_bytes(self) -> int:
        """Bytes of the whole tensor, for showing: 0 if this version does not know the dtype."""
        return self.num_bytes if self.is_known else 0

    @cached_property
    def num_elements(self) -> int:
        """Elements of the whole tensor (1 for 0-d)."""
        return math.prod(self.shape)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.num_elements * self.item_bytes

    @cached_property
    def fits_array(self) -> bool:
        """Whether NumPy can have such an array: it multiplies the sizes of one without elements too."""
        return math.prod(filter(None, self.shape)) * self.item_bytes < 1 << 63

    @cached_property
    def box(self) -> Box:
        """The whole tensor as a box."""
        return Box((0,) * len(self.shape), self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@lru_cache(maxsize=1 << 12)
def shared_spec(dtype: str, shape: tuple[int, ...]) -> Spec:
    """The same Spec for all tensors that are alike: models repeat their shapes."""
    return Spec(dtype, shape)


@dataclass(frozen=True)
class Grid:
    """The canonical cut of a tensor into cells.

    Attributes:
        shape: Global shape, elements.
        cell: Sizes of a full cell, elements; border cells are clipped.
        leaf_bytes: Bytes of a full leaf of every cell; a multiple of the item size.
    """

    shape: tuple[int, ...]
    cell: tuple[int, ...]
    leaf_bytes: int

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Cells along each dimension."""
        return tuple([-(-size // step) for size, step in zip(self.shape, self.cell, strict=True)])

    @cached_property
    def num_cells(self) -> int:
        """Cells of the whole tensor (1 for 0-d, 0 for an empty tensor)."""
        return math.prod(self.counts)

    def cell_elements(self, index: int) -> int:
        """Elements of cell number `index`."""
        return self._even_elements or self.box(index).num_elements

    @cached_property
    def _even_elements(self) -> int:
        """Elements of every cell, if none is clipped; else 0."""
        even = all(size % step == 0 for size, step in zip(self.shape, self.cell, strict=True))
        return math.prod(self.cell) if even else 0

    def box(self, index: int) -> Box:
        """The box of cell number `index`, cells counted in C order."""
        if self.num_cells == 1:
            return Box((0,) * len(self.shape), self.shape)
        offsets, sizes = [], []
        for dim in range(len(self.shape) - 1, -1, -1):
            index, position = divmod(index, self.counts[dim])
            step = self.cell[dim]
            offsets.append(position * step)
            sizes.append(min(step, self.shape[dim] - position * step))
        return Box(tuple(offsets[::-1]), tuple(sizes[::-1]))

    def cells_in(self, box: Box) -> Iterator[tuple[int, Box]]:
        """(number, what it shares with `box`) of every cell that shares an element with `box`, ascending.

        Cells are regular, so a box touches a sub-lattice of them, found by division along each dimension: the cost is
        that of the answer.
        """
        if not box.num_elements:
            return
        lattice = []
        for start, size, step in zip(box.offsets, box.sizes, self.cell, strict=True):
            stop = start + size
            along = []
            for position in range(start // step, (stop - 1) // step + 1):
                first = max(start, position * step)
                along.append((position, first, min(stop, (position + 1) * step) - first))
            lattice.append(along)
        for place in itertools.product(*lattice):
            number = 0
            for (position, _, _), count in zip(place, self.counts, strict=True):
                number = number * count + position
            yield number, Box(tuple(part[1] for part in place), tuple(part[2] for part in place))


def grid_for(spec: Spec) -> Grid:
    """The canonical grid of every tensor with this global shape and item size.

    Cells are numbered in C order and hold their elements in C order. A 0-d tensor is one cell, an
    empty one has no cells. At most one dimension has clipped cells at its border.

    Raises:
        InvalidInputError: the shape has a negative size, or an item is empty or longer than a leaf.
    """
    return _grid(spec.shape, spec.item_bytes)


@lru_cache(maxsize=1 << 14)
def _grid(shape: tuple[int, ...], item_bytes: int) -> Grid:
    if any(size < 0 for size in shape):
        raise InvalidInputError(f"shape {shape} has a negative size; pass the global shape of the tensor")
    if not 0 < item_bytes <= LEAF_BYTES:
        raise InvalidInputError(
            f"items of {item_bytes} bytes cannot be cut into leaves; wanted 1 to {LEAF_BYTES}: store the array in parts"
        )
    if not shape or 0 in shape:
        return Grid(shape, (1,) * len(shape), item_bytes)
    columns = shape[-1] // _column_pieces(shape, item_bytes)
    axis = _row_axis(shape, columns, item_bytes)
    tail = (*shape[axis + 1 : -1], columns) if axis < len(shape) - 1 else ()
    row_bytes = math.prod(tail) * item_bytes
    rows = min(_power_of_two_floor(CELL_BYTES // row_bytes), shape[axis])
    leaf_bytes = min(_leaf_bytes(row_bytes, item_bytes), rows * row_bytes)
    return Grid(shape, (*(1,) * axis, rows, *tail), leaf_bytes)


def _column_pieces(shape: tuple[int, ...], item_bytes: int) -> int:
    """Pieces that the last dimension is cut into: 1 for anything but large wide or square matrices."""
    if len(shape) < 2 or shape[-1] < shape[-2]:
        return 1
    row_bytes = shape[-1] * item_bytes
    if row_bytes > CELL_BYTES:
        return 1
    most = min(row_bytes // MIN_RUN_BYTES, shape[-2] * row_bytes // MIN_PIECE_BYTES, MAX_PIECES)
    return math.gcd(_power_of_two_floor(max(most, 1)), shape[-1])


def _row_axis(shape: tuple[int, ...], columns: int, item_bytes: int) -> int:
    """The dimension whose cells have several rows; those before it have 1, those after it are whole."""
    if columns < shape[-1]:
        return len(shape) - 2
    return next(axis for axis in range(len(shape)) if math.prod(shape[axis + 1 :]) * item_bytes <= CELL_BYTES)


def _leaf_bytes(row_bytes: int, item_bytes: int) -> int:
    """As many rows as a power of two that fits, else an equal share of a row, else whatever fits."""
    if row_bytes <= LEAF_BYTES:
        return _power_of_two_floor(LEAF_BYTES // row_bytes) * row_bytes
    row_items = row_bytes // item_bytes
    fewest = -(-row_bytes // LEAF_BYTES)
    for shares in range(fewest, fewest * _MAX_LEAF_SEARCH + 1):
        if row_items % shares == 0:
            return row_bytes // shares
    return LEAF_BYTES // item_bytes * item_bytes


def _power_of_two_floor(number: int) -> int:
    return 1 << (number.bit_length() - 1)


# --- how a tensor is divided over ranks ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mesh:
    """A grid of ranks.

    Attributes:
        names: One name per dimension ("" where it has none).
        shape: Ranks along each dimension.
        ranks: World rank of every place, in C order; all different.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        num_ranks = len(self.ranks)
        if len(self.names) != len(self.shape) or not math.prod(self.shape) == len(set(self.ranks)) == num_ranks:
            raise InvalidInputError(f"mesh {self.names} of shape {self.shape} does not fit {len(self.ranks)} ranks")


def named_axes(axes: Iterable[tuple[str, int]]) -> tuple[tuple[str, int], ...]:
    """Dimensions of a mesh; one without a name is called after its place: dim0."""
    return tuple((name or f"dim{at}", size) for at, (name, size) in enumerate(axes))


def mesh_text(axes: Iterable[tuple[str, int]]) -> str:
    """A mesh as people write it: dp=4,tp=2."""
    return ",".join(f"{name}={size}" for name, size in named_axes(axes))


@dataclass(frozen=True, slots=True)
class Split:
    """How one mesh dimension divides a tensor.

    Attributes:
        dim: Tensor dimension that is cut along this mesh dimension; None: every rank has all.
        stride: 1 for consecutive parts (torch's Shard). More for torch's _StridedShard: the
            dimension is first cut into `stride` parts and each of them along the mesh.
    """

    dim: int | None = None
    stride: int = 1

    def __str__(self) -> str:
        if self.dim is None:
            return "R"
        return f"S({self.dim})" if self.stride == 1 else f"SS({self.dim},{self.stride})"


_SPLIT = re.compile(r"R|S\((\d{1,4})\)|SS\((\d{1,4}),(\d{1,9})\)")


def parse_split(text: str) -> Split:
    """The split that `str` wrote.

    Raises:
        InvalidInputError: it is not a split.
    """
    found = _SPLIT.fullmatch(text)
    if found is None:
        raise InvalidInputError(f"{text!r} is not a placement: wanted R, S(dim) or SS(dim,stride)")
    plain, strided, stride = found.groups()
    if strided is not None:
        return Split(int(strided), int(stride))
    return Split() if plain is None else Split(int(plain))


@dataclass(frozen=True, slots=True)
class MeshPlacement:
    """A tensor divided over a mesh: one split per mesh dimension, applied in order (as DTensor does)."""

    mesh: Mesh
    splits: tuple[Split, ...]


@dataclass(frozen=True, slots=True)
class BoxPlacement:
    """A tensor of which ranks hold boxes that follow no rule: (box, ranks that hold it), in any order."""

    boxes: tuple[tuple[Box, tuple[int, ...]], ...]


Placement: TypeAlias = MeshPlacement | BoxPlacement
"""How a tensor is divided over ranks: every rank's part, not only the own one, so that all ranks that hold equal
placements make equal plans without talking. Which elements follow from it: layout/holdings.py."""


def pack_placement(placement: Placement) -> list[Any]:
    """`placement` as lists of text and numbers, to be sent to other ranks."""
    if isinstance(placement, BoxPlacement):
        return [[list(box.offsets), list(box.sizes), list(ranks)] for box, ranks in placement.boxes]
    mesh = placement.mesh
    return ["mesh", list(mesh.names), list(mesh.shape), list(mesh.ranks), list(map(str, placement.splits))]


def unpack_placement(packed: Any) -> Placement:
    """Inverse of `pack_placement`.

    Raises:
        InvalidInputError, TypeError, ValueError: it did not.
    """
    if not packed or packed[0] != "mesh":
        return BoxPlacement(tuple((_box(offsets, sizes), _counts(ranks)) for offsets, sizes, ranks in packed))
    _, names, shape, ranks, splits = packed
    return MeshPlacement(Mesh(tuple(names), _counts(shape), _counts(ranks)), tuple(map(parse_split, splits)))


def _box(offsets: Any, sizes: Any) -> Box:
    if len(offsets) != len(sizes):
        raise InvalidInputError(f"a box of {len(offsets)} offsets and {len(sizes)} sizes: wanted one pair a dimension")
    return Box(_counts(offsets), _counts(sizes))


def _counts(values: Any) -> tuple[int, ...]:
    if any(type(value) is not int or value < 0 for value in values):
        raise InvalidInputError("a placement counts with something that is not a whole number from 0 on")
    return tuple(values)
