"""For SQL: longer plain values, what commits say besides, logs of refs, and forgotten commits."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

MADE = ("t_commit_texts", "t_ref_records", "t_ref_moves", "t_forgotten")


def upgrade() -> None:
    """Make the tables. Packs with trees or commits wait in `t_pending`: they are read for their texts."""
    op.drop_table("t_values")
    op.create_table(
        "t_values",
        sa.Column("data", sa.LargeBinary, primary_key=True),
        sa.Column("num_bytes", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("value", sa.Text, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "t_commit_texts",
        sa.Column("object_id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("meta", sa.Text),
        sa.Column("provenance", sa.Text),
        sa.Column("signed_by", sa.Text),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "t_ref_records",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("record", sa.LargeBinary, nullable=False),
        sa.Column("target", sa.LargeBinary, nullable=False),
        sa.Column("note", sa.Text, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "t_ref_moves",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("position", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("time_us", sa.BigInteger, nullable=False),
        sa.Column("old", sa.LargeBinary),
        sa.Column("new", sa.LargeBinary),
        sa.Column("action", sa.Text, nullable=False),
        sa.Column("author", sa.Text, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table("t_forgotten", sa.Column("digest", sa.LargeBinary, primary_key=True), sqlite_with_rowid=False)
    op.execute(
        "INSERT INTO t_pending SELECT DISTINCT pack_id FROM t_locations "
        "WHERE kind IN (4, 5, 7) AND pack_id <> 0 AND pack_id NOT IN (SELECT pack_id FROM t_pending)"
    )


def downgrade() -> None:
    """Take them away, and the texts of longer values: all of it can be found again."""
    for name in MADE:
        op.drop_table(name)
    op.execute("CREATE TABLE values_before AS SELECT data, value FROM t_values WHERE num_bytes <= 16")
    op.drop_table("t_values")
    op.create_table(
        "t_values",
        sa.Column("data", sa.LargeBinary, primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
        sqlite_with_rowid=False,
    )
    op.execute("INSERT INTO t_values SELECT data, value FROM values_before")
    op.drop_table("values_before")
