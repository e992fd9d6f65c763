"""Contents of nodes as rows, inserted and deleted with them: entries of trees, dtypes and shapes, grids, layouts.

    t_trees, t_entries   a tree node or page, and what it lists: one set of rows for each distinct node
    t_specs              the distinct dtypes and shapes; t_node_specs: which nodes list tensors of each
    t_tensors            tensor nodes: how a tensor of several chunks is cut
    t_layouts            the world; its meshes (t_layout_meshes, t_layout_axes), keys that were one (t_layout_aliases)
    t_placements         key -> the division by which its tensor was held; each division is written once
    t_divisions          in parts: over a mesh (t_division_axes), in boxes (t_division_boxes), or whole on some ranks

So rows follow change: commits that share a subtree share its rows, and a commit in which one entry changed brings the
rows of one page and of the nodes above it. What that costs, and what else was tried: docs/decisions/009-manifests.md.

Invariant: rows follow from the bytes of the node alone, whoever adds them and in whatever order. Names and dtypes that
no database can hold are stored with U+FFFD in place of what it cannot, and the exact name beside them. What is read
back of a layout is what its node says (`Holders`), but for such keys; its rows go in and out some at a time, as it may
name a million keys, and ranks stay runs: what a node merely claims is never counted out.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import count, zip_longest
from typing import Any, Final

from blake3 import blake3
from sqlalchemy import Connection, Table, select

from cas_ckpt.errors import CorruptionError, InvalidInputError
from cas_ckpt.index.database import insert_missing
from cas_ckpt.index.db_errors import REBUILD
from cas_ckpt.index.rows import PackRecord, change, rows, rows_by_key, storable, value_text
from cas_ckpt.index.schema import (
    DIVISION_AXES,
    DIVISION_BOXES,
    DIVISIONS,
    ENTRIES,
    LAYOUT_ALIASES,
    LAYOUT_AXES,
    LAYOUT_MESHES,
    LAYOUTS,
    NODE_SPECS,
    PLACEMENTS,
    RAW_NAMES,
    SPECS,
    TENSORS,
    TREES,
    VALUES,
)
from cas_ckpt.objects.layouts import (
    Holders,
    InBoxes,
    LayoutMesh,
    LayoutObject,
    OverMesh,
    Part,
    Unexplained,
    Whole,
    holders_of,
    num_ranks,
    parse_runs,
    runs_text,
)
from cas_ckpt.objects.nodes import EntryForm, NodeContent, RawTree, TensorNode, checked_shape
from cas_ckpt.objects.spec import Box, Spec, mesh_text, parse_split
from cas_ckpt.objects.state import CONTAINER_KINDS, render_name

MOST_DATA_BYTES = 16
"""Longer inline bytes are in `t_entries` by a hash, which is as long."""

_MOST_SPEC_CHARS = 200


def add_contents(connection: Connection, records: Sequence[PackRecord], numbers: Mapping[bytes, int]) -> None:
    """Add the rows of all nodes in `records`.

    Args:
        numbers: Digest -> number of every node, and of what it names.
    """
    wanted = specs_in(content for record in records for _, content in record.contents)
    specs = read_specs(connection, wanted) if wanted else {}
    missing = sorted(pair for pair in wanted if pair not in specs)
    if missing:  # each of these gets a row
        last = int(rows(connection, "SELECT max(spec_id) FROM t_specs")[0][0] or 0)
        new = dict(zip(missing, count(last + 1)))
        insert_missing(connection, SPECS, sorted(spec_row(pair, spec_id) for pair, spec_id in new.items()))
        specs |= new
    for table, some in content_rows(records, numbers, specs).items():
        insert_missing(connection, table, some)
    for record in records:
        for digest, content in record.contents:
            if isinstance(content, LayoutObject):
                layout = layout_rows(numbers[digest], content)
                if insert_missing(connection, LAYOUTS, layout.pop(LAYOUTS)):
                    for table, more in layout.items():
                        insert_missing(connection, table, more)


def content_rows(
    records: Iterable[PackRecord], numbers: Mapping[bytes, int], specs: SpecNumbers
) -> dict[Table, list[tuple[Any, ...]]]:
    """The rows of trees, pages and tensor nodes, by table, each in the order of its key; layouts are left out.

    Args:
        numbers: Digest -> number of every node, and of what it names.
        specs: The numbers of all that `specs_in` finds in these nodes.
    """
    trees: dict[int, RawTree] = {}
    tensors: dict[int, TensorNode] = {}
    for record in records:
        for digest, content in record.contents:
            if isinstance(content, RawTree):
                trees[numbers[digest]] = content
            elif isinstance(content, TensorNode):
                tensors[numbers[digest]] = content
    tree_rows, entry_rows, counted, raw_names = [], list[_EntryRow](), [], []
    for number in sorted(trees):
        tree = trees[number]
        tree_rows.append((number, storable(tree.kind), tree.height, len(tree.rows), kept_attrs(tree)))
        listed = _entry_rows(number, tree, specs, numbers)
        entry_rows += listed
        counts = Counter([row[_SPEC_ID] for row in listed])
        counted += [(spec_id, number, times) for spec_id, times in counts.items() if spec_id is not None]
        for position, row in enumerate(tree.rows if any("\ufffd" in row[_NAME] for row in listed) else ()):
            if (raw := _name(row[0])[1]) is not None:
                raw_names.append((number, position, raw))
    values = {bytes(row[-1]) for tree in trees.values() for row in tree.rows if row[1] == _VALUE}
    tensor_rows = [_tensor_row(number, tensors[number], specs) for number in sorted(tensors)]
    return {
        TREES: tree_rows,
        ENTRIES: entry_rows,
        RAW_NAMES: raw_names,
        NODE_SPECS: sorted(counted),
        TENSORS: tensor_rows,
        VALUES: sorted((kept_data(data), len(data), text) for data in values if (text := value_text(data)) is not None),
    }


SpecPair = tuple[str, tuple[int, ...]]
"""Dtype and shape of a tensor; a plain value has no dtype, and its length for a shape."""

SpecNumbers = Mapping[SpecPair, int]
"""The numbers of dtypes and shapes in `t_specs`."""

_EntryRow = tuple[int, int, str, int, int | None, int | None, bytes | None]
_NAME: Final = 2
_SPEC_ID: Final = 4
"""Places of these columns."""

FLAVOR_STEP = 8
"""Offset in the form of a tensor for each flavor."""

_TENSOR, _CHUNK, _INLINE, _VALUE = map(int, (EntryForm.TENSOR, EntryForm.CHUNK, EntryForm.INLINE, EntryForm.VALUE))


def kept_attrs(tree: RawTree) -> bytes | None:
    """The attrs of a composite tensor, which say its shape; of other containers a hash, for comparing."""
    if tree.attrs is None or tree.kind not in CONTAINER_KINDS:
        return tree.attrs
    return blake3(tree.attrs).digest()


def _entry_rows(number: int, tree: RawTree, specs: SpecNumbers, numbers: Mapping[bytes, int]) -> list[_EntryRow]:
    found: list[_EntryRow] = []
    for position, row in enumerate(tree.rows):
        form, last = row[1], row[-1]
        name = _name(row[0])[0]
        if form in (_TENSOR, _CHUNK):
            spec = specs[row[2], tuple(row[3])]
            found.append((number, position, name, form + FLAVOR_STEP * row[4], spec, numbers[last], None))
        elif form == _INLINE:
            spec = specs[row[2], tuple(row[3])]
            found.append((number, position, name, form + FLAVOR_STEP * row[4], spec, None, kept_data(last)))
        elif form == _VALUE:
            found.append((number, position, name, form, specs["", (len(last),)], None, kept_data(last)))
        else:
            found.append((number, position, name, form, None, numbers[last], None))
    return found


def kept_data(data: bytes) -> bytes:
    """A key for inline bytes: equal for equal bytes of one length, and the bytes themselves if they are few."""
    return data if len(data) <= MOST_DATA_BYTES else blake3(data).digest(MOST_DATA_BYTES)


@lru_cache(maxsize=1 << 16)
def _name(name: str | int | bytes) -> tuple[str, bytes | None]:
    """A name as nodes hold it, as the component of keys that a database can hold; and itself, where that is not exact.

    Strings that are not valid Unicode are bytes in nodes.
    """
    known = name.decode("utf-8", "surrogatepass") if isinstance(name, bytes) else name
    text = render_name(known)
    kept = storable(text)
    return kept, None if kept == text else str(known).encode("utf-8", "surrogatepass")


def exact_name(text: str, raw: bytes | None) -> str:
    """The component of a key, as `render_name` wrote it.

    Args:
        text: As it is in `t_entries`.
        raw: As it is in `t_raw_names`; None: it is not there.
    """
    return text if raw is None else render_name(raw.decode("utf-8", "surrogatepass"))


def _tensor_row(number: int, tensor: TensorNode, specs: SpecNumbers) -> tuple[Any, ...]:
    spec, grid = tensor.spec, tensor.grid
    return number, specs[spec.dtype, spec.shape], json.dumps(list(grid.cell)), grid.leaf_bytes, grid.num_cells


# --- dtypes and shapes ------------------------------------------------------------------------


def specs_in(contents: Iterable[NodeContent]) -> set[SpecPair]:
    """The dtypes and shapes of all tensors in these nodes, and the lengths of plain values."""
    found: set[SpecPair] = set()
    for content in contents:
        if isinstance(content, RawTree):
            for row in content.rows:
                if len(row) > _MOST_OTHER_FIELDS:
                    found.add((row[2], tuple(row[3])))
                elif row[1] == _VALUE:
                    found.add(("", (len(row[-1]),)))
        elif isinstance(content, TensorNode):
            found.add((content.spec.dtype, content.spec.shape))
    return found


def read_specs(connection: Connection, wanted: Iterable[SpecPair]) -> dict[SpecPair, int]:
    """The numbers of those that have one."""
    keys = {spec_key(*pair): pair for pair in wanted}
    asked = "SELECT s.spec, s.spec_id FROM t_specs s WHERE s.spec {keys}"
    return {keys[key]: spec_id for key, spec_id in rows_by_key(connection, asked, keys)}


def spec_row(pair: SpecPair, spec_id: int) -> tuple[str, int, str, str, int, int]:
    """The row of `t_specs` for a dtype and shape."""
    dtype, shape = pair
    num_bytes = Spec(dtype, shape).shown_bytes if dtype else shape[0]
    return spec_key(dtype, shape), spec_id, storable(dtype), json.dumps(shape), len(shape), num_bytes


_MOST_OTHER_FIELDS = 3
"""Rows of nodes have more fields only for tensors."""


def spec_key(dtype: str, shape: tuple[int, ...]) -> str:
    """The key of a dtype and shape in `t_specs`: their usual notation, or its hash."""
    text = f"{dtype}{list(shape)}"
    if len(text) <= _MOST_SPEC_CHARS and text.isascii() and "\0" not in text:
        return text
    return blake3(text.encode("utf-8", "surrogatepass")).hexdigest()


# --- rows that go -----------------------------------------------------------------------------


def drop_contents(connection: Connection) -> None:
    """Remove the rows of the nodes whose numbers are in the table `orphaned`. Rows of dtypes and shapes stay."""
    gone = "(SELECT object_id FROM orphaned)"
    change(
        connection,
        "DELETE FROM t_node_specs WHERE (spec_id, node_id) IN (SELECT e.spec_id, e.node_id "
        "FROM orphaned h CROSS JOIN t_entries e WHERE e.node_id = h.object_id AND e.spec_id IS NOT NULL)",
    )
    for table in (ENTRIES, RAW_NAMES, TREES, TENSORS, LAYOUTS, *OF_LAYOUTS):
        change(connection, f"DELETE FROM {table.name} WHERE {next(iter(table.columns)).name} IN {gone}")


# --- layouts: the world, its meshes, and which ranks held what of the tensor under each key -----------

_ROWS_PER_READ = 10_000
OF_LAYOUTS = (LAYOUT_MESHES, LAYOUT_AXES, LAYOUT_ALIASES, PLACEMENTS, DIVISIONS, DIVISION_AXES, DIVISION_BOXES)


def layout_rows(number: int, layout: LayoutObject) -> dict[Table, Iterator[tuple[Any, ...]]]:
    """The rows of the layout node `number`, by table, each in the order of its key."""
    held = holders_of(layout)
    num_meshes = len(held.meshes) if layout.mesh else len(layout.meshes)
    mesh = storable(mesh_text(layout.mesh))
    return {
        LAYOUTS: iter([(number, layout.world_size, mesh, num_meshes, len(held.divisions), len(held.keys))]),
        LAYOUT_MESHES: (
            (number, at, math.prod(size for _, size in mesh.axes), runs_text(mesh.ranks))
            for at, mesh in enumerate(held.meshes)
            if mesh.axes
        ),
        LAYOUT_AXES: (
            (number, at, axis, storable(name), size)
            for at, mesh in enumerate(held.meshes)
            for axis, (name, size) in enumerate(mesh.axes)
        ),
        LAYOUT_ALIASES: (
            (number, at, position, storable(key))
            for at, group in enumerate(layout.aliases)
            for position, key in enumerate(group)
        ),
        PLACEMENTS: (
            (number, at, storable(key), division_id) for at, (key, division_id) in enumerate(held.keys.items())
        ),
        DIVISIONS: _division_rows(number, held),
        DIVISION_AXES: _division_axis_rows(number, held),
        DIVISION_BOXES: _box_rows(number, held),
    }


def layout_differs(connection: Connection, number: int, layout: LayoutObject) -> bool:
    """Whether the rows of the layout node `number` are others than they should be."""
    for table, wanted in layout_rows(number, layout).items():
        query = select(table).where(table.c.object_id == number).order_by(*table.primary_key)
        with connection.execute(query, execution_options={"yield_per": _ROWS_PER_READ}) as found:
            if any(one != other for one, other in zip_longest(wanted, map(tuple, found))):
                return True
    return False


_Rows = Iterator[tuple[Any, ...]]


def _parts(held: Holders) -> Iterator[tuple[int, int, Part]]:
    for division_id, parts in enumerate(held.divisions):
        for at, part in enumerate(parts):
            yield division_id, at, part


def _division_rows(number: int, held: Holders) -> _Rows:
    for division_id, at, part in _parts(held):
        if isinstance(part, OverMesh):
            axes = held.meshes[part.mesh].axes
            sizes = [size for _, size in axes]
            same = [size for size, split in zip(sizes, part.splits, strict=True) if split.dim is None]
            yield number, division_id, at, "mesh", part.mesh, None, math.prod(sizes), math.prod(same)
        elif isinstance(part, InBoxes):
            counts = [num_ranks(runs) for _, runs in part.boxes]
            same_of_all = counts[0] if len(set(counts)) == 1 else None
            yield number, division_id, at, "boxes", None, None, sum(counts), same_of_all
        elif isinstance(part, Whole):
            count = num_ranks(part.ranks)
            yield number, division_id, at, "whole", None, runs_text(part.ranks), count, count
        else:
            yield number, division_id, at, "unknown", None, None, 0, None


def _division_axis_rows(number: int, held: Holders) -> _Rows:
    for division_id, at, part in _parts(held):
        if isinstance(part, OverMesh):
            for axis, (split, (name, size)) in enumerate(zip(part.splits, held.meshes[part.mesh].axes, strict=True)):
                yield number, division_id, at, axis, storable(name), size, str(split), split.dim, split.stride
        elif isinstance(part, Unexplained):
            for axis, text in enumerate(part.texts):
                yield number, division_id, at, axis, "", 0, storable(text), None, 0


def _box_rows(number: int, held: Holders) -> _Rows:
    for division_id, at, part in _parts(held):
        for position, (box, runs) in enumerate(part.boxes if isinstance(part, InBoxes) else ()):
            yield number, division_id, at, position, json.dumps(box.offsets), json.dumps(box.sizes), runs_text(runs)


# --- and read back ------------------------------------------------------------------------------------


def read_holders(connection: Connection, digest: bytes) -> Holders | None:
    """Which ranks held what, by the rows of the layout node called `digest`; None if there are none of it.

    Raises:
        CorruptionError: the rows are not those of a layout.
    """
    asked = (
        "SELECT y.object_id, y.world_size, y.num_divisions FROM t_objects o JOIN t_layouts y "
        "ON y.object_id = o.object_id WHERE o.digest = :digest"
    )
    found = rows(connection, asked, digest=digest)
    if not found:
        return None
    ((number, world_size, num_divisions),) = found
    try:
        meshes = _read_meshes(connection, number)
        divisions = _read_divisions(connection, number, num_divisions)
    except (ValueError, TypeError, IndexError, KeyError, InvalidInputError, CorruptionError) as error:
        raise CorruptionError(f"the index has rows that are not of a layout ({error}): {REBUILD}") from error
    found_keys = {key: division_id for _, key, division_id in _rows(connection, PLACEMENTS, number)}
    if not _fits(world_size, meshes, divisions) or not {*found_keys.values()} <= {*range(len(divisions))}:
        raise CorruptionError(f"the index has rows that are not of a layout of {world_size} ranks: {REBUILD}")
    return Holders(world_size, meshes, divisions, found_keys)


def _fits(world_size: int, meshes: Sequence[LayoutMesh], divisions: Sequence[Sequence[Part]]) -> bool:
    """Whether parts are over meshes that are there, and all ranks are of this world."""
    listed = [mesh.ranks for mesh in meshes]
    for parts in divisions:
        if not parts:
            return False
        for part in parts:
            if isinstance(part, OverMesh):
                axes = meshes[part.mesh].axes if 0 <= part.mesh < len(meshes) else ()
                if not axes or len(part.splits) != len(axes):
                    return False
            elif isinstance(part, InBoxes):
                listed += [runs for _, runs in part.boxes]
            elif isinstance(part, Whole):
                listed.append(part.ranks)
    sizes = [math.prod(size for _, size in mesh.axes) for mesh in meshes if mesh.ranks]
    counts = [num_ranks(mesh.ranks) for mesh in meshes if mesh.ranks]
    last = max((first + (count - 1) * step for runs in listed for first, count, step in runs), default=0)
    return sizes == counts and 0 <= last < world_size


def _rows(connection: Connection, table: Table, number: int) -> Iterator[Any]:
    query = select(*list(table.c)[1:]).where(table.c.object_id == number).order_by(*table.primary_key)
    yield from connection.execute(query)


def _read_meshes(connection: Connection, number: int) -> tuple[LayoutMesh, ...]:
    axes: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for mesh, _, name, size in _rows(connection, LAYOUT_AXES, number):
        axes[mesh].append((name, size))
    meshes = {0: LayoutMesh((), ())}
    for mesh, _, ranks in _rows(connection, LAYOUT_MESHES, number):
        meshes[mesh] = LayoutMesh(tuple(axes[mesh]), parse_runs(ranks))
    return tuple(meshes[at] for at in range(len(meshes)))


def _read_divisions(connection: Connection, number: int, num_divisions: int) -> tuple[tuple[Part, ...], ...]:
    texts: dict[tuple[int, int], list[str]] = defaultdict(list)
    for division_id, at, _, _, _, placement, _, _ in _rows(connection, DIVISION_AXES, number):
        texts[division_id, at].append(placement)
    boxes: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for division_id, at, _, offsets, sizes, ranks in _rows(connection, DIVISION_BOXES, number):
        box = Box(checked_shape(json.loads(offsets)), checked_shape(json.loads(sizes)))
        if len(box.offsets) != len(box.sizes):
            raise CorruptionError(f"a box of {len(box.offsets)} offsets and {len(box.sizes)} sizes")
        boxes[division_id, at].append((box, parse_runs(ranks)))
    parts: dict[int, list[Part]] = defaultdict(list)
    for division_id, at, kind, mesh, ranks, _, _ in _rows(connection, DIVISIONS, number):
        if kind == "mesh":
            parts[division_id].append(OverMesh(mesh, tuple(map(parse_split, texts[division_id, at]))))
        elif kind == "boxes":
            parts[division_id].append(InBoxes(tuple(boxes[division_id, at])))
        elif kind == "whole":
            parts[division_id].append(Whole(parse_runs(ranks)))
        else:
            parts[division_id].append(Unexplained(tuple(texts[division_id, at])))
    if len(parts) != num_divisions or [*parts] != [*range(len(parts))]:
        raise CorruptionError(f"rows of {len(parts)} divisions, not of {num_divisions}")
    return tuple(map(tuple, parts.values()))
