"""Statements as text, which go to the database's driver as they are. Imports no SQLAlchemy.

`:name` stands for a value; `{keys}` for a condition on the column before it, to be one of many numbers, ids or texts.
Keys are asked for in ascending order, which is three times as fast as any order. A connection is SQLAlchemy's, or
SQLite's own where `log` spares itself the import (0.1 to 0.2 s, longer than most logs take to read). To build, compile
and bind a statement of SQLAlchemy anew costs ten times what SQLite needs for it.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias, cast

if TYPE_CHECKING:
    from sqlalchemy import Connection

    AnyConnection: TypeAlias = Connection | sqlite3.Connection

KEYS_PER_QUERY = 250
"""Measured: more keys in one IN list are slower on SQLite."""

KEYS_PER_ARRAY = 10_000
"""PostgreSQL takes them as one value, and each question costs it a round trip."""

_PLACES = re.compile(r"\{keys\}|:(\w+)")
_ARRAYS = {bytes: "bytea", str: "text", int: "bigint"}

_Values: TypeAlias = Mapping[str, Any] | Sequence[Any]


def rows(connection: AnyConnection, sql: str, **values: Any) -> Sequence[tuple[Any, ...]]:
    """The rows of a question, as plain tuples."""
    return cast("Sequence[tuple[Any, ...]]", _rows(connection, _text(connection, sql), values).fetchall())


def each_row(connection: AnyConnection, sql: str, **values: Any) -> Iterator[tuple[Any, ...]]:
    """The rows of a question one by one, for very many; to be gone through at once."""
    return iter(_rows(connection, _text(connection, sql), values))


def rows_by_key(connection: AnyConnection, sql: str, keys: Iterable[Any], **values: Any) -> Iterator[tuple[Any, ...]]:
    """The rows of a question about many keys, as plain tuples; ordered within each of some hundred keys."""
    for text, some in _keyed(connection, sql, keys, values):
        yield from _rows(connection, text, some).fetchall()


def change(connection: AnyConnection, sql: str, **values: Any) -> int:
    """Run a statement that changes rows; returns how many."""
    return _change(connection, _text(connection, sql), values)


def change_by_key(connection: AnyConnection, sql: str, keys: Iterable[Any], **values: Any) -> int:
    """Run a statement that changes the rows of many keys; returns how many."""
    return sum(_change(connection, text, some) for text, some in _keyed(connection, sql, keys, values))


def objects_by_id(connection: AnyConnection, digests: Iterable[bytes]) -> Iterator[tuple[bytes, int, int]]:
    """Id, number and kind of these objects; unknown ones are left out."""
    asked = "SELECT o.digest, o.object_id, o.kind FROM t_objects o WHERE o.digest {keys}"
    return cast("Iterator[tuple[bytes, int, int]]", rows_by_key(connection, asked, digests))


def sqlite_driver(connection: AnyConnection) -> sqlite3.Connection | None:
    """SQLite's own connection below; None: it is PostgreSQL."""
    if isinstance(connection, sqlite3.Connection):
        return connection
    is_sqlite = connection.dialect.positional
    return cast(sqlite3.Connection, connection.connection.driver_connection) if is_sqlite else None


def batches(values: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """`values` cut into runs of at most `size`."""
    for start in range(0, len(values), size):
        yield values[start : start + size]


# --- as the drivers have them ---------------------------------------------------------------------


def _rows(connection: AnyConnection, text: str, values: _Values) -> Any:
    """The driver's cursor over the rows: a Row of SQLAlchemy for each costs more than the question."""
    driver = sqlite_driver(connection)
    if driver is not None:
        return driver.execute(text, values)
    return cast("Connection", connection).exec_driver_sql(text, cast(Any, values)).cursor


def _change(connection: AnyConnection, text: str, values: _Values) -> int:
    driver = sqlite_driver(connection)
    if driver is not None:
        return driver.execute(text, values).rowcount
    return cast("Connection", connection).exec_driver_sql(text, cast(Any, values)).rowcount


def _text(connection: AnyConnection, sql: str) -> str:
    return sql if sqlite_driver(connection) is not None else _for_postgresql(sql)


def _keyed(
    connection: AnyConnection, sql: str, keys: Iterable[Any], values: Mapping[str, Any]
) -> Iterator[tuple[str, _Values]]:
    """The statement for some hundred keys at a time, and what its places stand for."""
    ordered = sorted(set(keys))
    if sqlite_driver(connection) is None:
        for batch in batches(ordered, KEYS_PER_ARRAY):
            yield _for_postgresql(sql, _ARRAYS[type(batch[0])]), {"keys": batch, **values}
        return
    for batch in batches(ordered, KEYS_PER_QUERY):
        text, names = _for_sqlite(sql, len(batch))
        yield text, [one for name in names for one in ((values[name],) if name else batch)]


@lru_cache(maxsize=256)
def _for_sqlite(sql: str, num_keys: int) -> tuple[str, list[str]]:
    """The text with its places in order, and the names of these; of the keys it is empty."""
    listed = f"IN ({', '.join('?' * num_keys)})"
    return _PLACES.sub(lambda place: "?" if place[1] else listed, sql), _PLACES.findall(sql)


@lru_cache(maxsize=128)
def _for_postgresql(sql: str, keys: str = "bigint") -> str:
    """The text with the places of values as its driver has them; keys as bytes: as text, ids cost six times as much."""
    listed = f"= ANY(%(keys)b::{keys}[])"
    return _PLACES.sub(lambda place: f"%({place[1]})s" if place[1] else listed, sql.replace("%", "%%"))
