"""`Checking`: what `Index` answers when a repository is checked.

Invariant: as of `Index`: typed errors alone, safe to call from any thread. Knows nothing of the store.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from sqlalchemy import Connection

from cas_ckpt.index.database import Database
from cas_ckpt.index.rows import PackRecord
from cas_ckpt.index.trouble import decoding

if TYPE_CHECKING:
    from cas_ckpt.index.scrub import Scrub
    from cas_ckpt.index.soundness import Soundness


class Checking:
    """A base class of `Index`."""

    _database: Database

    @abstractmethod
    def _writing(self) -> AbstractContextManager[Connection]:
        """A connection in the one writing transaction, unless writing is ruled out."""

    def differences(self, records: Sequence[PackRecord]) -> dict[str, str]:
        """Pack -> how its rows differ from what the pack itself tells; those that agree are left out."""
        from cas_ckpt.index import agreement

        with self._database.reading() as connection, decoding(self._database.place):
            return agreement.differences(connection, records)

    def disorder(self) -> list[str]:
        """What the database itself finds wrong with its pages and constraints."""
        from cas_ckpt.index import agreement

        with self._database.reading() as connection:
            return agreement.disorder(connection)

    def made(self) -> str | None:
        """Another value than before, once the index was made anew."""
        from cas_ckpt.index.mirror import MADE, read_meta

        with self._database.reading() as connection:
            return read_meta(connection, MADE)

    def soundness(self) -> Soundness:
        """Answers questions about objects that are not whole."""
        from cas_ckpt.index.soundness import Soundness

        return Soundness(self._database)

    def scrubs(self) -> dict[str, Scrub]:
        """Pack -> when all of it was last read, and what was found."""
        from cas_ckpt.index import scrub

        with self._database.reading() as connection:
            return scrub.read_scrubs(connection)

    def note_scrub(self, found: Scrub) -> None:
        """Remember that a pack was read whole."""
        from cas_ckpt.index import scrub

        with self._writing() as connection:
            scrub.write_scrub(connection, found)
