"""undelete: a branch, tag or pin that was deleted names again what it named last.

Invariant: the ref's own log is believed, and the commit must still be whole: nothing is brought
back that garbage collection has taken a part of.
"""

from __future__ import annotations

from cas_ckpt.errors import ConflictError, NotFoundError
from cas_ckpt.objects.digest import Digest
from cas_ckpt.ops.publish import publish_ref
from cas_ckpt.refs import RefKind, default_author, new_move
from cas_ckpt.repository import RepositoryHandle


def undelete_ref(handle: RepositoryHandle, kind: RefKind, name: str) -> Digest:
    """Let `name` be again what it was when it was deleted; the commit that it names.

    Raises:
        NotFoundError: there was no such ref, or its commit was collected meanwhile.
        ConflictError: it is there, or the name was given to another kind of ref.
    """
    handle.require_writable()
    ref = handle.refs.get(kind, name)
    if ref.target is not None:
        raise ConflictError(f"the {kind.label} {name!r} is there: nothing is to be brought back")
    last = next((move.old for move in reversed(ref.log) if move.new is None and move.old is not None), None)
    if last is None:
        raise NotFoundError(f"the {kind.label} {name!r} never named a commit: nothing can be brought back")
    try:
        publish_ref(handle, kind, name, last, move=new_move(None, last, "undeleted", default_author()))
    except NotFoundError as error:
        raise NotFoundError(f"the {kind.label} {name!r} cannot be brought back: {error}") from error
    return last
