"""Putting packs into the index.

    1. packs that are known by name are left out
    2. every entry gets a number: a new one, or the one its digest has already
    3. what nodes refer to gets a number too, also when it was never seen (kind 0, pack 0)
    4. locations, edges and commits follow, all by number, all sorted

Invariant: one transaction, so a pack is known with all its rows or not at all. Adding a pack
twice changes nothing. Knows nothing of who asks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Select, bindparam, delete, func, select, update

from cas_ckpt import clock
from cas_ckpt.index.mirror import note_newer
from cas_ckpt.index.rows import UNKNOWN_KIND, CommitRow, EntryRecord, PackRecord
from cas_ckpt.index.schema import COMMITS, EDGES, LINEAGE, LOCATIONS, METRICS, MORE_PARENTS, NOWHERE, OBJECTS, PACKS
from cas_ckpt.index.statements import KeyQuery, insert_missing, rows_of

_NAMED = KeyQuery(select(PACKS.c.name), PACKS.c.name)
_NUMBERED = KeyQuery(select(OBJECTS.c.digest, OBJECTS.c.object_id, OBJECTS.c.kind), OBJECTS.c.digest)
_LAST_PACK = select(func.max(PACKS.c.pack_id))
_LAST_OBJECT = select(func.max(LOCATIONS.c.object_id))


def add_packs(connection: Connection, records: Sequence[PackRecord]) -> int:
    """Add the packs that are not known yet; returns how many that were."""
    packs = _unknown(connection, records)
    if not packs:
        return 0
    fresh = list(packs.values())
    _insert_packs(connection, packs)
    numbers = _number_entries(connection, [entry for record in fresh for entry in record.entries])
    _number_strangers(connection, fresh, numbers)
    _insert_locations(connection, packs, numbers)
    _insert_edges(connection, fresh, numbers)
    _insert_commits(connection, [commit for record in fresh for commit in record.commits], numbers)
    newer = [record.name for record in fresh if record.num_newer]
    if newer:
        note_newer(connection, come=newer)
    return len(fresh)


def _unknown(connection: Connection, records: Sequence[PackRecord]) -> dict[int, PackRecord]:
    """Number -> record for the packs that are to be added, in the order of their names."""
    wanted = {record.name: record for record in records}
    for (name,) in _NAMED.rows(connection, wanted):
        del wanted[name]
    first = _highest(connection, _LAST_PACK) + 1
    return dict(enumerate((wanted[name] for name in sorted(wanted)), first))


def _insert_packs(connection: Connection, packs: Mapping[int, PackRecord]) -> None:
    now_us = int(clock.now_s() * 1e6)
    rows = [(number, r.name, int(r.kind), r.size_bytes, len(r.entries), now_us) for number, r in packs.items()]
    insert_missing(connection, PACKS, rows)


def _number_entries(connection: Connection, entries: Iterable[EntryRecord]) -> dict[bytes, int]:
    """Digest -> number of every entry, and a row in `objects` for each."""
    kinds = {bytes(entry.digest): int(entry.kind) for entry in entries}
    numbers = _hand_out(connection, kinds)
    rows = [(digest, number, kinds[digest]) for digest, number in numbers.items()]
    if insert_missing(connection, OBJECTS, rows) != len(rows):
        _reuse_numbers(connection, kinds, numbers)
    return numbers


def _hand_out(connection: Connection, digests: Iterable[bytes], *, above: int = 0) -> dict[bytes, int]:
    """Digest -> a number that no location has and that is larger than `above`."""
    highest = max(_highest(connection, _LAST_OBJECT), above)
    return {digest: number for number, digest in enumerate(sorted(digests), highest + 1)}


def _highest(connection: Connection, question: Select[Any]) -> int:
    """The largest number of that kind, 0 if there is none."""
    return int(rows_of(connection, question)[0][0] or 0)


def _reuse_numbers(connection: Connection, kinds: dict[bytes, int], numbers: dict[bytes, int]) -> None:
    """Some digests had a number before: put it into `numbers`, and give a kind to those that had none."""
    found = []
    for digest, number, kind in _NUMBERED.rows(connection, kinds):
        numbers[digest] = number
        if kind == UNKNOWN_KIND:
            found.append({"key": digest, "number": number, "kind": kinds[digest]})
    if found:
        connection.execute(
            update(OBJECTS).where(OBJECTS.c.digest == bindparam("key")).values(kind=bindparam("kind")), found
        )
        nowhere = (LOCATIONS.c.object_id == bindparam("number")) & (LOCATIONS.c.pack_id == NOWHERE)
        connection.execute(delete(LOCATIONS).where(nowhere), found)


def _number_strangers(connection: Connection, records: Sequence[PackRecord], numbers: dict[bytes, int]) -> None:
    """Add what edges and deltas name and no entry of these packs is to `numbers`, making rows for the unseen."""
    named = {digest for record in records for parent, children in record.edges for digest in (parent, *children)}
    named.update(entry.base for record in records for entry in record.entries if entry.base is not None)
    strangers = named - numbers.keys()
    if not strangers:
        return
    above = max(numbers.values(), default=0)
    numbers.update((digest, number) for digest, number, _ in _NUMBERED.rows(connection, strangers))
    unseen = _hand_out(connection, strangers - numbers.keys(), above=above)
    insert_missing(connection, OBJECTS, [(digest, number, UNKNOWN_KIND) for digest, number in unseen.items()])
    insert_missing(connection, LOCATIONS, [_nowhere(number) for number in unseen.values()])
    numbers.update(unseen)


def _nowhere(number: int) -> tuple[Any, ...]:
    return (number, NOWHERE, 0, UNKNOWN_KIND, 0, 0, 0, 0, 0, 0, 0, None)


def _insert_locations(connection: Connection, packs: Mapping[int, PackRecord], numbers: dict[bytes, int]) -> None:
    rows = [_location(numbers[e.digest], number, e) for number, record in packs.items() for e in record.entries]
    rows.sort(key=lambda row: row[:3])
    insert_missing(connection, LOCATIONS, rows)


def _location(number: int, pack_id: int, e: EntryRecord) -> tuple[Any, ...]:
    return (
        number, pack_id, e.first_leaf, int(e.kind), e.num_bytes, e.num_leaves, e.leaf_bytes,
        e.offset, e.header_bytes, e.stored_bytes, e.encoding, e.base,
    )  # fmt: skip


def _insert_edges(connection: Connection, records: Sequence[PackRecord], numbers: dict[bytes, int]) -> None:
    """Edges of nodes; those of commits stand in the commit's row."""
    commits = {commit.digest for record in records for commit in record.commits}
    rows = {
        (numbers[parent], numbers[child])
        for record in records
        for parent, children in record.edges
        if parent not in commits
        for child in children
    }
    insert_missing(connection, EDGES, sorted(rows))


def _insert_commits(connection: Connection, commits: Sequence[CommitRow], numbers: dict[bytes, int]) -> None:
    numbered = sorted(((numbers[commit.digest], commit) for commit in commits), key=lambda pair: pair[0])
    insert_missing(connection, COMMITS, [_commit_values(number, commit) for number, commit in numbered])
    parents = [(n, i, parent) for n, commit in numbered for i, parent in enumerate(commit.parents) if i]
    insert_missing(connection, MORE_PARENTS, parents)
    metrics = [(n, storable(name), float(v)) for n, commit in numbered for name, v in sorted(commit.metrics.items())]
    insert_missing(connection, METRICS, metrics)
    lineage = [
        (n, i, storable(edge.kind), edge.target, edge.note)
        for n, commit in numbered
        for i, edge in enumerate(commit.lineage)
    ]
    insert_missing(connection, LINEAGE, lineage)


def _commit_values(number: int, commit: CommitRow) -> tuple[Any, ...]:
    first_parent = commit.parents[0] if commit.parents else None
    branch = None if commit.branch is None else storable(commit.branch)
    return (
        number, commit.digest, commit.root, commit.layout, first_parent, storable(commit.message),
        storable(commit.author), commit.time_us, commit.step, branch, _json(commit.metrics), commit.meta,
        _json(commit.stats),
    )  # fmt: skip


def _json(values: Any) -> str | None:
    return json.dumps(dict(values), separators=(",", ":")) if values else None


def storable(text: str) -> str:
    """`text` without what no database takes (NUL, lone surrogates), each shown as U+FFFD."""
    if "\0" not in text and text.isascii():
        return text
    return text.replace("\0", "\ufffd").encode("utf-8", "surrogatepass").decode("utf-8", "replace")
