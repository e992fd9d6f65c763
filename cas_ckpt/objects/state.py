"""A training state as plain structure: containers, tensors and values, without torch.

`training/` turns live objects into this (capture) and this back into live objects
(restore); `ops/` turns it into commits and back. Invariant: children are keyed by the
path components that format.md describes; order of keys carries no meaning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from cas_ckpt.errors import CorruptionError
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.spec import Box, Grid, Placement, Spec
from cas_ckpt.objects.structures import STRUCTURE_KINDS

if TYPE_CHECKING:
    import numpy as np

Name: TypeAlias = str | int
PLAIN_NAME = re.compile(r"[A-Za-z_][^~/]*\Z")
"""Names that are their own components of keys."""
_MAX_DIGITS = 1000
"""Longer numbers are not names; Python refuses to read them."""
Path: TypeAlias = tuple[Name, ...]


class Flavor(StrEnum):
    """Kind of a stored tensor: torch tensor, NumPy array, or encoded plain value."""

    TORCH = "torch"
    NUMPY = "numpy"
    VALUE = "value"


KIND_OF_FLAVOR = {Flavor.TORCH: "tensor", Flavor.NUMPY: "array", Flavor.VALUE: "value"}
"""Their names in listings."""


class ArraySource(Protocol):
    """The source of the elements of one tensor.

    Rules: may be called from several threads; the answer stays valid until the same thread
    calls again; the bytes must not change while a commit runs (a change is found, not stored).
    """

    def read(self, box: Box) -> np.ndarray[Any, Any]:
        """The elements of `box` as an array of shape `box.sizes`.

        The array has any numpy dtype of the right item size (`uint16` stands for bfloat16)
        and any strides; it is a view where that is possible.
        """
        ...


class StagedSource(ArraySource, Protocol):
    """A source whose bytes are those of one moment, whatever their owner does afterwards.

    The save step tells it when it will not read again; a snapshot that does not hold raises there, before anything is
    published. Other sources lack both names (`is_private` and `saved` below ask); those whose `read` gives copies, such
    as of memory of a device, are private.
    """

    @property
    def is_private(self) -> bool:
        """Whether what `read` returns stays unchanged until the commit has ended: it can be hashed without a copy."""
        ...

    def saved(self) -> None:
        """Every byte that this attempt of the commit needs was hashed, and copied or written, unless it is private.

        Raises:
            CkptError: what was read was not all of the moment of the snapshot.
        """
        ...


class FileBackedSource(ArraySource, Protocol):
    """A source whose elements are brought into memory to be read; others (`bytes_read_at_once` asks) take none."""

    @property
    def read_bytes(self) -> int:
        """Most memory that a thread holds while it reads this source cell by cell.

        Raises:
            CkptError: what holds the elements cannot be read, or is malformed.
        """
        ...


def bytes_read_at_once(source: ArraySource) -> int:
    """Memory that a thread holds while it reads `source` cell by cell: 0 for live memory. Raises as `read_bytes`."""
    return getattr(source, "read_bytes", 0)


def whole_bytes(source: ArraySource, box: Box) -> bytes:
    """All elements of a small `source` in C order; `box`: all of it. Some give them without an array (`to_bytes`)."""
    to_bytes = getattr(source, "to_bytes", None)
    data: bytes = source.read(box).tobytes() if to_bytes is None else to_bytes()
    return data


def is_private(source: ArraySource) -> bool:
    """Whether what `source` gives from now on belongs to the commit alone: hashed and written as it is, uncopied."""
    return getattr(source, "is_private", False)


def is_of_one_moment(source: ArraySource) -> bool:
    """Whether `source` gives the same bytes at each read: they need not be hashed twice. A device may be written to."""
    return is_private(source) and hasattr(source, "saved")


def saved(source: ArraySource) -> None:
    """Tell `source`, if it is a `StagedSource`, that this attempt of the commit has saved all of it."""
    report = getattr(source, "saved", None)
    if report is not None:
        report()


@dataclass(frozen=True, slots=True)
class CellsToName:
    """Cells of one tensor whose leaves are to be hashed.

    Attributes:
        source: One whose `leaf_hasher` was asked for.
        numbers: Of the cells; what the source reads is all of each.
    """

    source: Any
    grid: Grid
    numbers: Sequence[int]
    item_bytes: int


class LeafHasher(Protocol):
    """Hashes tensors where they are, so that their bytes need not be brought to the host. Any thread may call.

    Attributes:
        has_hashed: It has hashed before what it is asked for: an answer costs nothing.
    """

    has_hashed: bool

    def cell_digests(self, wanted: Sequence[CellsToName]) -> Sequence[Sequence[bytes]] | None:
        """For each of `wanted` and each of its cells the digests of its leaves, joined; None: it cannot, read them.

        What it answers is what BLAKE3 gives for the bytes that `ArraySource.read` would have given.
        """
        ...


Cast: TypeAlias = "Callable[[np.ndarray[Any, Any], str, str], np.ndarray[Any, Any]]"


class ArrayTarget(Protocol):
    """The destination of the elements of one tensor. May be called from several threads.

    Those that derived tensors are brought into have `rearranged(index, order)` as well: a target for the elements at
    `index`, a slice for each dimension, whose dimensions are those of this one in another order.
    """

    def open(self, box: Box) -> np.ndarray[Any, Any]:
        """A writable array of shape `box.sizes` (raw bits, any strides) to be filled."""
        ...

    def done(self, box: Box, array: np.ndarray[Any, Any]) -> None:
        """`array`, as `open(box)` gave it, is filled: bring it into place if it is not a view."""
        ...


@dataclass(slots=True)  # not frozen: that would take twice as long to make
class TensorItem:
    """A tensor to be committed. Immutable, except that a background commit makes its own read a copy.

    Attributes:
        flavor: What `load` makes of it.
        identity: Equal for tensors that are the same memory (tied), None when not known.
            Also names the memory for `frozen=`: (address, strides, version counter ...).
        order: Its dimensions as they lie in memory, the outermost first; None: in their order. No part of the root.
        placement: How the tensor is divided over the ranks, or None: whole on every rank that
            has the key. `spec` and the boxes of `source` are global all the same; `source`
            gives boxes that lie inside one piece of this rank's shard (layout/holdings.py).
    """

    spec: Spec
    source: ArraySource
    flavor: Flavor = Flavor.TORCH
    identity: tuple[Any, ...] | None = None
    placement: Placement | None = None
    order: tuple[int, ...] | None = None


@dataclass(slots=True, unsafe_hash=True)  # not frozen, as TensorItem, but never changed
class StoredTensor:
    """A tensor in a commit.

    Attributes:
        node: Id of its tensor node, or of its only chunk, or None when the bytes are inline.
        inline: The bytes of a small tensor, else None.
        single: `node` is the id of the tensor's only chunk.
    """

    spec: Spec
    flavor: Flavor
    node: Digest | None
    inline: bytes | None
    single: bool = False


@dataclass(frozen=True, slots=True)
class Stretch:
    """Where the elements along one dimension of a derived tensor are stored.

    Element `at + i * stride` of it is element `start + i * step` along dimension `dim` of the stored tensor, i < size.
    """

    dim: int
    start: int
    step: int
    at: int
    stride: int
    size: int


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Elements of a derived tensor that one stored tensor has; with a stretch for each dimension of the derived one."""

    stored: StoredTensor
    stretches: tuple[Stretch, ...]


@dataclass(slots=True, unsafe_hash=True)  # as StoredTensor
class DerivedTensor(StoredTensor):
    """A tensor whose elements a commit stores in other tensors, or in another order, or as another dtype.

    It has no node and no bytes of its own: what reads it reads its parts (ops/checkout/derived.py).

    Attributes:
        parts: Disjoint, each element in one of them.
        cast: Raw items, their dtype and another one -> raw items of that one; for parts of another dtype than `spec`.
    """

    parts: tuple[TensorPart, ...] = ()
    cast: Cast | None = field(default=None, compare=False)


@dataclass(slots=True, unsafe_hash=True)  # not frozen, as TensorItem, but never changed
class TensorCopy:
    """A stored tensor and the memory that it is to be brought into.

    Attributes:
        placement: How the target is divided over the ranks, or None: this rank wants all of it.
            Boxes of `target` are global all the same; it opens boxes inside one piece of the
            own shard (layout/holdings.py).
        box: What is wanted of the stored tensor, not empty; None: all of it. `target` is memory of
            exactly this box then: its own coordinates begin at the corner of the box.
    """

    path: Path
    stored: StoredTensor
    target: ArrayTarget
    placement: Placement | None = None
    box: Box | None = None


@dataclass(frozen=True, slots=True)
class ValueItem:
    """A plain value (see objects/values.py for what can be expressed)."""

    value: Any


@dataclass(frozen=True, slots=True)
class EncodedValue:
    """A plain value in a commit, not decoded yet."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Container:
    """Named children and what kind of Python object held them.

    Attributes:
        kind: "dict", "odict", "list", "tuple", "ranks" (rank -> its own value), "namedtuple", "dataclass",
            "generator" (a torch.Generator), or a composite tensor: "sparse_coo",
            "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "quantized".
        attrs: Plain value that the kind needs (e.g. the shape of a sparse tensor), or None.
        children: By name; lists and tuples use 0..n-1.
        versions: Of the state of a module to be committed: the versions of the modules in it that are not 1, by their
            names; None: this is no such state. No part of the root.
    """

    kind: str
    children: dict[Name, Item]
    attrs: Any = field(default=None)
    versions: Mapping[str, int] | None = field(default=None, compare=False)


RANKS = "ranks"
"""Kind of the containers whose children are each rank's own: rank -> what that rank had."""

WORLD_SIZE = "world_size"
"""The only attr of a container of kind `RANKS`."""

ORDER = "order"
"""The only attr of a container of kind "odict": its names in the order of the dict; without it they ascend."""

CONTAINER_KINDS = frozenset({"dict", "odict", "list", "tuple", RANKS, *STRUCTURE_KINDS})
"""Kinds of containers that people see as containers; the others are one tensor each."""

Item: TypeAlias = Container | TensorItem | StoredTensor | ValueItem | EncodedValue


def in_order(container: Container) -> list[Name]:
    """The names of a container as an OrderedDict has them; those that are not in its order come last."""
    order = container.attrs[ORDER] if container.kind == "odict" and container.attrs else ()
    return list(dict.fromkeys((*(name for name in order if name in container.children), *container.children)))


def is_order(attrs: Any, names: Collection[Name]) -> bool:
    """Whether these are the attrs of an "odict" that has just `names`."""
    order = attrs.get(ORDER) if isinstance(attrs, dict) and len(attrs) == 1 else None
    if not isinstance(order, list) or not all(type(name) in (int, str) for name in order):
        return attrs is None
    return len(order) == len(names) and set(order) == set(names)


def walk(item: Item, path: Path = ()) -> Iterator[tuple[Path, Item]]:
    """All tensors and values below `item` (itself, if it is one), with their paths, depth first.

    Containers without children are yielded too: they are part of the state.
    """
    stack: list[tuple[Path, Item]] = [(path, item)]
    while stack:
        at, node = stack.pop()
        if isinstance(node, Container) and node.children:
            stack.extend(((*at, name), child) for name, child in reversed(node.children.items()))
        else:
            yield at, node


def render_key(path: Path) -> str:
    """The key of `path` as people write it: components joined by "/".

    "~" and "/" inside a name become "~0" and "~1"; a string that reads as an integer, or is
    empty, gets the prefix "~=", so that different paths never share a key.
    """
    return "/".join(map(render_name, path))


def render_name(name: Name) -> str:
    """One component of a key."""
    if isinstance(name, int):
        return str(name)
    if PLAIN_NAME.match(name):
        return name
    escaped = name.replace("~", "~0").replace("/", "~1")
    return f"~={escaped}" if _reads_as_integer(name) or not name else escaped


def _reads_as_integer(text: str) -> bool:
    digits = text[1:] if text[:1] == "-" else text
    return digits.isascii() and digits.isdigit()


def parse_key(key: str) -> Path:
    """The path that `render_key` wrote as `key`; the empty key is the root."""
    return tuple(_parse(part) for part in key.split("/")) if key else ()


def _parse(part: str) -> Name:
    if _reads_as_integer(part) and len(part) <= _MAX_DIGITS:
        return int(part)
    return part.removeprefix("~=").replace("~1", "/").replace("~0", "~")


def world_size_of(item: Item, path: Path) -> int:
    """How many ranks committed `item`: 1 for what is not kept per rank.

    Raises:
        CorruptionError: a container of ranks that no commit writes.
    """
    if not isinstance(item, Container) or item.kind != RANKS:
        return 1
    size = item.attrs.get(WORLD_SIZE) if isinstance(item.attrs, dict) else None
    if type(size) is not int or not all(type(rank) is int and 0 <= rank < size for rank in item.children):
        raise CorruptionError(f"{render_key(path)}: holds values of ranks, but not of which: restore an older commit")
    return size


def with_tensors(container: Container, change: Callable[[TensorItem, Path], TensorItem], path: Path = ()) -> Container:
    """`container` with what `change` gives for each tensor of a live state in it; everything else as it is."""
    children: dict[Name, Item] = {}
    for name, child in container.children.items():
        if isinstance(child, Container):
            child = with_tensors(child, change, (*path, name))
        elif isinstance(child, TensorItem):
            child = change(child, (*path, name))
        children[name] = child
    return replace(container, children=children)
