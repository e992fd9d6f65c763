"""Bytes and who needs them: under single nodes, under some roots and no others, and which commits hold an object.

Downward, by labels:

    1. roots get a label: the set of those who keep them, as a number
    2. labels are pushed down the edges, a wave at a time, all labels at once: what gets one and the same label
       is settled inside the database, what gets several is joined here
    3. what was given another label than it had goes into the next wave; the sums are made by label

Upward, from child to parent: who refers to an object, and through whom, up to the commits. A commit is reached through
its root (or is itself asked for, or by its layout). All commits that the index knows may be answers, also forgotten
ones.

Invariant: an object counts once however many ways lead to it. An edge is looked at as often as its parent's
label changes, which is once for most, however many labels there are; upward, once. Memory does not grow with the
repository, but with the number of different sets. `read_stats` scans tables, so it is for people, not for every commit.
Knows nothing of branches, and not which commits live: the caller labels the roots.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from sqlalchemy import Column, Connection, Integer

from cas_ckpt.index.database import insert_missing, key_column, number_table, scratch_tables
from cas_ckpt.index.rows import (
    UNKNOWN_KIND,
    IndexStats,
    Usage,
    change,
    change_by_key,
    each_row,
    objects_by_id,
    rows,
    rows_by_key,
)
from cas_ckpt.index.schema import NOWHERE
from cas_ckpt.index.trees import read_digests
from cas_ckpt.objects.digest import Digest, ObjectKind

_SHARED = 0
"""Label of what two groups or more lead to; groups count from 1."""

_OBJECTS_PER_READ = 2_000

_Join: TypeAlias = Callable[[int, int], int]
"""Two labels of one object -> the label that it gets."""

_STARTS = number_table("usage_starts", key_column("owner"))
_LABELLED = number_table("labelled", Column("label", Integer, nullable=False))
_WAVE = number_table("wave", Column("label", Integer, nullable=False))
_PUSHED = number_table("pushed", key_column("label"))

_PUSH = """
    INSERT INTO pushed SELECT e.child_id, w.label FROM wave w CROSS JOIN t_edges e WHERE e.parent_id = w.object_id
    ON CONFLICT DO NOTHING
"""
_TAKE_NEW = """
    INSERT INTO wave SELECT p.object_id, min(p.label) FROM pushed p
    WHERE NOT EXISTS (SELECT 1 FROM labelled x WHERE x.object_id = p.object_id)
    GROUP BY p.object_id HAVING min(p.label) = max(p.label)
"""
_DROP_SETTLED = """
    DELETE FROM pushed
    WHERE label = (SELECT x.label FROM labelled x WHERE x.object_id = pushed.object_id)
"""
_SOME = f"""
    SELECT DISTINCT object_id FROM pushed WHERE object_id > :after ORDER BY object_id LIMIT {_OBJECTS_PER_READ}
"""
_DIFFERING = """
    SELECT p.object_id, p.label, x.label FROM pushed p LEFT JOIN labelled x ON x.object_id = p.object_id
    WHERE p.object_id >= :first AND p.object_id <= :last ORDER BY p.object_id
"""


def under(connection: Connection, digests: Iterable[bytes]) -> dict[bytes, Usage]:
    """Digest -> what it and everything below it hold, each digest for itself.

    Two digests that share a chunk both count it, so sums over digests can exceed `exclusive`.
    """
    wanted = list(dict.fromkeys(digests))
    owners = {digest: owner for owner, digest in enumerate(wanted, 1)}
    with scratch_tables(connection, _STARTS):
        starts = [(number, owners[digest]) for digest, number in _numbers(connection, wanted).items()]
        insert_missing(connection, _STARTS, sorted(starts))
        found = measure(connection, _UNDER)
    return {digest: found.get(owner, Usage()) for digest, owner in owners.items()}


def reachable(connection: Connection, roots: Sequence[bytes]) -> Usage:
    """Totals of all that these roots lead to, each object counted once."""
    return exclusive(connection, {"all": roots})["all"]


def exclusive(connection: Connection, groups: Mapping[str, Sequence[bytes]]) -> dict[str, Usage]:
    """Group -> what its roots lead to and the roots of no other group do.

    With a single group that is simply all its roots lead to.
    """
    names = dict(enumerate(sorted(groups), 1))
    labels: dict[bytes, int] = {}
    for owner, name in names.items():
        for digest in groups[name]:
            labels[digest] = _shared_or_same(labels.get(digest, owner), owner)
    found = _by_label(connection, labels, _shared_or_same)
    return {name: found.get(owner, Usage()) for owner, name in names.items()}


def _shared_or_same(one: int, other: int) -> int:
    return one if one == other else _SHARED


def by_holders(connection: Connection, holders: Mapping[bytes, int]) -> dict[int, Usage]:
    """Set of holders -> totals of what they all lead to and no other does; empty sets are left out.

    Args:
        holders: Root -> who keeps it: a set of small numbers, as the bits of one number.
    """
    sets = _Sets()
    found = _by_label(connection, {digest: sets.label(held) for digest, held in holders.items()}, sets.join)
    return {sets.holders(label): usage for label, usage in found.items()}


class _Sets:
    """Labels for sets of holders, which may be wider than a number of the database."""

    def __init__(self) -> None:
        self._labels: dict[int, int] = {}
        self._holders: list[int] = []
        self._joined: dict[tuple[int, int], int] = {}

    def label(self, holders: int) -> int:
        """The label of this set."""
        if holders not in self._labels:
            self._labels[holders] = len(self._holders)
            self._holders.append(holders)
        return self._labels[holders]

    def holders(self, label: int) -> int:
        """The set that has this label."""
        return self._holders[label]

    def join(self, one: int, other: int) -> int:
        """The label of both sets together."""
        pair = (one, other)
        if pair not in self._joined:
            self._joined[pair] = self.label(self._holders[one] | self._holders[other])
        return self._joined[pair]


def _by_label(connection: Connection, labels: Mapping[bytes, int], join: _Join) -> dict[int, Usage]:
    """Label -> sums over the objects that have it in the end."""
    with scratch_tables(connection, _LABELLED, _WAVE, _PUSHED):
        rows = sorted((number, labels[digest]) for digest, number in _numbers(connection, labels).items())
        insert_missing(connection, _LABELLED, rows)
        insert_missing(connection, _WAVE, rows)
        while change(connection, _PUSH):
            change(connection, "DELETE FROM wave")
            change(connection, _TAKE_NEW)
            change(connection, "INSERT INTO labelled SELECT object_id, label FROM wave")
            change(connection, _DROP_SETTLED)
            _join_differing(connection, join)
            change(connection, "DELETE FROM pushed")
        return measure(connection, "SELECT label AS owner, object_id FROM labelled")


def _join_differing(connection: Connection, join: _Join) -> None:
    """Give those objects their label that were pushed several, or another one than they had."""
    after = -1
    while numbers := rows(connection, _SOME, after=after):
        first, after = numbers[0][0], numbers[-1][0]
        differing = rows(connection, _DIFFERING, first=first, last=after)
        had = {number: label for number, _, label in differing}
        joined = dict(had)
        for number, pushed, _ in differing:
            label = joined[number]
            joined[number] = pushed if label is None else join(label, pushed)
        changed = [(number, label) for number, label in joined.items() if label != had[number]]
        change_by_key(connection, "DELETE FROM labelled WHERE object_id {keys}", [number for number, _ in changed])
        insert_missing(connection, _LABELLED, changed)
        insert_missing(connection, _WAVE, changed)


def _numbers(connection: Connection, digests: Iterable[bytes]) -> dict[bytes, int]:
    """Digest -> number, of those that the index knows."""
    return {digest: number for digest, number, _ in objects_by_id(connection, digests)}


def measure(connection: Connection, reached: str) -> dict[int, Usage]:
    """Owner -> sums over its (owner, object_id) pairs, which the query `reached` gives."""
    return {owner: Usage(*map(int, sums)) for owner, *sums in rows(connection, _SUMS.format(reached=reached))}


_UNDER = """
    WITH RECURSIVE reached(owner, object_id) AS (
        SELECT owner, object_id FROM usage_starts
        UNION SELECT r.owner, e.child_id FROM reached r JOIN t_edges e ON e.parent_id = r.object_id
    ) SELECT owner, object_id FROM reached
"""
_SUMS = f"""
    SELECT owner, sum(chunk), sum(chunk * num_bytes), sum(1 - chunk), sum((1 - chunk) * num_bytes), sum(stored_bytes)
    FROM (
        SELECT r.owner, CASE max(l.kind) WHEN {int(ObjectKind.CHUNK)} THEN 1 ELSE 0 END AS chunk,
            max(l.num_bytes) AS num_bytes, sum(l.stored_bytes + l.header_bytes) AS stored_bytes
        FROM ({{reached}}) r JOIN t_locations l ON l.object_id = r.object_id
        WHERE l.pack_id <> {NOWHERE} GROUP BY r.owner, r.object_id
    ) s GROUP BY owner
"""
"""One row for each (owner, object) inside: its plain bytes, and the stored bytes of all its extents."""


# --- upward -----------------------------------------------------------------------------------

_FRONTIER = number_table("frontier")
_ABOVE = number_table("above")
_Masks: TypeAlias = dict[int, int]
"""Number of an object -> the chunks below it, one bit each."""

_CLIMB = """
    INSERT INTO above WITH RECURSIVE climbed(object_id) AS (
        SELECT object_id FROM t_objects WHERE digest = :digest
        UNION SELECT e.parent_id FROM climbed a CROSS JOIN t_edges e WHERE e.child_id = a.object_id
    ) SELECT object_id FROM climbed
"""
_HOLDING = """
    SELECT c.object_id, c.digest FROM t_commits c CROSS JOIN t_objects o CROSS JOIN above a
    WHERE o.digest = c.root AND a.object_id = o.object_id
    UNION SELECT c.object_id, c.digest FROM t_commits c
    WHERE c.layout = :digest OR c.root = :digest OR c.digest = :digest
    ORDER BY 1
"""


class Shared(NamedTuple):
    """How much of what was asked for is in a commit.

    Attributes:
        num_chunks: How many of the chunks.
        num_bytes: Their plain bytes.
    """

    commit: bytes
    num_chunks: int
    num_bytes: int


def commits_holding(connection: Connection, digest: bytes) -> list[bytes]:
    """The commits whose state contains the object (chunk, tensor, tree, page), the first known first.

    A layout is held by the commits that name it, a commit by itself.
    """
    with scratch_tables(connection, _ABOVE):
        change(connection, _CLIMB, digest=digest)
        return [commit for _, commit in rows(connection, _HOLDING, digest=digest)]


_SPREAD = """
    SELECT placed.parent_id, placed.child_id, o.kind FROM (
        SELECT e.parent_id, e.child_id, ROW_NUMBER() OVER (PARTITION BY e.parent_id ORDER BY e.child_id) - 1 AS place,
            COUNT(*) OVER (PARTITION BY e.parent_id) AS num_children
        FROM t_edges e WHERE e.parent_id {keys}
    ) AS placed CROSS JOIN t_objects o
    WHERE (placed.place * :most + placed.num_children / 2) % placed.num_children < :most
        AND o.object_id = placed.child_id
"""
"""Children in equal distances by age, and not the oldest, which is the likeliest to be in other commits too."""

_CHILDREN = "SELECT e.parent_id, e.child_id FROM t_edges e WHERE e.parent_id {keys}"
_PLAIN_BYTES = """
    SELECT DISTINCT l.object_id, l.num_bytes FROM t_locations l WHERE l.object_id {keys} AND l.pack_id <> 0
"""


def some_chunks(connection: Connection, tensors: Collection[bytes], *, most: int) -> dict[Digest, int]:
    """Ids and plain bytes of some chunks of every tensor, spread over all that it has.

    Args:
        tensors: Ids of tensor nodes, or of the only chunks of tensors. Unknown ones have no chunks.
        most: At most so many of one tensor.
    """
    kinds = {number: kind for _, number, kind in objects_by_id(connection, tensors)}
    chunks = {number for number, kind in kinds.items() if kind == ObjectKind.CHUNK}
    pages: dict[int, list[int]] = {}
    for tensor, child, kind in rows_by_key(connection, _SPREAD, kinds.keys() - chunks, most=most):
        if kind == ObjectKind.CHUNK_PAGE:
            pages.setdefault(tensor, []).append(child)
        else:
            chunks.add(child)
    behind: dict[int, list[int]] = {}
    for page, chunk in rows_by_key(connection, _CHILDREN, {page for named in pages.values() for page in named}):
        behind.setdefault(page, []).append(chunk)
    for named in pages.values():
        every = sorted({chunk for page in named for chunk in behind.get(page, ())})
        count = min(most, len(every))
        chunks.update(every[(2 * at + 1) * len(every) // (2 * count)] for at in range(count))
    sizes = dict(rows_by_key(connection, _PLAIN_BYTES, chunks))
    return {digest: sizes[number] for number, digest in read_digests(connection, sizes).items()}


def nearest(connection: Connection, digests: Iterable[bytes], *, limit: int = 10) -> list[Shared]:
    """The commits that share the most bytes with these chunks, the best first, of equals the youngest.

    Args:
        digests: Chunks of a state, or a sample of some hundred of them.
    """
    numbers = [number for _, number, kind in objects_by_id(connection, digests) if kind != UNKNOWN_KIND]
    if not numbers:
        return []
    bits = {number: 1 << bit for bit, number in enumerate(numbers)}
    masks = _masks(connection, bits)
    sizes: dict[int, int] = {}
    for number, size in rows_by_key(connection, _PLAIN_BYTES, numbers):
        sizes[size] = sizes.get(size, 0) | bits[number]
    roots = rows(
        connection,
        "SELECT o.object_id, c.time_us, c.object_id, c.digest FROM t_commits c CROSS JOIN t_objects o "
        "WHERE o.digest = c.root",
    )
    found = [(masks[root], *commit) for root, *commit in roots if root in masks]
    worth = {
        mask: sum(size * (mask & bits).bit_count() for size, bits in sizes.items())
        for mask in {mask for mask, *_ in found}
    }
    found.sort(key=lambda each: (-worth[each[0]], -each[0].bit_count(), -each[1], -each[2]))
    return [Shared(digest, mask.bit_count(), worth[mask]) for mask, _, _, digest in found[:limit]]


def _masks(connection: Connection, starts: Mapping[int, int]) -> _Masks:
    """The chunks below every object above the starts, level by level; only news go further up."""
    masks: _Masks = dict(starts)
    news: _Masks = dict(starts)
    with scratch_tables(connection, _FRONTIER):
        while news:
            risen: _Masks = {}
            for parents, mask in _upward(connection, news).items():
                for parent in map(int, parents.split(",")):
                    risen[parent] = risen.get(parent, 0) | mask
            news = {}
            for parent, mask in risen.items():
                before = masks.get(parent, 0)
                if mask | before != before:
                    masks[parent], news[parent] = mask | before, mask & ~before
    return masks


def _upward(connection: Connection, news: _Masks) -> dict[str, int]:
    """Parents, as a list in one text, -> all the chunks below the objects that have just these parents.

    A text for each child costs a tenth of a row for each edge; and what is in every commit has the
    same thousand parents.
    """
    change(connection, "DELETE FROM frontier")
    insert_missing(connection, _FRONTIER, [(number,) for number in sorted(news)])
    sqlite = connection.dialect.name == "sqlite"
    parents = "group_concat(e.parent_id)" if sqlite else "string_agg(CAST(e.parent_id AS TEXT), ',')"
    asked = f"SELECT f.object_id, (SELECT {parents} FROM t_edges e WHERE e.child_id = f.object_id) FROM frontier f"
    found: dict[str, int] = {}
    for child, joined in each_row(connection, asked):
        if joined is not None:
            found[joined] = found.get(joined, 0) | news[child]
    return found


# --- the index in numbers ---------------------------------------------------------------------


def read_stats(connection: Connection) -> IndexStats:
    """How much of everything the index knows."""
    by_kind = f"""
        SELECT kind, count(*), sum(num_bytes) FROM (
            SELECT max(l.kind) AS kind, max(l.num_bytes) AS num_bytes FROM t_locations l
            WHERE l.pack_id <> {NOWHERE} GROUP BY l.object_id
        ) o GROUP BY kind ORDER BY kind
    """
    ((num_packs, pack_bytes),) = rows(connection, "SELECT count(*), sum(size_bytes) FROM t_packs")
    return IndexStats(
        num_packs=num_packs,
        pack_bytes=int(pack_bytes or 0),
        objects={ObjectKind(kind): (count, int(size)) for kind, count, size in rows(connection, by_kind)},
        num_commits=_count(connection, "t_commits"),
        num_edges=_count(connection, "t_edges"),
        num_missing=_count(connection, f"t_locations WHERE pack_id = {NOWHERE}"),
    )


def _count(connection: Connection, what: str) -> int:
    return int(rows(connection, f"SELECT count(*) FROM {what}")[0][0])


def count_extents(connection: Connection, root: bytes) -> tuple[int, int]:
    """(chunks, extents) of the state `root`, every chunk once, a second copy of an extent not counted."""
    query = f"""
        WITH RECURSIVE reached(object_id) AS (
            SELECT object_id FROM t_objects WHERE digest = :root
            UNION SELECT e.child_id FROM reached r JOIN t_edges e ON e.parent_id = r.object_id
        )
        SELECT count(DISTINCT object_id), count(*) FROM (
            SELECT DISTINCT l.object_id, l.first_leaf FROM reached r JOIN t_locations l ON l.object_id = r.object_id
            WHERE l.pack_id <> {NOWHERE} AND l.kind = {int(ObjectKind.CHUNK)}
        ) x
    """
    ((num_chunks, num_extents),) = rows(connection, query, root=root)
    return num_chunks, num_extents
