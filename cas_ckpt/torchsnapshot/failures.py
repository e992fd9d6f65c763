"""Errors that handlers written for torchsnapshot catch, too: each is also of the class that torchsnapshot raises.

Invariant: all are `CkptError`s.
"""

from __future__ import annotations

from cas_ckpt.errors import BackgroundCommitError, InvalidInputError, NotFoundError


class NotInSnapshotError(NotFoundError, RuntimeError, AssertionError):
    """The snapshot, or the path or key in it, is not there. (RuntimeError and AssertionError: as torchsnapshot.)"""


class NotStatefulError(InvalidInputError, TypeError):
    """A value of an app state has no `state_dict` and `load_state_dict`. (TypeError: as torchsnapshot.)"""


class PendingSnapshotError(BackgroundCommitError, RuntimeError):
    """A snapshot that `async_take` began was not taken; the cause says why. (RuntimeError: as torchsnapshot.)"""
