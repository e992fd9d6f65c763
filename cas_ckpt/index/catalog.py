"""`Index`: the one door into this room.

Invariant: every method is one transaction (or a pair of short ones, where it says so), safe to
call from any thread, and raises only errors of cas_ckpt.errors. Knows nothing of the store: the
handle above compares `packs()` with what the store lists and calls `add_packs` and `drop_packs`.
What a log does not need is imported where it is used: half of a log's time is imports.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, select

from cas_ckpt.errors import PermissionDeniedError
from cas_ckpt.index import history, ingest, lookup, mirror
from cas_ckpt.index.checking import Checking
from cas_ckpt.index.collecting import Collecting
from cas_ckpt.index.database import Database, copy_into_memory, discard_database, open_database
from cas_ckpt.index.measuring import Measuring
from cas_ckpt.index.migrate import ensure_schema
from cas_ckpt.index.rows import CommitRow, Location, PackRecord, RefRow
from cas_ckpt.index.schema import COMMITS, PACKS
from cas_ckpt.index.statements import batches, rows_of
from cas_ckpt.index.trouble import decoding
from cas_ckpt.objects.kinds import ObjectKind

if TYPE_CHECKING:
    from cas_ckpt.index.graph import CommitLinks
    from cas_ckpt.index.plans import PlanRow
    from cas_ckpt.index.selection import CommitFilter
    from cas_ckpt.objects.commit import LineageEdge

_COMMITS_PER_READ = 500
_PACK_SIZES = select(PACKS.c.name, PACKS.c.size_bytes)


class Index(Collecting, Checking, Measuring):
    """The index of one repository.

    Attributes:
        store_id: The store that the rows are about. When it is not the one that `open` was told,
            `matches` is False and nothing in here may be believed until `reset`.
    """

    def __init__(self, database: Database, *, wanted: str) -> None:
        self._database = database
        self._wanted = wanted
        self.store_id = self._claim_store()

    @classmethod
    def open(cls, place: str | Path, *, store_id: str, read_only: bool = False) -> Index:
        """The index at `place`, made or upgraded if need be.

        Args:
            place: Path of a SQLite file, ":memory:", or a URL such as postgresql+psycopg://...
            store_id: The store that the caller has.
            read_only: Never write; `add_packs` and the like then raise.

        Raises:
            NotFoundError: `read_only`, and there is no file.
            PermissionDeniedError: The file cannot be opened, or not for writing.
            CorruptionError: It is no index, or a damaged one: `Index.discard`, open, add all packs.
            UnsupportedVersionError: A newer schema.
        """
        return cls.over(open_database(place, store_id=store_id, read_only=read_only), store_id=store_id)

    @classmethod
    def over(cls, database: Database, *, store_id: str) -> Index:
        """The index in `database`, which is closed if that fails; errors as for `open`."""
        try:
            ensure_schema(database)
            return cls(database, wanted=store_id)
        except BaseException:
            database.close()
            raise

    @staticmethod
    def discard(place: str | Path, *, store_id: str) -> None:
        """Remove the index at `place`, whatever state it is in; nothing is lost but time.

        Raises:
            ConflictError: A process has it open, or what is there is no index.
        """
        discard_database(place, store_id=store_id)

    def detached(self) -> Index:
        """A copy in memory that may be written, for a repository whose medium may not."""
        return Index(copy_into_memory(self._database), wanted=self._wanted)

    def _claim_store(self) -> str:
        found = self._meta(mirror.STORE)
        if found is None and not self._database.read_only:
            self._set_meta(mirror.STORE, self._wanted)
            return self._wanted
        return found or ""

    @property
    def matches(self) -> bool:
        """Whether the rows are about the store that the caller has."""
        return self.store_id == self._wanted

    @property
    def place(self) -> str:
        """Where the index lies, as messages name it (no password)."""
        return self._database.place

    @property
    def in_memory(self) -> bool:
        """Whether it ends with this process."""
        return self._database.in_memory

    @property
    def read_only(self) -> bool:
        """Whether writing was ruled out when it was opened."""
        return self._database.read_only

    def close(self) -> None:
        """Close it; the object is of no use afterwards. Idempotent."""
        self._database.close()

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- packs -----------------------------------------------------------------------------

    def packs(self) -> dict[str, int]:
        """Name -> size in bytes of every pack that the index knows."""
        with self._database.reading() as connection:
            return dict(rows_of(connection, _PACK_SIZES))

    def add_packs(self, records: Sequence[PackRecord], *, ref: RefRow | None = None) -> int:
        """Add all that these packs tell, whole or not at all; returns how many were not known.

        Args:
            ref: Where a ref points since, remembered in the same transaction.
        """
        with self._writing() as connection:
            if ref is not None:
                mirror.write_ref(connection, ref)
            return ingest.add_packs(connection, records)

    def drop_packs(self, names: Iterable[str]) -> int:
        """Forget these packs and all that lies in them alone; returns how many were known."""
        from cas_ckpt.index import shed

        with self._writing() as connection:
            return shed.drop_packs(connection, names)

    def reset(self, store_id: str) -> None:
        """Forget everything and belong to `store_id` from now on."""
        with self._writing() as connection:
            mirror.remove_everything(connection, store_id=store_id)
        self.store_id = self._wanted = store_id

    # --- objects ---------------------------------------------------------------------------

    def num_chunks(self) -> int:
        """How many chunks lie in known packs."""
        with self._database.reading() as connection:
            return lookup.count_chunks(connection)

    def all_chunk_digests(self) -> set[bytes]:
        """The ids of all chunks that known packs hold in one extent (about 100 bytes of memory each)."""
        with self._database.reading() as connection:
            return lookup.chunk_digests(connection)

    def chunks_and_packs(self) -> tuple[set[bytes], set[str]]:
        """`all_chunk_digests`, and the names of the packs that were known at the same moment."""
        with self._database.reading() as connection:
            return lookup.chunk_digests(connection), set(connection.execute(select(PACKS.c.name)).scalars())

    def known(self, digests: Iterable[bytes]) -> set[bytes]:
        """Those of `digests` that lie in known packs."""
        with self._database.reading() as connection:
            return lookup.known(connection, digests)

    def locate(self, digests: Iterable[bytes]) -> dict[bytes, list[Location]]:
        """Digest -> all its extents, by age of pack and first leaf; unknown digests are left out."""
        with self._database.reading() as connection, decoding(self.place):
            return lookup.locate(connection, digests)

    def resolve_prefix(
        self, prefix: str, kinds: Collection[ObjectKind] = (ObjectKind.COMMIT,), *, limit: int = 16
    ) -> list[bytes]:
        """Up to `limit` ids of these kinds that begin with the hexadecimal digits `prefix`.

        Raises:
            InvalidInputError: `prefix` is no hexadecimal number, or longer than an id.
        """
        with self._database.reading() as connection:
            return lookup.resolve_prefix(connection, prefix, kinds, limit=limit)

    # --- commits ---------------------------------------------------------------------------

    def commit(self, digest: bytes) -> CommitRow | None:
        """The commit called `digest`, or None."""
        with self._database.reading() as connection, decoding(self.place):
            return history.read_commit(connection, digest)

    def commits(self) -> Iterator[CommitRow]:
        """Every commit that the index knows, oldest row first."""
        with self._database.reading() as connection:
            rows = connection.execute(select(COMMITS.c.object_id, COMMITS.c.digest).order_by(COMMITS.c.object_id))
            return self._read_commits([tuple(row) for row in rows])

    def commit_links(self) -> dict[bytes, CommitLinks]:
        """Commit -> its root, layout and parents, for every commit that the index knows."""
        from cas_ckpt.index import graph

        with self._database.reading() as connection:
            return graph.read_links(connection)

    def line(self, start: bytes, *, most: int, until: bytes | None = None) -> list[bytes]:
        """`start` and the commits behind it by first parents, at most `most`, not beyond `until`.

        The last one may be a parent that the index does not know; nothing if it does not know `start`.
        """
        with self._database.reading() as connection:
            return history.read_line(connection, start, most=most, until=until)

    def log(
        self,
        starts: Iterable[bytes],
        *,
        limit: int | None = None,
        first_parent: bool = False,
        whole: bool = False,
        wanted: CommitFilter | None = None,
    ) -> Iterator[CommitRow]:
        """All commits that `starts` lead to: children before parents, and the youngest first.

        The order is fixed by this call; the rows are read in short transactions as they are asked for.

        Args:
            whole: Raise for parents that the index does not know, instead of ending there.
            wanted: Leave out those that do not meet this.
        Raises:
            NotFoundError: one of `starts` (or of the parents, if `whole`) is no commit that the index knows.
        """
        from cas_ckpt.index import selection

        with self._database.reading() as connection, decoding(self.place):
            found = history.walk(connection, starts, first_parent=first_parent, whole=whole)
            if wanted:
                kept = selection.matching(connection, wanted)
                found = [commit for commit in found if commit[0] in kept]
        return self._read_commits(found[:limit])

    def lineage(self) -> list[tuple[bytes, LineageEdge]]:
        """(commit, edge) for all that commits say of what their states were made from, beyond parents."""
        from cas_ckpt.index import descent

        with self._database.reading() as connection:
            return descent.all_lineage(connection)

    def commits_of_root(self, root: bytes) -> list[bytes]:
        """The ids of all commits of the tree `root`."""
        from cas_ckpt.index import scores

        with self._database.reading() as connection:
            return scores.commits_of_root(connection, root)

    def metric_names(self) -> list[str]:
        """The names of the metrics of all commits, sorted."""
        from cas_ckpt.index import scores

        with self._database.reading() as connection:
            return scores.metric_names(connection)

    def ranked(
        self, name: str, *, largest: bool, among: Collection[bytes], limit: int
    ) -> list[tuple[bytes, float]]:
        """The best commits of `among` by the metric `name`, with their values; equal ones by age."""
        from cas_ckpt.index import scores

        with self._database.reading() as connection:
            return scores.ranked(connection, name, largest=largest, among=among, limit=limit)

    def _read_commits(self, found: Sequence[tuple[int, bytes]]) -> Iterator[CommitRow]:
        for batch in batches(found, _COMMITS_PER_READ):
            with self._database.reading() as connection, decoding(self.place):
                rows = history.read_commits_again(connection, batch)
            yield from rows

    # --- refs and generation ---------------------------------------------------------------

    def refs(self) -> dict[str, RefRow]:
        """Name -> ref, as last seen; the store alone knows what they are now."""
        with self._database.reading() as connection:
            return mirror.read_refs(connection)

    def set_ref(self, ref: RefRow) -> None:
        """Remember where a ref points."""
        self.set_refs([ref])

    def known_refs(self, names: Iterable[str]) -> set[str]:
        """Those of `names` that are remembered."""
        with self._database.reading() as connection:
            return mirror.known_refs(connection, names)

    def set_refs(self, refs: Iterable[RefRow]) -> None:
        """Remember where refs point, all in one transaction."""
        with self._writing() as connection:
            for ref in refs:
                mirror.write_ref(connection, ref)

    def drop_ref(self, name: str) -> None:
        """Forget a ref."""
        with self._writing() as connection:
            mirror.remove_ref(connection, name)

    @property
    def generation(self) -> int:
        """The generation of garbage collection that the rows are of (0 before the first)."""
        with decoding(self.place):
            return int(self._meta(mirror.GENERATION) or 0)

    @property
    def newer_pack(self) -> str | None:
        """A pack with objects that only a later version knows, so that the edges are not complete; None: none."""
        with self._database.reading() as connection:
            return next(iter(mirror.newer_packs(connection)), None)

    def set_generation(self, generation: int) -> None:
        """Say which generation the rows are of; condemned packs must be dropped before."""
        self._set_meta(mirror.GENERATION, str(generation))

    # --- plans -----------------------------------------------------------------------------

    def keep_plan(self, row: PlanRow) -> None:
        """Keep a restore plan."""
        from cas_ckpt.index import plans

        with self._writing() as connection:
            plans.write_plan(connection, row)

    def plan(self, root: bytes, layout: bytes) -> PlanRow | None:
        """The plan that was kept for this root and target layout, or None."""
        from cas_ckpt.index import plans

        with self._database.reading() as connection, decoding(self.place):
            return plans.read_plan(connection, root, layout)

    def plans(self, root: bytes | None = None) -> list[PlanRow]:
        """The plans that were kept for `root`, or all of them."""
        from cas_ckpt.index import plans

        with self._database.reading() as connection, decoding(self.place):
            return plans.read_plans(connection, root)

    def count_extents(self, root: bytes) -> tuple[int, int]:
        """(chunks, extents) of a state."""
        from cas_ckpt.index import plans

        with self._database.reading() as connection, decoding(self.place):
            return plans.count_extents(connection, root)

    # --- the rest --------------------------------------------------------------------------

    def _meta(self, key: str) -> str | None:
        with self._database.reading() as connection:
            return mirror.read_meta(connection, key)

    def _set_meta(self, key: str, value: str) -> None:
        if self._meta(key) == value:
            return
        with self._writing() as connection:
            mirror.write_meta(connection, key, value)

    def _writing(self) -> AbstractContextManager[Connection]:
        if self.read_only:
            raise PermissionDeniedError(f"index {self.place}: it was opened for reading only; open it for writing")
        return self._database.writing()
