"""What nodes say becomes rows, and goes with them: entries of trees, dtypes and shapes, grids, layouts.

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
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

from blake3 import blake3
from sqlalchemy import Connection, func, select

from cas_ckpt.index import layouts
from cas_ckpt.index.database import KeyQuery, execute, insert_missing, rows_of
from cas_ckpt.index.rows import PackRecord
from cas_ckpt.index.schema import ENTRIES, NODE_SPECS, SPECS, TENSORS, TREES
from cas_ckpt.index.texts import storable
from cas_ckpt.objects.nodes import EntryForm, RawTree, TensorNode
from cas_ckpt.objects.spec import Spec
from cas_ckpt.objects.state import CONTAINER_KINDS, Name, render_name

MOST_DATA_BYTES = 32
"""Longer inline bytes are in `t_entries` by their hash, which is as long."""

_MOST_SPEC_CHARS = 200

_SPECS = KeyQuery(select(SPECS.c.spec, SPECS.c.spec_id, SPECS.c.num_bytes), SPECS.c.spec)
_LAST_SPEC = select(func.max(SPECS.c.spec_id))


def add_contents(connection: Connection, records: Iterable[PackRecord], numbers: Mapping[bytes, int]) -> None:
    """Add the rows of all nodes in `records`.

    Args:
        numbers: Digest -> number of every node, and of what it names.
    """
    trees: dict[int, RawTree] = {}
    tensors: dict[int, TensorNode] = {}
    for record in records:
        for digest, content in record.contents:
            if isinstance(content, RawTree):
                trees[numbers[digest]] = content
            elif isinstance(content, TensorNode):
                tensors[numbers[digest]] = content
            else:
                layouts.add_layout(connection, numbers[digest], content)
    if not trees and not tensors:
        return
    specs = _number_specs(connection, trees.values(), tensors.values())
    tree_rows, entry_rows, spec_rows = [], list[_EntryRow](), []
    for number in sorted(trees):
        tree = trees[number]
        tree_rows.append(_tree_row(number, tree))
        rows = _entry_rows(number, tree, specs, numbers)
        entry_rows += rows
        counts = Counter(row[_SPEC_ID] for row in rows)
        spec_rows += [(spec_id, number, count) for spec_id, count in counts.items() if spec_id is not None]
    insert_missing(connection, TREES, tree_rows)
    insert_missing(connection, ENTRIES, entry_rows)
    insert_missing(connection, NODE_SPECS, sorted(spec_rows))
    insert_missing(connection, TENSORS, [_tensor_row(number, tensors[number], specs) for number in sorted(tensors)])


_Specs = Mapping[tuple[str, tuple[int, ...]], tuple[int, int]]
"""(dtype, shape) -> number, plain bytes."""

_EntryRow = tuple[int, int, str, int, int, int, int | None, int | None, bytes | None, bytes | None]
_SPEC_ID: Final = 6
"""Place of that column."""

_TENSOR, _CHUNK, _INLINE, _VALUE = map(int, (EntryForm.TENSOR, EntryForm.CHUNK, EntryForm.INLINE, EntryForm.VALUE))


def _tree_row(number: int, tree: RawTree) -> tuple[Any, ...]:
    return number, storable(tree.kind), tree.height, len(tree.rows), kept_attrs(tree)


def kept_attrs(tree: RawTree) -> bytes | None:
    """The attrs of a composite tensor, which say its shape; of other containers a hash, for comparing."""
    if tree.attrs is None or tree.kind not in CONTAINER_KINDS:
        return tree.attrs
    return blake3(tree.attrs).digest()


def _entry_rows(number: int, tree: RawTree, specs: _Specs, numbers: Mapping[bytes, int]) -> list[_EntryRow]:
    rows: list[_EntryRow] = []
    for position, row in enumerate(tree.rows):
        name, form, last = row[0], row[1], row[-1]
        text, raw = _name(name) if type(name) is str else _other_name(name)
        if form in (_TENSOR, _CHUNK):
            spec_id, num_bytes = specs[row[2], tuple(row[3])]
            rows.append((number, position, text, form, row[4], num_bytes, spec_id, numbers[last], None, raw))
        elif form == _INLINE:
            spec_id, _ = specs[row[2], tuple(row[3])]
            rows.append((number, position, text, form, row[4], len(last), spec_id, None, kept_data(last), raw))
        elif form == _VALUE:
            rows.append((number, position, text, form, 0, len(last), None, None, kept_data(last), raw))
        else:
            rows.append((number, position, text, form, 0, 0, None, numbers[last], None, raw))
    return rows


def kept_data(data: bytes) -> bytes:
    """What is kept of inline bytes: equal for equal bytes of one length, and the bytes themselves if they are few."""
    return data if len(data) <= MOST_DATA_BYTES else blake3(data).digest()


@lru_cache(maxsize=1 << 16)
def _name(name: str) -> tuple[str, bytes | None]:
    """The name as a component of keys that a database can hold; and itself, where that is not exact."""
    text = render_name(name)
    kept = storable(text)
    return kept, None if kept == text else name.encode("utf-8", "surrogatepass")


def _other_name(name: int | bytes) -> tuple[str, bytes | None]:
    """The same of a number, and of a string that is not valid Unicode, which nodes hold as bytes."""
    return (str(name), None) if isinstance(name, int) else _name(name.decode("utf-8", "surrogatepass"))


def exact_name(text: str, raw: bytes | None) -> Name:
    """The component of a key, as `render_name` wrote it, that the two columns of a row stand for."""
    return text if raw is None else render_name(raw.decode("utf-8", "surrogatepass"))


def _tensor_row(number: int, tensor: TensorNode, specs: _Specs) -> tuple[Any, ...]:
    spec, grid = tensor.spec, tensor.grid
    spec_id, _ = specs[spec.dtype, spec.shape]
    return number, spec_id, json.dumps(list(grid.cell)), grid.leaf_bytes, grid.num_cells


# --- dtypes and shapes ------------------------------------------------------------------------


def _number_specs(connection: Connection, trees: Iterable[RawTree], tensors: Iterable[TensorNode]) -> _Specs:
    """The numbers of all dtypes and shapes in these nodes; new ones get a row."""
    wanted = {(row[2], tuple(row[3])) for tree in trees for row in tree.rows if len(row) > _MOST_OTHER_FIELDS}
    wanted.update((tensor.spec.dtype, tensor.spec.shape) for tensor in tensors)
    keys = {pair: spec_key(*pair) for pair in wanted}
    known = {key: (spec_id, num_bytes) for key, spec_id, num_bytes in _SPECS.rows(connection, keys.values())}
    missing = sorted((key, pair) for pair, key in keys.items() if key not in known)
    if missing:
        last = int(rows_of(connection, _LAST_SPEC)[0][0] or 0)
        rows = []
        for spec_id, (key, (dtype, shape)) in enumerate(missing, last + 1):
            num_bytes = Spec(dtype, shape).shown_bytes
            rows.append((key, spec_id, storable(dtype), json.dumps(shape), len(shape), num_bytes))
            known[key] = spec_id, num_bytes
        insert_missing(connection, SPECS, rows)
    return {pair: known[key] for pair, key in keys.items()}


_MOST_OTHER_FIELDS = 3
"""Rows of nodes have more fields only for tensors."""


def spec_key(dtype: str, shape: tuple[int, ...]) -> str:
    """What names a dtype and shape in `t_specs`: as people write them, or a hash of that."""
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
    for table, column in ((ENTRIES, "node_id"), (TREES, "node_id"), (TENSORS, "object_id")):
        execute(connection, f"DELETE FROM {table.name} WHERE {column} IN {gone}")
    layouts.drop_layouts(connection)
