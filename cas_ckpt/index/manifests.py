"""Contents of nodes as rows, inserted and deleted with them: entries of trees, dtypes and shapes, grids, layouts.

    t_trees, t_entries   a tree node or page, and what it lists: one set of rows for each distinct node
    t_specs              the distinct dtypes and shapes; t_node_specs: which nodes list tensors of each
    t_tensors            tensor nodes: how a tensor of several chunks is cut
    t_layouts and those below it: see layouts.py

So rows follow change: commits that share a subtree share its rows, and a commit in which one entry changed brings the
rows of one page and of the nodes above it. What that costs, and what else was tried: docs/decisions/009-manifests.md.

Invariant: rows follow from the bytes of the node alone, whoever adds them and in whatever order. Names and dtypes that
no database can hold are stored with U+FFFD in place of what it cannot, and the exact name beside them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import count
from typing import Any, Final

from blake3 import blake3
from sqlalchemy import Connection, Table, func, select

from cas_ckpt.index import layouts
from cas_ckpt.index.database import KeyQuery, execute, insert_missing, rows_of
from cas_ckpt.index.rows import PackRecord
from cas_ckpt.index.schema import ENTRIES, NODE_SPECS, RAW_NAMES, SPECS, TENSORS, TREES, VALUES
from cas_ckpt.index.texts import storable, value_text
from cas_ckpt.objects.layouts import LayoutObject
from cas_ckpt.objects.nodes import EntryForm, NodeContent, RawTree, TensorNode
from cas_ckpt.objects.spec import Spec
from cas_ckpt.objects.state import CONTAINER_KINDS, render_name

MOST_DATA_BYTES = 16
"""Longer inline bytes are in `t_entries` by a hash, which is as long."""

_MOST_SPEC_CHARS = 200

_SPECS = KeyQuery(select(SPECS.c.spec, SPECS.c.spec_id), SPECS.c.spec)
_LAST_SPEC = select(func.max(SPECS.c.spec_id))


def add_contents(connection: Connection, records: Sequence[PackRecord], numbers: Mapping[bytes, int]) -> None:
    """Add the rows of all nodes in `records`.

    Args:
        numbers: Digest -> number of every node, and of what it names.
    """
    wanted = specs_in(content for record in records for _, content in record.contents)
    specs = _number_specs(connection, wanted) if wanted else {}
    for table, rows in content_rows(records, numbers, specs).items():
        insert_missing(connection, table, rows)
    for record in records:
        for digest, content in record.contents:
            if isinstance(content, LayoutObject):
                layouts.add_layout(connection, numbers[digest], content)


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
        tree_rows.append(_tree_row(number, tree))
        rows = _entry_rows(number, tree, specs, numbers)
        entry_rows += rows
        counts = Counter([row[_SPEC_ID] for row in rows])
        counted += [(spec_id, number, times) for spec_id, times in counts.items() if spec_id is not None]
        for position, row in enumerate(tree.rows if any("\ufffd" in row[_NAME] for row in rows) else ()):
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


def _tree_row(number: int, tree: RawTree) -> tuple[Any, ...]:
    return number, storable(tree.kind), tree.height, len(tree.rows), kept_attrs(tree)


def kept_attrs(tree: RawTree) -> bytes | None:
    """The attrs of a composite tensor, which say its shape; of other containers a hash, for comparing."""
    if tree.attrs is None or tree.kind not in CONTAINER_KINDS:
        return tree.attrs
    return blake3(tree.attrs).digest()


def _entry_rows(number: int, tree: RawTree, specs: SpecNumbers, numbers: Mapping[bytes, int]) -> list[_EntryRow]:
    rows: list[_EntryRow] = []
    for position, row in enumerate(tree.rows):
        form, last = row[1], row[-1]
        name = _name(row[0])[0]
        if form in (_TENSOR, _CHUNK):
            spec = specs[row[2], tuple(row[3])]
            rows.append((number, position, name, form + FLAVOR_STEP * row[4], spec, numbers[last], None))
        elif form == _INLINE:
            spec = specs[row[2], tuple(row[3])]
            rows.append((number, position, name, form + FLAVOR_STEP * row[4], spec, None, kept_data(last)))
        elif form == _VALUE:
            rows.append((number, position, name, form, specs["", (len(last),)], None, kept_data(last)))
        else:
            rows.append((number, position, name, form, None, numbers[last], None))
    return rows


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
    return {keys[key]: spec_id for key, spec_id in _SPECS.rows(connection, keys)}


def _number_specs(connection: Connection, wanted: Iterable[SpecPair]) -> SpecNumbers:
    """The numbers of all; new ones get a row."""
    known = read_specs(connection, wanted)
    missing = sorted(pair for pair in wanted if pair not in known)
    if missing:
        last = int(rows_of(connection, _LAST_SPEC)[0][0] or 0)
        new = dict(zip(missing, count(last + 1)))
        insert_missing(connection, SPECS, sorted(spec_row(pair, spec_id) for pair, spec_id in new.items()))
        known |= new
    return known


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
    execute(
        connection,
        "DELETE FROM t_node_specs WHERE (spec_id, node_id) IN (SELECT e.spec_id, e.node_id "
        "FROM orphaned h CROSS JOIN t_entries e WHERE e.node_id = h.object_id AND e.spec_id IS NOT NULL)",
    )
    for table, column in ((ENTRIES, "node_id"), (RAW_NAMES, "node_id"), (TREES, "node_id"), (TENSORS, "object_id")):
        execute(connection, f"DELETE FROM {table.name} WHERE {column} IN {gone}")
    layouts.drop_layouts(connection)
