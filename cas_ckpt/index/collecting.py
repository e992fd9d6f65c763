"""`Collecting`: what `Index` answers about garbage and about who refers to what.

Invariant: as of `Index`: typed errors alone, safe to call from any thread. Knows nothing of the store.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from sqlalchemy import Connection, select

from cas_ckpt.index.database import Database, copy_into_memory
from cas_ckpt.index.rows import Usage
from cas_ckpt.index.schema import PACKS
from cas_ckpt.index.trouble import decoding

if TYPE_CHECKING:
    from cas_ckpt.index.graph import CommitLinks
    from cas_ckpt.index.liveness import Living
    from cas_ckpt.index.reach import Shared


class Collecting:
    """A base class of `Index`."""

    _database: Database

    @abstractmethod
    def _writing(self) -> AbstractContextManager[Connection]:
        """A connection in the one writing transaction, unless writing is ruled out."""

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
        from cas_ckpt.index.liveness import read_liveness

        self._examine()
        with (
            self._undisturbed() as database,
            database.reading() as connection,
            decoding(self._database.place),
            read_liveness(connection, commits=commits, roots=roots, published=published) as living,
        ):
            yield living

    def links_and_packs(self) -> tuple[dict[bytes, CommitLinks], set[str]]:
        """`Index.commit_links`, and the names of the packs that were known at the same moment."""
        from cas_ckpt.index import graph

        with self._database.reading() as connection:
            return graph.read_links(connection), set(connection.execute(select(PACKS.c.name)).scalars())

    def packs_in_parts(self) -> set[str]:
        """Names of the packs that hold parts of chunks, not whole ones. Scans everything."""
        from cas_ckpt.index import fragments

        with self._database.reading() as connection:
            return fragments.packs_in_parts(connection)

    def freed(
        self, now: tuple[Collection[bytes], Collection[bytes]], then: tuple[Collection[bytes], Collection[bytes]]
    ) -> Usage:
        """What lives now and would be dead then.

        Args:
            now: (commits, roots), as `liveness` takes them.
            then: The same without those that one thinks of forgetting or deleting.
        """
        from cas_ckpt.index import freed

        self._examine()
        with self._database.reading() as connection, decoding(self._database.place):
            return freed.freed(connection, freed.LiveSet(*now), freed.LiveSet(*then))

    def unique(self, commits: Collection[bytes], others: Collection[bytes]) -> Usage:
        """What these commits hold, themselves included, and the commits `others` do not."""
        from cas_ckpt.index import freed

        self._examine()
        with self._database.reading() as connection, decoding(self._database.place):
            now, then = freed.live_set(connection, commits), freed.live_set(connection, others)
            return freed.freed(connection, now, then)

    def commits_holding(self, digest: bytes) -> list[bytes]:
        """The commits whose state contains this chunk, tensor, tree or page, the first known first."""
        from cas_ckpt.index import reach

        with self._database.reading() as connection, decoding(self._database.place):
            return reach.commits_holding(connection, digest)

    def nearest(self, digests: Iterable[bytes], *, limit: int = 10) -> list[Shared]:
        """The commits that share the most bytes with these chunks, the best first."""
        from cas_ckpt.index import reach

        with self._database.reading() as connection, decoding(self._database.place):
            return reach.nearest(connection, digests, limit=limit)

    def _examine(self) -> None:
        """Examine packs that came since the last time; many small writing transactions."""
        from cas_ckpt.index import suspects

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
