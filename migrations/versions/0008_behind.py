"""An index that lacks rows of packs it knows is filled anew as a whole; `t_pending` named such packs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Note in `t_meta` that rows are missing, if any pack waits for them."""
    op.execute("INSERT INTO t_meta (key, value) SELECT 'behind', '1' WHERE EXISTS (SELECT 1 FROM t_pending)")
    op.drop_table("t_pending")


def downgrade() -> None:
    """Make the table again; the earlier revisions' upgrades fill it."""
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table("t_pending", sa.Column("pack_id", number, primary_key=True, autoincrement=False))
    op.execute("DELETE FROM t_meta WHERE key = 'behind'")
