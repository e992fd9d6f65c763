"""Candidates of garbage collection, found as packs come and not by reading everything.

    1. packs above a watermark have not been examined: look at each of their entries once, some packs at a turn
    2. nothing refers to it, it is complete in several packs, or not complete in any: a candidate
    3. candidates are looked at again each time, and are none any more when all is well with them

Invariant: what is wanting in one of these ways is a candidate (a row of `t_suspects`), or is in a pack above
the watermark; dropping packs makes candidates of what they leave behind (index/contents.py). A candidate is never a
verdict. Must not know which commits live.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from sqlalchemy import Connection

from cas_ckpt.errors import CkptError
from cas_ckpt.index.database import flag, insert_missing, key_column, number_table, scratch_tables
from cas_ckpt.index.db_errors import UNREADABLE, unreadable
from cas_ckpt.index.meta import read_meta, write_meta
from cas_ckpt.index.statements import change, change_by_key, rows
from cas_ckpt.objects.pack import Location

if TYPE_CHECKING:
    from cas_ckpt.index.index import Index

EXAMINED = "examined"
"""Key of the watermark in `meta`: the highest number of a pack that was examined."""

ENTRIES_PER_TURN = 200_000
"""Entries that are examined in one writing transaction, which others wait for."""

_OBJECTS_PER_READ = 2_000

TARGETS = number_table("commit_targets")
"""Roots and layouts of all commits."""

UNREFERENCED = number_table("unreferenced", flag("referred"))
"""Objects that nothing refers to; `referred`: something did, until its pack was dropped."""

SPLIT = number_table("split", flag("incomplete"))
"""Objects in several extents; `incomplete`: together they do not hold every leaf."""

SPARES = number_table("spares", key_column("pack_id"))
"""(object, pack): the object is complete in the other packs together."""

FINDINGS = (TARGETS, UNREFERENCED, SPLIT, SPARES)

_NOTHING_REFERS = """
    NOT EXISTS (SELECT 1 FROM t_edges e WHERE e.child_id = {number})
    AND NOT EXISTS (SELECT 1 FROM commit_targets t WHERE t.object_id = {number})
    AND NOT EXISTS (SELECT 1 FROM t_commits c WHERE c.object_id = {number})
"""
NO_BASE = """
    AND NOT EXISTS (SELECT 1 FROM t_objects o CROSS JOIN t_locations b
                    WHERE o.object_id = {number} AND b.base = o.digest)
"""
"""No extent is a delta against an object."""

_TARGETS_OF_COMMITS = "SELECT o.object_id FROM t_commits c CROSS JOIN t_objects o WHERE o.digest = c.{column}"
_NEW = "l.pack_id > :above AND l.pack_id <= :upto"
_PARTIAL = "(m.leaf_bytes > 0 AND m.num_leaves * m.leaf_bytes < m.num_bytes)"


class Extent(NamedTuple):
    """One extent of one object, as far as coverage is concerned."""

    object_id: int
    pack_id: int
    first_leaf: int
    num_leaves: int
    leaf_bytes: int
    num_bytes: int


_OBJECT, _FIRST_LEAF = attrgetter("object_id"), attrgetter("first_leaf")


def has_deltas(connection: Connection) -> bool:
    """Whether any extent is a delta against another chunk."""
    return bool(rows(connection, "SELECT 1 FROM t_locations WHERE base IS NOT NULL LIMIT 1"))


def watermark(connection: Connection) -> int:
    """The highest number of a pack that was examined."""
    return int(read_meta(connection, EXAMINED) or 0)


def clamp_watermark(connection: Connection) -> None:
    """Forget that packs were examined whose numbers may now be given to others."""
    highest = _highest_pack(connection)
    if watermark(connection) > highest:
        write_meta(connection, EXAMINED, str(highest))


def examine(index: Index) -> None:
    """Examine the packs that came since the last time, in many small writing transactions."""
    if index.read_only:
        return
    more = index.read(lambda connection: _highest_pack(connection) > watermark(connection))
    targets: CommitTargets | None = None
    while more:
        try:
            more = index.write(examine_some, targets)
            if more and targets is None:
                targets = index.read(commit_targets)
        except CkptError:
            raise  # some of them are ValueErrors and LookupErrors too
        except UNREADABLE as error:
            raise unreadable(error, index.place) from error


class CommitTargets(NamedTuple):
    """The numbers of the roots and layouts of all commits, sorted, and the packs that were known then."""

    numbers: array[int]
    packs: frozenset[str]


def commit_targets(connection: Connection) -> CommitTargets:
    """The targets of the commits that there are now."""
    found: set[int] = set()
    for column in ("root", "layout"):
        found.update(number for (number,) in rows(connection, _TARGETS_OF_COMMITS.format(column=column)))
    return CommitTargets(array("q", sorted(found)), _pack_names(connection))


def _pack_names(connection: Connection) -> frozenset[str]:
    return frozenset(name for (name,) in rows(connection, "SELECT name FROM t_packs"))


def examine_some(connection: Connection, targets: CommitTargets | None = None) -> bool:
    """Examine some packs and keep what was found; returns whether there are more.

    Args:
        targets: Those of a moment ago. They serve for all turns but the last, so that not each turn asks for those of
            all commits: what came since is missing in them, and only makes more candidates. Once a pack was dropped,
            which takes commits away, and numbers are given again, they do not serve any more.
    """
    above, upto, more = _turn(connection)
    if targets is not None and (not more or not targets.packs <= _pack_names(connection)):
        targets = None
    with scratch_tables(connection, *FINDINGS):
        find(connection, above=above, upto=upto, again=not more, targets=targets)
        _keep(connection, again=not more)
    write_meta(connection, EXAMINED, str(upto))
    return more


def find_now(connection: Connection) -> None:
    """Fill the tables of findings for what is in the index now, keeping nothing."""
    find(connection, above=watermark(connection), upto=_highest_pack(connection), again=True)


def _fill_targets(connection: Connection, targets: CommitTargets, *, above: int, upto: int) -> None:
    """Fill `commit_targets` with those that may be in these packs."""
    query = "SELECT min(l.object_id), max(l.object_id) FROM t_locations l WHERE " + _NEW
    ((first, last),) = rows(connection, query, above=above, upto=upto)
    if first is not None:
        near = targets.numbers[bisect_left(targets.numbers, first) : bisect_right(targets.numbers, last)]
        insert_missing(connection, TARGETS, [(number,) for number in near])


def find(connection: Connection, *, above: int, upto: int, again: bool, targets: CommitTargets | None = None) -> None:
    """Fill the tables of findings from the packs with numbers in (`above`, `upto`].

    Args:
        again: Look at the candidates as well.
        targets: Roots and layouts of all commits, where they are known; not with `again`.
    """
    if targets is not None:
        _fill_targets(connection, targets, above=above, upto=upto)
    for column in ("root", "layout") if targets is None else ():
        query = _TARGETS_OF_COMMITS.format(column=column)
        change(connection, f"INSERT INTO commit_targets {query} ON CONFLICT DO NOTHING")
    unreferred = _NOTHING_REFERS + (NO_BASE if has_deltas(connection) else "")
    if again:
        change(
            connection,
            f"INSERT INTO unreferenced SELECT s.object_id, s.referred FROM t_suspects s "
            f"WHERE {unreferred.format(number='s.object_id')} ON CONFLICT DO NOTHING",
        )
        change(
            connection, "INSERT INTO split SELECT s.object_id, 0 FROM t_suspects s WHERE true ON CONFLICT DO NOTHING"
        )
    change(
        connection,
        f"INSERT INTO unreferenced SELECT l.object_id, 0 FROM t_locations l "
        f"WHERE {_NEW} AND {unreferred.format(number='l.object_id')} ON CONFLICT DO NOTHING",
        above=above,
        upto=upto,
    )
    change(
        connection,
        f"INSERT INTO split SELECT l.object_id, 0 FROM t_locations l CROSS JOIN t_locations m "
        f"WHERE {_NEW} AND m.object_id = l.object_id AND m.pack_id > 0 "
        f"AND (m.pack_id <> l.pack_id OR m.first_leaf <> l.first_leaf OR {_PARTIAL}) ON CONFLICT DO NOTHING",
        above=above,
        upto=upto,
    )
    _examine_split(connection)


def _turn(connection: Connection) -> tuple[int, int, bool]:
    """The packs to examine next, as (above, upto], and whether there are more after them."""
    above = watermark(connection)
    query = "SELECT pack_id, num_entries FROM t_packs WHERE pack_id > :above ORDER BY pack_id"
    upto, total = above, 0
    for pack_id, num_entries in rows(connection, query, above=above):
        if total and total + num_entries > ENTRIES_PER_TURN:
            return above, upto, True
        upto, total = pack_id, total + num_entries
    return above, upto, False


def _highest_pack(connection: Connection) -> int:
    return int(rows(connection, "SELECT max(pack_id) FROM t_packs")[0][0] or 0)


def _keep(connection: Connection, *, again: bool) -> None:
    """Make candidates of the findings; `again`: and remove those that are none any more."""
    wanting = (
        "SELECT object_id FROM unreferenced UNION SELECT object_id FROM spares UNION "
        "SELECT object_id FROM split WHERE incomplete > 0"
    )
    if again:
        change(connection, f"DELETE FROM t_suspects WHERE object_id NOT IN ({wanting})")
    change(connection, "INSERT INTO t_suspects SELECT * FROM unreferenced WHERE true ON CONFLICT DO NOTHING")
    kept = f"SELECT object_id, 0 FROM ({wanting}) w WHERE true"
    change(connection, f"INSERT INTO t_suspects {kept} ON CONFLICT DO NOTHING")


# --- coverage ------------------------------------------------------------------------------


def _examine_split(connection: Connection) -> None:
    """Find out what of the objects in several extents is spare, and which of them are not complete."""
    incomplete = []
    for extents in extents_by_object(connection, "split"):
        spare = [(extents[0].object_id, pack) for pack in spare_packs(extents)]
        insert_missing(connection, SPARES, spare)
        if not covers(extents):
            incomplete.append(extents[0].object_id)
    change_by_key(connection, "UPDATE split SET incomplete = 1 WHERE object_id {keys}", incomplete)


def extents_by_object(connection: Connection, table: str, *, only: str = "true") -> Iterator[list[Extent]]:
    """The extents of each object in the temporary `table`, some thousand objects at a time.

    Args:
        only: Condition on the extents, `l`.
    """
    some = f"SELECT object_id FROM {table} WHERE object_id > :after ORDER BY object_id LIMIT {_OBJECTS_PER_READ}"
    extents = (
        "SELECT l.object_id, l.pack_id, l.first_leaf, l.num_leaves, l.leaf_bytes, l.num_bytes "
        f"FROM {table} s CROSS JOIN t_locations l WHERE s.object_id >= :first AND s.object_id <= :last "
        f"AND l.object_id = s.object_id AND l.pack_id > 0 AND {only} ORDER BY l.object_id"
    )
    after = -1
    while numbers := rows(connection, some, after=after):
        first, after = numbers[0][0], numbers[-1][0]
        found = rows(connection, extents, first=first, last=after)
        for _, group in groupby((Extent(*row) for row in found), key=_OBJECT):
            yield list(group)


def covers(extents: Iterable[Extent | Location]) -> bool:
    """Whether these extents of one object together hold all of it."""
    reached = 0
    for extent in sorted(extents, key=_FIRST_LEAF):
        if extent.first_leaf > reached:
            return False
        reached = max(reached, extent.first_leaf + extent.num_leaves)
        if not extent.leaf_bytes or reached * extent.leaf_bytes >= extent.num_bytes:
            return True
    return False


def spare_packs(extents: Sequence[Extent]) -> list[int]:
    """The packs without which the object is complete."""
    packs: dict[int, list[Extent]] = {}
    for extent in extents:
        packs.setdefault(extent.pack_id, []).append(extent)
    if len(packs) < 2:
        return []
    whole = [pack for pack, own in packs.items() if covers(own)]
    if len(whole) > 1:
        return sorted(packs)
    if whole:
        return [pack for pack in sorted(packs) if pack != whole[0] or _covered_without(packs, pack)]
    return [pack for pack in sorted(packs) if _covered_without(packs, pack)]


def _covered_without(packs: dict[int, list[Extent]], pack: int) -> bool:
    return covers([extent for number, own in packs.items() if number != pack for extent in own])
