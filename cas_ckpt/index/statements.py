"""Statements as text, which go to the database's driver as they are. Imports no SQLAlchemy.

`:name` stands for a value; `{keys}` for a condition on the column before it, to be one of many numbers or ids. Keys are
asked for in ascending order, which is three times as fast as any order. A connection is SQLAlchemy's, or SQLite's own
where `log` spares itself the import (0.1 to 0.2 s, longer than most logs take to read).
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


def rows(connection: AnyConnection, sql: str, **values: Any) -> Sequence[tuple[Any, ...]]:
    """The rows of a question, as plain tuples."""
    driver = sqlite_driver(connection)
    if driver is not None:
        return driver.execute(sql, values).fetchall()
    return plain_rows(cast("Connection", connection), for_postgresql(sql), values)


def rows_by_key(connection: AnyConnection, sql: str, keys: Iterable[Any], **values: Any) -> Iterator[tuple[Any, ...]]:
    """The rows of a question about many keys, as plain tuples; ordered within each of some hundred keys."""
    ordered, driver = sorted(set(keys)), sqlite_driver(connection)
    if driver is not None:
        for batch in batches(ordered, KEYS_PER_QUERY):
            yield from driver.execute(sql.replace("{keys}", _listed(batch)), values).fetchall()
        return
    for batch in batches(ordered, KEYS_PER_ARRAY):
        statement = for_postgresql(sql, of_ids=isinstance(batch[0], bytes))
        yield from plain_rows(cast("Connection", connection), statement, {"keys": batch, **values})


def change_by_number(connection: Connection, sql: str, numbers: Iterable[int], **values: Any) -> None:
    """Run a statement that changes the rows of many numbers."""
    ordered, driver = sorted(set(numbers)), sqlite_driver(connection)
    if driver is not None:
        for batch in batches(ordered, KEYS_PER_QUERY):
            driver.execute(sql.replace("{keys}", _listed(batch)), values)
        return
    for batch in batches(ordered, KEYS_PER_ARRAY):
        connection.exec_driver_sql(for_postgresql(sql), {"keys": batch, **values})


def sqlite_driver(connection: AnyConnection) -> sqlite3.Connection | None:
    """SQLite's own connection below; None: it is PostgreSQL."""
    if isinstance(connection, sqlite3.Connection):
        return connection
    is_sqlite = connection.dialect.positional
    return cast(sqlite3.Connection, connection.connection.driver_connection) if is_sqlite else None


def plain_rows(connection: Connection, statement: str, values: Mapping[str, Any]) -> Sequence[tuple[Any, ...]]:
    """The rows as PostgreSQL's driver gives them; a Row of SQLAlchemy for each costs more than the question."""
    cursor: Any = connection.exec_driver_sql(statement, values).cursor
    return cast("Sequence[tuple[Any, ...]]", cursor.fetchall())


@lru_cache(maxsize=64)
def for_postgresql(sql: str, *, of_ids: bool = False) -> str:
    """The text with the places of values as its driver has them."""
    text = re.sub(r":(\w+)", r"%(\1)s", sql.replace("%", "%%"))
    return text.replace("{keys}", f"= ANY(%(keys)b::{'bytea' if of_ids else 'bigint'}[])")


def _listed(keys: Sequence[Any]) -> str:
    texts = [f"x'{key.hex()}'" for key in keys] if isinstance(keys[0], bytes) else map(str, keys)
    return f"IN ({', '.join(texts)})"


def batches(values: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """`values` cut into runs of at most `size`."""
    for start in range(0, len(values), size):
        yield values[start : start + size]
