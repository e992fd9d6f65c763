"""Short plain values as people read them, for SQL."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the table: the next revision makes it in another form, and has it filled."""
    op.create_table(
        "t_values",
        sa.Column("data", sa.LargeBinary, primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    """Take it away: the values are in t_entries."""
    op.drop_table("t_values")
