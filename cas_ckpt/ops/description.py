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
from cas_ckpt.objects.placement import Placement, pack_placement, unpack_placement
from cas_ckpt.objects.spec import Spec
from cas_ckpt.objects.state import RANKS, Container, Item, Path, TensorItem, ValueItem, render_key
from cas_ckpt.objects.tree_node import INLINE_BYTES, name_order

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
    """`entries` as bytes: the placements, and everything else.

    Apart, because ranks often differ in the placements alone: groups of a tensor parallel job over
    meshes of their own, or ranks that name only their own boxes.
    """
    table = _Table()
    rows = [_row(entry, table) for entry in entries]
    placements = [pack_placement(placement) for placement in table.placements]
    return msgpack.packb(placements), msgpack.packb(rows, use_bin_type=True, unicode_errors="surrogatepass")


def unpack_description(placements: bytes, rows: bytes) -> list[Described]:
    """What `pack_description` packed, on another rank of this job."""
    table = [unpack_placement(packed) for packed in msgpack.unpackb(placements)]
    found = msgpack.unpackb(rows, use_list=False, strict_map_key=False, unicode_errors="surrogatepass")
    return [_entry(row, table) for row in found]


class _Table:
    """Each distinct placement once, in the order in which they come."""

    def __init__(self) -> None:
        self._numbers: dict[Placement, int] = {}
        self._seen: dict[int, int] = {}

    @property
    def placements(self) -> list[Placement]:
        """All of them."""
        return list(self._numbers)

    def number(self, placement: Placement) -> int:
        """Where `placement` stands."""
        # Hashing one looks at every rank of its mesh: once per object, not per tensor.
        found = self._seen.get(id(placement))
        if found is None:
            found = self._seen[id(placement)] = self._numbers.setdefault(placement, len(self._numbers))
        return found


def _row(entry: Described, table: _Table) -> list[Any]:
    if isinstance(entry, DescribedContainer):
        return ["c", entry.path, entry.kind, entry.attrs, entry.length]
    if isinstance(entry, DescribedValue):
        return ["v", entry.path, entry.data]
    spec, placement = entry.spec, None if entry.placement is None else table.number(entry.placement)
    return ["t", entry.path, spec.dtype, spec.shape, entry.flavor, placement, entry.tie, entry.inline]


def _entry(row: tuple[Any, ...], placements: list[Placement]) -> Described:
    kind, path, *rest = row
    if kind == "c":
        return DescribedContainer(path, *rest)
    if kind == "v":
        return DescribedValue(path, *rest)
    dtype, shape, flavor, number, tie, inline = rest
    placement = None if number is None else placements[number]
    return DescribedTensor(path, Spec(dtype, shape), flavor, placement, tie, inline)
