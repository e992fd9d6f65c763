"""A store in a dict: for tests, demos and `memory://` repositories.

Long values are mapped memory, which grows without a copy and is filled while other threads run.

Invariant: a value is never modified, and values are replaced under one lock, so that a view of an older one stays what
it was. Must not know: files.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from cas_ckpt import native
from cas_ckpt.arguments import Buffer
from cas_ckpt.memory import copy_bytes, new_buffer
from cas_ckpt.native import Part
from cas_ckpt.storage.store import (
    MOST_VALUE_BYTES,
    Abilities,
    OneWriter,
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

MAPPED_BYTES = 1 << 20
"""Values at least this long are mapped."""

_Value: TypeAlias = bytes | memoryview


def _copied(data: Buffer) -> _Value:
    view = byte_view(data)
    if view.nbytes < MAPPED_BYTES:
        return bytes(view)
    value = memoryview(new_buffer(view.nbytes))
    copy_bytes(value, view)
    return value.toreadonly()


_named: dict[str, MemoryStore] = {}


def open_memory(url: str) -> MemoryStore:
    """The store at `memory://NAME`, the same one for every caller of this process; at `memory://` a new one."""
    name = url.partition("://")[2]
    return _named.setdefault(name, MemoryStore(url=f"memory://{name}")) if name else MemoryStore()


class MemoryStore(Uncopied):
    """A `Store` whose values live as long as the object does."""

    abilities = Abilities(durable=False, local=True)

    def __init__(self, *, url: str = "memory://") -> None:
        """An empty store; `url` is what it answers when asked for its name."""
        self.url = url
        self._values: dict[str, _Value] = {}
        self._lock = threading.RLock()

    def get(self, key: str) -> bytes:
        value = self._value(key)
        if len(value) > MOST_VALUE_BYTES:
            raise too_long(key, len(value))
        return bytes(value)

    def _value(self, key: str) -> _Value:
        check_key(key)
        try:
            return self._values[key]
        except KeyError:
            raise missing(key) from None

    def get_range(self, key: str, offset: int, length: int) -> memoryview:
        """Always a view."""
        check_range(key, offset, length)
        value = self._value(key)
        if offset + length > len(value):
            raise too_short(key, offset, length, len(value))
        return memoryview(value)[offset : offset + length]

    def get_tail(self, key: str, length: int) -> tuple[int, bytes]:
        check_range(key, 0, length)
        value = self._value(key)
        return len(value), bytes(value[max(0, len(value) - length) :])

    def read_into(self, key: str, offset: int, target: memoryview, *, cached_only: bool = False) -> bool:
        """Everything is in memory, so the answer is always True."""
        view = writable_view(target)
        copy_bytes(view, self.get_range(key, offset, view.nbytes))
        return True

    def read_leaves(
        self, key: str, offset: int, first: int, size: int, leaf_bytes: int, digests: Buffer | None,
        parts: Sequence[Part], cached_only: bool = False,
    ) -> int:  # fmt: skip
        return native.read_leaves(self.get_range(key, offset, size), 0, first, size, leaf_bytes, digests, parts)

    def prefetch(self, key: str, offset: int, length: int) -> None:
        """Nothing to do."""
        check_key(key)
        check_range(key, offset, length)

    def put(self, key: str, data: Buffer) -> None:
        """Durable only while the process lives, as `abilities` say."""
        check_key(key)
        value = _copied(data)
        with self._lock:
            self._values[key] = value

    def open_writer(self, key: str) -> MemoryWriter:
        return MemoryWriter(self, check_key(key))

    def put_if_absent(self, key: str, data: Buffer) -> None:
        check_key(key)
        self._create(key, _copied(data))

    def _create(self, key: str, value: _Value) -> None:
        with self._lock:
            if key in self._values:
                raise already_there(key)
            self._values[key] = value

    def compare_and_swap(self, key: str, expected: bytes, data: Buffer) -> None:
        check_key(key)
        value = _copied(data)
        with self._lock:
            current = self._values.get(key)
            if current is None or current != expected:
                raise changed_meanwhile(key, gone=current is None)
            self._values[key] = value

    def head(self, key: str) -> int:
        return len(self._value(key))

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """A snapshot."""
        check_prefix(prefix)
        with self._lock:
            found = sorted((key, len(value)) for key, value in self._values.items() if key.startswith(prefix))
        return iter(found)

    def delete(self, key: str) -> None:
        check_key(key)
        with self._lock:
            self._values.pop(key, None)

    def close(self) -> None:
        """Keeps the values: a later `open_store` of the same name finds them."""


class MemoryWriter(OneWriter):
    """The `StreamWriter` of a `MemoryStore`."""

    def __init__(self, store: MemoryStore, key: str) -> None:
        super().__init__(key)
        self._store = store
        self._data = new_buffer(MAPPED_BYTES)
        self._filled = 0

    def write(self, data: Buffer) -> None:
        self._leave_open()
        view = byte_view(data)
        end = self._filled + view.nbytes
        if end > len(self._data):
            self._resize(max(end, 2 * len(self._data)))
        copy_bytes(memoryview(self._data)[self._filled : end], view)
        self._filled = end
        self._open = True

    def _resize(self, num_bytes: int) -> None:
        try:
            self._data.resize(num_bytes)  # pages are moved, their bytes are not
        except SystemError:  # this system cannot
            former, self._data = memoryview(self._data)[: min(self._filled, num_bytes)], new_buffer(num_bytes)
            copy_bytes(memoryview(self._data)[: len(former)], former)

    def commit(self) -> None:
        self._leave_open()
        if self._filled < MAPPED_BYTES:
            self._store.put_if_absent(self._key, memoryview(self._data)[: self._filled])
        else:
            self._resize(self._filled)
            self._store._create(self._key, memoryview(self._data).toreadonly())

    def abort(self) -> None:
        self._open = False
        self._data = new_buffer(1)
