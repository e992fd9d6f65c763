"""Nodes: small structured objects as canonical bytes under an id.

Invariant: the bytes of a node follow from its content alone; decoding accepts nothing that
encoding would not write. What the kinds of nodes hold: objects/nodes.py, objects/nodes.py, commit.py.
Knows nothing of where nodes are stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeAlias

from blake3 import blake3

from cas_ckpt.errors import CorruptionError, UnsupportedVersionError
from cas_ckpt.objects.canonical import pack_array, pack_canonical, pack_map, pack_rows, unpack_canonical
from cas_ckpt.objects.digest import DIGEST_BYTES, LEAF_BYTES, Digest, ObjectKind, object_id
from cas_ckpt.objects.spec import Grid, Spec
from cas_ckpt.objects.state import Name

VERSION = 1
"""Version of every node's layout; a reader refuses a higher one."""

_LABELS = {kind: pack_canonical(kind.label) for kind in ObjectKind}


@dataclass(frozen=True, slots=True)
class Node:
    """A structured object ready to be stored: its kind, id, bytes and the ids it names."""

    kind: ObjectKind
    digest: Digest
    data: bytes
    children: tuple[Digest, ...] = ()


def make_node(kind: ObjectKind, payload: Any, children: Iterable[Digest] = ()) -> Node:
    """The node of `kind` with this payload (lists, dicts, str, int, bytes, None)."""
    return packed_node(kind, pack_canonical(payload), children)


def packed_node(kind: ObjectKind, payload: bytes, children: Iterable[Digest]) -> Node:
    """The node of `kind` whose payload is packed already."""
    data = pack_array([_LABELS[kind], pack_canonical(VERSION), payload])
    return Node(kind, object_id(kind.label, data), data, tuple(children))


def open_node(kind: ObjectKind, data: bytes) -> Any:
    """The payload of a node of `kind`.

    Raises:
        CorruptionError: not canonical, or another kind.
        UnsupportedVersionError: written by a newer version.
    """
    head = unpack_canonical(data)
    if not isinstance(head, list) or len(head) != 3 or head[0] != kind.label or type(head[1]) is not int:
        raise CorruptionError(f"expected a {kind.label} node, found something else: run repo.rebuild_index()")
    if head[1] < 1:
        raise CorruptionError(f"a {kind.label} node of version {head[1]}, which never was")
    if head[1] > VERSION:
        raise UnsupportedVersionError(
            f"{kind.label} node of version {head[1]}, this cas_ckpt reads up to {VERSION}: upgrade cas_ckpt"
        )
    return head[2]


# DOC of cas_ckpt.objects.nodes:
# Tensor nodes: spec, grid and chunk ids, paged so that one changed chunk rewrites one page.
#
# Invariant: a decoded node names exactly one chunk for each cell of a grid that fits its shape.
#

PAGE_CHUNKS = 256
"""Chunk ids in one page of a tensor node."""

MAX_DIMENSIONS = 64

MAX_CELL_BYTES = 64 * 1024 * 1024
"""No version writes longer cells, so a reader never allocates more for one, whatever a node claims."""

_MAX_SIZE = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class TensorNode:
    """Spec, grid and chunk ids of a tensor with more than one cell.

    Attributes:
        chunks: Ids in C order of the cells, when they fit one page, else empty.
        pages: Ids of the pages of 256 chunk ids otherwise.
    """

    spec: Spec
    grid: Grid
    chunks: tuple[Digest, ...]
    pages: tuple[Digest, ...]


def tensor_nodes(spec: Spec, grid: Grid, chunks: Sequence[Digest]) -> list[Node]:
    """The nodes of a tensor: its pages of chunk ids, if it needs any, then the tensor node."""
    pages = []
    if len(chunks) > PAGE_CHUNKS:
        parts = [chunks[at : at + PAGE_CHUNKS] for at in range(0, len(chunks), PAGE_CHUNKS)]
        pages = [make_node(ObjectKind.CHUNK_PAGE, b"".join(part), part) for part in parts]
    ids = [page.digest for page in pages] or list(chunks)
    payload = {
        "dtype": spec.dtype,
        "shape": list(spec.shape),
        "cell": list(grid.cell),
        "leaf": grid.leaf_bytes,
        "pages" if pages else "chunks": b"".join(ids),
    }
    return [*pages, make_node(ObjectKind.TENSOR, payload, ids)]


def decode_tensor(data: bytes) -> TensorNode:
    """The tensor node in `data`.

    Raises:
        CorruptionError: malformed, or a grid that does not fit the shape.
    """
    payload = open_node(ObjectKind.TENSOR, data)
    try:
        spec = Spec(payload["dtype"], checked_shape(payload["shape"]))
        grid = _checked_grid(spec, Grid(spec.shape, checked_shape(payload["cell"]), payload["leaf"]))
        ids = "pages" if grid.num_cells > PAGE_CHUNKS else "chunks"
        if payload.keys() != {"dtype", "shape", "cell", "leaf", ids}:
            raise CorruptionError(f"a tensor node of {spec} has other fields than it should")
        chunks = _digests(payload.get("chunks", b""))
        pages = _digests(payload.get("pages", b""))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptionError(f"malformed tensor node: {error!r}") from error
    expected = grid.num_cells
    if expected < 2 or len(chunks or pages) != (expected if chunks else -(-expected // PAGE_CHUNKS)):
        raise CorruptionError(f"tensor node of {spec} should name {expected} chunks and does not")
    return TensorNode(spec, grid, chunks, pages)


def decode_chunk_page(data: bytes) -> tuple[Digest, ...]:
    """The chunk ids of one page, in order."""
    ids = _digests(open_node(ObjectKind.CHUNK_PAGE, data))
    if not 0 < len(ids) <= PAGE_CHUNKS:
        raise CorruptionError(f"a page of {len(ids)} chunk ids, not of 1 to {PAGE_CHUNKS}")
    return ids


def _digests(joined: Any) -> tuple[Digest, ...]:
    if not isinstance(joined, bytes) or len(joined) % DIGEST_BYTES:
        raise CorruptionError("a list of ids is not a whole number of ids")
    return tuple(Digest(joined[at : at + DIGEST_BYTES]) for at in range(0, len(joined), DIGEST_BYTES))


def checked_shape(value: Any) -> tuple[int, ...]:
    """`value` as a shape. Raises CorruptionError if it is none."""
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        raise CorruptionError("a shape is not a short list of integers")
    if any(type(size) is not int or not 0 <= size <= _MAX_SIZE for size in value):
        raise CorruptionError("a shape holds something other than sizes")
    return tuple(value)


def _checked_grid(spec: Spec, grid: Grid) -> Grid:
    item_bytes = spec.item_bytes if spec.is_known else 1  # whoever reads the data of a later dtype refuses it
    fits = len(grid.cell) == len(spec.shape) and all(1 <= a <= b for a, b in zip(grid.cell, spec.shape, strict=True))
    if not fits or math.prod(grid.cell) * item_bytes > MAX_CELL_BYTES:
        raise CorruptionError(f"the grid {grid.cell} does not fit {spec}")
    leaf = grid.leaf_bytes
    if type(leaf) is not int or not 0 < leaf <= LEAF_BYTES or leaf % item_bytes:
        raise CorruptionError(f"{leaf!r} is no leaf size for {spec}")
    return grid


# DOC of cas_ckpt.objects.nodes:
# Tree nodes: the named children of one container, paged so that a change stays small.
#
# Invariant: the nodes of a container follow from the set of its entries alone, in whatever
# order they come and whatever was committed before.
#

INLINE_BYTES = 1024
"""Tensors and encoded values up to this size stand in the tree node itself."""

PAGE_ENTRIES = 256
"""Most entries of one tree node or page."""

PAGE_WEIGHT = 16 * 1024
"""A page of a tree is closed when the weights of its entries reach this."""

ENTRY_WEIGHT = 64
"""Weight of an entry apart from its name and inline bytes."""

_BOUNDARY_MASK = 63
_ENTRIES = pack_canonical("entries")


@dataclass(frozen=True, slots=True)
class ContainerEntry:
    """A child container: the id of its tree node."""

    name: Name
    node: Digest


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor: by the id of its tensor node, or of its only chunk (`single`), or inline."""

    name: Name
    spec: Spec
    flavor: str
    node: Digest | None
    inline: bytes | None
    single: bool = False


@dataclass(frozen=True, slots=True)
class ValueEntry:
    """A small plain value, encoded by objects/values.py."""

    name: Name
    data: bytes


@dataclass(frozen=True, slots=True)
class PageEntry:
    """A page of further entries: the first name below it and its id."""

    first: Name
    node: Digest


Entry: TypeAlias = ContainerEntry | TensorEntry | ValueEntry

FLAVORS = ("torch", "numpy", "value")
"""What a tensor's bytes are: a torch tensor, a numpy array, an encoded plain value."""

_CONTAINER, _TENSOR, _CHUNK, _INLINE, _VALUE, _PAGE = range(6)


@dataclass(frozen=True, slots=True)
class TreeNode:
    """One decoded tree node or page: entries, or pages of entries when `height` > 0."""

    kind: str
    attrs: bytes | None
    height: int
    entries: tuple[Entry, ...]
    pages: tuple[PageEntry, ...]


def name_order(name: Name) -> tuple[int, int, bytes]:
    """Sort key of names: integers by value, then strings by their UTF-8 bytes."""
    return (0, name, b"") if isinstance(name, int) else (1, 0, name.encode("utf-8", "surrogatepass"))


def tree_nodes(kind: str, attrs: bytes | None, entries: Sequence[Entry]) -> list[Node]:
    """The nodes of one container, its tree node last. `entries` may come in any order.

    More than 256 entries, or 16 KiB of weight, are cut into pages at names whose hash ends
    in six zero bits, so that inserting one entry rewrites one page and not all that follow
    (the idea of prolly trees, as in Dolt and Noms).
    """
    ordered = sorted(entries, key=lambda entry: name_order(entry.name))
    rows: list[tuple[list[Any], Digest | None]] = [_entry_row(entry) for entry in ordered]
    made: list[Node] = []
    height = 0
    while True:
        parts = _cut(rows)
        if len(parts) <= 1:
            break
        pages = [_tree_node(ObjectKind.TREE_PAGE, {"height": height}, part) for part in parts]
        made += pages
        rows = [([part[0][0][0], _PAGE, page.digest], page.digest) for part, page in zip(parts, pages, strict=True)]
        height += 1
    made.append(_tree_node(ObjectKind.TREE, {"height": height, "kind": kind, "attrs": attrs}, rows))
    return made


def _tree_node(kind: ObjectKind, head: dict[str, Any], rows: list[tuple[list[Any], Digest | None]]) -> Node:
    pairs = [(pack_canonical(key), pack_canonical(value)) for key, value in head.items()]
    pairs.append((_ENTRIES, pack_rows([row for row, _ in rows])))
    return packed_node(kind, pack_map(pairs), dict.fromkeys(child for _, child in rows if child is not None))


def _entry_row(entry: Entry) -> tuple[list[Any], Digest | None]:
    if isinstance(entry, ValueEntry):
        return [_wire_name(entry.name), _VALUE, entry.data], None
    if isinstance(entry, ContainerEntry):
        return [_wire_name(entry.name), _CONTAINER, entry.node], entry.node
    form = _INLINE if entry.node is None else _CHUNK if entry.single else _TENSOR
    head = [_wire_name(entry.name), form]
    spec = [entry.spec.dtype, list(entry.spec.shape), FLAVORS.index(entry.flavor)]
    return [*head, *spec, entry.inline if entry.node is None else entry.node], entry.node


def _wire_name(name: Name) -> Name | bytes:
    """Strings with lone surrogates, which msgpack cannot carry as text, travel as bytes."""
    if isinstance(name, int):
        return name
    try:
        name.encode()
    except UnicodeEncodeError:
        return name.encode("utf-8", "surrogatepass")
    return name


def _cut(rows: list[tuple[list[Any], Digest | None]]) -> list[list[tuple[list[Any], Digest | None]]]:
    """Pages of consecutive rows; one page when all fit one."""
    weights = [_weight(row) for row, _ in rows]
    if len(rows) <= PAGE_ENTRIES and sum(weights) <= PAGE_WEIGHT:
        return [rows]
    parts, start, weight = [], 0, 0
    for at, (row, _) in enumerate(rows):
        weight += weights[at]
        # A page always holds two rows at least, so that every level is half as long.
        full = at > start and (weight >= PAGE_WEIGHT or at + 1 - start >= PAGE_ENTRIES or _is_boundary(row[0]))
        if full:
            parts.append(rows[start : at + 1])
            start, weight = at + 1, 0
    if start < len(rows):
        parts.append(rows[start:])
    return parts


def _weight(row: list[Any]) -> int:
    last = row[-1] if isinstance(row[-1], bytes) else b""
    name = row[0]
    return ENTRY_WEIGHT + len(last) + (8 if isinstance(name, int) else len(_name_bytes(name)))


def _name_bytes(name: Name | bytes) -> bytes:
    if isinstance(name, bytes):
        return name
    return b"i%d" % name if isinstance(name, int) else name.encode()


def _is_boundary(name: Name | bytes) -> bool:
    return blake3(_name_bytes(name)).digest(length=1)[0] & _BOUNDARY_MASK == 0


@dataclass(frozen=True, slots=True)
class RawTree:
    """A tree node or page whose rows are not decoded: equal entries have equal rows, in any node.

    Attributes:
        rows: Lists that begin with the name as it is stored; `decode_entry` decodes one.
    """

    kind: str
    attrs: bytes | None
    height: int
    rows: list[list[Any]]


def open_tree(data: bytes, *, page: bool = False) -> RawTree:
    """The tree node (or page) in `data`, for comparing; its rows are only known to be canonical msgpack.

    Raises:
        CorruptionError: malformed.
    """
    payload = open_node(ObjectKind.TREE_PAGE if page else ObjectKind.TREE, data)
    try:
        height, rows = payload["height"], payload["entries"]
        kind, attrs = ("", None) if page else (payload["kind"], payload["attrs"])
        fewest = 1 if page or type(height) is not int else 2 if height > 0 else 0
        if len(payload) != (2 if page else 4) or not fewest <= len(rows) <= PAGE_ENTRIES:
            raise CorruptionError("a tree node has other fields, or more or fewer entries, than it should")
    except (KeyError, TypeError) as error:
        raise CorruptionError(f"malformed tree node: {error!r}") from error
    if type(height) is not int or not 0 <= height < 16:
        raise CorruptionError("a tree node has no proper height")
    if not isinstance(kind, str) or not (attrs is None or isinstance(attrs, bytes)):
        raise CorruptionError("a tree node has no proper kind")
    return RawTree(kind, attrs, height, rows)


def decode_entry(row: list[Any]) -> Entry | PageEntry:
    """The entry in one row of a node.

    Raises:
        CorruptionError: malformed.
    """
    try:
        return _decode_row(row)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise CorruptionError(f"malformed tree node: {error!r}") from error


def decode_tree(data: bytes, *, page: bool = False) -> TreeNode:
    """The tree node (or page) in `data`.

    Raises:
        CorruptionError: malformed, entries out of order or named twice.
    """
    raw = open_tree(data, page=page)
    decoded = [decode_entry(row) for row in raw.rows]
    pages = tuple(row for row in decoded if isinstance(row, PageEntry))
    entries = tuple(row for row in decoded if not isinstance(row, PageEntry))
    _check_tree(raw.height, entries, pages)
    return TreeNode(raw.kind, raw.attrs, raw.height, entries, pages)


def _check_tree(height: int, entries: tuple[Entry, ...], pages: tuple[PageEntry, ...]) -> None:
    if pages if height == 0 else entries:
        raise CorruptionError("a tree node mixes entries and pages")
    keys = [name_order(entry.name) for entry in entries] or [name_order(page.first) for page in pages]
    if any(a >= b for a, b in pairwise(keys)):
        raise CorruptionError("the names of a tree node are out of order")


def _decode_row(row: list[Any]) -> Entry | PageEntry:
    name = row[0].decode("utf-8", "surrogatepass") if isinstance(row[0], bytes) else row[0]
    if type(name) not in (int, str) or type(row[1]) is not int or _wire_name(name) != row[0]:
        raise CorruptionError("an entry of a tree node has no proper name or form")
    match row[1:]:
        case [0, bytes() as node] if len(node) == DIGEST_BYTES:
            return ContainerEntry(name, Digest(node))
        case [1 | 2 as form, str() as dtype, shape, flavor, bytes() as node] if len(node) == DIGEST_BYTES:
            spec = _stored_spec(name, dtype, shape, single=form == _CHUNK)
            return TensorEntry(name, spec, _flavor(flavor), Digest(node), None, form == _CHUNK)
        case [3, str() as dtype, shape, flavor, bytes() as inline] if len(inline) <= INLINE_BYTES:
            spec = Spec(dtype, checked_shape(shape))
            if spec.is_known and len(inline) != spec.num_bytes:
                raise CorruptionError(f"{name!r}: {len(inline)} inline bytes for {spec}")
            return TensorEntry(name, spec, _flavor(flavor), None, inline)
        case [4, bytes() as data] if len(data) <= INLINE_BYTES:
            return ValueEntry(name, data)
        case [5, bytes() as node] if len(node) == DIGEST_BYTES:
            return PageEntry(name, Digest(node))
    raise CorruptionError(f"{name!r}: an entry of unknown form")


def _flavor(number: Any) -> str:
    if type(number) is not int or not 0 <= number < len(FLAVORS):
        raise CorruptionError(f"{number!r} is no flavor of a tensor")
    return FLAVORS[number]


def _stored_spec(name: Name, dtype: str, shape: Any, *, single: bool) -> Spec:
    """The spec of a tensor that does not stand inline, if its size allows that."""
    known = _spec_in_chunks if len(dtype) <= _MOST_CACHED else _spec_in_chunks.__wrapped__
    spec, fits = known(dtype, checked_shape(shape), single)
    if not fits:
        raise CorruptionError(f"{name!r}: {spec} cannot stand in {'one chunk' if single else 'chunks'}")
    return spec


_MOST_CACHED = 64
"""Characters of a dtype that is remembered: a stranger's may be as long as a node."""


@lru_cache(maxsize=4096)
def _spec_in_chunks(dtype: str, shape: tuple[int, ...], single: bool) -> tuple[Spec, bool]:
    """The spec, and whether such a tensor may stand in chunks, or in one. Models repeat their shapes."""
    spec = Spec(dtype, shape)
    if not spec.is_known:  # a dtype of a later version: whoever reads this entry refuses it
        return spec, True
    return spec, INLINE_BYTES < spec.num_bytes <= (MAX_CELL_BYTES if single else _MAX_SIZE)
