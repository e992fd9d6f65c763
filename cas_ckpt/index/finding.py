"""Entries and commits by what they are: keys, dtype, shape, bytes, or an object that they hold.

    1. which dtypes and shapes are meant, and from the nodes that list such tensors upwards, what is above them
    2. the states are walked from their roots, at once (trees.py), only through what is above
    3. what matches is gathered by key and content; each place passes on how many states lead to it, and which are the
       first and the last of them

Under one key a state has one place, so counts add up, and no set of states is kept. Where nothing but a dtype and a
shape is asked for, and nothing in the index could be shown otherwise than it is stored, step 1 says which commits hold
such tensors.

Invariant: an entry is found if, and only if, a list of its state shows it so (entries.py). Knows nothing of refs; the
caller says which states are meant, in which order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias

from sqlalchemy import Connection

from cas_ckpt.arguments import some_of
from cas_ckpt.errors import CorruptionError, NotFoundError, TooLargeError, shown_value
from cas_ckpt.index.entries import Shown, Specs, What, read_all_specs, read_composites
from cas_ckpt.index.rows import ListedEntry, objects_by_id, rows, rows_by_key
from cas_ckpt.index.trees import (
    CHILD,
    CONTAINER,
    FORM,
    MAX_DEPTH,
    Ahead,
    Matcher,
    Place,
    Row,
    Tree,
    climb,
    open_places,
    read_digests,
    read_trees,
    root_numbers,
)
from cas_ckpt.memory import check_entries
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.patterns import KeyPatterns
from cas_ckpt.objects.state import CONTAINER_KINDS

_MOST_SPECS = 1000
"""Most dtypes and shapes in a query; with more, the database returns all rows."""

FEW_STATES = 16
"""So many states are looked through sooner than all nodes of history that list a dtype or shape."""


@dataclass(frozen=True, slots=True)
class EntryFilter:
    """Conditions on entries. None, or no patterns, is not a condition.

    Attributes:
        keys: Patterns that their keys match.
        dtype: Its name, or a pattern (*, ?, [...]) of it.
        shape: Sizes; None for any size, ... for any number of dimensions.
        min_bytes, max_bytes: Plain bytes, both included.
        holding: Id of a chunk, tensor or tensor in parts that they are, or hold.
    """

    keys: KeyPatterns
    dtype: str | None = None
    shape: tuple[Any, ...] | None = None
    min_bytes: int | None = None
    max_bytes: int | None = None
    holding: bytes | None = None

    def admits(self, dtype: str | None, shape: tuple[int, ...] | None, num_bytes: int) -> bool:
        """Whether an entry of this dtype, shape and length is wanted, whatever its key and content."""
        if self.dtype is not None and (dtype is None or not _is_dtype(dtype, self.dtype)):
            return False
        if self.shape is not None and (shape is None or not _fits(shape, self.shape)):
            return False
        return (self.min_bytes or 0) <= num_bytes and (self.max_bytes is None or num_bytes <= self.max_bytes)


def _is_dtype(name: str, wanted: str) -> bool:
    return name == wanted or fnmatchcase(name, wanted)  # np:<M8[ns] is a name, although it reads as a pattern


def _fits(shape: tuple[int, ...], wanted: tuple[Any, ...]) -> bool:
    if ... not in wanted:
        sizes = zip(shape, wanted, strict=False)
        return len(shape) == len(wanted) and all(size is None or size == own for own, size in sizes)
    at = wanted.index(...)
    before, behind = wanted[:at], wanted[at + 1 :]
    if len(shape) < len(before) + len(behind):
        return False
    return _fits(shape[: len(before)], before) and _fits(shape[len(shape) - len(behind) :], behind)


class Match(NamedTuple):
    """An entry as it is in one or several states.

    Attributes:
        entry: As lists show it.
        content: Id of the tensor, chunk or container that it is; None: so small that it has none.
        first, last: Numbers of the first and the last state that has it, in the order in which they were given.
        num_states: How many have it.
    """

    entry: ListedEntry
    content: Digest | None
    first: int
    last: int
    num_states: int


def find_entries(connection: Connection, *, roots: Sequence[bytes], wanted: EntryFilter) -> list[Match]:
    """Matching entries of the states `roots`, in no order; equal content under one key is one entry.

    Args:
        roots: A state may come several times: it counts each time.
    Raises:
        NotFoundError: there are no tensors of this dtype at all, or no such object.
        RowsMissingError, TooLargeError, CorruptionError: as for `entries.manifest`.
    """
    numbers = root_numbers(connection, roots)
    spans: dict[Place, _Span] = {}
    for at, root in enumerate(roots):
        _join(spans, ("", numbers[root]), (at, at, 1))
    search = _Search(connection, wanted)
    found: dict[tuple[str, _Content], _Span] = {}
    for level in search.levels(spans.keys()):
        below: dict[Place, _Span] = {}
        for place, listed in level.items():
            span = spans[place]
            for match in listed.matches:
                _join(found, match, span)
            for inner in listed.inside:
                _join(below, inner, span)
        _check_found(len(found) + len(below))
        spans = below
    return search.shown(found)


def find_states(connection: Connection, *, roots: Collection[bytes], wanted: EntryFilter) -> set[bytes]:
    """Those of the states `roots` in which something is wanted; errors as for `find_entries`."""
    numbers = root_numbers(connection, roots)
    states = sorted(set(numbers.values()))
    holding: set[int] | None = None
    if len(states) <= FEW_STATES:
        with suppress(TooLargeError):  # from below, states are found however much is in them
            holding = _holding(_Search(connection, wanted, climbs=False), states)
    if holding is None:
        search = _Search(connection, wanted)
        holding = search.above if search.is_exact and search.above is not None else _holding(search, states)
    return {root for root, number in numbers.items() if number in holding}


def _holding(search: _Search, roots: Sequence[int]) -> set[int]:
    """Those of the states in which something is wanted; what is found in too many at a time is looked for in halves."""
    try:
        levels = list(search.levels({("", number) for number in roots}))
    except TooLargeError:
        if len(roots) == 1:
            raise
        half = len(roots) // 2
        return _holding(search, roots[:half]) | _holding(search, roots[half:])
    holding: set[Place] = set()
    for level in reversed(levels):
        for place, listed in level.items():
            if listed.matches or not holding.isdisjoint(listed.inside):
                holding.add(place)
    return {number for number in roots if ("", number) in holding}


def _check_found(count: int) -> None:
    check_entries(count, "what is found stands", instead="look for less, or in fewer commits")


_Span: TypeAlias = tuple[int, int, int]
"""The first and the last state, and how many."""


def _join(spans: dict[Any, _Span], what: Any, span: _Span) -> None:
    known = spans.get(what)
    if known is not None:
        span = min(known[0], span[0]), max(known[1], span[1]), known[2] + span[2]
    spans[what] = span


# --- the search ---------------------------------------------------------------------------------

_Content: TypeAlias = tuple[Any, ...] | int
"""The columns of a row behind its name, or of a container that is one entry its node."""

_LONG_VALUES = "uint8"
"""Dtype under which plain values are stored that are too long for their container; lists do not show it."""

_LISTING = "SELECT DISTINCT s.node_id FROM t_node_specs s WHERE s.spec_id {keys}"
_CONTAINERS = {f"kind{at}": kind for at, kind in enumerate(sorted(CONTAINER_KINDS))}
_COMPOSITES = (
    f"SELECT t.node_id FROM t_trees t WHERE t.kind NOT IN ('', {', '.join(f':{name}' for name in _CONTAINERS)})"
)
"""Tensors in parts; pages have no kind."""


@dataclass(slots=True)
class _Listed:
    """Matches in one place.

    Attributes:
        matches: Key and content of entries.
        inside: Places in which more may be wanted.
    """

    matches: list[tuple[str, _Content]] = field(default_factory=list)
    inside: list[Place] = field(default_factory=list)


class _Search:
    """The conditions, in numbers of this transaction.

    Args:
        climbs: Find out what is above a dtype, shape or length, in all of history.

    Attributes:
        above: Nodes in which something may be wanted; None: any.
        is_exact: In each of them something is wanted.
    """

    def __init__(self, connection: Connection, wanted: EntryFilter, *, climbs: bool = True) -> None:
        self._connection = connection
        self._wanted = wanted
        self._matcher = Matcher(wanted.keys)
        specs = read_all_specs(connection)
        self._shown = Shown(specs)
        self._holding: set[int] | None = None
        self.above: set[int] | None = None
        self.is_exact = False
        self._leaves = ""
        self._composites: dict[int, ListedEntry] = {}
        of_spec = wanted.dtype is not None or wanted.shape is not None
        if of_spec or wanted.min_bytes or wanted.max_bytes is not None:
            self._choose_specs(specs, rare=climbs and (of_spec or bool(wanted.min_bytes)))
        if wanted.holding is not None:
            number = next((number for _, number, _ in objects_by_id(connection, [wanted.holding])), None)
            self._holding = set() if number is None else climb(connection, {number})
            self.above = self._holding if self.above is None else self.above & self._holding
            self.is_exact = False

    def _choose_specs(self, specs: Specs, *, rare: bool) -> None:
        """Find out which dtypes, shapes and lengths are meant, and if they are `rare`, what is above them."""
        wanted, chosen, unclear = self._wanted, [], False
        if wanted.dtype is not None:
            known = sorted({spec.dtype for spec, _ in specs.values() if spec.dtype})
            if not any(_is_dtype(dtype, wanted.dtype) for dtype in known):
                raise NotFoundError(f"no tensor has the dtype {shown_value(wanted.dtype)}: there are {some_of(known)}")
        for number, (spec, num_bytes) in specs.items():
            as_value = wanted.admits(None, None, num_bytes)
            as_tensor = wanted.admits(spec.dtype, spec.shape, num_bytes) if spec.dtype else as_value
            if as_value or as_tensor:
                chosen.append(number or 0)
            unclear |= as_value != as_tensor and spec.dtype == _LONG_VALUES
        if len(chosen) <= _MOST_SPECS:
            self._leaves = f"e.spec_id IN ({', '.join(map(str, chosen)) or 'NULL'})"
        if rare:
            parts = {number for (number,) in rows(self._connection, _COMPOSITES, **_CONTAINERS)}
            nodes = {number for (number,) in rows_by_key(self._connection, _LISTING, chosen)}
            self.above = climb(self._connection, nodes | parts)
            self.is_exact = not (parts or unclear or wanted.keys)

    def levels(self, places: Collection[Place]) -> Iterator[dict[Place, _Listed]]:
        """Matches in these places, then in those below them, level by level."""
        ahead, total = Ahead(self._connection, self._wanted.keys, within=self.above), 0
        trees = read_trees(self._connection, {number for _, number in places})
        for _ in range(MAX_DEPTH):
            places = {place for place in places if self._may_be_in(place[1])}
            if not places:
                return
            _check_found(total + ahead.num_below(places))
            opened = open_places(self._connection, places, trees, self._matcher, leaves=self._leaves, within=self.above)
            level: dict[Place, _Listed] = {}
            for place, own in opened:
                level[place] = listed = self._listed(place[0], own)
                total += len(listed.matches) + len(listed.inside)
                _check_found(total)
            trees = read_trees(self._connection, {number for listed in level.values() for _, number in listed.inside})
            self._take_composites(level, trees)
            yield level
            places = {place for listed in level.values() for place in listed.inside}
        raise CorruptionError(f"a state is deeper than {MAX_DEPTH} containers: restore it from a copy")

    def _may_be_in(self, number: int) -> bool:
        return self.above is None or number in self.above

    def _listed(self, key: str, rows: Sequence[Row]) -> _Listed:
        prefix = f"{key}/" if key else ""
        listed = _Listed()
        for row in rows:
            _, _, name, form, spec, child, _ = row
            if form == CONTAINER:
                if child is not None and self._may_be_in(child) and self._matcher.reaches(prefix + name):
                    listed.inside.append((prefix + name, child))
            elif self._is_wanted(self._shown.of(form, spec), child) and self._matcher.matches(prefix + name):
                listed.matches.append((prefix + name, row[FORM:]))
        return listed

    def _is_wanted(self, what: What, number: int | None) -> bool:
        return self._wanted.admits(*what[1:]) and (self._holding is None or number in self._holding)

    def _take_composites(self, level: Mapping[Place, _Listed], trees: Mapping[int, Tree]) -> None:
        """Containers that are one entry match or not; they are not searched."""
        numbers = {number for number, tree in trees.items() if tree.is_entry}
        self._composites.update(read_composites(self._connection, numbers - self._composites.keys()))
        for listed in level.values() if numbers else ():
            ones = [(key, number) for key, number in listed.inside if number in numbers and self._matcher.matches(key)]
            listed.matches += [one for one in ones if self._is_wanted(self._composites[one[1]][1:], one[1])]
            listed.inside = [place for place in listed.inside if place[1] not in numbers]

    def shown(self, found: Mapping[tuple[str, _Content], _Span]) -> list[Match]:
        """The matches, as listings show them."""
        numbers = {content if isinstance(content, int) else content[_CHILD] for _, content in found}
        digests = read_digests(self._connection, numbers - {None})
        answer = []
        for (key, content), span in found.items():
            if isinstance(content, int):
                entry, number = self._composites[content]._replace(key=key), content
            else:
                entry, number = ListedEntry(key, *self._shown.of(*content[:2])), content[_CHILD]
            answer.append(Match(entry, digests.get(number), *span))
        return answer


_CHILD = CHILD - FORM
