"""Which commits changed what some patterns of keys name, from the rows of their trees.

    1. the states of many commits, and of their first parents, are walked at once, level by level: a container that
       several of them have under one key is opened once (trees.py)
    2. a container that matches is compared by its node; from below upwards, others that list the same get the same
       number
    3. a commit changed something if its root has another number than that of its first parent

Invariant: two states have the same number if and only if what matches in them is the same: of tensors and values key,
spec and content id, of containers that match all that is in them, and their kind and attributes, as `diff` tells them.
The work follows what changes from commit to commit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection

from cas_ckpt.errors import CorruptionError, TooLargeError
from cas_ckpt.index.database import OBJECTS_BY_ID
from cas_ckpt.index.history import read_commit, read_commits
from cas_ckpt.index.rows import UNKNOWN_KIND, CommitRow
from cas_ckpt.index.trees import (
    CHILD,
    CONTAINER,
    FORM,
    MAX_DEPTH,
    NAME,
    Ahead,
    Matcher,
    Place,
    Row,
    RowsMissingError,
    open_places,
    read_trees,
    root_numbers,
)
from cas_ckpt.memory import check_entries
from cas_ckpt.objects.patterns import KeyPatterns

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
        known = [number for _, number, _ in OBJECTS_BY_ID.rows(connection, parents)]
        self._rows.update((row.digest, row) for row in read_commits(connection, known))

    def is_gone(self, row: CommitRow) -> bool:
        """Whether the commit was forgotten and its data is not there."""
        if row.digest not in self._forgotten:
            return False
        if row.root not in self._gone:
            found = list(OBJECTS_BY_ID.rows(self._connection, [row.root]))
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
