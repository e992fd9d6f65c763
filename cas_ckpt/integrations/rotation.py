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
    others = [f"^refs/heads/{name}" for name in repository.branches() if name != branch]
    alone = {commit.id for commit in repository.log([own[0].id, *others])}  # what no other branch leads to
    for commit in own:
        if commit.id in alone:
            with suppress(InvalidInputError):  # a tag names it
                repository.forget(revisions=commit.id)
    repository.gc()
