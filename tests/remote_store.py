"""A store in memory that says it is far away, and counts what it is asked."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator

from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.storage.store import Abilities, ListedVersion, Store
from tests.wrapped_stores import CountingStore

WRITER_CALLS = ("write", "commit")
"""What is asked of writers, which make one request of all."""


class RemoteStore(CountingStore):
    """Any number of these around one store are the clients of one bucket."""

    def __init__(self, inner: Store | None = None, *, parallel: int = 8) -> None:
        super().__init__(MemoryStore(url="s3://bucket/llm") if inner is None else inner)
        self._parallel = parallel

    @property
    def abilities(self) -> Abilities:
        return dataclasses.replace(self.inner.abilities, local=False, parallel=self._parallel)

    def list_versions(self, prefix: str) -> Iterator[ListedVersion]:
        """One request: key, size and version tag of every key with this prefix."""
        self.count("list_versions")
        found = [(key, size) for key, size in self.inner.list(prefix)]
        return iter([ListedVersion(key, size, hashlib.md5(self.inner.get(key)).hexdigest()) for key, size in found])

    @property
    def requests(self) -> int:
        """How many there were since the last `reset`."""
        return self.num_calls - sum(self.tally(each).calls for each in WRITER_CALLS)

    @property
    def asked(self) -> dict[str, int]:
        """How many there were, by their names."""
        return {name: tally.calls for name, tally in sorted(self._tallies.items()) if name not in WRITER_CALLS}
