"""Manifests, layouts, plans by rank and restores; tables of the program are called t_..., for views are for people."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

RENAMED = (
    "meta", "packs", "objects", "locations", "edges", "commits", "more_parents", "metrics", "refs", "lineage",
    "suspects", "scrubs",
)  # fmt: skip
MADE = (
    "t_heads", "t_plans", "t_plan_ranks", "t_plan_shapes", "t_restores", "t_trees", "t_entries", "t_raw_names",
    "t_specs", "t_node_specs", "t_tensors", "t_layouts", "t_layout_meshes", "t_layout_axes", "t_placements",
    "t_divisions", "t_division_axes", "t_division_boxes", "t_layout_aliases", "t_pending",
)  # fmt: skip

_ROW_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_EXACT_TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Rename the tables, and make those of manifests; packs that are known wait for their rows in `t_pending`."""
    op.drop_table("plans")  # in another form: plans can be made again
    for name in RENAMED:
        op.rename_table(name, f"t_{name}")
    _make_manifests()
    _make_layouts()
    _make_plans()
    nodes = "kind IN (2, 4, 5, 6) AND pack_id <> 0"
    op.execute(f"INSERT INTO t_pending SELECT DISTINCT pack_id FROM t_locations WHERE {nodes}")


def downgrade() -> None:
    """Take them away: all of it can be found again."""
    for name in MADE:
        op.drop_table(name)
    for name in RENAMED:
        op.rename_table(f"t_{name}", name)
    op.create_table(
        "plans",
        sa.Column("root", sa.LargeBinary, primary_key=True),
        sa.Column("layout", sa.LargeBinary, primary_key=True),
        sa.Column("target", sa.Text, nullable=False),
        sa.Column("report", sa.LargeBinary, nullable=False),
        sqlite_with_rowid=False,
    )


def _number(name: str, kind: sa.types.TypeEngine[int] | type[sa.types.TypeEngine[int]]) -> sa.Column[int]:
    return sa.Column(name, kind, primary_key=True, autoincrement=False)


def _make_manifests() -> None:
    op.create_table(
        "t_trees",
        _number("node_id", _ROW_NUMBER),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("height", sa.SmallInteger, nullable=False),
        sa.Column("num_entries", sa.Integer, nullable=False),
        sa.Column("attrs", sa.LargeBinary),
    )
    op.create_table(
        "t_entries",
        _number("node_id", sa.BigInteger),
        _number("position", sa.SmallInteger),
        sa.Column("name", _EXACT_TEXT, nullable=False),
        sa.Column("form", sa.SmallInteger, nullable=False),
        sa.Column("spec_id", sa.Integer),
        sa.Column("child_id", sa.BigInteger),
        sa.Column("data", sa.LargeBinary),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "t_raw_names",
        _number("node_id", sa.BigInteger),
        _number("position", sa.SmallInteger),
        sa.Column("name", sa.LargeBinary, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "t_specs",
        sa.Column("spec", _EXACT_TEXT, primary_key=True),
        sa.Column("spec_id", sa.Integer, nullable=False),
        sa.Column("dtype", sa.Text, nullable=False),
        sa.Column("shape", sa.Text, nullable=False),
        sa.Column("num_dims", sa.SmallInteger, nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_index("specs_by_number", "t_specs", ["spec_id"])
    op.create_table(
        "t_node_specs",
        _number("spec_id", sa.Integer),
        _number("node_id", sa.BigInteger),
        sa.Column("num_entries", sa.Integer, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "t_tensors",
        _number("object_id", _ROW_NUMBER),
        sa.Column("spec_id", sa.Integer, nullable=False),
        sa.Column("cell", sa.Text, nullable=False),
        sa.Column("leaf_bytes", sa.BigInteger, nullable=False),
        sa.Column("num_chunks", sa.BigInteger, nullable=False),
    )
    op.create_table("t_pending", _number("pack_id", _ROW_NUMBER))


def _make_layouts() -> None:
    op.create_table(
        "t_layouts",
        _number("object_id", _ROW_NUMBER),
        sa.Column("world_size", sa.BigInteger, nullable=False),
        sa.Column("mesh", sa.Text, nullable=False),
        sa.Column("num_meshes", sa.Integer, nullable=False),
        sa.Column("num_divisions", sa.Integer, nullable=False),
        sa.Column("num_keys", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "t_layout_meshes",
        _number("object_id", sa.BigInteger),
        _number("mesh", sa.Integer),
        sa.Column("num_ranks", sa.BigInteger, nullable=False),
        sa.Column("ranks", sa.Text, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "t_layout_axes",
        _number("object_id", sa.BigInteger),
        _number("mesh", sa.Integer),
        _number("axis", sa.SmallInteger),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "t_placements",
        _number("object_id", sa.BigInteger),
        _number("position", sa.Integer),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("division_id", sa.Integer, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "t_divisions",
        _number("object_id", sa.BigInteger),
        _number("division_id", sa.Integer),
        _number("part", sa.Integer),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("mesh", sa.Integer),
        sa.Column("ranks", sa.Text),
        sa.Column("num_ranks", sa.BigInteger, nullable=False),
        sa.Column("num_replicas", sa.BigInteger),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "t_division_axes",
        _number("object_id", sa.BigInteger),
        _number("division_id", sa.Integer),
        _number("part", sa.Integer),
        _number("axis", sa.SmallInteger),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("size", sa.BigInteger, nullable=False),
        sa.Column("placement", sa.Text, nullable=False),
        sa.Column("dim", sa.SmallInteger),
        sa.Column("stride", sa.BigInteger, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "t_division_boxes",
        _number("object_id", sa.BigInteger),
        _number("division_id", sa.Integer),
        _number("part", sa.Integer),
        _number("position", sa.Integer),
        sa.Column("offsets", sa.Text, nullable=False),
        sa.Column("sizes", sa.Text, nullable=False),
        sa.Column("ranks", sa.Text, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "t_layout_aliases",
        _number("object_id", sa.BigInteger),
        _number("group_id", sa.Integer),
        _number("position", sa.Integer),
        sa.Column("key", sa.Text, nullable=False),
        sqlite_with_rowid=False,
    )


def _make_plans() -> None:
    op.create_table(
        "t_heads",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("remembered", sa.LargeBinary, nullable=False),
        sa.Column("target", sa.LargeBinary, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "t_plans",
        _number("plan_id", _ROW_NUMBER),
        sa.Column("root", sa.LargeBinary, nullable=False),
        sa.Column("target", sa.LargeBinary, nullable=False),
        sa.Column("wants", sa.LargeBinary, nullable=False),
        sa.Column("planner_version", sa.Integer, nullable=False),
        sa.Column("mesh", sa.Text, nullable=False),
        sa.Column("rules", sa.Text, nullable=False),
        sa.Column("world_size", sa.BigInteger, nullable=False),
        sa.Column("num_tensors", sa.BigInteger, nullable=False),
        sa.Column("num_templates", sa.BigInteger, nullable=False),
        sa.Column("num_chunks", sa.BigInteger, nullable=False),
        sa.Column("chunk_bytes", sa.BigInteger, nullable=False),
        sa.Column("wanted_bytes", sa.BigInteger, nullable=False),
        sa.Column("made_us", sa.BigInteger, nullable=False),
    )
    op.create_index("plans_by_root", "t_plans", ["root", "target"], unique=True)
    op.create_table(
        "t_plan_ranks",
        _number("plan_id", sa.BigInteger),
        _number("rank", sa.BigInteger),
        sa.Column("read_bytes", sa.BigInteger, nullable=False),
        sa.Column("num_requests", sa.BigInteger, nullable=False),
        sa.Column("sent_bytes", sa.BigInteger, nullable=False),
        sa.Column("received_bytes", sa.BigInteger, nullable=False),
        sa.Column("metadata_bytes", sa.BigInteger, nullable=False),
        sa.Column("num_straddled", sa.BigInteger, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "t_plan_shapes",
        _number("plan_id", sa.BigInteger),
        _number("position", sa.Integer),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("dtype", sa.Text, nullable=False),
        sa.Column("shape", sa.Text, nullable=False),
        sa.Column("placements", sa.Text, nullable=False),
        sa.Column("num_tensors", sa.BigInteger, nullable=False),
        sa.Column("num_chunks", sa.BigInteger, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "t_restores",
        _number("restore_id", _ROW_NUMBER),
        sa.Column("commit_id", sa.LargeBinary, nullable=False),
        sa.Column("root", sa.LargeBinary, nullable=False),
        sa.Column("verb", sa.Text, nullable=False),
        sa.Column("wants", sa.LargeBinary),
        sa.Column("mesh", sa.Text, nullable=False),
        sa.Column("world_size", sa.BigInteger, nullable=False),
        sa.Column("started_us", sa.BigInteger, nullable=False),
        sa.Column("seconds", sa.Double, nullable=False),
        sa.Column("num_bytes", sa.BigInteger),
        sa.Column("author", sa.Text, nullable=False),
        sa.Column("host", sa.Text, nullable=False),
        sa.Column("complete", sa.SmallInteger, nullable=False),
        sa.Column("error", sa.Text),
    )
    op.create_index("restores_by_root", "t_restores", ["root", "started_us"])
