"""tag: names that stay where they are, with a message or without."""

from __future__ import annotations

from cas_ckpt.objects.digest import Digest
from cas_ckpt.ops.branch import delete_ref, point
from cas_ckpt.ops.resolve import Revision
from cas_ckpt.refs import RefKind, check_note
from cas_ckpt.repository import RepositoryHandle


def create_tag(
    handle: RepositoryHandle, name: str, revision: Revision = "HEAD", *, message: str = "", force: bool = False
) -> Digest:
    """Let the tag `name` name the commit `revision`; that commit's id.

    Args:
        message: What is kept with the tag; it makes it an annotated one.
        force: Move the tag if it exists already; its message goes, too.
    Raises:
        ConflictError: it exists, or is a branch. NotFoundError: no such revision.
    """
    check_note("message of a tag", message)
    return point(handle, RefKind.TAG, name, revision, force=force, note=message)


def delete_tag(handle: RepositoryHandle, name: str) -> Digest:
    """Delete the tag; the commit that it named. The commit itself stays.

    Raises:
        NotFoundError: no such tag.
    """
    return delete_ref(handle, RefKind.TAG, name)


def tag_messages(handle: RepositoryHandle) -> dict[str, str]:
    """Name -> message of every annotated tag, by name."""
    return {ref.name: ref.note for ref in handle.refs.list(RefKind.TAG) if ref.note}
