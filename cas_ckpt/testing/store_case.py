"""What every group of store checks shares: a store, a second handle, keys of its own.

Invariant: checks use keys under `prefix` only, so that they can run on a bucket in use.
"""

from __future__ import annotations

import random
import secrets
from functools import cached_property

from cas_ckpt.storage.store import Store


class StoreCase:
    """Override `store`, and `reopened` where a second handle can see the same values."""

    num_listed = 1001
    """Keys made to see a listing whole: above the page of the usual object stores."""

    def store(self) -> Store:
        """The store under test; called once per check."""
        raise NotImplementedError("a conformance test overrides store()")

    def reopened(self, store: Store) -> Store:
        """Another handle on the values of `store`, as another process would have."""
        return store

    @cached_property
    def prefix(self) -> str:
        """Where this check keeps its keys; nobody else's are there."""
        return f"conformance/{secrets.token_hex(8)}/"

    def key(self, name: str = "value") -> str:
        """A key of this check."""
        return self.prefix + name


def noise(num_bytes: int, *, seed: int = 0) -> bytes:
    """Reproducible bytes in which no run repeats, so that a wrong offset shows."""
    return random.Random(seed).randbytes(num_bytes)


BAD_KEYS = (
    "", "/", "/a", "a/", "a//b", ".", "..", "a/..", "../a", "a/../b", "./a", "a/./b", "a\\b", "a b", "a\0b", "a\nb",
    "ä", "a:b", "~a", "a*", "%2e%2e/a", "tmp", "tmp/a", "a" * 256, "/".join(["a" * 200] * 6),
)  # fmt: skip
"""Keys that every store refuses: path tricks, control characters, over-long, reserved."""

BAD_PREFIXES = ("/", "//", "a//", "../", "a/../", "a b", "a\0", "tmp/", "ä", "*")
"""Prefixes that no key has."""
