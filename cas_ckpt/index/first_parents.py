"""A line of first parents: how whoever reads a log asks for it, and whether it is all of the log that was asked for.

Both readers of logs use it (`history.py`, over SQLAlchemy, and `log_reader.py`, without), so this imports neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LINE = """
    WITH RECURSIVE line(object_id, digest, parent, place) AS (
        SELECT c.object_id, o.digest, c.first_parent, 1 FROM t_objects o CROSS JOIN t_commits c
        WHERE o.digest = :start AND c.object_id = o.object_id
        UNION ALL
        SELECT c.object_id, o.digest, c.first_parent, l.place + 1
        FROM line l CROSS JOIN t_objects o CROSS JOIN t_commits c
        WHERE l.place < :most AND o.digest = l.parent AND c.object_id = o.object_id
    )
    SELECT l.object_id, l.digest, l.parent,
           EXISTS (SELECT 1 FROM t_more_parents m WHERE m.object_id = l.object_id) FROM line l ORDER BY l.place
"""
"""The commit `start`, its first parent and so on, at most `most`: number, id, first parent, whether it has more
parents. The cost follows `most`, not the repository."""


def line_as_log(
    line: Sequence[Sequence[Any]], *, most: int, first_parent: bool, whole: bool
) -> list[tuple[int, bytes]] | None:
    """Numbers and ids of the first `most` commits of a log, as far as they are one line; None: they are not.

    Up to a merge, only one commit may come next.

    Args:
        line: Rows of `LINE`, asked for with the same `most`.
        first_parent: The log follows only the first parent of merges.
        whole: A parent that the index does not know is not the end of the log.
    """
    if not line or (not first_parent and any(merge for *_, merge in line[:-1])):
        return None
    _, _, parent, merge = line[-1]
    if len(line) < most and (parent is not None and (whole or merge)):
        return None  # an unknown parent, or the way goes on behind a merge: whoever reads all knows what to do
    return [(number, bytes(digest)) for number, digest, *_ in line]
