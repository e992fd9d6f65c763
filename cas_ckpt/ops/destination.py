"""Where a commit goes and what it follows: the rules of HEAD.

    1. `settle_destination`, before anything is hashed: which branch, what the state came from, and whether
       the branch may be begun. Whoever publishes settles (rank 0), the others are told the branch.
    2. `Destination.parents`, in publish.py, for every head that the branch is found at.

Invariant: the commit that a state came from is a parent of its commit, or stands in its lineage. A
history begins only where nothing came before, or where somebody says that it does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from cas_ckpt.errors import ConflictError, NotFoundError
from cas_ckpt.objects.digest import Digest, short
from cas_ckpt.ops.merge_base import ancestors, links_of
from cas_ckpt.refs import RefKind
from cas_ckpt.repository import RepositoryHandle

CONTINUED_FROM = "continued-from"
"""Kind of the lineage that names what a state came from when others committed to its branch meanwhile."""

Precedes = Callable[[Digest, Digest], bool]
"""Whether the second commit leads to the first."""


_RIVALS = {RefKind.BRANCH: RefKind.TAG, RefKind.TAG: RefKind.BRANCH}
"""Kinds that share their names. Pins have names of their own, as no revision means a pin."""


class AnyHead(Enum):
    """The type of `ANY_HEAD`."""

    ANY = "any"


ANY_HEAD = AnyHead.ANY
"""Says that a commit may go on top of whatever head it finds."""


@dataclass(frozen=True, slots=True)
class Destination:
    """The branch that a commit goes to, and what is known of its state.

    Attributes:
        expected: The head that the branch must have (None: none yet), or `ANY_HEAD`.
        origin: The commit that the state came from; None: not known, the commit follows the branch.
        attached: The state came from this very branch: where others have committed to it since, the
            commit goes on top of theirs, and its lineage names `origin`.
        declared: The caller names `origin` as a further parent, or in the lineage.
        may_begin: The branch may be begun if it has no commit.
    """

    branch: str
    expected: Digest | None | AnyHead = ANY_HEAD
    origin: Digest | None = None
    attached: bool = False
    declared: bool = False
    may_begin: bool = True

    def parents(
        self, head: Digest | None, others: Sequence[Digest], precedes: Precedes
    ) -> tuple[tuple[Digest, ...], Digest | None]:
        """Parents of the commit if `head` is the branch's, and what its lineage has to name besides.

        Args:
            head: What the branch names; None: nothing.
            others: Parents that the caller gave.
        Raises:
            ConflictError: the branch is not where it must be, or leads to what the state does not come from.
        """
        if not isinstance(self.expected, AnyHead) and head != self.expected:
            raise ConflictError(
                f"branch {self.branch!r} moved: it is at {_shown(head)}, this commit was to follow "
                f"{_shown(self.expected)}: look at it, then check it out or commit again"
            )
        if head is None and not self.may_begin:
            raise ConflictError(f"branch {self.branch!r} was deleted while this commit was made: commit again")
        if self.origin is None or head == self.origin:
            return _joined(head, others), None
        if head is None:
            return _joined(self.origin, others), None
        if self.declared:
            return _joined(head, others), None
        if self.attached:
            return _joined(head, others), self.origin
        if precedes(head, self.origin):
            return _joined(self.origin, others), None
        raise ConflictError(
            f"branch {self.branch!r} is at {short(head)}, but this state came from {short(self.origin)}, which does "
            f'not follow it: commit to a new branch (branch="NAME"), move this one back first '
            f'(repo.branch("{self.branch}", start="{short(self.origin)}", force=True)), or say that this commit joins '
            f'both (parents=["{short(self.origin)}"])'
        )


def branch_target(handle: RepositoryHandle, branch: str) -> Digest | None:
    """The commit that the branch names; None if it names none, or is not there."""
    try:
        return handle.refs.get(RefKind.BRANCH, branch).target
    except NotFoundError:
        return None


def check_free(handle: RepositoryHandle, kind: RefKind, name: str) -> None:
    """Refuse a name that a branch has for a tag, and the other way: a revision must mean one thing."""
    other = _RIVALS.get(kind)
    if other is None:
        return
    try:
        taken = handle.refs.get(other, name).target is not None
    except NotFoundError:
        return
    if taken:
        raise ConflictError(f"{name!r} is a {other.label} already, and names are used once: choose another name")


def precedence(handle: RepositoryHandle) -> Precedes:
    """Answers from the commit graph, brought up to date where it lacks something."""

    def precedes(old: Digest, new: Digest) -> bool:
        return old in ancestors(links_of(handle, [new]), [new])

    return precedes


def _joined(first: Digest | None, others: Sequence[Digest]) -> tuple[Digest, ...]:
    return tuple(dict.fromkeys((first, *others) if first else others))


def _shown(head: Digest | AnyHead | None) -> str:
    return short(head) if isinstance(head, bytes) else "no commit"
