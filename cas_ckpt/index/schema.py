"""The tables of the index, for SQLite and PostgreSQL alike.

Invariant: the same as what the migrations make (a test compares them). What a small commit costs is
the number of B-trees that it touches and whether it touches them at their end: that is why objects are
clustered by digest, why the first parent stands in the commit's own row, and why there is no index
that neither a question about garbage or ancestry nor a commit needs: what a commit costs must not grow
with the number of packs, so these are found by name.

    objects    digest -> number          locations  number -> where it lies and how big it is
    edges      number -> numbers         commits    number -> what the log shows

Secondary B-trees are the ways back, without which dropping a pack or asking who refers to a chunk would
read whole tables: edges_by_child, objects_by_number, locations_by_pack, packs_by_name, and
locations_by_base, which is empty until there are deltas. docs/decisions/003-index.md has what they cost,
and why commits are searched for their roots by reading them all.

An object that is referred to before it is seen has kind 0 and one location in pack 0 ("nowhere").
"""

from __future__ import annotations

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

META = Table(
    "meta",
    METADATA,
    Column("key", Text, primary_key=True),
    Column("value", Text, nullable=False),
    sqlite_with_rowid=False,
)

PACKS = Table(
    "packs",
    METADATA,
    Column("pack_id", _ROW_NUMBER, primary_key=True, autoincrement=False),
    Column("name", Text, nullable=False),
    Column("kind", SmallInteger, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("num_entries", BigInteger, nullable=False),
    Column("first_seen_us", BigInteger, nullable=False),
)

OBJECTS = Table(
    "objects",
    METADATA,
    Column("digest", LargeBinary, primary_key=True),
    Column("object_id", BigInteger, nullable=False),
    Column("kind", SmallInteger, nullable=False),
    sqlite_with_rowid=False,
)

LOCATIONS = Table(
    "locations",
    METADATA,
    Column("object_id", BigInteger, primary_key=True, autoincrement=False),
    Column("pack_id", BigInteger, primary_key=True, autoincrement=False),
    Column("first_leaf", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", SmallInteger, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("num_leaves", BigInteger, nullable=False),
    Column("leaf_bytes", BigInteger, nullable=False),
    Column("offset", BigInteger, nullable=False),
    Column("header_bytes", BigInteger, nullable=False),
    Column("stored_bytes", BigInteger, nullable=False),
    Column("encoding", SmallInteger, nullable=False),
    Column("base", LargeBinary),
    sqlite_with_rowid=False,
)

EDGES = Table(
    "edges",
    METADATA,
    Column("parent_id", BigInteger, primary_key=True, autoincrement=False),
    Column("child_id", BigInteger, primary_key=True, autoincrement=False),
    sqlite_with_rowid=False,
)

COMMITS = Table(
    "commits",
    METADATA,
    Column("object_id", _ROW_NUMBER, primary_key=True, autoincrement=False),
    Column("digest", LargeBinary, nullable=False),
    Column("root", LargeBinary, nullable=False),
    Column("layout", LargeBinary),
    Column("first_parent", LargeBinary),
    Column("message", Text, nullable=False),
    Column("author", Text, nullable=False),
    Column("time_us", BigInteger, nullable=False),
    Column("step", BigInteger),
    Column("branch", Text),
    Column("metrics", Text),
    Column("meta", LargeBinary),
    Column("stats", Text),
)

MORE_PARENTS = Table(
    "more_parents",
    METADATA,
    Column("object_id", BigInteger, primary_key=True, autoincrement=False),
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("parent", LargeBinary, nullable=False),
    sqlite_with_rowid=False,
)
"""Parents after the first: only merges have rows here."""

METRICS = Table(
    "metrics",
    METADATA,
    Column("object_id", BigInteger, primary_key=True, autoincrement=False),
    Column("name", Text, primary_key=True),
    Column("value", Double, nullable=False),
    sqlite_with_rowid=False,
)

REFS = Table(
    "refs",
    METADATA,
    Column("name", Text, primary_key=True),
    Column("target", LargeBinary, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("updated_s", Double, nullable=False),
    sqlite_with_rowid=False,
)

PLANS = Table(
    "plans",
    METADATA,
    Column("root", LargeBinary, primary_key=True),
    Column("layout", LargeBinary, primary_key=True),
    Column("target", Text, nullable=False),
    Column("report", LargeBinary, nullable=False),
    sqlite_with_rowid=False,
)
"""Written when somebody asks for a plan, never by a commit."""

LINEAGE = Table(
    "lineage",
    METADATA,
    Column("object_id", BigInteger, primary_key=True, autoincrement=False),
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("kind", Text, nullable=False),
    Column("target", LargeBinary, nullable=False),
    Column("note", LargeBinary),
    sqlite_with_rowid=False,
)
"""What a commit's state was made from, apart from its parents."""

GC_CANDIDATES = Table(
    "suspects",
    METADATA,
    Column("object_id", BigInteger, primary_key=True, autoincrement=False),
    Column("referred", SmallInteger, nullable=False),
    sqlite_with_rowid=False,
)
"""Objects to look at when garbage is sought: nothing refers to them, they lie whole in several packs, or
not whole in any. Never a verdict. `referred`: something did refer to it, in a pack that was dropped."""

SCRUBS = Table(
    "scrubs",
    METADATA,
    Column("pack", Text, primary_key=True),
    Column("checked_us", BigInteger, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("damage", Text),
    sqlite_with_rowid=False,
)
"""When the bytes of a pack were last read and found whole, or what was wrong with them."""

REMEMBERED = (META, REFS, PLANS, SCRUBS)
"""Tables with what packs do not tell: a rebuild keeps their rows. All others are derived, and are replaced."""

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
