"""Ways upward (who refers to this, what lies in this pack), and what collection and checking remember."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

INDEXES = (
    ("edges_by_child", "edges", "child_id"),
    ("locations_by_pack", "locations", "pack_id"),
    ("objects_by_number", "objects", "object_id"),
)
OLD_COLUMNS = "pack_id, name, kind, size_bytes, num_entries"


def upgrade() -> None:
    """Add the indexes, the time at which a pack was first seen, and three tables."""
    for name, table, column in INDEXES:
        op.create_index(name, table, [column])
    given = sa.text("base IS NOT NULL")
    op.create_index("locations_by_base", "locations", ["base"], sqlite_where=given, postgresql_where=given)
    _remake_packs(sa.Column("first_seen_us", sa.BigInteger, nullable=False), filling=", 0")
    op.create_index("packs_by_name", "packs", ["name"])
    _make_tables()


def downgrade() -> None:
    """Take them away: all of it can be found again. What is on packs goes with the table as it was."""
    for name in ("lineage", "scrubs", "suspects"):
        op.drop_table(name)
    _remake_packs()
    op.drop_index("locations_by_base", "locations")
    for name, table, _ in reversed(INDEXES):
        op.drop_index(name, table)


def _remake_packs(*more: sa.Column[int], filling: str = "") -> None:
    """Make the table anew around its rows: SQLite would keep an added column in another form than a declared one."""
    op.execute(f"CREATE TABLE packs_before AS SELECT {OLD_COLUMNS} FROM packs")
    op.drop_table("packs")
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "packs",
        sa.Column("pack_id", number, primary_key=True, autoincrement=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("kind", sa.SmallInteger, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("num_entries", sa.BigInteger, nullable=False),
        *more,
    )
    op.execute(f"INSERT INTO packs SELECT {OLD_COLUMNS}{filling} FROM packs_before")
    op.drop_table("packs_before")


def _make_tables() -> None:
    op.create_table(
        "suspects",
        sa.Column("object_id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("referred", sa.SmallInteger, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "scrubs",
        sa.Column("pack", sa.Text, primary_key=True),
        sa.Column("checked_us", sa.BigInteger, nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("damage", sa.Text),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "lineage",
        sa.Column("object_id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("position", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("target", sa.LargeBinary, nullable=False),
        sa.Column("note", sa.LargeBinary),
        sqlite_with_rowid=False,
    )
