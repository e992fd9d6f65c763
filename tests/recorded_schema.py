"""A new SQLite index gets its tables from a script recorded from the migrations once, not from Alembic each time.

Thousands of tests make a repository; Alembic takes 50 ms for each and always makes the same. `ensure_schema` still
looks at every database afterwards. test_migrations.py runs the migrations themselves (`migrations_run`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from cas_ckpt.index import index
from cas_ckpt.index.database import IN_MEMORY, Database, open_database, table_names
from cas_ckpt.index.index import ensure_schema


def install() -> None:
    """From now on, in this process."""
    index.ensure_schema = _ensure_schema


@contextmanager
def migrations_run() -> Iterator[None]:
    """A time in which Alembic makes every new index."""
    before, index.ensure_schema = index.ensure_schema, ensure_schema
    try:
        yield
    finally:
        index.ensure_schema = before


def _ensure_schema(database: Database) -> None:
    is_new = database.path is None or not database.path.exists() or not database.path.stat().st_size
    if database.engine.dialect.name == "sqlite" and is_new and not database.read_only:
        script = _script()
        with database.writing() as connection:
            if not table_names(connection):
                for statement in script:
                    connection.exec_driver_sql(statement)
    ensure_schema(database)


@functools.cache
def _script() -> tuple[str, ...]:
    """What makes an empty database one of the newest revision."""
    database = open_database(IN_MEMORY, store_id="", read_only=False)
    ensure_schema(database)
    with database.reading() as connection:
        made = [sql for (sql,) in connection.exec_driver_sql("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")]
        ((revision,),) = connection.exec_driver_sql("SELECT version_num FROM alembic_version").fetchall()
    database.close()
    return (*made, f"INSERT INTO alembic_version VALUES ('{revision}')")
