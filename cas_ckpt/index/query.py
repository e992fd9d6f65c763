"""SQL that people write: one query that answers with rows, read-only by the database's own means, within limits.

    1. its text is looked through: the parameters that it has, and that it is one statement (`read_query`)
    2. SQLite: a connection of its own to the file, opened for reading; an index in memory is copied. An authorizer
       lets nothing through but reading, a handler that SQLite calls every few hundred steps looks at the clock, and
       sorting goes to temporary files
       PostgreSQL: a session of its own, which ends with the query and so takes with it whatever it locked or set; a
       read-only transaction; a cursor, which is declared for a query alone; the server ends it in time
    3. rows are taken one at a time, until there are no more or a limit is reached: that is an error, never fewer rows

Invariant: whatever the text says, no row changes and nobody else waits for longer than the time it is given. On
PostgreSQL it may do what its role may do in a read-only transaction (docs/sql.md). Values are None, int, float, str or
bytes. Must not know what the views mean.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, NamedTuple, TypeAlias, cast

from cas_ckpt import clock
from cas_ckpt.arguments import whole_number
from cas_ckpt.errors import CkptError, InvalidInputError, TooLargeError, UnsupportedVersionError, shown_value
from cas_ckpt.index import meta, sqlite
from cas_ckpt.index.database import Database
from cas_ckpt.index.db_errors import REFUSED, query_refused
from cas_ckpt.index.index import Index
from cas_ckpt.index.schema import VIEWS_VERSION

_VALUES = 16
"""One value on SQLite may have this part of the bytes that an answer may have."""

MOST_CHARS = 100_000
"""A longer text is not a query that a person wrote."""

_INT64 = 1 << 63


@dataclass(frozen=True, slots=True)
class QueryLimits:
    """What a query may take; beyond it is an error.

    Attributes:
        max_rows: Rows.
        max_bytes: Bytes of all values together: of texts and bytes their length, 8 of any other. One value may have
            a sixteenth of them on SQLite, and what PostgreSQL allows there (1 GB).
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


# --- the text -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Query:
    """A query as it was read.

    Attributes:
        pieces: Its text, cut at the parameters.
        parameters: Their names, in order; one less than there are pieces.
    """

    pieces: tuple[str, ...]
    parameters: tuple[str, ...]

    @property
    def names(self) -> frozenset[str]:
        """The names of the parameters."""
        return frozenset(self.parameters)

    def text(self, parameter: Callable[[str], str], piece: Callable[[str], str] = str) -> str:
        """Its text, with parameters and what is between them written in another way."""
        names = [parameter(name) for name in self.parameters]
        return "".join(part for pair in zip(map(piece, self.pieces), [*names, ""], strict=True) for part in pair)


_TOKENS: Final = r"""
    (?P<blank>\s+|--[^\n]*) | (?P<comment>/\*)
    | (?P<string>{strings}'(?:[^']|'')*'?) | (?P<quoted>"(?:[^"]|"")*"?{quoted})
    | ::|:= | :(?P<parameter>[A-Za-z_][A-Za-z0-9_]*)
    | (?P<name>[^\W\d][\w$]*) | \d[\w.]* | (?P<end>;) | (?P<dot>\.) | .
"""
_SQLITE_TOKENS = re.compile(_TOKENS.format(strings="", quoted=r"|`(?:[^`]|``)*`?|\[[^\]]*\]?"), re.VERBOSE | re.DOTALL)
_POSTGRES_TOKENS = re.compile(
    _TOKENS.format(strings=r"[eE]'(?:[^'\\]|\\.|'')*'?|\$(?:[^\W\d]\w*)?\$|", quoted=""), re.VERBOSE | re.DOTALL
)


class _Token(NamedTuple):
    kind: str
    start: int
    end: int


def _tokens(text: str, *, postgres: bool) -> Iterator[_Token]:
    """The parts of `text` that are not blank; `kind` is that of `_TOKENS`, empty for any other."""
    pattern, at = _POSTGRES_TOKENS if postgres else _SQLITE_TOKENS, 0
    while at < len(text):
        found = pattern.match(text, at)
        assert found is not None  # noqa: S101  # the last way takes any character
        kind, end = found.lastgroup or "", found.end()
        if kind == "comment":
            end = _end_of_comment(text, end, nested=postgres)
        elif found[0].startswith("$") and kind == "string":
            last = text.find(found[0], end)
            end = len(text) if last < 0 else last + len(found[0])
        if kind not in ("blank", "comment"):
            yield _Token(kind, at, end)
        at = end


def _end_of_comment(text: str, at: int, *, nested: bool) -> int:
    depth = 1
    while depth:
        end, inner = text.find("*/", at), text.find("/*", at)
        if end < 0:
            return len(text)
        if nested and 0 <= inner < end:
            depth, at = depth + 1, inner + 2
        else:
            depth, at = depth - 1, end + 2
    return at


def read_query(query: str, *, postgres: bool) -> _Query:
    """The query in `query`: its parameters are `:name`, but not inside of quotes or comments.

    Raises:
        InvalidInputError: no statement or several, a NUL, text that is not Unicode, or too much of it.
    """
    if len(query) > MOST_CHARS:
        raise InvalidInputError(f"sql: a query of {len(query)} characters: there may be {MOST_CHARS}")
    try:
        query.encode()
    except UnicodeEncodeError as error:
        raise InvalidInputError(f"sql: the query is not text: {error}") from error
    if "\0" in query:
        raise InvalidInputError("sql: there is a NUL in the query: give bytes that hold one as a parameter")
    tokens = list(_tokens(query, postgres=postgres))
    while tokens and tokens[-1].kind == "end":
        tokens.pop()
    if not tokens:
        raise InvalidInputError("sql: there is no query: give one, such as SELECT * FROM commits")
    if any(token.kind == "end" for token in tokens):
        raise InvalidInputError("sql: several statements: give one query at a time, without ; inside")
    _refuse_unfolding(query, tokens)
    pieces, names, at = [], [], 0
    for token in tokens:
        if token.kind == "parameter":
            pieces.append(query[at : token.start])
            names.append(query[token.start + 1 : token.end])
            at = token.end
    return _Query((*pieces, query[at : tokens[-1].end]), tuple(names))


_MOST_UNFOLDED_CHARS = 1 << 24


def _refuse_unfolding(query: str, tokens: list[_Token]) -> None:
    """Refuse what SQLite would unfold into so much that nothing could end it.

    It puts the whole query of a WITH in the place of each of its names, and looks at no clock meanwhile: of 30 that
    each name the former twice, a thousand million.

    Raises:
        InvalidInputError: the text would become longer than 16 million characters, at worst.
    """
    named: dict[str, int] = {}
    parts: set[str] = set()
    for token, after in zip(tokens, [*tokens[1:], None], strict=True):
        if token.kind in ("name", "quoted", "string") and (after is None or after.kind != "dot"):
            name = query[token.start : token.end].strip("\"'`[]").lower()
            named[name] = named.get(name, 0) + 1
    words = [query[token.start : token.end].lower() for token in tokens]
    if "with" not in words:
        return
    for at, word in enumerate(words):
        if word == "as" and words[at + 1 : at + 2] in (["("], ["materialized"], ["not"]):
            parts.add(_defined(words, at))
    worst = math.prod(max(named.get(name, 1) - 1, 1) for name in parts)
    if worst * len(query) > _MOST_UNFOLDED_CHARS:
        raise InvalidInputError(
            f"sql: the parts of WITH name one another so often that the query would unfold {worst} times: ask in steps"
        )


def _defined(words: list[str], at: int) -> str:
    """The name before AS: name AS (..., or name (columns) AS (..."""
    at -= 1
    if at >= 0 and words[at] == ")":
        while at >= 0 and words[at] != "(":
            at -= 1
        at -= 1
    return words[at].strip("\"'`[]") if at >= 0 else ""


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


def _plain(value: Any) -> Any:
    """A value of PostgreSQL as SQLite would have it."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, Decimal):
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
            f"sql: more than {self.limits.max_bytes} bytes of values, or one of a sixteenth of that: ask for fewer "
            "columns, or give more with max_bytes="
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

_READING = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
_REFUSED_FUNCTIONS = frozenset({"load_extension", "fts3_tokenizer", "json_patch"})
"""The last one takes the square of what it is given, in one step."""

_Value: TypeAlias = None | int | float | str | bytes


def _ask_sqlite(database: Database, asked: _Query, values: Mapping[str, Any], taken: _Taken) -> Answer:
    kept: list[BaseException] = []

    def look() -> bool:
        try:
            return taken.is_late()
        except BaseException as error:  # noqa: BLE001  # Ctrl-C: sqlite3 would swallow it
            kept.append(error)
            return True

    with closing(_connection(database)) as connection, closing(sqlite.memory_connection()) as plain:
        _restrict(connection, taken.limits, plain, kept)
        connection.set_progress_handler(look, _STEPS_PER_LOOK)
        try:
            cursor = connection.execute(asked.text(lambda name: f":{name}"), values)
            if cursor.description is None:
                raise InvalidInputError("sql: wanted a query, which answers with rows: SELECT, VALUES or WITH")
            taken.take(cursor)
        except CkptError:
            raise
        except REFUSED as error:
            if kept:
                raise kept[0] from None
            code = getattr(error, "sqlite_errorname", "") or ""
            if code == "SQLITE_INTERRUPT":
                raise taken.late() from error
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


def _restrict(
    connection: sqlite3.Connection, limits: QueryLimits, plain: sqlite3.Connection, kept: list[BaseException]
) -> None:
    """Let a connection do nothing but read, in little memory; see `_guarded`."""
    for pragma in (
        "temp_store=FILE",
        "query_only=ON",
        "trusted_schema=ON",  # until SQLite 3.41 views may not use its JSON functions otherwise; see `_authorize`
    ):
        connection.execute("PRAGMA " + pragma)
    for name, num_arguments in _GUARDED:
        connection.create_function(name, num_arguments, _guarded(name, plain, kept), deterministic=True)
    for limit, most in (
        (sqlite3.SQLITE_LIMIT_LENGTH, limits.max_bytes // _VALUES),
        (sqlite3.SQLITE_LIMIT_SQL_LENGTH, 4 * MOST_CHARS),
        (sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, _MOST_PATTERN_BYTES),
        (sqlite3.SQLITE_LIMIT_ATTACHED, 0),
        (sqlite3.SQLITE_LIMIT_WORKER_THREADS, 0),
    ):
        connection.setlimit(limit, min(most, connection.getlimit(limit)))
    connection.set_authorizer(_authorize)


def _authorize(action: int, _one: str | None, other: str | None, _database: str | None, _view: str | None) -> int:
    allowed = action in _READING and (action != sqlite3.SQLITE_FUNCTION or other not in _REFUSED_FUNCTIONS)
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def _guarded(name: str, plain: sqlite3.Connection, kept: list[BaseException]) -> Callable[..., _Value]:
    """The function `name` of SQLite, which refuses what it would work on for minutes in one step.

    Args:
        plain: A connection on which it is as SQLite has it.
        kept: Where an error goes, which SQLite would hide.
    """

    def call(*given: _Value) -> _Value:
        lengths = sorted(len(value) for value in given if isinstance(value, (str, bytes)))
        if math.prod(lengths[-2:]) > _MOST_COMPARED or (
            name in _FORMATTING and given and _WIDE.search(str(given[0])) is not None
        ):
            kept.append(InvalidInputError(f"sql: {name}() of texts that are too long, or into one"))
            raise kept[0]
        found: _Value = plain.execute(f"SELECT {name}({', '.join('?' * len(given))})", given).fetchone()[0]
        return found

    return call


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


def _ask_postgres(database: Database, asked: _Query, values: Mapping[str, Any], taken: _Taken) -> Answer:
    dialect = database.engine.dialect
    if dialect.driver != "psycopg":
        raise InvalidInputError(f"sql: wanted an index at postgresql+psycopg://..., found the driver {dialect.driver}")
    text = asked.text(lambda name: f"%({name})s", lambda piece: piece.replace("%", "%%"))
    try:
        with database.engine.connect() as connection:
            session = cast(Any, connection.connection.driver_connection)
            try:
                session.read_only = True
                session.isolation_level = 3  # repeatable read
                _set_timeout(
                    session, taken, "jit = off", "cursor_tuple_fraction = 1", "standard_conforming_strings = on"
                )
                with closing(session.cursor(name=_CURSOR)) as declared:
                    declared.execute(text, values)  # by the protocol that takes one statement alone
                    columns = tuple(column.name for column in declared.description)
                    _set_timeout(session, taken)
                    with closing(session.cursor().stream(f"FETCH FORWARD ALL FROM {_CURSOR}")) as rows:
                        taken.take(tuple(map(_plain, row)) for row in rows)
                return Answer(columns, taken.rows)
            finally:
                connection.invalidate()  # it is closed, and not used for anything else
    except REFUSED as error:
        raise query_refused(error, database.place) from error
    except dialect.loaded_dbapi.Error as error:
        if getattr(error, "sqlstate", None) == "57014":
            raise taken.late() from error
        raise query_refused(error, database.place) from error


def _set_timeout(session: Any, taken: _Taken, *more: str) -> None:
    """Let the server end what is asked next, at the end of the time that is left."""
    left_ms = max(int(taken.left_s() * 1000), 1)
    cursor = session.cursor()
    for setting in (
        f"statement_timeout = {left_ms}", f"lock_timeout = {left_ms}",
        f"idle_in_transaction_session_timeout = {left_ms + 1000}", *more,
    ):  # fmt: skip
        cursor.execute(f"SET LOCAL {setting}")
