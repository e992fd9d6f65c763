"""`Measuring`: what `Index` answers about bytes: how many there are, and for whom.

Invariant: as of `Index`: typed errors alone, safe to call from any thread. Knows nothing of the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from cas_ckpt.index.trouble import decoding

if TYPE_CHECKING:
    from cas_ckpt.index.database import Database
    from cas_ckpt.index.history import CommitSize
    from cas_ckpt.index.rows import IndexStats, Usage


class Measuring:
    """A base class of `Index`."""

    _database: Database

    def history_sizes(self, starts: Iterable[bytes], *, whole: bool = False) -> list[CommitSize]:
        """All commits that `starts` lead to, a commit before its parents; arguments and errors as for `log`."""
        from cas_ckpt.index import history

        with self._database.reading() as connection, decoding(self._database.place):
            return history.read_sizes(connection, starts, whole=whole)

    def reachable_bytes(self, roots: Sequence[bytes]) -> Usage:
        """What all these roots together lead to, everything counted once."""
        return self.exclusive_bytes({"all": roots})["all"]

    def exclusive_bytes(self, groups: Mapping[str, Sequence[bytes]]) -> dict[str, Usage]:
        """Group -> what its roots lead to and the roots of no other group do.

        One group per commit gives the unique bytes of each; one per branch, those of each branch.
        """
        from cas_ckpt.index import usage

        with self._database.reading() as connection, decoding(self._database.place):
            return usage.exclusive(connection, groups)

    def bytes_by_holders(self, holders: Mapping[bytes, int]) -> dict[int, Usage]:
        """Set of holders -> what all of them lead to and nobody else does, for each set of whom something is.

        Args:
            holders: Root -> who keeps it, as the bits of one number (1, 2, 4 ... are one holder each).
        """
        from cas_ckpt.index import usage

        with self._database.reading() as connection, decoding(self._database.place):
            return usage.by_holders(connection, holders)

    def bytes_under(self, nodes: Iterable[bytes]) -> dict[bytes, Usage]:
        """Node -> what it and everything below it hold; shared chunks count for each that has them."""
        from cas_ckpt.index import usage

        with self._database.reading() as connection, decoding(self._database.place):
            return usage.under(connection, nodes)

    def stats(self) -> IndexStats:
        """The index in numbers."""
        from cas_ckpt.index import census

        with self._database.reading() as connection, decoding(self._database.place):
            return census.read_stats(connection)
