"""An index that was made anew takes the place of another, in one step.

    1. it is made beside: a file next to the other, temporary tables of PostgreSQL, or memory
    2. in one transaction of both it catches up with the store, and its rows replace the other's
    3. a file that is damaged cannot be written any more: it is replaced as a whole, while no process has it open

Invariant: readers see the rows of before or those of after, whatever dies on the way, and every pack that is
in the store at step 2 is known afterwards. What packs do not hold (`schema.REMEMBERED`) stays. Must not know the store.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from sqlalchemy import Connection, MetaData, Select, Table, delete, select

from cas_ckpt.errors import CkptError, ConflictError, CorruptionError
from cas_ckpt.index import contents, integrity, plans
from cas_ckpt.index.candidates import EXAMINED
from cas_ckpt.index.database import Database, database_beside, insert_missing, table_names, unguarded_file, unlink_files
from cas_ckpt.index.db_errors import REBUILD, file_refused
from cas_ckpt.index.index import Index
from cas_ckpt.index.meta import BEHIND, MADE, NEWER, STORE, write_meta
from cas_ckpt.index.open_lock import while_closed
from cas_ckpt.index.rows import PackRecord
from cas_ckpt.index.schema import META, METADATA, PACKS, REFS, REMEMBERED, SCRUBS, former_name
from cas_ckpt.index.statements import batches

_DERIVED_KEYS = (EXAMINED, MADE, NEWER, BEHIND)
"""Those of `meta` that follow from packs."""

_ROWS_PER_INSERT = 10_000
_SQLITE_MAGIC = b"SQLite format 3\0"


@dataclass(frozen=True, slots=True)
class Change:
    """What an index lacks: packs that came, and names of packs that went."""

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
    return index.read(lambda asked: asked.exec_driver_sql(_MAY_DELETE).scalar_one() is True)


_MAY_DELETE = f"SELECT has_table_privilege('{PACKS.name}', 'DELETE')"


def replace_rows(index: Index, made: Index, catch_up: CatchUp) -> None:
    """Put the rows of `made` in the place of those of `index`, which any number of processes may be using.

    Args:
        catch_up: Called once, while no other process can write: it should be quick.
    Raises:
        CorruptionError: `index` is damaged, and stays as it is.
        PermissionDeniedError, OutOfSpaceError: it cannot be written.
    """
    disorder = index.read(integrity.disorder)
    if disorder:
        raise CorruptionError(f"index {index.place}: {'; '.join(disorder[:3])}; {REBUILD}")
    old, new = index._database, made._database
    if old.in_memory:
        with old.writing() as connection:
            _follow_alone(new, catch_up)
            _copy(new, connection)
        return
    with new.writing_both(old) as (connection, own, other):
        _follow(connection, catch_up)
        _replace(connection, own, other)


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
                _require_sqlite(path)
            _follow_alone(made._database, catch_up)
            _bring_remembered(path, made)
            made._database.engine.dispose()  # folds the log into the file, synced
            unlink_files(path)
            os.replace(source, path)
    except OSError as error:
        raise file_refused(error, f"{path}: cannot be replaced") from error
    finally:
        made.close()


def _require_sqlite(path: Path) -> None:
    with path.open("rb") as file:
        head = file.read(len(_SQLITE_MAGIC))
    if head not in (b"", _SQLITE_MAGIC):
        raise ConflictError(f"index {path}: it is not a database of SQLite, so it stays as it is: move it away first")


def _follow_alone(database: Database, catch_up: CatchUp) -> None:
    with database.writing() as connection:
        _follow(connection, catch_up)


def _follow(connection: Connection, catch_up: CatchUp) -> None:
    known = {name: size for name, size in connection.execute(select(PACKS.c.name, PACKS.c.size_bytes))}
    change = catch_up(known)
    contents.drop_packs(connection, change.gone)
    contents.add_packs(connection, change.come)


def _replace(connection: Connection, own: str, other: str) -> None:
    """Both have the tables that the migrations make, so that their columns are in the same order."""
    for table in METADATA.sorted_tables:
        if table not in REMEMBERED:
            connection.exec_driver_sql(f"DELETE FROM {other}.{table.name}")
            connection.exec_driver_sql(f"INSERT INTO {other}.{table.name} SELECT * FROM {own}.{table.name}")
    keys = ", ".join(f"'{key}'" for key in _DERIVED_KEYS)
    connection.exec_driver_sql(f"DELETE FROM {other}.t_meta WHERE key IN ({keys})")
    connection.exec_driver_sql(f"INSERT INTO {other}.t_meta SELECT * FROM {own}.t_meta WHERE key IN ({keys})")
    connection.exec_driver_sql(f"INSERT INTO {other}.t_meta VALUES ('{MADE}', '{secrets.token_hex(8)}')")
    connection.exec_driver_sql(f"DELETE FROM {other}.t_scrubs WHERE pack NOT IN (SELECT name FROM {other}.t_packs)")


def _copy(source: Database, target: Connection) -> None:
    """The same, row by row, where no connection sees both."""
    with source.reading() as connection:
        for table in METADATA.sorted_tables:
            if table not in REMEMBERED:
                target.execute(delete(table))
                _insert(target, table, [tuple(row) for row in connection.execute(select(table))])
        derived = META.c.key.in_(_DERIVED_KEYS)
        target.execute(delete(META).where(derived))
        _insert(target, META, [tuple(row) for row in connection.execute(select(META).where(derived))])
    write_meta(target, MADE, secrets.token_hex(8))


def _insert(target: Connection, table: Table, rows: Sequence[tuple[Any, ...]]) -> None:
    for batch in batches(rows, _ROWS_PER_INSERT):
        insert_missing(target, table, batch)


def _bring_remembered(path: Path, made: Index) -> None:
    """Copy what can still be read of the old file, was about the same store, and is in no pack.

    Raises:
        OutOfSpaceError, StorageError: it cannot be written; then the old file must stay.
    """
    old = unguarded_file(path)
    try:
        before = _older_tables() if _is_older(old) else {table: table for table in REMEMBERED}
        key = before[META].c.key
        store = _readable(old, select(before[META].c.value).where(key == STORE))
        for table, kept in before.items() if store == [(made.store_id,)] else ():
            query = select(kept)
            rows = _readable(old, query.where(key.not_in((STORE, *_DERIVED_KEYS))) if table is META else query)
            with suppress(CorruptionError), made._database.writing() as target:  # rows that no table takes
                _insert(target, table, rows)
        with made._database.writing() as target:
            plans.drop_incomplete(target)  # each table was read for itself
    finally:
        old.engine.dispose()


def _is_older(old: Database) -> bool:
    """Whether it is of a revision in which tables had their former names, as far as that can be read."""
    with suppress(CkptError), old.reading() as connection:
        return META.name not in table_names(connection)
    return False


def _older_tables() -> dict[Table, Table]:
    """Tables that revisions before 0004 had in the form of today -> how they were called."""
    return {table: table.to_metadata(MetaData(), name=former_name(table)) for table in (META, REFS, SCRUBS)}


def _readable(old: Database, query: Select[Any]) -> list[tuple[Any, ...]]:
    """The rows of a damaged index, none if they cannot be read: what is lost of them is lost already."""
    with suppress(CkptError), old.reading() as connection:
        return [tuple(row) for row in connection.execute(query)]
    return []
