"""An extension of griffe for `make docs`: sections of docstrings that stand close, as ours do, are read as sections.

Griffe's parser wants an empty line above a section, and takes each line of `Raises:` that is not indented for an error
of its own. So `Args:` and `Attributes:` get their empty line, and what is raised or returned becomes a list. Arguments
that are described together (`a, b: text`) are each described so, with their own types and defaults.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_SECTION = re.compile(r"\n+(Raises|Returns):\n((?: +\S.*(?:\n|\Z))+)")
_TOGETHER = re.compile(r"^( +)([a-z]\w*(?:, [a-z]\w*)+)(: .*\n?(?:\1 +.*\n?)*)", re.MULTILINE)
_ITEM = re.compile(r"\s+(?=\b[A-Z]\w+(?:Error|Interrupt)(?:, [A-Z]\w+Error)*: )")


class CloseSections(Extension):
    """Gives docstrings the form that griffe reads."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Mend the docstring of `obj` before it is parsed."""
        if obj.docstring is not None:
            text = re.sub(r"\n+(Args|Attributes):\n", r"\n\n\1:\n", obj.docstring.value)
            obj.docstring.value = _SECTION.sub(_listed, _TOGETHER.sub(_apart, text))


def _apart(together: re.Match[str]) -> str:
    return "\n".join(f"{together[1]}{name}{together[3].rstrip()}" for name in together[2].split(", ")) + "\n"


def _listed(section: re.Match[str]) -> str:
    items = _ITEM.split(" ".join(section[2].split()))
    lines = [re.sub(r"^([A-Z]\w+(?:, [A-Z]\w+)*): ", r"`\1`: ", item) for item in items]
    return f"\n\n**{section[1]}**\n\n" + "\n".join(f"- {line}" for line in lines) + "\n\n"
