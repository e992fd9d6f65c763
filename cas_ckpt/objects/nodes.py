"""Nodes: small structured objects as canonical bytes under an id. docs/format.md has their bytes.

    tensor nodes   spec, grid and chunk ids of one tensor, paged so that one changed chunk rewrites one page
    tree nodes     the named children of one container, paged so that a change stays small
    commit nodes   what a state *is* follows from the commit's `root`; when, why and at what cost is outside the
                   root, and so is who held it: layout nodes, layouts.py

Invariant: the bytes of a node follow from its content alone, whatever the order in which it came and
whatever was committed before; decoding accepts nothing that encoding would not write. A decoded tensor
node names exactly one chunk for each cell of a grid that fits its shape.
Knows nothing of refs, or of where nodes are stored.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import msgpack
from blake3 import blake3

from cas_ckpt.errors import CorruptionError, UnsupportedVersionError
from cas_ckpt.objects.digest import (
    DIGEST_BYTES,
    LEAF_BYTES,
    Digest,
    ObjectKind,
    object_id,
    pack_atom,
    pack_canonical,
    pack_map,
    unpack_canonical,
)
from cas_ckpt.objects.spec import Grid, Spec, shared_spec
from cas_ckpt.objects.state import Flavor, Name

if TYPE_CHECKING:
    from cas_ckpt.objects.layouts import LayoutObject

VERSION = 1
"""Version of every node's layout; a reader refuses a higher one."""

_HEADS = {kind: pack_canonical([kind.label, VERSION, None])[:-1] for kind in ObjectKind}
"""The first bytes of a node of each kind: [label, version, payload] without the payload."""


NodeContent: TypeAlias = "RawTree | TensorNode | LayoutObject"
"""Contents of nodes that the index has rows for."""


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
    data = _HEADS[kind] + payload
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
        grid = Grid(spec.shape, checked_shape(payload["cell"]), payload["leaf"])
        _check_grid(spec, grid)
        ids = "pages" if grid.num_cells > PAGE_CHUNKS else "chunks"
        if payload.keys() != {"dtype", "shape", "cell", "leaf", ids} or not spec.dtype:
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
    return tuple([Digest(joined[at : at + DIGEST_BYTES]) for at in range(0, len(joined), DIGEST_BYTES)])


def checked_shape(value: Any) -> tuple[int, ...]:
    """`value` as a shape. Raises CorruptionError if it is not one."""
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        raise CorruptionError("a shape is not a short list of integers")
    for size in value:
        if type(size) is not int or not 0 <= size <= _MAX_SIZE:
            raise CorruptionError("a shape holds something other than sizes")
    return tuple(value)


def _check_grid(spec: Spec, grid: Grid) -> None:
    item_bytes = spec.item_bytes if spec.is_known else 1  # whoever reads the data of a later dtype refuses it
    fits = len(grid.cell) == len(spec.shape)
    for size, whole in zip(grid.cell, spec.shape, strict=False):
        fits = fits and 1 <= size <= whole
    if not fits or math.prod(grid.cell) * item_bytes > MAX_CELL_BYTES:
        raise CorruptionError(f"the grid {grid.cell} does not fit {spec}")
    leaf = grid.leaf_bytes
    if type(leaf) is not int or not 0 < leaf <= LEAF_BYTES or leaf % item_bytes:
        raise CorruptionError(f"{leaf!r} is not a leaf size for {spec}")


INLINE_BYTES = 1024
"""Tensors and encoded values up to this size are in the tree node itself."""

PAGE_ENTRIES = 256
"""Most entries of one tree node or page."""

PAGE_WEIGHT = 16 * 1024
"""A page of a tree is closed when the weights of its entries reach this."""

ENTRY_WEIGHT = 64
"""Weight of an entry apart from its name and inline bytes."""

_BOUNDARY_MASK = 63
_KIND, _ATTRS, _HEIGHT, _ENTRIES = map(pack_canonical, ("kind", "attrs", "height", "entries"))


@dataclass(frozen=True, slots=True)
class ContainerEntry:
    """A child container: the id of its tree node."""

    name: Name
    node: Digest


@dataclass(slots=True, unsafe_hash=True)  # not frozen, as TensorItem, but never changed
class TensorEntry:
    """A tensor: by the id of its tensor node, or of its only chunk (`single`), or inline."""

    name: Name
    spec: Spec
    flavor: Flavor
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

FLAVORS = (Flavor.TORCH, Flavor.NUMPY, Flavor.VALUE)
"""By their numbers in entries."""


class EntryForm(IntEnum):
    """How an entry is written, by its number."""

    CONTAINER = 0
    TENSOR = 1
    CHUNK = 2
    INLINE = 3
    VALUE = 4
    PAGE = 5


_CONTAINER, _TENSOR, _CHUNK, _INLINE, _VALUE, _PAGE = map(int, EntryForm)

_Row: TypeAlias = list[Any]
"""An entry as it is written: its name, its form, and what the form has; bytes come last."""


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
    rows = list(map(_entry_row, _by_name(entries)))
    made: list[Node] = []
    height = 0
    while True:
        parts = _cut(rows)
        if len(parts) <= 1:
            break
        pages = [_tree_node(ObjectKind.TREE_PAGE, [(_HEIGHT, pack_canonical(height))], part) for part in parts]
        made += pages
        rows = [[part[0][0], _PAGE, page.digest] for part, page in zip(parts, pages, strict=True)]
        height += 1
    head = [(_HEIGHT, pack_canonical(height)), (_KIND, pack_canonical(kind)), (_ATTRS, pack_canonical(attrs))]
    made.append(_tree_node(ObjectKind.TREE, head, rows))
    return made


def _tree_node(kind: ObjectKind, head: list[tuple[bytes, bytes]], rows: Sequence[_Row]) -> Node:
    children = dict.fromkeys(row[-1] for row in rows if row[1] != _INLINE and row[1] != _VALUE)
    return packed_node(kind, pack_map([*head, (_ENTRIES, pack_atom(rows))]), children)


def _by_name(entries: Sequence[Entry]) -> list[Entry]:
    try:
        return sorted(entries, key=attrgetter("name"))  # code points are in the order of their UTF-8 bytes
    except TypeError:  # numbers and strings
        return sorted(entries, key=lambda entry: name_order(entry.name))


def _entry_row(entry: Entry) -> _Row:
    name: Name | bytes = entry.name
    if type(name) is str and not name.isascii():
        name = _wire_name(name)
    if isinstance(entry, TensorEntry):
        spec, node = entry.spec, entry.node
        form, data = (_INLINE, entry.inline) if node is None else (_CHUNK if entry.single else _TENSOR, node)
        return [name, form, spec.dtype, list(spec.shape), FLAVORS.index(entry.flavor), data]
    if isinstance(entry, ContainerEntry):
        return [name, _CONTAINER, entry.node]
    return [name, _VALUE, entry.data]


def _wire_name(name: str) -> str | bytes:
    """Strings with lone surrogates, which msgpack cannot carry as text, travel as bytes."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return name.encode("utf-8", "surrogatepass")
    return name


def _cut(rows: list[_Row]) -> list[list[_Row]]:
    """Pages of consecutive rows; one page when all fit one."""
    weights = list(map(_weight, rows))
    if len(rows) <= PAGE_ENTRIES and sum(weights) <= PAGE_WEIGHT:
        return [rows]
    parts, start, weight = [], 0, 0
    for at, (more, ends) in enumerate(zip(weights, _boundaries(tuple([row[0] for row in rows])), strict=True)):
        weight += more
        # A page always holds two rows at least, so that every level is half as long.
        if (ends or weight >= PAGE_WEIGHT or at + 1 - start >= PAGE_ENTRIES) and at > start:
            parts.append(rows[start : at + 1])
            start, weight = at + 1, 0
    if start < len(rows):
        parts.append(rows[start:])
    return parts


def _weight(row: _Row) -> int:
    name = row[0]
    if type(name) is str and not name.isascii():
        name = name.encode()
    return ENTRY_WEIGHT + (8 if isinstance(name, int) else len(name)) + len(row[-1])


@lru_cache(maxsize=16)
def _boundaries(names: tuple[Name | bytes, ...]) -> bytes:
    """1 where a page may end behind a name, else 0; kept for whole containers, which are committed again and again."""
    datas = (
        name if isinstance(name, bytes) else b"i%d" % name if isinstance(name, int) else name.encode() for name in names
    )
    return bytes(not blake3(data).digest(length=1)[0] & _BOUNDARY_MASK for data in datas)


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
        if len(payload) != (2 if page else 4) or type(rows) is not list or not fewest <= len(rows) <= PAGE_ENTRIES:
            raise CorruptionError("a tree node has other fields, or more or fewer entries, than it should")
    except (KeyError, TypeError) as error:
        raise CorruptionError(f"malformed tree node: {error!r}") from error
    if type(height) is not int or not 0 <= height < 16:
        raise CorruptionError("a tree node has no proper height")
    if not isinstance(kind, str) or bool(kind) is page or not (attrs is None or isinstance(attrs, bytes)):
        raise CorruptionError("a tree node has no proper kind")
    return RawTree(kind, attrs, height, rows)


def own_tree(node: Node) -> RawTree:
    """The tree node or page that was made just now, without the checks that `open_tree` makes of what was stored."""
    payload = msgpack.unpackb(node.data, strict_map_key=False)[-1]
    return RawTree(payload.get("kind", ""), payload.get("attrs"), payload["height"], payload["entries"])


def decode_tree(data: bytes, *, page: bool = False) -> TreeNode:
    """The tree node (or page) in `data`.

    Raises:
        CorruptionError: malformed, entries out of order or named twice.
    """
    return decode_rows(open_tree(data, page=page))


def decode_rows(raw: RawTree) -> TreeNode:
    """The tree node (or page) with its rows decoded; errors as for `decode_tree`."""
    entries: list[Entry] = []
    pages: list[PageEntry] = []
    before: Any = None
    for row in raw.rows:
        entry = decode_entry(row)
        if isinstance(entry, PageEntry):
            name: Any = entry.first
            pages.append(entry)
        else:
            name = entry.name
            entries.append(entry)
        # As `name_order` has it: code points are in the order of their UTF-8 bytes.
        if before is not None and (before >= name if type(before) is type(name) else type(name) is int):
            raise CorruptionError("the names of a tree node are out of order")
        before = name
    if pages if raw.height == 0 else entries:
        raise CorruptionError("a tree node mixes entries and pages")
    return TreeNode(raw.kind, raw.attrs, raw.height, tuple(entries), tuple(pages))


_MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError)
"""Exceptions that reading a malformed row raises."""


def decode_entry(row: list[Any]) -> Entry | PageEntry:
    """The entry in one row of a node.

    Raises:
        CorruptionError: malformed.
    """
    try:
        name = row[0]
        if type(name) is bytes:
            name = name.decode("utf-8", "surrogatepass")
            if _wire_name(name) != row[0]:  # a name that should have come as text
                name = None
        if (type(name) is not str and type(name) is not int) or type(row[1]) is not int:
            raise CorruptionError("an entry of a tree node has no proper name or form")
        form = row[1]
        if _TENSOR <= form <= _INLINE and len(row) == 6:  # nearly all, and not by `match`, which takes as long again
            _, _, dtype, shape, flavor, data = row
            is_data = type(data) is bytes and type(dtype) is str and dtype != ""
            if is_data and (len(data) <= INLINE_BYTES if form == _INLINE else len(data) == DIGEST_BYTES):
                if type(flavor) is not int or not 0 <= flavor < len(FLAVORS):
                    raise CorruptionError(f"{flavor!r} is not a flavor of a tensor")
                spec = (shared_spec if len(dtype) <= _MOST_CACHED else Spec)(dtype, checked_shape(shape))
                is_known = spec.is_known  # else it is of a later version: whoever reads this entry refuses it
                if form == _INLINE:
                    if is_known and len(data) != spec.num_bytes:
                        raise CorruptionError(f"{name!r}: {len(data)} inline bytes for {spec}")
                    return TensorEntry(name, spec, FLAVORS[flavor], None, data)
                if is_known and not INLINE_BYTES < spec.num_bytes <= (MAX_CELL_BYTES if form == _CHUNK else _MAX_SIZE):
                    where = "one chunk" if form == _CHUNK else "chunks"
                    raise CorruptionError(f"{name!r}: {spec} cannot be stored in {where}")
                return TensorEntry(name, spec, FLAVORS[flavor], Digest(data), None, form == _CHUNK)
        match row[1:]:
            case [0, bytes() as node] if len(node) == DIGEST_BYTES:
                return ContainerEntry(name, Digest(node))
            case [4, bytes() as data] if len(data) <= INLINE_BYTES:
                return ValueEntry(name, data)
            case [5, bytes() as node] if len(node) == DIGEST_BYTES:
                return PageEntry(name, Digest(node))
        raise CorruptionError(f"{name!r}: an entry of unknown form")
    except _MALFORMED as error:
        raise CorruptionError(f"malformed tree node: {error!r}") from error


_MOST_CACHED = 64
"""Characters of a dtype that is remembered: a stranger's may be as long as a node."""


MAX_KIND_CHARS = 64
_LINEAGE_KIND = re.compile(rf"[a-z0-9][a-z0-9-]{{0,{MAX_KIND_CHARS - 1}}}\Z")


@dataclass(frozen=True, slots=True)
class LineageEdge:
    """An origin of a state, apart from the history of its branch.

    Attributes:
        kind: How, e.g. "fine-tune-of": see `is_lineage_kind`.
        target: Id of the commit it was made from, which may be in another repository.
        note: Encoded plain value of the user's, or None.
    """

    kind: str
    target: Digest
    note: bytes | None = None


def is_lineage_kind(kind: str) -> bool:
    """Whether `kind` may name a kind of lineage: small letters, digits and '-'."""
    return _LINEAGE_KIND.match(kind) is not None


@dataclass(frozen=True, slots=True)
class CommitObject:
    """One commit.

    Attributes:
        root: Id of the state's tree.
        parents: Ids of the commits that it follows, none for the first.
        time_us: Microseconds since the epoch.
        step: Training step, or None.
        metrics: Numbers by name, in the user's order; of all NaNs only `math.nan`.
        meta: Encoded plain value of the user's metadata, or None.
        layout: Id of the layout node.
        stats: What the commit cost, counts and bytes by name.
        lineage: What the state was made from, in the user's order.
        provenance: Encoded plain value: where and by what it was made; None if nobody asked.
        signature: Of the commit's bytes without this field (signing.py); None: it is not signed.
    """

    root: Digest
    parents: tuple[Digest, ...]
    message: str
    author: str
    time_us: int
    step: int | None
    metrics: dict[str, float]
    meta: bytes | None
    layout: Digest
    stats: dict[str, int] = field(default_factory=dict)
    lineage: tuple[LineageEdge, ...] = ()
    provenance: bytes | None = None
    signature: bytes | None = None


MAX_SIGNATURE_BYTES = 16 * 1024
"""No signature is longer: one of RSA with 16,384 bits has about 4,200 bytes."""

_Types: TypeAlias = Mapping[str, tuple[type, ...]]

_DOUBLE = struct.Struct(">d")
_NAN = _DOUBLE.pack(math.nan)
"""The one NaN that a metric may be: others would give equal commits other ids."""

_COMMIT_TYPES: _Types = {
    "root": (bytes,), "parents": (list,), "message": (str,), "author": (str,), "time_us": (int,),
    "step": (int, type(None)), "metrics": (list,), "meta": (bytes, type(None)), "layout": (bytes,), "stats": (dict,),
}  # fmt: skip

_OPTIONAL_TYPES: _Types = {"lineage": (list,), "provenance": (bytes,), "signature": (bytes,)}


def commit_node(commit: CommitObject) -> Node:
    """The node of `commit`; optional fields are in it only where they say something."""
    lineage = [(edge.kind, edge.target, edge.note) for edge in commit.lineage] or None
    fields = {name: getattr(commit, name) for name in (*_COMMIT_TYPES, *_OPTIONAL_TYPES)}
    fields |= {"metrics": list(commit.metrics.items()), "lineage": lineage}
    payload = {name: value for name, value in fields.items() if name in _COMMIT_TYPES or value is not None}
    return make_node(ObjectKind.COMMIT, payload, (commit.root, commit.layout))


def split_signature(data: bytes) -> tuple[bytes, bytes | None]:
    """The bytes that the signature of the commit in `data` is of, and the signature; None: it has none.

    Raises:
        CorruptionError: malformed.
    """
    decode_commit(data)
    payload = open_node(ObjectKind.COMMIT, data)
    signature = payload.pop("signature", None)
    return make_node(ObjectKind.COMMIT, payload).data, signature


def decode_commit(data: bytes) -> CommitObject:
    """The commit in `data`.

    Raises:
        CorruptionError: malformed.
    """
    payload = open_node(ObjectKind.COMMIT, data)
    check_fields(payload, _COMMIT_TYPES, "commit", optional=_OPTIONAL_TYPES)
    for value in (payload["root"], payload["layout"], *payload["parents"]):
        if not isinstance(value, bytes) or len(value) != DIGEST_BYTES:
            raise CorruptionError("a commit names something that is not an id")
    for name in payload["stats"]:
        if type(name) is not str:
            raise CorruptionError("a commit names its stats by something that is not text")
    for count in (payload["time_us"], payload["step"] or 0, *payload["stats"].values()):
        if type(count) is not int or not -(1 << 63) <= count < 1 << 63:
            raise CorruptionError("a commit counts with something that is not a 64-bit integer")
    metrics: dict[str, float] = {}
    for row in payload["metrics"]:
        match row:
            case [str() as name, float() as number] if name not in metrics and (
                number == number or _DOUBLE.pack(number) == _NAN
            ):
                metrics[name] = math.nan if number != number else number  # the same object, so that it equals itself
            case _:
                raise CorruptionError("a commit has metrics that are not numbers by names, each name once")
    lineage: list[LineageEdge] = []
    for row in payload.get("lineage", ()):
        match row:
            case [str() as kind, bytes() as target, None | bytes() as note] if len(
                target
            ) == DIGEST_BYTES and is_lineage_kind(kind):
                lineage.append(LineageEdge(kind, Digest(target), note))
            case _:
                raise CorruptionError("a commit has a lineage that is not a list of kind, id and note")
    if "lineage" in payload and not lineage:
        raise CorruptionError("a commit has a lineage that is empty")
    if not 0 < len(payload.get("signature", b"-")) <= MAX_SIGNATURE_BYTES:
        raise CorruptionError(f"a commit has a signature that is not of 1 to {MAX_SIGNATURE_BYTES} bytes")
    parts = {"parents": tuple(payload["parents"]), "lineage": tuple(lineage), "metrics": metrics}
    return CommitObject(**payload | parts)


def check_fields(payload: Any, types: _Types, what: str, *, optional: _Types = MappingProxyType({})) -> None:
    """Refuse a payload that has other fields than `types` and some of `optional`, or fields of other types.

    Raises:
        CorruptionError: names what is wrong.
    """
    allowed = {**types, **optional}
    if not isinstance(payload, dict) or not types.keys() <= payload.keys() <= allowed.keys():
        raise CorruptionError(f"a {what} node has other fields than it should")
    for name, value in payload.items():
        if not isinstance(value, allowed[name]) or isinstance(value, bool):
            raise CorruptionError(f"field {name!r} of a {what} node is of the wrong type")
