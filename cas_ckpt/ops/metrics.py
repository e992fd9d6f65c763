"""metrics: what commits say of themselves in numbers, as a table and as a ranking.

Invariant: ranked is what some ref leads to and still has its data; equal values by age.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cas_ckpt.errors import InvalidInputError
from cas_ckpt.objects.digest import Digest
from cas_ckpt.ops.given_up import given_up
from cas_ckpt.ops.log import log_commits, require_metric, start_of_log
from cas_ckpt.ops.merge_base import ancestors, links_of
from cas_ckpt.ops.records import CommitInfo, commit_of, info_from_row
from cas_ckpt.ops.resolve import Revision
from cas_ckpt.repository import RepositoryHandle


@dataclass(frozen=True, slots=True)
class Ranked:
    """A commit and the metric that it was ranked by."""

    commit: CommitInfo
    value: float


def metrics_table(
    handle: RepositoryHandle,
    revisions: Sequence[Revision] = (),
    *,
    names: Sequence[str] = (),
    all_refs: bool = False,
    limit: int | None = None,
) -> list[CommitInfo]:
    """The commits of the log that have metrics (one of `names`, if given), the youngest first.

    Raises:
        NotFoundError: no such revision; no commit at all has one of `names`.
    """
    found: list[CommitInfo] = []
    for commit in log_commits(handle, revisions, all_refs=all_refs):
        if limit is not None and len(found) >= limit:
            break
        if any(name in commit.metrics for name in names) if names else commit.metrics:
            found.append(commit)
    for name in names:
        if not found:
            require_metric(handle, name)
    return found


def best_commits(
    handle: RepositoryHandle,
    metric: str,
    *,
    largest: bool = False,
    limit: int = 1,
    revisions: Sequence[Revision] = (),
) -> list[Ranked]:
    """Up to `limit` commits, the best by `metric` first; forgotten ones do not count.

    Args:
        largest: The largest value is best, not the smallest.
        revisions: Only commits that these lead to; none of them means all branches, tags and pins.
    Raises:
        NotFoundError: no such revision, or no commit has this metric.
    """
    if limit < 0:
        raise InvalidInputError(f"the best {limit} commits: give a number from 0 on")
    starts: list[Digest] = start_of_log(handle, revisions, all_refs=not revisions)
    among = ancestors(links_of(handle, starts), starts) - given_up(handle)
    ranked = handle.index.ranked(metric, largest=largest, among=among, limit=limit)
    if not ranked and limit:
        require_metric(handle, metric)
    return [Ranked(info_from_row(commit_of(handle, Digest(digest))), value) for digest, value in ranked]


def parse_ranking(text: str) -> tuple[str, bool]:
    """(metric, whether the largest is best) of "loss", "loss:min" or "acc:max".

    The smallest is best unless the text says otherwise: nothing is guessed from the name.
    """
    name, colon, end = text.rpartition(":")
    if colon and end in ("min", "max"):
        return name, end == "max"
    return text, False
