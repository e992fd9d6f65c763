"""holders: which commits hold the very content that stands under a key.

Invariant: content is compared by id, whatever key it has elsewhere; only commits that some ref
leads to are told of.
"""

from __future__ import annotations

from cas_ckpt.errors import InvalidInputError
from cas_ckpt.objects.digest import Digest
from cas_ckpt.ops.entry import find_object
from cas_ckpt.ops.given_up import given_up
from cas_ckpt.ops.log import start_of_log
from cas_ckpt.ops.merge_base import ancestors, links_of
from cas_ckpt.ops.records import CommitInfo, commit_of, info_from_row
from cas_ckpt.ops.resolve import Revision, resolve
from cas_ckpt.repository import RepositoryHandle


def holders_of(handle: RepositoryHandle, revision: Revision, key: str) -> list[CommitInfo]:
    """The commits that hold what stands under `key` in `revision`, itself included, the youngest first.

    Args:
        key: A tensor, or a container: then the same names with the same content below it.
    Raises:
        NotFoundError: no such revision or key. InvalidInputError: so small that it has no id of its own.
    """
    root = Digest(commit_of(handle, resolve(handle, revision)).root)
    content = find_object(handle, root, key)
    if content is None:
        raise InvalidInputError(
            f"{key} is so small that it stands in its container and has no id of its own: ask for the container, or "
            f"see when it changed with repo.log(keys={key!r})"
        )
    starts = start_of_log(handle, (), all_refs=True)
    reached = ancestors(links_of(handle, starts), starts)
    forgotten = given_up(handle)
    found = [Digest(digest) for digest in handle.index.commits_holding(content) if digest in reached]
    infos = [info_from_row(commit_of(handle, digest), forgotten=digest in forgotten) for digest in found]
    return sorted(infos, key=lambda info: (-info.time_s, info.id))
