"""Files outside of a repository: input files, read by offset and never mapped, and sets of output files.

Invariant of input: only plain files are opened, memory is one buffer per thread, whatever the size of the file, and a
file that ends early (even while it is read) is a typed error. That is why nothing is mapped: pages of
a mapping count as ours, and a mapped file that is cut short kills the process.
Invariant of output: the files of a set appear together, whole, or not at all, and without `force` no file that was
there before is ever replaced.
Must not know: formats, names of tensors, commits.
"""

from __future__ import annotations

import errno
import math
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import IO, Any, TypeAlias

import numpy as np

from cas_ckpt.errors import ConflictError, InvalidInputError
from cas_ckpt.objects.spec import Box, Spec, grid_for, raw_dtype
from cas_ckpt.storage.disk import Descriptor, UnnamedFile, make_folders, sync_file, sync_folder
from cas_ckpt.storage.store import translated

Array: TypeAlias = np.ndarray[Any, Any]

MAX_BAND_BYTES = 32 * 1024 * 1024
"""Whole rows read at a time, at most, to cut cells out of them; a larger box is read run by run."""

_KINDS = MappingProxyType({stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"})
_UNOPENABLE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG})


class InputFile:
    """A plain file, open for reading. May be shared by threads."""

    __slots__ = ("_descriptor", "path", "size")

    def __init__(self, path: Path) -> None:
        """Open `path`; symbolic links are followed.

        Raises:
            InvalidInputError: nothing there, or a folder, socket, FIFO or device.
            PermissionDeniedError, StorageError: the system refused.
        """
        self.path = path
        self._descriptor = _opened(path)
        status = os.fstat(self.fd)
        if not stat.S_ISREG(status.st_mode):
            kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a device")
            raise InvalidInputError(f"{path}: {kind}, wanted a plain file: give the path of one")
        self.size = status.st_size

    @property
    def fd(self) -> int:
        """The open file number; valid as long as this object lives."""
        return self._descriptor.fd

    def read(self, offset: int, length: int) -> bytearray:
        """Exactly `length` bytes from `offset` on. Raises as `read_into`."""
        if offset + length > self.size:
            raise self._too_short(offset + length)
        data = bytearray(length)
        self.read_into(memoryview(data), offset)
        return data

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill `target` with the bytes from `offset` on.

        Raises:
            InvalidInputError: the file ends before. StorageError: the medium failed.
        """
        done = 0
        while done < target.nbytes:
            try:
                count = os.preadv(self.fd, [target[done:]], offset + done)
            except OSError as error:
                raise translated(error, "reading", str(self.path)) from error
            if count == 0:
                raise self._too_short(offset + target.nbytes)
            done += count

    def _too_short(self, wanted: int) -> InvalidInputError:
        size = os.fstat(self.fd).st_size
        return InvalidInputError(f"{self.path}: wanted {wanted} bytes, the file has {size}: truncated; fetch it again")


def _opened(path: Path) -> Descriptor:
    try:
        # O_NONBLOCK: opening a FIFO must not hang; plain files ignore it.
        return Descriptor(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        if isinstance(error, ValueError) or error.errno in _UNOPENABLE:
            raise InvalidInputError(f"{path}: no file can be opened there ({error}): check the path") from error
        raise translated(error, "opening", str(path)) from error


class ReadScratch(threading.local):
    """The buffer of each thread, and what of which file is in it."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.uint8)
        # The file itself, not its number: that one may be another file's by now.
        self._holds: tuple[InputFile, int, int] | None = None

    def bytes_of(self, file: InputFile, offset: int, length: int) -> Array:
        """`length` bytes of `file`, read unless they are in the buffer already."""
        holds = (file, offset, length)
        space = self.space(length)
        if self._holds != holds:
            self._holds = None
            file.read_into(space.data, offset)
            self._holds = holds
        return space

    def space(self, length: int) -> Array:
        """The first `length` bytes of the buffer, whatever is in them."""
        if len(self._buffer) < length:
            self._holds = None
            self._buffer = np.empty(length, np.uint8)
        return self._buffer[:length]

    def forget(self) -> None:
        """The buffer is being overwritten."""
        self._holds = None


@dataclass(frozen=True, slots=True)
class FileSource:
    """A tensor whose elements are in C order in a file; an `ArraySource`.

    All sources of one import share one `scratch`, and their files stay open meanwhile.
    """

    file: InputFile
    offset: int
    spec: Spec
    scratch: ReadScratch

    @property
    def read_bytes(self) -> int:
        """Most memory that a thread holds while it reads this cell by cell."""
        return most_read(self.spec.shape, grid_for(self.spec).box(0).sizes, self.spec.item_bytes)

    def read(self, box: Box) -> Array:
        """The elements of `box`; valid until the same thread reads again."""
        raw = raw_dtype(self.spec.item_bytes)
        if not box.num_elements:
            return np.empty(box.sizes, raw)
        band = band_of(self.spec.shape, box)
        num_bytes = band.num_elements * raw.itemsize
        if num_bytes > MAX_BAND_BYTES and band != box:
            self.scratch.forget()
            array = self.scratch.space(box.num_elements * raw.itemsize).view(raw).reshape(box.sizes)
            self._fill(array, box)
            return array
        data = self.scratch.bytes_of(self.file, self._start(band), num_bytes)
        return data.view(raw).reshape(band.sizes)[box.relative_to(band).slices]

    def _start(self, band: Box) -> int:
        at = 0
        for offset, size in zip(band.offsets, self.spec.shape, strict=True):
            at = at * size + offset
        return self.offset + at * self.spec.item_bytes

    def _fill(self, array: Array, box: Box) -> None:
        """Fill a C-contiguous array, cutting the box along its first axis until it is one run."""
        if band_of(self.spec.shape, box) == box:
            self.file.read_into(array.reshape(-1).view(np.uint8).data, self._start(box))
            return
        axis = next(axis for axis, size in enumerate(box.sizes) if size > 1)
        for at in range(box.sizes[axis]):
            offsets = (*box.offsets[:axis], box.offsets[axis] + at, *box.offsets[axis + 1 :])
            part = array[(slice(None),) * axis + (slice(at, at + 1),)]
            self._fill(part, Box(offsets, (*box.sizes[:axis], 1, *box.sizes[axis + 1 :])))


def most_read(shape: tuple[int, ...], sizes: tuple[int, ...], item_bytes: int) -> int:
    """The most that a `FileSource` of `shape` holds for a box that is nowhere longer than `sizes`."""
    most, row_bytes = math.prod(sizes) * item_bytes, item_bytes
    for size, of in zip(reversed(sizes), reversed(shape), strict=True):
        if size > 1:  # a band of so many rows of this axis as are not too long; a shorter box may be one
            most = max(most, min(size, MAX_BAND_BYTES // row_bytes) * row_bytes)
        row_bytes *= of
    return most


def band_of(shape: tuple[int, ...], box: Box) -> Box:
    """The smallest run of whole rows that covers a box with elements: one range of the file."""
    axis = next((axis for axis, size in enumerate(box.sizes) if size > 1), len(shape))
    return Box(box.offsets[: axis + 1] + (0,) * len(shape[axis + 1 :]), box.sizes[: axis + 1] + shape[axis + 1 :])


# --- output ---------------------------------------------------------------------------------

_BUFFER_BYTES = 1024 * 1024

MOST_UNNAMED = 200
"""Files of one set that are open until they have names; few processes may have more than 1,024 open."""


class OutputFiles:
    """A set of files of one folder, and of folders in it, in the making; a context manager that publishes on success.

    1. every name is checked to be free
    2. each file is written without a name, and synced
    3. all get their names, in order; the folder is synced

    An error removes the names that step 3 gave, and folders that were made; a crash before 3 leaves no file (of those
    beyond `MOST_UNNAMED` it leaves temporaries).
    A crash in 3 leaves whole files, perhaps not all: the last one given is the one to trust.
    """

    def __init__(self, folder: Path, names: Sequence[str], *, force: bool = False) -> None:
        """Check that all of `names` can be made in `folder`.

        Raises:
            ConflictError: one exists already (unless `force`). InvalidInputError: `folder` is a file.
        """
        self._folder = folder
        self._force = force
        self._written: list[tuple[UnnamedFile, Path]] = []
        self._folders = sorted({folder, *((folder / name).parent for name in names)})
        self._made: list[Path] = []
        if folder.exists() and not folder.is_dir():
            raise InvalidInputError(f"{folder} is not a folder: choose another place")
        for path in (folder / name for name in names):
            if path.is_dir() and not path.is_symlink():
                raise ConflictError(f"{path} is a folder: choose another name")
            if not force and os.path.lexists(path):
                raise _exists(path)

    def __enter__(self) -> OutputFiles:
        with self._translating(self._folder):
            for folder in self._folders:
                if not folder.is_dir():
                    make_folders(folder)
                    self._made.append(folder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._discard()
            return
        try:
            self._publish()
        except BaseException:
            self._discard()
            raise

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """A file to be written now; it is durable when the block ends, but has no name yet.

        Raises:
            OutOfSpaceError, PermissionDeniedError, StorageError.
        """
        path = self._folder / name
        with self._translating(path):
            made = UnnamedFile(path, named=len(self._written) >= MOST_UNNAMED)
            self._written.append((made, path))
            with open(made.fd, "wb", buffering=_BUFFER_BYTES, closefd=False) as file:
                yield file
                file.flush()
                sync_file(made.fd)
            made.close()

    @contextmanager
    def _translating(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise translated(error, "writing", str(path)) from error

    def _publish(self) -> None:
        named: list[Path] = []
        try:
            for made, path in self._written:
                with self._translating(path):
                    try:
                        made.publish(replace=self._force)
                    except FileExistsError:
                        raise _exists(path) from None
                named.append(path)
            with self._translating(self._folder):
                for folder in self._folders:
                    sync_folder(folder)
        except BaseException:
            if not self._force:  # what `force` replaced cannot be brought back
                _remove(named)
            raise

    def _discard(self) -> None:
        for made, _ in self._written:
            made.discard()
        for folder in reversed(self._made):
            with suppress(OSError):
                folder.rmdir()


def _remove(paths: Sequence[Path]) -> None:
    """Remove unfinished files, after the error that is being raised; one that stays can be recognized by its name."""
    for path in paths:
        with suppress(OSError):
            path.unlink()


def _exists(path: Path) -> ConflictError:
    return ConflictError(f"{path} exists already and is kept: choose another place, or force")
