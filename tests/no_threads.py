"""A machine that has no more threads to give."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def no_thread_can_be_started(name: str) -> Iterator[None]:
    """Inside, threads of this name cannot be started; others can."""
    start = threading.Thread.start

    def fails(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(threading.Thread, "start", fails)
        yield
