"""Files that people bring: opened as plain files only, read by offset, never mapped.

Invariant: memory is one buffer per thread, whatever the size of the file, and a file that
ends early (even while it is read) is a typed error. That is why nothing is mapped: pages of
a mapping count as ours, and a mapped file that is cut short kills the process.
Must not know: formats, names of tensors, commits.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from cas_ckpt.errors import InvalidInputError
from cas_ckpt.objects.spec import Box, Spec, raw_dtype
from cas_ckpt.storage.descriptors import Descriptor
from cas_ckpt.storage.trouble import translated

Array: TypeAlias = np.ndarray[Any, Any]

MAX_BAND_BYTES = 32 * 1024 * 1024
"""Whole rows read at a time, at most, to cut cells out of them; a larger box is read run by run."""

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
            raise InvalidInputError(f"{path}: {_kind(status.st_mode)}, wanted a plain file: give the path of one")
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


def _kind(mode: int) -> str:
    names = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    return names.get(stat.S_IFMT(mode), "a device")


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
    """A tensor whose elements stand in C order in a file; an `ArraySource`.

    All sources of one import share one `scratch`, and their files stay open meanwhile.
    """

    file: InputFile
    offset: int
    spec: Spec
    scratch: ReadScratch

    def read(self, box: Box) -> Array:
        """See `ArraySource`: valid until the same thread reads again."""
        raw = raw_dtype(self.spec.item_bytes)
        if not box.num_elements:
            return np.empty(box.sizes, raw)
        band = band_of(self.spec.shape, box)
        num_bytes = band.num_elements * raw.itemsize
        if num_bytes > MAX_BAND_BYTES and band != box:
            return self._read_runs(box, raw)
        data = self.scratch.bytes_of(self.file, self._start(band), num_bytes)
        return data.view(raw).reshape(band.sizes)[box.relative_to(band).slices]

    def _start(self, band: Box) -> int:
        at = 0
        for offset, size in zip(band.offsets, self.spec.shape, strict=True):
            at = at * size + offset
        return self.offset + at * self.spec.item_bytes

    def _read_runs(self, box: Box, raw: np.dtype[Any]) -> Array:
        self.scratch.forget()
        array = self.scratch.space(box.num_elements * raw.itemsize).view(raw).reshape(box.sizes)
        self._fill(array, box)
        return array

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


def band_of(shape: tuple[int, ...], box: Box) -> Box:
    """The smallest run of whole rows that covers a box with elements: one range of the file."""
    axis = next((axis for axis, size in enumerate(box.sizes) if size > 1), len(shape))
    return Box(box.offsets[: axis + 1] + (0,) * len(shape[axis + 1 :]), box.sizes[: axis + 1] + shape[axis + 1 :])
