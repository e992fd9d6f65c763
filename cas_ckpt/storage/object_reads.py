"""Reads of objects: whole, their last bytes, or a range into memory; bodies that break off are read on.

The story of a read: 1. one request, or one for each part of a long range, sent at once by the store's threads; 2. what
comes is compared with what was asked for; 3. where a body breaks off, or comes too slowly, the rest is asked for anew,
of the same version; 4. where the object was replaced meanwhile, the read begins again.

Invariants: bytes of two values are never mixed; memory is taken as bytes come, not on a server's word.
Must not know: keys, writes, vendors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from functools import partial
from typing import TypeVar

from cas_ckpt import clock
from cas_ckpt.errors import StorageError, TransientStorageError
from cas_ckpt.storage.bucket import Answer, Bucket, ConditionFailed, Listed, RangeNotThere
from cas_ckpt.storage.part_workers import Parts, PartWorkers
from cas_ckpt.storage.store import MOST_VALUE_BYTES, too_long

T = TypeVar("T")

_READ_BYTES = 1 << 20
"""Bytes taken from a body at once: they stay in the processor's cache on their way to where they go."""

_PIECE_BYTES = 8 << 20
"""Memory that is taken at once for a value whose size is only what the server claims."""

_MOST_BREAKS = 5
"""Times that a body may break off in a row without `_PROGRESS_BYTES` coming in between."""

_PROGRESS_BYTES = 256 << 10
_BREAK_PAUSE_S = 0.2

_MOST_RESTARTS = 5
"""Times that a value is read from its beginning, as it was replaced meanwhile."""


class EndsBefore(StorageError):
    """The object ends, at `size`, before the range does."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__(f"{name}: ends at {size}")
        self.size = size


class ObjectReads:
    """Reads of the objects of a bucket. Threads may share it."""

    def __init__(self, bucket: Bucket, workers: PartWorkers) -> None:
        self._bucket = bucket
        self._workers = workers

    def whole(self, name: str) -> tuple[bytes, str]:
        """The bytes of an object, and their version.

        Raises:
            NotFoundError. CorruptionError: longer than any record; what the server claims may be a lie as well.
        """
        return self._steady(name, lambda: self._whole(name))

    def tail(self, name: str, length: int) -> tuple[int, bytes]:
        """(size of the object, its last min(`length`, size) bytes); `length` is greater than 0."""
        try:
            return self._steady(name, lambda: self._tail(name, length))
        except RangeNotThere:  # it is empty, or the server has no last bytes of objects that are shorter (rclone)
            size = self._bucket.head(name).size
            if size > length:
                raise
            value = self.whole(name)[0] if size else b""
            return len(value), value

    def fill(self, name: str, offset: int, view: memoryview) -> None:
        """Fill `view`, which is not empty, with the bytes from `offset` on, all of one version.

        Raises:
            NotFoundError. EndsBefore: the object ends before the range does.
        """
        try:
            self._steady(name, lambda: self._parts(name, offset, view))
        except RangeNotThere as error:
            raise EndsBefore(name, self._bucket.head(name).size) from error

    def _steady(self, name: str, read: Callable[[], T]) -> T:
        """The result of `read`, restarted if the value was replaced meanwhile."""
        for _ in range(_MOST_RESTARTS):
            with suppress(ConditionFailed):  # replaced by another value: that one is read
                return read()
        raise TransientStorageError(f"{name}: was replaced {_MOST_RESTARTS} times while it was read; try again")

    def _whole(self, name: str) -> tuple[bytes, str]:
        with closing(_Stream(self._bucket, name, self._bucket.read(name))) as stream:
            if stream.length > MOST_VALUE_BYTES:
                raise too_long(name, stream.length)
            return stream.rest(), stream.version

    def _tail(self, name: str, length: int) -> tuple[int, bytes]:
        answer = self._bucket.read_tail(name, length)
        with closing(_Stream(self._bucket, name, answer)) as stream:
            if answer.length != min(length, answer.size) or answer.first != answer.size - answer.length:
                raise _other_range(name, answer)
            return answer.size, stream.rest()

    def _parts(self, name: str, offset: int, view: memoryview) -> None:
        part_bytes = self._bucket.part_bytes
        if view.nbytes < 2 * part_bytes:
            self._part(name, offset, view)
            return
        parts = Parts[str](self._workers)
        try:
            for at in range(0, view.nbytes, part_bytes):
                parts.run(partial(self._part, name, offset + at, view[at : at + part_bytes]))
                parts.check()
            versions = set(parts.results())
        finally:
            parts.stop()
        if len(versions) > 1:
            raise _replaced(name)

    def _part(self, name: str, first: int, view: memoryview) -> str:
        """Fill `view`; the version that it came from."""
        answer = self._bucket.read(name, first, view.nbytes)
        with closing(_Stream(self._bucket, name, answer)) as stream:
            if answer.first != first or answer.length > view.nbytes:
                raise _other_range(name, answer)
            if answer.length < view.nbytes:
                raise EndsBefore(name, answer.size)
            stream.fill(view)
            return stream.version


class _Stream:
    """The bytes of an answer in order. Where its body breaks off, the rest is asked for anew, of the same version."""

    def __init__(self, bucket: Bucket, name: str, answer: Answer) -> None:
        self._bucket = bucket
        self._name = name
        self._answer = answer
        self._at = answer.first
        self._end = answer.first + answer.length
        self.length = answer.length
        self.version = answer.version

    def close(self) -> None:
        """Give the connection back."""
        self._answer.body.close()

    def rest(self) -> bytes:
        """All that is left; memory is taken as the bytes come, whatever size the server claims."""
        pieces = []
        while self._at < self._end:
            piece = bytearray(min(self._end - self._at, _PIECE_BYTES))
            self.fill(memoryview(piece))
            pieces.append(piece)
        return b"".join(pieces)

    def fill(self, view: memoryview) -> None:
        """Fill `view`, which is not longer than what is left, with the next bytes."""
        done = since_break = breaks = 0
        while done < view.nbytes:
            try:
                got = self._answer.body.readinto(view[done : done + _READ_BYTES])
                if not got:
                    raise TransientStorageError(f"reading {self._name}: the connection was closed before the end")
                done += got
                self._at += got
                since_break += got
            except TransientStorageError:
                breaks = 1 if since_break >= _PROGRESS_BYTES else breaks + 1
                since_break = 0
                if breaks > _MOST_BREAKS:
                    raise
                self._read_on(breaks)

    def _read_on(self, breaks: int) -> None:
        """Ask for the rest."""
        self.close()
        clock.pause(_BREAK_PAUSE_S * (breaks - 1))
        size, length = self._answer.size, self._end - self._at
        self._answer = self._bucket.read(self._name, self._at, length, if_version=self.version)
        if (self._answer.first, self._answer.length, self._answer.size) != (self._at, length, size):
            raise _other_range(self._name, self._answer)
        if self._answer.version != self.version:
            raise _replaced(self._name)


def _replaced(name: str) -> ConditionFailed:
    return ConditionFailed(f"{name}: was replaced while it was read")


def _other_range(name: str, answer: Answer) -> StorageError:
    return StorageError(
        f"reading {name}: the server answered bytes {answer.first} to {answer.first + answer.length} of {answer.size}, "
        "which is not what was asked for: it does not keep to ranges"
    )


MOST_HELD_BYTES = 64 << 20
"""Most bytes of held-back items; beyond that the order is taken for that of code points: a listing may be endless."""

# --- listings in order of code points --------------------------------------------------------
#
# S3 promises code points: `ft-b` before `ft/a`. Services that keep objects in folders (SeaweedFS) list folder by
# folder: all of `ft/` first, since `ft` is less than `ft-b`. Then what is in a folder is held back until no name that
# belongs before it can follow: of packs one folder in 256. What is beside folders is passed on as it comes.

_ITEM_BYTES = 400
"""An object of a listing in memory, besides the characters of its name."""


def by_code_points(listed: Iterable[Listed], prefix: str) -> Iterator[Listed]:
    """`listed`, whose names start with `prefix`, in order of code points.

    Raises:
        StorageError: they are in neither order.
    """
    folders: list[tuple[str, list[Listed]]] = []  # held back, each until a name comes that is past its end
    held_bytes, last = 0, ""
    points = paths = True
    for item in listed:
        place = _in_folders(item.name)
        points = points and item.name > last
        paths = paths and place > _in_folders(last) and held_bytes <= MOST_HELD_BYTES
        if not points and not paths:
            raise StorageError(f"listing {prefix}: {item.name!r:.200} comes after {last!r:.200}: out of order")
        last = item.name
        while folders and (place > folders[-1][0] or not paths):
            yield from sorted(folders.pop()[1], key=_name)
            held_bytes = held_bytes if folders else 0
        folder, slash, _ = item.name[len(prefix) :].partition("/")
        if not slash or not paths:
            yield item
            continue
        end = _in_folders(prefix) + folder + "/"  # "-" and "." come before it, all else that is in names after it
        if not folders or folders[-1][0] != end:
            folders.append((end, []))
        folders[-1][1].append(item)
        held_bytes += _ITEM_BYTES + len(item.name)
    while folders:
        yield from sorted(folders.pop()[1], key=_name)


def _in_folders(name: str) -> str:
    """Sort key that orders names folder by folder."""
    return name.replace("/", "\0")


def _name(item: Listed) -> str:
    return item.name
