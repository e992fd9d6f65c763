"""The contents of packs: packs go into the index and out of it, and objects are found by id.

Adding packs:

    1. packs that are known by name are left out
    2. every entry gets a number: a new one, or the one its digest has already
    3. what nodes and deltas refer to gets a number too, also when it was never seen (kind 0, pack 0)
    4. locations, edges and commits follow, all by number, all sorted

Dropping packs:

    1. what is stored in the packs loses those locations; what was stored in them alone is orphaned
    2. the edges of the orphaned objects go, and the rows of commits
    3. orphaned objects, and what they referred to, keep their numbers as long as something refers to them. Unseen and
       not referred to, they go; seen and not referred to, they become candidates for the next garbage collection

Invariant: one transaction, so a pack is known with all its rows or not at all, and adding one twice changes nothing.
What was stored only in packs that are dropped is unknown afterwards (kind 0, a location in pack 0), and so are the
edges and commits that it held. Objects that are only referred to are never an answer. The work follows what is added
or dropped. Numbers may be given again, of packs and of objects, so that nothing may remember one that went. Knows
nothing of who asks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import count
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, Table

from cas_ckpt import clock
from cas_ckpt.errors import CorruptionError, InvalidInputError
from cas_ckpt.index import manifests
from cas_ckpt.index.database import insert_missing, number_table, scratch_tables
from cas_ckpt.index.db_errors import REBUILD
from cas_ckpt.index.garbage import NO_BASE, clamp_watermark, has_deltas
from cas_ckpt.index.remembered import note_newer
from cas_ckpt.index.rows import (
    UNKNOWN_KIND,
    CommitRow,
    PackRecord,
    change,
    change_by_key,
    each_row,
    json_of,
    json_text,
    objects_by_id,
    rows,
    rows_by_key,
    storable,
)
from cas_ckpt.index.schema import (
    COMMIT_TEXTS,
    COMMITS,
    EDGES,
    LINEAGE,
    LOCATIONS,
    METRICS,
    MORE_PARENTS,
    NOWHERE,
    OBJECTS,
    PACKS,
)
from cas_ckpt.objects.digest import DIGEST_BYTES, ObjectKind
from cas_ckpt.objects.pack import ExtentInfo, Location, PackKind

_PACK = re.compile(r"[A-Za-z0-9._/-]+")
"""The name of a pack: SQLite cannot see that a byte of it was damaged, and no store would take it as a key."""

_KINDS = {int(kind): kind for kind in ObjectKind}

_LOCATED = f"""
    SELECT o.digest, l.pack_id, l.kind, l.num_bytes, l.first_leaf, l.num_leaves, l.leaf_bytes, l."offset",
           l.header_bytes, l.stored_bytes, l.encoding, l.base
    FROM t_objects o JOIN t_locations l ON l.object_id = o.object_id WHERE l.pack_id <> {NOWHERE} AND o.digest {{keys}}
"""
PARTIAL = f"(l.pack_id <> {NOWHERE} AND (l.first_leaf > 0 OR l.num_leaves * l.leaf_bytes < l.num_bytes))"
"""Of `l`, a location that does not hold its whole object; chunks in parts may be incomplete."""


def chunk_digests(connection: Connection) -> set[bytes]:
    """The ids of all chunks that are in some pack in one extent; those in parts may be incomplete."""
    query = (
        f"SELECT o.digest FROM t_objects o WHERE o.kind = {int(ObjectKind.CHUNK)} "
        f"AND o.object_id NOT IN (SELECT l.object_id FROM t_locations l WHERE {PARTIAL})"
    )
    return {digest for (digest,) in each_row(connection, query)}


def chunks_and_packs(connection: Connection) -> tuple[set[bytes], dict[str, int]]:
    """`chunk_digests`, and name -> number of the packs that were known at the same moment."""
    return chunk_digests(connection), dict(rows(connection, "SELECT name, pack_id FROM t_packs"))


def data_packs_since(connection: Connection, number: int) -> dict[str, int]:
    """Name -> number of the packs with chunks that came after the pack `number`."""
    query = f"SELECT name, pack_id FROM t_packs WHERE pack_id > :number AND kind = {int(PackKind.DATA)}"
    return dict(rows(connection, query, number=number))


def pack_sizes(connection: Connection) -> dict[str, int]:
    """Name -> size in bytes of every pack."""
    return dict(rows(connection, "SELECT name, size_bytes FROM t_packs"))


def chunks_at_most(connection: Connection) -> int:
    """How many extents of chunks there are: as many as chunks, or more. Grows with packs, not with chunks."""
    query = f"SELECT sum(num_entries) FROM t_packs WHERE kind = {int(PackKind.DATA)}"
    return int(rows(connection, query)[0][0] or 0)


def known(connection: Connection, digests: Iterable[bytes]) -> set[bytes]:
    """Those of `digests` that are in some pack."""
    return {digest for digest, _, kind in objects_by_id(connection, digests) if kind != UNKNOWN_KIND}


def locate(connection: Connection, digests: Iterable[bytes]) -> dict[bytes, list[Location]]:
    """Digest -> all its extents, sorted by (pack number, first leaf); unknown digests are left out.

    Raises:
        CorruptionError: a row names something that is not a pack.
    """
    located = list(rows_by_key(connection, _LOCATED, digests))
    asked = "SELECT pack_id, name FROM t_packs WHERE pack_id {keys}"
    names: dict[int, str] = dict(rows_by_key(connection, asked, {row[1] for row in located}))
    kinds = _KINDS
    found: dict[bytes, list[Location]] = {}
    for digest, pack_id, kind, *rest in located:
        found.setdefault(digest, []).append(Location(names[pack_id], kinds[kind], *rest))
    for name in names.values():
        if _PACK.fullmatch(name) is None:
            raise CorruptionError(f"the index names a pack {name!r:.120}, and no pack is called that: {REBUILD}")
    return found


def resolve_prefix(
    connection: Connection, prefix: str, kinds: Collection[ObjectKind] = (ObjectKind.COMMIT,), *, limit: int = 16
) -> list[bytes]:
    """Up to `limit` ids of these kinds that begin with the hexadecimal digits `prefix`, ascending.

    Raises:
        InvalidInputError: `prefix` is not a hexadecimal number, or longer than an id.
    """
    digits = 2 * DIGEST_BYTES
    if not prefix or len(prefix) > digits or not set(prefix) <= set("0123456789abcdefABCDEF"):
        raise InvalidInputError(f"wanted 1 to {digits} hexadecimal digits of an id, found {prefix!r}")
    low, high = (bytes.fromhex(prefix.ljust(digits, filling)) for filling in "0f")
    if low == high:  # a whole id: asked by every verb that was given one
        found = objects_by_id(connection, [low])
        return [digest for digest, _, kind in found if _KINDS.get(kind) in kinds][:limit]
    query = (
        "SELECT digest FROM t_objects WHERE digest BETWEEN :low AND :high "
        f"AND kind IN ({', '.join(str(int(kind)) for kind in kinds)}) ORDER BY digest LIMIT {int(limit)}"
    )
    return [digest for (digest,) in rows(connection, query, low=low, high=high)]


def packs_in_parts(connection: Connection) -> set[str]:
    """Names of the packs that hold an extent which is not a whole chunk, as several ranks wrote some leaves each.

    A scan of all locations, for repacking.
    """
    packs = f"SELECT DISTINCT l.pack_id FROM t_locations l WHERE l.leaf_bytes > 0 AND {PARTIAL}"
    return {name for (name,) in rows(connection, f"SELECT name FROM t_packs WHERE pack_id IN ({packs})")}


# --- adding and dropping packs --------------------------------------------------------------

_LAST_PACK = "SELECT max(pack_id) FROM t_packs"
_LAST_OBJECT = "SELECT max(object_id) FROM t_locations"
_BY_PRIMARY_KEY = itemgetter(0, 1, 2)


def add_packs(connection: Connection, records: Sequence[PackRecord]) -> int:
    """Add the packs that are not known yet; returns how many that were."""
    wanted = {record.name: record for record in records}
    for (name,) in rows_by_key(connection, "SELECT name FROM t_packs WHERE name {keys}", wanted):
        del wanted[name]
    if not wanted:
        return 0
    packs = dict(zip(count(_highest(connection, _LAST_PACK) + 1), map(wanted.__getitem__, sorted(wanted))))
    now_us = int(clock.now_s() * 1e6)
    insert_missing(connection, PACKS, [
        (number, r.name, int(r.kind), r.size_bytes, len(r.entries) + r.num_in_parts, now_us)
        for number, r in packs.items()
    ])  # fmt: skip
    _add_rows(connection, packs)
    for number, record in packs.items():
        for part in record.parts() if record.parts is not None else ():
            _add_rows(connection, {number: part})
    newer = [record.name for record in packs.values() if record.num_newer]
    if newer:
        note_newer(connection, come=newer)
    return len(packs)


def _add_rows(connection: Connection, packs: Mapping[int, PackRecord]) -> None:
    """Add the rows of what these packs hold, of which each has its number already."""
    numbers = _number_objects(connection, packs.values())
    locations = [location_row(numbers[e.digest], number, e) for number, record in packs.items() for e in record.entries]
    locations.sort(key=_BY_PRIMARY_KEY)
    insert_missing(connection, LOCATIONS, locations)
    _insert_edges_and_commits(connection, packs.values(), numbers)
    manifests.add_contents(connection, list(packs.values()), numbers)


def location_row(number: int, pack_id: int, e: ExtentInfo) -> tuple[Any, ...]:
    """The row of `locations` for an entry of a pack."""
    return (
        number, pack_id, e.first_leaf, int(e.kind), e.num_bytes, e.num_leaves, e.leaf_bytes,
        e.offset, e.header_bytes, e.stored_bytes, e.encoding, e.base,
    )  # fmt: skip


def _highest(connection: Connection, question: str) -> int:
    """The largest number of that kind, 0 if there is none."""
    return int(rows(connection, question)[0][0] or 0)


def _number_objects(connection: Connection, records: Iterable[PackRecord]) -> dict[bytes, int]:
    """Digest -> number of all that these packs hold or refer to, and a row in `objects` for each."""
    kinds = {bytes(entry.digest): int(entry.kind) for record in records for entry in record.entries}
    highest = _highest(connection, _LAST_OBJECT)  # every object has a location
    numbers = dict(zip(kinds, count(highest + 1)))  # as they are stored: neighbours in a pack are so in a tensor
    new = [(digest, numbers[digest], kinds[digest]) for digest in sorted(kinds)]
    if insert_missing(connection, OBJECTS, new) != len(new):
        found: dict[int, list[int]] = {}
        for digest, number, kind in objects_by_id(connection, kinds):  # some had a number before, maybe no kind
            numbers[digest] = number
            if kind == UNKNOWN_KIND:
                found.setdefault(kinds[digest], []).append(number)
        for kind, seen in found.items():
            change_by_key(connection, "UPDATE t_objects SET kind = :kind WHERE object_id {keys}", seen, kind=kind)
            unplaced = "DELETE FROM t_locations WHERE object_id {keys} AND pack_id = :nowhere"
            change_by_key(connection, unplaced, seen, nowhere=NOWHERE)
    named: set[bytes] = {entry.base for record in records for entry in record.entries if entry.base is not None}
    for record in records:
        for parent, children in record.edges:
            named.add(parent)
            named.update(children)
    strangers = named - numbers.keys()
    if strangers:
        highest = max(highest, max(numbers.values(), default=0))
        numbers.update((digest, number) for digest, number, _ in objects_by_id(connection, strangers))
        unseen = dict(zip(sorted(strangers - numbers.keys()), count(highest + 1)))
        insert_missing(connection, OBJECTS, [(digest, number, UNKNOWN_KIND) for digest, number in unseen.items()])
        nowhere = [(number, NOWHERE, 0, UNKNOWN_KIND, 0, 0, 0, 0, 0, 0, 0, None) for number in unseen.values()]
        insert_missing(connection, LOCATIONS, nowhere)
        numbers.update(unseen)
    return numbers


def _insert_edges_and_commits(
    connection: Connection, records: Iterable[PackRecord], numbers: Mapping[bytes, int]
) -> None:
    """Edges of nodes; those of commits are in the commit's row, and in tables of what only some commits have."""
    commits = {numbers[commit.digest]: commit for record in records for commit in record.commits}
    below: dict[int, set[int]] = {}
    for record in records:
        for parent, children in record.edges:
            below.setdefault(numbers[parent], set()).update(map(numbers.__getitem__, children))
    edges = [(parent, child) for parent in sorted(below.keys() - commits.keys()) for child in sorted(below[parent])]
    insert_missing(connection, EDGES, edges)
    own: list[tuple[Any, ...]] = []
    more: dict[Table, list[tuple[Any, ...]]] = {MORE_PARENTS: [], METRICS: [], LINEAGE: [], COMMIT_TEXTS: []}
    for n in sorted(commits):
        commit = commits[n]
        own.append((
            n, commit.digest, commit.root, commit.layout, commit.parents[0] if commit.parents else None,
            storable(commit.message), storable(commit.author), commit.time_us, commit.step,
            None if commit.branch is None else storable(commit.branch), json_of(commit.metrics), commit.meta,
            json_of(commit.stats),
        ))  # fmt: skip
        for table, some in rows_of_commit(n, commit).items():
            more[table] += some
    insert_missing(connection, COMMITS, own)
    for table, some in more.items():
        insert_missing(connection, table, some)


def rows_of_commit(number: int, commit: CommitRow) -> dict[Table, list[tuple[Any, ...]]]:
    """The rows of a commit besides its own: what only some commits have."""
    metrics: dict[str, float | None] = {}
    for name, value in sorted(commit.metrics.items()):
        metrics.setdefault(storable(name), None if math.isnan(value) else float(value))
    return {
        MORE_PARENTS: [(number, at, parent) for at, parent in enumerate(commit.parents) if at],
        METRICS: [(number, name, value) for name, value in metrics.items()],
        LINEAGE: [(number, at, storable(e.kind), e.target, e.note) for at, e in enumerate(commit.lineage)],
        COMMIT_TEXTS: [(number, *texts) for texts in [_texts(commit)] if any(text is not None for text in texts)],
    }


def _texts(commit: CommitRow) -> tuple[str | None, ...]:
    """Its metadata and provenance as JSON, and the fingerprint that its signature names."""
    signed_by = None
    if commit.signature is not None:
        from cas_ckpt.signing import described

        signed_by = described(commit.signature).fingerprint or None
    meta, provenance = (None if data is None else json_text(data) for data in (commit.meta, commit.provenance))
    return meta, provenance, signed_by


# --- dropping -------------------------------------------------------------------------------

_DROPPED = number_table("dropped")
"""Numbers of packs."""

_TOUCHED = number_table("touched")
"""Objects that were stored in them."""

_ORPHANED = number_table("orphaned")
"""Objects that were stored in them alone."""

_REFERENCED = number_table("referenced")
"""The orphaned objects and those that they referred to."""

_REMOVED = number_table("removed")
"""Objects that no row is to name any more."""

_IN_DROPPED = "FROM dropped d CROSS JOIN t_locations l WHERE l.pack_id = d.object_id"
_IS_ORPHANED = "IN (SELECT object_id FROM orphaned)"
_IS_NOWHERE = f"EXISTS (SELECT 1 FROM t_locations l WHERE l.object_id = r.object_id AND l.pack_id = {NOWHERE})"
_NO_PARENT = "NOT EXISTS (SELECT 1 FROM t_edges e WHERE e.child_id = r.object_id)"
_PUT_NOWHERE = f"""
    INSERT INTO t_locations (object_id, pack_id, first_leaf, kind, num_bytes, num_leaves, leaf_bytes, "offset",
                           header_bytes, stored_bytes, encoding)
    SELECT h.object_id, {NOWHERE}, 0, {UNKNOWN_KIND}, 0, 0, 0, 0, 0, 0, 0 FROM orphaned h WHERE true
"""


def drop_packs(connection: Connection, names: Iterable[str]) -> int:
    """Forget these packs and what was stored in them alone; returns how many packs were known."""
    wanted = sorted(set(names))
    numbers = list(rows_by_key(connection, "SELECT pack_id FROM t_packs WHERE name {keys}", wanted))
    if not numbers:
        return 0
    with scratch_tables(connection, _DROPPED, _TOUCHED, _ORPHANED, _REFERENCED, _REMOVED):
        insert_missing(connection, _DROPPED, sorted(numbers))
        deltas = has_deltas(connection)
        _remove_locations(connection, deltas=deltas)
        _remove_what_orphans_hold(connection)
        _remove_unreferenced(connection, deltas=deltas)
        change(connection, "DELETE FROM t_scrubs WHERE pack IN "
               "(SELECT p.name FROM dropped d CROSS JOIN t_packs p WHERE p.pack_id = d.object_id)")  # fmt: skip
        change(connection, "DELETE FROM t_packs WHERE pack_id IN (SELECT object_id FROM dropped)")
    clamp_watermark(connection)
    note_newer(connection, gone=wanted)
    return len(numbers)


def _remove_locations(connection: Connection, *, deltas: bool) -> None:
    """Remove the locations in these packs, and find out what is orphaned without them."""
    change(connection, f"INSERT INTO touched SELECT l.object_id {_IN_DROPPED} ON CONFLICT DO NOTHING")
    if deltas:
        change(
            connection,
            "INSERT INTO referenced SELECT o.object_id FROM dropped d CROSS JOIN t_locations l CROSS JOIN t_objects o "
            "WHERE l.pack_id = d.object_id AND l.base IS NOT NULL AND o.digest = l.base ON CONFLICT DO NOTHING",
        )
    change(connection, "DELETE FROM t_locations WHERE pack_id IN (SELECT object_id FROM dropped)")
    change(
        connection,
        "INSERT INTO orphaned SELECT t.object_id FROM touched t "
        "WHERE NOT EXISTS (SELECT 1 FROM t_locations l WHERE l.object_id = t.object_id)",
    )
    change(  # what is stored elsewhere may be stored there in part
        connection,
        f"INSERT INTO t_suspects SELECT t.object_id, 0 FROM touched t WHERE NOT t.object_id {_IS_ORPHANED} "
        "ON CONFLICT DO NOTHING",
    )


def _remove_what_orphans_hold(connection: Connection) -> None:
    """Remove edges and commits of the orphaned objects, noting what they referred to."""
    change(connection, "INSERT INTO referenced SELECT object_id FROM orphaned WHERE true ON CONFLICT DO NOTHING")
    change(
        connection,
        "INSERT INTO referenced SELECT e.child_id FROM orphaned h CROSS JOIN t_edges e "
        "WHERE e.parent_id = h.object_id ON CONFLICT DO NOTHING",
    )
    for column in ("root", "layout"):
        change(
            connection,
            "INSERT INTO referenced SELECT o.object_id FROM orphaned h CROSS JOIN t_commits c CROSS JOIN t_objects o "
            f"WHERE c.object_id = h.object_id AND o.digest = c.{column} ON CONFLICT DO NOTHING",
        )
    change(connection, f"DELETE FROM t_edges WHERE parent_id {_IS_ORPHANED}")
    for table in (MORE_PARENTS, METRICS, LINEAGE, COMMIT_TEXTS, COMMITS):
        change(connection, f"DELETE FROM {table.name} WHERE object_id {_IS_ORPHANED}")
    manifests.drop_contents(connection)
    change(connection, f"UPDATE t_objects SET kind = {UNKNOWN_KIND} WHERE object_id {_IS_ORPHANED}")
    change(connection, _PUT_NOWHERE)


def _remove_unreferenced(connection: Connection, *, deltas: bool) -> None:
    """Of what nothing refers to, remove what is stored nowhere, and make candidates of the rest."""
    alone = _NO_PARENT + (NO_BASE.format(number="r.object_id") if deltas else "")
    change(connection, f"INSERT INTO removed SELECT r.object_id FROM referenced r WHERE {_IS_NOWHERE} AND {alone}")
    change(
        connection,
        f"INSERT INTO t_suspects SELECT r.object_id, 1 FROM referenced r WHERE NOT {_IS_NOWHERE} AND {alone} "
        "ON CONFLICT (object_id) DO UPDATE SET referred = 1",
    )
    change(connection, f"DELETE FROM t_suspects WHERE object_id {_IS_ORPHANED}")
    for table in (LOCATIONS, OBJECTS):
        change(connection, f"DELETE FROM {table.name} WHERE object_id IN (SELECT object_id FROM removed)")
