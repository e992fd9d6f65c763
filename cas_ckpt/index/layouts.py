"""Layouts as rows: the world, its meshes, and which ranks held what of the tensor under each key.

    t_layouts          the world; its meshes (t_layout_meshes, t_layout_axes), keys that were one (t_layout_aliases)
    t_placements       key -> the division by which its tensor was held; each division is written once
    t_divisions        in parts: over a mesh (t_division_axes), in boxes (t_division_boxes), or whole on some ranks

Invariant: one set of rows for each distinct layout node, however many commits name it; what is read back is what the
node says (`Holders`), but for keys that no database can hold. Rows go in and out some at a time: a layout may name a
million keys. Ranks stay runs: what a node merely claims is never counted out.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, zip_longest
from typing import Any

from sqlalchemy import Connection, Table, select

from cas_ckpt.errors import CorruptionError, InvalidInputError
from cas_ckpt.index.database import OBJECTS_BY_ID, execute, insert_missing
from cas_ckpt.index.db_errors import REBUILD
from cas_ckpt.index.schema import (
    DIVISION_AXES,
    DIVISION_BOXES,
    DIVISIONS,
    LAYOUT_ALIASES,
    LAYOUT_AXES,
    LAYOUT_MESHES,
    LAYOUTS,
    PLACEMENTS,
)
from cas_ckpt.index.texts import storable
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
)
from cas_ckpt.objects.nodes import checked_shape
from cas_ckpt.objects.rank_runs import num_ranks, parse_runs, runs_text
from cas_ckpt.objects.spec import Box, mesh_text, parse_split

_ROWS_PER_INSERT = 10_000
_ALL = (LAYOUTS, LAYOUT_MESHES, LAYOUT_AXES, LAYOUT_ALIASES, PLACEMENTS, DIVISIONS, DIVISION_AXES, DIVISION_BOXES)


def add_layout(connection: Connection, number: int, layout: LayoutObject) -> None:
    """Add the rows of the layout node `number`, unless they are there."""
    rows = layout_rows(number, layout)
    if insert_missing(connection, LAYOUTS, list(rows.pop(LAYOUTS))):
        for table, some in rows.items():
            _insert(connection, table, some)


def layout_rows(number: int, layout: LayoutObject) -> dict[Table, Iterator[tuple[Any, ...]]]:
    """The rows of the layout node `number`, by table, each in the order of its key."""
    held = holders_of(layout)
    num_meshes = len(held.meshes) if layout.mesh else len(layout.meshes)
    mesh = storable(mesh_text(layout.mesh))
    return {
        LAYOUTS: iter([(number, layout.world_size, mesh, num_meshes, len(held.divisions), len(held.keys))]),
        LAYOUT_MESHES: _mesh_rows(number, held),
        LAYOUT_AXES: _axis_rows(number, held),
        LAYOUT_ALIASES: _alias_rows(number, layout.aliases),
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
        with connection.execute(query, execution_options={"yield_per": _ROWS_PER_INSERT}) as found:
            if any(one != other for one, other in zip_longest(wanted, map(tuple, found))):
                return True
    return False


def _insert(connection: Connection, table: Table, rows: Iterable[tuple[Any, ...]]) -> None:
    rest = iter(rows)
    while some := list(islice(rest, _ROWS_PER_INSERT)):
        insert_missing(connection, table, some)


_Rows = Iterator[tuple[Any, ...]]


def _mesh_rows(number: int, held: Holders) -> _Rows:
    for at, mesh in enumerate(held.meshes):
        if mesh.axes:
            yield number, at, math.prod(size for _, size in mesh.axes), runs_text(mesh.ranks)


def _axis_rows(number: int, held: Holders) -> _Rows:
    for at, mesh in enumerate(held.meshes):
        for axis, (name, size) in enumerate(mesh.axes):
            yield number, at, axis, storable(name), size


def _alias_rows(number: int, groups: Sequence[Sequence[str]]) -> _Rows:
    for at, group in enumerate(groups):
        for position, key in enumerate(group):
            yield number, at, position, storable(key)


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


def drop_layouts(connection: Connection) -> None:
    """Remove the rows of the layouts whose numbers are in the table `orphaned`."""
    for table in _ALL:
        execute(connection, f"DELETE FROM {table.name} WHERE object_id IN (SELECT object_id FROM orphaned)")


# --- and back ------------------------------------------------------------------------------------


def read_holders(connection: Connection, digest: bytes) -> Holders | None:
    """Which ranks held what, by the rows of the layout node called `digest`; None if there are none of it.

    Raises:
        CorruptionError: the rows are not those of a layout.
    """
    numbers = [number for _, number, _ in OBJECTS_BY_ID.rows(connection, [digest])]
    c = LAYOUTS.c
    found = connection.execute(
        select(c.object_id, c.world_size, c.num_divisions).where(c.object_id.in_(numbers))
    ).first()
    if found is None:
        return None
    number, world_size, num_divisions = found
    try:
        meshes = _read_meshes(connection, number)
        divisions = _read_divisions(connection, number, num_divisions)
    except (ValueError, TypeError, IndexError, KeyError, InvalidInputError, CorruptionError) as error:
        raise CorruptionError(f"the index has rows that are not of a layout ({error}): {REBUILD}") from error
    p = PLACEMENTS.c
    keys = select(p.key, p.division_id).where(p.object_id == number).order_by(p.position)
    found_keys = dict(map(tuple, connection.execute(keys)))
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
