"""The index in PostgreSQL: a schema of its own for each repository, and a lock that nobody holds for ever.

    cas_ckpt_<store id>     the tables of one repository; nothing outside of this schema is ever touched
    pg_temp                 an index that is being made anew; the server removes it with the session

Invariant: tables are dropped by name, in the repository's own schema, and only if it holds an index of
ours. Whoever writes has the advisory lock of that schema; a client that stops while it has it is
ended by the server, and whoever waits for it too long gets an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from sqlalchemy import URL, Connection, Dialect, Engine, StaticPool, Table, create_engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError

from cas_ckpt.errors import InvalidInputError
from cas_ckpt.index.schema import VERSION_TABLE, our_names

LOCK_TIMEOUT_S = 60.0
"""How long a writer waits for another client before it gives up."""

IDLE_TIMEOUT_S = 30.0
"""A client that does nothing for so long inside a writing transaction is ended by the server."""

TEMPORARY = "pg_temp"
"""The schema of what ends with its session."""

_UNIQUE_VIOLATION = "23505"
_PREFIX = "cas_ckpt_"
_MAX_NAME_BYTES = 63

_NAMES = """
    SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = current_schema() AND c.relkind IN ({})
"""


def schema_of(store_id: str) -> str:
    """The schema that holds the index of one repository.

    Raises:
        InvalidInputError: no schema can be called so.
    """
    name = _PREFIX + store_id
    if len(name.encode()) > _MAX_NAME_BYTES or "\0" in name:
        raise InvalidInputError(f"store id {store_id!r:.80}: no schema of PostgreSQL can be named after it")
    return name


def quoted(name: str) -> str:
    """`name` as an identifier of SQL."""
    return '"' + name.replace('"', '""') + '"'


def open_engine(url: URL, schema: str) -> Engine:
    """Connections that see the tables of `schema` alone; one that all share if they are temporary.

    Raises:
        InvalidInputError: there is no driver.
    """
    own = {"poolclass": StaticPool} if schema == TEMPORARY else {"pool_pre_ping": True}
    try:
        engine = create_engine(url, **own)
    except ImportError as error:
        raise InvalidInputError(f"index {url}: no driver ({error}); pip install 'cas-ckpt[postgres]'") from error

    @event.listens_for(engine, "connect", insert=True)
    def _connect(connection: DBAPIConnection, _record: object) -> None:
        cursor = connection.cursor()
        cursor.execute(f"SET search_path TO {schema if schema == TEMPORARY else quoted(schema)}")
        cursor.close()
        connection.commit()

    return engine


def take_writer_lock(connection: Connection, schema: str, wait_s: float | None = None) -> None:
    """Be the only one who writes into `schema` until the transaction ends; make it if there is none.

    Args:
        wait_s: How long to wait for another client, if not as long as usual.

    Raises (translated by the caller): a lock timeout, lacking rights.
    """
    connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_S if wait_s is None else wait_s:g}s'")
    connection.exec_driver_sql(f"SET LOCAL idle_in_transaction_session_timeout = '{IDLE_TIMEOUT_S:g}s'")
    connection.exec_driver_sql("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (schema,))
    if schema != TEMPORARY and not _exists(connection, schema):
        connection.exec_driver_sql(f"CREATE SCHEMA {quoted(schema)}")  # not IF NOT EXISTS, which asks for rights first


def _exists(connection: Connection, schema: str) -> bool:
    found = connection.exec_driver_sql("SELECT 1 FROM pg_namespace WHERE nspname = %s", (schema,))
    return found.first() is not None


@lru_cache(maxsize=128)
def inserting(table: Table, dialect: Dialect) -> str:
    """The text of an insert of many rows, whose values come as one array for each column: one statement, not one a row.

    Rows whose key is there are left out.
    """
    kinds = [column.type.compile(dialect=dialect).partition(" COLLATE ")[0] for column in table.columns]
    columns = ", ".join(quoted(column.name) for column in table.columns)
    values = ", ".join(f"%b::{kind}[]" for kind in kinds)  # as bytes: as text, digests cost six times as much
    return f"INSERT INTO {quoted(table.name)} ({columns}) SELECT * FROM unnest({values}) ON CONFLICT DO NOTHING"


def copy_new(connection: Connection, table: Table, rows: Sequence[tuple[Any, ...]]) -> bool:
    """Add `rows` by COPY, in half the time of an INSERT; False if the key of one is there, and then none is added."""
    kinds = [column.type.compile(dialect=connection.dialect).partition(" COLLATE ")[0] for column in table.columns]
    driver: Any = connection.connection.driver_connection
    savepoint = connection.begin_nested()
    try:
        with driver.cursor() as cursor, cursor.copy(f"COPY {quoted(table.name)} FROM STDIN (FORMAT BINARY)") as copy:
            copy.set_types([kind.lower() for kind in kinds])
            for row in rows:
                copy.write_row(row)
    except connection.dialect.loaded_dbapi.Error as error:
        if getattr(error, "sqlstate", None) == _UNIQUE_VIOLATION:
            savepoint.rollback()
            return False
        if driver.closed:
            connection.invalidate(error)
        raise DBAPIError(f"COPY {table.name}", None, error) from error
    savepoint.commit()
    return True


def table_names(connection: Connection) -> set[str]:
    """Tables and views of the schema that the connection sees; empty if there is no such schema."""
    return set(connection.exec_driver_sql(_NAMES.format("'r', 'p', 'v', 'm', 'f'")).scalars())


def view_names(connection: Connection) -> set[str]:
    """Those of them that are views."""
    return set(connection.exec_driver_sql(_NAMES.format("'v'")).scalars())


def drop_tables(connection: Connection, schema: str) -> None:
    """Drop our tables, of whatever revision, in `schema`, and the schema itself if nothing else is in it."""
    ours = our_names() | {VERSION_TABLE.name}
    for name in sorted(ours & table_names(connection) - view_names(connection)):
        connection.exec_driver_sql(f"DROP TABLE {quoted(name)}")
    if not table_names(connection) and _exists(connection, schema):
        connection.exec_driver_sql(f"DROP SCHEMA {quoted(schema)}")  # not CASCADE: what is not ours refuses it
