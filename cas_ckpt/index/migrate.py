"""Bringing the schema of a database to the revision that this version needs.

Invariant: Alembic is imported only when there is something to do, so that `log` starts fast.
Knows nothing of what the tables mean.
"""

from __future__ import annotations

from pathlib import Path
from threading import Lock

from sqlalchemy import Connection, select

import cas_ckpt
from cas_ckpt.errors import CorruptionError, InternalError, NotFoundError, UnsupportedVersionError
from cas_ckpt.index.database import Database, table_names
from cas_ckpt.index.db_errors import REBUILD
from cas_ckpt.index.schema import META, REVISIONS, VERSION_TABLE, refuse_foreign

_ONE_MIGRATION = Lock()
"""Alembic keeps what it works on in globals: one migration at a time in a process."""


def ensure_schema(database: Database) -> None:
    """Make or upgrade the tables, unless they are of the newest revision already.

    Raises:
        NotFoundError: there are no tables, and none may be made.
        UnsupportedVersionError: the schema is newer than this version of cas_ckpt.
        CorruptionError: the tables are damaged.
        ConflictError: there are tables that are not ours.
    """
    with database.reading() as connection:
        found = read_revision(connection, database.place)
    if found == REVISIONS[-1]:
        return
    if database.read_only and found is None:
        raise NotFoundError(f"index {database.place}: there is none in it; open it once for writing, which makes it")
    if database.read_only:
        raise UnsupportedVersionError(
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


def _upgrade(database: Database) -> None:
    """Run the migrations in one writing transaction: another process waits, then finds the work done."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    with _ONE_MIGRATION, database.writing() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, REVISIONS[-1])


def migrations_folder() -> Path:
    """Where the migrations are: inside the installed package, or beside it in a checkout."""
    package = Path(cas_ckpt.__file__).parent
    for folder in (package / "migrations", package.parent / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise InternalError(
        f"the migrations of the index are in neither {package} nor {package.parent}; reinstall cas-ckpt"
    )
