"""The tables of the index, for SQLite and PostgreSQL alike.

Invariant: the same as what the migrations make (a test compares them). What a small commit costs is
the number of B-trees that it touches and whether it touches them at their end: that is why objects are
clustered by digest, why the first parent is in the commit's own row, and why there is no index
that neither a question about garbage or ancestry nor a commit needs: what a commit costs must not grow
with the number of packs, so these are found by name.

    objects    digest -> number          locations  number -> where it is and how big it is
    edges      number -> numbers         commits    number -> what the log shows

Secondary B-trees are the ways back, without which dropping a pack or asking who refers to a chunk would
read whole tables: edges_by_child, objects_by_number, locations_by_pack, packs_by_name, and
locations_by_base, which is empty until there are deltas. docs/decisions/003-index.md has what they cost,
and why commits are searched for their roots by reading them all.

An object that is referred to before it is seen has kind 0 and one location in pack 0 ("nowhere").
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    text,
)

from cas_ckpt.errors import ConflictError

REVISIONS = ("0001", "0002", "0003")
"""Every schema revision this version knows, oldest first; the last one is what it needs."""

VERSION_TABLE = Table("alembic_version", MetaData(), Column("version_num", Text, primary_key=True))
"""What Alembic keeps: which revision the tables are of."""

NOWHERE = 0
"""Number of the pack that does not exist."""

METADATA = MetaData()

_ROW_NUMBER = BigInteger().with_variant(Integer(), "sqlite")
"""Only INTEGER makes a SQLite primary key the row number itself."""


def _key(name: str, kind: Any) -> Column[Any]:
    """A column of a primary key, whose values this package gives."""
    return Column(name, kind, primary_key=True, autoincrement=False)


META = Table(
    "meta",
    METADATA,
    Column("key", Text, primary_key=True),  # name of the value
    Column("value", Text, nullable=False),  # the value
    sqlite_with_rowid=False,
)
"""What the index knows of itself: one value for each name."""

PACKS = Table(
    "packs",
    METADATA,
    _key("pack_id", _ROW_NUMBER),  # number of the pack in this index
    Column("name", Text, nullable=False),  # key of the pack in the store
    Column("kind", SmallInteger, nullable=False),  # 1 data, 2 meta
    Column("size_bytes", BigInteger, nullable=False),  # length of the file
    Column("num_entries", BigInteger, nullable=False),  # entries in its directory
    Column("first_seen_us", BigInteger, nullable=False),  # when the index took it in; young packs are spared by `gc`
)
"""The packs that the index has taken in."""

OBJECTS = Table(
    "objects",
    METADATA,
    Column("digest", LargeBinary, primary_key=True),  # id of the object, 32 bytes
    Column("object_id", BigInteger, nullable=False),  # its number in this index
    Column("kind", SmallInteger, nullable=False),  # chunk, tensor, tree, ... (`ObjectKind`), by number; 0: not seen yet
    sqlite_with_rowid=False,
)
"""Every chunk and node: its id, and the number by which other tables name it."""

LOCATIONS = Table(
    "locations",
    METADATA,
    _key("object_id", BigInteger),  # the object
    _key("pack_id", BigInteger),  # the pack; 0: nowhere, of an object that was referred to before it was seen
    _key("first_leaf", BigInteger),  # first leaf of the chunk in this extent; 0 for nodes
    Column("kind", SmallInteger, nullable=False),  # as in `objects`, so that garbage collection need not look there
    Column("num_bytes", BigInteger, nullable=False),  # plain length of the whole object
    Column("num_leaves", BigInteger, nullable=False),  # leaves in this extent; 0 for nodes
    Column("leaf_bytes", BigInteger, nullable=False),  # length of a leaf; 0 for nodes
    Column("offset", BigInteger, nullable=False),  # where the entry's header begins in the pack
    Column("header_bytes", BigInteger, nullable=False),  # length of the entry's header; the payload follows it
    Column("stored_bytes", BigInteger, nullable=False),  # length of the payload
    Column("encoding", SmallInteger, nullable=False),  # RAW, ZERO, CONSTANT, ZSTD or PLANES_ZSTD, by number
    Column("base", LargeBinary),  # id of the object that a delta is against; nothing writes deltas yet
    sqlite_with_rowid=False,
)
"""Where the bytes of an object are: one row for each extent in each pack."""

EDGES = Table(
    "edges",
    METADATA,
    _key("parent_id", BigInteger),  # the object that refers
    _key("child_id", BigInteger),  # the object that is referred to
    sqlite_with_rowid=False,
)
"""Which node refers to which object: trees to tensors, tensors to chunks. What a commit refers to is in its own row."""

COMMITS = Table(
    "commits",
    METADATA,
    _key("object_id", _ROW_NUMBER),  # the commit
    Column("digest", LargeBinary, nullable=False),  # its id
    Column("root", LargeBinary, nullable=False),  # id of its tree: the id of the state
    Column("layout", LargeBinary),  # id of its layout node
    Column("first_parent", LargeBinary),  # id of its first parent; null for the first commit of a history
    Column("message", Text, nullable=False),  # its message
    Column("author", Text, nullable=False),  # who made it
    Column("time_us", BigInteger, nullable=False),  # when, in microseconds since 1970
    Column("step", BigInteger),  # step of the training
    Column("branch", Text),  # the branch that it went to, where this index saw that
    Column("metrics", Text),  # its metrics as JSON, in the order in which they were given
    Column("meta", LargeBinary),  # the value given as `meta=`, encoded
    Column("stats", Text),  # what the commit cost, as JSON
)
"""What the log shows of a commit."""

MORE_PARENTS = Table(
    "more_parents",
    METADATA,
    _key("object_id", BigInteger),  # the commit
    _key("position", Integer),  # 1 for the second parent, and so on
    Column("parent", LargeBinary, nullable=False),  # id of the parent
    sqlite_with_rowid=False,
)
"""Parents after the first: only merges have rows here."""

METRICS = Table(
    "metrics",
    METADATA,
    _key("object_id", BigInteger),  # the commit
    Column("name", Text, primary_key=True),  # name of the metric
    Column("value", Double, nullable=False),  # its value
    sqlite_with_rowid=False,
)
"""Metrics of commits, for searches."""

REFS = Table(
    "refs",
    METADATA,
    Column("name", Text, primary_key=True),  # e.g. `refs/heads/main`
    Column("target", LargeBinary, nullable=False),  # id of the commit
    Column("generation", BigInteger, nullable=False),  # generation of garbage collection that the ref was written in
    Column("updated_s", Double, nullable=False),  # when it was seen, in seconds since 1970
    sqlite_with_rowid=False,
)
"""Branches, tags and pins as they were last seen; the store is what counts."""

PLANS = Table(
    "plans",
    METADATA,
    Column("root", LargeBinary, primary_key=True),  # the state
    Column("layout", LargeBinary, primary_key=True),  # the layout of the commit
    Column("target", Text, nullable=False),  # the mesh that the plan is for
    Column("report", LargeBinary, nullable=False),  # the plan, encoded
    sqlite_with_rowid=False,
)
"""Written when somebody asks for a plan, never by a commit."""

LINEAGE = Table(
    "lineage",
    METADATA,
    _key("object_id", BigInteger),  # the commit
    _key("position", Integer),  # place in the list that was given
    Column("kind", Text, nullable=False),  # `fine-tune-of`, `merged-from`, ...
    Column("target", LargeBinary, nullable=False),  # id of a commit, of this repository or another one
    Column("note", LargeBinary),  # the value given as `meta` of the edge, encoded
    sqlite_with_rowid=False,
)
"""What a commit's state was made from, apart from its parents."""

GC_CANDIDATES = Table(
    "suspects",
    METADATA,
    _key("object_id", BigInteger),  # the object
    Column("referred", SmallInteger, nullable=False),  # 1: something referred to it, in a pack that was dropped
    sqlite_with_rowid=False,
)
"""Objects to look at when garbage is sought: nothing refers to them, they are complete in several packs, or
in none. Never a verdict. `referred`: something did refer to it, in a pack that was dropped."""

SCRUBS = Table(
    "scrubs",
    METADATA,
    Column("pack", Text, primary_key=True),  # key of the pack
    Column("checked_us", BigInteger, nullable=False),  # when, in microseconds since 1970
    Column("num_bytes", BigInteger, nullable=False),  # bytes that were read
    Column("damage", Text),  # what was wrong; null: nothing
    sqlite_with_rowid=False,
)
"""When the bytes of a pack were last read and found intact, or what was wrong with them."""

REMEMBERED = (META, REFS, PLANS, SCRUBS)
"""Tables with what packs do not hold: a rebuild keeps their rows. All others are derived, and are replaced."""

Index("edges_by_child", EDGES.c.child_id)
Index("locations_by_pack", LOCATIONS.c.pack_id)
Index("objects_by_number", OBJECTS.c.object_id)
Index("packs_by_name", PACKS.c.name)
Index("locations_by_base", LOCATIONS.c.base, sqlite_where=text("base IS NOT NULL"))
"""In PostgreSQL it is a partial index too, made by the migration: naming that dialect here would import it."""


def refuse_foreign(names: set[str], place: str) -> None:
    """Raise ConflictError if there are tables, and none that says that this is an index."""
    ours = {table.name for table in METADATA.sorted_tables}
    others = names - {VERSION_TABLE.name}
    if others and (VERSION_TABLE.name not in names or not names & ours):
        raise ConflictError(
            f"index {place}: tables are there that cas_ckpt did not make, such as {min(others)!r}; they stay as they "
            "are: name another place for the index, or move them"
        )
