"""`Index`: the index of one repository, open: its transactions, its packs, and which store it is about.

Questions are functions over a connection, in the modules of this room: `index.read(contents.known, digests)` asks
one, `index.write(meta.write_refs, refs)` changes something. What takes several transactions is a function over
the index itself (`history.log`, `liveness.living`, `liveness.freed`).

Invariant: safe to call from any thread; raises only errors of cas_ckpt.errors. Alembic is imported only when a schema
is to be made or upgraded, so that `log` starts fast. Knows nothing of the store: the
handle above compares `packs()` with what the store lists and calls `add_packs` and `drop_packs`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from threading import RLock
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, select

import cas_ckpt
from cas_ckpt.errors import (
    CorruptionError,
    InternalError,
    NotFoundError,
    PermissionDeniedError,
    UnsupportedVersionError,
)
from cas_ckpt.index import contents, meta, postgres
from cas_ckpt.index.database import Database, copy_into_memory, discard_database, open_database, table_names, upsert
from cas_ckpt.index.db_errors import REBUILD
from cas_ckpt.index.rows import REVISIONS, PackRecord, RefRow
from cas_ckpt.index.schema import META, REFS, VERSION_TABLE, VIEWS_VERSION, refuse_foreign
from cas_ckpt.uncopied import Uncopied

SOON_S = 5.0
"""How long `Index.write_soon` waits for others: what is only good to know delays no restore for longer."""

P = ParamSpec("P")
T = TypeVar("T")


class Index(Uncopied):
    """The index of one repository.

    Attributes:
        store_id: The store that the rows are about. When it is not the one that `open` was told,
            `matches` is False and nothing in here may be believed.
        is_behind: An older version made it, and rows of packs that it knows are missing: it has to be filled anew.
    """

    def __init__(self, database: Database, *, wanted: str) -> None:
        self._database = database
        self._wanted = wanted
        self.store_id = self.read(meta.read_meta, meta.STORE) or ""
        if not self.store_id and not database.read_only:
            self._set_meta(meta.STORE, wanted)
            self.store_id = wanted
        self.is_behind = self.read(meta.read_meta, meta.BEHIND) is not None

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
            CorruptionError: It is not an index, or a damaged one: `Index.discard`, open, add all packs.
            UnsupportedVersionError: A newer schema; or, `read_only` and in PostgreSQL, an older one. (A file with an
                older one that is not to be written is copied into memory and upgraded there.)
        """
        return cls.over(open_database(place, store_id=store_id, read_only=read_only), store_id=store_id)

    @classmethod
    def over(cls, database: Database, *, store_id: str) -> Index:
        """The index in `database`, which is closed if that fails; errors as for `open`."""
        try:
            try:
                ensure_schema(database)
            except _OlderSchemaError:
                if database.path is None:
                    raise
                with closing(database) as older:
                    database = copy_into_memory(older)
                ensure_schema(database)
            return cls(database, wanted=store_id)
        except BaseException:
            database.close()
            raise

    @staticmethod
    def discard(place: str | Path, *, store_id: str) -> None:
        """Remove the index at `place`, whatever state it is in; nothing is lost but time.

        Raises:
            ConflictError: A process has it open, or what is there is not an index.
        """
        from cas_ckpt.index.views import drop_views  # as Alembic: not when an index is opened

        discard_database(place, store_id=store_id, drop_views=drop_views)

    def detached(self) -> Index:
        """A copy in memory that may be written, for a repository whose medium may not."""
        return Index(copy_into_memory(self._database), wanted=self._wanted)

    @property
    def matches(self) -> bool:
        """Whether the rows are about the store that the caller has."""
        return self.store_id == self._wanted

    @property
    def place(self) -> str:
        """Where the index is, as messages name it (no password)."""
        return self._database.place

    @property
    def in_memory(self) -> bool:
        """Whether it ends with this process."""
        return self._database.in_memory

    @property
    def is_shared(self) -> bool:
        """Whether it is in a database that hosts share."""
        return self._database.schema is not None

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

    # --- transactions ----------------------------------------------------------------------

    def read(self, question: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The answer to a question of this room, in a reading transaction of its own.

        index.read(contents.known, digests)
        """
        with self._database.reading() as connection:
            return question(connection, *args, **kwargs)

    def write(self, change: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make a change in a writing transaction of its own, whole or not at all; its result."""
        with self.writing() as connection:
            return change(connection, *args, **kwargs)

    def write_soon(self, change: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As `write`, of what is not worth waiting for long.

        Raises:
            TransientStorageError: others wrote for longer than `SOON_S`.
        """
        with self.writing(wait_s=SOON_S) as connection:
            return change(connection, *args, **kwargs)

    def reading(self) -> AbstractContextManager[Connection]:
        """A connection that sees the rows of one moment; what cannot be read is a CorruptionError."""
        return self._database.reading()

    def writing(self, *, wait_s: float | None = None) -> AbstractContextManager[Connection]:
        """A connection in the one writing transaction.

        Args:
            wait_s: How long to wait for other clients; None: as long as is usual, a minute.
        Raises:
            PermissionDeniedError: the index was opened for reading only.
        """
        if self._database.read_only:
            raise PermissionDeniedError(f"index {self.place}: it was opened for reading only; open it for writing")
        return self._database.writing(wait_s=wait_s)

    @contextmanager
    def undisturbed(self) -> Iterator[Index]:
        """An index that others may read and write meanwhile: a copy of one in memory, which has one connection."""
        if not self.in_memory:
            yield self
            return
        copy = self.detached()
        try:
            yield copy
        finally:
            copy.close()

    # --- packs -----------------------------------------------------------------------------

    def packs(self) -> dict[str, int]:
        """Name -> size in bytes of every pack that the index knows."""
        return self.read(contents.pack_sizes)

    def add_packs(self, records: Sequence[PackRecord], *, ref: RefRow | None = None) -> int:
        """Add all that these packs hold, whole or not at all; returns how many were not known.

        Args:
            ref: Where a ref points since, remembered in the same transaction.
        """
        with self.writing() as connection:
            if ref is not None:
                upsert(connection, REFS, ref)
            return contents.add_packs(connection, records)

    def drop_packs(self, names: Iterable[str]) -> int:
        """Forget these packs and all that is stored in them alone; returns how many were known."""
        return self.write(contents.drop_packs, names)

    # --- what it knows of the store --------------------------------------------------------

    def made(self) -> str | None:
        """Another value than before, once the index was made anew."""
        return self.read(meta.read_meta, meta.MADE)

    @property
    def generation(self) -> int:
        """The generation of garbage collection that the rows are of (0 before the first)."""
        return self.read(meta.generation)

    @property
    def newer_pack(self) -> str | None:
        """A pack with objects that only a later version knows, so that the edges are not complete; None: none."""
        return next(iter(self.read(meta.newer_packs)), None)

    def set_generation(self, generation: int) -> None:
        """Say which generation the rows are of; condemned packs must be dropped before."""
        self._set_meta(meta.GENERATION, str(generation))

    def _set_meta(self, key: str, value: str) -> None:
        if self.read(meta.read_meta, key) != value:
            self.write(meta.write_meta, key, value)


# --- the schema: made, or brought to the revision that this version needs ----------------------


class _OlderSchemaError(UnsupportedVersionError):
    """An index would have to be upgraded, and may not be written."""


_ONE_MIGRATION = RLock()
"""Alembic keeps what it works on in globals: one migration at a time in a process."""


def ensure_schema(database: Database) -> None:
    """Make or upgrade tables and views, unless they are of the newest revision and version already.

    Opened for reading only, an index may have earlier views, or none: only SQL of people asks them.

    Raises:
        NotFoundError: there are no tables, and none may be made.
        UnsupportedVersionError: the schema is newer than this version of cas_ckpt.
        CorruptionError: the tables are damaged.
        ConflictError: there are tables that are not ours.
    """
    with database.reading() as connection:
        if database.schema is not None:
            postgres.require_rights(connection, database.schema, to_write=not database.read_only)
        found = read_revision(connection, database.place)
        if found == REVISIONS[-1] and (database.read_only or _has_views(database, connection)):
            return
    if database.read_only and found is None:
        raise NotFoundError(f"index {database.place}: there is none in it; open it once for writing, which makes it")
    if database.read_only:
        raise _OlderSchemaError(
            f"index {database.place}: wanted schema {REVISIONS[-1]}, found {found}, and it is opened for reading "
            "only; open it once for writing, which upgrades it"
        )
    _upgrade(database)


def read_revision(connection: Connection, place: str) -> str | None:
    """The schema revision of a database, None for an empty one.

    Raises:
        ConflictError: it holds tables that are not ours.
        CorruptionError, UnsupportedVersionError: the tables are damaged, or newer than this version.
    """
    names = table_names(connection)
    if VERSION_TABLE.name not in names:
        if META.name in names and connection.dialect.name == "sqlite":
            raise CorruptionError(f"index {place}: its tables carry no schema version; {REBUILD}")
        refuse_foreign(names, place)
        return None
    refuse_foreign(names, place)
    found: str | None = connection.execute(select(VERSION_TABLE.c.version_num)).scalar()
    if found is not None and found not in REVISIONS:
        raise UnsupportedVersionError(
            f"index {place}: wanted schema {REVISIONS[-1]} or older, found {found!r}; upgrade cas_ckpt, "
            "or delete the index, which any version can rebuild from the packs"
        )
    return found


def _has_views(database: Database, connection: Connection) -> bool:
    """Whether there are the views of this version or a later one; temporary tables, not for people, need none."""
    return database.schema == postgres.TEMPORARY or meta.views_version(connection) >= VIEWS_VERSION


def _upgrade(database: Database) -> None:
    """Run the migrations in one writing transaction: another process waits, then finds the work done."""
    from cas_ckpt.index.views import make_views

    with _ONE_MIGRATION, _only_warnings_of("alembic"), database.writing() as connection:
        from alembic import command
        from alembic.config import Config

        config = Config()
        config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
        config.attributes["connection"] = connection
        if database.schema is not None:
            postgres.make_schema(connection, database.schema)
        command.upgrade(config, REVISIONS[-1])
        if not _has_views(database, connection):
            make_views(connection)


@contextmanager
def _only_warnings_of(name: str) -> Iterator[None]:
    """Inside, this log tells nothing of how tables are made: who trains with lines of INFO does not care."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(max(before, logging.WARNING))
    try:
        yield
    finally:
        logger.setLevel(before)


def migrations_folder() -> Path:
    """Where the migrations are: inside the installed package, or beside it in a checkout."""
    package = Path(cas_ckpt.__file__).parent
    for folder in (package / "migrations", package.parent / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise InternalError(
        f"the migrations of the index are in neither {package} nor {package.parent}; reinstall cas-ckpt"
    )
