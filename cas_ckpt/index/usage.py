"""How many bytes hang on what: under single nodes, and under one group of roots but no other.

Invariant: an object counts once however many ways lead to it. Everything is done inside the
database, so memory does not grow with the repository. Knows nothing of commits or branches: the
caller names the roots of a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    FromClause,
    Integer,
    MetaData,
    Row,
    Select,
    Table,
    case,
    func,
    literal,
    or_,
    select,
)
from sqlalchemy.schema import CreateTable, DropTable

from cas_ckpt.index.rows import Usage
from cas_ckpt.index.schema import EDGES, LOCATIONS, NOWHERE, OBJECTS
from cas_ckpt.index.statements import insert_into, insert_missing, rows_for
from cas_ckpt.objects.kinds import ObjectKind

_SHARED = 0
"""Owner of what two groups or more lead to; groups count from 1."""

_SCRATCH = MetaData()
_STARTS = Table(
    "usage_starts",
    _SCRATCH,
    Column("owner", Integer, primary_key=True, autoincrement=False),
    Column("object_id", BigInteger, primary_key=True, autoincrement=False),
    prefixes=["TEMPORARY"],
    sqlite_with_rowid=False,
)
_OWNED = Table(
    "usage_owned",
    _SCRATCH,
    Column("object_id", BigInteger, primary_key=True, autoincrement=False),
    Column("owner", Integer, nullable=False),
    prefixes=["TEMPORARY"],
    sqlite_with_rowid=False,
)


def under(connection: Connection, digests: Iterable[bytes]) -> dict[bytes, Usage]:
    """Digest -> what it and everything below it hold, each digest for itself.

    Two digests that share a chunk both count it, so sums over digests can exceed `exclusive`.
    """
    wanted = list(dict.fromkeys(digests))
    with _scratch(connection, dict(enumerate(([digest] for digest in wanted), 1))):
        found = _measure(connection, _reached_by_each())
    return {digest: found.get(owner, Usage()) for owner, digest in enumerate(wanted, 1)}


def exclusive(connection: Connection, groups: Mapping[str, Sequence[bytes]]) -> dict[str, Usage]:
    """Group -> what its roots lead to and the roots of no other group do.

    With a single group that is simply all its roots lead to. Each object is visited at most
    twice, however many groups there are: what two of them share is never entered again.
    """
    names = dict(enumerate(sorted(groups), 1))
    with _scratch(connection, {owner: groups[name] for owner, name in names.items()}):
        for owner in names:
            _claim(connection, owner)
        query = select(_OWNED.c.owner, _OWNED.c.object_id).where(_OWNED.c.owner != _SHARED)
        found = _measure(connection, query)
    return {name: found.get(owner, Usage()) for owner, name in names.items()}


@contextmanager
def _scratch(connection: Connection, groups: Mapping[int, Sequence[bytes]]) -> Iterator[None]:
    """Temporary tables with the numbers of the roots of each group, gone after the block.

    After an error the end of the transaction takes them away.
    """
    for table in (_STARTS, _OWNED):
        connection.execute(CreateTable(table))
    query = select(OBJECTS.c.digest, OBJECTS.c.object_id)
    digests = {digest for group in groups.values() for digest in group}
    numbers = {row.digest: row.object_id for row in rows_for(connection, query, OBJECTS.c.digest, digests)}
    rows = {(owner, numbers[digest]) for owner, group in groups.items() for digest in group if digest in numbers}
    insert_missing(connection, _STARTS, sorted(rows))
    yield
    for table in (_STARTS, _OWNED):
        connection.execute(DropTable(table))


def _reached_by_each() -> Select[Any]:
    """(owner, object) for everything that each start leads to."""
    reached = select(_STARTS.c.owner, _STARTS.c.object_id).cte("reached", recursive=True)
    below = select(reached.c.owner, EDGES.c.child_id).join(EDGES, EDGES.c.parent_id == reached.c.object_id)
    whole = reached.union(below)
    return select(whole.c.owner, whole.c.object_id)


def _claim(connection: Connection, owner: int) -> None:
    """Write down that group `owner` leads to these objects, or that several groups do."""
    reached = select(_STARTS.c.object_id).where(_STARTS.c.owner == owner).cte("reached", recursive=True)
    below = (
        select(EDGES.c.child_id)
        .select_from(reached)
        .outerjoin(_OWNED, _OWNED.c.object_id == reached.c.object_id)
        .join(EDGES, EDGES.c.parent_id == reached.c.object_id)
        .where(or_(_OWNED.c.owner.is_(None), _OWNED.c.owner != _SHARED))
    )
    whole = reached.union(below)
    rows = select(whole.c.object_id, literal(owner)).where(whole.c.object_id > 0)  # SQLite needs a WHERE here
    statement = insert_into(connection, _OWNED)
    connection.execute(
        statement.from_select(["object_id", "owner"], rows).on_conflict_do_update(
            index_elements=["object_id"], set_={"owner": _SHARED}
        )
    )


def _measure(connection: Connection, reached: Select[Any]) -> dict[int, Usage]:
    """Owner -> sums over its (owner, object) pairs."""
    each = _sizes(reached.subquery())
    chunk = each.c.kind == ObjectKind.CHUNK
    columns = (_count(chunk), _sum(chunk, each.c.num_bytes), _count(~chunk), _sum(~chunk, each.c.num_bytes))
    query = select(each.c.owner, *columns, func.sum(each.c.stored_bytes)).group_by(each.c.owner)
    return {row[0]: _usage(row) for row in connection.execute(query)}


def _sizes(reached: FromClause) -> FromClause:
    """One row per (owner, object): kind, plain bytes, and stored bytes of all its extents."""
    stored = func.sum(LOCATIONS.c.stored_bytes + LOCATIONS.c.header_bytes).label("stored_bytes")
    return (
        select(
            reached.c.owner,
            func.max(LOCATIONS.c.kind).label("kind"),
            func.max(LOCATIONS.c.num_bytes).label("num_bytes"),
            stored,
        )
        .join(LOCATIONS, LOCATIONS.c.object_id == reached.c.object_id)
        .where(LOCATIONS.c.pack_id != NOWHERE)
        .group_by(reached.c.owner, reached.c.object_id)
        .subquery()
    )


def _count(condition: ColumnElement[bool]) -> ColumnElement[int]:
    return func.sum(case((condition, 1), else_=0))


def _sum(condition: ColumnElement[bool], value: ColumnElement[int]) -> ColumnElement[int]:
    return func.sum(case((condition, value), else_=0))


def _usage(row: Row[Any]) -> Usage:
    return Usage(*map(int, tuple(row)[1:]))
