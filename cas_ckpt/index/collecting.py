"""`Collecting`: what `Index` answers about garbage and about who refers to what.

Invariant: as of `Index`: typed errors alone, safe to call from any thread. Knows nothing of the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

from sqlalchemy import Connection

from cas_ckpt.index import suspects
from cas_ckpt.index.database import Database, copy_into_memory
from cas_ckpt.index.liveness import Living, read_liveness
from cas_ckpt.index.trouble import decoding


class Collecting:
    """A base class of `Index`."""

    _database: Database

    def _writing(self) -> AbstractContextManager[Connection]:
        raise NotImplementedError

    @contextmanager
    def liveness(
        self, *, commits: Iterable[bytes], roots: Iterable[bytes], published: Iterable[bytes] = ()
    ) -> Iterator[Living]:
        """What lives and what is dead, as of the beginning of the block (index/liveness.py).

        Args:
            commits: All live commits; a forgotten one keeps its commit object alone.
            roots: Roots and layouts of the live commits that are not forgotten.
            published: Commits that are known to have been the target of a ref at some time.
        """
        self._examine()
        with self._undisturbed() as database, database.reading() as connection, decoding(self._database.place):
            with read_liveness(connection, commits=commits, roots=roots, published=published) as living:
                yield living

    def _examine(self) -> None:
        """Examine packs that came since the last time; many small writing transactions."""
        if self._database.read_only:
            return
        with self._database.reading() as connection:
            more = suspects.is_unexamined(connection)
        while more:
            with self._writing() as connection, decoding(self._database.place):
                more = suspects.examine_some(connection)

    @contextmanager
    def _undisturbed(self) -> Iterator[Database]:
        """A database that others may read and write meanwhile: a copy of one in memory, which has one connection."""
        if not self._database.in_memory:
            yield self._database
            return
        copy = copy_into_memory(self._database)
        try:
            yield copy
        finally:
            copy.close()
