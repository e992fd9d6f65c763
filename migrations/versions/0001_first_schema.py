"""The first schema: packs, objects, locations, edges, commits, metrics, refs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TABLES = ("refs", "metrics", "more_parents", "commits", "edges", "locations", "objects", "packs", "meta")


def upgrade() -> None:
    """Make all tables in an empty database."""
    _make_names()
    _make_objects()
    _make_history()


def downgrade() -> None:
    """Drop everything: the index is derived, so nothing is lost."""
    for name in TABLES:
        op.drop_table(name)


def _row_number() -> sa.types.TypeEngine[int]:
    return sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _key(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, primary_key=True, autoincrement=False)


def _make_names() -> None:
    op.create_table(
        "meta",
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "packs",
        sa.Column("pack_id", _row_number(), primary_key=True, autoincrement=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("kind", sa.SmallInteger, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("num_entries", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "refs",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("target", sa.LargeBinary, nullable=False),
        sa.Column("generation", sa.BigInteger, nullable=False),
        sa.Column("updated_s", sa.Double, nullable=False),
        sqlite_with_rowid=False,
    )


def _make_objects() -> None:
    op.create_table(
        "objects",
        sa.Column("digest", sa.LargeBinary, primary_key=True),
        sa.Column("object_id", sa.BigInteger, nullable=False),
        sa.Column("kind", sa.SmallInteger, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "locations",
        _key("object_id"),
        _key("pack_id"),
        _key("first_leaf"),
        sa.Column("kind", sa.SmallInteger, nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("num_leaves", sa.BigInteger, nullable=False),
        sa.Column("leaf_bytes", sa.BigInteger, nullable=False),
        sa.Column("offset", sa.BigInteger, nullable=False),
        sa.Column("header_bytes", sa.BigInteger, nullable=False),
        sa.Column("stored_bytes", sa.BigInteger, nullable=False),
        sa.Column("encoding", sa.SmallInteger, nullable=False),
        sa.Column("base", sa.LargeBinary),
        sqlite_with_rowid=False,
    )
    op.create_table("edges", _key("parent_id"), _key("child_id"), sqlite_with_rowid=False)


def _make_history() -> None:
    op.create_table(
        "commits",
        sa.Column("object_id", _row_number(), primary_key=True, autoincrement=False),
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("root", sa.LargeBinary, nullable=False),
        sa.Column("layout", sa.LargeBinary),
        sa.Column("first_parent", sa.LargeBinary),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("author", sa.Text, nullable=False),
        sa.Column("time_us", sa.BigInteger, nullable=False),
        sa.Column("step", sa.BigInteger),
        sa.Column("branch", sa.Text),
        sa.Column("metrics", sa.Text),
        sa.Column("meta", sa.LargeBinary),
        sa.Column("stats", sa.Text),
    )
    op.create_table(
        "more_parents",
        _key("object_id"),
        sa.Column("position", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("parent", sa.LargeBinary, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "metrics",
        _key("object_id"),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("value", sa.Double, nullable=False),
        sqlite_with_rowid=False,
    )
