"""States as the index knows them: for verbs that list, compare and find, and need no byte of what is stored.

    known_commit   the commit by its row; known_root: only which state it is of
    ask            a question about states, put to an index that is brought up to date first if it lacks rows

Invariant: an answer is whole, or an error. What is missing in an index that agrees with the store is in no pack, which
is said as it is when nodes are read, or the index is damaged. Nothing is verified against its id here: whoever brings
bytes into memory or into files reads nodes (tree.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import commit_of
from cas_ckpt.core.tree import naming_forgotten, python_gc_paused
from cas_ckpt.errors import CorruptionError, NotFoundError
from cas_ckpt.index import history
from cas_ckpt.index.rows import CommitRow
from cas_ckpt.index.trees import RowsMissingError
from cas_ckpt.objects.digest import Digest, ObjectKind, short

T = TypeVar("T")


def known_commit(handle: RepositoryHandle, digest: Digest) -> CommitRow:
    """The commit's row, as the index has it.

    Raises:
        NotFoundError: no such commit. CorruptionError: it may be in a pack that is damaged.
    """
    row = handle.index.read(history.read_commit, digest)
    if row is None:
        try:
            # Brings a commit that another process made, or says what is damaged.
            places = handle.locate([digest], here=True)[digest]
        except NotFoundError as error:
            raise NotFoundError(f"there is no commit {short(digest)} here: {error}") from error
        row = handle.index.read(history.read_commit, digest)
        if row is None and places[0].kind == ObjectKind.COMMIT:
            row = commit_of(handle, digest)  # hints told where it is: the index knows nothing of it yet
    if row is None:
        raise NotFoundError(f"{short(digest)} is not a commit: see repo.log()")
    return row


def known_root(handle: RepositoryHandle, digest: Digest) -> Digest:
    """The state of the commit; errors as for `known_commit`."""
    root = handle.index.read(history.read_root, digest)
    return Digest(known_commit(handle, digest).root if root is None else root)


def ask(handle: RepositoryHandle, question: Callable[..., T], *roots: Digest, **how: object) -> T:
    """The answer of the index to a question about the states `roots`, or one of its arguments about many.

    Args:
        question: A function over a connection, the roots, and `how`.
    Raises:
        NotFoundError: a node is in no pack; says so if its commit was forgotten.
        CorruptionError: a pack, or the index, is damaged.
    """
    with naming_forgotten(handle, *roots), python_gc_paused():
        try:
            return handle.index.read(question, *roots, **how)
        except RowsMissingError as error:
            missing = error
        while handle.bring(list(map(Digest, missing.digests))):
            try:
                return handle.index.read(question, *roots, **how)
            except RowsMissingError as error:
                missing = error
        handle.sync()
        while True:
            try:
                return handle.index.read(question, *roots, **how)
            except RowsMissingError as error:
                # Says what is in no pack, or in none that is intact; or brings a level of a tree from a tier.
                before = handle.elsewhere.num_packs
                for digest, places in handle.locate(list(map(Digest, error.digests))).items():
                    if places[0].kind not in (ObjectKind.TREE, ObjectKind.TREE_PAGE):
                        raise CorruptionError(
                            f"{short(digest)} is not a tree, and a tree names it as one of its containers or pages: "
                            "restore an older commit"
                        ) from error
                if handle.elsewhere.num_packs == before:
                    raise
