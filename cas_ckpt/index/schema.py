"""The tables of the index, for SQLite and PostgreSQL alike.

Invariant: the same as what the migrations make (a test compares them). What a small commit costs is
the number of B-trees that it touches and whether it touches them at their end: that is why objects are
clustered by digest, why the first parent is in the commit's own row, and why there is no index
that neither a question about garbage or ancestry nor a commit needs: what a commit costs must not grow
with the number of packs, so these are found by name.

    objects    digest -> number          locations  number -> where it is and how big it is
    edges      number -> numbers         commits    number -> what the log shows

Secondary B-trees are the ways back, without which dropping a pack or asking who refers to a chunk would
read whole tables: edges_by_child, objects_by_number, locations_by_pack, packs_by_name, and
locations_by_base, which is empty until there are deltas. docs/decisions/003-index.md has what they cost,
and why commits are searched for their roots by reading them all.

An object that is referred to before it is seen has kind 0 and one location in pack 0 ("nowhere").
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    text,
)

from cas_ckpt.errors import ConflictError

VIEWS_VERSION = 6
"""Of the views that this version makes (views.py). An index with earlier ones gets these when it is opened."""

VERSION_TABLE = Table("alembic_version", MetaData(), Column("version_num", Text, primary_key=True))
"""Alembic's own: which revision the tables are of."""

NOWHERE = 0
"""Number of the pack that does not exist."""

METADATA = MetaData()

_EXACT_TEXT = Text().with_variant(Text(collation="C"), "postgresql")
"""Text that is compared byte by byte, as SQLite does."""

_ROW_NUMBER = BigInteger().with_variant(Integer(), "sqlite")
"""Only INTEGER makes a SQLite primary key the row number itself."""


def _key(name: str, kind: Any) -> Column[Any]:
    """A column of a primary key, whose values this package gives."""
    return Column(name, kind, primary_key=True, autoincrement=False)


def _table(name: str, *columns: Column[Any]) -> Table:
    """A table of the index. SQLite clusters it by its key, but for those whose key is the row number."""
    return Table(name, METADATA, *columns, sqlite_with_rowid=columns[0].type is _ROW_NUMBER)


META = _table(
    "t_meta",
    Column("key", Text, primary_key=True),  # name of the value
    Column("value", Text, nullable=False),  # the value
)
"""What the index knows of itself: one value for each name."""

PACKS = _table(
    "t_packs",
    _key("pack_id", _ROW_NUMBER),  # number of the pack in this index
    Column("name", Text, nullable=False),  # key of the pack in the store
    Column("kind", SmallInteger, nullable=False),  # 1 data, 2 meta
    Column("size_bytes", BigInteger, nullable=False),  # length of the file
    Column("num_entries", BigInteger, nullable=False),  # entries in its directory
    Column("first_seen_us", BigInteger, nullable=False),  # when the index took it in; young packs are spared by `gc`
)
"""The packs that the index has taken in."""

OBJECTS = _table(
    "t_objects",
    Column("digest", LargeBinary, primary_key=True),  # id of the object, 32 bytes
    Column("object_id", BigInteger, nullable=False),  # its number in this index
    Column("kind", SmallInteger, nullable=False),  # chunk, tensor, tree, ... (`ObjectKind`), by number; 0: not seen yet
)
"""Every chunk and node: its id, and the number by which other tables name it."""

LOCATIONS = _table(
    "t_locations",
    _key("object_id", BigInteger),  # the object
    _key("pack_id", BigInteger),  # the pack; 0: nowhere, of an object that was referred to before it was seen
    _key("first_leaf", BigInteger),  # first leaf of the chunk in this extent; 0 for nodes
    Column("kind", SmallInteger, nullable=False),  # as in `objects`, so that garbage collection need not look there
    Column("num_bytes", BigInteger, nullable=False),  # plain length of the whole object
    Column("num_leaves", BigInteger, nullable=False),  # leaves in this extent; 0 for nodes
    Column("leaf_bytes", BigInteger, nullable=False),  # length of a leaf; 0 for nodes
    Column("offset", BigInteger, nullable=False),  # where the entry's header begins in the pack
    Column("header_bytes", BigInteger, nullable=False),  # length of the entry's header; the payload follows it
    Column("stored_bytes", BigInteger, nullable=False),  # length of the payload
    Column("encoding", SmallInteger, nullable=False),  # RAW, ZERO, CONSTANT, ZSTD or PLANES_ZSTD, by number
    Column("base", LargeBinary),  # id of the object that a delta is against; nothing writes deltas yet
)
"""Where the bytes of an object are: one row for each extent in each pack."""

EDGES = _table(
    "t_edges",
    _key("parent_id", BigInteger),  # the object that refers
    _key("child_id", BigInteger),  # the object that is referred to
)
"""Which node refers to which object: trees to tensors, tensors to chunks. What a commit refers to is in its own row."""

COMMITS = _table(
    "t_commits",
    _key("object_id", _ROW_NUMBER),  # the commit
    Column("digest", LargeBinary, nullable=False),  # its id
    Column("root", LargeBinary, nullable=False),  # id of its tree: the id of the state
    Column("layout", LargeBinary),  # id of its layout node
    Column("first_parent", LargeBinary),  # id of its first parent; null for the first commit of a history
    Column("message", Text, nullable=False),  # its message
    Column("author", Text, nullable=False),  # who made it
    Column("time_us", BigInteger, nullable=False),  # when, in microseconds since 1970
    Column("step", BigInteger),  # step of the training
    Column("branch", Text),  # the branch that it went to, where this index saw that
    Column("metrics", Text),  # its metrics as JSON, in the order in which they were given; not finite: as text
    Column("meta", LargeBinary),  # the value given as `meta=`, encoded
    Column("stats", Text),  # what the commit cost, as JSON
)
"""What the log shows of a commit."""

MORE_PARENTS = _table(
    "t_more_parents",
    _key("object_id", BigInteger),  # the commit
    _key("position", Integer),  # 1 for the second parent, and so on
    Column("parent", LargeBinary, nullable=False),  # id of the parent
)
"""Parents after the first: only merges have rows here."""

METRICS = _table(
    "t_metrics",
    _key("object_id", BigInteger),  # the commit
    Column("name", Text, primary_key=True),  # name of the metric
    Column("value", Double),  # its value; null: it is NaN, for which SQLite has no form
)
"""Metrics of commits, for searches."""

REFS = _table(
    "t_refs",
    Column("name", Text, primary_key=True),  # e.g. `refs/heads/main`
    Column("target", LargeBinary, nullable=False),  # id of the commit
    Column("generation", BigInteger, nullable=False),  # generation of garbage collection that the ref was written in
    Column("updated_s", Double, nullable=False),  # when it was seen, in seconds since 1970
)
"""Branches, tags and pins as they were last seen; the store is what counts."""

HEADS = _table(
    "t_heads",
    Column("name", Text, primary_key=True),  # as in `t_refs`
    Column("remembered", LargeBinary, nullable=False),  # where it points by `t_refs`; another one: this row is past
    Column("target", LargeBinary, nullable=False),  # where it points; empty: it was deleted
)
"""Where refs point that others moved, for who asks in SQL: `t_refs` goes on remembering what was seen through here."""

REF_RECORDS = _table(
    "t_ref_records",
    Column("name", Text, primary_key=True),  # as in `t_refs`
    Column("record", LargeBinary, nullable=False),  # hash of the record that these rows are of
    Column("target", LargeBinary, nullable=False),  # where it points by that record; empty: it was deleted
    Column("note", Text, nullable=False),  # message of an annotated tag, reason of a pin; else empty
)
"""What records of refs say besides, as they were last read for who asks in SQL; deleted refs too."""

REF_MOVES = _table(
    "t_ref_moves",
    Column("name", Text, primary_key=True),  # as in `t_refs`
    _key("position", Integer),  # place in the log of the record, from 0; from 1: earlier ones were dropped
    Column("time_us", BigInteger, nullable=False),  # when, in microseconds since 1970
    Column("old", LargeBinary),  # where it pointed before; null: nowhere
    Column("new", LargeBinary),  # where it points since; null: it was deleted
    Column("action", Text, nullable=False),  # what was done
    Column("author", Text, nullable=False),  # by whom
)
"""The logs in records of refs: moves that parents of commits do not show."""

FORGOTTEN = _table(
    "t_forgotten",
    Column("digest", LargeBinary, primary_key=True),  # id of the commit
)
"""Commits that are forgotten and that no ref names, as of when somebody last asked in SQL."""

PLANS = _table(
    "t_plans",
    _key("plan_id", _ROW_NUMBER),  # number of the plan in this index
    Column("root", LargeBinary, nullable=False),  # the state
    Column("target", LargeBinary, nullable=False),  # names mesh and rules; equal to `wants`: a checkout kept the plan
    Column("wants", LargeBinary, nullable=False),  # names which rank wants what of which tensor, however that was said
    Column("planner_version", Integer, nullable=False),  # version of the planner
    Column("mesh", Text, nullable=False),  # the target's mesh, e.g. dp=96,tp=8; "": several, or none
    Column("rules", Text, nullable=False),  # its rules as JSON: pattern -> placements
    Column("world_size", BigInteger, nullable=False),  # ranks
    Column("num_tensors", BigInteger, nullable=False),  # tensors that are stored in chunks
    Column("num_templates", BigInteger, nullable=False),  # different plans among them
    Column("num_chunks", BigInteger, nullable=False),  # chunks that any rank wants, each once
    Column("chunk_bytes", BigInteger, nullable=False),  # their plain bytes
    Column("wanted_bytes", BigInteger, nullable=False),  # plain bytes that all ranks want; replicas count each
    Column("made_us", BigInteger, nullable=False),  # when, in microseconds since 1970
)
"""Restore plans in numbers: one for each state and target layout. None is written by a commit."""

PLAN_RANKS = _table(
    "t_plan_ranks",
    _key("plan_id", BigInteger),  # the plan
    _key("rank", BigInteger),  # the rank
    Column("read_bytes", BigInteger, nullable=False),  # plain bytes that it reads from the store
    Column("num_requests", BigInteger, nullable=False),  # chunks that it reads
    Column("sent_bytes", BigInteger, nullable=False),  # what it sends to other ranks
    Column("received_bytes", BigInteger, nullable=False),  # what it gets from them
    Column("metadata_bytes", BigInteger, nullable=False),  # what it has to know of the plan
    Column("num_straddled", BigInteger, nullable=False),  # chunks of which it wants a part only
)
"""What each rank does in a plan."""

PLAN_SHAPES = _table(
    "t_plan_shapes",
    _key("plan_id", BigInteger),  # the plan
    _key("position", Integer),  # place in the plan
    Column("key", Text, nullable=False),  # of the first tensor
    Column("dtype", Text, nullable=False),  # of each of them
    Column("shape", Text, nullable=False),  # of each of them, as JSON
    Column("placements", Text, nullable=False),  # one for each dimension of the mesh, as JSON
    Column("num_tensors", BigInteger, nullable=False),  # how many there are
    Column("num_chunks", BigInteger, nullable=False),  # chunks of one of them that any rank wants
)
"""Tensors that are planned alike."""

RESTORES = _table(
    "t_restores",
    _key("restore_id", _ROW_NUMBER),  # number of the restore in this index; the later, the higher
    Column("commit_id", LargeBinary, nullable=False),  # the commit
    Column("root", LargeBinary, nullable=False),  # its state
    Column("verb", Text, nullable=False),  # checkout or load
    Column("wants", LargeBinary),  # as in `t_plans`: plans for this state with the same are plans of this restore
    Column("mesh", Text, nullable=False),  # the targets' mesh; "": several, or none
    Column("world_size", BigInteger, nullable=False),  # ranks
    Column("started_us", BigInteger, nullable=False),  # when it began, in microseconds since 1970
    Column("seconds", Double, nullable=False),  # how long it took
    Column("num_bytes", BigInteger),  # plain bytes that were read and verified, by all ranks; null: it failed
    Column("author", Text, nullable=False),  # by whom
    Column("host", Text, nullable=False),  # on which machine (rank 0)
    Column("complete", SmallInteger, nullable=False),  # 1: all of the state was wanted; 0: some keys
    Column("error", Text),  # what went wrong, in one line; null: all was verified and is in place
)
"""Restores that were made, and how they ended."""

LINEAGE = _table(
    "t_lineage",
    _key("object_id", BigInteger),  # the commit
    _key("position", Integer),  # place in the list that was given
    Column("kind", Text, nullable=False),  # `fine-tune-of`, `merged-from`, ...
    Column("target", LargeBinary, nullable=False),  # id of a commit, of this repository or another one
    Column("note", LargeBinary),  # the value given as `meta` of the edge, encoded
)
"""What a commit's state was made from, apart from its parents."""

COMMIT_TEXTS = _table(
    "t_commit_texts",
    _key("object_id", BigInteger),  # the commit
    Column("meta", Text),  # `t_commits.meta` as JSON; null: there is none, or it is too long
    Column("provenance", Text),  # where and by what it was made, as JSON; null: as above
    Column("signed_by", Text),  # fingerprint of the key that its signature names, not verified; null: not signed
)
"""What commits say that only people read: a row for those that say any of it."""

GC_CANDIDATES = _table(
    "t_suspects",
    _key("object_id", BigInteger),  # the object
    Column("referred", SmallInteger, nullable=False),  # 1: something referred to it, in a pack that was dropped
)
"""Objects to look at when garbage is sought: nothing refers to them, they are complete in several packs, or
in none. Never a verdict. `referred`: something did refer to it, in a pack that was dropped."""

SCRUBS = _table(
    "t_scrubs",
    Column("pack", Text, primary_key=True),  # key of the pack
    Column("checked_us", BigInteger, nullable=False),  # when, in microseconds since 1970
    Column("num_bytes", BigInteger, nullable=False),  # bytes that were read
    Column("damage", Text),  # what was wrong; null: nothing
)
"""When the bytes of a pack were last read and found intact, or what was wrong with them."""

TREES = _table(
    "t_trees",
    _key("node_id", _ROW_NUMBER),  # the tree node, or the page of one
    Column("kind", Text, nullable=False),  # kind of the container: dict, list, ...; "" for a page
    Column("height", SmallInteger, nullable=False),  # levels of pages below it
    Column("num_entries", Integer, nullable=False),  # its own entries
    Column("attrs", LargeBinary),  # what the kind needs besides: as encoded for composite tensors, else its hash
)
"""One row for each distinct tree node or page: what it is."""

ENTRIES = _table(
    "t_entries",
    _key("node_id", BigInteger),  # the tree node or page
    _key("position", SmallInteger),  # place in it; entries ascend by name
    Column("name", _EXACT_TEXT, nullable=False),  # component of the key, as keys are written; of a page its first one
    Column("form", SmallInteger, nullable=False),  # see below
    Column("spec_id", Integer),  # dtype and shape of a tensor, length of a value
    Column("child_id", BigInteger),  # the node or chunk that it names
    Column("data", LargeBinary),  # of inline tensors and values: the bytes if there are at most 16, else a hash
)
"""What tree nodes and pages list: one set of rows for each distinct node, however many states have it.

`form` is 0 for a container, 1 for a tensor that has a node, 2 for a tensor of one chunk, 3 for an inline tensor, 4 for
a value, 5 for a page; of tensors it is 8 more for a numpy array, and 16 more for a long plain value."""

RAW_NAMES = _table(
    "t_raw_names",
    _key("node_id", BigInteger),  # the tree node or page
    _key("position", SmallInteger),  # place in it
    Column("name", LargeBinary, nullable=False),  # the exact name in UTF-8, lone surrogates included
)
"""Names that no database can hold as text (NUL, lone surrogates); in `t_entries` these have U+FFFD in their place."""

SPECS = _table(
    "t_specs",
    Column("spec", _EXACT_TEXT, primary_key=True),  # dtype[shape], for a value [length]; a hash where that is long
    Column("spec_id", Integer, nullable=False),  # its number in this index
    Column("dtype", Text, nullable=False),  # name of the dtype; "" for plain values
    Column("shape", Text, nullable=False),  # sizes of the dimensions, as JSON; of a plain value its length in bytes
    Column("num_dims", SmallInteger, nullable=False),  # how many there are
    Column("num_bytes", BigInteger, nullable=False),  # plain bytes of such a tensor
)
"""The distinct dtypes and shapes of tensors, and lengths of plain values."""

NODE_SPECS = _table(
    "t_node_specs",
    _key("spec_id", Integer),  # the dtype and shape
    _key("node_id", BigInteger),  # a tree node or page with such tensors among its own entries
    Column("num_entries", Integer, nullable=False),  # how many of them
)
"""Which nodes list tensors of a dtype and shape: the way from there to commits."""

TENSORS = _table(
    "t_tensors",
    _key("object_id", _ROW_NUMBER),  # the tensor node
    Column("spec_id", Integer, nullable=False),  # its dtype and shape
    Column("cell", Text, nullable=False),  # sizes of a full cell of the grid, as JSON
    Column("leaf_bytes", BigInteger, nullable=False),  # length of a full leaf
    Column("num_chunks", BigInteger, nullable=False),  # cells of the grid
)
"""What tensor nodes say: how a tensor of several chunks is cut."""

LAYOUTS = _table(
    "t_layouts",
    _key("object_id", _ROW_NUMBER),  # the layout node
    Column("world_size", BigInteger, nullable=False),  # ranks that held the state
    Column("mesh", Text, nullable=False),  # the mesh of most tensors, e.g. dp=4,tp=2; "" for none
    Column("num_meshes", Integer, nullable=False),  # meshes, this one among them
    Column("num_divisions", Integer, nullable=False),  # different divisions, by which tensors were held
    Column("num_keys", BigInteger, nullable=False),  # keys that not every rank has whole
)
"""Who held the state: one row for each distinct layout, however many commits have it."""

LAYOUT_MESHES = _table(
    "t_layout_meshes",
    _key("object_id", BigInteger),  # the layout
    _key("mesh", Integer),  # number of the mesh; 0: that of most tensors
    Column("num_ranks", BigInteger, nullable=False),  # ranks of the mesh
    Column("ranks", Text, nullable=False),  # these, the last dimension fastest: 0-7,16-64:8; "": the node does not say
)
"""The meshes of a layout."""

LAYOUT_AXES = _table(
    "t_layout_axes",
    _key("object_id", BigInteger),  # the layout
    _key("mesh", Integer),  # number of the mesh
    _key("axis", SmallInteger),  # place of the dimension in the mesh, from 0
    Column("name", Text, nullable=False),  # its name
    Column("size", BigInteger, nullable=False),  # ranks along it
)
"""The dimensions of the meshes of a layout."""

PLACEMENTS = _table(
    "t_placements",
    _key("object_id", BigInteger),  # the layout
    _key("position", Integer),  # place of the key in the layout
    Column("key", Text, nullable=False),  # the key
    Column("division_id", Integer, nullable=False),  # its division
)
"""How the tensor under each key was held; keys that are not here were whole on every rank."""

DIVISIONS = _table(
    "t_divisions",
    _key("object_id", BigInteger),  # the layout
    _key("division_id", Integer),  # number of the division
    _key("part", Integer),  # most have one part alone
    Column("kind", Text, nullable=False),  # mesh, boxes, whole, or unknown
    Column("mesh", Integer),  # divided over this mesh
    Column("ranks", Text),  # whole on these ranks
    Column("num_ranks", BigInteger, nullable=False),  # ranks that hold something by this part
    Column("num_replicas", BigInteger),  # how many have the same of it; null: that differs, or is not known
)
"""How tensors were held: the different divisions of a layout, a row for each part of one."""

DIVISION_AXES = _table(
    "t_division_axes",
    _key("object_id", BigInteger),  # the layout
    _key("division_id", Integer),  # the division
    _key("part", Integer),  # the part of it
    _key("axis", SmallInteger),  # dimension of the mesh, from 0
    Column("name", Text, nullable=False),  # its name
    Column("size", BigInteger, nullable=False),  # ranks along it
    Column("placement", Text, nullable=False),  # R, S(dim) or SS(dim,stride)
    Column("dim", SmallInteger),  # the tensor's dimension that is cut; null: every rank has all
    Column("stride", BigInteger, nullable=False),  # 1, or parts that the dimension is cut into before; 0: not known
)
"""What each dimension of a mesh does to the tensors that are held so."""

DIVISION_BOXES = _table(
    "t_division_boxes",
    _key("object_id", BigInteger),  # the layout
    _key("division_id", Integer),  # the division
    _key("part", Integer),  # the part of it
    _key("position", Integer),  # place among the boxes
    Column("offsets", Text, nullable=False),  # where the box begins, in elements, as JSON
    Column("sizes", Text, nullable=False),  # how large it is, in elements, as JSON
    Column("ranks", Text, nullable=False),  # who holds it: 0-7,16-64:8
)
"""Boxes that follow no rule, and who holds them."""

LAYOUT_ALIASES = _table(
    "t_layout_aliases",
    _key("object_id", BigInteger),  # the layout
    _key("group_id", Integer),  # number of the group
    _key("position", Integer),  # place in it
    Column("key", Text, nullable=False),  # the key
)
"""Groups of keys that were one tensor."""

VALUES = _table(
    "t_values",
    Column("data", LargeBinary, primary_key=True),  # `t_entries.data`: the value as it is encoded, or its hash
    _key("num_bytes", Integer),  # how long it is as it is encoded, which tells a value of 16 bytes from a hash
    Column("value", Text, nullable=False),  # as people read it
)
"""Plain values in tree nodes as text, each once; those that nothing has any more stay until the index is rebuilt."""

REMEMBERED = (META, REFS, HEADS, REF_RECORDS, REF_MOVES, FORGOTTEN, PLANS, PLAN_RANKS, PLAN_SHAPES, RESTORES, SCRUBS)
"""Tables with what packs do not hold: a rebuild keeps their rows. All others are derived, and are replaced."""

Index("edges_by_child", EDGES.c.child_id)
Index("plans_by_root", PLANS.c.root, PLANS.c.target, unique=True)
Index("restores_by_root", RESTORES.c.root, RESTORES.c.started_us)
Index("specs_by_number", SPECS.c.spec_id)
Index("locations_by_pack", LOCATIONS.c.pack_id)
Index("objects_by_number", OBJECTS.c.object_id)
Index("packs_by_name", PACKS.c.name)
Index("locations_by_base", LOCATIONS.c.base, sqlite_where=text("base IS NOT NULL"))
"""In PostgreSQL it is a partial index too, made by the migration: naming that dialect here would import it."""


def former_name(table: Table) -> str:
    """The name of the table before revision 0004, if it was there."""
    return table.name.removeprefix("t_")


_GONE = {"t_pending"}
"""Tables of earlier revisions alone."""


def our_names() -> set[str]:
    """Names of tables of an index, of this revision or an earlier one; since 0004 some views are called so."""
    return {name for table in METADATA.sorted_tables for name in (table.name, former_name(table))} | _GONE


def refuse_foreign(names: set[str], place: str) -> None:
    """Raise ConflictError if there are tables, and none that says that this is an index."""
    ours = our_names()
    others = names - {VERSION_TABLE.name}
    if others and (VERSION_TABLE.name not in names or not names & ours):
        raise ConflictError(
            f"index {place}: tables are there that cas_ckpt did not make, such as {min(others)!r}; they stay as they "
            "are: name another place for the index, or move them"
        )
