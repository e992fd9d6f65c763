"""A store in one SQLite file, `toy:///absolute/path`: a value is a row.

Invariant: a write is one transaction, which is on the disk when the call returns. Must not know: what is stored.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import InvalidInputError, OutOfSpaceError, StorageError
from cas_ckpt.storage.store import (
    MOST_VALUE_BYTES,
    Abilities,
    StreamWriter,
    already_there,
    byte_view,
    changed_meanwhile,
    check_key,
    check_prefix,
    check_range,
    missing,
    too_long,
    too_short,
    writable_view,
)
from cas_ckpt.uncopied import Uncopied

PACK_BYTES = 512 << 20
"""What a writer gathers: packs are as long by default. Saves divide the memory that they may take by it."""


def open_toy(url: str) -> ToyStore:
    """The store at `url`; nothing is created or read.

    Raises:
        InvalidInputError: the path is not absolute: it would be another place in another folder.
    """
    path = Path(url.removeprefix("toy://"))
    if not path.is_absolute() or "?" in url:
        raise InvalidInputError(f"{url!r}: give toy:// and an absolute path, such as toy:///data/values")
    return ToyStore(path)


class ToyStore(Uncopied):
    """A `Store` whose values are rows of a file, which the first call makes."""

    abilities = Abilities(durable=True, local=True, writer_bytes=PACK_BYTES)

    def __init__(self, path: Path) -> None:
        """The store in the file `path`."""
        self.url = f"toy://{path}"
        self._path = path

    @contextmanager
    def _transaction(self, key: str) -> Iterator[sqlite3.Connection]:
        """A connection for this call alone, as any number of threads may call."""
        try:
            with closing(sqlite3.connect(self._path, timeout=60, isolation_level=None)) as rows:
                rows.execute("PRAGMA synchronous = EXTRA")  # what COMMIT returned for outlives a power failure
                rows.execute("CREATE TABLE IF NOT EXISTS value (key TEXT PRIMARY KEY, data BLOB NOT NULL)")
                rows.execute("BEGIN IMMEDIATE")
                yield rows
                rows.execute("COMMIT")
        except sqlite3.Error as error:
            kind = OutOfSpaceError if error.sqlite_errorcode == sqlite3.SQLITE_FULL else StorageError
            raise kind(f"{key}: {error} ({self._path})") from error

    def head(self, key: str) -> int:
        check_key(key)
        with self._transaction(key) as rows:
            found = rows.execute("SELECT length(data) FROM value WHERE key = ?", (key,)).fetchone()
        if found is None:
            raise missing(key)
        return int(found[0])

    def get(self, key: str) -> bytes:
        size, data = self.get_tail(key, MOST_VALUE_BYTES)
        if size > MOST_VALUE_BYTES:
            raise too_long(key, size)
        return data

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        check_range(key, offset, length)
        size = self.head(key)
        if offset + length > size:
            raise too_short(key, offset, length, size)
        if not length:
            return b""
        part = "SELECT substr(data, ?, ?) FROM value WHERE key = ?"
        with self._transaction(key) as rows:
            found = rows.execute(part, (offset + 1, length, key)).fetchone()
        if found is None or len(found[0]) != length:  # deleted or replaced since
            raise missing(key) if found is None else too_short(key, offset, length, len(found[0]))
        return bytes(found[0])

    def get_tail(self, key: str, length: int) -> tuple[int, bytes]:
        check_range(key, 0, length)
        check_key(key)
        tail = "SELECT length(data), coalesce(substr(data, max(1, length(data) - ? + 1)), x'') FROM value WHERE key = ?"
        with self._transaction(key) as rows:
            found = rows.execute(tail, (length, key)).fetchone()
        if found is None:
            raise missing(key)
        return found[0], found[1]

    def read_into(self, key: str, offset: int, target: memoryview, *, cached_only: bool = False) -> bool:
        view = writable_view(target)
        view[:] = self.get_range(key, offset, view.nbytes)
        return True

    def prefetch(self, key: str, offset: int, length: int) -> None:
        check_key(key)
        check_range(key, offset, length)

    def put(self, key: str, data: Buffer) -> None:
        check_key(key)
        with self._transaction(key) as rows:
            rows.execute("INSERT OR REPLACE INTO value VALUES (?, ?)", (key, byte_view(data)))

    def put_if_absent(self, key: str, data: Buffer) -> None:
        check_key(key)
        with self._transaction(key) as rows:
            done = rows.execute("INSERT OR IGNORE INTO value VALUES (?, ?)", (key, byte_view(data))).rowcount
        if not done:
            raise already_there(key)

    def compare_and_swap(self, key: str, expected: bytes, data: Buffer) -> None:
        check_key(key)
        swap = "UPDATE value SET data = ? WHERE key = ? AND data = ?"
        with self._transaction(key) as rows:
            done = rows.execute(swap, (byte_view(data), key, memoryview(expected))).rowcount
            gone = rows.execute("SELECT 1 FROM value WHERE key = ?", (key,)).fetchone() is None
        if not done:
            raise changed_meanwhile(key, gone=gone)

    def open_writer(self, key: str) -> ToyWriter:
        return ToyWriter(self, check_key(key))

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        check_prefix(prefix)
        every = "SELECT key, length(data) FROM value WHERE substr(key, 1, ?) = ? ORDER BY key"
        with self._transaction(prefix) as rows:
            return iter(rows.execute(every, (len(prefix), prefix)).fetchall())

    def delete(self, key: str) -> None:
        check_key(key)
        with self._transaction(key) as rows:
            rows.execute("DELETE FROM value WHERE key = ?", (key,))

    def close(self) -> None:
        """No connection outlives its call."""


class ToyWriter(StreamWriter):
    """The `StreamWriter`: pieces are gathered, `commit` writes them. A store for daily use writes through instead."""

    def __init__(self, store: ToyStore, key: str) -> None:
        """Nothing is written yet."""
        self._store, self._key = store, key
        self._data = bytearray()
        self._open = True

    def write(self, data: Buffer) -> None:
        self._begin()
        self._data += byte_view(data)
        self._open = True

    def commit(self) -> None:
        self._begin()
        self._store.put_if_absent(self._key, self._data)

    def abort(self) -> None:
        self._open = False
        self._data = bytearray()

    def _begin(self) -> None:
        """Poisoned until what begins here has ended well."""
        if not self._open:
            raise StorageError(f"{self._key}: this writer was committed, aborted or failed; open a new one")
        self._open = False
