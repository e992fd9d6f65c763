"""What can be asked of history, and how its names are changed: lineage, reflog, metrics, pins.

Invariant: nothing is decided here; a method hands its arguments to a function of ops/, which
it imports when it is called, so that reading the log costs neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from cas_ckpt.arguments import reads_arguments
from cas_ckpt.refs import RefKind
from cas_ckpt.repository import RepositoryHandle

if TYPE_CHECKING:
    from cas_ckpt.ops.descent import CommitLineage
    from cas_ckpt.ops.metrics import Ranked
    from cas_ckpt.ops.names import PinInfo
    from cas_ckpt.ops.nearest import NearCommit
    from cas_ckpt.ops.records import CommitInfo
    from cas_ckpt.ops.reflog import RefMove
    from cas_ckpt.ops.resolve import Revision
    from cas_ckpt.ops.unique import Freed


@reads_arguments
class Tracing:
    """The part of `Repository` that follows commits and their names through time; see there."""

    _handle: RepositoryHandle

    # --- where commits come from ----------------------------------------------------------

    def merge_base(self, *refs: Revision) -> list[str]:
        """Ids of the best common ancestors of the first of `refs` with the others; empty if there is none.

        As in git: several, where histories were joined crosswise, and more than two `refs` mean the
        first against a merge of the others.

        Raises:
            InvalidInputError: fewer than two revisions.
        """
        from cas_ckpt.ops.merge_base import merge_bases

        return [digest.hex() for digest in merge_bases(self._handle, refs)]

    def is_ancestor(self, old: Revision, new: Revision) -> bool:
        """Whether the commit `new` leads to the commit `old`."""
        from cas_ckpt.ops.merge_base import is_ancestor

        return is_ancestor(self._handle, old, new)

    def lineage(self, ref: Revision = "HEAD") -> CommitLineage:
        """What the state came from and what came from it, over typed edges and history, transitively."""
        from cas_ckpt.ops.descent import lineage_of

        return lineage_of(self._handle, ref)

    def metrics(
        self,
        ref: Revision | Sequence[Revision] | None = None,
        names: str | Sequence[str] = (),
        *,
        all_refs: bool = False,
        limit: int | None = None,
    ) -> list[CommitInfo]:
        """The commits that `ref` leads to and that have metrics, the youngest first.

        Args:
            names: Only commits that have one of these.
        """
        from cas_ckpt.ops.metrics import metrics_table
        from cas_ckpt.ops.resolve import revision_texts

        revisions = revision_texts(ref)
        wanted = (names,) if isinstance(names, str) else tuple(names)
        return metrics_table(self._handle, revisions, names=wanted, all_refs=all_refs, limit=limit)

    def best(
        self, metric: str, *, largest: bool = False, limit: int = 1, ref: Revision | Sequence[Revision] | None = None
    ) -> list[Ranked]:
        """The `limit` best commits by `metric`: the smallest value first, unless `largest`.

        Args:
            ref: Only commits that this leads to; None: all that a branch, tag or pin leads to. Forgotten
                ones do not count.
        Raises:
            NotFoundError: no commit has this metric.
        """
        from cas_ckpt.ops.metrics import best_commits
        from cas_ckpt.ops.resolve import revision_texts

        revisions = revision_texts(ref)
        return best_commits(self._handle, metric, largest=largest, limit=limit, revisions=revisions)

    # --- what commits have in common ------------------------------------------------------

    def holders(self, ref: Revision, key: str) -> list[CommitInfo]:
        """The commits that hold the very content of the entry `key` of `ref`, the youngest first.

        Raises:
            InvalidInputError: the entry is so small that it has no id of its own.
        """
        from cas_ckpt.ops.holders import holders_of

        return holders_of(self._handle, ref, key)

    def unique(self, name: str = "HEAD") -> Freed:
        """What only this branch, tag or pin leads to: what goes if it is deleted and its log has expired."""
        from cas_ckpt.ops.unique import unique_to

        return unique_to(self._handle, name)

    def freed(self, *refs: Revision) -> Freed:
        """What forgetting these commits would free at the next collection; nothing is changed.

        Those that a branch, tag or pin names would stay: they are listed in `kept`.
        """
        from cas_ckpt.ops.unique import freed_by

        return freed_by(self._handle, refs)

    def nearest(self, what: Revision | Mapping[str, Any] | PathLike[str], *, limit: int = 5) -> list[NearCommit]:
        """The commits that share most bytes with something: where the base of a fine-tune is found.

        Args:
            what: A revision (commits of its own history do not count), a state as for `commit`, or the
                path (a `Path`) of a file or folder as for `import_file`. A sample of it is hashed, nothing is
                written; tensors that are divided over ranks are left out.
        """
        from cas_ckpt.ops.nearest import nearest_to_commit, nearest_to_state

        if isinstance(what, str) or not isinstance(what, (Mapping, PathLike)):
            return nearest_to_commit(self._handle, what, limit=limit)
        if isinstance(what, PathLike):
            from cas_ckpt.training.importing import file_tree

            return nearest_to_state(self._handle, file_tree(what), limit=limit)
        from cas_ckpt.training.verbs import captured

        return nearest_to_state(self._handle, captured(what), limit=limit)

    # --- what happened to names -----------------------------------------------------------

    def reflog(self, ref: str | None = None, *, limit: int | None = None) -> list[RefMove]:
        """The moves of a branch, tag or pin, deleted ones too, the latest first.

        Args:
            ref: Its name; the branch that was checked out, else the default branch, if not given.
        Raises:
            NotFoundError: there never was such a ref.
        """
        from cas_ckpt.ops.reflog import reflog

        return reflog(self._handle, ref, limit=limit)

    def rename_branch(self, old: str, new: str) -> str:
        """Give the branch another name; the id that it names. The default branch stays.

        Raises:
            ConflictError: the new name is taken.
        """
        from cas_ckpt.ops.rename import rename_ref

        return rename_ref(self._handle, RefKind.BRANCH, old, new).hex()

    def rename_tag(self, old: str, new: str) -> str:
        """Give the tag another name; the id that it names.

        Raises:
            ConflictError: the new name is taken.
        """
        from cas_ckpt.ops.rename import rename_ref

        return rename_ref(self._handle, RefKind.TAG, old, new).hex()

    def undelete_branch(self, name: str) -> str:
        """Bring the deleted branch back; the id that it names, as before.

        Raises:
            NotFoundError: there was none, or its commits were collected.
        """
        from cas_ckpt.ops.undelete import undelete_ref

        return undelete_ref(self._handle, RefKind.BRANCH, name).hex()

    def undelete_tag(self, name: str) -> str:
        """Bring the deleted tag back, its message too; the id that it names, as before.

        Raises:
            NotFoundError: there was none, or its commit was collected.
        """
        from cas_ckpt.ops.undelete import undelete_ref

        return undelete_ref(self._handle, RefKind.TAG, name).hex()

    def tag_messages(self) -> dict[str, str]:
        """Name -> message of every annotated tag, by name."""
        from cas_ckpt.ops.tag import tag_messages

        return tag_messages(self._handle)

    # --- pins -----------------------------------------------------------------------------

    def pin(self, ref: Revision = "HEAD", *, name: str | None = None, reason: str = "", force: bool = False) -> PinInfo:
        """Keep the commit, whatever is forgotten, until it is unpinned.

        Args:
            name: "pin-" and the first digits of the id, if not given. Pins have names of their own;
                as a revision, one is written refs/pins/NAME.
            force: Move a pin of that name that exists already.
        Raises:
            ConflictError: there is a pin of that name.
        """
        from cas_ckpt.ops.pin import create_pin

        return create_pin(self._handle, ref, name=name, reason=reason, force=force)

    def unpin(self, name: str) -> str:
        """Take the pin away; the id that it named."""
        from cas_ckpt.ops.pin import delete_pin

        return delete_pin(self._handle, name).hex()

    def undelete_pin(self, name: str) -> str:
        """Bring the pin back; the id that it names, as before.

        Raises:
            NotFoundError: there was none, or its commit was collected.
        """
        from cas_ckpt.ops.undelete import undelete_ref

        return undelete_ref(self._handle, RefKind.PIN, name).hex()

    def pins(self) -> list[PinInfo]:
        """All pins, by name."""
        from cas_ckpt.ops.names import list_pins

        return list_pins(self._handle)
