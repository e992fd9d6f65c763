"""A store in a folder: a value is a file, its key the path.

Invariant: under a key's name there is a whole, synced value or nothing (see storage/disk.py).
Small and mutable values are read by `get`, from a file opened afresh; ranges come from files
kept open. Folders may be symbolic links, values may not: a link planted under a key leads
nobody to a file outside.
Must not know: what is stored, threads (it is called by many and starts none).
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path

from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import NotFoundError
from cas_ckpt.storage.direct import DirectChoice, FileWriter
from cas_ckpt.storage.disk import (
    Descriptor,
    DescriptorCache,
    Temporary,
    TemporaryFolder,
    file_turn,
    open_for_reading,
    sync_folder,
)
from cas_ckpt.storage.store import (
    RESERVED_PART,
    Abilities,
    Leftovers,
    already_there,
    byte_view,
    changed_meanwhile,
    check_key,
    check_prefix,
    check_range,
    listing,
    missing,
    reading,
    too_short,
    writable_view,
    writing,
)

WINDOW_BYTES = 1 << 20
"""A range at least this long is answered as a view of the page cache, a shorter one as a copy."""

_NOT_CACHED = frozenset({errno.EAGAIN, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})
_NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)
_NAME = re.compile(r"[A-Za-z0-9._-]+")


class FileStore:
    """A `Store` in the folder `root`, which the first write creates."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()
        self._root = str(self.root)
        self._temporaries = TemporaryFolder(self.root)
        self._descriptors = DescriptorCache(self._open)
        self._choice = DirectChoice()

    @property
    def url(self) -> str:
        """The folder as a file:// URL."""
        return self.root.as_uri()

    @property
    def abilities(self) -> Abilities:
        """Durable, local, conditional; read-only where the folder is not ours to write."""
        return Abilities(durable=True, local=True, read_only=self.root.exists() and not _may_write(self.root))

    def get(self, key: str) -> bytes:
        """See `Store.get`; opened afresh, so that a replaced value is seen at once."""
        check_key(key)
        with reading(key):
            descriptor = open_for_reading(os.path.join(self._root, key), key)
            with open(descriptor.fd, "rb", buffering=0, closefd=False) as file:
                return file.read()

    def get_range(self, key: str, offset: int, length: int) -> bytes | memoryview:
        """See `Store.get_range`; from `WINDOW_BYTES` on a read-only view of the file itself.

        A view stays valid after the key is deleted, and holds a descriptor as long as it lives.
        Should the file be cut short or the medium fail while it is read, the process gets
        SIGBUS, as with any mapped file.
        """
        descriptor, size = self._located(key, offset, length)
        if offset + length > size:
            raise too_short(key, offset, length, size)
        with reading(key):
            if length >= WINDOW_BYTES:
                return _window(descriptor, offset, length)
            return _read_bytes(descriptor, key, offset, length)

    def get_tail(self, key: str, length: int) -> tuple[int, bytes]:
        """See `Store.get_tail`."""
        descriptor, size = self._located(key, 0, length)
        start = max(0, size - length)
        with reading(key):
            return size, _read_bytes(descriptor, key, start, size - start)

    def read_into(self, key: str, offset: int, target: memoryview, *, cached_only: bool = False) -> bool:
        """See `Store.read_into`; `cached_only` takes what the page cache holds and never waits for the disk."""
        view = writable_view(target)
        descriptor, size = self._located(key, offset, view.nbytes)
        if offset + view.nbytes > size:
            raise too_short(key, offset, view.nbytes, size)
        with reading(key):
            if cached_only:
                return _read_cached(descriptor, offset, view)
            _fill(descriptor, key, offset, view)
        return True

    def prefetch(self, key: str, offset: int, length: int) -> None:
        """See `Store.prefetch`; asks the kernel to read ahead."""
        check_key(key)
        check_range(key, offset, length)
        if not hasattr(os, "posix_fadvise"):
            return
        with suppress(OSError, NotFoundError):  # a hint: whoever reads it is told
            descriptor, _ = self._descriptors.get(key)
            os.posix_fadvise(descriptor.fd, offset, length, os.POSIX_FADV_WILLNEED)

    def put(self, key: str, data: Buffer) -> None:
        """See `Store.put`."""
        with self._made(key, data) as temporary, self._temporaries.turn():
            self._temporaries.replace(temporary, self.root / key)

    def open_writer(self, key: str) -> FileWriter:
        """See `Store.open_writer`; writes past the page cache where the filesystem can."""
        check_key(key)
        with writing(key):
            temporary = self._temporaries.create()
        publish = partial(self._temporaries.publish, path=self.root / key)
        return FileWriter(key, temporary, publish=publish, choice=self._choice)

    def put_if_absent(self, key: str, data: Buffer) -> None:
        """See `Store.put_if_absent`."""
        with self._made(key, data) as temporary:
            try:
                self._temporaries.publish(temporary, self.root / key)
            except FileExistsError as error:
                raise already_there(key) from error

    def compare_and_swap(self, key: str, expected: bytes, data: Buffer) -> None:
        """See `Store.compare_and_swap`; read and replaced under the store's lock."""
        with self._made(key, data) as temporary, self._temporaries.turn():
            try:
                current = self.get(key)
            except NotFoundError:
                raise changed_meanwhile(key, gone=True) from None
            if current != expected:
                raise changed_meanwhile(key, gone=False)
            self._temporaries.replace(temporary, self.root / key)

    def head(self, key: str) -> int:
        """See `Store.head`."""
        check_key(key)
        with reading(key):
            status = os.lstat(self._place(key))
        if not stat.S_ISREG(status.st_mode):
            raise missing(key)
        return status.st_size

    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        """See `Store.list`; reads the folders as the iterator moves on."""
        folder, _, stem = check_prefix(prefix).rpartition("/")
        return self._walk(folder + "/" if folder else "", stem)

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        self.delete_many([key])

    def delete_many(self, keys: Sequence[str]) -> None:
        """See `DeletesMany.delete_many`: a folder is synced once for all that goes from it."""
        folders: dict[str, list[str]] = {}
        for key in keys:
            folders.setdefault(check_key(key).rpartition("/")[0], []).append(key)
            self._descriptors.drop(key)
        for name, those in folders.items():
            folder = self.root / name
            if folder.is_dir():
                with writing(those[0]), self._temporaries.turn():
                    self._delete_from(folder, those)

    def _delete_from(self, folder: Path, keys: Sequence[str]) -> None:
        deleted = [key for key in keys if self._unlink(key)]
        if deleted:
            with writing(deleted[0]):
                sync_folder(folder)

    def _unlink(self, key: str) -> bool:
        """Remove the file; False if there is none."""
        path = self._place(key)
        with writing(key), suppress(FileNotFoundError, NotADirectoryError):
            if stat.S_ISDIR(os.lstat(path).st_mode):
                return False
            os.unlink(path)
            return True
        return False

    def close(self) -> None:
        """See `Store.close`; views that were handed out stay valid."""
        self._descriptors.clear()
        self._choice.buffers.clear()

    def in_turn(self, name: str) -> AbstractContextManager[None]:
        """See `TakesTurns.in_turn`: among all processes of this machine."""
        return file_turn(self._temporaries.folder, name)

    def sweep_temporaries(self, before_s: float, *, dry_run: bool = False) -> Leftovers:
        """See `LeavesTemporaries.sweep_temporaries`; a temporary whose writer lives is locked."""
        with writing(RESERVED_PART):
            return Leftovers.of(self._temporaries.sweep(before_s, dry_run=dry_run))

    def _place(self, key: str) -> str:
        """Path of the file as text, where there are thousands: to make a `Path` takes longer than to open a file."""
        return os.path.join(self._root, key)

    def _open(self, key: str) -> Descriptor:
        return open_for_reading(self._place(key), key)

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
                self._descriptors.drop(key)

    def _walk(self, folder: str, stem: str) -> Iterator[tuple[str, int]]:
        """The keys below `folder` (empty, or with its "/" at the end) whose next part starts with `stem`."""
        with listing(folder or str(self.root)):
            entries = _entries(self.root / folder)
        for entry in entries:  # one loop, not a generator for each: there may be a hundred thousand packs
            if not entry.name.startswith(stem) or (not folder and entry.name == RESERVED_PART):
                continue
            key = folder + entry.name
            if entry.is_dir():
                yield from self._walk(key + "/", "")
                continue
            size = _plain_file_size(key, entry)
            if size is not None:
                yield key, size


def _may_write(folder: Path) -> bool:
    return os.access(folder, os.W_OK, effective_ids=os.access in os.supports_effective_ids)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """What is in `folder` under names that keys can have, in the order of keys."""
    try:
        with os.scandir(folder) as found:
            named = [entry for entry in found if _NAME.fullmatch(entry.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(named, key=lambda entry: entry.name + "/" if entry.is_dir() else entry.name)


def _plain_file_size(key: str, entry: os.DirEntry[str]) -> int | None:
    try:
        status = entry.stat(follow_symlinks=False)
    except FileNotFoundError:  # deleted since the folder was read
        return None
    except OSError:
        with listing(key):
            raise
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _read_bytes(descriptor: Descriptor, key: str, offset: int, length: int) -> bytes:
    data = os.pread(descriptor.fd, length, offset)
    if len(data) < length:
        raise too_short(key, offset, length, offset + len(data))
    return data


def _fill(descriptor: Descriptor, key: str, offset: int, view: memoryview) -> None:
    done = 0
    while done < view.nbytes:
        got = os.preadv(descriptor.fd, [view[done:]], offset + done)
        if not got:
            raise too_short(key, offset, view.nbytes, offset + done)
        done += got


def _read_cached(descriptor: Descriptor, offset: int, view: memoryview) -> bool:
    """Fill `view` if the page cache has all of it and the filesystem can tell."""
    if _NOWAIT is None:
        return False
    try:
        return os.preadv(descriptor.fd, [view], offset, _NOWAIT) == view.nbytes
    except OSError as error:
        if error.errno in _NOT_CACHED:
            return False
        raise


def _window(descriptor: Descriptor, offset: int, length: int) -> memoryview:
    """A read-only view of the file; mapped from the page that `offset` lies in."""
    skipped = offset % mmap.ALLOCATIONGRANULARITY
    mapped = mmap.mmap(descriptor.fd, skipped + length, access=mmap.ACCESS_READ, offset=offset - skipped)
    return memoryview(mapped)[skipped:]
