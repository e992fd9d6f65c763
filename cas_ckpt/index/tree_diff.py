"""Where two states differ: their rows compared side by side, down only where their nodes differ.

    1. take the pairs of containers of one level, each pair of nodes once
    2. where they have pages, drop those that both have, and open the others, for all pairs together, level by level
    3. names whose rows differ: containers go into the next level, the rest is the answer

Invariant: a node that both states have in the same place is never opened. Bytes that are stored inside of nodes are
told apart by what the index keeps of them (`manifests.kept_data`); where they are is told with them. Knows nothing of
chunks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from sqlalchemy import Connection, select

from cas_ckpt.errors import CorruptionError
from cas_ckpt.index.database import KeyQuery
from cas_ckpt.index.entries import Specs, read_specs
from cas_ckpt.index.manifests import FLAVOR_STEP
from cas_ckpt.index.rows import UNKNOWN_KIND
from cas_ckpt.index.schema import OBJECTS
from cas_ckpt.index.trees import (
    CHILD,
    CONTAINER,
    FORM,
    MAX_DEPTH,
    NAME,
    SPEC,
    Nodes,
    Row,
    Tree,
    open_differing,
    read_trees,
    root_numbers,
)
from cas_ckpt.memory import check_entries
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.objects.nodes import FLAVORS, EntryForm, name_order
from cas_ckpt.objects.spec import Spec
from cas_ckpt.objects.state import Flavor, Path, parse_key

_OBJECTS = KeyQuery(select(OBJECTS.c.object_id, OBJECTS.c.digest, OBJECTS.c.kind), OBJECTS.c.object_id)
_CHUNK, _VALUE = int(EntryForm.CHUNK), int(EntryForm.VALUE)


class Leaf(NamedTuple):
    """A tensor or value that is listed somewhere.

    Attributes:
        spec, flavor: Of a tensor, or of a long value, which is stored as one; a short value has no spec.
        child: Id of the tensor node, or of the only chunk (`single`); None: the bytes are inside of the node.
        kept: What the index keeps of bytes inside of the node.
        node, node_kind, position: The node that lists it, and its place there.
    """

    spec: Spec | None
    flavor: Flavor
    num_bytes: int
    child: Digest | None
    single: bool
    kept: bytes | None
    node: Digest
    node_kind: ObjectKind
    position: int


class Head(NamedTuple):
    """A container, apart from what is in it.

    Attributes:
        attrs: As in `t_trees`: of containers that are no tensors a hash.
    """

    kind: str
    attrs: bytes | None
    node: Digest


class Difference(NamedTuple):
    """A path under which two states have something else."""

    path: Path
    before: Leaf | Head | None
    after: Leaf | Head | None


_Side: TypeAlias = Row | int | None
"""A row, or the node of the root."""

_Rows: TypeAlias = tuple[str, Row | None, Row | None]
"""A name, and what is under it on both sides."""


@dataclass(frozen=True, slots=True)
class _Pair:
    """The entries of one path on both sides."""

    path: Path
    before: _Side
    after: _Side

    @property
    def nodes(self) -> Nodes:
        """The nodes of those that are containers."""
        return _container(self.before), _container(self.after)


def _container(side: _Side) -> int | None:
    if side is None or isinstance(side, int):
        return side
    return side[CHILD] if side[FORM] == CONTAINER else None


def differences(connection: Connection, *roots: bytes) -> list[Difference]:
    """Every path under which two states differ, in the order of keys; of one state, all that is in it.

    Containers are there where their kind or attributes changed, and where they are entries (`Tree.is_entry`) on one
    side only.

    Raises:
        RowsMissingError, TooLargeError, CorruptionError: as for `entries.manifest`.
    """
    if len(set(roots)) < len(roots):
        return []
    numbers = root_numbers(connection, roots)
    top = _Pair((), numbers[roots[0]] if len(roots) > 1 else None, numbers[roots[-1]])
    trees: dict[int, Tree] = {}
    rows = _differing_rows(connection, top.nodes, trees)
    level, found = [top], []
    while level:
        below: list[_Pair] = []
        for pair in level:
            if _is_told(pair, trees):
                found.append(pair)
            for name, before, after in rows[pair.nodes]:
                inner = _Pair((*pair.path, *parse_key(name)), before, after)
                (found if inner.nodes == (None, None) else below).append(inner)
        level = below
    found.sort(key=lambda pair: [name_order(name) for name in pair.path])
    return _told(connection, found, trees)


def _differing_rows(connection: Connection, top: Nodes, trees: dict[int, Tree]) -> dict[Nodes, list[_Rows]]:
    """Pair of containers -> what differs in them, of `top` and all differing pairs below it, each looked at once.

    Equal containers are one node: a few of them could stand for more entries than any memory holds, so they are
    counted before anything is made of them.

    Args:
        trees: The containers, added to.
    """
    found: dict[Nodes, list[_Rows]] = {}
    level = {top: 1}
    total = 0
    for _ in range(MAX_DEPTH):
        if not level:
            return found
        new = level.keys() - found.keys()
        trees |= read_trees(connection, {node for pair in new for node in pair if node is not None} - trees.keys())
        found.update((pair, _differing(*sides)) for pair, sides in open_differing(connection, new, trees).items())
        below: dict[Nodes, int] = {}
        for pair, times in level.items():
            total += times * len(found[pair])
            for _, before, after in found[pair]:
                inner = _container(before), _container(after)
                if inner != (None, None):
                    below[inner] = below.get(inner, 0) + times
        check_entries(total, "the differing parts of two trees stand", times=2)
        level = below
    raise CorruptionError(f"a state is deeper than {MAX_DEPTH} containers: restore it from a copy")


def _differing(before: Sequence[Row], after: Sequence[Row]) -> list[_Rows]:
    """Names whose rows differ, with both of them."""
    old, new = ({row[NAME]: row for row in rows} for rows in (before, after))
    if len(old) != len(before) or len(new) != len(after):
        raise CorruptionError("a tree names an entry twice: restore an older commit")
    found = []
    for name, row in old.items():
        other = new.get(name)
        if other is None or other[FORM:] != row[FORM:]:
            found.append((name, row, other))
    return found + [(name, None, row) for name, row in new.items() if name not in old]


def _is_told(pair: _Pair, trees: Mapping[int, Tree]) -> bool:
    """Whether a pair with a container is a difference of its own, apart from what is in it."""
    old, new = (None if node is None else trees[node] for node in pair.nodes)
    if old is not None and new is not None:
        return (old.kind, old.attrs) != (new.kind, new.attrs)
    return any(_is_shown(side, trees) for side in (pair.before, pair.after))


def _is_shown(side: _Side, trees: Mapping[int, Tree]) -> bool:
    node = _container(side)
    return side is not None and (node is None or trees[node].is_entry)


# --- rows as they are told ------------------------------------------------------------------------


def _told(connection: Connection, pairs: Sequence[_Pair], trees: Mapping[int, Tree]) -> list[Difference]:
    """The pairs without numbers; a container that is no entry counts only beside another container."""
    sides = [side for pair in pairs for side in (pair.before, pair.after)]
    rows = [side for side in sides if isinstance(side, tuple)]
    numbers = {number for row in rows for number in (row[0], row[CHILD])} | {_container(side) for side in sides}
    tell = _SideReader(
        read_specs(connection, {row[SPEC] for row in rows}),
        {number: (Digest(digest), ObjectKind(kind)) for number, digest, kind in _objects(connection, numbers)},
        trees,
    )
    found = []
    for pair in pairs:
        both = None not in pair.nodes
        before, after = (tell(side) if both or _is_shown(side, trees) else None for side in (pair.before, pair.after))
        found.append(Difference(pair.path, before, after))
    return found


def _objects(connection: Connection, numbers: Collection[int | None]) -> Iterator[tuple[int, bytes, int]]:
    for number, digest, kind in _OBJECTS.rows(connection, {number for number in numbers if number is not None}):
        yield number, digest, kind if kind != UNKNOWN_KIND else ObjectKind.CHUNK


class _SideReader:
    """Makes sides of differences from rows."""

    def __init__(
        self, specs: Specs, objects: Mapping[int, tuple[Digest, ObjectKind]], trees: Mapping[int, Tree]
    ) -> None:
        self._specs = specs
        self._objects = objects
        self._trees = trees

    def __call__(self, side: _Side) -> Leaf | Head | None:
        node = _container(side)
        if node is not None:
            tree = self._trees[node]
            return Head(tree.kind, tree.attrs, self._objects[node][0])
        if side is None or isinstance(side, int):
            return None
        listing, position, _, form, spec_id, child, kept = side
        spec, num_bytes = self._specs[spec_id]
        flavor, stored = divmod(form, FLAVOR_STEP)
        return Leaf(
            None if form == _VALUE else spec,
            FLAVORS[flavor],
            num_bytes,
            None if child is None else self._objects[child][0],
            stored == _CHUNK,
            None if kept is None else bytes(kept),
            *self._objects[listing],
            position,
        )
