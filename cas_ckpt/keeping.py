"""What decides which commits keep their data: forgetting, and the policy of the repository.

Invariant: as in browsing.py, nothing is decided here; imports are made when a method is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cas_ckpt.arguments import reads_arguments
from cas_ckpt.progress import Progress, shown
from cas_ckpt.repository import RepositoryHandle

if TYPE_CHECKING:
    from cas_ckpt.ops.forget import ForgetReport
    from cas_ckpt.ops.resolve import Revision
    from cas_ckpt.ops.retention_policy import Policy, Retention


@reads_arguments
class Keeping:
    """The part of `Repository` that forgets commits; see there."""

    _handle: RepositoryHandle

    def forget(
        self,
        policy: Policy | None = None,
        *,
        revisions: Sequence[Revision] = (),
        branches: Sequence[str] = (),
        dry_run: bool = False,
        gc: bool = False,
        progress: Progress | bool = False,
    ) -> ForgetReport:
        """Forget commits: what no rule of `policy` keeps, or those that `revisions` name.

        A forgotten commit stays in the log; its data is deleted by the next garbage collection,
        unless another commit has it too. Heads of branches, tags and pins are never forgotten. In a
        distributed job call it on one rank.

        Args:
            policy: E.g. `Policy(keep_last=3, keep_daily=7, keep_best="loss:3")`.
            branches: Patterns: apply the rules to these branches alone.
            dry_run: Write nothing; the report says what would be forgotten, and why the rest is kept.
            gc: Collect garbage afterwards.
            progress: Of that collection.
        Raises:
            InvalidInputError: neither rules nor revisions, both, or a revision that a ref names.
            ConflictError: refs were made faster than they could be looked at: try again.
        """
        from cas_ckpt.ops.forget import forget

        return forget(
            self._handle, policy, revisions=revisions, branches=branches, dry_run=dry_run, gc=gc,
            progress=shown(progress),
        )  # fmt: skip

    def apply_policy(
        self, *, branches: Sequence[str] = (), dry_run: bool = False, gc: bool = False,
        progress: Progress | bool = False,
    ) -> ForgetReport:  # fmt: skip
        """Forget what the policy of the repository does not keep; arguments and errors as for `forget`.

        Raises:
            InvalidInputError: the repository has no policy.
        """
        from cas_ckpt.ops.forget import apply_policy

        return apply_policy(self._handle, branches=branches, dry_run=dry_run, gc=gc, progress=shown(progress))

    def policy(self) -> Retention:
        """The rules that the repository carries, for all branches and by pattern; maybe none."""
        from cas_ckpt.ops.policy import read_policy

        return read_policy(self._handle.store)

    def set_policy(self, policy: Policy, *, branch: str | None = None) -> Retention:
        """Let `policy` be the rules of all branches, or of those that match the pattern `branch`; all rules.

        Raises:
            InvalidInputError: a policy without rules.
        """
        from cas_ckpt.ops.policy import set_policy

        return set_policy(self._handle, policy, branch=branch)

    def clear_policy(self, *, branch: str | None = None) -> Retention:
        """Take all rules away, or those for the pattern `branch`; what is left.

        Raises:
            NotFoundError: there are none to take away.
        """
        from cas_ckpt.ops.policy import clear_policy

        return clear_policy(self._handle, branch=branch)
