"""Forgets old commits of a training, for adapters that keep the youngest few.

Invariant: what another branch leads to, or a tag names, is not touched, whatever a limit of this training says.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from cas_ckpt import CommitInfo, InvalidInputError, Repository


def forget_own(repository: Repository, branch: str, old: Sequence[CommitInfo]) -> None:
    """Forget those of `old` that no other branch leads to, and collect garbage; by one rank.

    Args:
        old: Commits of `branch`, the youngest first, each leading to those after it.
    Raises:
        CkptError: see `Repository.forget` and `Repository.gc`.
    """
    own = [commit for commit in old if not commit.forgotten]
    if not own:
        return
    only_here = {commit.id for commit in alone(repository, branch, own[0].id)}
    for commit in own:
        if commit.id in only_here:
            with suppress(InvalidInputError):  # a tag names it
                repository.forget(revisions=commit.id)
    repository.gc()


def alone(repository: Repository, branch: str, commit: str, *, limit: int | None = None) -> list[CommitInfo]:
    """`commit` and those that it leads to, the youngest first, without what another branch than `branch` leads to."""
    others = [f"^refs/heads/{name}" for name in repository.branches() if name != branch]
    return repository.log([commit, *others], limit=limit)
