"""A metric may be NaN, which is null in the index: SQLite has no other form for it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Let the value of a metric be null."""
    _let_be_null(True)


def downgrade() -> None:
    """Leave the metrics that are NaN out: the commit's own row has them all."""
    op.execute("DELETE FROM t_metrics WHERE value IS NULL")
    _let_be_null(False)


def _let_be_null(nullable: bool) -> None:
    if op.get_bind().dialect.name != "sqlite":
        op.alter_column("t_metrics", "value", nullable=nullable)
        return
    # SQLite cannot change a column: the table is made anew around its rows.
    op.execute("CREATE TABLE metrics_before AS SELECT object_id, name, value FROM t_metrics")
    op.drop_table("t_metrics")
    op.create_table(
        "t_metrics",
        sa.Column("object_id", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("value", sa.Double, nullable=nullable),
        sqlite_with_rowid=False,
    )
    op.execute("INSERT INTO t_metrics SELECT object_id, name, value FROM metrics_before")
    op.drop_table("metrics_before")
