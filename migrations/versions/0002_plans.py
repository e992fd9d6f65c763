"""Restore plans, kept by (root, target layout)."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the table of plans."""
    op.create_table(
        "plans",
        sa.Column("root", sa.LargeBinary, primary_key=True),
        sa.Column("layout", sa.LargeBinary, primary_key=True),
        sa.Column("target", sa.Text, nullable=False),
        sa.Column("report", sa.LargeBinary, nullable=False),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    """Drop it: plans can be made again."""
    op.drop_table("plans")
