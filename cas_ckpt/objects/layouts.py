"""The layout of a commit: which ranks held what of the state, and what else of it is not in its root.

That is: how tensors lay in memory, and which versions modules were of.

    Division       how one tensor is held: placements, and the ranks that have all of it
    compose_layout divisions by key -> LayoutObject, in which each mesh and each division is written once
    LayoutObject   what a layout node says, as docs/format.md has it; `layout_node`, `decode_layout`
    Holders        the same for whoever asks: key -> parts -> Division

Many ranks are few numbers: runs (first, count, step) of ranks at equal distances, and sets of ranks made of them.
Meshes list their ranks in an order, and those of real jobs are a handful of runs: [0, 1024, 1] is a world in order, and
the same world with its dimensions exchanged is one run for each row. So what names ranks costs what it says, not how
many ranks it names.

Tensors and values that every rank has whole are not named. What follows from a division for a tensor of some shape
(which elements, which chunks) is not known here: layout/holdings.py.

Invariant: the bytes follow from the divisions alone, whichever rank names them and in whatever order; equal lists of
ranks give equal runs, and equal sets equal spans. Nothing is counted out for what a node merely claims: ranks stay runs
until a division is asked for, and meshes, which have to be looked at rank by rank, list MOST_LISTED ranks at most.
"""

from __future__ import annotations

import math
import re
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, groupby, starmap
from types import MappingProxyType
from typing import Any, TypeAlias, overload

from cas_ckpt.errors import CorruptionError, InvalidInputError
from cas_ckpt.objects.digest import ObjectKind, pack_canonical
from cas_ckpt.objects.nodes import MAX_DIMENSIONS, Node, check_fields, checked_shape, make_node, open_node
from cas_ckpt.objects.spec import Box, BoxPlacement, Mesh, MeshPlacement, Placement, Split, named_axes, parse_split

# --- runs of ranks ------------------------------------------------------------------------------

Run: TypeAlias = tuple[int, int, int]
"""First rank, number of ranks, distance from one to the next (1 if there is one alone)."""

_FEWEST = 3
"""Ranks at a distance of more than 1 are a run from so many on; two are a run each, which reads better."""


def runs_of(ranks: Sequence[int]) -> tuple[Run, ...]:
    """`ranks` as runs, in their order: each as long as it can be, with steps of 1 or at least three ranks."""
    found: list[Run] = []
    start, total = 0, len(ranks)
    while start < total:
        step = ranks[start + 1] - ranks[start] if start + 1 < total else 0
        stop = start + 1
        while stop < total and ranks[stop] - ranks[stop - 1] == step and step > 0:
            stop += 1
        if stop - start < (2 if step == 1 else _FEWEST):
            step, stop = 1, start + 1
        found.append((ranks[start], stop - start, step))
        start = stop
    return tuple(found)


def ranks_of(runs: Iterable[Run]) -> Iterator[int]:
    """The ranks of `runs`, in their order."""
    for first, count, step in runs:
        yield from range(first, first + count * step, step)


def num_ranks(runs: Iterable[Run]) -> int:
    """How many ranks `runs` list."""
    return sum(count for _, count, _ in runs)


def checked_runs(flat: Any, *, world_size: int) -> tuple[Run, ...]:
    """The runs of a node: numbers, three for each run.

    Raises:
        CorruptionError: anything else, or a rank that is not one of `world_size`. Nothing is counted out for it.
    """
    if type(flat) is not list or not flat or len(flat) % 3 or {*map(type, flat)} != {int}:
        raise CorruptionError("a layout node has ranks that are not runs of three numbers each")
    runs = tuple(zip(flat[::3], flat[1::3], flat[2::3], strict=True))
    for first, count, step in runs:
        if first < 0 or count < 1 or step < 1 or (count == 1 and step > 1) or first + (count - 1) * step >= world_size:
            raise CorruptionError(
                f"a layout node of {world_size} ranks names {count} ranks from {first} on in steps of {step}"
            )
    return runs


def flat_runs(runs: Iterable[Run]) -> list[int]:
    """`runs` as a node has them."""
    return [number for run in runs for number in run]


_RUN = re.compile(r"([0-9]{1,7})(?:-([0-9]{1,7})(?::([0-9]{1,7}))?)?")


def runs_text(runs: Iterable[Run]) -> str:
    """`runs` as people write them: 0-7,16-64:8 (from 16 to 64 in steps of 8)."""
    return ",".join(
        str(first) if count == 1 else f"{first}-{first + (count - 1) * step}" + (f":{step}" if step > 1 else "")
        for first, count, step in runs
    )


def parse_runs(text: str) -> tuple[Run, ...]:
    """The runs that `runs_text` wrote.

    Raises:
        CorruptionError: it did not write that.
    """
    found = []
    for part in text.split(",") if text else ():
        match = _RUN.fullmatch(part)
        if match is None:
            raise CorruptionError(f"{text!r:.80} does not name ranks")
        first, step = int(match[1]), int(match[3] or 1)
        last = first if match[2] is None else int(match[2])
        if last < first or step < 1 or (last - first) % step:
            raise CorruptionError(f"{text!r:.80} does not name ranks")
        found.append((first, (last - first) // step + 1, step))
    return tuple(found)


class RankSet(Sequence[int]):
    """Different ranks, ascending: as small as its spans, however many ranks they are.

    A sequence of numbers: `len`, `in`, `tuple(ranks)`. As text 0-7,16-64:8 (from 16 to 64 in steps of 8).

    Attributes:
        spans: (first rank, rank after the last), ascending, none next to another.
    """

    __slots__ = ("_ends", "spans")

    def __init__(self, spans: tuple[tuple[int, int], ...] = ()) -> None:
        self.spans = spans
        self._ends = tuple(accumulate(stop - start for start, stop in spans))

    @staticmethod
    def of(ranks: Iterable[int]) -> RankSet:
        """The set of `ranks`, which may come in any order and more than once."""
        return _joined([(rank, rank + 1) for rank in ranks])

    @staticmethod
    def union(sets: Iterable[RankSet]) -> RankSet:
        """All ranks that are in one of `sets`."""
        distinct = list(dict.fromkeys(sets))
        return distinct[0] if len(distinct) == 1 else _joined([span for each in distinct for span in each.spans])

    def without(self, other: RankSet) -> RankSet:
        """The ranks that are not in `other`."""
        kept: list[tuple[int, int]] = []
        gone = iter((*other.spans, (sys.maxsize, sys.maxsize)))
        first, last = next(gone)
        for start, stop in self.spans:
            while start < stop:
                if last <= start:
                    first, last = next(gone)
                    continue
                if start < first:
                    kept.append((start, min(stop, first)))
                start = min(stop, last) if first < stop else stop
        return RankSet(tuple(kept))

    def __eq__(self, other: object) -> bool:
        return self.spans == other.spans if isinstance(other, RankSet) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.spans)

    def __len__(self) -> int:
        return self._ends[-1] if self.spans else 0

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(starmap(range, self.spans))

    def _place(self, rank: object) -> int | None:
        """How many of the ranks come before `rank`; None if it is not one of them."""
        if not isinstance(rank, int):
            return None
        at = bisect_right(self.spans, (rank, sys.maxsize)) - 1
        if at < 0 or rank >= self.spans[at][1]:
            return None
        return self._ends[at] - (self.spans[at][1] - rank)

    def __contains__(self, rank: object) -> bool:
        return self._place(rank) is not None

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            return tuple(self)[index]
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(index)  # what a sequence has to raise
        at = bisect_right(self._ends, place)
        return self.spans[at][1] - (self._ends[at] - place)

    def index(self, value: Any, start: int = 0, stop: int = sys.maxsize) -> int:
        """How many of the ranks come before `value`; ValueError if it is not one of them."""
        place = self._place(value)
        if place is None or not start <= place < stop:
            raise ValueError(f"{value!r} is not in {self}")  # what a sequence has to raise
        return place

    def tolist(self) -> list[int]:
        """The ranks as a list of plain numbers."""
        return list(self)

    def __str__(self) -> str:
        return runs_text(_shown_runs(self.spans))

    def __repr__(self) -> str:
        return f"RankSet({self})"


def _joined(spans: list[tuple[int, int]]) -> RankSet:
    """The spans as they should be: ascending, those that meet made one."""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return RankSet(tuple(joined))


def _shown_runs(spans: Sequence[tuple[int, int]]) -> Iterator[Run]:
    """Spans as runs; ranks that are alone and at equal distances are one run."""
    for alone, group in groupby(spans, lambda span: span[1] - span[0] == 1):
        found = list(group)
        yield from runs_of([start for start, _ in found]) if alone else ((a, b - a, 1) for a, b in found)


MAX_RANKS = 1 << 20
"""Ranks of a commit; a reader refuses more."""

MOST_LISTED = 1 << 22
"""Ranks that the meshes of one node list between them: four families of meshes over MAX_RANKS, 4096 over 1024."""


@dataclass(frozen=True, slots=True)
class Division:
    """How one tensor is held.

    Attributes:
        placements: Usually one; more where ranks hold it over meshes of their own.
        everywhere: Ranks that have all of it apart from those, ascending.
    """

    placements: tuple[Placement, ...] = ()
    everywhere: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LayoutMesh:
    """A mesh of a layout.

    Attributes:
        axes: Name and size of each dimension.
        ranks: World ranks in C order; none if the node does not say.
    """

    axes: tuple[tuple[str, int], ...]
    ranks: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class OverMesh:
    """A part of a division: over a mesh of the layout, by its number; a split for each of its dimensions."""

    mesh: int
    splits: tuple[Split, ...]


@dataclass(frozen=True, slots=True)
class InBoxes:
    """A part of a division: boxes that follow no rule, and the ranks that hold each; by offsets, then by sizes."""

    boxes: tuple[tuple[Box, tuple[Run, ...]], ...]


@dataclass(frozen=True, slots=True)
class Whole:
    """A part of a division: ranks that have all of the tensor."""

    ranks: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Unexplained:
    """A division of which the node has a text alone, or one that this version does not know."""

    texts: tuple[str, ...]


Part: TypeAlias = OverMesh | InBoxes | Whole | Unexplained


@dataclass(frozen=True, slots=True)
class LayoutObject:
    """Who held what when the state was committed, as a node says it.

    Attributes:
        world_size: Number of ranks.
        mesh: Names and sizes of the dimensions of the mesh that most divided tensors have; empty for one process.
        placements: Key -> a split for each dimension of `mesh`, or "@N": division number N.
        aliases: Groups of keys that were one tensor, each sorted, sorted.
        ranks: Those of `mesh`, if they are not all ranks in order.
        meshes: The other meshes, by number from 1 on.
        divisions: What else there is than splits over `mesh`, by number from 0 on.
        orders: Key of a tensor -> its dimensions as they lay in memory, the outermost first; without those in order.
        versions: Key of a module's state -> name of a module in it -> its version, of those that are not 1.
    """

    world_size: int = 1
    mesh: tuple[tuple[str, int], ...] = ()
    placements: dict[str, list[str]] = field(default_factory=dict)
    aliases: tuple[tuple[str, ...], ...] = ()
    ranks: tuple[Run, ...] = ()
    meshes: tuple[LayoutMesh, ...] = ()
    divisions: tuple[tuple[Part, ...], ...] = ()
    orders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    versions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


# --- from divisions ----------------------------------------------------------------------------


def compose_layout(
    divisions: Mapping[str, Division], *, world_size: int, aliases: tuple[tuple[str, ...], ...] = (),
    orders: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    versions: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
) -> LayoutObject:  # fmt: skip
    """The layout of a state.

    Args:
        divisions: Those of all keys that not every rank has whole. Keys that are held alike are named once if they
            have the very same object; to compare divisions of a thousand ranks takes long.
    """
    distinct = {id(division): division for division in divisions.values()}
    numbers = Counter(map(id, divisions.values()))
    common = _most_common(distinct, numbers)
    plain = {each: found for each, division in distinct.items() if (found := _plain(division, common)) is not None}
    others = {each: _Parts(division) for each, division in distinct.items() if each not in plain}
    used = {mesh for parts in others.values() for mesh, _ in parts.splits} - {common}
    meshes = sorted(used, key=lambda mesh: pack_canonical(_mesh_row(_layout_mesh(mesh))))
    of_mesh = {mesh: number for number, mesh in enumerate((common, *meshes)) if mesh is not None}
    made = {each: parts.numbered(of_mesh) for each, parts in others.items()}
    ordered = sorted(set(made.values()), key=lambda parts: pack_canonical(_division_row(parts)))
    of_division = {parts: [f"@{number}"] for number, parts in enumerate(ordered)}
    texts = plain | {each: of_division[parts] for each, parts in made.items()}
    in_order = common is None or common.ranks == tuple(range(world_size))
    return LayoutObject(
        world_size,
        () if common is None else tuple(zip(common.names, common.shape, strict=True)),
        {key: texts[id(division)] for key, division in divisions.items()},
        aliases,
        () if in_order or common is None else runs_of(common.ranks),
        tuple(map(_layout_mesh, meshes)),
        tuple(ordered),
        orders,
        versions,
    )


def _most_common(distinct: Mapping[int, Division], numbers: Counter[int]) -> Mesh | None:
    """The mesh of most tensors; of several the one with the least shape, ranks and names."""
    times: Counter[Mesh] = Counter()
    for each, division in distinct.items():
        for placement in division.placements:
            if isinstance(placement, MeshPlacement) and placement.mesh.shape:
                times[placement.mesh] += numbers[each]
    return min(times, key=lambda mesh: (-times[mesh], mesh.shape, mesh.ranks, mesh.names), default=None)


def _plain(division: Division, common: Mesh | None) -> list[str] | None:
    """The splits of a tensor that is divided over the common mesh and no other."""
    match division:
        case Division((MeshPlacement(mesh, splits),), ()) if mesh == common:
            return list(map(str, splits))
    return None


class _Parts:
    """A division, brought into order: what is said several times is said once.

    Attributes:
        splits: (mesh, splits) of every mesh.
    """

    def __init__(self, division: Division) -> None:
        self.splits: list[tuple[Mesh, tuple[Split, ...]]] = []
        self._boxes: dict[Box, set[int]] = {}
        self._whole = set(division.everywhere)
        for placement in division.placements:
            if isinstance(placement, BoxPlacement):
                for box, ranks in placement.boxes:
                    self._boxes.setdefault(box, set()).update(ranks)
            elif placement.mesh.shape:
                self.splits.append((placement.mesh, placement.splits))
            else:  # one rank, and nothing along which it could be cut
                self._whole.update(placement.mesh.ranks)

    def numbered(self, meshes: Mapping[Mesh, int]) -> tuple[Part, ...]:
        over = {OverMesh(meshes[mesh], splits) for mesh, splits in self.splits}
        parts: list[Part] = [*sorted(over, key=lambda part: (part.mesh, *map(str, part.splits)))]
        boxes = sorted(self._boxes.items(), key=lambda pair: (pair[0].offsets, pair[0].sizes))
        if boxes:
            parts.append(InBoxes(tuple((box, runs_of(sorted(ranks))) for box, ranks in boxes)))
        if self._whole:
            parts.append(Whole(runs_of(sorted(self._whole))))
        return tuple(parts)


def _layout_mesh(mesh: Mesh) -> LayoutMesh:
    return LayoutMesh(tuple(zip(mesh.names, mesh.shape, strict=True)), runs_of(mesh.ranks))


# --- nodes -------------------------------------------------------------------------------------


def layout_node(layout: LayoutObject) -> Node:
    """The node of `layout`; keys that are not valid Unicode (lone surrogates) are left out of it.

    Fields that were added to the first four are in it only where they say something.
    """
    by_order: dict[tuple[int, ...], list[str]] = {}
    for key, order in layout.orders.items():
        if is_nameable(key):
            by_order.setdefault(order, []).append(key)
    payload: dict[str, Any] = {
        "world_size": layout.world_size,
        "mesh": layout.mesh,
        "placements": {key: placement for key, placement in layout.placements.items() if is_nameable(key)},
        "aliases": [group for group in layout.aliases if all(map(is_nameable, group))],
    }
    added = {
        "ranks": flat_runs(layout.ranks),
        "meshes": list(map(_mesh_row, layout.meshes)),
        "divisions": list(map(_division_row, layout.divisions)),
        "orders": [(order, sorted(keys)) for order, keys in sorted(by_order.items())],
        "versions": {
            key: {name: number for name, number in found.items() if is_nameable(name)}
            for key, found in layout.versions.items()
            if is_nameable(key)
        },
    }
    return make_node(ObjectKind.LAYOUT, payload | {name: value for name, value in added.items() if value})


def is_nameable(key: str) -> bool:
    """Whether a layout can have this key."""
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True


def _mesh_row(mesh: LayoutMesh) -> list[Any]:
    return [mesh.axes, flat_runs(mesh.ranks)]


def _division_row(parts: Iterable[Part]) -> list[Any]:
    rows: list[Any] = []
    for part in parts:
        if isinstance(part, OverMesh):
            rows.append(["mesh", part.mesh, list(map(str, part.splits))])
        elif isinstance(part, InBoxes):
            rows.append(["boxes", [(box.offsets, box.sizes, flat_runs(runs)) for box, runs in part.boxes]])
        elif isinstance(part, Whole):
            rows.append(["whole", flat_runs(part.ranks)])
    return rows


_TYPES = {"world_size": (int,), "mesh": (list,), "placements": (dict,), "aliases": (list,)}
_OPTIONAL_TYPES = {"ranks": (list,), "meshes": (list,), "divisions": (list,), "orders": (list,), "versions": (dict,)}
_NUMBER = re.compile(r"@(0|[1-9][0-9]{0,8})")


def decode_layout(data: bytes) -> LayoutObject:
    """The layout in `data`.

    Raises:
        CorruptionError: malformed.
    """
    payload = open_node(ObjectKind.LAYOUT, data)
    check_fields(payload, _TYPES, "layout", optional=_OPTIONAL_TYPES)
    world_size, groups = payload["world_size"], payload["aliases"]
    if not 1 <= world_size <= MAX_RANKS:
        raise CorruptionError(f"a layout node of {world_size} ranks: there may be 1 to {MAX_RANKS}")
    for group in groups:
        if not isinstance(group, list) or not {*map(type, group)} <= {str}:
            raise CorruptionError("a layout node names aliases that are not keys")
    empty = [name for name in _OPTIONAL_TYPES if name in payload and not payload[name]]
    if empty:
        raise CorruptionError(f"a layout node with the field {empty[0]!r} that says nothing")
    reader = _Reader(world_size)
    mesh = reader.axes(payload["mesh"])
    ranks = reader.mesh(mesh, payload["ranks"]).ranks if "ranks" in payload else ()
    meshes = [reader.mesh_row(row) for row in payload.get("meshes", ())]
    known = ranks or math.prod(size for _, size in mesh) == world_size
    sizes = [len(mesh) if known else 0, *(len(each.axes) for each in meshes)]
    divisions = [reader.division(row, sizes) for row in payload.get("divisions", ())]
    for key, texts in payload["placements"].items():
        if not isinstance(texts, list) or not {type(key), *map(type, texts)} <= {str}:
            raise CorruptionError("a layout node has placements that are not text by key")
        if len(texts) > MAX_DIMENSIONS:
            raise CorruptionError(f"a layout node has {len(texts)} placements of one key: at most {MAX_DIMENSIONS}")
        number = _division_number(texts)
        if divisions and number is not None and number >= len(divisions):
            raise CorruptionError(f"a layout node of {len(divisions)} divisions names number {number}")
    return LayoutObject(
        world_size, mesh, payload["placements"], tuple(map(tuple, groups)), ranks, tuple(meshes), tuple(divisions),
        _orders(payload.get("orders", ())), _versions(payload.get("versions", {})),
    )  # fmt: skip


def _orders(rows: Sequence[Any]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    before: list[int] = []
    for row in rows:
        match row:
            case [list() as order, [*keys]] if {*map(type, order)} <= {int} and {*map(type, keys)} == {str}:
                if len(order) > MAX_DIMENSIONS or sorted(order) != [*range(len(order))] or order <= before:
                    raise CorruptionError(
                        "a layout node has an order that is there twice, or does not name each dimension once"
                    )
                if sorted({*keys}) != keys or found.keys() & keys:
                    raise CorruptionError("a layout node has an order of keys that do not ascend, or have another")
                found.update(dict.fromkeys(keys, tuple(order)))
                before = order
            case _:
                raise CorruptionError("a layout node has an order that is not dimensions and keys")
    return found


def _versions(payload: Mapping[Any, Any]) -> dict[str, dict[str, int]]:
    for key, found in payload.items():
        if type(key) is not str or type(found) is not dict or not {*map(type, found)} <= {str}:
            raise CorruptionError("a layout node has versions that are not of modules by key")
        if any(type(number) is not int or not 0 <= number < 1 << 63 for number in found.values()):
            raise CorruptionError("a layout node has a version of a module that is not a number")
    return dict(payload)


def _division_number(texts: Sequence[str]) -> int | None:
    found = _NUMBER.fullmatch(texts[0]) if len(texts) == 1 else None
    return None if found is None else int(found[1])


class _Reader:
    """Reads meshes and divisions of one node, and counts the ranks that its meshes list."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._listed = 0

    def axes(self, rows: Any) -> tuple[tuple[str, int], ...]:
        if not isinstance(rows, list) or len(rows) > MAX_DIMENSIONS:
            raise CorruptionError("a layout node has a mesh that is not a short list of dimensions")
        for row in rows:
            if not isinstance(row, list) or [*map(type, row)] != [str, int] or row[1] < 1:
                raise CorruptionError("a layout node has a dimension of its mesh that is not a name and a size")
        axes = tuple((name, size) for name, size in rows)
        if math.prod(size for _, size in axes) > self._world_size:
            raise CorruptionError(f"a layout node of {self._world_size} ranks has a mesh of more: {axes}")
        return axes

    def mesh_row(self, row: Any) -> LayoutMesh:
        if not isinstance(row, list) or len(row) != 2:
            raise CorruptionError("a layout node has a mesh that is not dimensions and ranks")
        return self.mesh(self.axes(row[0]), row[1])

    def mesh(self, axes: tuple[tuple[str, int], ...], flat: Any) -> LayoutMesh:
        runs = checked_runs(flat, world_size=self._world_size)
        count = num_ranks(runs)
        self._listed += count
        if not axes or count != math.prod(size for _, size in axes) or self._listed > MOST_LISTED:
            raise CorruptionError(f"a layout node has a mesh {axes} of {count} ranks, or too many meshes")
        if len(set(ranks_of(runs))) != count:
            raise CorruptionError(f"a layout node has a mesh {axes} that has a rank twice")
        return LayoutMesh(axes, runs)

    def division(self, rows: Any, sizes: Sequence[int]) -> tuple[Part, ...]:
        """One division.

        Args:
            sizes: Dimensions of each mesh.
        """
        if not isinstance(rows, list) or not rows:
            raise CorruptionError("a layout node has a division without parts")
        return tuple(self._part(row, sizes) for row in rows)

    def _part(self, row: Any, sizes: Sequence[int]) -> Part:
        match row:
            case ["mesh", int() as mesh, list() as texts] if (
                type(mesh) is int and 0 <= mesh < len(sizes) and 0 < sizes[mesh] == len(texts)
            ):
                return OverMesh(mesh, tuple(map(_split, texts)))
            case ["boxes", list() as boxes] if boxes:
                return InBoxes(tuple(map(self._box, boxes)))
            case ["whole", list() as flat]:
                return Whole(self._ascending(flat))
        raise CorruptionError("a layout node has a division of unknown form")

    def _box(self, row: Any) -> tuple[Box, tuple[Run, ...]]:
        if not isinstance(row, list) or len(row) != 3:
            raise CorruptionError("a layout node has a box that is not offsets, sizes and ranks")
        box = Box(checked_shape(row[0]), checked_shape(row[1]))
        if len(box.offsets) != len(box.sizes):
            raise CorruptionError(f"a layout node has a box of {len(box.offsets)} offsets and {len(box.sizes)} sizes")
        return box, self._ascending(row[2])

    def _ascending(self, flat: Any) -> tuple[Run, ...]:
        runs = checked_runs(flat, world_size=self._world_size)
        before = -1
        for first, count, step in runs:
            if first <= before:
                raise CorruptionError("a layout node names holders out of order")
            before = first + (count - 1) * step
        return runs


def _split(text: Any) -> Split:
    try:
        return parse_split(text)
    except (InvalidInputError, TypeError) as error:
        raise CorruptionError(f"a layout node has a division that cannot be read: {error}") from error


# --- who held what, asked ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Holders:
    """Which ranks held what, key by key; equal for a layout node and for its rows in the index.

    Attributes:
        meshes: By number, with a name for each dimension; number 0 is the one of most tensors, without dimensions if
            there is none.
        divisions: The different ones, each in parts.
        keys: Key -> number of its division. Keys that are not there are whole on every rank.
    """

    world_size: int
    meshes: tuple[LayoutMesh, ...]
    divisions: tuple[tuple[Part, ...], ...]
    keys: Mapping[str, int]

    def num_listed(self, number: int) -> int:
        """How many ranks the parts of a division name; what `division` makes is that large."""
        total = 0
        for part in self.divisions[number]:
            if isinstance(part, OverMesh):
                total += num_ranks(self.meshes[part.mesh].ranks)
            elif isinstance(part, InBoxes):
                total += sum(num_ranks(runs) for _, runs in part.boxes)
            elif isinstance(part, Whole):
                total += num_ranks(part.ranks)
        return total

    def division(self, number: int) -> Division | None:
        """One of them, rank by rank; None if the layout does not say who held what."""
        placements: list[Placement] = []
        everywhere: set[int] = set()
        for part in self.divisions[number]:
            if isinstance(part, OverMesh):
                placements.append(MeshPlacement(self._mesh(part.mesh), part.splits))
            elif isinstance(part, InBoxes):
                placements.append(BoxPlacement(tuple((box, tuple(ranks_of(runs))) for box, runs in part.boxes)))
            elif isinstance(part, Whole):
                everywhere.update(ranks_of(part.ranks))
            else:
                return None
        return Division(tuple(placements), tuple(sorted(everywhere)))

    def _mesh(self, number: int) -> Mesh:
        found = self._meshes.get(number)
        if found is None:
            mesh = self.meshes[number]
            names, shape = [name for name, _ in mesh.axes], [size for _, size in mesh.axes]
            found = self._meshes[number] = Mesh(tuple(names), tuple(shape), tuple(ranks_of(mesh.ranks)))
        return found

    @cached_property
    def _meshes(self) -> dict[int, Mesh]:
        return {}


def holders_of(layout: LayoutObject) -> Holders:
    """The ranks that held each key, by `layout`."""
    ranks = layout.ranks
    if not ranks and layout.mesh and math.prod(size for _, size in layout.mesh) == layout.world_size:
        ranks = ((0, layout.world_size, 1),)
    divisions = list(layout.divisions)
    numbers: dict[tuple[str, ...], int] = {}
    keys: dict[str, int] = {}
    for key, texts in layout.placements.items():
        number = _division_number(texts) if layout.divisions else None
        if number is None:
            known = tuple(texts)
            number = numbers.get(known)
            if number is None:
                number = numbers[known] = len(divisions)
                divisions.append((_explained(known, len(layout.mesh) if ranks else 0),))
        keys[key] = number
    meshes = [
        LayoutMesh(named_axes(mesh.axes), mesh.ranks) for mesh in (LayoutMesh(layout.mesh, ranks), *layout.meshes)
    ]
    return Holders(layout.world_size, tuple(meshes), tuple(divisions), keys)


def _explained(texts: tuple[str, ...], num_axes: int) -> Part:
    """The splits in `texts`, one for each dimension of the mesh of most tensors, if they are that."""
    if texts and len(texts) == num_axes:
        try:
            return OverMesh(0, tuple(map(parse_split, texts)))
        except InvalidInputError:
            pass  # a placement of a later version: its text is kept
    return Unexplained(texts)
