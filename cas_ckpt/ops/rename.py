"""rename: a branch, tag or pin gets another name.

    1. the new name is published, like any ref onto an old commit
    2. the old one is deleted, if it is still as it was read; else the new one is taken back

Invariant: whoever lists refs at any moment sees at least one of the two, so nothing that they
keep is ever without a name. Dying between 1 and 2 leaves both.
"""

from __future__ import annotations

from dataclasses import replace

from cas_ckpt.errors import ConflictError, InvalidInputError, NotFoundError
from cas_ckpt.objects.digest import Digest
from cas_ckpt.ops.branch import take_away
from cas_ckpt.ops.publish import publish_ref
from cas_ckpt.refs import Ref, RefKind, default_author, new_move
from cas_ckpt.repository import RepositoryHandle


def rename_ref(handle: RepositoryHandle, kind: RefKind, old: str, new: str) -> Digest:
    """Let `new` be what `old` was; the commit that it names.

    Raises:
        NotFoundError: no such ref. InvalidInputError: the default branch, or no possible name.
        ConflictError: the new name is taken, or somebody moved the old one at this moment.
    """
    handle.require_writable()
    if kind is RefKind.BRANCH and old == handle.config.default_branch:
        raise InvalidInputError(
            f'{old!r} is the default branch of this repository and stays: repo.branch("{new}") makes another beside it'
        )
    if old == new:
        raise InvalidInputError(f"{old!r} has that name already: choose another name")
    ref = handle.refs.get(kind, old)
    if ref.target is None:
        raise NotFoundError(f"there is no {kind.label} {old!r}")
    move = new_move(None, ref.target, f"renamed from {old}", default_author())
    made = publish_ref(handle, kind, new, ref.target, move=move, note=ref.note, likely=[(kind, old)])
    try:
        take_away(handle, ref, f"renamed to {new}")
    except ConflictError as error:
        _take_back(handle, made)
        raise ConflictError(f"{kind.label} {old!r} moved while it was renamed: rename it again") from error
    if kind is RefKind.BRANCH and handle.head.branch == old:
        handle.head = replace(handle.head, branch=new)
    return ref.target


def _take_back(handle: RepositoryHandle, made: Ref) -> None:
    try:
        take_away(handle, made, "not renamed")
    except ConflictError:
        return  # somebody has built on the new name already: it stays
