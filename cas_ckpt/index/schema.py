"""The tables of the index, for SQLite and PostgreSQL alike.

Invariant: the same as what the migrations make (a test compares them). A commit of an unchanged
state touches five B-trees and no more, four of them at their end: that is why objects are clustered
by digest, why the first parent stands in the commit's own row, and why there is no secondary index.
Packs are looked up by name by reading them all, which takes a millisecond for 10,000.

    objects    digest -> number          locations  number -> where it lies and how big it is
    edges      number -> numbers         commits    number -> what the log shows

An object that is referred to before it is seen has kind 0 and one location in pack 0 ("nowhere").
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
)

REVISIONS = ("0001", "0002")
"""Every schema revision this version knows, oldest first; the last one is what it needs."""

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
