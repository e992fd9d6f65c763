"""Where states differ: two of them side by side, and which commits changed what some patterns of keys name.

Two states (`differences`):

    1. take the pairs of containers of one level, each pair of nodes once
    2. where they have pages, drop those that both have, and open the others, for all pairs together, level by level
    3. names whose rows differ: containers go into the next level, the rest is the answer

Many commits (`changed_commits`):

    1. their states, and those of their first parents, are walked at once, level by level: a container that several of
       them have under one key is opened once (trees.py)
    2. a container that matches is compared by its node; from below upwards, others that list the same get the same
       number
    3. a commit changed something if its root has another number than that of its first parent

Invariant: a node that both states have in the same place is never opened. Bytes that are stored inside of nodes are
told apart by what the index keeps of them (`manifests.kept_data`). Two states have the same number if and only if what
matches in them is the same: of tensors and values key, spec and content id, of containers that match all that is in
them, and their kind and attributes. The work follows what changes. Knows nothing of chunks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from sqlalchemy import Connection

from cas_ckpt.errors import CorruptionError, TooLargeError
from cas_ckpt.index.entries import Specs, read_specs
from cas_ckpt.index.history import read_commit, read_commits
from cas_ckpt.index.manifests import FLAVOR_STEP
from cas_ckpt.index.rows import UNKNOWN_KIND, CommitRow, objects_by_id, rows_by_key
from cas_ckpt.index.trees import (
    CHILD,
    CONTAINER,
    FORM,
    MAX_DEPTH,
    NAME,
    SPEC,
    Ahead,
    Matcher,
    Nodes,
    Place,
    Row,
    RowsMissingError,
    Tree,
    open_differing,
    open_places,
    read_trees,
    root_numbers,
)
from cas_ckpt.memory import check_entries
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.objects.nodes import FLAVORS, EntryForm, name_order
from cas_ckpt.objects.patterns import KeyPatterns
from cas_ckpt.objects.spec import Spec
from cas_ckpt.objects.state import Flavor, Path, parse_key

_OBJECTS = "SELECT o.object_id, o.digest, o.kind FROM t_objects o WHERE o.object_id {keys}"
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
    for number, digest, kind in rows_by_key(connection, _OBJECTS, {each for each in numbers if each is not None}):
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


# --- which commits changed what some patterns of keys name -----------------------------------------

MOST_ROWS = 250_000
"""Rows of several commits in memory at a time (some 100 MB); one commit alone may have as many as the limits say."""


class TooManyRowsError(TooLargeError):
    """So many commits at a time have more rows than memory should hold: ask for fewer."""


def changed_commits(
    connection: Connection, *, rows: Sequence[CommitRow], keys: KeyPatterns, forgotten: Collection[bytes]
) -> list[CommitRow]:
    """Those of `rows` that differ from their first parent in an entry that matches `keys`, in order.

    A forgotten commit whose data is gone is left out; what follows it is compared with the nearest first parent that
    is still there.

    Raises:
        RowsMissingError: the index does not know all of a state that was not forgotten.
        TooManyRowsError: give fewer commits at a time. TooLargeError, CorruptionError: as for `entries.manifest`.
    """
    history = _History(connection, rows, forgotten)
    while True:
        kept = [row for row in rows if not history.is_gone(row)]
        before = [history.root_before(row) for row in kept]
        try:
            roots = {row.root for row in kept} | {root for root in before if root is not None}
            numbers = number_states(connection, roots, keys)
        except RowsMissingError:
            if not history.drop_incomplete(kept, before, keys):
                raise
        else:
            return [
                row for row, old in zip(kept, before, strict=True) if numbers[row.root] != numbers.get(old, _NOTHING)
            ]


_NOTHING = 0
"""Number of a state in which nothing matches."""


class _History:
    """Commits and their first parents, and which of them have lost their data."""

    def __init__(self, connection: Connection, rows: Sequence[CommitRow], forgotten: Collection[bytes]) -> None:
        self._connection = connection
        self._rows = {row.digest: row for row in rows}
        self._forgotten = forgotten
        self._gone: dict[bytes, bool] = {}
        parents = {row.parents[0] for row in rows if row.parents} - self._rows.keys()
        known = [number for _, number, _ in objects_by_id(connection, parents)]
        self._rows.update((row.digest, row) for row in read_commits(connection, known))

    def is_gone(self, row: CommitRow) -> bool:
        """Whether the commit was forgotten and its data is not there."""
        if row.digest not in self._forgotten:
            return False
        if row.root not in self._gone:
            found = list(objects_by_id(self._connection, [row.root]))
            self._gone[row.root] = not found or found[0][2] == UNKNOWN_KIND
        return self._gone[row.root]

    def root_before(self, row: CommitRow) -> bytes | None:
        """The state of the nearest first parent that has its data."""
        parents = row.parents
        while parents:
            parent = self._rows.get(parents[0]) or read_commit(self._connection, parents[0])
            if parent is None:
                return None
            self._rows[parent.digest] = parent
            if not self.is_gone(parent):
                return parent.root
            parents = parent.parents
        return None

    def drop_incomplete(self, kept: Iterable[CommitRow], before: Iterable[bytes | None], keys: KeyPatterns) -> bool:
        """Note which forgotten commits have lost a part of their data; False: none of those that are in use."""
        used = {row.root for row in kept}.union(before)
        dropped = False
        for row in self._rows.values():
            if row.root in used and row.digest in self._forgotten and not self._gone[row.root]:
                try:
                    number_states(self._connection, [row.root], keys)
                except RowsMissingError:
                    self._gone[row.root] = dropped = True
        return dropped


# --- numbers of states --------------------------------------------------------------------------


@dataclass(slots=True)
class _Listed:
    """Matches in a container under its key.

    Attributes:
        rows: Of what matches, as they are compared: entries, and containers as a whole.
        inside: Name and place of the other containers in it, below which something may match.
    """

    rows: list[tuple[Any, ...]] = field(default_factory=list)
    inside: list[tuple[str, Place]] = field(default_factory=list)


def number_states(connection: Connection, roots: Collection[bytes], keys: KeyPatterns) -> dict[bytes | None, int]:
    """Root -> a number that states have in common if, and only if, what matches in them is the same; None: no state."""
    starts = root_numbers(connection, roots)
    places: set[Place] = {("", number) for number in starts.values()}
    matcher = Matcher(keys)
    levels: list[dict[Place, _Listed]] = []
    ahead, total = Ahead(connection, keys), 0
    while places:
        if len(levels) == MAX_DEPTH:
            raise CorruptionError(f"a state is deeper than {MAX_DEPTH} containers: restore it from a copy")
        _check_matching(total + ahead.num_below(places), len(starts))
        trees = read_trees(connection, {number for _, number in places})
        # A container that is one entry would have been taken as a whole; it is not searched.
        level = {place: _Listed() for place in places if trees[place[1]].is_entry}
        for place, rows in open_places(connection, places - level.keys(), trees, matcher):
            total += len(rows)
            if total > MOST_ROWS and len(starts) > 2:
                raise TooManyRowsError(f"{len(starts)} states have more than {MOST_ROWS} rows: ask for fewer at a time")
            _check_matching(total, len(starts))
            level[place] = _listed(place[0], rows, matcher)
        levels.append(level)
        places = {place for listed in level.values() for _, place in listed.inside}
    numbers: dict[Place, int] = {}
    given: dict[Any, int] = {}
    for level in reversed(levels):
        for place, listed in level.items():
            inside = tuple((name, numbers[below]) for name, below in listed.inside if numbers[below] != _NOTHING)
            content = (tuple(listed.rows), inside)
            numbers[place] = given.setdefault(content, len(given) + 1) if any(content) else _NOTHING
    return {None: _NOTHING} | {root: numbers["", number] for root, number in starts.items()}


def _check_matching(count: int, num_states: int) -> None:
    check_entries(count, "what matches in the tree of a commit stands", times=num_states)


def _listed(key: str, rows: Sequence[Row], matcher: Matcher) -> _Listed:
    found = _Listed()
    for row in rows:
        name, child = row[NAME], row[CHILD]
        inner = f"{key}/{name}" if key else name
        if row[FORM] != CONTAINER:
            if matcher.matches(inner):
                found.rows.append(row[NAME:])
        elif matcher.covers(inner):
            found.rows.append(row[NAME:])  # all of it matches, so that its node says what it is
        elif matcher.reaches(inner) and child is not None:
            found.inside.append((name, (inner, child)))
    return found
