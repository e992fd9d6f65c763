"""`Index`: the index of one repository, open: its transactions, packs, and schema; and one in the place of another.

Questions are functions over a connection, in the modules of this room: `index.read(contents.known, digests)` asks
one, `index.write(remembered.write_refs, refs)` changes something. What takes several transactions is a function over
the index itself (`history.log`, `garbage.living`, `garbage.freed`).

An index that was made anew takes the place of another in one step (`replace_rows`, `replace_file`):

    1. it is made beside: a file next to the other, temporary tables of PostgreSQL, or memory
    2. in one transaction of both it catches up with the store, and its rows replace the other's
    3. a file that is damaged cannot be written any more: it is replaced as a whole, while no process has it open

Readers see the rows of before or those of after, whatever dies on the way, and every pack that is in the store at step
2 is known afterwards. What packs do not hold (`schema.REMEMBERED`) stays.

Invariant: safe to call from any thread; raises only errors of cas_ckpt.errors. Alembic is imported only when a schema
is to be made or upgraded, so that `log` starts fast. Knows nothing of the store: the
handle above compares `packs()` with what the store lists and calls `add_packs` and `drop_packs`.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from sqlalchemy import Connection, MetaData, Select, delete, select

import cas_ckpt
from cas_ckpt.errors import (
    CkptError,
    ConflictError,
    CorruptionError,
    InternalError,
    NotFoundError,
    PermissionDeniedError,
    UnsupportedVersionError,
)
from cas_ckpt.index import contents, postgres, remembered
from cas_ckpt.index.database import (
    Database,
    copy_into_memory,
    database_beside,
    discard_database,
    insert_missing,
    open_database,
    table_names,
    unguarded_file,
    unlink_files,
    upsert,
)
from cas_ckpt.index.db_errors import REBUILD, file_refused
from cas_ckpt.index.garbage import EXAMINED
from cas_ckpt.index.rows import REVISIONS, PackRecord, RefRow, change, rows
from cas_ckpt.index.schema import (
    META,
    METADATA,
    PACKS,
    REFS,
    REMEMBERED,
    SCRUBS,
    VERSION_TABLE,
    VIEWS_VERSION,
    former_name,
    refuse_foreign,
)
from cas_ckpt.index.sqlite import while_closed
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
        self.store_id = self.read(remembered.read_meta, remembered.STORE) or ""
        if not self.store_id and not database.read_only:
            self._set_meta(remembered.STORE, wanted)
            self.store_id = wanted
        self.is_behind = self.read(remembered.read_meta, remembered.BEHIND) is not None

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
        return self.read(remembered.read_meta, remembered.MADE)

    @property
    def generation(self) -> int:
        """The generation of garbage collection that the rows are of (0 before the first)."""
        return self.read(remembered.generation)

    @property
    def newer_pack(self) -> str | None:
        """A pack with objects that only a later version knows, so that the edges are not complete; None: none."""
        return next(iter(self.read(remembered.newer_packs)), None)

    def set_generation(self, generation: int) -> None:
        """Say which generation the rows are of; condemned packs must be dropped before."""
        self._set_meta(remembered.GENERATION, str(generation))

    def _set_meta(self, key: str, value: str) -> None:
        if self.read(remembered.read_meta, key) != value:
            self.write(remembered.write_meta, key, value)


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
    found = next((found for (found,) in rows(connection, f"SELECT version_num FROM {VERSION_TABLE.name}")), None)
    if found is not None and found not in REVISIONS:
        raise UnsupportedVersionError(
            f"index {place}: wanted schema {REVISIONS[-1]} or older, found {found!r}; upgrade cas_ckpt, "
            "or delete the index, which any version can rebuild from the packs"
        )
    return found


def _has_views(database: Database, connection: Connection) -> bool:
    """Whether there are the views of this version or a later one; temporary tables, not for people, need none."""
    return database.schema == postgres.TEMPORARY or remembered.views_version(connection) >= VIEWS_VERSION


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


# --- one index in the place of another -----------------------------------------------------------

_DERIVED_KEYS = (EXAMINED, remembered.MADE, remembered.NEWER, remembered.BEHIND)
"""Those of `meta` that follow from packs."""

_SQLITE_MAGIC = b"SQLite format 3\0"


@dataclass(frozen=True, slots=True)
class Change:
    """The packs that an index lacks, and the names of packs that went."""

    come: Sequence[PackRecord] = ()
    gone: Iterable[str] = ()


CatchUp: TypeAlias = Callable[[Mapping[str, int]], Change]
"""From pack -> size, as the index knows them, to what the store has otherwise by now."""


def index_beside(place: str | Path, *, store_id: str) -> Index:
    """An empty index next to `place`, to be filled and to take its place; closing it removes it.

    Raises:
        PermissionDeniedError, OutOfSpaceError: it cannot be made there.
    """
    return Index.over(database_beside(place), store_id=store_id)


def beside(index: Index) -> Index:
    """The same next to an index that is open."""
    return index_beside(index._database.address, store_id=index.store_id)


def may_replace(index: Index) -> bool:
    """Whether `replace_rows` may write `index`: of a shared one, writers add rows, and only maintainers drop them."""
    if index.read_only or not index.is_shared:
        return not index.read_only
    return index.read(lambda asked: bool(rows(asked, f"SELECT has_table_privilege('{PACKS.name}', 'DELETE')")[0][0]))


def replace_rows(index: Index, made: Index, catch_up: CatchUp) -> None:
    """Put the rows of `made` in the place of those of `index`, which any number of processes may be using.

    Args:
        catch_up: Called once, while no other process can write: it should be quick.
    Raises:
        CorruptionError: `index` is damaged, and stays as it is.
        PermissionDeniedError, OutOfSpaceError: it cannot be written.
    """
    damage = index.read(disorder)
    if damage:
        raise CorruptionError(f"index {index.place}: {'; '.join(damage[:3])}; {REBUILD}")
    old, new = index._database, made._database
    if old.in_memory:
        with old.writing() as connection:
            _follow_alone(new, catch_up)
            _copy(new, connection)
        return
    with new.writing_both(old) as (connection, own, other):
        _follow(connection, catch_up)
        _replace(connection, own, other)


def disorder(connection: Connection) -> list[str]:
    """Damage of SQLite's pages, or of its definitions of tables and views; empty for PostgreSQL."""
    from cas_ckpt.index.views import VIEWS  # as Alembic: not when an index is opened

    if connection.dialect.name != "sqlite":
        return []
    found = [str(row[0]) for row in connection.exec_driver_sql("PRAGMA quick_check(10)")]
    if found != ["ok"]:
        return found
    found = []
    for table in METADATA.sorted_tables:  # a damaged name goes unnoticed unless that column is read
        there = {row[1] for row in connection.exec_driver_sql(f"PRAGMA table_info({table.name})")}
        found += [f"{table.name} has no {column.name}" for column in table.columns if column.name not in there]
    if remembered.views_version(connection) == VIEWS_VERSION:
        views = connection.exec_driver_sql("SELECT name, sql FROM sqlite_master WHERE type = 'view'")
        texts = {view.name: view.sql for view in views}
        found += [f"the view {view.name} is another" for view in VIEWS if texts.get(view.name) != view.text("sqlite")]
    return found


def replace_file(path: Path, made: Index, catch_up: CatchUp, *, only_sqlite: bool) -> None:
    """Put the file of `made` in the place of the one at `path`, in whatever state that is; `made` is closed.

    Args:
        only_sqlite: Refuse to replace a file that does not begin as those of SQLite do.
    Raises:
        ConflictError: a process has it open, or it is not a database; it stays as it is.
    """
    source = made._database.path
    if source is None:
        raise CorruptionError(f"index {path}: it is not a file, so it cannot be replaced")
    try:
        with while_closed(path):
            if only_sqlite:
                with path.open("rb") as file:
                    head = file.read(len(_SQLITE_MAGIC))
                if head not in (b"", _SQLITE_MAGIC):
                    raise ConflictError(
                        f"index {path}: it is not a database of SQLite, so it stays as it is: move it away first"
                    )
            _follow_alone(made._database, catch_up)
            _bring_remembered(path, made)
            made._database.engine.dispose()  # folds the log into the file, synced
            unlink_files(path)
            os.replace(source, path)
    except OSError as error:
        raise file_refused(error, f"{path}: cannot be replaced") from error
    finally:
        made.close()


def _follow_alone(database: Database, catch_up: CatchUp) -> None:
    with database.writing() as connection:
        _follow(connection, catch_up)


def _follow(connection: Connection, catch_up: CatchUp) -> None:
    missing = catch_up(contents.pack_sizes(connection))
    contents.drop_packs(connection, missing.gone)
    contents.add_packs(connection, missing.come)


def _replace(connection: Connection, own: str, other: str) -> None:
    """Both have the tables that the migrations make, so that their columns are in the same order."""
    for table in METADATA.sorted_tables:
        if table not in REMEMBERED:
            change(connection, f"DELETE FROM {other}.{table.name}")
            change(connection, f"INSERT INTO {other}.{table.name} SELECT * FROM {own}.{table.name}")
    keys = ", ".join(f"'{key}'" for key in _DERIVED_KEYS)
    change(connection, f"DELETE FROM {other}.t_meta WHERE key IN ({keys})")
    change(connection, f"INSERT INTO {other}.t_meta SELECT * FROM {own}.t_meta WHERE key IN ({keys})")
    change(connection, f"INSERT INTO {other}.t_meta VALUES ('{remembered.MADE}', '{secrets.token_hex(8)}')")
    change(connection, f"DELETE FROM {other}.t_scrubs WHERE pack NOT IN (SELECT name FROM {other}.t_packs)")


def _copy(source: Database, target: Connection) -> None:
    """The same, row by row, where no connection sees both."""
    with source.reading() as connection:
        for table in METADATA.sorted_tables:
            if table not in REMEMBERED:
                target.execute(delete(table))
                insert_missing(target, table, [tuple(row) for row in connection.execute(select(table))])
        derived = META.c.key.in_(_DERIVED_KEYS)
        target.execute(delete(META).where(derived))
        insert_missing(target, META, [tuple(row) for row in connection.execute(select(META).where(derived))])
    remembered.write_meta(target, remembered.MADE, secrets.token_hex(8))


def _bring_remembered(path: Path, made: Index) -> None:
    """Copy what can still be read of the old file, was about the same store, and is in no pack.

    Raises:
        OutOfSpaceError, StorageError: it cannot be written; then the old file must stay.
    """
    old = unguarded_file(path)
    try:
        before = {table: table for table in REMEMBERED}
        with suppress(CkptError), old.reading() as connection:  # as far as that can be read
            if META.name not in table_names(connection):  # before revision 0004: these in the form of today, renamed
                before = {t: t.to_metadata(MetaData(), name=former_name(t)) for t in (META, REFS, SCRUBS)}
        key = before[META].c.key
        store = _readable(old, select(before[META].c.value).where(key == remembered.STORE))
        for table, kept in before.items() if store == [(made.store_id,)] else ():
            query = select(kept)
            left = _readable(
                old, query.where(key.not_in((remembered.STORE, *_DERIVED_KEYS))) if table is META else query
            )
            with suppress(CorruptionError), made._database.writing() as target:  # rows that no table takes
                insert_missing(target, table, left)
        with made._database.writing() as target:
            remembered.drop_incomplete(target)  # each table was read for itself
    finally:
        old.engine.dispose()


def _readable(old: Database, query: Select[Any]) -> list[tuple[Any, ...]]:
    """The rows of a damaged index, none if they cannot be read: what is lost of them is lost already."""
    with suppress(CkptError), old.reading() as connection:
        return [tuple(row) for row in connection.execute(query)]
    return []
