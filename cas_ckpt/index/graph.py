"""The commit graph as a whole: what each commit follows and which objects it stands for.

Invariant: one row a commit that stands in a known pack, so that memory is that of the commits,
not of what they hold. Knows nothing of refs or of which commits are wanted.
"""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Connection, select

from cas_ckpt.index.schema import COMMITS, MORE_PARENTS


class CommitLinks(NamedTuple):
    """What one commit names: its tree, its layout node (if any) and its parents, the first one first."""

    root: bytes
    layout: bytes | None
    parents: tuple[bytes, ...]


def read_links(connection: Connection) -> dict[bytes, CommitLinks]:
    """Commit -> what it names, for every commit that the index knows."""
    more: dict[int, list[bytes]] = {}
    query = select(MORE_PARENTS).order_by(MORE_PARENTS.c.object_id, MORE_PARENTS.c.position)
    for row in connection.execute(query):
        more.setdefault(row.object_id, []).append(row.parent)
    c = COMMITS.c
    rows = connection.execute(select(c.object_id, c.digest, c.root, c.layout, c.first_parent))
    return {
        digest: CommitLinks(root, layout, () if first is None else (first, *more.get(number, ())))
        for number, digest, root, layout, first in rows
    }
