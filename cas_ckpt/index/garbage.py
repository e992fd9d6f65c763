"""Which objects are live or dead, and in which packs: for garbage collection and its previews. And which are promised.

    1. packs above a watermark were not examined yet: each of their entries is looked at once, some packs at a turn, in
       short writing transactions. What nothing refers to, and what is complete in several packs, or in none, is a
       candidate; candidates are looked at again each time, and are none any more when all is well with them
    2. in one reading transaction, what is known to live is guarded: commits, roots and layouts
    3. candidates are what may have died first: other commits, their roots, and what nothing refers to
    4. a candidate dies unless it is guarded or something outside the dead refers to it; what the newly dead refer to
       are the next candidates; again until none dies
    5. questions are answered from the dead, in that transaction: pack by pack (`living`), or how much more would be
       dead if some commits were gone (`freed`, `unique`)

Invariant: what is wanting in one of the ways of 1 is a row of `t_suspects`, never a verdict, or is in a pack above the
watermark; dropping packs makes candidates of what they leave behind (index/contents.py). An object that the candidates
lead to is in `dead` if and only if no guarded object leads to it, provided that every object without a parent that
leads to it is a candidate. Nothing of what is found outlives the transaction, so that a later commit may refer to a
dead object and it lives. Errs towards life: an object that was overlooked stays in its pack. The work follows the
references out of dead objects, in temporary tables that grow with garbage alone, never with the repository. Must not
know: refs, forgetting, remotes, the store, or why commits would be gone.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from sqlalchemy import Column, Connection, Integer
from sqlalchemy import Index as TableIndex

from cas_ckpt.errors import CkptError
from cas_ckpt.index.database import fill_numbers, flag, insert_missing, key_column, number_table, scratch_tables
from cas_ckpt.index.db_errors import UNREADABLE, unreadable
from cas_ckpt.index.manifests import FLAVOR_STEP
from cas_ckpt.index.remembered import read_meta, write_meta
from cas_ckpt.index.rows import Usage, change, change_by_key, objects_by_id, rows, rows_by_key
from cas_ckpt.index.schema import NOWHERE
from cas_ckpt.index.trees import read_digests
from cas_ckpt.index.usage import measure
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.objects.nodes import PAGE_CHUNKS, EntryForm
from cas_ckpt.objects.pack import ExtentInfo, Location, PackKind

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


def find(connection: Connection, *, above: int, upto: int, again: bool, targets: CommitTargets | None = None) -> None:
    """Fill the tables of findings from the packs with numbers in (`above`, `upto`].

    Args:
        again: Look at the candidates as well.
        targets: Roots and layouts of all commits, where they are known; not with `again`.
    """
    if targets is not None:  # those that may be in these packs
        query = "SELECT min(l.object_id), max(l.object_id) FROM t_locations l WHERE " + _NEW
        ((first, last),) = rows(connection, query, above=above, upto=upto)
        if first is not None:
            near = targets.numbers[bisect_left(targets.numbers, first) : bisect_right(targets.numbers, last)]
            insert_missing(connection, TARGETS, [(number,) for number in near])
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
    incomplete = []  # of the objects in several extents; what of them is spare is found with it
    for extents in extents_by_object(connection, "split"):
        spare = [(extents[0].object_id, pack) for pack in spare_packs(extents)]
        insert_missing(connection, SPARES, spare)
        if not covers(extents):
            incomplete.append(extents[0].object_id)
    change_by_key(connection, "UPDATE split SET incomplete = 1 WHERE object_id {keys}", incomplete)


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


# --- what is dead ----------------------------------------------------------------------------

GUARDED = number_table("guarded")
DEAD = number_table("dead", Column("level", Integer, nullable=False))
CANDIDATES = number_table("candidates")
TableIndex("dead_by_level", DEAD.c.level)
DEAD_TABLES = (GUARDED, DEAD, CANDIDATES)

_NO_PARENT = """
    NOT EXISTS (SELECT 1 FROM t_edges p WHERE p.child_id = c.object_id
                AND NOT EXISTS (SELECT 1 FROM dead x WHERE x.object_id = p.parent_id))
"""
_NO_DELTA = """
    AND NOT EXISTS (SELECT 1 FROM t_objects o CROSS JOIN t_locations b
                    WHERE o.object_id = c.object_id AND b.base = o.digest
                    AND NOT EXISTS (SELECT 1 FROM dead x WHERE x.object_id = b.object_id))
"""
_CHILDREN = """
    INSERT INTO candidates SELECT e.child_id FROM dead d CROSS JOIN t_edges e
    WHERE d.level = :level AND e.parent_id = d.object_id ON CONFLICT DO NOTHING
"""
_BASES = """
    INSERT INTO candidates SELECT o.object_id FROM dead d CROSS JOIN t_locations l CROSS JOIN t_objects o
    WHERE d.level = :level AND l.object_id = d.object_id AND l.base IS NOT NULL AND o.digest = l.base
    ON CONFLICT DO NOTHING
"""


class DeadObjects:
    """The dead objects of one connection, which has `DEAD_TABLES` and the tables of findings.

    Attributes:
        level: That of those that die next; it rises from one `find` to the next.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._deltas = has_deltas(connection)
        self.level = 0

    def guard(self, digests: Iterable[bytes]) -> list[bytes]:
        """Let these live, and what they lead to; returns those that are in no known pack."""
        return fill_numbers(self._connection, GUARDED, digests)

    def consider_all(self) -> None:
        """Take for candidates every commit, root and layout that is not guarded, and what nothing refers to."""
        for table in ("t_commits", "commit_targets", "unreferenced"):
            change(
                self._connection,
                f"INSERT INTO candidates SELECT s.object_id FROM {table} s "
                "WHERE NOT EXISTS (SELECT 1 FROM guarded g WHERE g.object_id = s.object_id) ON CONFLICT DO NOTHING",
            )

    def release(self, digests: Iterable[bytes]) -> None:
        """Guard these no longer, and take them for candidates."""
        fill_numbers(self._connection, CANDIDATES, digests)
        change(self._connection, "DELETE FROM guarded WHERE object_id IN (SELECT object_id FROM candidates)")

    def find(self) -> None:
        """Decide about the candidates, and about all that may die with them."""
        free = _NO_PARENT + (_NO_DELTA if self._deltas else "")
        died = 1
        while died:
            died = change(
                self._connection,
                f"INSERT INTO dead SELECT c.object_id, :level FROM candidates c WHERE {free} "
                "AND NOT EXISTS (SELECT 1 FROM guarded g WHERE g.object_id = c.object_id) "
                "AND NOT EXISTS (SELECT 1 FROM dead x WHERE x.object_id = c.object_id)",
                level=self.level,
            )
            change(self._connection, "DELETE FROM candidates")
            if died:
                change(self._connection, _CHILDREN, level=self.level)
                if self._deltas:
                    change(self._connection, _BASES, level=self.level)
            self.level += 1


LiveSet: TypeAlias = tuple[Collection[bytes], Collection[bytes]]
"""Ids of the commits whose own objects live; of the roots and layouts of those whose data lives, too."""


def freed(index: Index, now: LiveSet, then: LiveSet) -> Usage:
    """Objects that `now` keeps alive and `then` would not; commit objects and layouts count as nodes."""
    examine(index)
    return index.read(_freed, now, then)


def unique(index: Index, commits: Collection[bytes], others: Collection[bytes]) -> Usage:
    """Objects that these commits need, themselves included, and the commits `others` do not."""
    return freed(index, index.read(live_set, commits), index.read(live_set, others))


def _freed(connection: Connection, now: LiveSet, then: LiveSet) -> Usage:
    lasting = {*then[0], *then[1]}
    with scratch_tables(connection, *FINDINGS, *DEAD_TABLES):
        find_now(connection)
        dead = DeadObjects(connection)
        dead.guard(lasting.union(*now))
        dead.consider_all()
        dead.find()
        first = dead.level
        dead.release({*now[0], *now[1]} - lasting)
        dead.find()
        dying = f"SELECT 1 AS owner, d.object_id FROM dead d WHERE d.level >= {first}"
        return measure(connection, dying).get(1, Usage())


def live_set(connection: Connection, commits: Iterable[bytes]) -> LiveSet:
    """These commits with all their data."""
    asked = "SELECT c.digest, c.root, c.layout FROM t_commits c WHERE c.digest {keys}"
    found = list(rows_by_key(connection, asked, commits))
    return [row[0] for row in found], {digest for row in found for digest in row[1:] if digest is not None}


_PACKS = """
    SELECT p.pack_id, p.name, p.kind, p.size_bytes, p.num_entries, p.first_seen_us FROM t_packs p WHERE p.pack_id {keys}
"""
_FRESH = number_table("fresh")
"""Dead objects that some commit may be about to need: it was not published yet."""

_CONDEMNED = number_table("condemned")
"""Numbers of packs."""

_DOUBTFUL = number_table("doubtful")
"""Live objects of condemned packs that no single extent elsewhere holds whole."""

_ALIVE = "NOT EXISTS (SELECT 1 FROM dead x WHERE x.object_id = {number})"
_WHOLE = "(m.leaf_bytes = 0 OR (m.first_leaf = 0 AND m.num_leaves * m.leaf_bytes >= m.num_bytes))"

_OUTSIDE = "NOT EXISTS (SELECT 1 FROM condemned z WHERE z.object_id = {pack})"
_NOT_WHOLE_IN_ONE_OUTSIDE = f"""
    INSERT INTO doubtful SELECT l.object_id FROM condemned q CROSS JOIN t_locations l
    WHERE l.pack_id = q.object_id AND {_ALIVE.format(number="l.object_id")}
    AND NOT EXISTS (SELECT 1 FROM t_locations m WHERE m.object_id = l.object_id AND m.pack_id > {NOWHERE}
                    AND {_WHOLE} AND {_OUTSIDE.format(pack="m.pack_id")})
    ON CONFLICT DO NOTHING
"""
_CONDEMNED_WITH_DOUBTFUL = """
    SELECT DISTINCT l.pack_id FROM doubtful d CROSS JOIN t_locations l CROSS JOIN condemned q
    WHERE l.object_id = d.object_id AND q.object_id = l.pack_id
"""

_MISSING = (
    "SELECT o.digest FROM t_locations l CROSS JOIN t_objects o "
    f"WHERE l.pack_id = {NOWHERE} AND o.object_id = l.object_id AND {_ALIVE.format(number='l.object_id')}",
    "SELECT o.digest FROM split s CROSS JOIN t_objects o "
    f"WHERE s.incomplete = 1 AND o.object_id = s.object_id AND {_ALIVE.format(number='s.object_id')}",
)
"""Live objects that are in no pack, and those that no extents hold completely together."""

_LIVE_ENTRIES = f"""
    SELECT l.pack_id, o.digest, l.kind, l.encoding, l.num_bytes, l.stored_bytes, l.leaf_bytes, l.first_leaf,
           l.num_leaves, l."offset", l.header_bytes, l.base FROM t_locations l CROSS JOIN t_objects o
    WHERE l.pack_id {{keys}} AND o.object_id = l.object_id AND {_ALIVE.format(number="l.object_id")}
    ORDER BY l.pack_id, l."offset"
"""


@dataclass(frozen=True, slots=True)
class PackLiveness:
    """A pack that holds something that need not be there.

    Attributes:
        first_seen_us: When this index first saw it, in microseconds since the epoch.
        dead_entries: Extents of dead objects.
        dead_bytes: What they take, entry headers included.
        duplicate_bytes: What live extents take whose object is whole in other packs together. Both
            of two copies count: `Living.needed` says which packs may go at the same time.
        unpublished: It holds something dead that a commit may be about to need: what nothing ever
            referred to, or what a commit refers to that was not published.
    """

    name: str
    kind: PackKind
    size_bytes: int
    num_entries: int
    first_seen_us: int
    dead_entries: int
    dead_bytes: int
    duplicate_bytes: int
    unpublished: bool


@dataclass(frozen=True, slots=True)
class Garbage:
    """All that is dead.

    Attributes:
        num_objects: Dead objects that are stored in packs.
        stored_bytes: What they take there, entry headers included.
    """

    num_objects: int
    stored_bytes: int


class Living:
    """The answers, as of the moment at which the block began."""

    def __init__(self, connection: Connection, missing: list[bytes]) -> None:
        self._connection = connection
        self._unknown = missing

    def missing(self, limit: int = 100, *, promised: Collection[bytes] = ()) -> list[bytes]:
        """Up to `limit` live objects that are not whole in the packs that the index knows.

        Args:
            promised: Roots of promised commits: chunks that they lead to are not missing.
        """
        found = dict.fromkeys(self._unknown[:limit])
        if not promised:
            for query in _MISSING:
                found.update((digest, None) for (digest,) in rows(self._connection, f"{query} LIMIT {int(limit)}"))
            return list(found)[:limit]
        with scratch_tables(self._connection, *_PROMISES):
            for query in _MISSING:
                numbers = query.replace("o.digest", "o.object_id", 1)
                change(self._connection, f"INSERT INTO absent {numbers} ON CONFLICT DO NOTHING")
            drop_promised(self._connection, promised)
            found.update(dict.fromkeys(some_absent(self._connection, limit)))
        return list(found)[:limit]

    def packs(self) -> list[PackLiveness]:
        """Packs that hold at least one dead or duplicate extent, the oldest first."""
        dead = self._sums("SELECT object_id FROM dead", "true")
        spare = self._sums(
            "SELECT DISTINCT object_id FROM spares",
            f"{_ALIVE.format(number='l.object_id')} AND "
            "EXISTS (SELECT 1 FROM spares s WHERE s.object_id = l.object_id AND s.pack_id = l.pack_id)",
        )
        fresh = self._sums("SELECT object_id FROM fresh", "true").keys()
        found = rows_by_key(self._connection, _PACKS, dead.keys() | spare.keys())
        return [
            PackLiveness(
                name, PackKind(kind), size_bytes, num_entries, first_seen_us,
                *dead.get(number, (0, 0)), spare.get(number, (0, 0))[1], number in fresh,
            )
            for number, name, kind, size_bytes, num_entries, first_seen_us in sorted(found)
        ]  # fmt: skip

    def live_entries(self, packs: Iterable[str]) -> dict[str, list[ExtentInfo]]:
        """Pack -> its extents that are not dead, in the order of their offsets; none if it is unknown."""
        found: dict[str, list[ExtentInfo]] = {pack: [] for pack in packs}
        names = {number: name for name, number in self._numbers(found).items()}
        for pack_id, *row in rows_by_key(self._connection, _LIVE_ENTRIES, names):
            found[names[pack_id]].append(_entry(row))
        return found

    def needed(self, condemned: Collection[str]) -> set[str]:
        """Those of `condemned` that hold a live object which is not whole in packs outside of `condemned`.

        The work follows the entries of `condemned`.
        """
        names = {number: name for name, number in self._numbers(condemned).items()}
        with scratch_tables(self._connection, _CONDEMNED, _DOUBTFUL):
            insert_missing(self._connection, _CONDEMNED, sorted((number,) for number in names))
            change(self._connection, _NOT_WHOLE_IN_ONE_OUTSIDE)
            outside = extents_by_object(self._connection, "doubtful", only=_OUTSIDE.format(pack="l.pack_id"))
            whole = [extents[0].object_id for extents in outside if covers(extents)]
            change_by_key(self._connection, "DELETE FROM doubtful WHERE object_id {keys}", whole)
            needed = rows(self._connection, _CONDEMNED_WITH_DOUBTFUL)
        return {names[number] for (number,) in needed}

    def pack_names(self) -> set[str]:
        """Names of all packs that the index knew when the block began."""
        return {name for (name,) in rows(self._connection, "SELECT name FROM t_packs")}

    def summary(self) -> Garbage:
        """How much is dead."""
        ((count, size),) = rows(
            self._connection,
            "SELECT count(DISTINCT l.object_id), sum(l.stored_bytes + l.header_bytes) "
            f"FROM dead d CROSS JOIN t_locations l WHERE l.object_id = d.object_id AND l.pack_id > {NOWHERE}",
        )
        return Garbage(count, int(size or 0))

    def _numbers(self, names: Iterable[str]) -> dict[str, int]:
        return dict(rows_by_key(self._connection, "SELECT name, pack_id FROM t_packs WHERE name {keys}", names))

    def _sums(self, objects: str, condition: str) -> dict[int, tuple[int, int]]:
        """Pack -> (extents, their stored bytes) of the objects that a query selects."""
        found = rows(
            self._connection,
            f"SELECT l.pack_id, count(*), sum(l.stored_bytes + l.header_bytes) FROM ({objects}) d "
            f"CROSS JOIN t_locations l WHERE l.object_id = d.object_id AND l.pack_id > {NOWHERE} AND {condition} "
            "GROUP BY l.pack_id",
        )
        return {pack_id: (count, int(size)) for pack_id, count, size in found}


def _entry(row: Sequence[Any]) -> ExtentInfo:
    digest, kind, encoding, num_bytes, stored, leaf, first, leaves, offset, header, base = row
    delta = None if base is None else Digest(base)
    kind = ObjectKind(kind)
    return ExtentInfo(Digest(digest), kind, encoding, num_bytes, stored, leaf, first, leaves, offset, header, delta)


@contextmanager
def living(
    index: Index, *, commits: Iterable[bytes], roots: Iterable[bytes], published: Iterable[bytes] = ()
) -> Iterator[Living]:
    """Live and dead objects, as of the beginning of the block, which is one reading transaction.

    Args:
        commits: All live commits; a forgotten one keeps its commit object alone.
        roots: Roots and layouts of the live commits that are not forgotten.
        published: Commits that are known to have been the target of a ref at some time.
    """
    examine(index)
    with (
        index.undisturbed() as quiet,
        quiet.reading() as connection,
        scratch_tables(connection, *FINDINGS, *DEAD_TABLES, _FRESH),
    ):
        find_now(connection)
        dead = DeadObjects(connection)
        missing = dead.guard([*commits, *roots])
        dead.consider_all()
        dead.find()
        _find_fresh(connection, set(published))
        yield Living(connection, missing)


def _find_fresh(connection: Connection, published: Collection[bytes]) -> None:
    """Fill `fresh`: what nothing ever referred to, commits that were not published, and the dead below them."""
    commits = rows(
        connection,
        "SELECT c.object_id, c.digest, c.root, c.layout FROM t_commits c CROSS JOIN dead d "
        "WHERE c.object_id = d.object_id",
    )
    pending = [row for row in commits if row[1] not in published]
    insert_missing(connection, _FRESH, sorted((row[0],) for row in pending))
    fill_numbers(connection, _FRESH, {digest for row in pending for digest in row[2:] if digest})
    change(connection, "INSERT INTO fresh SELECT object_id FROM unreferenced WHERE referred = 0 ON CONFLICT DO NOTHING")
    change(connection, "DELETE FROM fresh WHERE object_id NOT IN (SELECT object_id FROM dead)")
    change(
        connection,
        "INSERT INTO fresh WITH RECURSIVE below(object_id) AS (SELECT object_id FROM fresh UNION "
        "SELECT d.object_id FROM below b CROSS JOIN t_edges e CROSS JOIN dead d "
        "WHERE e.parent_id = b.object_id AND d.object_id = e.child_id) "
        "SELECT object_id FROM below WHERE true ON CONFLICT DO NOTHING",
    )


# --- what is promised: chunks in no pack here, of states that other repositories keep --------------
# Upwards from what is absent, to every node that leads to it; downwards from promised roots, along these nodes alone;
# of that the chunks. A node is never promised: of one that is absent it is not known what it names, so nobody could
# collect. The kind of what is in no pack is told by the nodes that name it.

ABSENT = number_table("absent")
"""Objects that are asked about."""

_ABOVE = number_table("above_absent", Column("level", Integer, nullable=False))
_LED = number_table("led_to", Column("level", Integer, nullable=False))
_ROOTS = number_table("promised_roots")
for _table in (_ABOVE, _LED):
    TableIndex(f"{_table.name}_by_level", _table.c.level)
_PROMISES = (ABSENT, _ABOVE, _LED, _ROOTS)

_UPWARDS = """
    INSERT INTO above_absent SELECT DISTINCT e.parent_id, :next FROM above_absent a CROSS JOIN t_edges e
    WHERE a.level = :level AND e.child_id = a.object_id ON CONFLICT DO NOTHING
"""
_DOWNWARDS = """
    INSERT INTO led_to SELECT DISTINCT e.child_id, :next FROM led_to d CROSS JOIN t_edges e CROSS JOIN above_absent a
    WHERE d.level = :level AND e.parent_id = d.object_id AND a.object_id = e.child_id ON CONFLICT DO NOTHING
"""
_IS_CHUNK = f"""
    EXISTS (SELECT 1 FROM t_objects o WHERE o.object_id = a.object_id AND o.kind = {int(ObjectKind.CHUNK)})
    OR EXISTS (
        SELECT 1 FROM t_edges e CROSS JOIN t_objects p WHERE e.child_id = a.object_id AND p.object_id = e.parent_id
        AND (p.kind = {int(ObjectKind.CHUNK_PAGE)}
             OR EXISTS (SELECT 1 FROM t_tensors t WHERE t.object_id = p.object_id AND t.num_chunks <= {PAGE_CHUNKS})
             OR EXISTS (SELECT 1 FROM t_entries n WHERE n.node_id = p.object_id AND n.child_id = a.object_id
                        AND (n.form & {FLAVOR_STEP - 1}) = {int(EntryForm.CHUNK)})))
"""
_DROP_PROMISED = f"""
    DELETE FROM absent WHERE object_id IN (
        SELECT a.object_id FROM absent a CROSS JOIN led_to d WHERE d.object_id = a.object_id AND ({_IS_CHUNK}))
"""


def drop_promised(connection: Connection, roots: Iterable[bytes]) -> int:
    """Take what is promised out of `ABSENT`; how many objects that was. `_PROMISES` are there, the others empty.

    Args:
        roots: Roots of the states of promised commits.
    """
    change(connection, "INSERT INTO above_absent SELECT object_id, 0 FROM absent WHERE true")
    _spread(connection, _UPWARDS)
    fill_numbers(connection, _ROOTS, roots)
    change(
        connection,
        "INSERT INTO led_to SELECT r.object_id, 0 FROM promised_roots r CROSS JOIN above_absent a "
        "WHERE a.object_id = r.object_id",
    )
    _spread(connection, _DOWNWARDS)
    return change(connection, _DROP_PROMISED)


def _spread(connection: Connection, statement: str) -> None:
    level = 0
    while change(connection, statement, level=level, next=level + 1):
        level += 1


def promised(connection: Connection, digests: Collection[Digest], roots: Collection[bytes]) -> set[Digest]:
    """Those of these objects, which are in no pack, that are promised."""
    if not digests or not roots:
        return set()
    numbers = {number: digest for digest, number, _ in objects_by_id(connection, digests)}
    return {Digest(numbers[number]) for number in promised_numbers(connection, numbers, roots)}


def promised_numbers(connection: Connection, numbers: Iterable[int], roots: Collection[bytes]) -> set[int]:
    """The same for numbers of objects."""
    wanted = set(numbers)
    if not wanted or not roots:
        return set()
    with scratch_tables(connection, *_PROMISES):
        insert_missing(connection, ABSENT, [(number,) for number in sorted(wanted)])
        drop_promised(connection, roots)
        left = {number for (number,) in rows(connection, "SELECT object_id FROM absent")}
    return wanted - left


def some_absent(connection: Connection, limit: int) -> list[bytes]:
    """Up to `limit` ids of `ABSENT`."""
    numbers = [number for (number,) in rows(connection, f"SELECT object_id FROM absent LIMIT {int(limit)}")]
    return sorted(read_digests(connection, numbers).values())
