"""A bundle: the values of a repository in one file, to be carried where no network goes (docs/format.md, "Bundles").

    header      16 bytes: magic, version
    values      one after another: packs as they are in any store, then records
    directory   a sealed record: key, offset and length of each value, and which commits the taker must have
    trailer     32 bytes: where the directory is, and a check

Invariant: the file is under its name whole, or not at all. What is read of one is believed no more than what any store
gives: keys and places are checked when it is opened, before memory is taken, and values prove themselves.
"""

from __future__ import annotations

import os
import stat
import struct
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from blake3 import blake3

from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import (
    CorruptionError,
    InvalidInputError,
    NotFoundError,
    PermissionDeniedError,
    StorageError,
    UnsupportedVersionError,
)
from cas_ckpt.objects.digest import DIGEST_BYTES, Digest, most_bytes, seal, unseal
from cas_ckpt.objects.pack import CHECK_BYTES, PACK_PREFIX
from cas_ckpt.storage.disk import UnnamedFile, sync_file, sync_folder
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.storage.store import (
    MOST_VALUE_BYTES,
    Abilities,
    byte_view,
    check_key,
    check_prefix,
    check_range,
    missing,
    too_long,
    too_short,
    writable_view,
    writing,
)
from cas_ckpt.uncopied import Uncopied

VERSION = 1
HEADER_MAGIC, TRAILER_MAGIC = b"CASCKBND", b"CASCKBNE"
DIRECTORY_KEY = "bundle"
MAX_DIRECTORY_BYTES = most_bytes("bundle")

_HEADER = struct.Struct("<8sH6x")
_TRAILER = struct.Struct("<8sQQ")
_TRAILER_BYTES = _TRAILER.size + CHECK_BYTES


class _Appending:
    """One pack that is being written to the end of a bundle; a `StreamWriter`."""

    def __init__(self, bundle: BundleWriter, key: str) -> None:
        self._bundle, self._key = bundle, key
        self._start = bundle.end
        self._open = True

    def write(self, data: Buffer) -> None:
        """See `StreamWriter.write`."""
        if not self._open:
            raise StorageError(f"{self._key}: this writer has ended")
        self._bundle.append(byte_view(data))

    def commit(self) -> None:
        """See `StreamWriter.commit`."""
        self._end()
        self._bundle.places[self._key] = self._start, self._bundle.end - self._start

    def abort(self) -> None:
        """See `StreamWriter.abort`."""
        if self._open:
            self._bundle.cut(self._start)
            self._end()

    def _end(self) -> None:
        if not self._open:
            raise StorageError(f"{self._key}: this writer has ended")
        self._open = False
        self._bundle.turn.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


class BundleWriter(MemoryStore):
    """A store whose packs go straight into a new bundle, one at a time; records stay in memory until it is finished.

    Attributes:
        places: Pack -> where it is in the file, and how long.
        end: Length of the file so far.
        turn: Held while a pack is being written.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(url=f"bundle://{path}")
        self.path = path
        self.places: dict[str, tuple[int, int]] = {}
        self.end = 0
        self.turn = threading.Lock()
        with writing(str(path)):
            self._file = UnnamedFile(path)
        self.append(memoryview(_HEADER.pack(HEADER_MAGIC, VERSION)))

    def append(self, data: memoryview) -> None:
        """Add `data` to the end of the file."""
        with writing(str(self.path)):
            while data:
                done = os.pwrite(self._file.fd, data, self.end)
                self.end += done
                data = data[done:]

    def cut(self, length: int) -> None:
        """Take away what is behind `length`."""
        with writing(str(self.path)):
            os.ftruncate(self._file.fd, length)
        self.end = length

    def open_writer(self, key: str) -> Any:
        """See `Store.open_writer`; waits while another pack is being written."""
        check_key(key)
        if not key.startswith(PACK_PREFIX):
            return super().open_writer(key)
        self.turn.acquire()
        return _Appending(self, key)

    def put(self, key: str, data: Buffer) -> None:
        """See `Store.put`."""
        if not key.startswith(PACK_PREFIX):
            super().put(key, data)
            return
        writer = self.open_writer(key)
        try:
            writer.write(data)
            writer.commit()
        finally:
            writer.abort()

    def get_range(self, key: str, offset: int, length: int) -> memoryview:
        """See `Store.get_range`."""
        if key not in self.places:
            return super().get_range(key, offset, length)
        start, size = self.places[key]
        if offset + length > size:
            raise too_short(key, offset, length, size)
        return memoryview(os.pread(self._file.fd, length, start + offset))

    def get_tail(self, key: str, length: int) -> tuple[int, bytes]:
        """See `Store.get_tail`."""
        if key not in self.places:
            return super().get_tail(key, length)
        size = self.places[key][1]
        return size, bytes(self.get_range(key, max(size - length, 0), min(length, size)))

    def head(self, key: str) -> int:
        """See `Store.head`."""
        return self.places[key][1] if key in self.places else super().head(key)

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """See `Store.list`."""
        packs = [(key, size) for key, (_, size) in self.places.items() if key.startswith(prefix)]
        return iter(sorted([*super().list(prefix), *packs]))

    def finish(self, prerequisites: Iterable[Digest]) -> int:
        """Write records and directory, and let the file have its name; its length in bytes."""
        places = dict(self.places)
        for key, _ in list(super().list("")):
            data = super().get(key)
            places[key] = self.end, len(data)
            self.append(memoryview(data))
        payload = {
            "values": [[key, *place] for key, place in sorted(places.items())],
            "prerequisites": sorted(set(prerequisites)),
        }
        directory, start = seal("bundle", VERSION, payload, key=DIRECTORY_KEY), self.end
        self.append(memoryview(directory))
        trailer = _TRAILER.pack(TRAILER_MAGIC, start, len(directory))
        self.append(memoryview(trailer + blake3(trailer).digest(length=CHECK_BYTES)))
        with writing(str(self.path)):
            sync_file(self._file.fd)
            self._file.publish(replace=True)
            sync_folder(self.path.parent)
        return self.end

    def close(self) -> None:
        """Leave nothing of a bundle that was not finished. Idempotent."""
        self._file.discard()


class BundleStore(Uncopied):
    """The values of a bundle, to be read.

    Attributes:
        prerequisites: Commits that whoever takes it must have, with all that they need.
    """

    abilities = Abilities(durable=True, local=True, read_only=True)

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open it.

        Raises:
            NotFoundError: there is no such file. CorruptionError: it is not a whole bundle.
            UnsupportedVersionError: of a newer version.
        """
        self.url = f"bundle://{os.fspath(path)}"
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            raise NotFoundError(f"{os.fspath(path)}: there is no such file") from None
        except OSError as error:
            raise StorageError(f"reading {os.fspath(path)}: {error.strerror}") from error
        try:
            status = os.fstat(self._file)
            if not stat.S_ISREG(status.st_mode):
                raise InvalidInputError(f"{os.fspath(path)} is not a file: give that of a bundle")
            self.size_bytes = status.st_size
            self._places, self.prerequisites = self._read_directory()
        except BaseException:
            self.close()
            raise

    def _read_directory(self) -> tuple[dict[str, tuple[int, int]], tuple[Digest, ...]]:
        header = self._bytes(0, min(_HEADER.size, self.size_bytes))
        if len(header) < _HEADER.size or header[:8] != HEADER_MAGIC:
            raise CorruptionError(f"{self.url}: this is not a bundle of cas_ckpt")
        if (version := _HEADER.unpack(header)[1]) > VERSION:
            raise UnsupportedVersionError(f"{self.url}: a bundle of version {version}: upgrade cas_ckpt")
        if header != _HEADER.pack(HEADER_MAGIC, VERSION):
            raise CorruptionError(f"{self.url}: its header is damaged: copy the file again")
        trailer = self._bytes(max(self.size_bytes - _TRAILER_BYTES, 0), min(_TRAILER_BYTES, self.size_bytes))
        body, check = trailer[: _TRAILER.size], trailer[_TRAILER.size :]
        if body[:8] != TRAILER_MAGIC or blake3(body).digest(length=CHECK_BYTES) != check:
            raise CorruptionError(f"{self.url}: its end is missing or damaged: copy the file again")
        _, start, length = _TRAILER.unpack(body)
        if length > MAX_DIRECTORY_BYTES or start + length + _TRAILER_BYTES != self.size_bytes:
            raise CorruptionError(f"{self.url}: its trailer names a directory that cannot be there")
        payload = unseal("bundle", self._bytes(start, length), version=VERSION, key=DIRECTORY_KEY)
        places: dict[str, tuple[int, int]] = {}
        try:
            for key, offset, size in payload["values"]:
                if type(offset) is not int or type(size) is not int or not 0 <= size <= start - offset or offset < 0:
                    raise ValueError(f"{key!r:.80} is outside of the file")
                places[check_key(key)] = offset, size
            prerequisites = tuple(payload["prerequisites"])
            are_ids = all(isinstance(one, bytes) and len(one) == DIGEST_BYTES for one in prerequisites)
            if not are_ids or len(places) != len(payload["values"]):
                raise ValueError("ids of other lengths, or a key twice")
        except (TypeError, ValueError) as error:
            raise CorruptionError(f"{self.url}: a directory of odd form: {error}") from error
        return places, prerequisites

    def _bytes(self, offset: int, length: int) -> bytes:
        parts, at = [], offset
        while at < offset + length:
            part = os.pread(self._file, offset + length - at, at)
            if not part:
                raise CorruptionError(f"{self.url}: it ends at {at} bytes: copy the file again")
            parts.append(part)
            at += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _place(self, key: str) -> tuple[int, int]:
        try:
            return self._places[check_key(key)]
        except KeyError:
            raise missing(key) from None

    def get(self, key: str) -> bytes:
        """See `Store.get`."""
        start, size = self._place(key)
        if size > MOST_VALUE_BYTES:
            raise too_long(key, size)
        return self._bytes(start, size)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """See `Store.get_range`."""
        check_range(key, offset, length)
        start, size = self._place(key)
        if offset + length > size:
            raise too_short(key, offset, length, size)
        return self._bytes(start + offset, length)

    def get_tail(self, key: str, length: int) -> tuple[int, bytes]:
        """See `Store.get_tail`."""
        check_range(key, 0, length)
        start, size = self._place(key)
        wanted = min(length, size)
        return size, self._bytes(start + size - wanted, wanted)

    def read_into(self, key: str, offset: int, target: memoryview, *, cached_only: bool = False) -> bool:
        """See `Store.read_into`."""
        view = writable_view(target)
        view[:] = self.get_range(key, offset, len(view))
        return True

    def prefetch(self, key: str, offset: int, length: int) -> None:
        """See `Store.prefetch`."""
        check_range(key, offset, length)

    def head(self, key: str) -> int:
        """See `Store.head`."""
        return self._place(key)[1]

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """See `Store.list`."""
        check_prefix(prefix)
        return iter(sorted((key, size) for key, (_, size) in self._places.items() if key.startswith(prefix)))

    def put(self, key: str, data: Buffer) -> None:
        """Refused: a bundle is never changed."""
        raise self._refusal()

    def open_writer(self, key: str) -> Any:
        """Refused."""
        raise self._refusal()

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """Refused."""
        raise self._refusal()

    def compare_and_swap(self, key: str, expected: bytes, data: Buffer) -> None:
        """Refused."""
        raise self._refusal()

    def delete(self, key: str) -> None:
        """Refused."""
        raise self._refusal()

    def _refusal(self) -> PermissionDeniedError:
        return PermissionDeniedError(f"{self.url}: a bundle is never changed: make a new one")

    def close(self) -> None:
        """See `Store.close`."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
