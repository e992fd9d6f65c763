"""Forgotten commits, as those who look at history see them.

Invariant: what a ref names directly is not given up, whatever was forgotten. Whether the data of
a forgotten commit is still there is found out by reading it, not here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cas_ckpt.errors import NotFoundError
from cas_ckpt.forgotten import read_forgotten
from cas_ckpt.objects.digest import Digest, short
from cas_ckpt.ops.names import every_ref
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
    refs = every_ref(handle) if refs is None else refs
    return forgotten - {ref.target for ref in refs if ref.target is not None}


@contextmanager
def naming_forgotten(handle: RepositoryHandle, root: Digest) -> Iterator[None]:
    """Reading of the state `root`: what is missing of a forgotten commit is said to be forgotten.

    Raises:
        NotFoundError: in place of the one raised inside.
    """
    try:
        yield
    except NotFoundError as error:
        forgotten = read_forgotten(handle.store)
        commits = handle.index.commits_of_root(root) if forgotten else []
        if commits and forgotten.issuperset(commits):
            raise NotFoundError(
                f"commit {short(commits[0])} was forgotten and its data is gone, only its record is left: "
                "choose another commit (cas-ckpt log marks the forgotten ones)"
            ) from error
        raise
