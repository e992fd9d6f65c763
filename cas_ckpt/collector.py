"""Keeps Python's cyclic garbage collector out of the way while many small objects are made.

What is built in such a block is a tree without cycles: searching it again and again finds
nothing and costs up to half of the time. Reference counting goes on as always.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """No cyclic collection begins inside the block (in any thread); afterwards all is as before."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
