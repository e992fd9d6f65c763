"""tag: names that stay where they are."""

from __future__ import annotations

from cas_ckpt.objects.digest import Digest
from cas_ckpt.ops.branch import delete_ref, point
from cas_ckpt.refs import RefKind
from cas_ckpt.repository import RepositoryHandle


def create_tag(handle: RepositoryHandle, name: str, revision: str = "HEAD", *, force: bool = False) -> Digest:
    """Let the tag `name` name the commit `revision`; that commit's id.

    Args:
        force: Move the tag if it exists already.
    Raises:
        ConflictError: it exists, or is a branch. NotFoundError: no such revision.
    """
    return point(handle, RefKind.TAG, name, revision, force=force)


def delete_tag(handle: RepositoryHandle, name: str) -> Digest:
    """Delete the tag; the commit that it named. The commit itself stays.

    Raises:
        NotFoundError: no such tag.
    """
    return delete_ref(handle, RefKind.TAG, name)
