"""The overview of docs/index.md, drawn from cas_ckpt/index/schema.py."""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from itertools import pairwise

from sqlalchemy import Column, Table

from cas_ckpt.index import schema as code

REFERENCES = {
    ("locations", "object_id"): "objects.object_id",
    ("locations", "pack_id"): "packs.pack_id",
    ("edges", "parent_id"): "objects.object_id",
    ("edges", "child_id"): "objects.object_id",
    ("commits", "object_id"): "objects.object_id",
    ("more_parents", "object_id"): "commits.object_id",
    ("metrics", "object_id"): "commits.object_id",
    ("lineage", "object_id"): "commits.object_id",
    ("suspects", "object_id"): "objects.object_id",
}
"""What a number refers to. SQL declares no foreign keys: rows of an object may come before those of what it needs."""

OF_TABLES = {
    "meta": "What the index knows of itself: one value for each name",
    "packs": "The packs that the index has taken in",
    "objects": "Every chunk and node: its id, and the number by which other tables name it",
    "locations": "Where the bytes of an object are: one row for each extent in each pack",
    "edges": "Which object refers to which: commits to trees, trees to tensors, tensors to chunks",
    "commits": "What the log shows of a commit",
    "refs": "Branches, tags and pins as they were last seen; the store is what counts",
    "metrics": "Metrics of commits, for searches",
}
"""What a table is for, where schema.py does not say so below the table."""

OF_COLUMNS = {
    "meta.key": "name of the value",
    "meta.value": "the value",
    "packs.pack_id": "number of the pack in this index",
    "packs.name": "key of the pack in the store",
    "packs.kind": "1 data, 2 meta",
    "packs.size_bytes": "length of the file",
    "packs.num_entries": "entries in its directory",
    "packs.first_seen_us": "when the index took it in; young packs are spared by `gc`",
    "objects.digest": "id of the object, 32 bytes",
    "objects.object_id": "its number in this index",
    "objects.kind": "chunk, tensor, chunk-page, tree, tree-page, layout or commit, by number; 0: not seen yet",
    "locations.object_id": "the object",
    "locations.pack_id": "the pack; 0: nowhere, a kept row of an object that was referred to before it was seen",
    "locations.first_leaf": "first leaf of the chunk in this extent; 0 for nodes",
    "locations.kind": "as in `objects`, so that garbage collection need not look there",
    "locations.num_bytes": "plain length of the whole object",
    "locations.num_leaves": "leaves in this extent; 0 for nodes",
    "locations.leaf_bytes": "length of a leaf; 0 for nodes",
    "locations.offset": "where the entry's header begins in the pack",
    "locations.header_bytes": "length of the entry's header; the payload follows it",
    "locations.stored_bytes": "length of the payload",
    "locations.encoding": "RAW, ZERO, CONSTANT, ZSTD or PLANES_ZSTD, by number",
    "locations.base": "id of the object that a delta is against; nothing writes deltas yet",
    "edges.parent_id": "the object that refers",
    "edges.child_id": "the object that is referred to",
    "commits.object_id": "the commit",
    "commits.digest": "its id",
    "commits.root": "id of its tree: the id of the state",
    "commits.layout": "id of its layout node",
    "commits.first_parent": "id of its first parent; null for the first commit of a history",
    "commits.message": "its message",
    "commits.author": "who made it",
    "commits.time_us": "when, in microseconds since 1970",
    "commits.step": "step of the training",
    "commits.branch": "the branch that it went to, where this index saw that",
    "commits.metrics": "its metrics as JSON, in the order in which they were given",
    "commits.meta": "the value given as `meta=`, encoded",
    "commits.stats": "what the commit cost, as JSON",
    "more_parents.object_id": "the commit",
    "more_parents.position": "1 for the second parent, and so on",
    "more_parents.parent": "id of the parent",
    "metrics.object_id": "the commit",
    "metrics.name": "name of the metric",
    "metrics.value": "its value",
    "refs.name": "e.g. `refs/heads/main`",
    "refs.target": "id of the commit",
    "refs.generation": "generation of garbage collection that the ref was written in",
    "refs.updated_s": "when it was seen, in seconds since 1970",
    "plans.root": "the state",
    "plans.layout": "the layout of the commit",
    "plans.target": "the mesh that the plan is for",
    "plans.report": "the plan, encoded",
    "lineage.object_id": "the commit",
    "lineage.position": "place in the list that was given",
    "lineage.kind": "`fine-tune-of`, `merged-from`, ...",
    "lineage.target": "id of a commit, of this repository or another one",
    "lineage.note": "the value given as `meta` of the edge, encoded",
    "suspects.object_id": "the object",
    "suspects.referred": "1: something referred to it, in a pack that was dropped",
    "scrubs.pack": "key of the pack",
    "scrubs.checked_us": "when, in microseconds since 1970",
    "scrubs.num_bytes": "bytes that were read",
    "scrubs.damage": "what was wrong; null: nothing",
}
"""What a column holds, where schema.py has no comment behind the column."""


@cache
def docstrings() -> dict[str, str]:
    """Name of a variable of schema.py -> the text below it."""
    body = ast.parse(inspect.getsource(code)).body
    found = {}
    for node, below in pairwise(body):
        if isinstance(node, ast.Assign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            name = node.targets[0]
            assert isinstance(name, ast.Name)
            found[name.id] = " ".join(str(below.value.value).split())
    return found


@cache
def comments() -> dict[str, str]:
    """table.column -> the comment behind the column in schema.py."""
    found, table = {}, ""
    for line in inspect.getsource(code).splitlines():
        if given := re.fullmatch(r'    "(\w+)",', line):
            table = given[1]
        if given := re.fullmatch(r'    Column\("(\w+)",.*\),  # (.*)', line):
            found[f"{table}.{given[1]}"] = given[2]
    return found


def tables() -> list[tuple[str, Table]]:
    """Tables with their names in schema.py, in its order."""
    return [(name, value) for name, value in vars(code).items() if isinstance(value, Table) and name != "VERSION_TABLE"]


def about_table(variable: str, table: Table) -> str:
    """What a table is for."""
    return docstrings().get(variable) or f"{OF_TABLES[table.name]}."


def about_column(table: Table, column: Column[object]) -> str:
    """What a column holds."""
    place = f"{table.name}.{column.name}"
    return comments().get(place) or OF_COLUMNS[place]


def kind(column: Column[object]) -> str:
    """The SQL type without its length."""
    words = {"LargeBinary": "bytes", "Text": "text", "Double": "float"}
    return words.get(type(column.type).__name__, "integer")


def diagram() -> str:
    """A Mermaid diagram of tables and what their numbers refer to."""
    lines = ["```mermaid", "erDiagram"]
    for (table, column), target in REFERENCES.items():
        lines.append(f"    {target.partition('.')[0]} ||--o{{ {table} : {column}")
    for _, table in tables():
        lines.append(f"    {table.name} {{")
        columns = [f"{kind(column)} {column.name}{' PK' if column.primary_key else ''}" for column in table.columns]
        lines += [*(f"        {column}" for column in columns), "    }"]
    return "\n".join([*lines, "```"])


def schema() -> str:
    """The part of docs/index.md."""
    remembered = {table.name for table in code.REMEMBERED}
    parts = [
        f"Revision {code.REVISIONS[-1]} of the schema.",
        diagram(),
        "| table | kept by a rebuild | holds |\n| --- | --- | --- |",
    ]
    for variable, table in tables():
        kept = "yes" if table.name in remembered else "derived"
        parts[-1] += f"\n| `{table.name}` | {kept} | {about_table(variable, table)} |"
    parts.append("| column | type | meaning |\n| --- | --- | --- |")
    for _, table in tables():
        for column in table.columns:
            about = about_column(table, column)
            refers = REFERENCES.get((table.name, str(column.name)))
            more = [
                *["key"][: column.primary_key],
                *[f"`{refers}`"][: bool(refers)],
                *["may be null"][: bool(column.nullable)],
            ]
            shown = f"{about} ({', '.join(more)})" if more else about
            parts[-1] += f"\n| `{table.name}.{column.name}` | {kind(column)} | {shown} |"
    parts.append("| index | columns | only |\n| --- | --- | --- |")
    for _, table in tables():
        for index in sorted(table.indexes, key=lambda each: str(each.name)):
            where = index.dialect_options["sqlite"]["where"] if "sqlite" in index.dialect_options else None
            names = ", ".join(f"`{table.name}.{column.name}`" for column in index.columns)
            parts[-1] += f"\n| `{index.name}` | {names} | {f'`{where}`' if where is not None else ''} |"
    return "\n\n".join(parts)
