"""Rows: statements as text, the plain values that go in and come out, and the text in them. Imports no SQLAlchemy.

Statements go to the database's driver as they are. `:name` stands for a value; `{keys}` for a condition on the column
before it, to be one of many numbers, ids or texts. Keys are asked for in ascending order, which is three times as fast
as any order. A connection is SQLAlchemy's, or SQLite's own where `log` spares itself the import (0.1 to 0.2 s, longer
than most logs take to read). To build, compile and bind a statement of SQLAlchemy anew costs ten times what SQLite
needs for it.

Invariant: digests are bytes of 32, sizes are bytes, leaves are counted from 0 inside their chunk. Text is what any
database can hold.
"""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import msgpack

from cas_ckpt.errors import CkptError
from cas_ckpt.objects.digest import ObjectKind

if TYPE_CHECKING:
    import sqlite3

    from sqlalchemy import Connection

    AnyConnection: TypeAlias = Connection | sqlite3.Connection
    from cas_ckpt.objects.nodes import LineageEdge, NodeContent
    from cas_ckpt.objects.pack import ExtentInfo, PackKind


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
    import sqlite3  # late: resolving a ref needs this file's texts, not the driver

    if isinstance(connection, sqlite3.Connection):
        return connection
    is_sqlite = connection.dialect.positional
    return cast("sqlite3.Connection", connection.connection.driver_connection) if is_sqlite else None


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


# --- plain values that go in and come out -------------------------------------------------------

REVISIONS = ("0001", "0002", "0003", "0004", "0005", "0006", "0007", "0008")
"""Every schema revision this version knows, oldest first; the last one is what it needs."""

UNKNOWN_KIND = 0
"""Kind of an object that something refers to and that is in no pack the index has seen."""


@dataclass(frozen=True, slots=True)
class CommitRow:
    """A commit as the log shows it.

    Attributes:
        digest: Id of the commit.
        root: Id of its tree.
        parents: Ids of its parents, the first one first.
        layout: Id of the layout node, if there is one.
        time_us: Microseconds since the epoch.
        step: Training step, or None.
        branch: Name of the branch that it was made on, where this index saw that.
        metrics: Numbers by name.
        meta: The user's metadata as the commit object holds it (an encoded plain value), or None.
        stats: What the commit cost, counts and bytes by name.
        lineage: What its state was made from, apart from its parents.
        provenance: Where and by what it was made (an encoded plain value), or None. Rows of the index have its text.
        signature: Of the commit, or None. Rows of the index have the fingerprint of its key.
    """

    digest: bytes
    root: bytes
    parents: tuple[bytes, ...] = ()
    layout: bytes | None = None
    message: str = ""
    author: str = ""
    time_us: int = 0
    step: int | None = None
    branch: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    meta: bytes | None = None
    stats: Mapping[str, int] = field(default_factory=dict)
    lineage: tuple[LineageEdge, ...] = ()
    provenance: bytes | None = field(default=None, compare=False)
    signature: bytes | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class PackRecord:
    """All that one pack holds, as the index takes it in.

    Attributes:
        name: Unique name of the pack in its store.
        size_bytes: Length of the whole pack.
        edges: (parent, children): which objects a node of this pack refers to.
        commits: Commits among the entries. Their root and layout are known from here, so no
            edges of commits are needed (any that are given are left out).
        num_newer: Entries of kinds that this version does not know; they are not among `entries`.
        contents: What trees, pages, tensor nodes and layouts among the entries say: the rows of manifests.
        parts: Of a pack whose rows are not to be in memory together, which has none itself: reads them part by part.
        num_in_parts: How many entries these have together.
    """

    name: str
    kind: PackKind
    size_bytes: int
    entries: Sequence[ExtentInfo] = ()
    edges: Sequence[tuple[bytes, Sequence[bytes]]] = ()
    commits: Sequence[CommitRow] = ()
    num_newer: int = 0
    contents: Sequence[tuple[bytes, NodeContent]] = ()
    parts: Callable[[], Iterable[PackRecord]] | None = None
    num_in_parts: int = 0


class ListedEntry(NamedTuple):
    """One entry of a state. (A tuple, because lists have a hundred thousand of them.)

    Attributes:
        kind: "tensor", "array", "value", or the kind of a composite tensor ("sparse_coo",
            "quantized", "structured" ...) or of an empty container ("dict", "list" ...).
        dtype, shape: Of a tensor or array, else None.
        num_bytes: Plain bytes (of a value: as it is encoded).
    """

    key: str
    kind: str
    dtype: str | None
    shape: tuple[int, ...] | None
    num_bytes: int


class RefRow(NamedTuple):
    """A ref as it was last seen in the store: a row of `refs`."""

    name: str
    target: bytes
    generation: int
    updated_s: float


class RefState(NamedTuple):
    """The record of a ref, for SQL.

    Attributes:
        record: Hash of the record.
        target: Id of the commit that it names; empty: it was deleted.
        note: Message of an annotated tag, reason of a pin; else empty.
        moves: (position, time in microseconds, old, new, action, author) of each entry of its log, as in `t_ref_moves`.
    """

    name: str
    record: bytes
    target: bytes
    note: str
    moves: Sequence[tuple[int, int, bytes | None, bytes | None, str, str]]


@dataclass(frozen=True, slots=True)
class Usage:
    """How much a set of objects holds.

    Attributes:
        num_chunks: Chunks in it.
        num_bytes: Plain bytes of those chunks.
        num_nodes: Trees, tensor nodes and pages in it.
        node_bytes: Plain bytes of those nodes.
        stored_bytes: Bytes that all of them take in packs, entry headers and second copies included.
    """

    num_chunks: int = 0
    num_bytes: int = 0
    num_nodes: int = 0
    node_bytes: int = 0
    stored_bytes: int = 0


@dataclass(frozen=True, slots=True)
class IndexStats:
    """The index in numbers.

    Attributes:
        num_packs: Packs known.
        pack_bytes: Bytes of all packs together.
        objects: Kind -> (number of objects, their plain bytes).
        num_commits: Commits known.
        num_edges: References between nodes.
        num_missing: Objects that are referred to and are in no known pack.
    """

    num_packs: int
    pack_bytes: int
    objects: Mapping[ObjectKind, tuple[int, int]]
    num_commits: int
    num_edges: int
    num_missing: int


# --- what the commits of a filtered log are to say ---------------------------------------------


@dataclass(frozen=True, slots=True)
class AxisBound:
    """A dimension that some mesh of a layout is to have: its name, and its size if that matters."""

    name: str
    size: int | None = None


SIGNS: Mapping[str, str] = {"<": "<", "<=": "<=", ">": ">", ">=": ">=", "==": "=", "!=": "<>"}
"""How a metric may be compared, and how SQL says it."""


@dataclass(frozen=True, slots=True)
class MetricBound:
    """A comparison of one metric with a number; commits without that metric do not meet it."""

    name: str
    sign: str
    value: float


@dataclass(frozen=True, slots=True)
class CommitFilter:
    """Conditions on commits. None, or an empty tuple, is not a condition.

    Attributes:
        since_us, until_us: Microseconds since the epoch, both included.
        first_step, last_step: Steps, both included; commits without a step meet neither.
        metrics: All of these comparisons.
        author: Part of the author's name, or a pattern (*, ?, [...]) of the whole; case counts for nothing.
        world_size: Ranks that made the commit.
        axes: Dimensions that meshes of its layout are to have, all of them.
    """

    since_us: int | None = None
    until_us: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    metrics: tuple[MetricBound, ...] = ()
    author: str | None = None
    world_size: int | None = None
    axes: tuple[AxisBound, ...] = ()

    def __bool__(self) -> bool:
        return self != _EVERYTHING


_EVERYTHING = CommitFilter()


# --- text that a database can hold: of people, and what is kept as JSON -------------------------

_JSON = json.JSONDecoder()


def storable(text: str) -> str:
    """`text` without what no database takes (NUL, lone surrogates), each shown as U+FFFD."""
    if "\0" not in text and text.isascii():
        return text
    return text.replace("\0", "\ufffd").encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def json_of(values: Mapping[str, float]) -> str | None:
    """Numbers by name as JSON, those that are not finite as "nan", "inf" and "-inf", which it lacks; None: none."""
    if not values:
        return None
    plain = {name: value if math.isfinite(value) else repr(value) for name, value in values.items()}
    return json.dumps(plain, separators=(",", ":"))


def read_json(text: str | None) -> dict[str, Any]:
    """The mapping in `text`, as `json.loads` returns it, at half its cost for texts this short."""
    if not text:
        return {}
    values, end = _JSON.raw_decode(text)
    if end != len(text) or not isinstance(values, dict):
        raise ValueError(f"{text!r} is not a mapping")
    return values


_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def read_metrics(text: str | None) -> dict[str, float]:
    """The metrics that `json_of` made `text` of; `math.nan` itself, which equals itself inside of a mapping."""
    values = read_json(text)
    if text is not None and '":"' in text:
        values |= {name: _NOT_FINITE[value] for name, value in values.items() if isinstance(value, str)}
    return values


# --- plain values as people read them in SQL: text as it is, anything else as JSON --------------------
# The text follows from the bytes of the value alone, so nothing that is not in them is asked for: no class that may be
# imported, no time zone of this machine, no order of a set in memory. What is malformed, nested too deep or too long
# has no text: it is found by who reads the value, not here.


MOST_CHARS = 1 << 16
"""Of a text; a longer value has none."""

_MALFORMED = (ValueError, TypeError, ArithmeticError, LookupError, RecursionError, AttributeError)


def value_text(data: bytes) -> str | None:
    """A plain value as people read it: text as it is, else as JSON; None: bytes, or no value that has a text."""
    if data[:1] in _BYTES or len(data) > MOST_CHARS:
        return None
    try:
        value = _plain(_unpacked(data))
        return storable(value) if isinstance(value, str) else _json(value)
    except (*_MALFORMED, CkptError):
        return None


_BYTES = frozenset({b"\xc4", b"\xc5", b"\xc6"})
"""First bytes of msgpack's bytes."""


def json_text(data: bytes) -> str | None:
    """A plain value as JSON, and what JSON lacks as text, as `show --json` has it; None: it has no text."""
    try:
        return _json(_plain(_unpacked(data))) if len(data) <= MOST_CHARS else None
    except (*_MALFORMED, CkptError):
        return None


def _json(plain: Any) -> str | None:
    text = json.dumps(plain, ensure_ascii=False)
    return storable(text) if len(text) <= MOST_CHARS else None


def _unpacked(data: bytes) -> Any:
    return msgpack.unpackb(data, strict_map_key=False)


def _plain(native: Any) -> Any:
    """The value of JSON for one that msgpack gave."""
    if native is None or isinstance(native, (bool, int, str)):
        return native
    if isinstance(native, float):
        return native if math.isfinite(native) else repr(native)
    if isinstance(native, list):
        return [_plain(item) for item in native]
    if isinstance(native, dict):
        return {_key(key): _plain(item) for key, item in native.items()}
    if isinstance(native, msgpack.ExtType):
        reader = _readers().get(native.code)
        return _decoded(native) if reader is None else reader(native.data)
    return repr(native)


def _key(native: Any) -> str:
    key = _plain(native)
    return key if isinstance(key, str) else json.dumps(key, ensure_ascii=False)


def _items(data: bytes) -> list[Any]:
    return [_plain(item) for item in _unpacked(data)]


def _pairs(flat: Sequence[Any]) -> dict[str, Any]:
    return {_key(key): _plain(item) for key, item in zip(flat[::2], flat[1::2], strict=True)}


def _moment(data: bytes) -> str:
    *parts, _, zone = _unpacked(data)
    kind = datetime.datetime if len(parts) == 7 else datetime.time
    return f"{kind(*parts)}{'' if zone is None else f' {_plain(zone)}'}"


def _enum(data: bytes) -> str:
    _, name, value = _unpacked(data)
    return f"{name}({json.dumps(_plain(value), ensure_ascii=False)})"


@cache
def _readers() -> dict[int, Callable[[bytes], Any]]:
    from cas_ckpt.objects.values import ValueCode as Code  # brings numpy, which a log does not need

    return {
        Code.TUPLE: _items, Code.SET: _items, Code.FROZENSET: _items, Code.RANGE: _items, Code.SLICE: _items,
        Code.DEQUE: lambda data: _items(data)[1:],
        Code.PAIRS: lambda data: _pairs(_unpacked(data)),
        Code.ORDERED_DICT: lambda data: _pairs(_unpacked(data)),
        Code.COUNTER: lambda data: _plain(_unpacked(data)),
        Code.NAMESPACE: lambda data: _plain(_unpacked(data)),
        Code.SIMPLE_NAMESPACE: lambda data: _plain(_unpacked(data)),
        Code.DEFAULT_DICT: lambda data: _items(data)[1],
        Code.NAMED_TUPLE: lambda data: _pairs(_unpacked(data)[1:]),
        Code.DATACLASS: lambda data: _pairs(_unpacked(data)[1:]),
        Code.EXTENSION: lambda data: _pairs(_unpacked(data)),
        Code.PATH: lambda data: _items(data)[1], Code.ZONE_INFO: lambda data: _items(data)[0],
        Code.DATETIME: _moment, Code.TIME: _moment, Code.ENUM: _enum,
        Code.PICKLE: lambda data: f"<a pickle of {len(data)} bytes>",
    }  # fmt: skip


def _decoded(native: msgpack.ExtType) -> Any:
    """Of numbers, dates and the like: their value, or their `repr` if JSON has no such thing."""
    from cas_ckpt.objects.digest import pack_ext
    from cas_ckpt.objects.values import decode_value

    value = decode_value(pack_ext(native.code, native.data))
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, (bytes, bytearray)):
        return repr(value)
    return _plain(value if isinstance(value, (bool, int, float)) else storable(str(value)))
