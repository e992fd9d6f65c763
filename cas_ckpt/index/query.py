"""SQL that people write: one query that answers with rows, read-only by the database's own means, within limits.

    SQLite      a connection of its own to the file, opened for reading (an index in memory is copied), under an
                authorizer that lets nothing through but reading what an index has; a handler that SQLite calls every
                few thousand steps looks at the clock
    PostgreSQL  a session of its own, which ends with the query and so takes with it whatever it locked or set; a
                read-only transaction with a statement_timeout; a cursor, which is declared for one query alone

Rows are taken one at a time, until there are no more or a limit is reached: that is an error, never fewer rows.

Invariant: whatever the text says, no row changes. Values are None, int, float, str or bytes. Must not know what the
views mean.
"""

from __future__ import annotations

import functools
import json
import re
import sqlite3
import statistics
from collections.abc import Callable, Container, Generator, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, NamedTuple, cast

from cas_ckpt import clock
from cas_ckpt.arguments import whole_number
from cas_ckpt.errors import InvalidInputError, TooLargeError, UnsupportedVersionError, shown_value
from cas_ckpt.index import postgres, remembered, sqlite
from cas_ckpt.index.database import Database, memory_copy
from cas_ckpt.index.db_errors import REFUSED, query_refused
from cas_ckpt.index.index import Index
from cas_ckpt.index.schema import VIEWS_VERSION

_INT64 = 1 << 63


@dataclass(frozen=True, slots=True)
class QueryLimits:
    """Limits of a query; beyond them is an error.

    Attributes:
        max_rows: Rows.
        max_bytes: Bytes of all values together: 8 of each, and besides of texts and bytes their length, of an
            integer 8 for every 64 bits.
        timeout_s: Seconds.
    """

    max_rows: int
    max_bytes: int
    timeout_s: float


class Answer(NamedTuple):
    """The answer to a query: the names of its columns, and its rows."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


def run_query(index: Index, query: str, parameters: Mapping[str, Any], limits: QueryLimits) -> Answer:
    """The answer of `index` to one query.

    Args:
        parameters: Name -> value of every `:name` in it.
    Raises:
        InvalidInputError: it is not one query, or the database refuses it, in whose words; a parameter that is
            missing, not in it, or of a kind that no database has.
        TooLargeError: one of the limits; says which.
        UnsupportedVersionError: the index has earlier views, or none, and may not be written.
    """
    if "\0" in query:  # PostgreSQL would read what is before it
        raise InvalidInputError("sql: there is a NUL in the query: give bytes that hold one as a parameter")
    names = frozenset(found[1] for found in _PARAMETERS.finditer(query) if found[1])
    values = _values(names, parameters)
    if index.read(remembered.views_version) < VIEWS_VERSION:
        raise UnsupportedVersionError(
            f"index {index.place}: its views are of an earlier version, and it is opened for reading only; open it "
            "once for writing, which makes them"
        )
    database = index._database
    ask = _ask_sqlite if database.schema is None else _ask_postgres
    return ask(database, query, values, _Taken(limits))


# --- values ---------------------------------------------------------------------------------------

_PARAMETERS = re.compile(r"""'[^']*'|"[^"]*"|--[^\n]*|/\*.*?\*/|::|:([A-Za-z_]\w*)""", re.DOTALL)
"""A parameter; or what may have a colon in it and is none: texts, quoted names, comments, casts."""


def _values(names: frozenset[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters as databases take them; truth is 1 and 0, as in the views."""
    missing, more = sorted(names - given.keys()), sorted(given.keys() - names)
    if missing:
        raise InvalidInputError(f"sql: the query has a parameter :{missing[0]}: give {missing[0]}=... with it")
    if more:
        raise InvalidInputError(
            f"sql: there is no parameter :{more[0]} in the query ({', '.join(sorted(names)) or 'it has none'})"
        )
    return {name: _value(name, value) for name, value in given.items()}


def _value(name: str, value: Any) -> Any:
    kind = str(getattr(value, "dtype", "")) if getattr(value, "shape", None) == () else type(value).__name__
    if value is None or isinstance(value, str):
        return value if value is None else str(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if "bool" in kind:
        return int(bool(value))
    whole = whole_number(value)
    if whole is not None and -_INT64 <= whole < _INT64:
        return whole
    if isinstance(value, float) or "float" in kind:  # of NumPy or torch
        return float(value)
    raise InvalidInputError(
        f"sql: the parameter {name} is {shown_value(value)}: give text, a number of 64 bits, bytes or None"
    )


_PLAIN = frozenset({type(None), int, float, str, bytes})

_MOST_DIGITS = 307
"""A longer number is text: no float can hold it, and Python prints no integer of more than 4,300."""


def _plain(value: Any) -> Any:
    """A value of PostgreSQL as SQLite would have it."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, Decimal):
        if value.is_finite() and value.adjusted() > _MOST_DIGITS:
            return str(value)
        return int(value) if value.is_finite() and value == value.to_integral_value() else float(value)
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    return json.dumps(value) if isinstance(value, (dict, list)) else str(value)


class _Taken:
    """The rows of an answer so far, and the limits that it must keep."""

    def __init__(self, limits: QueryLimits) -> None:
        self.limits = limits
        self.rows: list[tuple[Any, ...]] = []
        self._num_bytes = 0
        self._end_s = clock.monotonic_s() + limits.timeout_s

    def left_s(self) -> float:
        """Seconds that are left."""
        return self._end_s - clock.monotonic_s()

    def is_late(self) -> bool:
        """Whether the time is over."""
        return self.left_s() < 0

    def late(self) -> TooLargeError:
        """The error to raise then."""
        return TooLargeError(
            f"sql: no answer within {self.limits.timeout_s:g} seconds: name a commit, a ref or a key in it, or give "
            "more time with timeout_s="
        )

    def too_long(self) -> TooLargeError:
        """The error to raise for values that are too long."""
        return TooLargeError(
            f"sql: more than {self.limits.max_bytes} bytes of values: ask for fewer columns, or give more with "
            "max_bytes="
        )

    def take(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Take all rows.

        Raises:
            TooLargeError: a limit.
        """
        for row in rows:
            if len(self.rows) >= self.limits.max_rows:
                raise TooLargeError(
                    f"sql: more than {self.limits.max_rows} rows: ask for fewer (LIMIT), or give more with max_rows="
                )
            self._num_bytes += 8 * len(row) + sum(
                [
                    each.bit_length() // 64 * 8 if type(each) is int else len(each)
                    for each in row
                    if type(each) in (int, str, bytes)
                ]
            )
            if self._num_bytes > self.limits.max_bytes:
                raise self.too_long()
            if self.is_late():
                raise self.late()
            self.rows.append(row)


# --- SQLite -----------------------------------------------------------------------------------------

_STEPS_PER_LOOK = 1000
"""Steps of SQLite between two looks at the clock."""

_PRAGMAS = (
    "temp_store=FILE",  # sorting
    "query_only=ON",
    "case_sensitive_like=ON",  # as in PostgreSQL
    "trusted_schema=ON",  # until SQLite 3.41 views may not use its JSON functions otherwise; see `_FUNCTIONS`
)

_FUNCTIONS: Final = frozenset({
    "->", "->>", "abs", "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "avg", "ceil", "ceiling", "changes",
    "char", "coalesce", "concat", "concat_ws", "cos", "cosh", "count", "cume_dist", "current_date", "current_time",
    "current_timestamp", "date", "datetime", "degrees", "dense_rank", "exp", "first_value", "floor", "format", "glob",
    "group_concat", "hex", "if", "ifnull", "iif", "instr", "json", "json_array", "json_array_length", "json_extract",
    "json_group_array", "json_group_object", "json_insert", "json_object", "json_patch", "json_quote", "json_remove",
    "json_replace", "json_set", "json_type", "json_valid", "julianday", "lag", "last_value", "lead", "length", "like",
    "likelihood", "likely", "ln", "log", "log10", "log2", "lower", "ltrim", "max", "median", "min", "mod", "nth_value",
    "ntile", "nullif", "octet_length", "percent_rank", "percentile", "percentile_cont", "percentile_disc", "pi", "pow",
    "power", "printf", "quote", "radians", "random", "randomblob", "rank", "replace", "round", "row_number", "rtrim",
    "sign", "sin", "sinh", "soundex", "sqlite_version", "sqrt", "strftime", "string_agg", "substr", "substring",
    "subtype", "sum", "tan", "tanh", "time", "timediff", "total", "trim", "trunc", "typeof", "unhex", "unicode",
    "unixepoch", "unlikely", "upper", "zeroblob",
})  # fmt: skip
"""Functions of SQLite that do nothing but work out a value. Not among them: load_extension, fts3_tokenizer."""

_TABLES = "SELECT lower(name) FROM sqlite_master WHERE type = 'view' OR rootpage > 0"
"""Tables and views of an index, without virtual tables."""

_OF_SQLITE = ("sqlite_master", "sqlite_schema", "json_each", "json_tree")
_VIRTUAL_TABLES = "SELECT 1 FROM json_each('[]'), json_tree('[]')"
"""Those that queries may have. SQLite makes one where a connection first names it, which is more than reading: any
other is refused by that."""


def _ask_sqlite(database: Database, query: str, values: Mapping[str, Any], taken: _Taken) -> Answer:
    file = database.path
    with closing(memory_copy(database) if file is None else sqlite.reader(file)()) as connection:
        for pragma in _PRAGMAS:
            connection.execute("PRAGMA " + pragma)
        connection.execute(_VIRTUAL_TABLES)
        tables = {name for (name,) in connection.execute(_TABLES)}
        raised: list[BaseException] = []
        caught = functools.partial(_caught, raised)
        median = caught(lambda _: _Median(taken, caught))
        connection.create_aggregate("median", 1, cast(Any, median.__next__))
        most = min(taken.limits.max_bytes, connection.getlimit(sqlite3.SQLITE_LIMIT_LENGTH))
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, most)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        connection.set_progress_handler(caught(lambda _: taken.is_late()).__next__, _STEPS_PER_LOOK)
        connection.set_authorizer(functools.partial(_authorize, tables.union(_OF_SQLITE)))
        try:
            cursor = connection.execute(query, values)
            taken.take(cursor)
        except (MemoryError, *REFUSED) as error:
            if raised:
                raise raised[0] from error
            code = getattr(error, "sqlite_errorname", "") or ""
            if code == "SQLITE_INTERRUPT":
                raise taken.late() from error
            if isinstance(error, MemoryError):
                raise
            if code == "SQLITE_TOOBIG" or isinstance(error, sqlite3.DataError):
                raise taken.too_long() from error
            raise query_refused(error, database.place) from error
        if cursor.description is None:
            raise InvalidInputError("sql: there is no query: give one, such as SELECT * FROM commits")
        return Answer(tuple(column[0] for column in cursor.description), taken.rows)


def _authorize(tables: Container[str], action: int, one: str | None, other: str | None, *_: str | None) -> int:
    """Let through what reads: in tables that the index has, by functions that only work out a value.

    SQLite asks for a table of which no column is read by the name in the query, which may be that of a WITH.
    """
    name = (one or "").lower()
    if action == sqlite3.SQLITE_READ:
        allowed = name in tables or not (other or name.startswith(("sqlite_", "pragma_")))
    elif action == sqlite3.SQLITE_FUNCTION:
        allowed = (other or "").lower() in _FUNCTIONS
    else:
        allowed = action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE)
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


_Caught = Generator[Any, Any, None]


def _caught(raised: list[BaseException], call: Callable[[Any], Any]) -> _Caught:
    """`call`, for SQLite to call by `send` or `__next__`; what it raises, which sqlite3 hides, is put into `raised`.

    A generator, as that waits inside of its `try`: the handler of a signal may raise when a function has begun and is
    not yet in it.
    """
    calls = _calls(raised, call)
    next(calls)
    return calls


def _calls(raised: list[BaseException], call: Callable[[Any], Any]) -> _Caught:
    found = None
    try:
        while True:
            found = call((yield found))
    except GeneratorExit:
        return
    except BaseException as error:
        raised.append(error)
        raise


class _Median:
    """The aggregate `median`, which SQLite lacks: of numbers, nulls left out.

    Attributes:
        step: Take a value in.
        finalize: The middle one, or the mean of the two in the middle.
    """

    def __init__(self, taken: _Taken, caught: Callable[[Callable[[Any], Any]], _Caught]) -> None:
        values: list[float] = []

        def step(value: Any) -> None:
            if isinstance(value, (int, float)):
                if 8 * len(values) >= taken.limits.max_bytes:
                    raise taken.too_long()
                values.append(value)

        self.step = caught(step).send
        self.finalize = caught(lambda _: float(statistics.median(values)) if values else None).__next__


# --- PostgreSQL ---------------------------------------------------------------------------------------

_CURSOR = "cas_ckpt_sql"

_MOST_MS = (1 << 31) - 2000
"""The server takes no longer time: 24 days."""

_ROWS = 100
"""Of a piece that the server is asked for."""


def _ask_postgres(database: Database, query: str, values: Mapping[str, Any], taken: _Taken) -> Answer:
    dialect = database.engine.dialect
    if dialect.driver != "psycopg":
        raise InvalidInputError(f"sql: wanted an index at postgresql+psycopg://..., found the driver {dialect.driver}")
    text = _PARAMETERS.sub(lambda found: f"%({found[1]})s" if found[1] else found[0], query.replace("%", "%%"))
    try:
        with database.engine.connect() as connection:
            session = cast(Any, connection.connection.driver_connection)
            try:
                session.read_only = True
                _set_timeout(session, taken)
                session.execute(
                    "SET LOCAL jit = off; SET LOCAL cursor_tuple_fraction = 1; "
                    "SET LOCAL standard_conforming_strings = on; "
                    f"SET LOCAL search_path = {postgres.quoted(str(database.schema))}"
                )
                with closing(session.cursor(name=_CURSOR)) as declared:
                    declared.execute(text, values)  # by the protocol that takes one statement alone
                    num_rows = _ROWS
                    while num_rows == _ROWS:
                        _set_timeout(session, taken)
                        rows = declared.fetchmany(_ROWS)
                        taken.take(tuple(map(_plain, row)) for row in rows)
                        num_rows = len(rows)
                    return Answer(tuple(column.name for column in declared.description), taken.rows)
            finally:
                connection.invalidate()  # it is closed, and not used for anything else
    except REFUSED as error:
        raise query_refused(error, database.place) from error
    except dialect.loaded_dbapi.Error as error:
        if getattr(error, "sqlstate", None) == "57014" and taken.left_s() < 1:  # else somebody cancelled it
            raise taken.late() from error
        raise query_refused(error, database.place) from error


def _set_timeout(session: Any, taken: _Taken) -> None:
    """Let the server end what is asked next, or a session that asks nothing, at the end of the time that is left."""
    left_ms = min(max(int(taken.left_s() * 1000), 1), _MOST_MS)
    session.execute(
        f"SET LOCAL statement_timeout = {left_ms}; SET LOCAL idle_in_transaction_session_timeout = {left_ms + 1000}"
    )
