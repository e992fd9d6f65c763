"""What becomes of the saves of an adapter: whatever one fails of is told, and ends the training only if that is wanted.

Invariant: no error of a save is passed over. Whoever is no error of cas_ckpt, as of a user's `state_dict`, is logged
with its traceback.
"""

from __future__ import annotations

import logging

from cas_ckpt import CkptError, CommitInfo
from cas_ckpt.arguments import OnSaveError, check_choice

_LOGGER = logging.getLogger("cas_ckpt")


class Saves:
    """Base class of adapters, beside that of the framework.

    Attributes:
        last_commit: The commit of the last save that succeeded, or None.
        last_error: What the last save failed of; None if it did not.
    """

    last_commit: CommitInfo | None = None
    last_error: Exception | None = None
    _raise = False

    def _on_error(self, on_save_error: OnSaveError) -> None:
        """Choose what a save that fails does.

        Raises:
            InvalidInputError: neither "warn" nor "raise".
        """
        self._raise = check_choice("on_save_error", on_save_error, OnSaveError) == "raise"

    def _failed(self, error: Exception, what: str) -> None:
        """Raise what a save failed of, or log it after `what`. A `state_dict` may raise anything, on one rank alone."""
        self.last_error = error
        if self._raise:
            raise error
        _LOGGER.error("%s: %s", what, error, exc_info=None if isinstance(error, CkptError) else error)
