"""The overview of docs/index.md, drawn from cas_ckpt/index/schema.py."""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from itertools import pairwise

from sqlalchemy import Column, Table

from cas_ckpt.index import schema as code
from cas_ckpt.index.rows import REVISIONS

REFERENCES = {
    ("t_locations", "object_id"): "t_objects.object_id",
    ("t_locations", "pack_id"): "t_packs.pack_id",
    ("t_edges", "parent_id"): "t_objects.object_id",
    ("t_edges", "child_id"): "t_objects.object_id",
    ("t_commits", "object_id"): "t_objects.object_id",
    ("t_more_parents", "object_id"): "t_commits.object_id",
    ("t_metrics", "object_id"): "t_commits.object_id",
    ("t_lineage", "object_id"): "t_commits.object_id",
    ("t_suspects", "object_id"): "t_objects.object_id",
    ("t_trees", "node_id"): "t_objects.object_id",
    ("t_entries", "node_id"): "t_trees.node_id",
    ("t_raw_names", "node_id"): "t_trees.node_id",
    ("t_entries", "child_id"): "t_objects.object_id",
    ("t_entries", "spec_id"): "t_specs.spec_id",
    ("t_node_specs", "node_id"): "t_trees.node_id",
    ("t_node_specs", "spec_id"): "t_specs.spec_id",
    ("t_tensors", "object_id"): "t_objects.object_id",
    ("t_tensors", "spec_id"): "t_specs.spec_id",
    ("t_layouts", "object_id"): "t_objects.object_id",
    ("t_layout_meshes", "object_id"): "t_layouts.object_id",
    ("t_layout_axes", "object_id"): "t_layouts.object_id",
    ("t_layout_aliases", "object_id"): "t_layouts.object_id",
    ("t_division_axes", "object_id"): "t_layouts.object_id",
    ("t_division_boxes", "object_id"): "t_layouts.object_id",
    ("t_placements", "object_id"): "t_layouts.object_id",
    ("t_divisions", "object_id"): "t_layouts.object_id",
    ("t_plan_ranks", "plan_id"): "t_plans.plan_id",
    ("t_plan_shapes", "plan_id"): "t_plans.plan_id",
}
"""What a number refers to. SQL declares no foreign keys: rows of an object may come before those of what it needs."""


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
        if given := re.fullmatch(r'    (?:Column|_key)\("(\w+)",.*\),  # (.*)', line):
            found[f"{table}.{given[1]}"] = given[2]
    return found


def tables() -> list[tuple[str, Table]]:
    """Tables with their names in schema.py, in its order."""
    return [(name, value) for name, value in vars(code).items() if isinstance(value, Table) and name != "VERSION_TABLE"]


def about_table(variable: str) -> str:
    """What a table is for."""
    return docstrings()[variable]


def about_column(table: Table, column: Column[object]) -> str:
    """What a column holds."""
    return comments()[f"{table.name}.{column.name}"]


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
        f"Revision {REVISIONS[-1]} of the schema.",
        diagram(),
        "| table | kept by a rebuild | holds |\n| --- | --- | --- |",
    ]
    for variable, table in tables():
        kept = "yes" if table.name in remembered else "derived"
        parts[-1] += f"\n| `{table.name}` | {kept} | {about_table(variable)} |"
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
