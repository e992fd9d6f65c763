"""A store in a folder: a value is a file, its key the path.

Small values are written whole by `put` (disk.py). A stream is written in large aligned pieces past the page cache:

    1. pieces are gathered in one aligned buffer; a full buffer is one O_DIRECT write (a large piece that is aligned
       itself is written from where it is, as is any large one without O_DIRECT)
    2. at commit the part of the buffer that fills whole blocks goes the same way, then O_DIRECT is dropped and the
       rest is written through the page cache
    3. the file is synced, closed and given its name, unless that is taken

A value that never fills the buffer does not use O_DIRECT: it is read again soon. Measured over 1 GiB with fsync: 2.9
GB/s with buffers of 8 MiB (4 MiB 3.2, 16 MiB 2.6, 1 MiB 2.4), 3.9 straight from aligned memory, 2.4 with
posix_fallocate, 0.9 through the page cache. One buffer: a second one is of use only to a second thread, and storage/
has none.

Invariant: under a key's name there is a whole, synced value or nothing. Small and mutable values are read by `get`,
from a file opened afresh; ranges come from files kept open. Folders may be symbolic links, values may not: a link
planted under a key never leads to a file outside. After a writer failed, nothing but `abort` is possible.
Must not know: what is stored, threads (it is called by many and starts none).
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import CorruptionError, NotFoundError
from cas_ckpt.memory import copy_bytes, new_buffer
from cas_ckpt.native import Part
from cas_ckpt.storage.disk import (
    Descriptor,
    DescriptorCache,
    Temporary,
    TemporaryFolder,
    file_turn,
    is_in_memory,
    leaves_of_file,
    make_folders,
    open_for_reading,
    read_cached,
    sync_file,
    sync_folder,
)
from cas_ckpt.storage.store import (
    MOST_VALUE_BYTES,
    RESERVED_PART,
    Abilities,
    Leftovers,
    OneWriter,
    already_there,
    byte_view,
    changed_meanwhile,
    check_key,
    check_prefix,
    check_range,
    missing,
    reading,
    too_long,
    too_short,
    translated,
    writable_view,
    writing,
)
from cas_ckpt.uncopied import Uncopied

BLOCK_BYTES = 4096
"""Alignment of address, offset and length that every O_DIRECT filesystem we know accepts."""

BUFFER_BYTES = 8 << 20
"""Bytes gathered before they are written."""

KEPT_BUFFERS = 2
"""Buffers that a store keeps for later writers."""

STRAIGHT_BYTES = 1 << 20
"""A piece at least this large is written from where it is, if it is aligned."""

_O_DIRECT: int = getattr(os, "O_DIRECT", 0)


@dataclass(slots=True)
class DirectChoice:
    """State that the writers of one store share.

    Attributes:
        allowed: Whether the filesystem takes O_DIRECT: assumed until it refuses, or is seen to be in memory, then
            remembered.
        buffers: Buffers of writers that are done, for the next ones: memory that is new to the
            process costs more than the copy into it.
    """

    allowed: bool = _O_DIRECT != 0
    buffers: deque[memoryview] = field(default_factory=lambda: deque(maxlen=KEPT_BUFFERS))


class FileWriter(OneWriter):
    """The `StreamWriter` of a `FileStore`."""

    def __init__(
        self,
        key: str,
        temporary: Temporary,
        *,
        publish: Callable[[Temporary], None],
        choice: DirectChoice,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        """A writer of `key` into `temporary`; `publish` gives that its name."""
        super().__init__(key)
        self._temporary = temporary
        self._publish = publish
        self._choice = choice
        self._direct = False
        try:
            self._buffer = choice.buffers.pop()  # one that was used before
        except IndexError:
            self._buffer = memoryview(b"")
        if self._buffer.nbytes != buffer_bytes:
            self._buffer = memoryview(new_buffer(buffer_bytes))
        self._filled = 0

    def write(self, data: Buffer) -> None:
        self._leave_open()
        rest = byte_view(data)
        with writing(self._key):
            while rest.nbytes:
                if rest.nbytes >= STRAIGHT_BYTES:
                    if self._filled and not self._choice.allowed:  # where nothing has to be aligned
                        self._write_out(self._buffer[: self._filled])
                        self._filled = 0
                    if not self._filled and (done := self._write_straight(rest)):
                        rest = rest[done:]
                        continue
                taken = min(rest.nbytes, self._buffer.nbytes - self._filled)
                copy_bytes(self._buffer[self._filled : self._filled + taken], rest[:taken])
                self._filled += taken
                if self._filled == self._buffer.nbytes:
                    self._choose()
                    self._write_out(self._buffer)
                    self._filled = 0
                rest = rest[taken:]
        self._open = True

    def commit(self) -> None:
        self._leave_open()
        try:
            with writing(self._key):
                whole = self._filled - self._filled % BLOCK_BYTES if self._direct else 0
                self._write_out(self._buffer[:whole])
                if self._direct:
                    self._set_direct(False)
                self._write_out(self._buffer[whole : self._filled])
                sync_file(self._temporary.fd)
                try:
                    self._publish(self._temporary)
                except FileExistsError as error:
                    raise already_there(self._key) from error
        finally:
            self.abort()

    def abort(self) -> None:
        self._open = False
        if self._buffer.nbytes:  # else it has been done
            self._temporary.discard()
            self._choice.buffers.append(self._buffer)
            self._buffer, self._filled = memoryview(b""), 0

    def _write_straight(self, piece: memoryview) -> int:
        """Write whole blocks from the piece's own memory; their bytes, 0 when it is not fit for that."""
        self._choose()
        if self._direct and _address(piece) % BLOCK_BYTES:
            return 0
        whole = piece.nbytes - piece.nbytes % BLOCK_BYTES
        self._write_out(piece[:whole])
        return whole

    def _write_out(self, view: memoryview) -> None:
        while view.nbytes:
            try:
                view = view[os.write(self._temporary.fd, view) :]
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._refused()

    def _choose(self) -> None:
        """Turn O_DIRECT on, where it is not known to be refused, or to mean nothing."""
        if self._choice.allowed and not self._direct:
            if is_in_memory(self._temporary.fd):
                self._choice.allowed = False
                return
            try:
                self._set_direct(True)
            except OSError:
                self._refused()

    def _refused(self) -> None:
        self._choice.allowed = False
        if self._direct:
            self._set_direct(False)

    def _set_direct(self, wanted: bool) -> None:
        flags = fcntl.fcntl(self._temporary.fd, fcntl.F_GETFL) & ~_O_DIRECT
        fcntl.fcntl(self._temporary.fd, fcntl.F_SETFL, flags | (_O_DIRECT if wanted else 0))
        self._direct = wanted


def _address(view: memoryview) -> int:
    import numpy as np  # not above: reading a log needs none of it

    return int(np.frombuffer(view, np.uint8).ctypes.data)


_NOT_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})
_NAME = re.compile(r"[A-Za-z0-9._-]+")


class FileStore(Uncopied):
    """A `Store` in the folder `root`, which the first write creates."""

    block_bytes = BLOCK_BYTES

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()
        self._root = str(self.root)
        self._temporaries = TemporaryFolder(self.root)
        self._descriptors = DescriptorCache(self._open)
        self._direct = DescriptorCache(self._open_direct)
        self._reads_direct = _O_DIRECT != 0
        self._choice = DirectChoice()

    @property
    def url(self) -> str:
        """The folder as a file:// URL."""
        return self.root.as_uri()

    @property
    def abilities(self) -> Abilities:
        """Durable, local, conditional; read-only where the folder is not ours to write."""
        read_only = os.path.exists(self._root) and not _may_write(self.root)
        return Abilities(durable=True, local=True, read_only=read_only, writer_bytes=BUFFER_BYTES)

    def get(self, key: str) -> bytes:
        """Opened afresh, so that a replaced value is seen at once."""
        check_key(key)
        with reading(key):
            descriptor = open_for_reading(os.path.join(self._root, key), key)
            size = os.fstat(descriptor.fd).st_size
            if size > MOST_VALUE_BYTES:
                raise too_long(key, size)
            with open(descriptor.fd, "rb", buffering=0, closefd=False) as file:
                return file.read()

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """A copy: a mapped file that is cut short while it is read kills the process."""
        descriptor, size = self._located(key, offset, length)
        if offset + length > size:
            raise too_short(key, offset, length, size)
        with reading(key):
            return _read_bytes(descriptor, key, offset, length)

    def get_tail(self, key: str, length: int) -> tuple[int, bytes]:
        descriptor, size = self._located(key, 0, length)
        start = max(0, size - length)
        with reading(key):
            return size, _read_bytes(descriptor, key, start, size - start)

    def read_into(self, key: str, offset: int, target: memoryview, *, cached_only: bool = False) -> bool:
        """`cached_only` takes what the page cache holds and never waits for the disk."""
        view = writable_view(target)
        num_bytes = view.nbytes
        check_key(key)
        check_range(key, offset, num_bytes)
        with reading(key):
            descriptor, size = self._descriptors.get(key)
            if offset + num_bytes > size:
                raise too_short(key, offset, num_bytes, size)
            if cached_only:
                return read_cached(descriptor.fd, offset, view)
            done = os.preadv(descriptor.fd, [view], offset)
            while done < num_bytes:
                got = os.preadv(descriptor.fd, [view[done:]], offset + done)
                if not got:
                    raise too_short(key, offset, num_bytes, offset + done)
                done += got
        return True

    def read_leaves(
        self, key: str, offset: int, first: int, size: int, leaf_bytes: int, digests: Buffer | None,
        parts: Sequence[Part], cached_only: bool = False,
    ) -> int:  # fmt: skip
        descriptor, end = self._located(key, offset, size)
        if offset + size > end:
            raise too_short(key, offset, size, end)
        with reading(key):
            return leaves_of_file(descriptor.fd, key, offset, first, size, leaf_bytes, digests, parts, cached_only)

    def read_past_cache(self, key: str, offset: int, target: memoryview) -> int | None:
        """O_DIRECT, where the filesystem has it."""
        view = writable_view(target)
        check_key(key)
        check_range(key, offset, view.nbytes)
        if not self._reads_direct:
            return None
        with reading(key):
            try:
                descriptor, _ = self._direct.get(key)
                done = 0
                while done < view.nbytes:
                    got = os.preadv(descriptor.fd, [view[done:]], offset + done)
                    done += got
                    if not got or got % self.block_bytes:  # the end of the file
                        break
            except OSError as error:
                if error.errno not in _NOT_DIRECT:
                    raise
                self._reads_direct = False
                return None
        return done

    def prefetch(self, key: str, offset: int, length: int) -> None:
        """Asks the kernel to read ahead."""
        check_key(key)
        check_range(key, offset, length)
        if not hasattr(os, "posix_fadvise"):
            return
        with suppress(OSError, NotFoundError):  # a hint: the read itself reports the error
            descriptor, _ = self._descriptors.get(key)
            os.posix_fadvise(descriptor.fd, offset, length, os.POSIX_FADV_WILLNEED)

    def put(self, key: str, data: Buffer) -> None:
        with self._made(key, data) as temporary, self._temporaries.turn():
            self._temporaries.replace(temporary, self.root / key)

    def open_writer(self, key: str) -> FileWriter:
        """Writes past the page cache where the filesystem can."""
        check_key(key)
        with writing(key):
            temporary = self._temporaries.create()
        publish = partial(self._temporaries.publish, path=self.root / key)
        return FileWriter(key, temporary, publish=publish, choice=self._choice)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        with self._made(key, data) as temporary:
            try:
                self._temporaries.publish(temporary, self.root / key)
            except FileExistsError as error:
                if is_no_file(self.root / key):
                    raise CorruptionError(
                        f"{key}: {IN_ITS_PLACE}: run repo.fsck(), and the repair that it prints"
                    ) from error
                raise already_there(key) from error

    def compare_and_swap(self, key: str, expected: bytes, data: Buffer) -> None:
        """Read and replaced under the store's lock."""
        with self._made(key, data) as temporary, self._temporaries.turn():
            try:
                current = self.get(key)
            except NotFoundError:
                raise changed_meanwhile(key, gone=True) from None
            if current != expected:
                raise changed_meanwhile(key, gone=False)
            self._temporaries.replace(temporary, self.root / key)

    def head(self, key: str) -> int:
        check_key(key)
        with reading(key):
            status = os.lstat(self._place(key))
        if not stat.S_ISREG(status.st_mode):
            raise missing(key)
        return status.st_size

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Reads the folders as the iterator moves on."""
        folder, _, stem = check_prefix(prefix).rpartition("/")
        return self._walk(folder + "/" if folder else "", stem)

    def delete(self, key: str) -> None:
        self.delete_many([key])

    def delete_many(self, keys: Sequence[str]) -> None:
        """A folder is synced once for all that goes from it."""
        folders: dict[str, list[str]] = {}
        for key in keys:
            folders.setdefault(check_key(key).rpartition("/")[0], []).append(key)
            self._drop(key)
        for name, those in folders.items():
            folder = self.root / name
            if folder.is_dir():
                with writing(those[0]), self._temporaries.turn():
                    deleted = [key for key in those if self._unlink(key)]
                    if deleted:
                        with writing(deleted[0]):
                            sync_folder(folder)

    def _unlink(self, key: str) -> bool:
        """Remove the file; False if there is none."""
        path = self._place(key)
        with writing(key), suppress(FileNotFoundError, NotADirectoryError):
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                os.unlink(path)
                return True
        return False

    def close(self) -> None:
        """Views that were handed out stay valid."""
        self._descriptors.clear()
        self._direct.clear()
        self._choice.buffers.clear()

    def in_turn(self, name: str) -> AbstractContextManager[None]:
        """Among all processes of this machine."""
        return file_turn(self._temporaries.folder, name)

    def sweep_temporaries(self, before_s: float, *, dry_run: bool = False) -> Leftovers:
        """A temporary whose writer lives is locked."""
        with writing(RESERVED_PART):
            return Leftovers.of(self._temporaries.sweep(before_s, dry_run=dry_run))

    def _place(self, key: str) -> str:
        """Path of the file as text, where there are thousands: to make a `Path` takes longer than to open a file."""
        return os.path.join(self._root, key)

    def _open(self, key: str) -> Descriptor:
        return open_for_reading(self._place(key), key)

    def _drop(self, key: str) -> None:
        self._descriptors.drop(key)
        self._direct.drop(key)

    def _open_direct(self, key: str) -> Descriptor:
        return open_for_reading(self._place(key), key, flags=_O_DIRECT)

    def _located(self, key: str, offset: int, length: int) -> tuple[Descriptor, int]:
        check_key(key)
        check_range(key, offset, length)
        with reading(key):
            return self._descriptors.get(key)

    @contextmanager
    def _made(self, key: str, data: Buffer) -> Iterator[Temporary]:
        """A synced temporary with `data`, removed afterwards unless it was given the key's name."""
        check_key(key)
        view = byte_view(data)
        with writing(key):
            temporary = self._temporaries.write(view)
            try:
                yield temporary
            finally:
                temporary.discard()
                self._drop(key)

    def _walk(self, folder: str, stem: str) -> Iterator[tuple[str, int]]:
        """The keys below `folder` (empty, or with its "/" at the end) whose next part starts with `stem`."""
        try:
            entries = _entries(self.root / folder)
        except OSError as error:  # a listing that is cut short must not look whole
            raise translated(error, "listing", folder or str(self.root)) from error
        for entry in entries:  # one loop, not a generator for each: there may be a hundred thousand packs
            if not entry.name.startswith(stem) or (not folder and entry.name == RESERVED_PART):
                continue
            key = folder + entry.name
            if _is_folder(entry):
                yield from self._walk(key + "/", "")
                continue
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # deleted since the folder was read
                continue
            except OSError as error:
                raise translated(error, "listing", key) from error
            if stat.S_ISREG(status.st_mode):
                yield key, status.st_size


IN_ITS_PLACE = "a folder or a link is in its place"


def is_no_file(path: Path, *, links: bool = False) -> bool:
    """Whether a folder, or a link, is at `path`; with `links`, one that leads to a file counts as a file."""
    if path.is_symlink():
        return not (links and path.is_file())
    return path.exists() and not path.is_file()


def move_aside(path: Path, target: Path) -> None:
    """Move what is at `path`, whatever it is, to `target`, or to that name with a number where it is taken.

    Raises:
        StorageError: the medium refuses.
    """
    free = (target if not at else target.with_name(f"{target.name}-{at}") for at in count())
    with writing(str(path)):
        make_folders(target.parent)
        os.rename(path, next(one for one in free if not os.path.lexists(one)))
        sync_folder(path.parent)


def _may_write(folder: Path) -> bool:
    return os.access(folder, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Entries of `folder` with names that keys can have, in the order of keys."""
    try:
        with os.scandir(folder) as found:
            named = [entry for entry in found if _NAME.fullmatch(entry.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(named, key=lambda entry: entry.name + "/" if _is_folder(entry) else entry.name)


def _read_bytes(descriptor: Descriptor, key: str, offset: int, length: int) -> bytes:
    parts: list[bytes] = []
    done = 0
    while done < length:  # one call of the system reads 2 GiB at most
        parts.append(os.pread(descriptor.fd, length - done, offset + done))
        if not parts[-1]:
            raise too_short(key, offset, length, offset + done)
        done += len(parts[-1])
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is one, or a link to one; a link that leads to itself leads nowhere, like one to what is not there."""
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise
