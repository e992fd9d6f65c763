"""reflog: where a ref pointed, and who moved it.

A ref's own record remembers the moves that history does not tell (made, forced, deleted, brought
back); commits on top of the head are told by first parents. Both are put together here.

Invariant: only what a ref led to is told: a commit that was made and never published is in no
answer. Older moves than the record remembers end the answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from cas_ckpt.config import require_there
from cas_ckpt.errors import InvalidInputError, NotFoundError
from cas_ckpt.objects.digest import Digest
from cas_ckpt.ops.records import history
from cas_ckpt.ops.resolve import HEAD_NAMES, current_branch
from cas_ckpt.refs import MAX_LOG, Move, Ref, RefKind
from cas_ckpt.repository import RepositoryHandle


@dataclass(frozen=True, slots=True)
class RefMove:
    """One move of a ref; ids are hexadecimal.

    Attributes:
        old, new: What it named before and after; None: nothing.
        action: "commit: ..." or what was done to the ref.
    """

    time_s: float
    old: str | None
    new: str | None
    action: str
    author: str


def reflog(handle: RepositoryHandle, name: str | None = None, *, limit: int | None = None) -> list[RefMove]:
    """The moves of a branch, tag or pin, deleted ones too, the latest first.

    Args:
        name: A branch, else a tag, else a pin, or a whole name such as refs/tags/v1; None: the branch that was
            checked out, else the default branch.
    Raises:
        NotFoundError: there never was such a ref.
    """
    if limit is not None and limit < 0:
        raise InvalidInputError(f"{limit} moves: give a number from 0 on")
    ref = _ref(handle, current_branch(handle) if name in (None, *HEAD_NAMES) else str(name))
    return list(islice(_moves(handle, ref), limit))


def _ref(handle: RepositoryHandle, name: str) -> Ref:
    kinds = [kind for kind in RefKind if name.startswith(kind.value)]
    plain = name.removeprefix(kinds[0].value) if kinds else name
    found = []
    for kind in kinds or RefKind:
        try:
            found.append(handle.refs.get(kind, plain))
        except NotFoundError:
            continue
    if not found:
        require_there(handle.store)
        raise NotFoundError(f"there never was a branch, tag or pin {name!r}: repo.branches() tells what there is")
    return next((ref for ref in found if ref.target is not None), found[0])


def _moves(handle: RepositoryHandle, ref: Ref) -> Iterator[RefMove]:
    """The moves of `ref`, latest first: between two logged ones, the commits that lead from one to the other."""
    head = ref.target
    for move in reversed(ref.log):
        if head is not None and head != move.new:
            yield from _commits(handle, head, move.new)
        yield _told(move)
        head = move.old
    if head is not None and len(ref.log) < MAX_LOG:
        yield from _commits(handle, head, None)


def _commits(handle: RepositoryHandle, head: Digest, stop: Digest | None) -> Iterator[RefMove]:
    """The commits from `head` back to `stop`, by first parents."""
    try:
        rows = history(handle, [head], first_parent=True)
    except NotFoundError:
        return  # collected: what led to it is not known any more
    for row in rows:
        if row.digest == stop:
            return
        subject = row.message.split("\n", 1)[0].rstrip()
        old = row.parents[0].hex() if row.parents else None
        action = f"commit: {subject}" if subject else "commit"
        yield RefMove(row.time_us / 1e6, old, row.digest.hex(), action, row.author)


def _told(move: Move) -> RefMove:
    old, new = (None if digest is None else digest.hex() for digest in (move.old, move.new))
    return RefMove(move.time_us / 1e6, old, new, move.action, move.author)
