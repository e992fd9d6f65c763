"""take back: commits that were forgotten, and are wanted again after all.

    t1  take them out of the records
    t2  look, AFTER that, whether a ref names them, and if none does, whether they are whole
    t3  forget those again that are not

A collection judges by records that it reads after its fence. One that condemns packs after t1 keeps
what such a commit needs, if a ref leads to it; what an earlier one took, or may take, t2 finds
missing or condemned. What a ref names is kept by that ref: it could not be put there otherwise.

Invariant: a commit whose data is gone stays forgotten, for else collections would end at that hole.
"""

from __future__ import annotations

from collections.abc import Collection

from cas_ckpt.config import IDLE, GcState, Generation
from cas_ckpt.errors import NotFoundError
from cas_ckpt.forgotten import remember, write_forgotten
from cas_ckpt.objects.digest import Digest
from cas_ckpt.ops.whole import require_whole
from cas_ckpt.refs import default_author
from cas_ckpt.repository import RepositoryHandle


def take_back(handle: RepositoryHandle, ids: Collection[Digest], *, seen: GcState | None = None) -> None:
    """Let these commits be forgotten no more, but for those whose data is gone.

    Args:
        seen: State of garbage collection that was read before they were forgotten; saves t2 and t3
            if no collection can have taken anything since.
    Raises:
        ConflictError: others write records about them faster than they can be taken out.
        PermissionDeniedError: records may not be deleted here.
    """
    author = default_author()
    wanted = remember(handle.store, ids, author=author)
    if not wanted:
        return
    generation = handle.begin_writing()
    if seen is not None and seen.phase == IDLE and seen.generation == generation:
        return
    unnamed = wanted - {ref.target for ref in handle.refs.list()}
    lost = [digest for digest in unnamed if not _is_whole(handle, digest, generation)]
    if lost:
        write_forgotten(handle.store, lost, author=author)


def _is_whole(handle: RepositoryHandle, commit: Digest, generation: Generation) -> bool:
    try:
        require_whole(handle, commit, generation)
    except NotFoundError:
        return False
    return True
