"""The kinds of stored objects, with the numbers that stand in packs and in the index."""

from __future__ import annotations

from enum import IntEnum


class ObjectKind(IntEnum):
    """What an entry of a pack is. `CHUNK` is data; everything else is a structured object."""

    CHUNK = 1
    TENSOR = 2
    CHUNK_PAGE = 3
    TREE = 4
    TREE_PAGE = 5
    LAYOUT = 6
    COMMIT = 7

    @property
    def label(self) -> str:
        """The name that heads the object's bytes and enters its id."""
        return self.name.lower().replace("_", "-")
