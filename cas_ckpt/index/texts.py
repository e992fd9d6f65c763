"""Text that a database can hold."""

from __future__ import annotations


def storable(text: str) -> str:
    """`text` without what no database takes (NUL, lone surrogates), each shown as U+FFFD."""
    if "\0" not in text and text.isascii():
        return text
    return text.replace("\0", "\ufffd").encode("utf-8", "surrogatepass").decode("utf-8", "replace")
