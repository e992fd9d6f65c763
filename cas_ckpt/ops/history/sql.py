"""SQL over the views of the index, and its answer as rows, dicts, a DataFrame or an Arrow table.

    1. the index is brought up to date: where refs point and what their records say, forgotten commits, packs
    2. the query runs, read-only and within limits (index/query.py)

Invariant: an answer is whole, or an error says which limit it would have passed. pandas and pyarrow are imported when
they are asked for. Must not know what the views mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import islice
from typing import Any

from blake3 import blake3

from cas_ckpt.arguments import check_real, check_whole
from cas_ckpt.core.forgotten import forgotten_view
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import CommitInfo
from cas_ckpt.core.refs import MAX_LOG, Ref
from cas_ckpt.errors import InvalidInputError, shown_value
from cas_ckpt.index import contents, remembered
from cas_ckpt.index.query import QueryLimits, run_query
from cas_ckpt.index.rows import RefState

_TURNS = 3
"""Times that the index is brought up to date while others collect or rebuild; a ref to what is damaged stays so."""

_RECORD_BYTES = 16
"""Of the hash by which a record of a ref is known again; each has a nonce."""

_MOST_SHOWN_ROWS = 20
_MOST_SHOWN_CHARS = 40


@dataclass(frozen=True, slots=True, repr=False)
class SqlResult:
    """Result of a query: a sequence of rows.

    Attributes:
        columns: Their names, as the query has them.
        rows: Tuples of None, int, float, str and bytes.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> tuple[Any, ...]:
        return self.rows[place]

    def __repr__(self) -> str:
        cells = [self.columns, *(tuple(map(_cell, row)) for row in islice(self.rows, _MOST_SHOWN_ROWS))]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        more = len(self.rows) - _MOST_SHOWN_ROWS
        end = [f"... {more} more rows"] if more > 0 else []
        return "\n".join([*lines, *end, f"SqlResult({len(self.columns)} columns, {len(self.rows)} rows)"])

    def to_dicts(self) -> list[dict[str, Any]]:
        """Each row as column -> value.

        Raises:
            InvalidInputError: two columns have one name.
        """
        names = self._own_names()
        return [dict(zip(names, row, strict=True)) for row in self.rows]

    def to_pandas(self) -> Any:
        """A DataFrame of pandas; a column of integers with nulls among them is Int64, so that it stays exact.

        Raises:
            InvalidInputError: pandas is not installed, or two columns have one name.
        """
        pandas = _required("pandas")
        columns = dict(zip(self._own_names(), self._by_column(), strict=True))
        return pandas.DataFrame({
            name: pandas.Series(values, dtype="Int64" if set(map(type, values)) == {int, type(None)} else None)
            for name, values in columns.items()
        })  # fmt: skip

    def to_arrow(self) -> Any:
        """A table of pyarrow.

        Raises:
            InvalidInputError: pyarrow is not installed, or values of one column are not of one kind.
        """
        pyarrow = _required("pyarrow")
        arrays = []
        for name, values in zip(self.columns, self._by_column(), strict=True):
            try:
                arrays.append(pyarrow.array(values))
            except (pyarrow.lib.ArrowInvalid, pyarrow.lib.ArrowTypeError, OverflowError) as error:
                raise InvalidInputError(f"sql: the column {name}: {error}: let CAST make its values alike") from error
        return pyarrow.Table.from_arrays(arrays, names=list(self.columns))

    def _own_names(self) -> tuple[str, ...]:
        twice = sorted({name for name in self.columns if self.columns.count(name) > 1})
        if twice:
            raise InvalidInputError(f"sql: two columns are called {twice[0]!r}: give one another name with AS")
        return self.columns

    def _by_column(self) -> list[list[Any]]:
        return [[row[at] for row in self.rows] for at in range(len(self.columns))]


def query_index(handle: RepositoryHandle, query: str, parameters: Mapping[str, Any], limits: QueryLimits) -> SqlResult:
    """The answer to one query over the views, of the repository as it is now.

    Args:
        parameters: Name -> value of every `:name` in the query.
    Raises: see `run_query`.
    """
    check_whole("max_rows", limits.max_rows, least=1)
    check_whole("max_bytes", limits.max_bytes, least=1)
    if check_real("timeout_s", limits.timeout_s) <= 0:
        raise InvalidInputError(f"timeout_s is {limits.timeout_s!r}: give a number above 0")
    for _ in range(_TURNS):
        refs, states = _look_at_refs(handle)  # before the packs, so that what they point at is among these
        handle.sync()
        targets = {bytes(ref.target) for ref in refs if ref.target}
        if handle.index.read(contents.known, targets) == targets:
            break
    _note_refs(handle, refs, states)
    answer = run_query(handle.index, query, parameters, limits)
    return SqlResult(answer.columns, tuple(answer.rows))


def joined_parameters(given: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a query that come as a mapping and by name; a commit stands for its id.

    Raises:
        InvalidInputError: it is not a mapping of names, or has a name that was given as well.
    """
    if given is None:
        given = {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InvalidInputError(f"sql: the parameters are {shown_value(given)}: give a dict from names to values")
    twice = sorted(given.keys() & named.keys())
    if twice:
        raise InvalidInputError(f"sql: the parameter {twice[0]!r} is given twice")
    return {name: value.id if isinstance(value, CommitInfo) else value for name, value in {**given, **named}.items()}


def _look_at_refs(handle: RepositoryHandle) -> tuple[list[Ref], list[RefState]]:
    """The refs, and what those records say that the index does not know yet, of deleted ones too."""
    known = handle.index.read(remembered.read_records)
    refs, states = [], []
    for ref in handle.refs.deleted_too():
        record = blake3(ref.record or b"").digest(_RECORD_BYTES)
        if known.get(ref.key) != record:
            moves = [
                (at, move.time_us, move.old, move.new, move.action, move.author)
                for at, move in enumerate(ref.log, int(len(ref.log) == MAX_LOG))  # a full one lost earlier moves
            ]
            states.append(RefState(ref.key, record, bytes(ref.target or b""), ref.note, moves))
        if ref.target is not None:
            refs.append(replace(ref, log=(), record=b""))
    return refs, states


def _note_refs(handle: RepositoryHandle, refs: Sequence[Ref], states: Sequence[RefState]) -> None:
    """Bring refs and records of the store into the index, which only sees what is committed through it.

    One in PostgreSQL that may only be read keeps the last known state.
    """
    known = handle.index.read(remembered.read_heads)
    pointing = dict.fromkeys(known, b"") | {ref.key: bytes(ref.target or b"") for ref in refs}
    forgotten = forgotten_view(handle, refs)
    if known == pointing and not states and handle.index.read(remembered.read_forgotten) == forgotten:
        return
    if handle.index.read_only:
        try:
            handle.detach_index()
        except InvalidInputError:
            return
    handle.note_refs(refs)
    handle.index.write(remembered.write_heads, pointing)
    handle.index.write(remembered.write_states, states)
    handle.index.write(remembered.write_forgotten, forgotten)


def _cell(value: Any) -> str:
    text = value.hex() if isinstance(value, bytes) else "NULL" if value is None else str(value)
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= _MOST_SHOWN_CHARS else f"{text[: _MOST_SHOWN_CHARS - 1]}…"


def _required(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise InvalidInputError(f"{name} is not installed: pip install {name}") from error
