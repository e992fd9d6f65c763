"""The parts of docs/ that are made from the code: `python -m tests.docs.pages` writes them, test_made_parts compares.

A part is what follows the line `<!-- made by python -m tests.docs.pages: NAME -->`, up to `<!-- end of NAME -->`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.docs.command_line import verbs
from tests.docs.example import example
from tests.docs.index_schema import schema
from tests.docs.json_page import objects
from tests.docs.month_of_a_run import month
from tests.docs.questions import opening, questions
from tests.docs.views_page import views

DOCS = Path(__file__).resolve().parents[2] / "docs"
PARTS: dict[str, tuple[str, Callable[[], str]]] = {
    "example": ("format.md", example),
    "schema": ("index.md", schema),
    "json": ("command-line.md", objects),
    "verbs": ("command-line.md", verbs),
    "views": ("sql.md", views),
    "questions": ("sql.md", questions),
    "opening": ("sql.md", opening),
    "month": ("remotes.md", month),
}
"""Name of the part -> its page, and what makes it."""


def with_part(text: str, name: str) -> str:
    """The text of a page with the part called `name` made anew."""
    begin, end = f"<!-- made by python -m tests.docs.pages: {name} -->\n", f"<!-- end of {name} -->"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    assert begin in text and end in rest, f"the page lacks the marks {begin!r} and {end!r}"
    return f"{before}{begin}\n{PARTS[name][1]()}\n\n{end}{after}"


def main() -> None:
    """Write every part."""
    for name, (page, _) in PARTS.items():
        path = DOCS / page
        path.write_text(with_part(path.read_text(), name))


if __name__ == "__main__":
    main()
