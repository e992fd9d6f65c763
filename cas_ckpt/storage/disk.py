"""Files that appear whole and stay: temporaries, publishing, folders, turns, open files.

The story of a value:
    1. a temporary is created in root/tmp (same filesystem, so that 3 is one step) and locked,
       so that a sweeper can tell it from what a dead process left (one that is swept before it is
       locked is made again);
    2. bytes are written and the file is synced;
    3. it is renamed (or, write-once, linked) to its final name;
    4. the folder is synced, without which a power failure may forget the name.
A crash before 3 leaves a temporary, which is never listed; between link and unlink, a
temporary that shares the value's bytes: both harmless.

Turns (`in_turn`): writers on one machine that would only collide wait for one another, for a while. Optimistic
writers of one ref spoil one another's work: of eight that upload and then swap, one wins and seven upload again.
A waiter keeps waiting as long as the turn changes hands: to go ahead without it on a busy machine would make
it busier. If one process has it for `STUCK_S`, the others go ahead, so a process that is stopped while it has the turn
delays others, and never holds them up. A filesystem without locks gives every turn at once.

Invariant: a final name never shows bytes that were not synced. A descriptor number is never closed while a reader uses
it (it could be given to another file at once, and the reader would get that file's bytes), and a file that was
unlinked or replaced is never served again. Nothing is safe because of a turn: it only saves work.
Must not know: what keys mean, what is stored. Raises OSError; file.py translates.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import random
import re
import secrets
import stat
import sys
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, Protocol, TypeVar, runtime_checkable

from cas_ckpt import clock, native
from cas_ckpt.arguments import Buffer
from cas_ckpt.held_signals import held_signals
from cas_ckpt.native import Part
from cas_ckpt.storage.store import Store, missing, too_short
from cas_ckpt.uncopied import Uncopied

P = ParamSpec("P")
T = TypeVar("T")

DEFAULT_CAPACITY = 64
"""Open files kept per store: far below any limit on descriptors, above the packs in use at once."""

LOCK_NAME = "lock"
"""File in the folder of temporaries whose flock orders all changes of names; locks of turns begin with it, too."""

_TEMPORARY_BYTES = 8
_TEMPORARY = re.compile(rf"{LOCK_NAME}(-[0-9]+)?|[0-9]+-[0-9a-f]{{{2 * _TEMPORARY_BYTES}}}")
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_NO_FOLDER_SYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EBADF})
_WRITE_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW

STUCK_S = 2.0
"""How long a writer waits for one that has the turn before it goes ahead without."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.005
"""Between two looks; drawn from half to one and a half of it, so that no two keep step."""

_HOLDER_BYTES = 16

_NUM_LOCKS = 64
"""Names share so many lock files: a collision only costs a short wait."""


class Descriptor(Uncopied):
    """An open file descriptor that is closed with the last reference to it."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if hasattr(self, "fd"):  # else a signal came before it had one
            close(self.fd)


def open_for_reading(path: str | os.PathLike[str], key: str, *, flags: int = 0) -> Descriptor:
    """The file at `path`, open; symbolic links, folders and devices are no values.

    Raises:
        NotFoundError: no such file, or not a plain one.
        OSError: as the system says; the caller translates it.
    """
    # O_NONBLOCK: a FIFO planted under a key must not hang us; plain files ignore it.
    descriptor = Descriptor(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | flags))
    if not stat.S_ISREG(os.fstat(descriptor.fd).st_mode):
        raise missing(key)
    return descriptor


class DescriptorCache:
    """The most recently read files of a store, kept open; safe for many threads."""

    def __init__(self, opener: Callable[[str], Descriptor], *, capacity: int = DEFAULT_CAPACITY) -> None:
        self._opener = opener
        self._capacity = capacity
        self._open: OrderedDict[str, Descriptor] = OrderedDict()
        self._lock = threading.RLock()

    def get(self, key: str) -> tuple[Descriptor, int]:
        """(descriptor, size in bytes now) of `key`; hold on to the descriptor while reading."""
        with self._lock:
            kept = self._open.get(key)
            if kept is not None:
                self._open.move_to_end(key)
        if kept is not None:
            status = os.fstat(kept.fd)
            if status.st_nlink:
                return kept, status.st_size
        # Not open yet, or deleted or replaced since, perhaps by another process.
        fresh = self._opener(key)
        with self._lock:
            self._open[key] = fresh
            if len(self._open) > self._capacity:
                self._open.popitem(last=False)
        return fresh, os.fstat(fresh.fd).st_size

    def drop(self, key: str) -> None:
        """Forget `key`; readers that hold its descriptor finish undisturbed."""
        with self._lock:
            self._open.pop(key, None)

    def clear(self) -> None:
        """Forget all keys."""
        with self._lock:
            self._open.clear()

    def __len__(self) -> int:
        return len(self._open)


def leaves_of_file(
    fd: int, key: str, offset: int, first: int, size: int, leaf_bytes: int, digests: Buffer | None,
    parts: Sequence[Part], cached_only: bool,
) -> int:  # fmt: skip
    """As `native.read_leaves` of an open file; with `cached_only` none that may come from the medium.

    Raises:
        CorruptionError: the file was cut short meanwhile. OSError: as the system says.
    """
    if cached_only and not may_be_cached(fd, offset, size):
        return 0
    read = functools.partial(native.read_leaves, fd, offset, first, size, leaf_bytes, digests, parts)
    try:
        done = read(cached_only)
        if cached_only and not done and is_in_memory(fd):  # which knows no read that waits for nothing
            done = read(False)
        return done
    except EOFError as error:
        raise too_short(key, offset, size, os.fstat(fd).st_size) from error


def sync_file(fd: int) -> None:
    """Return when the file's bytes are on the medium."""
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is None:
        os.fsync(fd)
    else:  # on macOS fsync stops at the drive's cache
        fcntl.fcntl(fd, full)


def sync_folder(folder: Path) -> None:
    """Return when the folder's names are on the medium (where folders can be synced at all)."""
    descriptor = Descriptor(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    try:
        os.fsync(descriptor.fd)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise


def make_folders(folder: Path) -> None:
    """Create `folder` and the parents it lacks, each name synced into its parent."""
    if folder.is_dir():
        return
    make_folders(folder.parent)
    with suppress(FileExistsError):
        os.mkdir(folder)
    sync_folder(folder.parent)


class _Turn:
    """The lock of one folder of temporaries.

    The kernel frees the lock of a process that dies, so there are no stale ones. It is opened afresh each time: flock
    binds to the open file, and a file shared by threads (or inherited over a fork) would not exclude them.
    """

    def __init__(self, folder: Path) -> None:
        path, flags = folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = Descriptor(_in_folder(folder, os.open, path, flags, 0o666))
        self._held = held_signals()

    def __enter__(self) -> None:
        try:
            fcntl.flock(self._descriptor.fd, fcntl.LOCK_EX)
            self._held.__enter__()  # the end of the block must not be interrupted before it begins
        except BaseException:
            self._unlock()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._unlock()
        finally:
            self._held.__exit__(kind, error, trace)

    def _unlock(self) -> None:
        # Explicit, because a forked child may hold a copy of the descriptor, and a traceback this one.
        fcntl.flock(self._descriptor.fd, fcntl.LOCK_UN)


@dataclass(slots=True)
class Temporary:
    """A file that is not a value yet; `descriptor` holds its lock."""

    path: Path
    descriptor: Descriptor | None

    @property
    def fd(self) -> int:
        """The open file number."""
        if self.descriptor is None:
            raise OSError(errno.EBADF, "the temporary was closed")
        return self.descriptor.fd

    def discard(self) -> None:
        """Close and remove; nothing happens when it was published or removed before."""
        self.descriptor = None
        with suppress(OSError):  # what stays is swept later
            os.unlink(self.path)


def is_temporary(name: str) -> bool:
    """Whether a `TemporaryFolder` makes files of such names in its folder."""
    return _TEMPORARY.fullmatch(name) is not None


_NO_UNNAMED = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL})
_OPEN_FILES = "/proc/self/fd"


class UnnamedFile:
    """A file in the making, beside its place `path`, which has no name before it is whole.

    If the process dies, nothing is left of it. Only where the system has no such files it has a name that tells that it
    is a temporary of `path`.
    """

    def __init__(self, path: Path, *, named: bool = False) -> None:
        """Make it; `named`: it will be closed before it is published."""
        self._path = path
        self._name: Path | None = None
        flags = os.O_RDWR | os.O_CLOEXEC
        try:
            if named or not os.path.isdir(_OPEN_FILES):
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            fd = os.open(path.parent, flags | os.O_TMPFILE, 0o666)
        except OSError as error:
            if error.errno not in _NO_UNNAMED:
                raise
            self._name = self._temporary()
            fd = os.open(self._name, flags | os.O_CREAT | os.O_EXCL, 0o666)
        self._descriptor: Descriptor | None = Descriptor(fd)

    @property
    def fd(self) -> int:
        """The open file number."""
        if self._descriptor is None:
            raise OSError(errno.EBADF, "the file was closed")
        return self._descriptor.fd

    def close(self) -> None:
        """Close one that is named; nothing else is lost."""
        if self._name is not None:
            self._descriptor = None

    def publish(self, *, replace: bool) -> None:
        """Give it its name; the caller has synced it, and syncs the folder.

        Raises:
            FileExistsError: the name is taken, and not to be replaced.
        """
        if replace:
            if self._name is None:
                name = self._temporary()
                self._link(name)
                self._name = name
            os.replace(self._name, self._path)
            self._name = None
        else:
            self._link(self._path)
        self.discard()

    def discard(self) -> None:
        """Close it, and remove the name of a temporary. Idempotent."""
        self._descriptor = None
        name, self._name = self._name, None
        if name is not None:
            with suppress(OSError):
                os.unlink(name)

    def _temporary(self) -> Path:
        name = os.fsencode(self._path.name)[:200].decode(errors="ignore")  # in bytes, of which a name has 255
        return self._path.with_name(f".{name}.{secrets.token_hex(8)}.tmp")

    def _link(self, name: Path) -> None:
        if self._name is not None:
            os.link(self._name, name)
            return
        # With the descriptor of a folder, for else Python asks for a link to the link in /proc.
        folder = Descriptor(os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        os.link(f"{_OPEN_FILES}/{self.fd}", name, src_dir_fd=folder.fd, follow_symlinks=True)


class TemporaryFolder:
    """The folder root/tmp: where values are made and changes of names take turns."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "tmp"

    def create(self) -> Temporary:
        """A new, empty, locked temporary, open for writing."""
        while True:
            path = self.folder / f"{os.getpid()}-{secrets.token_hex(_TEMPORARY_BYTES)}"
            descriptor = Descriptor(_in_folder(self.folder, os.open, path, _WRITE_NEW, 0o666))
            fcntl.flock(descriptor.fd, fcntl.LOCK_EX)  # waits only for a sweep that looks at it this very moment
            if os.fstat(descriptor.fd).st_nlink:
                return Temporary(path, descriptor)

    def write(self, data: memoryview) -> Temporary:
        """A synced temporary that holds `data`."""
        temporary = self.create()
        try:
            fd = temporary.fd
            while data.nbytes:
                data = data[os.write(fd, data) :]
            sync_file(fd)
        except BaseException:
            temporary.discard()
            raise
        return temporary

    def turn(self) -> AbstractContextManager[None]:
        """Keep every other thread and process from changing names meanwhile; signals wait, but not while this waits."""
        return _Turn(self.folder)

    def replace(self, temporary: Temporary, path: Path) -> None:
        """Give `temporary` the name `path`, replacing what has it; durable on return."""
        _in_folder(path.parent, os.replace, temporary.path, path)
        temporary.descriptor = None  # its lock goes with it
        sync_folder(path.parent)

    def publish(self, temporary: Temporary, path: Path) -> None:
        """Give `temporary` the name `path` too, unless that is taken; durable on return.

        The temporary's own name is left for the caller to discard.

        Raises:
            FileExistsError: the name is taken.
        """
        try:
            _in_folder(path.parent, os.link, temporary.path, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # exFAT and some network filesystems have no hard links: then the lock alone excludes.
            with self.turn():
                if os.path.lexists(path):
                    raise FileExistsError(errno.EEXIST, "exists already", str(path)) from error
                os.rename(temporary.path, path)
        sync_folder(path.parent)

    def sweep(self, before_s: float, *, dry_run: bool) -> list[int]:
        """Remove what dead processes last wrote before `before_s`; the bytes that each file gives back."""
        if not self.folder.is_dir():
            return []
        left = [Path(entry.path) for entry in os.scandir(self.folder) if not entry.name.startswith(LOCK_NAME)]
        swept = (_sweep_one(path, before_s, dry_run=dry_run) for path in left)
        return [num_bytes for num_bytes in swept if num_bytes is not None]


def _in_folder(folder: Path, act: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Call `act`, making the folder if it is missing; its result."""
    try:
        return act(*args, **named)
    except FileNotFoundError:
        make_folders(folder)
        return act(*args, **named)


def _sweep_one(path: Path, before_s: float, *, dry_run: bool) -> int | None:
    """Remove a temporary that is not locked; the bytes that it frees, None if it stays."""
    with suppress(OSError):
        status = os.lstat(path)
        if status.st_mtime >= before_s or not stat.S_ISREG(status.st_mode):
            return None
        # Writable, because a network filesystem grants an exclusive lock only then.
        access, lock = (os.O_RDONLY, fcntl.LOCK_SH) if dry_run else (os.O_RDWR, fcntl.LOCK_EX)
        descriptor = Descriptor(os.open(path, access | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK))
        fcntl.flock(descriptor.fd, lock | fcntl.LOCK_NB)  # raises when its writer lives
        if not dry_run:
            os.unlink(path)
        return status.st_size if status.st_nlink == 1 else 0  # else it is a value already, which stays
    return None


@runtime_checkable
class TakesTurns(Protocol):
    """A store whose writers can wait for one another."""

    def in_turn(self, name: str) -> AbstractContextManager[None]:
        """Hold the turn on `name` inside the block; go ahead without it if its holder seems to be stuck."""
        ...


def in_turn(store: Store, name: str) -> AbstractContextManager[None]:
    """The turn on `name`, where `store` has turns; nothing elsewhere."""
    return store.in_turn(name) if isinstance(store, TakesTurns) else nullcontext()


class file_turn:  # noqa: N801 - reads as a function where it is used
    """The turn on `name` among all who use `folder`; the kernel ends that of a process that dies."""

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / f"{LOCK_NAME}-{zlib.crc32(name.encode()) % _NUM_LOCKS}"
        self._descriptor: Descriptor | None = None

    def __enter__(self) -> None:
        # A folder that is not there yet, or not ours (the write itself will tell); no locks on this filesystem; or no
        # space for a few bytes: go ahead without.
        try:
            with suppress(OSError):
                self._descriptor = Descriptor(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))
                _take(self._descriptor.fd)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exc_info: object) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            # Explicit, because a forked child may hold a copy of the descriptor.
            with suppress(OSError):
                fcntl.flock(descriptor.fd, fcntl.LOCK_UN)


def _take(fd: int) -> bool:
    """Wait for the lock, and tell those who come later that it changed hands; False if it was not to be had."""
    holder, pause_s = b"", _FIRST_PAUSE_S
    end_s = clock.monotonic_s() + STUCK_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            pass  # another process has it
        now = os.pread(fd, _HOLDER_BYTES, 0)
        if now != holder:
            holder, end_s = now, clock.monotonic_s() + STUCK_S
        if clock.monotonic_s() > end_s:
            return False
        clock.pause(random.uniform(0.5, 1.5) * pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    os.pwrite(fd, secrets.token_bytes(_HOLDER_BYTES), 0)
    return True


# --- reads of what is in the page cache -------------------------------------------------------
#
# A read with RWF_NOWAIT waits for nothing, but it may ask the disk for what is not there, and if the disk answers at
# once it returns that. To get only bytes that were verified a moment ago, the system is asked first which pages it has
# (cachestat, Linux 6.5). A file system in memory refuses such reads, and needs none.

_CACHESTAT = 451
"""The number of the system call, the same on every processor."""

_NOWAIT: int | None = getattr(os, "RWF_NOWAIT", None)
_NOT_CACHED = frozenset({errno.EAGAIN, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})

_MEMORY = frozenset({0x01021994, 0x858458F6})
"""Types of tmpfs and ramfs in `fstatfs`."""

_STATFS_BYTES = 256
"""More than `struct statfs` has, whose first field is the type."""


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Pages(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "evicted_lately"))


def read_cached(fd: int, offset: int, view: memoryview) -> bool:
    """Fill `view` if the page cache has all of it and the system can tell; else it is undefined.

    Raises:
        OSError: as a read does.
    """
    if not may_be_cached(fd, offset, view.nbytes):
        return False
    try:
        return os.preadv(fd, [view], offset, _NOWAIT or 0) == view.nbytes
    except OSError as error:
        if error.errno not in _NOT_CACHED:
            raise
        return is_in_memory(fd) and os.preadv(fd, [view], offset) == view.nbytes


def may_be_cached(fd: int, offset: int, length: int) -> bool:
    """False if a page of them is not in memory, or no read stops there; True if all are, or the system does not say."""
    if _NOWAIT is None:
        return False
    system = _system()
    if system is None or not length:
        return True
    pages = _Pages()
    if system.syscall(_CACHESTAT, fd, ctypes.byref(_Range(offset, length)), ctypes.byref(pages), 0) != 0:
        return True  # an older kernel, or a file of another user
    wanted: int = (offset + length - 1) // mmap.PAGESIZE - offset // mmap.PAGESIZE + 1
    cached: int = pages.cached
    return cached >= wanted


def is_in_memory(fd: int) -> bool:
    """Whether an open file, or folder, is of a file system that has memory alone to keep it in."""
    system = _system() if sys.platform == "linux" else None
    found = ctypes.create_string_buffer(_STATFS_BYTES)
    if system is None or system.fstatfs(fd, found) != 0:
        return False
    return ctypes.c_long.from_buffer(found).value in _MEMORY


@functools.cache
def _system() -> Any:
    try:
        library = ctypes.CDLL(None)
        return library if library.syscall and library.fstatfs else None
    except (OSError, AttributeError):
        return None
