"""Does the index say what the packs say? Row by row, some packs at a time.

Invariant: what `differences` names none of equals what `add_packs` would write for these packs;
other packs, and objects that stand in others too, do not matter to the answer. Memory grows with
the packs that are asked for, not with the index.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from sqlalchemy import Connection, select

from cas_ckpt.index.history import read_commits
from cas_ckpt.index.ingest import storable
from cas_ckpt.index.rows import CommitRow, EntryRecord, PackRecord
from cas_ckpt.index.schema import EDGES, LOCATIONS, METRICS, NOWHERE, OBJECTS, PACKS
from cas_ckpt.index.statements import KeyQuery, rows_for

_Numbers: TypeAlias = Mapping[bytes, int]
_Kinds: TypeAlias = Mapping[bytes, int]

UNKNOWN = "the index does not know it"
"""What `differences` says of a pack that has no rows: the index is behind."""

_OBJECTS = KeyQuery(select(OBJECTS.c.digest, OBJECTS.c.object_id, OBJECTS.c.kind), OBJECTS.c.digest)
_ROWS = KeyQuery(select(LOCATIONS), LOCATIONS.c.pack_id)
_PACK_ID = list(LOCATIONS.c.keys()).index("pack_id")
_EDGES = KeyQuery(select(EDGES.c.parent_id, EDGES.c.child_id), EDGES.c.parent_id)
_METRICS = KeyQuery(select(METRICS.c.object_id, METRICS.c.name, METRICS.c.value), METRICS.c.object_id)


def differences(connection: Connection, records: Sequence[PackRecord]) -> dict[str, str]:
    """Pack -> how the rows of the index differ from `records`; packs that agree are left out.

    Args:
        records: As the packs tell them. Nodes that cannot be read may be left out of `edges` and `commits`.
    """
    names = {record.name: record for record in records}
    known = {row.name: row for row in rows_for(connection, select(PACKS), PACKS.c.name, names)}
    present = [record for record in records if record.name in known]
    found: dict[str, list[str]] = {record.name: [] for record in records}
    for record in records:
        if record.name not in known:
            found[record.name].append(UNKNOWN)
    numbers, kinds = _objects(connection, present)
    edges = _children(connection, present, numbers)
    rows = _rows_of_packs(connection, [known[record.name].pack_id for record in present])
    for record in present:
        row = known[record.name]
        say = found[record.name]
        if (row.kind, row.size_bytes, row.num_entries) != (int(record.kind), record.size_bytes, len(record.entries)):
            say.append("kind, size or number of entries differ")
        say += _compare_rows(record, rows.get(row.pack_id, set()), row.pack_id, numbers)
        say += _compare_kinds(record, kinds)
        say += _compare_edges(record, edges, numbers)
    for name, what in _compare_commits(connection, present, numbers):
        found[name].append(what)
    return {name: "; ".join(what) for name, what in found.items() if what}


def disorder(connection: Connection) -> list[str]:
    """What SQLite finds wrong with its own pages; PostgreSQL has no such question."""
    if connection.dialect.name != "sqlite":
        return []
    found = [str(row[0]) for row in connection.exec_driver_sql("PRAGMA quick_check(10)")]
    return [] if found == ["ok"] else found


def _objects(connection: Connection, records: Iterable[PackRecord]) -> tuple[_Numbers, _Kinds]:
    """Number and kind of each object that the records name and the index knows."""
    wanted = {bytes(entry.digest) for record in records for entry in record.entries}
    wanted.update(child for record in records for _, children in record.edges for child in children)
    rows = list(_OBJECTS.rows(connection, wanted))
    return {digest: number for digest, number, _ in rows}, {digest: kind for digest, _, kind in rows}


def _rows_of_packs(connection: Connection, numbers: Sequence[int]) -> dict[int, set[tuple[Any, ...]]]:
    found: dict[int, set[tuple[Any, ...]]] = {}
    for row in _ROWS.rows(connection, numbers):
        found.setdefault(row[_PACK_ID], set()).add(row)
    return found


def _compare_rows(
    record: PackRecord, rows: set[tuple[Any, ...]], pack_id: int, numbers: _Numbers
) -> list[str]:
    wanted = {_location(numbers.get(entry.digest, NOWHERE), pack_id, entry) for entry in record.entries}
    if wanted == rows:
        return []
    places = {row[:3] for row in rows}
    missing = {row for row in wanted - rows if row[:3] not in places}
    extra = {row[:3] for row in rows - wanted} - {row[:3] for row in wanted}
    different = len(wanted - rows) - len(missing)
    return [f"rows of entries: {len(missing)} missing, {len(extra)} too many, {different} different"]


def _location(number: int, pack_id: int, e: EntryRecord) -> tuple[Any, ...]:
    return (
        number, pack_id, e.first_leaf, int(e.kind), e.num_bytes, e.num_leaves, e.leaf_bytes,
        e.offset, e.header_bytes, e.stored_bytes, e.encoding, e.base,
    )  # fmt: skip


def _compare_kinds(record: PackRecord, kinds: _Kinds) -> list[str]:
    wrong = sum(kinds.get(e.digest, e.kind) != e.kind for e in record.entries)
    return [f"{wrong} objects are of another kind"] if wrong else []


def _children(
    connection: Connection, records: Iterable[PackRecord], numbers: _Numbers
) -> dict[int, set[int]]:
    parents = {numbers[parent] for record in records for parent, _ in record.edges if parent in numbers}
    found: dict[int, set[int]] = {}
    for parent, child in _EDGES.rows(connection, parents):
        found.setdefault(parent, set()).add(child)
    return found


def _compare_edges(record: PackRecord, edges: Mapping[int, set[int]], numbers: _Numbers) -> list[str]:
    wrong = 0
    for parent, children in record.edges:
        found = edges.get(numbers.get(parent, NOWHERE), set())
        wrong += {numbers.get(child, NOWHERE) for child in children} != found
    return [f"what {wrong} nodes refer to differs"] if wrong else []


def _compare_commits(
    connection: Connection, records: Iterable[PackRecord], numbers: _Numbers
) -> Iterable[tuple[str, str]]:
    commits = {commit.digest: (record.name, commit) for record in records for commit in record.commits}
    known = {number: digest for digest, number in numbers.items() if digest in commits}
    found = {commit.digest: commit for commit in read_commits(connection, sorted(known))}
    metrics: dict[int, dict[str, float]] = {}
    for number, name, value in _METRICS.rows(connection, known):
        metrics.setdefault(number, {})[name] = value
    for digest, (pack, commit) in commits.items():
        own = metrics.get(numbers.get(digest, NOWHERE), {})
        wanted = {storable(name): value for name, value in commit.metrics.items()}
        if _plain(found.get(digest)) != _as_stored(commit) or own != wanted:
            yield pack, f"the row of commit {commit.digest.hex()[:12]} differs"


def _as_stored(commit: CommitRow) -> CommitRow:
    return replace(commit, message=storable(commit.message), author=storable(commit.author), branch=None, lineage=())


def _plain(commit: CommitRow | None) -> CommitRow | None:
    return None if commit is None else replace(commit, branch=None, lineage=())
