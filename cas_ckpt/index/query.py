"""SQL that people write: one query that answers with rows, read-only by the database's own means, within limits.

    1. its text is looked through (query_text.py): the parameters that it has, that it is one statement, and that it
       does not unfold into too much
    2. SQLite: a connection of its own to the file, opened for reading; an index in memory is copied. An authorizer
       lets nothing through but reading what an index has, a handler that SQLite calls every few hundred steps looks
       at the clock, and sorting goes to temporary files. Signals such as Ctrl-C are held until it has returned
       PostgreSQL: a session of its own, which ends with the query and so takes with it whatever it locked or set; a
       read-only transaction; a cursor, which is declared for a query alone, and fetched from in pieces; the server
       ends it in time, and sends no row that is too long
    3. rows are taken one at a time, until there are no more or a limit is reached: that is an error, never fewer rows

Invariant: whatever the text says, no row changes and nobody else waits for longer than the time it is given. On
PostgreSQL it may do what its role may do in a read-only transaction, and take long to be planned (docs/sql.md). Values
are None, int, float, str or bytes. Must not know what the views mean.
"""

from __future__ import annotations

import functools
import json
import math
import re
import sqlite3
import statistics
from array import array
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, NamedTuple, TypeAlias, cast

from cas_ckpt import clock
from cas_ckpt.arguments import whole_number
from cas_ckpt.errors import CkptError, InvalidInputError, TooLargeError, UnsupportedVersionError, shown_value
from cas_ckpt.held_signals import held_signals
from cas_ckpt.index import meta, postgres, sqlite
from cas_ckpt.index.database import Database
from cas_ckpt.index.db_errors import REFUSED, query_refused
from cas_ckpt.index.index import Index
from cas_ckpt.index.query_text import Query, read_query
from cas_ckpt.index.schema import VIEWS_VERSION

_INT64 = 1 << 63


@dataclass(frozen=True, slots=True)
class QueryLimits:
    """What a query may take; beyond it is an error.

    Attributes:
        max_rows: Rows.
        max_bytes: Bytes of all values together: of texts and bytes their length, 8 of any other. One value may have
            a sixteenth of them on SQLite, less in a long query; on PostgreSQL one that is not text or bytes, written
            as text: an array, JSON, a number of many digits.
        timeout_s: Seconds.
    """

    max_rows: int
    max_bytes: int
    timeout_s: float


class Answer(NamedTuple):
    """What a query answered: the names of its columns, and its rows."""

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
    database = index._database
    on_postgres = database.schema is not None
    asked = read_query(query, postgres=on_postgres)
    values = _values(asked.names, parameters)
    if index.read(meta.views_version) < VIEWS_VERSION:
        raise UnsupportedVersionError(
            f"index {index.place}: its views are of an earlier version, and it is opened for reading only; open it "
            "once for writing, which makes them"
        )
    taken = _Taken(limits)
    return (_ask_postgres if on_postgres else _ask_sqlite)(database, asked, values, taken)


# --- values ---------------------------------------------------------------------------------------


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
"""A longer number is text: no float can hold it, and as an integer it would take more memory than is counted."""


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


_FIRST_ROWS, _MOST_ROWS = 16, 1024
"""Of a piece that PostgreSQL is asked for: it puts all rows of one aside before it sends the first."""


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
        return clock.monotonic_s() > self._end_s

    def late(self) -> TooLargeError:
        """The error to raise then."""
        return TooLargeError(
            f"sql: no answer within {self.limits.timeout_s:g} seconds: name a commit, a ref or a key in it, or give "
            "more time with timeout_s="
        )

    def too_long(self) -> TooLargeError:
        """The error to raise for values that are too long."""
        return TooLargeError(
            f"sql: more than {self.limits.max_bytes} bytes of values, or one of a sixteenth of that (less in a long "
            "query): ask for fewer columns, or give more with max_bytes="
        )

    def next_rows(self) -> int:
        """How many rows to ask for next: as many as there were, and one more than may be, which is an error."""
        return min(max(len(self.rows), _FIRST_ROWS), _MOST_ROWS, self.limits.max_rows - len(self.rows) + 1)

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
                [len(value) for value in row if type(value) is str or type(value) is bytes]
            )
            if self._num_bytes > self.limits.max_bytes:
                raise self.too_long()
            if self.is_late():
                raise self.late()
            self.rows.append(row)


# --- SQLite -----------------------------------------------------------------------------------------

_STEPS_PER_LOOK = 200
"""Steps of SQLite between two looks at the clock: one of them can take as long as copying a value does."""

_MOST_PATTERN_BYTES = 128
"""To compare it with the longest text takes ten seconds, which nothing can end."""

_LEAST_MEMORY_BYTES = 1 << 25
"""What SQLite may take besides `max_bytes`: pages, and what other connections of the process do meanwhile."""

_GATHERING = frozenset({"json_group_array", "json_group_object"})
"""They look at the length of what they make when it is whole."""

_READING = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
_REFUSED_FUNCTIONS = frozenset({"load_extension", "fts3_tokenizer", "json_patch"})
"""The last one takes the square of what it is given, in one step."""

_TABLES = "SELECT name FROM sqlite_master WHERE type = 'view' OR rootpage > 0"
"""What an index has, without virtual tables."""

_OF_SQLITE = ("sqlite_master", "sqlite_schema", "json_each", "json_tree")
_VIRTUAL_TABLES = "SELECT 1 FROM json_each('[]'), json_tree('[]')"
"""Those that queries may have. SQLite makes one where a connection first names it, which is more than reading."""

_Value: TypeAlias = None | int | float | str | bytes


def _ask_sqlite(database: Database, asked: Query, values: Mapping[str, Any], taken: _Taken) -> Answer:
    with (
        closing(_connection(database)) as connection, closing(sqlite.memory_connection()) as plain,
        held_signals() as held,
    ):  # fmt: skip
        guard = _Guard(taken, plain, held)
        _restrict(connection, guard, _value_bytes(asked, taken.limits))
        try:
            cursor = connection.execute(asked.text(lambda name: f":{name}"), values)
            taken.take(cursor)
        except CkptError:
            raise
        except REFUSED as error:
            code = getattr(error, "sqlite_errorname", "") or ""
            if guard.refused is not None:
                raise guard.refused from None
            if code == "SQLITE_INTERRUPT":
                raise (taken.too_long() if guard.takes_too_much() else taken.late()) from error
            if code == "SQLITE_TOOBIG" or isinstance(error, sqlite3.DataError):
                raise taken.too_long() from error
            raise query_refused(error, database.place) from error
        return Answer(tuple(column[0] for column in cursor.description), taken.rows)


def _connection(database: Database) -> sqlite3.Connection:
    """A connection of its own: to the file, or to a copy of what is in memory."""
    if database.path is not None:
        return sqlite.reader(database.path)()
    copy = sqlite.memory_connection()
    with database.reading() as source:
        cast(sqlite3.Connection, source.connection.driver_connection).backup(copy)
    return copy


_MOST_COLUMNS = 200
"""Of an answer: each of them may be a long value."""

_VALUES = 16
"""One value may have this part of the bytes that an answer may have, and less in a long query, see `_value_bytes`."""

_TOKENS_PER_VALUE = 6

_LEAST_VALUE_BYTES = 1 << 18


def _value_bytes(asked: Query, limits: QueryLimits) -> int:
    """How long one value may be: a long query can hold many of them at once, and look at no clock between them."""
    share = max(limits.max_bytes * _TOKENS_PER_VALUE // asked.num_tokens, _LEAST_VALUE_BYTES)
    return min(limits.max_bytes // _VALUES, share)


def _restrict(connection: sqlite3.Connection, guard: _Guard, value_bytes: int) -> None:
    """Let a connection do nothing but read, in little memory, for as long as `guard` says."""
    for pragma in (
        "temp_store=FILE",
        "query_only=ON",
        "case_sensitive_like=ON",  # as in PostgreSQL
        "trusted_schema=ON",  # until SQLite 3.41 views may not use its JSON functions otherwise; see `_authorize`
    ):
        connection.execute("PRAGMA " + pragma)
    connection.execute(_VIRTUAL_TABLES)
    tables = {name.lower() for (name,) in connection.execute(_TABLES)}
    for name, num_arguments in _GUARDED:
        connection.create_function(name, num_arguments, guard.function(name), deterministic=True)
    connection.create_aggregate("median", 1, cast(Any, guard.median))
    for each in (connection, guard.plain):
        each.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, min(value_bytes, each.getlimit(sqlite3.SQLITE_LIMIT_LENGTH)))
    for limit, most in (
        (sqlite3.SQLITE_LIMIT_COLUMN, _MOST_COLUMNS),
        (sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, _MOST_PATTERN_BYTES),
        (sqlite3.SQLITE_LIMIT_ATTACHED, 0),
    ):
        connection.setlimit(limit, min(most, connection.getlimit(limit)))
    connection.set_progress_handler(guard.is_over, _STEPS_PER_LOOK)
    connection.set_authorizer(functools.partial(_authorize, tables.union(_OF_SQLITE)))


def _authorize(
    tables: Container[str], action: int, one: str | None, other: str | None, _database: str | None, view: str | None
) -> int:
    refused = action == sqlite3.SQLITE_FUNCTION and (
        other in _REFUSED_FUNCTIONS or (other in _GATHERING and view is None and sqlite.memory_used() is None)
    )
    if action == sqlite3.SQLITE_READ and (one or "").lower() not in tables:
        refused = bool(other) or _is_table_of_sqlite(one or "")
    return sqlite3.SQLITE_OK if action in _READING and not refused else sqlite3.SQLITE_DENY


@functools.cache
def _is_table_of_sqlite(name: str) -> bool:
    """Whether every connection has such a table: raw pages, statements, whatever this SQLite was compiled with.

    SQLite asks for a table of which no column is read by the name in the query, which may be that of a WITH.
    """
    with closing(sqlite.memory_connection()) as empty:
        try:
            empty.execute(f"""SELECT 1 FROM "{name.replace('"', '""')}" LIMIT 0""")
        except sqlite3.OperationalError:
            return False
    return True


class _Guard:
    """Ends a query of SQLite: what it calls between steps, and instead of functions that work for minutes in one.

    Attributes:
        plain: A connection on which these functions are as SQLite has them.
        refused: An error, which SQLite would hide.
    """

    def __init__(self, taken: _Taken, plain: sqlite3.Connection, held: held_signals) -> None:
        self.plain = plain
        self.refused: CkptError | None = None
        self._taken = taken
        self._held = held
        self._most_memory = (sqlite.memory_used() or 0) + taken.limits.max_bytes + _LEAST_MEMORY_BYTES
        self._took_too_much = False

    def is_over(self) -> bool:
        """Whether the time is over, the memory taken, or somebody wants the query to end."""
        self._took_too_much = (sqlite.memory_used() or 0) > self._most_memory
        return self._took_too_much or self._taken.is_late() or bool(self._held)

    def takes_too_much(self) -> bool:
        """Whether that is why the query ended."""
        return self._took_too_much

    def median(self) -> _Median:
        """A new `median` of the query."""
        return _Median(self)

    def gathers(self, num_bytes: int) -> None:
        """Raise if so many bytes are too many for a value that is being made, or the time is over."""
        if num_bytes > self._taken.limits.max_bytes:
            self.refused = self._taken.too_long()
        elif self.is_over():
            self.refused = self._taken.late()
        if self.refused is not None:
            raise self.refused

    def function(self, name: str) -> Callable[..., _Value]:
        """The function `name` of SQLite, which refuses what it would work on for minutes."""

        def call(*given: _Value) -> _Value:
            try:
                return self._called(name, given)
            except CkptError as error:
                self.refused = error
                raise

        return call

    def _called(self, name: str, given: tuple[_Value, ...]) -> _Value:
        lengths = sorted(len(value) for value in given if isinstance(value, (str, bytes)))
        if math.prod(lengths[-2:]) > _MOST_COMPARED or (
            name in _FORMATTING and given and _WIDE.search(str(given[0])) is not None
        ):
            raise InvalidInputError(f"sql: {name}() of texts that are too long, or into one")
        if self.is_over():
            raise self._taken.late()
        try:
            found: _Value = self.plain.execute(f"SELECT {name}({', '.join('?' * len(given))})", given).fetchone()[0]
        except sqlite3.DataError as error:
            raise self._taken.too_long() from error
        if found is None and name in _FORMATTING and given and given[0] is not None:  # SQLite's way to say so
            raise self._taken.too_long()
        return found


class _Median:
    """The aggregate `median`, which SQLite lacks: of numbers, nulls left out."""

    def __init__(self, guard: _Guard) -> None:
        self._guard = guard
        self._values = array("d")

    def step(self, value: _Value) -> None:
        """Take a value in."""
        if isinstance(value, (int, float)):
            self._values.append(value)
            if len(self._values) % _STEPS_PER_LOOK == 0:
                self._guard.gathers(self._values.itemsize * len(self._values))

    def finalize(self) -> float | None:
        """The middle one, or the mean of the two in the middle."""
        return statistics.median(self._values) if self._values else None


_MOST_COMPARED = 1 << 30
"""Characters that may be compared with one another."""

_FORMATTING = frozenset({"printf", "format"})
_WIDE = re.compile(r"%[^A-Za-z%]*(\*|\d{4})")
"""A width or precision that is given apart, or is long."""

_GUARDED: Final = (
    ("instr", 2), ("replace", 3), *((name, count) for name in ("trim", "ltrim", "rtrim") for count in (1, 2)),
    *((name, -1) for name in _FORMATTING),
)  # fmt: skip
"""Functions of SQLite that may take the square of what they are given, and how many arguments they have; -1: any."""


# --- PostgreSQL ---------------------------------------------------------------------------------------

_CURSOR = "cas_ckpt_sql"

_MOST_MS = (1 << 31) - 2000
"""The server takes no longer time: 24 days."""


def _ask_postgres(database: Database, asked: Query, values: Mapping[str, Any], taken: _Taken) -> Answer:
    dialect = database.engine.dialect
    if dialect.driver != "psycopg":
        raise InvalidInputError(f"sql: wanted an index at postgresql+psycopg://..., found the driver {dialect.driver}")
    text = asked.text(lambda name: f"%({name})s", lambda piece: piece.replace("%", "%%"))
    try:
        with database.engine.connect() as connection:
            session = cast(Any, connection.connection.driver_connection)
            try:
                session.read_only = True
                _set_timeout(
                    session, taken, "jit = off", "cursor_tuple_fraction = 1", "standard_conforming_strings = on",
                    f"search_path = {postgres.quoted(str(database.schema))}",
                )  # fmt: skip
                with closing(session.cursor(name=_CURSOR)) as declared:
                    declared.execute(text, values)  # by the protocol that takes one statement alone
                    columns = tuple(declared.description)
                    bounded = _bounded(text, columns, taken.limits.max_bytes)
                    if bounded is None:
                        _fetch(session, taken, len(columns))
                if bounded is not None:
                    with closing(session.cursor(name=_CURSOR)) as declared:
                        declared.execute(bounded, values)
                        _fetch(session, taken, len(columns))
                return Answer(tuple(column.name for column in columns), taken.rows)
            finally:
                connection.invalidate()  # it is closed, and not used for anything else
    except REFUSED as error:
        raise query_refused(error, database.place) from error
    except dialect.loaded_dbapi.Error as error:
        if getattr(error, "sqlstate", None) == "57014" and taken.left_s() < 1:  # else somebody cancelled it
            raise taken.late() from error
        raise query_refused(error, database.place) from error


_TEXTS = frozenset({17, 25, 1042, 1043})
"""Numbers of the types bytea, text, character and character varying."""

_VALUES_OF_OTHERS = 16
"""So many times its text is what a list, or a number of many digits, may take in memory."""


def _bounded(text: str, columns: Sequence[Any], most: int) -> str | None:
    """The query so that the server leaves out the values of a row of more than `most` bytes; None: none can be long.

    A column behind the others says of which rows it did. The query is a subquery behind OFFSET 0, or each of its
    columns would be worked out as often as it is named here.
    """
    sizes = [
        f"coalesce(octet_length(q.c{at}), 0)::bigint"
        if column.type_code in _TEXTS
        else f"coalesce(octet_length(q.c{at}::text), 0)::bigint * {_VALUES_OF_OTHERS}"
        for at, column in enumerate(columns)
        if column.internal_size is None
    ]
    if not sizes:
        return None
    names = [f"c{at}" for at in range(len(columns))]
    values = ", ".join(
        f"CASE WHEN s.n <= {most} THEN q.{name} END" if column.internal_size is None else f"q.{name}"
        for name, column in zip(names, columns, strict=True)
    )
    return (
        f"SELECT {values}, s.n > {most} FROM (SELECT * FROM (\n{text}\n) i OFFSET 0) q({', '.join(names)}) "
        f"CROSS JOIN LATERAL (SELECT {' + '.join(sizes)} AS n OFFSET 0) s"
    )


def _fetch(session: Any, taken: _Taken, num_columns: int) -> None:
    """Take all rows of the cursor, some at a time."""
    num_asked = num_rows = 0
    while num_rows == num_asked:
        num_asked, num_before = taken.next_rows(), len(taken.rows)
        _set_timeout(session, taken)
        with closing(session.cursor().stream(f"FETCH FORWARD {num_asked} FROM {_CURSOR}")) as rows:
            taken.take(_row(row, num_columns, taken) for row in rows)
        num_rows = len(taken.rows) - num_before


def _row(row: tuple[Any, ...], num_columns: int, taken: _Taken) -> tuple[Any, ...]:
    if any(row[num_columns:]):
        raise taken.too_long()
    return tuple(map(_plain, row[:num_columns]))


def _set_timeout(session: Any, taken: _Taken, *more: str) -> None:
    """Let the server end what is asked next, at the end of the time that is left."""
    left_ms = min(max(int(taken.left_s() * 1000), 1), _MOST_MS)
    cursor = session.cursor()
    for setting in (
        f"statement_timeout = {left_ms}", f"idle_in_transaction_session_timeout = {left_ms + 1000}", *more,
    ):  # fmt: skip
        cursor.execute(f"SET LOCAL {setting}")
