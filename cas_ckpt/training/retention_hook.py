"""RetentionHook: a training loop's own housekeeping, so that no cron job is needed.

Invariant: training goes on whatever happens here. A failure is logged and remembered; it is
raised only if that was asked for. One rank works, the others return at once; nothing is collective.
"""

from __future__ import annotations

import logging
import sys
from typing import Protocol

from cas_ckpt.errors import InvalidInputError
from cas_ckpt.ops.retention.forget import ForgetReport

_LOGGER = logging.getLogger("cas_ckpt")


class KeepsPolicy(Protocol):
    """Methods of a `Repository` that the hook needs."""

    def apply_policy(self, *, dry_run: bool = False, gc: bool = False) -> ForgetReport:
        """Forget what the policy of the repository does not keep."""
        ...


class RetentionHook:
    """Applies the policy of a repository after every so many calls, on rank 0.

        hook = RetentionHook(repo, every_commits=20)
        for step, batch in enumerate(batches):
            ...
            if step % 500 == 0:
                repo.commit(state, step=step)
                hook()                              # on all ranks, or on one

    Attributes:
        last_report: What the last run did, or None.
        last_error: Why the last run failed; None if it did not.
    """

    def __init__(
        self,
        repo: KeepsPolicy,
        *,
        every_commits: int = 20,
        gc: bool = True,
        raise_errors: bool = False,
        rank: int | None = None,
    ) -> None:
        """Prepare; nothing runs before the first call.

        Args:
            every_commits: Run at each N-th call.
            gc: Collect garbage as well, so that space is given back.
            raise_errors: Let errors of the repository through instead of logging them.
            rank: The rank of this process; None: as torch.distributed says, or 0. Only rank 0 works.
        """
        if type(every_commits) is not int or every_commits < 1:
            raise InvalidInputError(f"every_commits is {every_commits!r}: wanted a number from 1 on")
        self._repo = repo
        self._every = every_commits
        self._gc = gc
        self._raise = raise_errors
        self._rank = rank
        self._calls = 0
        self.last_report: ForgetReport | None = None
        self.last_error: Exception | None = None

    def __call__(self, *_: object) -> ForgetReport | None:
        """To be called after each commit (what it is called with is passed over, so it fits as a callback).

        Returns the report if the policy was applied by this call, else None.

        Raises:
            Exception: it failed, and `raise_errors` was given.
        """
        if (_own_rank() if self._rank is None else self._rank) != 0:
            return None
        self._calls += 1
        return self.run() if self._calls % self._every == 0 else None

    def run(self) -> ForgetReport | None:
        """Apply the policy now; errors as for a call."""
        self.last_error = None
        try:
            self.last_report = self._repo.apply_policy(gc=self._gc)
        except Exception as error:  # whatever it is, a run of weeks must not end by it
            self.last_error = error
            if self._raise:
                raise
            _LOGGER.warning("the retention policy was not applied, training goes on: %s", error, exc_info=error)
            return None
        _LOGGER.info("retention: %d commits forgotten", len(self.last_report.forgotten))
        return self.last_report


def _own_rank() -> int:
    """This process's rank; 0 where torch.distributed is not in use. Torch is not imported for it."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 0
    return int(distributed.get_rank())
