"""Does the index say what the packs say, which objects are complete nowhere, and when packs were last read.

    differences     row by row, some packs at a time: what `add_packs` would write for them, and what is there
    stray_rows      what is there besides: rows of nodes, commits or packs that the index does not know
    IntegrityView   how far damage reaches: objects that intact extents do not hold completely, and what is above them
    scrubs          which packs were read and verified completely, when, and what was found

Invariant: a pack that `differences` does not name agrees with its rows; other packs, and objects that are stored in
others too, do not matter to the answer. Memory grows with the packs that are asked for, or with the damage, not with
the index. Knows nothing of refs, of keys, or of how packs are read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from sqlalchemy import ColumnElement, Connection, Table, exists, func, select

from cas_ckpt.errors import ConflictError
from cas_ckpt.index.contents import PARTIAL, location_row, rows_of_commit
from cas_ckpt.index.database import columns_of, upsert
from cas_ckpt.index.garbage import Extent, covers, promised_numbers
from cas_ckpt.index.history import read_commits
from cas_ckpt.index.index import Index
from cas_ckpt.index.manifests import OF_LAYOUTS, content_rows, layout_differs, read_specs, spec_row, specs_in
from cas_ckpt.index.remembered import MADE, read_meta
from cas_ckpt.index.rows import UNKNOWN_KIND, PackRecord, batches, each_row, objects_by_id, rows, rows_by_key, storable
from cas_ckpt.index.schema import (
    COMMIT_TEXTS,
    COMMITS,
    EDGES,
    ENTRIES,
    LAYOUTS,
    LINEAGE,
    LOCATIONS,
    METRICS,
    MORE_PARENTS,
    NODE_SPECS,
    NOWHERE,
    OBJECTS,
    PACKS,
    RAW_NAMES,
    SCRUBS,
    SPECS,
    TENSORS,
    TREES,
    VALUES,
)
from cas_ckpt.index.trees import climb, read_digests
from cas_ckpt.objects.digest import SHORT_HEX, ObjectKind
from cas_ckpt.objects.layouts import LayoutObject
from cas_ckpt.objects.spec import Spec

_Numbers: TypeAlias = Mapping[bytes, int]

UNKNOWN = "the index does not know it"
"""Returned by `differences` for a pack without rows: the index is behind."""


def _all_of(connection: Connection, table: Table, column: str, keys: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """All columns of the rows of `table` whose `column` is one of `keys`."""
    return rows_by_key(connection, f"SELECT {columns_of(table)} FROM {table.name} WHERE {column} {{keys}}", keys)


def differences(connection: Connection, records: Sequence[PackRecord]) -> dict[str, str]:
    """Pack -> how the rows of the index differ from `records`; packs that agree are left out.

    Args:
        records: As the packs have them. Nodes that cannot be read may be left out of `edges` and `commits`.
    """
    names = {record.name: record for record in records}
    known = {name: (number, said) for number, name, *said, _ in _all_of(connection, PACKS, "name", names)}
    present = [record for record in records if record.name in known]
    found: dict[str, list[str]] = {record.name: [] for record in records}
    for record in records:
        if record.name not in known:
            found[record.name].append(UNKNOWN)
    wanted = {bytes(entry.digest) for record in present for entry in record.entries}
    wanted.update(child for record in present for _, children in record.edges for child in children)
    objects = list(objects_by_id(connection, wanted))
    numbers = {digest: number for digest, number, _ in objects}
    kinds = {digest: kind for digest, _, kind in objects}
    edges: dict[int, set[int]] = {}
    parents = {numbers[parent] for record in present for parent, _ in record.edges if parent in numbers}
    for parent, child in _all_of(connection, EDGES, "parent_id", parents):
        edges.setdefault(parent, set()).add(child)
    locations: dict[int, set[tuple[Any, ...]]] = {}
    for location in _all_of(connection, LOCATIONS, "pack_id", [known[record.name][0] for record in present]):
        locations.setdefault(location[1], set()).add(location)
    for record in present:
        number, said = known[record.name]
        say = found[record.name]
        if said != [int(record.kind), record.size_bytes, len(record.entries)]:
            say.append("kind, size or number of entries differ")
        say += _compare_rows(record, locations.get(number, set()), number, numbers)
        wrong = sum(kinds.get(entry.digest, entry.kind) != entry.kind for entry in record.entries)
        if wrong:
            say.append(f"{wrong} objects are of another kind")
        wrong = 0
        for node, children in record.edges:
            referred = {numbers.get(child, NOWHERE) for child in children}
            wrong += referred != edges.get(numbers.get(node, NOWHERE), set())
        if wrong:
            say.append(f"what {wrong} nodes refer to differs")
    for record in present:
        found[record.name] += _compare_contents(connection, record, numbers)
    for name, what in _compare_commits(connection, present, numbers):
        found[name].append(what)
    return {name: "; ".join(what) for name, what in found.items() if what}


def _compare_rows(record: PackRecord, there: set[tuple[Any, ...]], pack_id: int, numbers: _Numbers) -> list[str]:
    wanted = {location_row(numbers.get(entry.digest, NOWHERE), pack_id, entry) for entry in record.entries}
    if wanted == there:
        return []
    places = {row[:3] for row in there}
    missing = {row for row in wanted - there if row[:3] not in places}
    extra = {row[:3] for row in there - wanted} - {row[:3] for row in wanted}
    different = len(wanted - there) - len(missing)
    return [f"rows of entries: {len(missing)} missing, {len(extra)} too many, {different} different"]


_COUNTED = """
    SELECT DISTINCT s.spec_id, s.node_id, s.num_entries FROM t_node_specs s
    JOIN t_entries e ON e.spec_id = s.spec_id AND e.node_id = s.node_id WHERE e.node_id {keys}
"""
"""There is no way into this table by node."""


def _compare_contents(connection: Connection, record: PackRecord, numbers: _Numbers) -> Iterable[str]:
    """Differences in the manifests' rows of the nodes of a pack.

    The rows of dtypes and shapes are compared by what they say: their numbers are of this index alone.
    """
    for digest, content in record.contents:
        if isinstance(content, LayoutObject) and layout_differs(connection, numbers.get(digest, NOWHERE), content):
            yield f"the rows of layout {digest.hex()[:SHORT_HEX]} differ"
    wanted = specs_in(content for _, content in record.contents)
    specs = read_specs(connection, wanted)
    specs |= {pair: -1 - at for at, pair in enumerate(sorted(wanted - specs.keys()))}
    nodes = {numbers.get(digest, NOWHERE) for digest, _ in record.contents}
    named = [digest for digest, _ in record.contents] + [child for _, children in record.edges for child in children]
    rows_of_record = content_rows([record], {digest: numbers.get(digest, NOWHERE) for digest in named}, specs)
    for table in (TREES, ENTRIES, RAW_NAMES, TENSORS, NODE_SPECS):
        place = int(table is NODE_SPECS)  # of the number of the node
        column = next(iter(table.columns)).name
        there = rows_by_key(connection, _COUNTED, nodes) if place else _all_of(connection, table, column, nodes)
        wrong = {row[place] for row in set(rows_of_record[table]).symmetric_difference(there)}
        if wrong:
            yield f"the rows of {len(wrong)} nodes in {table.name} differ"
    values = set(rows_of_record[VALUES])
    if not values.issubset(_all_of(connection, VALUES, "data", {row[0] for row in values})):
        yield "the texts of values differ"
    stored = {row[1]: row for row in _all_of(connection, SPECS, "spec_id", specs.values())}
    for (dtype, shape), spec_id in specs.items():
        # How long a tensor is depends on whether the version that wrote the row knew the dtype.
        compared = slice(None if not dtype or Spec(dtype, shape).is_known else -1)
        wanted_row: tuple[Any, ...] = spec_row((dtype, shape), spec_id)
        if wanted_row[compared] != stored.get(spec_id, ())[compared]:
            yield "dtypes and shapes differ"
            break


_OF_COMMITS = (MORE_PARENTS, METRICS, LINEAGE, COMMIT_TEXTS)
"""Fields that are not in the row of a commit itself."""


def _compare_commits(
    connection: Connection, records: Iterable[PackRecord], numbers: _Numbers
) -> Iterable[tuple[str, str]]:
    commits = {commit.digest: (record.name, commit) for record in records for commit in record.commits}
    known = {numbers[digest] for digest in commits if digest in numbers}
    found = {commit.digest: commit for commit in read_commits(connection, sorted(known))}
    stored: dict[Table, dict[int, set[tuple[Any, ...]]]] = {table: {} for table in _OF_COMMITS}
    for table in _OF_COMMITS:
        for each in _all_of(connection, table, "object_id", known):
            stored[table].setdefault(each[0], set()).add(each)
    for digest, (pack, commit) in commits.items():
        number, row = numbers.get(digest, NOWHERE), found.get(digest)
        plain = replace(
            commit, message=storable(commit.message), author=storable(commit.author), branch=None, lineage=()
        )
        more = rows_of_commit(number, commit)
        differs = any(stored[table].get(number, set()) != set(wanted) for table, wanted in more.items())
        if row is None or differs or replace(row, branch=None, lineage=()) != plain:
            yield pack, f"the row of commit {commit.digest.hex()[:12]} differs"


_NODES = {
    TREES.c.node_id: (ObjectKind.TREE, ObjectKind.TREE_PAGE),
    TENSORS.c.object_id: (ObjectKind.TENSOR,),
    LAYOUTS.c.object_id: (ObjectKind.LAYOUT,),
    COMMITS.c.object_id: (ObjectKind.COMMIT,),
}
_OWNERS = {
    TREES.c.node_id: (ENTRIES, RAW_NAMES),
    LAYOUTS.c.object_id: OF_LAYOUTS,
    COMMITS.c.object_id: _OF_COMMITS,
}  # fmt: skip


def _owners() -> Iterator[tuple[Table, ColumnElement[bool]]]:
    """Tables, and what there has to be for each of their rows."""
    for column, kinds in _NODES.items():
        yield column.table, (OBJECTS.c.object_id == column) & OBJECTS.c.kind.in_(list(map(int, kinds)))
    for column, tables in _OWNERS.items():
        for table in tables:
            yield table, next(iter(table.primary_key)) == column
    yield NODE_SPECS, (ENTRIES.c.node_id == NODE_SPECS.c.node_id) & (ENTRIES.c.spec_id == NODE_SPECS.c.spec_id)


def stray_rows(connection: Connection) -> list[str]:
    """Tables with rows that belong to nothing that the index knows, or with a number given twice; and how many.

    Nobody finds these by way of a pack, but a number may be given again, and there is a way from dtypes to nodes.
    """
    found = []
    for table, owner in _owners():
        strays = select(func.count()).select_from(table).where(~exists().where(owner))
        if number := connection.execute(strays).scalar_one():
            found.append(f"{number} rows of {table.name} belong to nothing")
    twice = select(func.count() - func.count(SPECS.c.spec_id.distinct())).select_from(SPECS)
    if number := connection.execute(twice).scalar_one():
        found.append(f"{number} rows of {SPECS.name} have the number of another")
    return found


_OBJECTS_PER_READ = 10_000

_PLACES = """
    SELECT l."offset", l.object_id FROM t_packs p JOIN t_locations l ON l.pack_id = p.pack_id WHERE p.name {keys}
"""
_EXTENTS = """
    SELECT l.object_id, l.pack_id, l.first_leaf, l.num_leaves, l.leaf_bytes, l.num_bytes, l."offset" FROM t_locations l
    WHERE l.object_id {keys}
"""


@dataclass(frozen=True, slots=True)
class UnusableParts:
    """Parts of the index that cannot be relied on.

    Attributes:
        packs: Names of packs that are gone, or whose structure is broken.
        extents: (pack, offset) of entries that are damaged.
    """

    packs: frozenset[str] = frozenset()
    extents: frozenset[tuple[str, int]] = field(default=frozenset())


class IntegrityView:
    """Questions about objects by number, in an index that agrees with the packs.

    An object is complete if intact extents, in packs that are there, hold every one of its leaves. Every answer is of
    one transaction of its own, and is refused once the index was made anew: then numbers mean other objects.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        self._made = index.made()

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        """A transaction in which numbers mean what they meant at the beginning."""
        with self._index.reading() as connection:
            if read_meta(connection, MADE) != self._made:
                raise ConflictError(f"index {self._index.place}: it was made anew meanwhile: ask again")
            yield connection

    def numbers(self, digests: Iterable[bytes]) -> dict[bytes, int]:
        """Digest -> number; unknown digests are left out."""
        with self._reading() as connection:
            return {digest: number for digest, number, _ in objects_by_id(connection, digests)}

    def digests(self, numbers: Collection[int]) -> Mapping[int, bytes]:
        """Number -> digest."""
        with self._reading() as connection:
            return read_digests(connection, numbers)

    def referred_only(self) -> set[int]:
        """Objects that nodes refer to and that no pack holds."""
        return self._numbers(f"SELECT object_id FROM t_objects WHERE kind = {UNKNOWN_KIND}")

    def in_parts(self) -> set[int]:
        """Objects of which some extent holds only a part."""
        return self._numbers(f"SELECT DISTINCT l.object_id FROM t_locations l WHERE l.leaf_bytes > 0 AND {PARTIAL}")

    def _numbers(self, query: str) -> set[int]:
        with self._reading() as connection:
            return {number for (number,) in each_row(connection, query)}

    def in_packs(self, packs: Collection[str]) -> set[int]:
        """Objects of which these packs hold something."""
        with self._reading() as connection:
            return {number for _, number in rows_by_key(connection, _PLACES, packs)}

    def places(self, pack: str) -> dict[int, int]:
        """Offset -> object, for every entry that the index knows of in the pack."""
        with self._reading() as connection:
            return dict(rows_by_key(connection, _PLACES, [pack]))

    def incomplete(self, numbers: Iterable[int], unusable: UnusableParts) -> set[int]:
        """Those of the objects that are complete nowhere once `unusable` is left out."""
        found: set[int] = set()
        with self._reading() as connection:
            names = dict(rows(connection, "SELECT pack_id, name FROM t_packs"))
            for batch in batches(sorted(set(numbers)), _OBJECTS_PER_READ):
                places: dict[int, list[Extent]] = {number: [] for number in batch}
                for *extent, offset in rows_by_key(connection, _EXTENTS, batch):
                    one = Extent(*extent)
                    name = names.get(one.pack_id)
                    if name is not None and name not in unusable.packs and (name, offset) not in unusable.extents:
                        places[one.object_id].append(one)
                found.update(number for number, extents in places.items() if not covers(extents))
        return found

    def promised(self, numbers: Iterable[int], roots: Collection[bytes]) -> set[int]:
        """Those of the objects, which are complete nowhere, that are promised."""
        with self._reading() as connection:
            return promised_numbers(connection, numbers, roots)

    def above(self, numbers: Iterable[int]) -> set[int]:
        """These objects and all nodes that lead to them."""
        with self._reading() as connection:
            return climb(connection, numbers)


@dataclass(frozen=True, slots=True)
class Scrub:
    """One pack, read completely.

    Attributes:
        checked_us: When, microseconds since the epoch.
        num_bytes: How much was read.
        damage: What was wrong; None: nothing.
    """

    pack: str
    checked_us: int
    num_bytes: int
    damage: str | None = None


def read_scrubs(connection: Connection) -> dict[str, Scrub]:
    """Pack -> its last reading."""
    return {row[0]: Scrub(*row) for row in rows(connection, f"SELECT {columns_of(SCRUBS)} FROM {SCRUBS.name}")}


def write_scrub(connection: Connection, scrub: Scrub) -> None:
    """Put `scrub` in the place of the pack's former reading."""
    upsert(connection, SCRUBS, (scrub.pack, scrub.checked_us, scrub.num_bytes, scrub.damage))
