"""The hook that every optimizer of torch calls before it steps: it waits for what is not staged yet.

    1. `hold_steps(wait)`: from now on every step of every optimizer of this process calls `wait` first.
    2. `let_steps(wait)`: no more.

Invariant: the hook raises nothing of ours: a commit that fails is reported by the commit, and the step is made.
(What is raised into the waiting thread, such as KeyboardInterrupt, passes, and the step is not made.)

The hook is registered at the first use and stays: torch walks through its hooks without a lock, so taking one away
while another thread steps would break that step. While nothing is held it costs a look at an empty dict.
Must not know commits.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

from torch.optim.optimizer import register_optimizer_step_pre_hook

Wait: TypeAlias = Callable[[], None]
"""Returns when an optimizer may change its parameters and its state; called in the thread that steps."""

_LOGGER = logging.getLogger("cas_ckpt")

_held: dict[Wait, None] = {}
_registering = threading.Lock()
_is_registered = False


def hold_steps(wait: Wait) -> None:
    """Have `wait` called before every step, until `let_steps`. From any thread."""
    global _is_registered
    _held[wait] = None
    with _registering:
        if not _is_registered:
            register_optimizer_step_pre_hook(_before_step)
            _is_registered = True


def let_steps(wait: Wait) -> None:
    """Have `wait` called no more. From any thread, idempotent."""
    _held.pop(wait, None)


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if _held:
        for wait in list(_held):
            try:
                wait()
            except Exception:
                _LOGGER.exception("waiting for a commit before a step of an optimizer failed: the step is made")


def _forget() -> None:
    """In a forked child: the threads that would end the waiting are not there, and its memory is its own."""
    global _registering
    _held.clear()
    _registering = threading.Lock()


os.register_at_fork(after_in_child=_forget)
