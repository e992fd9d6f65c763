"""The views of the index: what people ask in SQL, with the same names and columns on SQLite and PostgreSQL.

Tables (`t_...`) are for the program and change with it; views are for people and only grow. docs/sql.md describes them,
from here. What their columns are called:

    X_id, X_no      the id of an object in lower-case hexadecimal digits; and its number in this index at this moment,
                    by which joins are fast
    time, time_s    a time as text, in UTC; and in seconds since 1970
    is_X            1 or 0

A recursive query over all commits is made whole before a condition on a commit is looked at. So a view that follows
references does it for one row of what stands before it at a time (`Each`): by LATERAL in PostgreSQL, in SQLite by a
query inside of json_each. A column that needs a look-up is a query of its own, which neither database makes where
nobody asks for the column.

Invariant: a view of a later version has all columns of the earlier ones, in the same order. Views are made and dropped
in the transaction that makes or changes the tables; those of a later version are left as they are.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection

from cas_ckpt.index import postgres, remembered
from cas_ckpt.index.database import table_names, view_names
from cas_ckpt.index.manifests import FLAVOR_STEP
from cas_ckpt.index.rows import MOST_CHARS
from cas_ckpt.index.schema import META, NOWHERE, VIEWS_VERSION
from cas_ckpt.index.view_sql import (
    POSTGRES,
    Each,
    View,
    integer,
    moment,
    named,
    number_of,
    one,
    one_called,
    quoted,
    real,
    text,
)
from cas_ckpt.objects.codec import Encoding
from cas_ckpt.objects.digest import DIGEST_BYTES, ObjectKind
from cas_ckpt.objects.nodes import INLINE_BYTES, EntryForm
from cas_ckpt.objects.pack import PackKind
from cas_ckpt.objects.state import CONTAINER_KINDS

_CHUNK, _TREE = int(ObjectKind.CHUNK), int(ObjectKind.TREE)
_CONTAINER, _SINGLE, _VALUE, _PAGE = map(int, (EntryForm.CONTAINER, EntryForm.CHUNK, EntryForm.VALUE, EntryForm.PAGE))
_OF_VALUES = FLAVOR_STEP * 2
"""Forms from here on are of long plain values that are stored as tensors are."""
_OBJECT_KINDS = {int(kind): kind.label for kind in ObjectKind}
_PACK_KINDS = {int(kind): kind.name.lower() for kind in PackKind}
_ENCODINGS = {int(each): each.name.lower().replace("_", "-") for each in Encoding}
_SEEN = quoted(CONTAINER_KINDS)
"""Kinds of containers whose entries are listed; any other is one tensor in parts."""

_COMMIT = (text("commit_id", "HEX[c.digest]", "id of the commit"), integer("commit_no", "c.object_id", "its number"))
_REFS_NOW = """(SELECT s.name, coalesce(
        (SELECT h.target FROM t_heads h WHERE h.name = s.name AND h.remembered = s.target), s.target) AS target
    FROM t_refs s) r"""
"""Where refs point now; empty: they were deleted."""
_IS_REF = f"FEW[length(r.target) = {DIGEST_BYTES}]"
_FULL_NAME = (
    "(CASE substr(r.name, length(r.name) - 3) WHEN '.ref' THEN substr(r.name, 1, length(r.name) - 4) ELSE r.name END)"
)
"""Of a ref, without the end of the key that its record is stored under."""
_REF = (
    text(
        "name",
        f"EXACT[substr({_FULL_NAME}, CASE substr(r.name, 1, 10) WHEN 'refs/heads' THEN 12 "
        "WHEN 'refs/remot' THEN 14 ELSE 11 END)]",
        "its name, as `main`, or `origin/main` of a remote",
    ),
    text(
        "kind",
        "CASE substr(r.name, 1, 10) WHEN 'refs/heads' THEN 'branch' WHEN 'refs/tags/' THEN 'tag' "
        "WHEN 'refs/pins/' THEN 'pin' WHEN 'refs/remot' THEN 'remote' END",
        "`branch`, `tag`, `pin`, or `remote`: what a branch of a remote was when it was last asked",
    ),
)
_LAYOUT = "SELECT y.{0} FROM t_objects n CROSS JOIN t_layouts y WHERE n.digest = c.layout AND y.object_id = n.object_id"
_SIZES = (
    integer(
        "num_bytes", "(SELECT max(l.num_bytes) FROM t_locations l WHERE l.object_id = o.object_id)", "its plain bytes"
    ),
    integer(
        "stored_bytes",
        "(SELECT CAST(sum(l.stored_bytes + l.header_bytes) AS BIGINT) FROM t_locations l "
        f"WHERE l.object_id = o.object_id AND l.pack_id <> {NOWHERE})",
        "bytes that it takes in packs, each copy counted; null: it is in none",
    ),
    integer(
        "num_packs",
        "(SELECT count(DISTINCT l.pack_id) FROM t_locations l "
        f"WHERE l.object_id = o.object_id AND l.pack_id <> {NOWHERE})",
        "packs that hold it, or a part of it",
    ),
)
"""Of `o`, a row of t_objects."""


_ABOUT = View(
    "about",
    "this index: one row",
    "alembic_version v",
    integer("views_version", str(VIEWS_VERSION), "version of the views; a later one has more columns and views"),
    text("schema_revision", "v.version_num", "revision of the tables below, which are nobody's business"),
    text("store_id", "(SELECT m.value FROM t_meta m WHERE m.key = 'store_id')", "id of the store that it is about"),
)
_COMMITS = View(
    "commits",
    "each commit that the index knows, forgotten ones too",
    "t_commits c",
    *_COMMIT,
    *one_called("root", "c.root", "id of its state: equal for equal states"),
    *one_called("layout", "c.layout", "id of its layout"),
    text("parent_id", "HEX_IF_ANY[c.first_parent]", "id of its first parent; null: the first of a history"),
    text("message", "c.message", "its message"),
    text("author", "c.author", "who made it"),
    *moment("time", "c.time_us", "when it was made"),
    integer("step", "c.step", "step of the training"),
    text("metrics", "c.metrics", "its metrics as JSON, NaN and infinities as text; as rows they are in `metrics`"),
    integer("world_size", f"({_LAYOUT.format('world_size')})", "ranks that held the state"),
    text("mesh", f"({_LAYOUT.format('mesh')})", "their mesh, as `dp=4,tp=2`; empty: none"),
    integer("total_bytes", "STAT[total_bytes]", "plain bytes of its tensors and values, as it was made"),
    integer("new_bytes", "STAT[new_bytes]", "those that no earlier commit had"),
    integer("stored_bytes", "STAT[stored_bytes]", "bytes that were written into packs for it"),
    integer("num_entries", "STAT[num_entries]", "entries of its state"),
    integer("num_tensors", "STAT[num_tensors]", "tensors among them"),
    integer("num_chunks", "STAT[num_chunks]", "chunks of its state"),
    integer("num_new_chunks", "STAT[num_new_chunks]", "those that were new"),
    text(
        "continued_from",
        "(SELECT min(HEX[l.target]) FROM t_lineage l WHERE l.object_id = c.object_id AND l.kind = 'continued-from')",
        "id of what its state came from, where others committed to the branch meanwhile; null: its parent",
    ),
    integer(
        "is_forgotten",
        "CASE WHEN EXISTS (SELECT 1 FROM t_forgotten x WHERE x.digest = c.digest) THEN 1 ELSE 0 END",
        "1: it was forgotten, and no ref names it: its data may be gone; 0: it was not",
    ),
    *(
        text(name, f"(SELECT k.{name} FROM t_commit_texts k WHERE k.object_id = c.object_id)", about)
        for name, about in (
            ("meta", f"the metadata that it was given, as JSON; null: none, or more than {MOST_CHARS} characters"),
            ("provenance", "where and by what it was made, as JSON; null: that was not kept, or is as long"),
            ("signed_by", "fingerprint of the key that its signature names, NOT verified; null: not signed"),
        )
    ),
)
_HOLDING = f"SELECT 1 FROM t_locations {{0}} WHERE {{0}}.object_id = below.object_id AND {{0}}.pack_id <> {NOWHERE}"
"""Extents of an object. It is all there if one holds it whole, or if there is its first leaf, and where one ends before
the object does another goes on."""
_COMPLETENESS = View(
    "completeness",
    "each commit, and whether all of its state is stored; name a commit",
    "t_commits c",
    *_COMMIT,
    integer(
        "num_missing",
        f"""(
        WITH RECURSIVE below(object_id) AS (
            SELECT s.object_id FROM (
                SELECT {number_of("c.root")} AS object_id
                UNION ALL SELECT {number_of("c.layout")} WHERE c.layout IS NOT NULL
            ) s
            UNION SELECT g.child_id FROM below CROSS JOIN t_edges g WHERE g.parent_id = below.object_id
        )
        SELECT count(*) FROM below WHERE NOT EXISTS ({_HOLDING.format("l")} AND l.first_leaf = 0
            AND (l.leaf_bytes = 0 OR l.num_leaves * l.leaf_bytes >= l.num_bytes))
        AND (NOT EXISTS ({_HOLDING.format("l")} AND l.first_leaf = 0) OR EXISTS ({_HOLDING.format("l")}
            AND (l.first_leaf + l.num_leaves) * l.leaf_bytes < l.num_bytes
            AND NOT EXISTS ({_HOLDING.format("m")} AND m.first_leaf <= l.first_leaf + l.num_leaves
                AND m.first_leaf + m.num_leaves > l.first_leaf + l.num_leaves))))""",
        "objects of its state, or its layout, that packs do not have all of; 0: it is complete",
    ),
)
_PARENTS = View(
    "parents",
    "each parent of each commit",
    (
        "(SELECT f.object_id, 0 AS position, f.first_parent AS parent FROM t_commits f "
        "WHERE f.first_parent IS NOT NULL UNION ALL SELECT m.object_id, m.position, m.parent FROM t_more_parents m) p "
        "JOIN t_commits c ON c.object_id = p.object_id"
    ),
    *_COMMIT,
    integer("position", "p.position", "0 for the first parent"),
    *one_called("parent", "p.parent", "id of the parent"),
)
_REFS = View(
    "refs",
    "each branch, tag, pin and remote-tracking branch",
    f"{_REFS_NOW} WHERE {_IS_REF}",
    *_REF,
    text("full_name", f"EXACT[{_FULL_NAME}]", "its whole name, as `refs/heads/main`"),
    *one_called("commit", "r.target", "id of the commit that it names"),
    *(
        text(
            name,
            "(SELECT k.note FROM t_ref_records k WHERE k.name = r.name AND k.note <> '' "
            f"AND substr(k.name, 1, 10) = '{kind}')",
            about,
        )
        for name, kind, about in (
            ("message", "refs/tags/", "message of an annotated tag; null: any other ref"),
            ("reason", "refs/pins/", "why a pin was made; null: nobody said, or any other ref"),
        )
    ),
)
_HISTORY = View(
    "history",
    "each ref and each commit that it leads to; name a ref",
    f"{_REFS_NOW} CROSS JOIN EACH WHERE {_IS_REF}",
    *_REF,
    *one("commit", "EACH.commit_no", "id of the commit"),
    each=Each(
        """led(commit_no) AS (
        SELECT o.object_id FROM t_objects o CROSS JOIN t_commits c
        WHERE o.digest = r.target AND c.object_id = o.object_id
        UNION SELECT c.object_id FROM led CROSS JOIN (
            SELECT f.object_id, f.first_parent AS parent FROM t_commits f
            UNION ALL SELECT m.object_id, m.parent FROM t_more_parents m
        ) p CROSS JOIN t_objects o CROSS JOIN t_commits c
        WHERE p.object_id = led.commit_no AND o.digest = p.parent AND c.object_id = o.object_id
    )""",
        "led",
        ("commit_no",),
    ),
)
_REFLOG = View(
    "reflog",
    "each move of each ref, deleted ones too, as `reflog` lists them; name a ref",
    """(
        SELECT m.name, m.position, 0 AS number, m.old, m.new, m.action, m.author, m.time_us FROM t_ref_moves m
        UNION ALL
        SELECT g.name, g.position, EACH.number, f.first_parent, f.digest,
            CASE WHEN FIRST_LINE[f.message] = '' THEN 'commit' ELSE 'commit: ' || FIRST_LINE[f.message] END,
            f.author, f.time_us
        FROM (
            SELECT m.name, m.position, m.new AS stop, CASE
                WHEN EXISTS (SELECT 1 FROM t_ref_moves n WHERE n.name = m.name AND n.position = m.position + 1)
                THEN (SELECT n.old FROM t_ref_moves n WHERE n.name = m.name AND n.position = m.position + 1)
                ELSE (SELECT k.target FROM t_ref_records k WHERE k.name = m.name) END AS top
            FROM t_ref_moves m
            UNION ALL SELECT k.name, -1, NULL, CASE
                WHEN EXISTS (SELECT 1 FROM t_ref_moves n WHERE n.name = k.name AND n.position = 0)
                THEN (SELECT n.old FROM t_ref_moves n WHERE n.name = k.name AND n.position = 0) ELSE k.target END
            FROM t_ref_records k WHERE NOT EXISTS (SELECT 1 FROM t_ref_moves n WHERE n.name = k.name)
            OR EXISTS (SELECT 1 FROM t_ref_moves n WHERE n.name = k.name AND n.position = 0)
        ) g CROSS JOIN EACH CROSS JOIN t_commits f WHERE f.object_id = EACH.commit_no
    ) r""",
    *_REF,
    text("full_name", f"EXACT[{_FULL_NAME}]", "its whole name, as `refs/heads/main`"),
    integer("position", "r.position", "the later, the higher: of the moves that the ref's own record remembers"),
    integer("number", "r.number", "0: such a move; commits on top of it count from 1"),
    *one_called("old", "r.old", "id of the commit that it named before; null: none"),
    *one_called("new", "r.new", "id of the commit that it named then; null: it was deleted"),
    text("action", "r.action", "what was done, as `branch: set to main` or `commit: warm-up done`"),
    text("author", "r.author", "by whom"),
    *moment("time", "r.time_us", "when"),
    each=Each(
        """line(commit_no, place) AS (
        SELECT o.object_id, 0 FROM t_objects o CROSS JOIN t_commits a
        WHERE o.digest = g.top AND a.object_id = o.object_id AND (g.stop IS NULL OR g.stop <> g.top)
        UNION ALL SELECT a.object_id, line.place + 1
        FROM line CROSS JOIN t_commits b CROSS JOIN t_objects o CROSS JOIN t_commits a
        WHERE b.object_id = line.commit_no AND o.digest = b.first_parent AND a.object_id = o.object_id
        AND (g.stop IS NULL OR g.stop <> b.first_parent)
    )""",
        "(SELECT commit_no, count(*) OVER () - place AS number FROM line) numbered",
        ("commit_no", "number"),
    ),
)
"""Between two moves of a record lie commits by first parents, down to what the earlier one set, as in ops/refs.py."""
_METRICS = View(
    "metrics",
    "each metric of each commit",
    "t_metrics m JOIN t_commits c ON c.object_id = m.object_id",
    *_COMMIT,
    text("name", "EXACT[m.name]", "name of the metric"),
    real("value", "m.value", "its value; null: it is NaN"),
    integer("is_nan", "CASE WHEN m.value IS NULL THEN 1 ELSE 0 END", "1: it is NaN; 0: a number, or infinite"),
)
_LINEAGE = View(
    "lineage",
    "each thing that a commit's state was made from, apart from its parents",
    "t_lineage l JOIN t_commits c ON c.object_id = l.object_id",
    *_COMMIT,
    integer("position", "l.position", "place in the list that was given"),
    text("kind", "l.kind", "`fine-tune-of`, `merged-from`, ..."),
    *one_called("target", "l.target", "id of the commit that it was made from"),
)
_FORM, _FLAVOR = f"(e.form % {FLAVOR_STEP})", f"(e.form / {FLAVOR_STEP})"
_SPEC = "(SELECT s.{0} FROM t_specs s WHERE s.spec_id = e.spec_id)"
_TYPED = f"CASE WHEN e.form < {_OF_VALUES} AND {_FORM} <> {_VALUE} THEN {_SPEC} END"
"""Of tensors and arrays: what is known of values is their length."""
_PARTS = "FROM t_entries p CROSS JOIN t_specs s WHERE p.node_id = e.child_id AND s.spec_id = p.spec_id"
MOST_CONTAINERS = 1 << 20
"""Of a state, equal ones counted each time: a few nodes can stand for more than any memory or disk holds."""
_TOO_MANY = f"a state of more than {MOST_CONTAINERS} containers, equal ones counted each time, has no entries here"


def _few(columns: str) -> str:
    """`few`: these columns of `walk`, whose rows are containers; more than there may be end the query."""
    return f"""few({columns}) AS (
        SELECT {columns} FROM (
            SELECT s.*, row_number() OVER () AS number
            FROM (SELECT {columns} FROM walk LIMIT {MOST_CONTAINERS + 1}) s
        ) n WHERE n.number <= {MOST_CONTAINERS}
        OR TOO_LARGE['{_TOO_MANY}: ' || n.number]
    )"""


_IS_LEAF = (
    f"e.form <> {_PAGE} AND (e.form <> {_CONTAINER} OR t.node_id IS NULL OR t.num_entries = 0 "
    f"OR t.kind NOT IN ({_SEEN}))"
)
"""Of `e`, a row of t_entries, and `t`, that of its container: it is an entry by itself."""
_PREFIX = f"EXACT[CASE w.form WHEN {_PAGE} THEN walk.prefix ELSE walk.prefix || w.name || '/' END]"
_OPENED = (
    "w.node_id = walk.node_id AND v.node_id = w.child_id "
    f"AND (w.form = {_PAGE} OR (w.form = {_CONTAINER} AND v.kind IN ({_SEEN})))"
)
"""Of `w`, a row of t_entries, and `v`, that of its container: the walk goes on there."""
_ENTRIES = View(
    "entries",
    "each entry of each commit, as `ls` lists them; name a commit",
    (
        "t_commits c CROSS JOIN EACH CROSS JOIN ENTRIES_OF[EACH.node_id] e "
        f"LEFT JOIN t_trees t ON e.form = {_CONTAINER} AND t.node_id = e.child_id "
        f"WHERE e.node_id = EACH.node_id AND {_IS_LEAF}"
    ),
    *_COMMIT,
    text("key", "EXACT[EACH.prefix || e.name]", "its key"),
    text(
        "kind",
        f"CASE WHEN e.form = {_CONTAINER} THEN t.kind WHEN {_FORM} = {_VALUE} THEN 'value' ELSE "
        f"CASE {_FLAVOR} WHEN 0 THEN 'tensor' WHEN 1 THEN 'array' ELSE 'value' END END",
        "`tensor`, `array`, `value`; or the kind of a composite tensor, or of an empty container",
    ),
    text(
        "dtype",
        f"CASE WHEN e.form = {_CONTAINER} THEN (SELECT s.dtype {_PARTS} AND p.name IN "
        f"('int_repr', 'items', 'values') ORDER BY p.name DESC LIMIT 1) ELSE {_TYPED.format('dtype')} END",
        "dtype of a tensor or array",
    ),
    text(
        "shape",
        f"CASE WHEN e.form = {_CONTAINER} THEN (SELECT s.shape {_PARTS} AND p.name = 'items' LIMIT 1) "
        f"ELSE {_TYPED.format('shape')} END",
        "its shape, as JSON; null for a sparse or quantized tensor",
    ),
    integer(
        "num_bytes",
        f"CASE WHEN e.form = {_CONTAINER} THEN (SELECT CAST(coalesce(sum(s.num_bytes), 0) AS BIGINT) {_PARTS}) "
        f"ELSE {_SPEC.format('num_bytes')} END",
        "plain bytes; of a value as it is encoded",
    ),
    integer(
        "num_chunks",
        f"CASE {_FORM} WHEN {_SINGLE} THEN 1 WHEN {int(EntryForm.TENSOR)} THEN "
        "(SELECT x.num_chunks FROM t_tensors x WHERE x.object_id = e.child_id) ELSE 0 END",
        "chunks that it consists of; 0: it is inline, or a composite tensor",
    ),
    *one("object", "e.child_id", "id of the tensor, chunk or tree that holds it; null: it is inline"),
    text(
        "content",
        "coalesce((SELECT HEX[n.digest] FROM t_objects n WHERE n.object_id = e.child_id), HEX[e.data])",
        "equal for equal bytes of one length: that id, or what is inline, as it is or its hash",
    ),
    text(
        "value",
        f"CASE WHEN e.form = {_VALUE} THEN "
        f"(SELECT v.value FROM t_values v WHERE v.data = e.data AND v.num_bytes = {_SPEC.format('num_bytes')}) END",
        f"a plain value of at most {INLINE_BYTES} bytes: text as it is, else as JSON, and what JSON lacks as "
        "Python's `str`; null: bytes, a longer value, a tensor",
    ),
    each=Each(
        f"""walk(prefix, node_id, depth) AS (
        SELECT EXACT[CAST('' AS TEXT)], {number_of("c.root")}, 0
        UNION ALL SELECT {_PREFIX}, w.child_id, walk.depth + 1
        FROM walk CROSS JOIN ENTRIES_OF[walk.node_id] w CROSS JOIN t_trees v WHERE {_OPENED}
        DEEPEST_FIRST[3] AT_MOST[{MOST_CONTAINERS + 1}]
    ), {_few("prefix, node_id")}""",
        "few",
        ("prefix", "node_id"),
    ),
)
_BEFORE = """(SELECT n.object_id FROM t_objects o CROSS JOIN t_commits b CROSS JOIN t_objects n
            WHERE o.digest = c.first_parent AND b.object_id = o.object_id AND n.digest = b.root)"""
"""Number of the state of the first parent."""
_SAME = "SELECT {0} FROM t_entries x WHERE x.node_id = walk.other_id AND x.name = w.name AND x.form = w.form"
_DIFFERENCE = f"""walk(has, prefix, node_id, other_id, depth) AS (
        SELECT s.has, EXACT[CAST('' AS TEXT)], s.node_id, s.other_id, 0 FROM (
            SELECT 1 AS has, {number_of("c.root")} AS node_id, {_BEFORE} AS other_id
            UNION ALL SELECT 0, {_BEFORE}, {number_of("c.root")}
        ) s WHERE s.node_id IS NOT NULL AND (s.other_id IS NULL OR s.node_id <> s.other_id)
        UNION ALL SELECT walk.has, {_PREFIX}, w.child_id, ({_SAME.format("min(x.child_id)")}), walk.depth + 1
        FROM walk CROSS JOIN ENTRIES_OF[walk.node_id] w CROSS JOIN t_trees v
        WHERE {_OPENED} AND ({_SAME.format("count(*)")} AND x.child_id = w.child_id) = 0
        DEEPEST_FIRST[5] AT_MOST[{MOST_CONTAINERS + 1}]
    ), {_few("has, prefix, node_id")}, listed(key, has, what) AS (
        SELECT EXACT[few.prefix || e.name], few.has, CAST(e.form AS TEXT) || ':' ||
            coalesce(CAST(e.spec_id AS TEXT), '') || ':' || coalesce(CAST(e.child_id AS TEXT), HEX_IF_ANY[e.data])
        FROM few CROSS JOIN ENTRIES_OF[few.node_id] e
        LEFT JOIN t_trees t ON e.form = {_CONTAINER} AND t.node_id = e.child_id
        WHERE e.node_id = few.node_id AND {_IS_LEAF}
    ), sides(key, before, after) AS (
        SELECT key, max(CASE has WHEN 0 THEN what END), max(CASE has WHEN 1 THEN what END) FROM listed GROUP BY key
    ), found(key, change) AS (
        SELECT key, CASE WHEN before IS NULL THEN 'new' WHEN after IS NULL THEN 'gone' ELSE 'changed' END FROM sides
        WHERE before IS NULL OR after IS NULL OR before <> after
    )"""
"""What the state of `c` has otherwise than that of its first parent. Both are walked at once, and what is one node
under one name in both is left out: the work follows what changed. Pages that begin at other names are compared by all
that is in them."""
_KEY_CHANGES = View(
    "key_changes",
    "each key that a commit changed against its first parent; name a commit",
    "t_commits c CROSS JOIN EACH",
    *_COMMIT,
    text("key", "EXACT[EACH.key]", "the key"),
    text("change", "EACH.change", "`new`, `changed`, or `gone`"),
    each=Each(_DIFFERENCE, "found", ("key", "change")),
)
_IS_THERE = "EXISTS (SELECT 1 FROM t_trees t WHERE t.node_id = {})"
_IS_KNOWN = f"{_IS_THERE.format(number_of('c.root'))} AND (c.first_parent IS NULL OR {_IS_THERE.format(_BEFORE)})"
_CHANGES = View(
    "changes",
    "each commit, and how many keys it changed against its first parent; name a commit",
    "t_commits c CROSS JOIN EACH",
    *_COMMIT,
    *(
        integer(name, f"CASE WHEN {_IS_KNOWN} THEN EACH.{name} END", about)
        for name, about in (
            ("changed", "keys that both have, with another value; null: what one of them has is not known"),
            ("new_entries", "keys that the commit has, and its first parent has not"),
            ("gone_entries", "keys that its first parent has, and the commit has not"),
        )
    ),
    each=Each(
        _DIFFERENCE,
        "(SELECT count(CASE change WHEN 'changed' THEN 1 END) AS changed, "
        "count(CASE change WHEN 'new' THEN 1 END) AS new_entries, "
        "count(CASE change WHEN 'gone' THEN 1 END) AS gone_entries FROM found) counted",
        ("changed", "new_entries", "gone_entries"),
    ),
)
_TENSORS = View(
    "tensors",
    "each distinct tensor that is stored in chunks, whatever states have it",
    (
        "(SELECT m.object_id, m.spec_id, m.num_chunks, m.cell FROM t_tensors m UNION ALL "
        f"SELECT DISTINCT e.child_id, e.spec_id, 1, NULL FROM t_entries e WHERE e.form % {FLAVOR_STEP} = {_SINGLE}) x "
        "JOIN t_specs s ON s.spec_id = x.spec_id"
    ),
    *one("object", "x.object_id", "id of the tensor, or of its only chunk"),
    text("dtype", "s.dtype", "its dtype"),
    text("shape", "s.shape", "its shape, as JSON"),
    integer("num_dims", "s.num_dims", "dimensions"),
    integer("num_bytes", "s.num_bytes", "its plain bytes"),
    integer("num_chunks", "x.num_chunks", "chunks that it consists of"),
    text("cell", "x.cell", "shape of a full chunk, as JSON; null: there is one chunk"),
)
_OBJECTS = View(
    "objects",
    "each chunk and node that is in some pack",
    "t_objects o WHERE o.kind <> 0",
    text("object_id", "HEX[o.digest]", "its id"),
    integer("object_no", "o.object_id", "its number"),
    text("kind", named("o.kind", _OBJECT_KINDS), "`chunk`, `tensor`, `tree`, `commit`, ..."),
    *_SIZES,
)
_CHUNKS = View(
    "chunks",
    "each chunk of each distinct tensor; a chunk that is a tensor by itself is its own",
    (
        "(SELECT t.object_id AS tensor, g.child_id AS chunk FROM t_tensors t "
        "JOIN t_edges g ON g.parent_id = t.object_id "
        "UNION ALL SELECT t.object_id, h.child_id FROM t_tensors t JOIN t_edges g ON g.parent_id = t.object_id "
        "JOIN t_edges h ON h.parent_id = g.child_id "
        f"UNION ALL SELECT a.object_id, a.object_id FROM t_objects a WHERE a.kind = {_CHUNK}) x "
        f"JOIN t_objects o ON o.object_id = x.chunk AND o.kind = {_CHUNK}"
    ),
    *one("object", "x.tensor", "id of the tensor"),
    text("chunk_id", "HEX[o.digest]", "id of the chunk"),
    integer("chunk_no", "o.object_id", "its number"),
    *_SIZES,
)
_HOLDERS = View(
    "holders",
    "each object and each commit whose state has it; name an object, best by its number",
    (
        "t_objects o CROSS JOIN EACH CROSS JOIN t_objects a CROSS JOIN t_commits c "
        f"WHERE a.object_id = EACH.node_id AND a.kind = {_TREE} AND c.root = a.digest"
    ),
    text("object_id", "HEX[o.digest]", "id of the chunk, tensor or tree"),
    integer("object_no", "o.object_id", "its number"),
    *_COMMIT,
    each=Each(
        """up(node_id) AS (
        SELECT o.object_id UNION SELECT g.parent_id FROM up CROSS JOIN t_edges g WHERE g.child_id = up.node_id
    )""",
        "up",
        ("node_id",),
    ),
)
_BELOW = "UNION SELECT g.child_id FROM {0} CROSS JOIN t_edges g WHERE g.parent_id = {0}.node_id"
_GAINED = View(
    "gained",
    "each object that the state of a commit has and that of its first parent has not",
    "t_commits c CROSS JOIN EACH",
    *_COMMIT,
    *one("object", "EACH.node_id", "id of the chunk, tensor or tree"),
    integer(
        "num_bytes",
        "(SELECT max(l.num_bytes) FROM t_locations l WHERE l.object_id = EACH.node_id AND l.pack_id <> 0)",
        "its plain bytes",
    ),
    each=Each(
        f"""had(node_id) AS (
        SELECT {number_of("b.root")} FROM t_objects o CROSS JOIN t_commits b
        WHERE o.digest = c.first_parent AND b.object_id = o.object_id
        {_BELOW.format("had")}
    ), has(node_id) AS (
        SELECT {number_of("c.root")} {_BELOW.format("has")}
    ), more(node_id) AS (SELECT node_id FROM has EXCEPT SELECT node_id FROM had)""",
        "more WHERE node_id IS NOT NULL",
        ("node_id",),
    ),
)
_PACKS = View(
    "packs",
    "each pack",
    "t_packs p LEFT JOIN t_scrubs b ON b.pack = p.name",
    text("pack", "EXACT[p.name]", "its key in the store"),
    integer("pack_no", "p.pack_id", "its number"),
    text("kind", named("p.kind", _PACK_KINDS), "`data`: chunks; `meta`: nodes and commits"),
    integer("num_bytes", "p.size_bytes", "length of the file"),
    integer("num_entries", "p.num_entries", "chunks and nodes in it"),
    *moment("seen", "p.first_seen_us", "when this index took it in"),
    *moment("read", "b.checked_us", "when `fsck` last read it whole; null: never"),
    text("damage", "b.damage", "what was wrong with it then; null: nothing"),
)
_LOCATIONS = View(
    "locations",
    "each place where bytes of an object are stored",
    "t_locations l JOIN t_packs p ON p.pack_id = l.pack_id",
    *one("object", "l.object_id", "id of the chunk or node"),
    text("kind", named("l.kind", _OBJECT_KINDS), "its kind"),
    text("pack", "EXACT[p.name]", "key of the pack"),
    integer("begins_at", 'l."offset"', "where its header begins in the pack"),
    integer("num_bytes", "l.num_bytes", "plain bytes of the whole object"),
    integer("stored_bytes", "l.stored_bytes + l.header_bytes", "bytes that are stored here, with their header"),
    integer("first_leaf", "l.first_leaf", "first leaf that is here; 0 for nodes"),
    integer("num_leaves", "l.num_leaves", "leaves that are here; 0 for nodes"),
    text("encoding", named("l.encoding", _ENCODINGS), "how they are stored"),
)
_LAYOUTS = View(
    "layouts",
    "each distinct layout: who held the state of a commit",
    "t_layouts y",
    *one("layout", "y.object_id", "its id"),
    integer("world_size", "y.world_size", "ranks that held the state"),
    text("mesh", "y.mesh", "the mesh of most tensors, as `dp=4,tp=2`; empty: none"),
    integer("num_meshes", "y.num_meshes", "meshes, this one among them"),
    integer("num_keys", "y.num_keys", "keys that not every rank had whole"),
)
_LAYOUT_AXES = View(
    "layout_axes",
    "each dimension of each mesh of each layout",
    "t_layout_axes x",
    *one("layout", "x.object_id", "id of the layout"),
    integer("mesh", "x.mesh", "number of the mesh; 0: that of most tensors"),
    integer("axis", "x.axis", "place in the mesh, from 0; neighbours along the last one are neighbours"),
    text("name", "EXACT[x.name]", "its name, as `tp`"),
    integer("size", "x.size", "ranks along it"),
)
_PLACEMENTS = View(
    "placements",
    "each key of each layout that not every rank had whole, and each dimension of the mesh that divided it",
    (
        "t_placements p JOIN t_divisions u ON u.object_id = p.object_id AND u.division_id = p.division_id "
        "LEFT JOIN t_division_axes a ON a.object_id = u.object_id AND a.division_id = u.division_id AND a.part = u.part"
    ),
    *one("layout", "p.object_id", "id of the layout"),
    text("key", "EXACT[p.key]", "the key"),
    integer("position", "u.part", "0, unless some ranks held it in another way than others: 1 and so on"),
    text("kind", "u.kind", "`mesh`; `boxes` that follow no rule; `whole` on some ranks; `unknown`"),
    integer("num_ranks", "u.num_ranks", "ranks that held some of it so"),
    integer("num_replicas", "u.num_replicas", "how many had the same of it; null: that differs"),
    integer("mesh", "u.mesh", "number of the mesh"),
    integer("axis", "a.axis", "dimension of the mesh, from 0"),
    text("name", "EXACT[a.name]", "its name, as `tp`"),
    integer("size", "a.size", "ranks along it"),
    text("placement", "a.placement", "`R`: each of these ranks had all; `S(dim)`, `SS(dim,stride)`: a part"),
    integer("dim", "a.dim", "dimension of the tensor that was cut; null: none"),
    integer("stride", "a.stride", "1, or parts that this dimension of the tensor was cut into before"),
)
_AFTER = """(
        WITH RECURSIVE later(axis, num_ranks) AS (
            SELECT CAST(a.axis AS INTEGER), CAST(1 AS BIGINT) UNION ALL
            SELECT CAST(x.axis AS INTEGER), later.num_ranks * x.size FROM later CROSS JOIN t_layout_axes x
            WHERE x.object_id = a.object_id AND x.mesh = h.mesh AND x.axis = later.axis + 1
        ) SELECT max(num_ranks) FROM later)"""
"""Ranks of a mesh that agree in a dimension and all before it."""
_COORDINATE = f"CASE WHEN a.axis IS NOT NULL THEN (EACH.place / {_AFTER}) % a.size END"
_SHARDS = View(
    "shards",
    "each rank that held some of a key, and each dimension of its mesh: which part it had; name a layout and a key",
    """t_placements p JOIN (
        SELECT u.object_id, u.division_id, u.part, u.kind, u.mesh, m.ranks, NULL AS offsets, NULL AS sizes
        FROM t_divisions u JOIN t_layout_meshes m ON m.object_id = u.object_id AND m.mesh = u.mesh
        WHERE u.kind = 'mesh'
        UNION ALL SELECT u.object_id, u.division_id, u.part, u.kind, u.mesh, u.ranks, NULL, NULL
        FROM t_divisions u WHERE u.kind = 'whole'
        UNION ALL SELECT b.object_id, b.division_id, b.part, 'boxes', NULL, b.ranks, b.offsets, b.sizes
        FROM t_division_boxes b
    ) h ON h.object_id = p.object_id AND h.division_id = p.division_id CROSS JOIN EACH
    LEFT JOIN t_division_axes a ON h.kind = 'mesh' AND a.object_id = h.object_id AND a.division_id = h.division_id
    AND a.part = h.part""",
    *one("layout", "p.object_id", "id of the layout"),
    text("key", "EXACT[p.key]", "the key"),
    integer("position", "h.part", "as in `placements`"),
    integer("rank", "EACH.rank", "the rank"),
    text("kind", "h.kind", "`mesh`; `boxes` that follow no rule; `whole`: it had all of it"),
    integer("axis", "a.axis", "dimension of the mesh, from 0"),
    text("name", "EXACT[a.name]", "its name, as `tp`"),
    integer("coordinate", _COORDINATE, "place of the rank along it"),
    integer("dim", "a.dim", "dimension of the tensor that was cut along it; null: none"),
    integer("part", f"CASE WHEN a.dim IS NOT NULL THEN {_COORDINATE} END", "which part the rank had, from 0"),
    integer("num_parts", "CASE WHEN a.dim IS NOT NULL THEN a.size END", "of how many"),
    text("offsets", "h.offsets", "where its box begins, as JSON; null: it follows from the parts"),
    text("sizes", "h.sizes", "how large its box is, as JSON"),
    each=Each(
        """runs(place, rank, last, step, rest) AS (
        SELECT -1, 0, 0, 1, h.ranks || ','
        UNION ALL SELECT place + 1,
            CASE WHEN rank < last THEN rank + step ELSE CAST(rest AS INTEGER) END,
            CASE WHEN rank < last THEN last
                WHEN rest GLOB '[0-9]*-*' AND instr(rest, '-') < instr(rest, ',')
                THEN CAST(substr(rest, instr(rest, '-') + 1) AS INTEGER) ELSE CAST(rest AS INTEGER) END,
            CASE WHEN rank < last THEN step
                WHEN instr(rest, ':') BETWEEN 1 AND instr(rest, ',')
                THEN CAST(substr(rest, instr(rest, ':') + 1) AS INTEGER) ELSE 1 END,
            CASE WHEN rank < last THEN rest ELSE substr(rest, instr(rest, ',') + 1) END
        FROM runs WHERE rank < last OR length(rest) > 1
    )""",
        "runs WHERE place >= 0",
        ("place", "rank"),
        """runs(place, rank) AS (
        SELECT row_number() OVER (ORDER BY t.number, g.rank) - 1, g.rank
        FROM regexp_split_to_table(h.ranks, ',') WITH ORDINALITY t(run, number) CROSS JOIN LATERAL generate_series(
            substring(t.run from '^([0-9]+)')::bigint,
            coalesce(substring(t.run from '^[0-9]+-([0-9]+)'), substring(t.run from '^([0-9]+)'))::bigint,
            coalesce(substring(t.run from ':([0-9]+)$'), '1')::bigint
        ) g(rank)
    )""",
    ),
)
_TIES = View(
    "ties",
    "each key of each layout that was one tensor with others: tied weights",
    "t_layout_aliases a",
    *one("layout", "a.object_id", "id of the layout"),
    integer("tie", "a.group_id", "number of the tensor: keys of one number are tied"),
    text("key", "EXACT[a.key]", "the key"),
)
_PLANS = View(
    "plans",
    "each restore plan that is kept: a state, and a mesh of ranks to restore it into",
    "t_plans p",
    integer("plan_no", "p.plan_id", "its number"),
    *one_called("root", "p.root", "id of the state; commits that have it: their `root_id`"),
    text("mesh", "p.mesh", "the mesh, as `dp=96,tp=8`; empty: several, or none"),
    integer("world_size", "p.world_size", "ranks"),
    text("rules", "p.rules", "patterns of keys and their placements, as JSON"),
    integer("num_tensors", "p.num_tensors", "tensors that are stored in chunks"),
    integer("num_chunks", "p.num_chunks", "chunks that any rank wants, each once"),
    integer("chunk_bytes", "p.chunk_bytes", "their plain bytes"),
    integer("wanted_bytes", "p.wanted_bytes", "plain bytes that all ranks want; replicas count each"),
    *(
        integer(f"{name}", f"(SELECT CAST({made_of} AS BIGINT) FROM t_plan_ranks k WHERE k.plan_id = p.plan_id)", about)
        for name, made_of, about in (
            ("read_bytes", "sum(k.read_bytes)", "plain bytes that all ranks together read from the store"),
            ("sent_bytes", "sum(k.sent_bytes)", "bytes that they send one another"),
            ("most_read_bytes", "max(k.read_bytes)", "what the rank that reads most reads"),
            ("most_sent_bytes", "max(k.sent_bytes)", "what the rank that sends most sends"),
            ("most_received_bytes", "max(k.received_bytes)", "what the rank that gets most gets"),
        )
    ),
    integer("planner_version", "p.planner_version", "version of the planner"),
    *moment("made", "p.made_us", "when it was made"),
    text("wants", "HEX[p.wants]", "names which rank wants what; equal in the rows of `restores` that it is a plan of"),
)
_PLAN_RANKS = View(
    "plan_ranks",
    "each rank of each plan",
    "t_plan_ranks k",
    integer("plan_no", "k.plan_id", "number of the plan"),
    integer("rank", "k.rank", "the rank"),
    integer("read_bytes", "k.read_bytes", "plain bytes that it reads from the store"),
    integer("num_requests", "k.num_requests", "chunks that it reads"),
    integer("sent_bytes", "k.sent_bytes", "what it sends to other ranks"),
    integer("received_bytes", "k.received_bytes", "what it gets from them"),
    integer("metadata_bytes", "k.metadata_bytes", "what it has to know of the plan"),
    integer("num_straddled", "k.num_straddled", "chunks of which it wants a part only"),
)
_RESTORES = View(
    "restores",
    "each restore that was made, and how it ended",
    "t_restores s",
    integer("restore_no", "s.restore_id", "its number; the later, the higher"),
    *one_called("commit", "s.commit_id", "id of the commit"),
    text("root_id", "HEX[s.root]", "id of its state"),
    text("verb", "s.verb", "`checkout` or `load`"),
    text("mesh", "s.mesh", "mesh of the targets; empty: several, or none"),
    integer("world_size", "s.world_size", "ranks"),
    *moment("started", "s.started_us", "when it began"),
    real("seconds", "s.seconds", "how long it took"),
    integer("num_bytes", "s.num_bytes", "plain bytes that were read and verified, by all ranks; null: it failed"),
    text("author", "s.author", "by whom"),
    text("host", "s.host", "on which machine (rank 0)"),
    integer("is_whole", "s.complete", "1: all of the state was wanted; 0: some keys"),
    text("error", "s.error", "what went wrong; null: all was verified and is in place"),
    text("wants", "HEX_IF_ANY[s.wants]", "as in `plans`"),
)
_BRANCH_BYTES = View(
    "branch_bytes",
    "each branch",
    """(
        WITH RECURSIVE led(owner, commit_no) AS (
            SELECT CASE v.kind WHEN 'branch' THEN v.name ELSE '' END, v.commit_no FROM refs v
            WHERE v.commit_no IS NOT NULL AND v.kind <> 'remote'
            UNION SELECT led.owner, o.object_id FROM led CROSS JOIN (
                SELECT f.object_id, f.first_parent AS parent FROM t_commits f
                UNION ALL SELECT m.object_id, m.parent FROM t_more_parents m
            ) p CROSS JOIN t_objects o WHERE p.object_id = led.commit_no AND o.digest = p.parent
        ), held(owner, object_id) AS (
            SELECT led.owner, o.object_id FROM led CROSS JOIN t_commits c CROSS JOIN t_objects o
            WHERE c.object_id = led.commit_no AND o.digest = c.root
            UNION SELECT held.owner, g.child_id FROM held CROSS JOIN t_edges g WHERE g.parent_id = held.object_id
        ), owners(object_id, num_owners) AS (
            SELECT object_id, count(*) FROM held GROUP BY object_id
        )
        SELECT held.owner, owners.num_owners,
            (SELECT max(l.num_bytes) FROM t_locations l
                WHERE l.object_id = held.object_id AND l.pack_id <> 0) AS num_bytes
        FROM held JOIN owners ON owners.object_id = held.object_id
    ) b WHERE b.owner <> '' GROUP BY b.owner""",
    text("name", "EXACT[b.owner]", "its name"),
    integer("num_bytes", "CAST(sum(b.num_bytes) AS BIGINT)", "plain bytes that its history leads to"),
    integer(
        "unique_bytes",
        "CAST(sum(CASE WHEN b.num_owners = 1 THEN b.num_bytes ELSE 0 END) AS BIGINT)",
        "those that no other branch, tag or pin leads to; remote-tracking branches do not count",
    ),
    integer(
        "shared_bytes",
        "CAST(sum(CASE WHEN b.num_owners = 1 THEN 0 ELSE b.num_bytes END) AS BIGINT)",
        "those that another one leads to as well",
    ),
)

VIEWS: Final = (
    _ABOUT, _COMMITS, _COMPLETENESS, _PARENTS, _REFS, _REFLOG, _HISTORY, _METRICS, _LINEAGE, _ENTRIES, _CHANGES,
    _KEY_CHANGES, _TENSORS, _CHUNKS, _HOLDERS, _GAINED, _OBJECTS, _LOCATIONS, _PACKS, _LAYOUTS, _LAYOUT_AXES,
    _PLACEMENTS, _SHARDS, _TIES, _PLANS, _PLAN_RANKS, _RESTORES, _BRANCH_BYTES,
)  # fmt: skip
"""All views, in the order in which docs/sql.md has them."""


# --- making and dropping them -----------------------------------------------------------------


def make_views(connection: Connection) -> None:
    """Make the views of this version, unless they are there, or those of a later one."""
    if remembered.views_version(connection) >= VIEWS_VERSION:
        return
    drop_views(connection)
    for view in VIEWS:
        connection.exec_driver_sql(view.text(connection.dialect.name), execution_options={"no_parameters": True})
    remembered.write_meta(connection, remembered.VIEWS, " ".join([str(VIEWS_VERSION), *(view.name for view in VIEWS)]))


def drop_views(connection: Connection) -> None:
    """Drop the views that this version or another one made, so that the tables below them can be changed.

    Views that somebody else made are not touched; in PostgreSQL one that rests on ours refuses it.
    """
    there = view_names(connection)
    if not there:
        return
    ours = {view.name for view in VIEWS}
    if META.name in table_names(connection):
        ours.update(remembered.made_views(connection)[1:])
        remembered.write_meta(connection, remembered.VIEWS, "0")
    names = [postgres.quoted(name) for name in sorted(there & ours)]
    # In PostgreSQL one view may rest on another, so all are dropped by one statement, which SQLite does not have.
    for some in [", ".join(names)][: len(names)] if connection.dialect.name == POSTGRES else names:
        connection.exec_driver_sql(f"DROP VIEW {some}")
