"""Containers of states, opened by their rows: what they list, by way of their pages.

    1. `read_trees` says what the nodes are: kind, height, how many entries
    2. `open_containers` finds the pages of those that have pages, level by level: those that may hold a wanted name
    3. the rows of all of them are read together: those with a wanted text in their name, and all that are containers

Equal containers are one node, which is opened once, whatever it is called and however often it occurs. Of many states
at once the places are opened (`open_places`): a key and the node under it, which states have in common. A few nodes
that each name the next one twice stand for more places than any memory holds: a walk counts them before (`Ahead`).

Invariant: what is answered is whole: a node without rows, or with fewer than it has entries, is never taken for one
that lists nothing (`RowsMissingError`). Numbers of nodes are good for the transaction that they were found in. Knows
nothing of keys: the caller puts names together.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from graphlib import CycleError, TopologicalSorter
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any, Final, NamedTuple, TypeAlias

from sqlalchemy import Connection

from cas_ckpt.errors import CorruptionError
from cas_ckpt.index.db_errors import REBUILD
from cas_ckpt.index.manifests import FLAVOR_STEP, exact_name
from cas_ckpt.index.rows import UNKNOWN_KIND, objects_by_id, rows_by_key, storable
from cas_ckpt.objects.digest import Digest, short
from cas_ckpt.objects.nodes import EntryForm, name_order
from cas_ckpt.objects.patterns import ANY_NAME, KeyPatterns, Names, Order
from cas_ckpt.objects.state import CONTAINER_KINDS, parse_key

Row: TypeAlias = tuple[int, int, str, int, int | None, int | None, bytes | None]
"""A row of `t_entries`: node, position, name as keys are written, form, dtype and shape, what it names, data."""

NAME: Final = 2
FORM: Final = 3
SPEC: Final = 4
CHILD: Final = 5
"""Places of these columns."""

CONTAINER, PAGE = int(EntryForm.CONTAINER), int(EntryForm.PAGE)

MAX_DEPTH = 200
"""Containers inside one another; more are refused."""

Nodes: TypeAlias = tuple[int | None, int | None]
"""The nodes of two containers; None: there is none on that side."""

_Front: TypeAlias = tuple[int, str | None]
"""A node, and the first name in it as the node above says, if there is one."""

_node = itemgetter(0)

_UNEXACT = "\ufffd"
"""Stands in a name for what no database can hold."""

_ROWS = """
    SELECT e.node_id, e.position, e.name, e.form, e.spec_id, e.child_id, e.data FROM t_entries e
    WHERE e.node_id {keys} {filter} ORDER BY e.node_id, e.position
"""
_PAGES = "SELECT e.node_id, e.name, e.child_id FROM t_entries e WHERE e.node_id {keys} ORDER BY e.node_id, e.position"
_COUNTS = f"""
    SELECT e.node_id, e.form, e.spec_id, CASE WHEN e.form = {CONTAINER} THEN e.child_id END, COUNT(*) FROM t_entries e
    WHERE e.node_id {{keys}} GROUP BY 1, 2, 3, 4
"""
_TREES = """
    SELECT t.node_id, t.kind, t.height, t.num_entries, t.attrs, CASE WHEN t.num_entries = 0 OR EXISTS (
        SELECT 1 FROM t_entries e WHERE e.node_id = t.node_id AND e.position = t.num_entries - 1
    ) THEN 1 ELSE 0 END FROM t_trees t WHERE t.node_id {keys}
"""
_RAW_NAMES = "SELECT r.node_id, r.position, r.name FROM t_raw_names r WHERE r.node_id {keys}"
_UNEXACT_NODES = "SELECT r.node_id FROM t_raw_names r"
"""Nodes that list names which no text of a database can be compared with."""

_PARENTS = "SELECT DISTINCT e.parent_id FROM t_edges e WHERE e.child_id {keys}"
_DIGESTS = "SELECT o.object_id, o.digest FROM t_objects o WHERE o.object_id {keys}"


class Alike(NamedTuple):
    """Rows of a container that are counted together; a container's child is its node, others have none."""

    form: int
    spec: int | None
    child: int | None
    times: int


class RowsMissingError(CorruptionError):
    """The index lacks rows of some nodes.

    Attributes:
        digests: Ids of the nodes.
    """

    def __init__(self, digests: Iterable[bytes]) -> None:
        self.digests = tuple(sorted(digests))
        first = f"tree {short(self.digests[0])}" if self.digests else "a tree"
        super().__init__(f"the index has not all rows of {first}; {REBUILD}")


class Tree(NamedTuple):
    """A tree node or page.

    Attributes:
        kind: Of the container; "" for a page.
        height: Levels of pages below it.
        num_entries: Its own, or its pages.
        attrs: What the kind needs besides: as encoded for composite tensors, else a hash of that; None: nothing.
        has_last: Whether there is a row of its last entry: what can be told without reading all of them.
    """

    kind: str
    height: int
    num_entries: int
    attrs: bytes | None
    has_last: int

    @property
    def is_entry(self) -> bool:
        """Whether people see it as one entry: it is empty, or it is a tensor in parts."""
        return not self.num_entries or self.kind not in CONTAINER_KINDS

    def is_page(self, height: int) -> bool:
        """Whether it is a page, with so many levels of pages below it."""
        return not self.kind and self.height == height


def root_number(connection: Connection, root: bytes) -> int:
    """The number of the tree node of a state.

    Raises:
        RowsMissingError: the index knows no such node.
    """
    return root_numbers(connection, [root])[root]


def root_numbers(connection: Connection, roots: Collection[bytes]) -> dict[bytes, int]:
    """Id -> number of the tree nodes of some states.

    Raises:
        RowsMissingError: the index knows no such node.
    """
    found = {digest: number for digest, number, kind in objects_by_id(connection, roots) if kind != UNKNOWN_KIND}
    if len(found) < len(set(roots)):
        raise RowsMissingError(set(roots) - found.keys())
    return found


def read_trees(connection: Connection, numbers: Collection[int]) -> dict[int, Tree]:
    """The nodes of these containers.

    Raises:
        RowsMissingError: there are no rows of one of them. CorruptionError: one is a page.
    """
    found = _read_nodes(connection, numbers)
    if not all(tree.kind for tree in found.values()):
        raise CorruptionError("a page of a tree is in the place of a container: restore an older commit")
    return found


def _read_nodes(connection: Connection, numbers: Collection[int]) -> dict[int, Tree]:
    """These nodes, pages included."""
    found = {row[0]: Tree(*row[1:]) for row in rows_by_key(connection, _TREES, numbers)}
    if len(found) < len(set(numbers)):
        _raise_missing(connection, set(numbers) - found.keys())
    return found


def read_digests(connection: Connection, numbers: Iterable[int]) -> dict[int, Digest]:
    """Number -> id of objects."""
    return {number: Digest(digest) for number, digest in rows_by_key(connection, _DIGESTS, numbers)}


def climb(connection: Connection, numbers: Iterable[int]) -> set[int]:
    """These objects and all nodes that lead to them; each edge is looked at once."""
    found = news = set(numbers)
    while news:
        news = {parent for (parent,) in rows_by_key(connection, _PARENTS, news)} - found
        found = found | news
    return found


def _raise_missing(connection: Connection, numbers: Collection[int]) -> None:
    raise RowsMissingError(read_digests(connection, sorted(numbers)[:100]).values())


def open_containers(
    connection: Connection,
    trees: Mapping[int, Tree],
    names: Names = ANY_NAME,
    *,
    leaves: str = "",
    within: Collection[int] | None = None,
) -> dict[int, Sequence[Row]]:
    """Node -> what each of these containers lists, in its order.

    Args:
        trees: The containers, as `read_trees` found them.
        names: Other names may be left out, but for those of containers.
        leaves: A condition in SQL on rows (`e`) that are not containers; those that do not meet it are left out.
        within: Pages that may be read; others are left out with all that they list. None: any.
    Raises:
        RowsMissingError: rows are missing. CorruptionError: a page is in the wrong place.
    """
    fronts, wanted = _fronts(connection, trees, names, within)
    rows = _read_rows(connection, wanted, names, leaves)
    is_whole = not leaves and names == ANY_NAME and within is None
    return {
        number: _joined(nodes, rows, is_whole=is_whole) if trees[number].height else rows[number]
        for number, nodes in fronts.items()
    }


def count_rows(connection: Connection, trees: Mapping[int, Tree]) -> dict[int, list[Alike]]:
    """Node -> what each of these containers lists, counted by the database: no row of an entry is read.

    Args:
        trees: The containers, as `read_trees` found them.
    Raises:
        RowsMissingError: rows are missing. CorruptionError: a page is in the wrong place.
    """
    fronts, wanted = _fronts(connection, trees, ANY_NAME, None)
    found: dict[int, list[Alike]] = {node: [] for node in wanted}
    for node, *alike in rows_by_key(connection, _COUNTS, wanted):
        found[node].append(Alike(*alike))
    missing = [node for node, tree in wanted.items() if sum(one.times for one in found[node]) != tree.num_entries]
    if missing:
        _raise_missing(connection, missing)
    return {number: [one for node, _ in nodes for one in found[node]] for number, nodes in fronts.items()}


def _fronts(
    connection: Connection, trees: Mapping[int, Tree], names: Names, within: Collection[int] | None
) -> tuple[dict[int, list[_Front]], dict[int, Tree]]:
    """Container -> the nodes that list its entries, in order: itself, or its pages; and what these nodes are."""
    fronts: dict[int, list[_Front]] = {number: [(number, None)] for number in trees}
    paged = {number: tree.height for number, tree in trees.items() if tree.height}
    known = dict(trees)
    while paged:
        opened = {node for number in paged for node, _ in fronts[number]}
        listed = {node: _covering(pages, names) for node, pages in _read_pages(connection, opened, known).items()}
        if within is not None:
            listed = {node: [page for page in pages if page[0] in within] for node, pages in listed.items()}
        known.update(_read_nodes(connection, {page for pages in listed.values() for page, _ in pages} - known.keys()))
        for number, height in paged.items():
            fronts[number] = [page for node, _ in fronts[number] for page in listed[node]]
            if not all(known[page].is_page(height - 1) for page, _ in fronts[number]):
                raise CorruptionError("a page of a tree is in the wrong place: restore an older commit")
        paged = {number: height - 1 for number, height in paged.items() if height > 1}
    return fronts, {node: known[node] for nodes in fronts.values() for node, _ in nodes}


def open_differing(
    connection: Connection, pairs: Collection[Nodes], trees: Mapping[int, Tree]
) -> dict[Nodes, tuple[Sequence[Row], Sequence[Row]]]:
    """Pair of containers -> what each of the two lists, but for the pages that both have; None lists nothing.

    Args:
        trees: All of these containers, as `read_trees` found them.
    Raises:
        RowsMissingError: rows are missing. CorruptionError: a page is in the wrong place.
    """
    known = dict(trees)
    fronts: dict[Nodes, list[tuple[int, list[_Front]]]] = {
        pair: [(0, []) if node is None else (trees[node].height, [(node, None)]) for node in pair] for pair in pairs
    }
    while tops := {pair: top for pair, sides in fronts.items() if (top := max(height for height, _ in sides))}:
        opened = {
            node for pair, top in tops.items() for height, nodes in fronts[pair] if height == top for node, _ in nodes
        }
        pages = _read_pages(connection, opened, known)
        for pair, top in tops.items():
            sides = [
                (height - 1, [page for node, _ in nodes for page in pages[node]]) if height == top else (height, nodes)
                for height, nodes in fronts[pair]
            ]
            common = {page for page, _ in sides[0][1]} & {page for page, _ in sides[1][1]}
            fronts[pair] = [(height, [page for page in nodes if page[0] not in common]) for height, nodes in sides]
        # A container without pages is not one: it waits beside one that has some.
        named = {(page, height) for pair in tops for height, nodes in fronts[pair] for page, first in nodes if first}
        known |= _read_nodes(connection, {page for page, _ in named} - known.keys())
        if not all(known[page].is_page(height) for page, height in named):
            raise CorruptionError("a page of a tree is in the wrong place: restore an older commit")
    rows = _read_rows(
        connection, {node: known[node] for sides in fronts.values() for _, nodes in sides for node, _ in nodes}
    )
    found = {}
    for pair, ((_, before), (_, after)) in fronts.items():
        found[pair] = _joined(before, rows, is_whole=False), _joined(after, rows, is_whole=False)
    return found


def _joined(pages: Sequence[_Front], rows: Mapping[int, Sequence[Row]], *, is_whole: bool) -> Sequence[Row]:
    """The rows of all pages; names ascend from page to page as they do within one."""
    if is_whole:
        for page, first in pages:
            if rows[page][0][NAME] != first:
                raise CorruptionError("a page of a tree is in the wrong place: restore an older commit")
        for (before, _), (_, first) in pairwise(pages):
            if order_of(rows[before][-1][NAME]) >= order_of(first or ""):
                raise CorruptionError("the pages of a tree are out of order: restore an older commit")
    return [row for page, _ in pages for row in rows[page]]


def _read_rows(
    connection: Connection, trees: Mapping[int, Tree], names: Names = ANY_NAME, leaves: str = ""
) -> dict[int, Sequence[Row]]:
    """Node -> its rows in order, those of pages too."""
    conditions = [f"({leaves})"] if leaves else []
    values = {f"name{at}": like for at, like in enumerate(_likes(names))}
    if values:
        likes = " OR ".join(f"e.name LIKE :{name} {_ESCAPE}" for name in values)
        conditions.append(f"({likes} OR e.node_id IN ({_UNEXACT_NODES}))")
    condition = f"AND (e.form = {CONTAINER} OR {' AND '.join(conditions)})" if conditions else ""
    found: dict[int, Sequence[Row]] = dict.fromkeys(trees, ())
    for node, rows in groupby(rows_by_key(connection, _ROWS.replace("{filter}", condition), trees, **values), _node):
        found[node] = list(rows)
    if conditions:
        # If the one name that was asked for is found, the others need not be there.
        missing = [node for node, tree in trees.items() if not (tree.has_last or (names.is_one and found[node]))]
    else:
        missing = [node for node, tree in trees.items() if len(found[node]) != tree.num_entries]
    if missing:
        _raise_missing(connection, missing)
    exact = _exact_names(connection, [node for node, rows in found.items() if _is_unexact(rows, NAME)])
    for node in {node for node, _ in exact}:
        found[node] = [(*row[:NAME], exact.get(row[:NAME], row[NAME]), *row[FORM:]) for row in found[node]]
    return found


def _likes(names: Names) -> list[str]:
    """LIKE patterns for names that may match, in any database; empty: any name."""
    if len(names.globs) > _MOST_LIKES or any(
        len(glob) > _LONGEST_LIKE or storable(glob) != glob for glob in names.globs
    ):
        return []
    return [re.sub(r"[\\%_]", r"\\\g<0>", glob).replace("*", "%").replace("?", "_") for glob in names.globs]


_ESCAPE = "ESCAPE '\\'"
_MOST_LIKES, _LONGEST_LIKE = 64, 1_000
"""More, or longer ones, databases refuse at some point; and to compare with so many takes longer than to fetch all."""


def _is_unexact(rows: Sequence[tuple[Any, ...]], place: int) -> bool:
    """Whether a name may be another one than the column at `place` says."""
    return _UNEXACT in "".join([row[place] for row in rows])


def _exact_names(connection: Connection, nodes: Collection[int]) -> dict[tuple[int, int], str]:
    """(node, position) -> the exact name, where it is another one than in `t_entries`."""
    rows = rows_by_key(connection, _RAW_NAMES, nodes)
    return {(node, position): exact_name("", bytes(name)) for node, position, name in rows}


# --- pages --------------------------------------------------------------------------------------


def _read_pages(
    connection: Connection, numbers: Collection[int], trees: Mapping[int, Tree]
) -> dict[int, Sequence[_Front]]:
    """Node -> the pages that it names, in order, each with its first name."""
    found: dict[int, list[_Front]] = {number: [] for number in numbers}
    for number, first, page in rows_by_key(connection, _PAGES, numbers):
        if page is not None:
            found[number].append((page, first))
    missing = [number for number, pages in found.items() if len(pages) != trees[number].num_entries]
    if missing:
        _raise_missing(connection, missing)
    exact = _exact_names(connection, [number for number, pages in found.items() if _is_unexact(pages, 1)])
    for number, position in exact:
        page, _ = found[number][position]
        found[number][position] = page, exact[number, position]
    return dict(found)


def _covering(pages: Sequence[_Front], names: Names) -> Sequence[_Front]:
    """Those that may hold one of these names: a page holds names up to the first one of the next page."""
    if names.ranges is None:
        return pages
    firsts = [order_of(first or "") for _, first in pages]
    chosen: set[int] = set()
    for low, high in names.ranges:
        chosen.update(range(max(bisect_right(firsts, low) - 1, 0), bisect_left(firsts, high)))
    return [pages[at] for at in sorted(chosen)]


@lru_cache(maxsize=1 << 16)
def order_of(name: str) -> Order:
    """The order of a name as keys are written."""
    return name_order(parse_key(name)[0])


def flavor_of(form: int) -> int:
    """The number of the flavor of a tensor."""
    return form // FLAVOR_STEP


# --- what a walk of a state is about to make, counted before it is made -----------------------------
# Never more than the walk would make, so what is refused would have been refused at its end.

Place: TypeAlias = tuple[str, int]
"""A key, and the node of the container under it; "" is the root."""

_EDGES = f"""
    SELECT e.node_id, e.form, e.child_id FROM t_entries e
    WHERE e.node_id {{keys}} AND e.form IN ({CONTAINER}, {PAGE}) AND e.child_id IS NOT NULL
"""
_MANY_PLACES = 1024
"""Fewer are not worth a look ahead."""


class Ahead:
    """Counts the containers below places, where these are far more than their nodes; those nodes are read, each once.

    Elsewhere a walk is work that grows with what is stored, and nothing is counted.

    Args:
        keys: What the walk looks for; None, or no patterns: all.
        within: Nodes that it opens; None: any.
    """

    def __init__(
        self, connection: Connection, keys: KeyPatterns | None, *, within: Collection[int] | None = None
    ) -> None:
        self._connection = connection
        self._keys = keys
        self._within = within
        self._sizes: dict[int, int] = {}

    def num_below(self, places: Collection[Place]) -> int:
        """Containers, at least, that the walk makes below these places, each as often as it occurs."""
        nodes = {node for _, node in places}
        if len(places) < max(_MANY_PLACES, 2 * len(nodes)):
            return 0
        self._count(nodes)
        largest: dict[str, int] = {}
        for key, node in places:
            if self._sizes[node] > largest.get(key, 0) and (not self._keys or self._keys.reaches_all(key)):
                largest[key] = self._sizes[node]  # several states may have all that is below one key in common
        return sum(largest.values())

    def _count(self, wanted: Collection[int]) -> None:
        edges: dict[int, list[tuple[int, int]]] = {}
        while wanted := {node for node in wanted if node not in edges and node not in self._sizes}:
            edges.update((node, []) for node in wanted)
            for node, form, child in rows_by_key(self._connection, _EDGES, wanted):
                if self._within is None or child in self._within:
                    edges[node].append((form, child))
            wanted = {child for node in wanted for _, child in edges[node]}
        below = {node: [child for _, child in named] for node, named in edges.items()}
        for node in children_first(below):
            if node in edges:
                self._sizes[node] = sum((form == CONTAINER) + self._sizes[child] for form, child in edges[node])


def children_first(below: Mapping[int, Sequence[int]]) -> list[int]:
    """Containers, each after those that are in it.

    Args:
        below: Node -> nodes that it names.
    Raises:
        CorruptionError: one is inside of itself.
    """
    try:
        return list(TopologicalSorter(below).static_order())
    except CycleError as error:
        raise CorruptionError(f"a container is inside of itself; {REBUILD}") from error


# --- containers under their keys, of many states at once: what `log --key` and `find` walk -----------
# No state has two places of one key. What a container holds is told by the places of the level below.


class Matcher:
    """`KeyPatterns` for keys that are asked for again and again: they are the same in most states. No patterns: any."""

    def __init__(self, keys: KeyPatterns) -> None:
        self.matches = cache(keys.matches) if keys else _always
        self.covers = cache(keys.covers) if keys else _always
        self.reaches = cache(keys.reaches) if keys else _always
        self.names_in = cache(keys.names_in) if keys else lambda _: ANY_NAME


def _always(_: str) -> bool:
    return True


def open_places(
    connection: Connection,
    places: Iterable[Place],
    trees: Mapping[int, Tree],
    matcher: Matcher,
    *,
    leaves: str = "",
    within: Collection[int] | None = None,
) -> Iterator[tuple[Place, Sequence[Row]]]:
    """Each place with the rows of its container that may match; arguments and errors as for `open_containers`."""
    groups: dict[Names, set[Place]] = {}
    for place in places:
        groups.setdefault(matcher.names_in(place[0]), set()).add(place)
    for names, group in groups.items():
        opened = open_containers(
            connection, {number: trees[number] for _, number in group}, names, leaves=leaves, within=within
        )
        for place in group:
            yield place, opened[place[1]]
