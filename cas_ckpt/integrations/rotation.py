"""Forgets old commits of a training, for adapters that keep the youngest few.

Invariant: what another branch leads to, or a tag names, is not touched, whatever a limit of this training says.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from cas_ckpt import CommitInfo, InvalidInputError, Repository


def forget_own(repository: Repository, branch: str, old: Sequence[CommitInfo]) -> None:
    """Forget those of `old`, commits of `branch`, that no other branch leads to, and collect garbage; by one rank.

    Its cost grows with the history of the other branches.

    Raises:
        CkptError: see `Repository.forget` and `Repository.gc`.
    """
    own = [commit for commit in old if not commit.forgotten]
    if not own:
        return
    others = [f"refs/heads/{name}" for name in repository.branches() if name != branch]
    shared = {commit.id for commit in repository.log(others)} if others else set()
    for commit in own:
        if commit.id not in shared:
            with suppress(InvalidInputError):  # a tag names it, or it is the head of a branch
                repository.forget(revisions=commit.id)
    repository.gc()
