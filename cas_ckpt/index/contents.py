"""Questions about single objects: is it known, where does it lie, which ids begin like this.

Invariant: objects that are only referred to (kind 0) are never an answer. Knows nothing of commits.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Select, bindparam, delete, func, select, update

from cas_ckpt import clock
from cas_ckpt.errors import InvalidInputError
from cas_ckpt.index.candidates import clamp_watermark, has_deltas
from cas_ckpt.index.meta import note_newer
from cas_ckpt.index.rows import UNKNOWN_KIND, CommitRow, EntryRecord, PackRecord
from cas_ckpt.index.schema import (
    COMMITS,
    EDGES,
    LINEAGE,
    LOCATIONS,
    METRICS,
    MORE_PARENTS,
    NOWHERE,
    OBJECTS,
    PACKS,
    PLANS,
)
from cas_ckpt.index.sql import (
    KeyQuery,
    execute,
    insert_missing,
    number_table,
    rows_for,
    rows_of,
    scratch_tables,
    upsert,
)
from cas_ckpt.objects.digest import DIGEST_BYTES, ObjectKind
from cas_ckpt.objects.pack import Location

_KINDS = {int(kind): kind for kind in ObjectKind}

_LOCATED = KeyQuery(
    select(
        OBJECTS.c.digest,
        LOCATIONS.c.pack_id,
        LOCATIONS.c.kind,
        LOCATIONS.c.num_bytes,
        LOCATIONS.c.first_leaf,
        LOCATIONS.c.num_leaves,
        LOCATIONS.c.leaf_bytes,
        LOCATIONS.c.offset,
        LOCATIONS.c.header_bytes,
        LOCATIONS.c.stored_bytes,
        LOCATIONS.c.encoding,
        LOCATIONS.c.base,
    )
    .join(LOCATIONS, LOCATIONS.c.object_id == OBJECTS.c.object_id)
    .where(LOCATIONS.c.pack_id != NOWHERE),
    OBJECTS.c.digest,
)
_PACK_NAMES = KeyQuery(select(PACKS.c.pack_id, PACKS.c.name), PACKS.c.pack_id)
_PACK_SIZES = select(PACKS.c.name, PACKS.c.size_bytes)
_KNOWN = KeyQuery(select(OBJECTS.c.digest).where(OBJECTS.c.kind != UNKNOWN_KIND), OBJECTS.c.digest)
_OBJECT = KeyQuery(select(OBJECTS.c.digest, OBJECTS.c.kind), OBJECTS.c.digest)


def chunk_digests(connection: Connection) -> set[bytes]:
    """The ids of all chunks that lie in some pack in one extent; those in parts may be incomplete."""
    short = LOCATIONS.c.num_leaves * LOCATIONS.c.leaf_bytes < LOCATIONS.c.num_bytes
    parts = select(LOCATIONS.c.object_id).where(LOCATIONS.c.pack_id != NOWHERE, (LOCATIONS.c.first_leaf > 0) | short)
    query = select(OBJECTS.c.digest).where(OBJECTS.c.kind == ObjectKind.CHUNK)
    return set(connection.execute(query.where(OBJECTS.c.object_id.not_in(parts))).scalars())


def chunks_and_packs(connection: Connection) -> tuple[set[bytes], set[str]]:
    """`chunk_digests`, and the names of the packs that were known at the same moment."""
    return chunk_digests(connection), set(connection.execute(select(PACKS.c.name)).scalars())


def pack_sizes(connection: Connection) -> dict[str, int]:
    """Name -> size in bytes of every pack."""
    return dict(rows_of(connection, _PACK_SIZES))


def count_chunks(connection: Connection) -> int:
    """How many chunks lie in some pack."""
    query = select(func.count()).select_from(OBJECTS).where(OBJECTS.c.kind == ObjectKind.CHUNK)
    return connection.execute(query).scalar_one()


def known(connection: Connection, digests: Iterable[bytes]) -> set[bytes]:
    """Those of `digests` that lie in some pack."""
    return {row[0] for row in _KNOWN.rows(connection, digests)}


def locate(connection: Connection, digests: Iterable[bytes]) -> dict[bytes, list[Location]]:
    """Digest -> all its extents, sorted by (pack number, first leaf); unknown digests are left out."""
    rows = list(_LOCATED.rows(connection, digests))
    names = dict(_PACK_NAMES.rows(connection, {row[1] for row in rows}))
    kinds = _KINDS
    found: dict[bytes, list[Location]] = {}
    for digest, pack_id, kind, *rest in rows:
        found.setdefault(digest, []).append(Location(names[pack_id], kinds[kind], *rest))
    return found


def resolve_prefix(
    connection: Connection, prefix: str, kinds: Collection[ObjectKind] = (ObjectKind.COMMIT,), *, limit: int = 16
) -> list[bytes]:
    """Up to `limit` ids of these kinds that begin with the hexadecimal digits `prefix`, ascending.

    Raises:
        InvalidInputError: `prefix` is no hexadecimal number, or longer than an id.
    """
    low, high = _range(prefix)
    if low == high:  # a whole id: asked by every verb that was given one
        return [digest for digest, kind in _OBJECT.rows(connection, [low]) if _KINDS.get(kind) in kinds][:limit]
    query = select(OBJECTS.c.digest).where(OBJECTS.c.digest.between(low, high))
    query = query.where(OBJECTS.c.kind.in_([int(kind) for kind in kinds])).order_by(OBJECTS.c.digest).limit(limit)
    return list(connection.execute(query).scalars())


def _range(prefix: str) -> tuple[bytes, bytes]:
    digits = 2 * DIGEST_BYTES
    if not prefix or len(prefix) > digits or not set(prefix) <= set("0123456789abcdefABCDEF"):
        raise InvalidInputError(f"wanted 1 to {digits} hexadecimal digits of an id, found {prefix!r}")
    return bytes.fromhex(prefix.ljust(digits, "0")), bytes.fromhex(prefix.ljust(digits, "f"))


# DOC of cas_ckpt.index.contents:
# Chunks that stand in parts: several ranks wrote some leaves each.
#
# Invariant: names packs, and changes nothing. A scan of all locations: for whoever rewrites packs.
#


def packs_in_parts(connection: Connection) -> set[str]:
    """Names of the packs that hold an extent which is not a whole chunk."""
    c = LOCATIONS.c
    part = (c.first_leaf > 0) | (c.num_leaves * c.leaf_bytes < c.num_bytes)
    packs = select(c.pack_id).where(c.pack_id != NOWHERE, c.leaf_bytes > 0, part).distinct()
    return set(connection.execute(select(PACKS.c.name).where(PACKS.c.pack_id.in_(packs))).scalars())


# DOC of cas_ckpt.index.contents:
# Restore plans that were made before, and how scattered the chunks of a state lie.
#
# Invariant: a plan is kept by the root that it restores and the digest of the layout that it restores
# into; both are all that it depends on. Knows nothing of what a plan says.
#


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A restore plan as the index keeps it.

    Attributes:
        root: The state that is restored.
        layout: Digest of the target layout (and of the version of the planner).
        target: The target layout as text.
        report: What the planner had to say.
    """

    root: bytes
    layout: bytes
    target: str
    report: bytes


def write_plan(connection: Connection, row: PlanRow) -> None:
    """Keep `row` in the place of an older one for the same root and layout."""
    upsert(connection, PLANS, {"root": row.root, "layout": row.layout, "target": row.target, "report": row.report})


def read_plan(connection: Connection, root: bytes, layout: bytes) -> PlanRow | None:
    """The plan for this root and layout, or None."""
    query = select(PLANS).where(PLANS.c.root == root, PLANS.c.layout == layout)
    row = connection.execute(query).one_or_none()
    return None if row is None else PlanRow(*row)


def read_plans(connection: Connection, root: bytes | None = None) -> list[PlanRow]:
    """All plans for `root`, or all there are, by (root, target)."""
    query = select(PLANS).order_by(PLANS.c.root, PLANS.c.target)
    if root is not None:
        query = query.where(PLANS.c.root == root)
    return [PlanRow(*row) for row in connection.execute(query)]


def count_extents(connection: Connection, root: bytes) -> tuple[int, int]:
    """(chunks, extents) of the state `root`, every chunk once, a second copy of an extent not counted."""
    start = select(OBJECTS.c.object_id).where(OBJECTS.c.digest == root).cte("reached", recursive=True)
    reached = start.union(select(EDGES.c.child_id).join(start, EDGES.c.parent_id == start.c.object_id))
    extents = (
        select(LOCATIONS.c.object_id, LOCATIONS.c.first_leaf)
        .join(reached, reached.c.object_id == LOCATIONS.c.object_id)
        .where(LOCATIONS.c.pack_id != NOWHERE, LOCATIONS.c.kind == ObjectKind.CHUNK)
        .distinct()
        .subquery()
    )
    query = select(func.count(extents.c.object_id.distinct()), func.count()).select_from(extents)
    num_chunks, num_extents = connection.execute(query).one()
    return num_chunks, num_extents


# DOC of cas_ckpt.index.contents:
# Putting packs into the index.
#
#     1. packs that are known by name are left out
#     2. every entry gets a number: a new one, or the one its digest has already
#     3. what nodes refer to gets a number too, also when it was never seen (kind 0, pack 0)
#     4. locations, edges and commits follow, all by number, all sorted
#
# Invariant: one transaction, so a pack is known with all its rows or not at all. Adding a pack
# twice changes nothing. Knows nothing of who asks.
#

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


# DOC of cas_ckpt.index.contents:
# Taking packs out of the index.
#
#     1. what lies in the packs loses those locations; what lay in them alone is homeless
#     2. what the homeless said goes: their edges, and the rows of commits
#     3. the homeless, and what they referred to, are looked at: is there anything that refers to them?
#        seen or not, what is referred to keeps its number; unseen without a reference, it goes;
#        seen without a reference, it becomes a suspect for the next collection
#
# Invariant: one transaction. What lay only in the packs that go is unknown afterwards, and so
# are the edges and commits that it held; what others still refer to keeps its number with kind 0 and a
# location in pack 0. The work follows what is dropped. Numbers may be given again, of packs and of
# objects, so that nothing may remember one that went.
#

_DROPPED = number_table("dropped")
"""Numbers of packs."""

_TOUCHED = number_table("touched")
"""Objects that lay in them."""

_HOMELESS = number_table("homeless")
"""Objects that lay in them alone."""

_LEFT = number_table("left_behind")
"""What the homeless referred to, and themselves."""

_GONE = number_table("gone")
"""Objects that no row is to name any more."""

_MISSING = f"""
    INSERT INTO locations (object_id, pack_id, first_leaf, kind, num_bytes, num_leaves, leaf_bytes, "offset",
                           header_bytes, stored_bytes, encoding)
    SELECT h.object_id, {NOWHERE}, 0, {UNKNOWN_KIND}, 0, 0, 0, 0, 0, 0, 0 FROM homeless h WHERE true
"""
_UNREFERRED = "NOT EXISTS (SELECT 1 FROM edges e WHERE e.child_id = b.object_id)"
_NO_BASE = """
    AND NOT EXISTS (SELECT 1 FROM objects o CROSS JOIN locations d
                    WHERE o.object_id = b.object_id AND d.base = o.digest)
"""
_NOWHERE = f"EXISTS (SELECT 1 FROM locations l WHERE l.object_id = b.object_id AND l.pack_id = {NOWHERE})"


def drop_packs(connection: Connection, names: Iterable[str]) -> int:
    """Forget these packs and what lay in them alone; returns how many packs were known."""
    wanted = sorted(set(names))
    numbers = [(row.pack_id,) for row in rows_for(connection, select(PACKS.c.pack_id), PACKS.c.name, wanted)]
    if not numbers:
        return 0
    with scratch_tables(connection, _DROPPED, _TOUCHED, _HOMELESS, _LEFT, _GONE):
        insert_missing(connection, _DROPPED, sorted(numbers))
        deltas = has_deltas(connection)
        _take_away(connection, deltas=deltas)
        _silence_homeless(connection)
        _let_go(connection, deltas=deltas)
        execute(connection, "DELETE FROM scrubs WHERE pack IN "
                "(SELECT p.name FROM dropped d CROSS JOIN packs p WHERE p.pack_id = d.object_id)")  # fmt: skip
        execute(connection, "DELETE FROM packs WHERE pack_id IN (SELECT object_id FROM dropped)")
    clamp_watermark(connection)
    note_newer(connection, gone=wanted)
    return len(numbers)


def _take_away(connection: Connection, *, deltas: bool) -> None:
    """Remove the locations in these packs, and find out what is homeless without them."""
    lying = "FROM dropped d CROSS JOIN locations l WHERE l.pack_id = d.object_id"
    execute(connection, f"INSERT INTO touched SELECT l.object_id {lying} ON CONFLICT DO NOTHING")
    if deltas:
        execute(
            connection,
            "INSERT INTO left_behind SELECT o.object_id FROM dropped d CROSS JOIN locations l CROSS JOIN objects o "
            "WHERE l.pack_id = d.object_id AND l.base IS NOT NULL AND o.digest = l.base ON CONFLICT DO NOTHING",
        )
    execute(connection, "DELETE FROM locations WHERE pack_id IN (SELECT object_id FROM dropped)")
    execute(
        connection,
        "INSERT INTO homeless SELECT t.object_id FROM touched t "
        "WHERE NOT EXISTS (SELECT 1 FROM locations l WHERE l.object_id = t.object_id)",
    )
    execute(  # what lies elsewhere may lie there in part
        connection,
        "INSERT INTO suspects SELECT t.object_id, 0 FROM touched t "
        "WHERE t.object_id NOT IN (SELECT object_id FROM homeless) ON CONFLICT DO NOTHING",
    )


def _silence_homeless(connection: Connection) -> None:
    """Remove what the homeless said, noting whom they spoke of."""
    execute(connection, "INSERT INTO left_behind SELECT object_id FROM homeless WHERE true ON CONFLICT DO NOTHING")
    execute(
        connection,
        "INSERT INTO left_behind SELECT e.child_id FROM homeless h CROSS JOIN edges e "
        "WHERE e.parent_id = h.object_id ON CONFLICT DO NOTHING",
    )
    for column in ("root", "layout"):
        execute(
            connection,
            "INSERT INTO left_behind SELECT o.object_id FROM homeless h CROSS JOIN commits c CROSS JOIN objects o "
            f"WHERE c.object_id = h.object_id AND o.digest = c.{column} ON CONFLICT DO NOTHING",
        )
    execute(connection, "DELETE FROM edges WHERE parent_id IN (SELECT object_id FROM homeless)")
    for table in (MORE_PARENTS, METRICS, LINEAGE, COMMITS):
        execute(connection, f"DELETE FROM {table.name} WHERE object_id IN (SELECT object_id FROM homeless)")
    execute(connection, f"UPDATE objects SET kind = {UNKNOWN_KIND} WHERE object_id IN (SELECT object_id FROM homeless)")
    execute(connection, _MISSING)


def _let_go(connection: Connection, *, deltas: bool) -> None:
    """Remove what is nowhere and not referred to; suspect what is somewhere and not referred to."""
    alone = _UNREFERRED + (_NO_BASE if deltas else "")
    execute(connection, f"INSERT INTO gone SELECT b.object_id FROM left_behind b WHERE {_NOWHERE} AND {alone}")
    execute(
        connection,
        f"INSERT INTO suspects SELECT b.object_id, 1 FROM left_behind b WHERE NOT {_NOWHERE} AND {alone} "
        "ON CONFLICT (object_id) DO UPDATE SET referred = 1",
    )
    execute(connection, "DELETE FROM suspects WHERE object_id IN (SELECT object_id FROM homeless)")
    for table in ("locations", "objects"):
        execute(connection, f"DELETE FROM {table} WHERE object_id IN (SELECT object_id FROM gone)")
