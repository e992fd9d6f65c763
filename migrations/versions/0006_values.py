"""Short plain values as people read them, for SQL."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from cas_ckpt.index.value_texts import value_text

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

SHORT = """
    SELECT DISTINCT e.data FROM t_entries e JOIN t_specs s ON s.spec_id = e.spec_id
    WHERE e.form = 4 AND e.data IS NOT NULL AND s.num_bytes <= 16
"""


def upgrade() -> None:
    """Make the table, with the values that are in the index as they are encoded."""
    made = op.create_table(
        "t_values",
        sa.Column("data", sa.LargeBinary, primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
        sqlite_with_rowid=False,
    )
    known = [bytes(data) for (data,) in op.get_bind().execute(sa.text(SHORT))]
    rows = [{"data": data, "value": text} for data in known if (text := value_text(data)) is not None]
    if rows:
        op.bulk_insert(made, rows)


def downgrade() -> None:
    """Take it away: the values are in t_entries."""
    op.drop_table("t_values")
