"""A new SQLite index gets its tables from a script recorded from the migrations once, not from Alembic each time.

Thousands of tests make a repository; Alembic takes 50 ms for each and always makes the same. `ensure_schema` still
looks at every database afterwards. test_migrations.py runs the migrations themselves (`migrations_run`).

All engines of a process also share one dialect of SQLite, and with it the statements that it compiled: as an engine
has a dialect of its own, each of the thousands of repositories compiled the same statements anew.
"""

from __future__ import annotations

import functools
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

from sqlalchemy import Engine

from cas_ckpt.index import index, meta, sqlite
from cas_ckpt.index.database import IN_MEMORY, Database, open_database, table_names
from cas_ckpt.index.index import ensure_schema


def install() -> None:
    """From now on, in this process."""
    index.ensure_schema = _ensure_schema
    sqlite.open_engine = _open_engine


@contextmanager
def migrations_run() -> Iterator[None]:
    """A time in which Alembic makes every new index."""
    before, index.ensure_schema = index.ensure_schema, ensure_schema
    try:
        yield
    finally:
        index.ensure_schema = before


_new_engine = sqlite.open_engine


def _open_engine(connect: Callable[[], sqlite3.Connection], **how: bool) -> Engine:
    engine, first = _new_engine(connect, **how), _first_engine()
    engine.dialect, engine._compiled_cache = first.dialect, first._compiled_cache
    return engine


@functools.cache
def _first_engine() -> Engine:
    """An engine whose dialect knows SQLite, as it has been connected."""
    engine = _new_engine(sqlite.memory_connection, shared=True)
    engine.connect().close()
    engine.dispose()
    return engine


def _ensure_schema(database: Database) -> None:
    is_new = database.path is None or not os.path.exists(database.path) or not database.path.stat().st_size
    if database.engine.dialect.name == "sqlite" and is_new and not database.read_only:
        script = _script()
        with database.writing() as connection:
            if not table_names(connection):
                driver = cast(sqlite3.Connection, connection.connection.driver_connection)
                for statement in script:
                    driver.execute(statement)
    ensure_schema(database)


@functools.cache
def _script() -> tuple[str, ...]:
    """What makes an empty database one of the newest revision."""
    database = open_database(IN_MEMORY, store_id="", read_only=False)
    ensure_schema(database)
    with database.reading() as connection:
        made = [sql for (sql,) in connection.exec_driver_sql("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")]
        ((revision,),) = connection.exec_driver_sql("SELECT version_num FROM alembic_version").fetchall()
        views = " ".join(meta.made_views(connection))
    database.close()
    rows = (f"alembic_version VALUES ('{revision}')", f"t_meta VALUES ('{meta.VIEWS}', '{views}')")
    return (*made, *(f"INSERT INTO {row}" for row in rows))
