"""The contents of states, as people see them: every entry, some, or one, from the rows of their nodes.

    1. containers are opened level by level (trees.py), only those below which something wanted may be
    2. what they list is put together: each container under its key, with what it lists and the containers in it
    3. they are gone through in the order of the tree

Invariant: what people see as one thing is one entry, although a sparse, quantized or structured tensor is stored in
parts. What a state unfolds into is counted before it is made (memory.py). A state that the index does not know
whole is a `RowsMissingError`, never a shorter list. Knows nothing of commits.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from sqlalchemy import Connection

from cas_ckpt.errors import CorruptionError, NotFoundError
from cas_ckpt.index.manifests import FLAVOR_STEP
from cas_ckpt.index.rows import ListedEntry, objects_by_id, rows, rows_by_key
from cas_ckpt.index.trees import (
    CHILD,
    CONTAINER,
    FORM,
    MAX_DEPTH,
    NAME,
    SPEC,
    Ahead,
    Alike,
    Row,
    RowsMissingError,
    Tree,
    children_first,
    count_rows,
    flavor_of,
    open_containers,
    read_digests,
    read_trees,
    root_number,
)
from cas_ckpt.memory import check_entries
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.objects.nodes import FLAVORS, EntryForm
from cas_ckpt.objects.patterns import ANY_NAME, KeyPatterns, Names
from cas_ckpt.objects.spec import Spec
from cas_ckpt.objects.state import CONTAINER_KINDS, KIND_OF_FLAVOR, RANKS, Flavor, parse_key, render_key, render_name

_SPECS = "SELECT s.spec_id, s.dtype, s.shape, s.num_bytes FROM t_specs s"
_CELLS = "SELECT t.object_id, t.spec_id, t.cell FROM t_tensors t WHERE t.object_id {keys}"
_KINDS = [KIND_OF_FLAVOR[flavor] for flavor in FLAVORS]
_PLAIN = FLAVORS.index(Flavor.VALUE)
_TENSOR, _CHUNK, _VALUE = map(int, (EntryForm.TENSOR, EntryForm.CHUNK, EntryForm.VALUE))


def manifest(connection: Connection, root: bytes, keys: KeyPatterns | None = None) -> list[ListedEntry]:
    """The entries of a state, in the order of its tree.

    The cost grows with what is listed, and with the containers that `keys` reaches; of a large container those pages
    are read that may hold what matches.

    Args:
        root: Id of the state.
        keys: Only those whose keys match; of a tensor in parts its own key counts. None, or no patterns: all.
    Raises:
        RowsMissingError: the index does not know all of the state.
        TooLargeError: it has more entries than this call may make. CorruptionError: nodes that do not fit together.
    """
    container = _unfolded(connection, root_number(connection, root), keys or None)
    found: list[ListedEntry] = []
    _list(container, Shown(read_specs(connection, _spec_ids(container))), found)
    return found


def entry(connection: Connection, root: bytes, key: str) -> ListedEntry:
    """The entry under `key`: a tensor, value or container. The bytes of a container are those of all tensors below it.

    Raises:
        NotFoundError: there is no such entry; names the longest part of the key that is there.
        RowsMissingError, TooLargeError, CorruptionError: as for `manifest`.
    """
    number, row = _descend(connection, root, key)
    if row is not None and row[FORM] != CONTAINER:
        return ListedEntry(key, *Shown(read_specs(connection, [row[SPEC]])).of(row[FORM], row[SPEC]))
    container = _unfolded(connection, number, None)
    container.key = key
    return _as_one(container, Shown(read_specs(connection, _spec_ids(container))))


class Sum(NamedTuple):
    """Sums of a top-level name: entries as lists show them, how many of them are tensors, and plain bytes."""

    num_entries: int
    num_tensors: int
    num_bytes: int


def summary(connection: Connection, root: bytes) -> list[tuple[str, Sum]]:
    """The top-level names of a state, in the order of its tree, and what is below each.

    Equal containers are looked at once and count each time; of what they list no row is read, the database counts.

    Raises:
        RowsMissingError: the index does not know all of the state. CorruptionError: nodes that do not fit together.
    """
    number = root_number(connection, root)
    rows = open_containers(connection, read_trees(connection, [number]))[number]
    sums = _sums_of(connection, {row[CHILD] or 0 for row in rows if row[FORM] == CONTAINER})
    shown = Shown(read_specs(connection, {row[SPEC] for row in rows}))
    return [
        (row[NAME], sums[row[CHILD] or 0] if row[FORM] == CONTAINER else _sum_of(shown.of(row[FORM], row[SPEC])))
        for row in rows
    ]


def _sum_of(what: Sequence[Any]) -> Sum:
    """The sum of one entry."""
    _, dtype, _, num_bytes = what
    return Sum(1, int(dtype is not None), num_bytes)


def _sums_of(connection: Connection, wanted: Collection[int]) -> dict[int, Sum]:
    """Node -> all that is in this container, for these and those in them."""
    sums: dict[int, Sum] = {}
    listed: dict[int, list[Alike]] = {}
    for _ in range(MAX_DEPTH):
        trees = read_trees(connection, wanted)
        ones = read_composites(connection, [number for number, tree in trees.items() if tree.is_entry])
        sums |= {number: _sum_of(one[1:]) for number, one in ones.items()}
        opened = count_rows(connection, {number: tree for number, tree in trees.items() if not tree.is_entry})
        listed |= opened
        named = {one.child or 0 for rows in opened.values() for one in rows if one.form == CONTAINER}
        wanted = named - listed.keys() - sums.keys()
        if not wanted:
            break
    else:
        raise CorruptionError(f"a state is deeper than {MAX_DEPTH} containers: restore it from a copy")
    shown = Shown(read_specs(connection, {one.spec for rows in listed.values() for one in rows}))
    below = {node: [one.child or 0 for one in rows if one.form == CONTAINER] for node, rows in listed.items()}
    for number in children_first(below):
        if number in listed:
            found = [
                (one.times, sums[one.child or 0] if one.form == CONTAINER else _sum_of(shown.of(one.form, one.spec)))
                for one in listed[number]
            ]
            sums[number] = Sum(*(sum(times * each[at] for times, each in found) for at in range(3)))
    return sums


def object_of(connection: Connection, root: bytes, key: str) -> Digest | None:
    """The id of the tensor, long value or container under `key`; None if it is so small that it has none.

    Raises:
        NotFoundError, RowsMissingError: as for `entry`.
    """
    number, row = _descend(connection, root, key)
    if row is None:
        return Digest(root)
    return None if row[CHILD] is None else read_digests(connection, [number])[number]


def is_container(connection: Connection, digest: bytes) -> bool:
    """Whether an object is a container that people see as one: neither an entry, nor anything else.

    Raises:
        RowsMissingError: the index knows too little of it.
    """
    number, kind = next(((number, kind) for _, number, kind in objects_by_id(connection, [digest])), (0, 0))
    return kind == ObjectKind.TREE and not read_trees(connection, [number])[number].is_entry


def _descend(connection: Connection, root: bytes, key: str) -> tuple[int, Row | None]:
    """The number of what is under `key`, and its row; no row for the root itself."""
    number, row = root_number(connection, root), None
    path = parse_key(key)
    for depth, name in enumerate(path):
        if row is None or row[FORM] == CONTAINER:
            text = render_name(name)
            rows = open_containers(connection, read_trees(connection, [number]), Names.just(name, text))[number]
            row = next((one for one in rows if one[NAME] == text), None)
        else:
            row = None
        if row is None:
            raise NotFoundError(
                f"there is no entry {key!r} ({render_key(path[:depth]) or 'the root'} is there): repo.ls(ref) lists "
                "the keys"
            )
        number = row[CHILD] or 0
    return number, row


class StoredPart(NamedTuple):
    """A tensor as it is stored: a whole one, or a part of a sparse, quantized or structured one.

    Attributes:
        flavor: What `load` makes of it; a long plain value is stored as tensors are.
        node: Id of its tensor node, or of its only chunk; None: its bytes are in the node that lists it.
        single: `node` is the id of its only chunk.
    """

    key: str
    spec: Spec
    flavor: Flavor
    node: Digest | None
    single: bool


def stored_parts(connection: Connection, root: bytes, keys: KeyPatterns | None = None) -> list[StoredPart]:
    """Every tensor of a state as it is stored, in the order of its tree; arguments and errors as for `manifest`."""
    container = _unfolded(connection, root_number(connection, root), keys or None)
    rows = [(key, row) for key, row, _ in _leaves(container) if row[FORM] != _VALUE]
    specs = read_specs(connection, {row[SPEC] for _, row in rows})
    nodes = read_digests(connection, {row[CHILD] for _, row in rows if row[CHILD] is not None})
    found = []
    for key, row in rows:
        flavor, form = divmod(row[FORM], FLAVOR_STEP)
        node = None if row[CHILD] is None else nodes[row[CHILD]]
        found.append(StoredPart(key, specs[row[SPEC]][0], FLAVORS[flavor], node, form == _CHUNK))
    return found


class StoredLeaf(NamedTuple):
    """A tensor or value as it is stored: a whole one, or a part of a tensor in parts.

    Attributes:
        spec: dtype and shape; of a value those of its encoded bytes.
        cell: Sizes of a full cell of its grid, in elements; None: it is not stored in chunks.
        owner: The rank whose own it is, by its place in a container of per-rank values; None: it is not one rank's.
    """

    key: str
    spec: Spec
    cell: tuple[int, ...] | None
    owner: int | None


def stored_leaves(connection: Connection, root: bytes, keys: KeyPatterns | None = None) -> list[StoredLeaf]:
    """Every tensor and value of a state as it is stored, in the order of its tree; arguments and errors as above."""
    container = _unfolded(connection, root_number(connection, root), keys or None)
    rows = list(_leaves(container))
    specs = read_specs(connection, {row[SPEC] for _, row, _ in rows})
    nodes = {row[CHILD] for _, row, _ in rows if row[FORM] % FLAVOR_STEP == _TENSOR}
    cells = {node: (spec, tuple(json.loads(cell))) for node, spec, cell in rows_by_key(connection, _CELLS, nodes)}
    if len(cells) < len(nodes):
        missing = [node for node in nodes if node is not None and node not in cells]
        raise RowsMissingError(read_digests(connection, missing).values())
    found = []
    for key, row, owner in rows:
        form, spec = row[FORM] % FLAVOR_STEP, specs[row[SPEC]][0]
        cell: tuple[int, ...] | None = None
        if form == _TENSOR:
            of_spec, cell = cells[row[CHILD]]
            if of_spec != row[SPEC]:
                raise CorruptionError(f"{key}: its node is of another tensor than {spec}: restore it from a copy")
        elif form == _CHUNK:
            cell = tuple(size or 1 for size in spec.shape)
        found.append(StoredLeaf(key, Spec("uint8", spec.shape) if form == _VALUE else spec, cell, owner))
    return found


def _leaves(container: _Container, owner: int | None = None) -> Iterator[tuple[str, Row, int | None]]:
    """Key, row and owner of all tensors and values, parts of tensors too, in the order of the tree."""
    below = iter(container.below)
    for row in container.rows:
        of_rank = owner
        if owner is None and container.tree.kind == RANKS:
            (name,) = parse_key(row[NAME])
            of_rank = name if isinstance(name, int) else None
        if row[FORM] == CONTAINER:
            yield from _leaves(next(below), of_rank)
        else:
            yield container.prefix + row[NAME], row, of_rank


# --- containers where they occur in a state -------------------------------------------------------


@dataclass(slots=True)
class _Container:
    """A container where it occurs in a state.

    Attributes:
        key: Its key; "" of the root.
        number: Of its node.
        rows: What it lists, in order, as far as it is wanted.
        below: The containers among them, in the same order.
    """

    key: str
    number: int
    tree: Tree
    rows: Sequence[Row] = ()
    below: Sequence[_Container] = ()

    @property
    def prefix(self) -> str:
        """The beginning of the keys of its entries."""
        return f"{self.key}/" if self.key else ""


_Level: TypeAlias = Sequence[tuple[_Container, KeyPatterns | None]]
"""Containers, and which keys below each are wanted."""


def _unfolded(connection: Connection, start: int, keys: KeyPatterns | None) -> _Container:
    """The state, or container, whose node is `start`, with all that `keys` wants of it."""
    return _all_unfolded(connection, [start], keys)[start]


def _all_unfolded(connection: Connection, starts: Collection[int], keys: KeyPatterns | None) -> dict[int, _Container]:
    """Number -> the container with this node, and all that is wanted of what is in it."""
    trees = read_trees(connection, starts)
    tops = {start: _Container("", start, trees[start]) for start in starts}
    level: _Level = [(top, keys) for top in tops.values()]
    ahead, total = Ahead(connection, keys), 0
    for _ in range(MAX_DEPTH):
        if not level:
            return tops
        below = ahead.num_below([(container.key, container.number) for container, _ in level])
        check_entries(total + below, "the tree of a state stands")
        opened = _opened(connection, level)
        total += sum(map(len, opened))
        check_entries(total, "the tree of a state stands")
        for (container, wanted), listed in zip(level, opened, strict=True):
            prefix, tree, container.rows = container.prefix, container.tree, listed
            if wanted is not None:
                container.rows = [
                    row
                    for row in listed
                    if (wanted.reaches if row[FORM] == CONTAINER else wanted.matches)(prefix + row[NAME])
                ]
            inside = [row for row in container.rows if row[FORM] == CONTAINER]
            container.below = [_Container(prefix + row[NAME], row[CHILD] or 0, tree) for row in inside]
        numbers = {inner.number for container, _ in level for inner in container.below}
        trees |= read_trees(connection, numbers - trees.keys())
        for container, wanted in level:
            for inner in container.below:
                inner.tree = trees[inner.number]
            if wanted is not None:
                # Containers that are one entry whose key does not match are left out.
                gone = {inner.key for inner in container.below if inner.tree.is_entry and not wanted.matches(inner.key)}
                if gone:
                    container.below = [inner for inner in container.below if inner.key not in gone]
                    container.rows = [row for row in container.rows if container.prefix + row[NAME] not in gone]
        level = [
            (inner, None if inner.tree.is_entry else wanted)
            for container, wanted in level
            for inner in container.below
            if inner.tree.num_entries
        ]
    raise CorruptionError(f"a state is deeper than {MAX_DEPTH} containers: restore it from a copy")


def _opened(connection: Connection, level: _Level) -> list[Sequence[Row]]:
    """The rows of the containers of a level, as far as it may be wanted; each node is read once."""
    names = [ANY_NAME if wanted is None else wanted.names_in(container.key) for container, wanted in level]
    groups: dict[Names, dict[int, Tree]] = {}
    for (container, _), each in zip(level, names, strict=True):
        groups.setdefault(each, {})[container.number] = container.tree
    found = {each: open_containers(connection, trees, each) for each, trees in groups.items()}
    return [found[each][container.number] for (container, _), each in zip(level, names, strict=True)]


# --- entries as people see them -----------------------------------------------------------------

Specs: TypeAlias = Mapping[int | None, tuple[Spec, int]]
"""Number of a dtype and shape -> itself, and the plain bytes of such a tensor."""


def read_specs(connection: Connection, numbers: Iterable[int | None]) -> Specs:
    """The dtypes and shapes of these numbers in `t_entries.spec_id`."""
    wanted = {number for number in numbers if number is not None}
    return _specs(rows_by_key(connection, f"{_SPECS} WHERE s.spec_id {{keys}}", wanted))


def read_all_specs(connection: Connection) -> Specs:
    """All dtypes and shapes, and lengths of values, that were ever stored."""
    return _specs(rows(connection, _SPECS))


def _specs(rows: Iterable[Any]) -> Specs:
    return {number: (Spec(dtype, tuple(json.loads(shape))), num_bytes) for number, dtype, shape, num_bytes in rows}


def _spec_ids(container: _Container) -> set[int | None]:
    return {row[SPEC] for row in container.rows}.union(*map(_spec_ids, container.below))


What: TypeAlias = tuple[str, str | None, tuple[int, ...] | None, int]
"""Kind, dtype, shape and bytes of an entry."""


class Shown:
    """Kind, dtype, shape and bytes of rows as they are shown; those that are alike are looked at once.

    Attributes:
        known: (form, number of dtype and shape) -> what it is.
    """

    def __init__(self, specs: Specs) -> None:
        self._specs = specs
        self.known: dict[tuple[int, int | None], What] = {}

    def of(self, form: int, spec_id: int | None) -> What:
        """Kind, dtype, shape and bytes of an entry that is not a container."""
        known = self.known.get((form, spec_id))
        if known is not None:
            return known
        spec, num_bytes = self._specs[spec_id]
        flavor = _PLAIN if form == _VALUE else flavor_of(form)
        is_plain = flavor == _PLAIN
        found = _KINDS[flavor], None if is_plain else spec.dtype, None if is_plain else spec.shape, num_bytes
        self.known[form, spec_id] = found
        return found


def _list(container: _Container, shown: Shown, found: list[ListedEntry]) -> None:
    below, prefix, known, new = iter(container.below), container.prefix, shown.known, tuple.__new__
    for row in container.rows:
        _, _, name, form, spec, _, _ = row
        if form != CONTAINER:
            what = known.get((form, spec)) or shown.of(form, spec)
            found.append(new(ListedEntry, (prefix + name, *what)))
            continue
        inner = next(below)
        if inner.tree.is_entry:
            found.append(_as_one(inner, shown))
        else:
            _list(inner, shown, found)


def _as_one(container: _Container, shown: Shown) -> ListedEntry:
    """A container as one entry: a tensor in parts has the dtype of its items, and a shape of its own or theirs."""
    kind = container.tree.kind
    num_bytes = sum(shown.of(row[FORM], row[SPEC])[-1] for _, row, _ in _leaves(container) if row[FORM] != _VALUE)
    if kind in CONTAINER_KINDS:
        return ListedEntry(container.key, kind, None, None, num_bytes)
    rows = {row[NAME]: row for row in container.rows}
    items = next((rows[name] for name in ("values", "int_repr", "items") if name in rows), None)
    dtype = shape = None
    if items is not None and items[FORM] not in (CONTAINER, _VALUE):
        _, dtype, shape, _ = shown.of(items[FORM], items[SPEC])
    own = _own_shape(container)
    return ListedEntry(container.key, kind, dtype, shape if own is None else own, num_bytes)


def read_composites(connection: Connection, numbers: Collection[int]) -> dict[int, ListedEntry]:
    """Number -> the container with this node as one entry, whose key is not known here; errors as for `manifest`."""
    found = _all_unfolded(connection, numbers, None)
    shown = Shown(read_specs(connection, set().union(*map(_spec_ids, found.values()))))
    return {number: _as_one(container, shown) for number, container in found.items()}


def _own_shape(container: _Container) -> tuple[int, ...] | None:
    """The shape that a tensor in parts says it has."""
    from cas_ckpt.objects.values import decode_value  # brings numpy, which most lists do not need

    attrs = None if container.tree.attrs is None else decode_value(container.tree.attrs, key=container.key)
    shape = attrs.get("shape") if isinstance(attrs, dict) else None
    if shape is None:
        return None
    if not isinstance(shape, (tuple, list)) or not all(type(size) is int for size in shape):
        raise CorruptionError(f"{container.key}: the shape of a {container.tree.kind} tensor is not a list of sizes")
    return tuple(shape)
