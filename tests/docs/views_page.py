"""The views of docs/sql.md, drawn from cas_ckpt/index/views.py."""

from __future__ import annotations

from cas_ckpt.index.schema import VIEWS_VERSION
from cas_ckpt.index.views import VIEWS

LINKS = {
    "commits": (
        "commit",
        (
            "completeness", "parents", "refs", "history", "metrics", "lineage", "entries", "changes", "key_changes",
            "holders", "gained", "restores",
        ),
    ),
    "layouts": ("layout", ("commits", "layout_axes", "placements", "shards")),
    "objects": ("object", ("entries", "tensors", "chunks", "holders", "gained", "locations")),
    "plans": ("plan", ("plan_ranks",)),
    "packs": ("pack", ("locations",)),
}  # fmt: skip
"""View with one row for each -> what it is called in other views, and these."""


def diagram() -> str:
    """A Mermaid diagram of the views and what joins them."""
    lines = ["```mermaid", "erDiagram"]
    for view, (name, others) in LINKS.items():
        lines += [f"    {view} ||--o{{ {other} : {name}" for other in others]
    for view in VIEWS:
        columns = (f"        {column.kind} {column.name}" for column in view.columns)
        lines += [f"    {view.name} {{", *columns, "    }"]
    return "\n".join([*lines, "```"])


def views() -> str:
    """The part of docs/sql.md."""
    parts = [f"Version {VIEWS_VERSION} of the views.", diagram()]
    listed = "\n".join(f"| [`{view.name}`](#{view.name}) | {view.about} |" for view in VIEWS)
    parts.append(f"| view | has a row for |\n| --- | --- |\n{listed}")
    for view in VIEWS:
        rows = "\n".join(f"| `{column.name}` | {column.kind} | {column.about} |" for column in view.columns)
        parts += [
            f"### {view.name}",
            f"A row for {view.about}.",
            f"| column | kind | what |\n| --- | --- | --- |\n{rows}",
        ]
    return "\n\n".join(parts)
