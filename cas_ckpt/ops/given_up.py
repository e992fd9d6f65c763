"""Forgotten commits, as those who look at history see them.

Invariant: what a ref names directly is not given up, whatever was forgotten. Whether the data of
a forgotten commit is still there is found out by reading it, not here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cas_ckpt.errors import NotFoundError
from cas_ckpt.forgotten import read_forgotten
from cas_ckpt.objects.digest import Digest, short

if TYPE_CHECKING:
    from cas_ckpt.refs import Ref
    from cas_ckpt.repository import RepositoryHandle


def given_up(handle: RepositoryHandle, refs: Sequence[Ref] | None = None) -> frozenset[Digest]:
    """The commits whose data nothing keeps.

    Args:
        refs: All branches, tags and pins; None: read them now, if anything was forgotten.
    """
    forgotten = read_forgotten(handle.store)
    if not forgotten:
        return forgotten
    refs = list(handle.refs.list()) if refs is None else refs
    return forgotten - {ref.target for ref in refs if ref.target is not None}


@contextmanager
def naming_forgotten(handle: RepositoryHandle, *roots: Digest) -> Iterator[None]:
    """Reading of the states `roots`: what is missing of a forgotten commit is said to be forgotten.

    Raises:
        NotFoundError: in place of the one raised inside.
    """
    try:
        yield
    except NotFoundError as error:
        forgotten = given_up(handle)
        for root in roots if forgotten else ():
            commits = handle.index.commits_of_root(root)
            if commits and forgotten.issuperset(commits):
                raise _was_forgotten(commits[0]) from error
        raise


def _was_forgotten(commit: bytes) -> NotFoundError:
    return NotFoundError(
        f"commit {short(commit)} was forgotten, and gc has removed its data; only its record is left: choose another "
        "commit, repo.log() marks the forgotten ones"
    )
