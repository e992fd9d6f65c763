"""merge-base: where the histories of some commits meet.

Invariant: the answer is exact on any graph: every common ancestor from which no other common
ancestor can be reached. A commit is its own ancestor, as in git.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cas_ckpt.errors import InvalidInputError, NotFoundError
from cas_ckpt.index.graph import CommitLinks
from cas_ckpt.objects.digest import Digest
from cas_ckpt.ops.resolve import Revision, resolve
from cas_ckpt.repository import RepositoryHandle


def merge_bases(handle: RepositoryHandle, revisions: Sequence[Revision]) -> list[Digest]:
    """The best common ancestors of the first revision with the others together, by id.

    As in git, several others count as if they were merged: what is common to the first and any of them.

    Raises:
        InvalidInputError: fewer than two revisions. NotFoundError: one that is not there.
    """
    if len(revisions) < 2:
        raise InvalidInputError(f"a merge base of {len(revisions)} commits: give two revisions or more")
    first, *others = (resolve(handle, revision) for revision in revisions)
    links = links_of(handle, [first, *others])
    return best_common(links, first, others)


def is_ancestor(handle: RepositoryHandle, old: Revision, new: Revision) -> bool:
    """Whether `new` leads to `old`; a commit leads to itself."""
    first, last = resolve(handle, old), resolve(handle, new)
    return first in ancestors(links_of(handle, [last]), [last])


def best_common(links: Mapping[bytes, CommitLinks], first: bytes, others: Iterable[bytes]) -> list[Digest]:
    """The common ancestors of `first` and any of `others` that no other common ancestor leads to."""
    common = ancestors(links, [first]) & ancestors(links, others)
    # Whatever a common ancestor leads to is common too, so one step is enough to know the worse ones.
    worse = {parent for digest in common for parent in links[digest].parents}
    return [Digest(digest) for digest in sorted(common - worse)]


def ancestors(links: Mapping[bytes, CommitLinks], starts: Iterable[bytes]) -> set[bytes]:
    """`starts` and all that they lead to, as far as it is known."""
    found = {start for start in starts if start in links}
    todo = list(found)
    while todo:
        for parent in links[todo.pop()].parents:
            if parent not in found and parent in links:
                found.add(parent)
                todo.append(parent)
    return found


def links_of(handle: RepositoryHandle, starts: Sequence[bytes]) -> Mapping[bytes, CommitLinks]:
    """The commit graph, brought up to date if it lacks one of `starts` or something behind it.

    Raises:
        NotFoundError: one of `starts` is in no pack.
    """
    links = handle.index.commit_links()
    reached = ancestors(links, starts)
    if not reached.issuperset(starts) or not all(parent in reached for one in reached for parent in links[one].parents):
        handle.sync()
        links = handle.index.commit_links()
    for start in starts:
        if start not in links:
            raise NotFoundError(f"commit {start.hex()} is in no pack: run repo.fsck()")
    return links
