"""branch: names that move with commits. Pointing and deleting serve tags and pins as well.

Invariant: a name is a branch or a tag, never both, so that a revision means one thing; a
ref is deleted by one compare-and-swap, so a commit that arrives meanwhile is not lost.
"""

from __future__ import annotations

from dataclasses import replace

from cas_ckpt.errors import ConflictError, InvalidInputError, NotFoundError
from cas_ckpt.objects.digest import Digest
from cas_ckpt.ops.publish import MAX_ATTEMPTS, publish_ref
from cas_ckpt.ops.resolve import Revision, likely_refs, resolve, revision_text
from cas_ckpt.refs import PLACEHOLDER_GENERATION, Ref, RefKind, default_author, new_move
from cas_ckpt.repository import RepositoryHandle


def create_branch(handle: RepositoryHandle, name: str, *, start: Revision = "HEAD", force: bool = False) -> Digest:
    """Make the branch `name` at the revision `start`; the commit that it names now.

    Args:
        force: Move the branch if it exists already.
    Raises:
        ConflictError: it exists, or is a tag. NotFoundError: no such revision.
    """
    return point(handle, RefKind.BRANCH, name, start, force=force)


def point(
    handle: RepositoryHandle, kind: RefKind, name: str, revision: Revision, *, force: bool, note: str | None = None
) -> Digest:
    """Let the branch, tag or pin `name` name the commit `revision`.

    Args:
        note: Message of an annotated tag, reason of a pin; None leaves what there is.
    Raises:
        ConflictError: it exists and `force` is not given, or a branch or tag has the other's name.
        NotFoundError: no such revision. InvalidInputError: no possible name.
    """
    target = resolve(handle, revision)
    move = new_move(None, target, f"{kind.label}: set to {revision_text(revision)}", default_author())
    publish_ref(handle, kind, name, target, move=move, force=force, note=note, likely=likely_refs(handle, revision))
    return target


def delete_branch(handle: RepositoryHandle, name: str) -> Digest:
    """Delete the branch; the commit that it named. The commit itself stays. A head on it is detached.

    Raises:
        NotFoundError: no such branch. InvalidInputError: it is the default branch.
        ConflictError: somebody committed to it at this moment.
    """
    if name == handle.config.default_branch:
        raise InvalidInputError(
            f"{name!r} is the default branch of this repository and stays: "
            f'to let it name another commit, use repo.branch("{name}", start=REF, force=True)'
        )
    deleted = delete_ref(handle, RefKind.BRANCH, name)
    if handle.head.branch == name:
        handle.head = replace(handle.head, branch=None)
    return deleted


def delete_ref(handle: RepositoryHandle, kind: RefKind, name: str) -> Digest:
    """Delete a branch, tag or pin; the commit that it named.

    What stays is an empty record under the name: removing the file could take away a commit
    that another process puts there between our look and our deletion.

    Raises:
        NotFoundError: no such ref. ConflictError: it moved at this moment.
    """
    handle.require_writable()
    ref = handle.refs.get(kind, name)
    if ref.target is None:
        raise NotFoundError(f"there is no {kind.label} {name!r}")
    take_away(handle, ref, "deleted")
    return ref.target


def take_away(handle: RepositoryHandle, ref: Ref, action: str) -> None:
    """Let `ref` name nothing any more, if it still names what it named when it was read.

    Raises:
        ConflictError: it moved.
    """
    move = new_move(ref.target, None, action, default_author())
    for _ in range(MAX_ATTEMPTS):
        try:
            handle.refs.swap(ref, None, generation=PLACEHOLDER_GENERATION, move=move)
            return
        except ConflictError:
            again = handle.refs.get(ref.kind, ref.name)
            if again.target != ref.target:
                raise
            ref = again  # a collection raised its generation: it names the same commit
    raise ConflictError(f"{ref.kind.label} {ref.name!r} was changed {MAX_ATTEMPTS} times by others: try again")
