"""The index in PostgreSQL: a schema of its own for each repository, and a lock that is never held for ever.

    cas_ckpt_<store id>     the tables of one repository; nothing outside of this schema is ever touched
    pg_temp                 an index that is being made anew; the server removes it with the session

Invariant: tables are dropped by name, in the repository's own schema, and only if it holds an index of
ours. Whoever writes has the advisory lock of that schema; a client that stops while it has it is
ended by the server, and whoever waits for it too long gets an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from typing import Any, cast

from sqlalchemy import URL, Connection, Dialect, Engine, RootTransaction, StaticPool, Table, create_engine
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from cas_ckpt.errors import InvalidInputError, PermissionDeniedError
from cas_ckpt.index.schema import (
    FORGOTTEN,
    GC_CANDIDATES,
    HEADS,
    LOCATIONS,
    META,
    METADATA,
    OBJECTS,
    PLAN_RANKS,
    PLAN_SHAPES,
    PLANS,
    REF_MOVES,
    REF_RECORDS,
    REFS,
    RESTORES,
    SCRUBS,
    VERSION_TABLE,
    our_names,
)

LOCK_TIMEOUT_S = 60.0
"""How long a writer waits for another client before it gives up."""

IDLE_TIMEOUT_S = 30.0
"""A client that does nothing for so long inside a writing transaction is ended by the server."""

REPLACING_IDLE_S = 600.0
"""The same where an index is replaced: whoever does it lists all packs once more meanwhile."""

TEMPORARY = "pg_temp"
"""The schema of what ends with its session."""

_DRIVER = "postgresql+psycopg"
_WANTED = "postgresql+psycopg://USER@HOST/DATABASE"
_SECRET = re.compile(r"pass(word|wd)?$|secret|token", re.IGNORECASE)
_UNIQUE_VIOLATION = "23505"
_PLANNER = {"random_page_cost": "1.1"}
"""Else the server reads a whole table of a million rows for ten thousand keys, as if that were on a turning disk."""

_TIMES = {
    "connect_timeout": 10, "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}  # fmt: skip
"""Seconds, and milliseconds at the end. One that answers nothing is given up before a Ctrl-C, which waits for it, is
said twice; a server that is gone without a word is noticed in a minute, not after hours."""

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


_ESCAPE = "index: in the URL, write @ in a user or password as %40, / as %2F, : as %3A, ? as %3F, % as %25"


def parse_url(text: str) -> URL:
    """The URL of a database of PostgreSQL; what it hides when it is printed is its password.

    Raises:
        InvalidInputError: another database or driver, or a secret that could not be hidden. Never says what was given.
    """
    if text.partition("?")[0].count("@") > 1:  # the rest of a password would be taken for the host, and shown
        raise InvalidInputError(_ESCAPE)
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise InvalidInputError(f"index: the URL cannot be read; wanted {_WANTED}") from None
    if "@" in (url.host or ""):
        raise InvalidInputError(_ESCAPE)
    if url.drivername in ("postgresql", "postgres"):
        url = url.set(drivername=_DRIVER)
    if url.drivername != _DRIVER:
        raise InvalidInputError(f"index: found a URL of {url.drivername}; wanted {_WANTED}, or the path of a file")
    given = url.query.get("password")
    if given is not None and not url.password:
        url = url.set(password=given if isinstance(given, str) else given[-1])
    url = url.difference_update_query(["password"])
    if any(_SECRET.search(name) for name in url.query):
        raise InvalidInputError(
            "index: the URL has a secret among its options, where it would be shown; give it by a service file or "
            "another way of libpq (docs/remotes.md)"
        )
    return url


def from_settings(text: str) -> str:
    """The URL that a repository's settings name, so that no password of ours is shown to whatever server that is.

    Raises:
        InvalidInputError: as `parse_url`; or an option that would give that server, or a file, what is ours.
    """
    url = parse_url(text)
    refused = sorted(url.query.keys() - _FROM_ANYBODY)
    if "service" in url.query and (url.host or {"host", "hostaddr"} & url.query.keys()):
        refused.append("service, with a host")  # the password of the service would go there
    if refused:
        raise InvalidInputError(
            f"index: the repository's settings may not give {refused[0]!r:.60}, as anybody may have written them: give "
            "it in the environment (docs/remotes.md)"
        )
    given = url.query.get("require_auth", "")
    methods = [one.strip() for one in (given if isinstance(given, str) else given[-1]).split(",") if one.strip()]
    if not set(methods) <= _SAFE_METHODS:
        methods = []
    url = url.update_query_dict({"require_auth": ",".join(methods) or "!password,!md5"})
    return url.render_as_string(hide_password=False)


def hosts_of(text: str) -> list[str]:
    """The hosts, addresses and folders of sockets that a URL names; none: the user's environment, or libpq, does."""
    url = parse_url(text)
    given = [url.host or ""]
    for name in ("host", "hostaddr"):
        found = url.query.get(name, ())
        given += [found] if isinstance(found, str) else found
    return [host for one in given for each in one.split(",") if (host := each.strip())]


_SAFE_METHODS = frozenset({"scram-sha-256", "gss", "sspi", "none"})
"""Ways to say who we are that show no password to the server."""

_FROM_ANYBODY = frozenset({
    "application_name", "channel_binding", "client_encoding", "connect_timeout", "dbname", "gssencmode", "host",
    "hostaddr", "keepalives", "keepalives_count", "keepalives_idle", "keepalives_interval", "krbsrvname",
    "load_balance_hosts", "options", "port", "require_auth", "service", "ssl_max_protocol_version",
    "ssl_min_protocol_version", "sslcert", "sslcertmode", "sslcrl", "sslcrldir", "sslkey", "sslmode",
    "sslnegotiation", "sslrootcert", "sslsni", "target_session_attrs", "tcp_user_timeout", "user",
})  # fmt: skip
"""Options of libpq that do no harm, whoever wrote them; not among them: what delegates credentials, or writes files."""


def open_engine(url: URL, schema: str) -> Engine:
    """Connections to the server; one that all share if `schema` holds what is temporary.

    Sessions keep nothing from one transaction to the next, as a pool such as PgBouncer may give each to another
    session: which schema is meant is said in each (`entered`), and no statement is prepared.

    Raises:
        InvalidInputError: there is no driver.
    """
    own: dict[str, Any] = {"poolclass": StaticPool} if schema == TEMPORARY else {"pool_use_lifo": True}
    kept = {name: value for name, value in _TIMES.items() if name not in url.query}
    options = {"prepare_threshold": None, "fallback_application_name": "cas_ckpt", **kept}
    try:
        return create_engine(url, connect_args=options, **own)
    except ImportError as error:
        raise InvalidInputError(f"index {url}: no driver ({error}); pip install 'cas-ckpt[postgres]'") from error


@contextmanager
def entered(engine: Engine, schema: str, *, isolation: str = "READ COMMITTED", **more: str) -> Iterator[Connection]:
    """A transaction that sees the tables of `schema` alone; committed at the end, rolled back on any error.

    A connection of the pool that died meanwhile is noticed by the first statement, before anything was asked: then
    another one is made.

    Args:
        more: Settings that end with the transaction.
    """
    connection = _begun(engine, schema, isolation, more)
    with connection, cast(RootTransaction, connection.get_transaction()):
        yield connection


def _begun(engine: Engine, schema: str, isolation: str, more: Mapping[str, str]) -> Connection:
    settings = {"search_path": schema if schema == TEMPORARY else quoted(schema), **_PLANNER, **more}
    text = "SELECT " + ", ".join(["set_config(%s, %s, true)"] * len(settings))
    values = tuple(chain.from_iterable(settings.items()))
    is_first = True
    while True:
        connection = engine.connect()
        try:
            connection = connection.execution_options(isolation_level=isolation)
            connection.begin()
            connection.exec_driver_sql(text, values)
        except BaseException as error:
            connection.close()
            if not (is_first and isinstance(error, DBAPIError) and error.connection_invalidated):
                raise
            is_first = False
        else:
            return connection


@contextmanager
def writing(
    engine: Engine, schema: str, wait_s: float | None = None, *, idle_s: float | None = None
) -> Iterator[Connection]:
    """A transaction that is the only one that writes into `schema`.

    Args:
        wait_s: How long to wait for another client, if not as long as usual.
        idle_s: How long the transaction may wait for this client, if not as long as usual.

    Raises (translated by the caller): a lock timeout, lacking rights.
    """
    limits = {
        "lock_timeout": f"{LOCK_TIMEOUT_S if wait_s is None else wait_s:g}s",
        "idle_in_transaction_session_timeout": f"{IDLE_TIMEOUT_S if idle_s is None else idle_s:g}s",
    }
    with entered(engine, schema, **limits) as connection:
        if schema != TEMPORARY:  # its tables are this session's alone
            take_writer_lock(connection, schema)
        yield connection


def take_writer_lock(connection: Connection, schema: str) -> None:
    """Be the only one who writes into `schema` until the transaction ends."""
    connection.exec_driver_sql("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (schema,))


def make_schema(connection: Connection, schema: str) -> None:
    """Make the schema if there is none; its writers are locked out."""
    if schema != TEMPORARY and not _exists(connection, schema):
        connection.exec_driver_sql(f"CREATE SCHEMA {quoted(schema)}")  # not IF NOT EXISTS, which asks for rights first


def require_rights(connection: Connection, schema: str, *, to_write: bool) -> None:
    """Raise PermissionDeniedError unless this role may use the schema, if there is one, and write its tables.

    Raises:
        PermissionDeniedError: it may not, or the server is a standby.
    """
    row = connection.exec_driver_sql(_RIGHTS, (schema,)).first()
    if row is None:
        return
    role, may_use, may_write, is_standby = row
    place = f"index {connection.engine.url}"
    if not may_use:
        raise PermissionDeniedError(
            f"{place}: the role {role!r} may not use the schema {schema}: whoever owns it can let it; on the command "
            "line, cas-ckpt index roles prints the SQL"
        )
    if to_write and is_standby:
        raise PermissionDeniedError(
            f"{place}: this server is a standby, which can only be read: open the repository with read_only=True, or "
            "name the primary server"
        )
    if to_write and may_write is False:
        raise PermissionDeniedError(
            f"{place}: the role {role!r} may only read it: open the repository with read_only=True, or with a role "
            "that may write"
        )


_RIGHTS = """
    SELECT current_user, has_schema_privilege(n.oid, 'USAGE'),
           (SELECT has_table_privilege(c.oid, 'INSERT') FROM pg_class c
            WHERE c.relnamespace = n.oid AND c.relname IN ('t_packs', 'packs') AND c.relkind = 'r'),
           pg_is_in_recovery()
    FROM pg_namespace n WHERE n.nspname = %s
"""


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
            cursor.adapters.register_dumper(bytes, _bytes_dumper())
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


@lru_cache(maxsize=1)
def _bytes_dumper() -> type[Any]:
    """How the driver is to write bytes: told the type of a column alone, it does so in Python, a microsecond each."""
    from psycopg import adapters
    from psycopg.adapt import PyFormat

    return adapters.get_dumper(bytes, PyFormat.BINARY)


def table_names(connection: Connection) -> set[str]:
    """Tables and views of the schema that the connection sees; empty if there is no such schema."""
    return set(connection.exec_driver_sql(_NAMES.format("'r', 'p', 'v', 'm', 'f'")).scalars())


def view_names(connection: Connection) -> set[str]:
    """Those of them that are views."""
    return set(connection.exec_driver_sql(_NAMES.format("'v'")).scalars())


def drop_tables(connection: Connection, schema: str) -> None:
    """Drop our tables, of whatever revision, in `schema`, and the schema itself if nothing else is in it.

    The schema stays where this role could not make it again.
    """
    ours = our_names() | {VERSION_TABLE.name}
    for name in sorted(ours & table_names(connection) - view_names(connection)):
        connection.exec_driver_sql(f"DROP TABLE {quoted(name)}")
    may_make = "SELECT has_database_privilege(current_database(), 'CREATE')"
    if table_names(connection) or not _exists(connection, schema):
        return
    if connection.exec_driver_sql(may_make).scalar_one():  # else it was given to this role, and stays
        connection.exec_driver_sql(f"DROP SCHEMA {quoted(schema)}")  # not CASCADE: what is not ours refuses it


# --- roles: what each may do, as SQL that makes them, which people run ------------------------------
# reader: reads tables and views. writer: and adds rows; removes only what it replaces. maintainer: owns the schema,
# makes and upgrades the tables, drops rows of packs (gc, repack, rebuild, fsck's log).


_OF_MAINTAINERS = (GC_CANDIDATES, SCRUBS)
_UPDATED = (META, REFS, HEADS, REF_RECORDS, OBJECTS)
_DELETED = (LOCATIONS, PLANS, PLAN_RANKS, PLAN_SHAPES, RESTORES, REF_MOVES, FORGOTTEN)
"""Tables that a writer changes rows of, and removes rows from: places that are not known, old plans and restores, and
what was last read of refs and forgotten commits."""

_MOST_NAME_BYTES = 63

_TEMPLATE = """\
-- Roles for the index of the repository {store_id}. Run it as a superuser, in the database of the index, once the
-- maintainer has made the index, and again after an upgrade of cas_ckpt or a rebuild of a damaged index: running it
-- again does no harm. Then give them to people: GRANT {reader} TO ann; and a password: ALTER ROLE ann LOGIN.
BEGIN;
{roles}
CREATE SCHEMA IF NOT EXISTS {schema};
ALTER SCHEMA {schema} OWNER TO {maintainer};
DO $do$ DECLARE one record; BEGIN
    FOR one IN SELECT c.oid::regclass AS name, c.relkind FROM pg_class c
               WHERE c.relnamespace = {schema_text}::regnamespace AND c.relkind IN ('r', 'v') LOOP
        EXECUTE format('ALTER %s %s OWNER TO {maintainer_in_text}',
                       CASE one.relkind WHEN 'v' THEN 'VIEW' ELSE 'TABLE' END, one.name);
    END LOOP;
    EXECUTE format('GRANT CONNECT, TEMPORARY ON DATABASE %I TO {all_in_text}', current_database());
END $do$;
REVOKE ALL ON SCHEMA {schema} FROM PUBLIC, {writer}, {reader};
REVOKE ALL ON ALL TABLES IN SCHEMA {schema} FROM PUBLIC, {writer}, {reader};
GRANT USAGE ON SCHEMA {schema} TO {writer}, {reader};
GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {writer}, {reader};
ALTER DEFAULT PRIVILEGES FOR ROLE {maintainer} IN SCHEMA {schema} GRANT SELECT ON TABLES TO {writer}, {reader};
DO $do$ BEGIN
    IF to_regclass({packs_text}) IS NOT NULL THEN
        GRANT INSERT ON {inserted} TO {writer};
        GRANT UPDATE ON {updated} TO {writer};
        GRANT DELETE ON {deleted} TO {writer};
    ELSE
        RAISE NOTICE 'there is no index yet: let the maintainer open the repository, then run this again';
    END IF;
END $do$;
COMMIT;
"""

_ROLE = "DO $do$ BEGIN CREATE ROLE {} NOLOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $do$;"


def roles_sql(store_id: str, *, maintainer: str, writer: str, reader: str) -> str:
    """The SQL that makes the three roles, gives them the index of the repository `store_id`, and what each may do.

    Raises:
        InvalidInputError: no role can be called so, or two are called alike.
    """
    names = (maintainer, writer, reader)
    for name in names:
        if not name or len(name.encode()) > _MOST_NAME_BYTES or not name.isprintable() or "$do$" in name:
            raise InvalidInputError(f"{name!r:.80} cannot be the name of a role: 1 to {_MOST_NAME_BYTES} bytes of text")
    if len(set(names)) < len(names):
        raise InvalidInputError("roles are called alike: give the maintainer, the writer and the reader a name each")
    schema = quoted(schema_of(store_id))
    inserted = [table for table in METADATA.sorted_tables if table not in _OF_MAINTAINERS]

    def tables(some: list[str]) -> str:
        return ", ".join(f"{schema}.{name}" for name in some)

    return _TEMPLATE.format(
        store_id=store_id,
        roles="\n".join(_ROLE.format(quoted(name)) for name in names),
        schema=schema,
        schema_text=_text(schema),
        packs_text=_text(f"{schema}.t_packs"),
        maintainer=quoted(maintainer),
        maintainer_in_text=_in_format(quoted(maintainer)),
        writer=quoted(writer),
        reader=quoted(reader),
        all_in_text=_in_format(", ".join(map(quoted, names))),
        inserted=tables(sorted(table.name for table in inserted)),
        updated=tables(sorted(table.name for table in _UPDATED)),
        deleted=tables(sorted(table.name for table in _DELETED)),
    )


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"


def _in_format(value: str) -> str:
    """`value` inside of a text that is a format."""
    return value.replace("%", "%%").replace("'", "''")
