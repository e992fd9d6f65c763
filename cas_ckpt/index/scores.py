"""Metrics over all commits: which there are, and which commits are best by one of them.

Invariant: equal values are in order of age, the oldest first, so that an answer is always the
same. Knows nothing of refs: the caller says which commits count.
"""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Connection, select

from cas_ckpt.index.schema import COMMITS, METRICS


def metric_names(connection: Connection) -> list[str]:
    """The names of all metrics, sorted."""
    return sorted(connection.execute(select(METRICS.c.name).distinct()).scalars())


def ranked(
    connection: Connection, name: str, *, largest: bool, among: Collection[bytes], limit: int
) -> list[tuple[bytes, float]]:
    """Up to `limit` commits of `among` and their value of the metric `name`, the best first."""
    best = METRICS.c.value.desc() if largest else METRICS.c.value.asc()
    query = (
        select(COMMITS.c.digest, METRICS.c.value)
        .join(COMMITS, COMMITS.c.object_id == METRICS.c.object_id)
        .where(METRICS.c.name == name)
        .order_by(best, COMMITS.c.time_us, COMMITS.c.object_id)
    )
    wanted = among if isinstance(among, (set, frozenset)) else set(among)
    found: list[tuple[bytes, float]] = []
    for digest, value in connection.execute(query):
        if len(found) >= limit:
            break
        if digest in wanted:
            found.append((digest, value))
    return found


def commits_of_root(connection: Connection, root: bytes) -> list[bytes]:
    """The ids of all commits of the tree `root`, the oldest row first."""
    query = select(COMMITS.c.digest).where(COMMITS.c.root == root).order_by(COMMITS.c.object_id)
    return list(connection.execute(query).scalars())
