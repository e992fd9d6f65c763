"""What one rank has of a state, in words that other ranks understand.

Invariant: equal states under equal placements give equal bytes on every rank, so that ranks compare
32 bytes first. The bytes of large tensors are not in it; small whole tensors and values are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgpack

from cas_ckpt.errors import InternalError
from cas_ckpt.objects.placement import BoxPlacement, Mesh, MeshPlacement, Placement, parse_split
from cas_ckpt.objects.spec import Box, Spec
from cas_ckpt.objects.state import Container, Item, Path, TensorItem, ValueItem, render_key
from cas_ckpt.objects.tree_node import INLINE_BYTES, name_order

RANKS = "ranks"
"""Kind of the containers whose children are each rank's own."""

ValueEncoder = Callable[[Any, str], bytes]


@dataclass(frozen=True, slots=True)
class DescribedContainer:
    """A container; its children follow. Those of kind "ranks" are not described.

    Attributes:
        length: Number of children of a list or tuple, which cannot be united by name; else -1.
    """

    path: Path
    kind: str
    attrs: bytes | None
    length: int = -1


@dataclass(frozen=True, slots=True)
class DescribedTensor:
    """A tensor.

    Attributes:
        tie: Key of the first tensor (in order) that is the same memory, its own if there is none.
        inline: The bytes of a small whole tensor.
    """

    path: Path
    spec: Spec
    flavor: str
    placement: Placement | None
    tie: str
    inline: bytes | None


@dataclass(frozen=True, slots=True)
class DescribedValue:
    """A plain value, encoded."""

    path: Path
    data: bytes


Described = DescribedContainer | DescribedTensor | DescribedValue


def describe(state: Container, encode_value: ValueEncoder) -> list[Described]:
    """Everything in `state`, parents before children, children by name.

    Raises:
        UnsupportedValueError: names the key of a value that cannot be expressed.
    """
    ties: dict[Any, str] = {}
    return list(_walk(state, (), encode_value, ties))


def _walk(item: Item, path: Path, encode_value: ValueEncoder, ties: dict[Any, str]) -> Iterator[Described]:
    key = render_key(path)
    if isinstance(item, Container):
        length = len(item.children) if item.kind in ("list", "tuple") else -1
        attrs = None if item.attrs is None else encode_value(item.attrs, key)
        yield DescribedContainer(path, item.kind, attrs, length)
        if item.kind != RANKS:
            for name in sorted(item.children, key=name_order):
                yield from _walk(item.children[name], (*path, name), encode_value, ties)
    elif isinstance(item, TensorItem):
        yield _tensor(item, path, key, ties)
    elif isinstance(item, ValueItem):
        yield DescribedValue(path, encode_value(item.value, key))
    else:
        raise InternalError(f"{key}: a {type(item).__name__} cannot be committed")


def _tensor(item: TensorItem, path: Path, key: str, ties: dict[Any, str]) -> DescribedTensor:
    tie = key
    if item.identity is not None and item.spec.num_bytes:
        tie = ties.setdefault((item.identity[0], item.spec), key)
    inline = None
    if item.placement is None and item.spec.num_bytes <= INLINE_BYTES:
        inline = item.source.read(item.spec.box).tobytes()
    return DescribedTensor(path, item.spec, item.flavor, item.placement, tie, inline)


# --- bytes ---------------------------------------------------------------------------------


def pack_description(entries: list[Described]) -> tuple[bytes, bytes]:
    """`entries` as bytes: the meshes, and everything else.

    Apart, because ranks whose tensors are divided over meshes of their own (each group of a tensor
    parallel job) differ in the meshes alone.
    """
    meshes: dict[Mesh, int] = {}
    rows = [_row(entry, meshes) for entry in entries]
    tables = [[list(mesh.names), list(mesh.shape), list(mesh.ranks)] for mesh in meshes]
    return msgpack.packb(tables), msgpack.packb(rows, use_bin_type=True, unicode_errors="surrogatepass")


def unpack_description(tables: bytes, rows: bytes) -> list[Described]:
    """What `pack_description` packed, on another rank of this job."""
    meshes = [Mesh(names, shape, ranks) for names, shape, ranks in msgpack.unpackb(tables, use_list=False)]
    found = msgpack.unpackb(rows, use_list=False, strict_map_key=False, unicode_errors="surrogatepass")
    return [_entry(row, meshes) for row in found]


def _row(entry: Described, meshes: dict[Mesh, int]) -> list[Any]:
    if isinstance(entry, DescribedContainer):
        return ["c", entry.path, entry.kind, entry.attrs, entry.length]
    if isinstance(entry, DescribedValue):
        return ["v", entry.path, entry.data]
    spec, placement = entry.spec, _placement_row(entry.placement, meshes)
    return ["t", entry.path, spec.dtype, spec.shape, entry.flavor, placement, entry.tie, entry.inline]


def _placement_row(placement: Placement | None, meshes: dict[Mesh, int]) -> list[Any] | None:
    if isinstance(placement, MeshPlacement):
        return ["m", meshes.setdefault(placement.mesh, len(meshes)), [str(split) for split in placement.splits]]
    if isinstance(placement, BoxPlacement):
        return ["b", [[box.offsets, box.sizes, ranks] for box, ranks in placement.boxes]]
    return None


def _entry(row: tuple[Any, ...], meshes: list[Mesh]) -> Described:
    kind, path, *rest = row
    if kind == "c":
        return DescribedContainer(path, *rest)
    if kind == "v":
        return DescribedValue(path, *rest)
    dtype, shape, flavor, placement, tie, inline = rest
    return DescribedTensor(path, Spec(dtype, shape), flavor, _placement(placement, meshes), tie, inline)


def _placement(row: tuple[Any, ...] | None, meshes: list[Mesh]) -> Placement | None:
    if row is None:
        return None
    if row[0] == "m":
        return MeshPlacement(meshes[row[1]], tuple(parse_split(text) for text in row[2]))
    return BoxPlacement(tuple((Box(offsets, sizes), ranks) for offsets, sizes, ranks in row[1]))
