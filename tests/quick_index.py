"""A new SQLite index is a copy of one that the migrations made when this module was imported.

Thousands of tests make a repository; Alembic takes 50 ms for each and always makes the same. `ensure_schema` still
looks at every database afterwards. test_migrations.py runs the migrations themselves (`migrations_run`).
"""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import cast

from sqlalchemy import Engine, StaticPool, create_engine

from cas_ckpt.index import index, sqlite
from cas_ckpt.index.database import Database
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
    if database.engine.dialect.name == "sqlite" and not database.read_only:
        if database.path is None:
            _fill_memory(database.engine)
        else:
            _make_file(database.path)
    ensure_schema(database)


def _fill_memory(engine: Engine) -> None:
    with closing(engine.raw_connection()) as connection:
        driver = cast(sqlite3.Connection, connection.driver_connection)
        if not driver.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            with _ONE_COPY:
                _TEMPLATE.backup(driver)


def _make_file(path: Path) -> None:
    """The whole file or none; Alembic makes it where that cannot be, or where a group has rights of its own."""
    with suppress(OSError):
        if path.exists() or path.parent.stat().st_mode & stat.S_IWGRP:
            return
        fd = os.open(path.parent, os.O_TMPFILE | os.O_RDWR, 0o666)
        try:
            os.write(fd, _FILE)
            os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd)  # else Python does not follow the link
        finally:
            os.close(fd)


def _made(connect: Callable[[], sqlite3.Connection], path: Path | None = None) -> sqlite3.Connection:
    """A connection to a new database, which Alembic has made."""
    engine = create_engine("sqlite://", creator=connect, poolclass=StaticPool)
    ensure_schema(Database(engine, "template", path=path))
    return cast(sqlite3.Connection, engine.raw_connection().driver_connection)


def _made_file() -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder, "index")
        _made(lambda: sqlite.writer(path), path).close()
        return path.read_bytes()


_ONE_COPY = Lock()
_TEMPLATE, _FILE = _made(sqlite.memory_connection), _made_file()
