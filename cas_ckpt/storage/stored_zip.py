"""Zips in which nothing is compressed, as torch.save and bundles are: where the bytes of each member are.

Invariant: members lie inside of the file and share no byte, so that what is read is never more than the file has.
Must not know what the members are.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple
from zipfile import ZIP_STORED, ZipFile

from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import CkptError

MAGIC = b"PK\x03\x04"
"""The first bytes of a zip with members."""

MAX_DIRECTORY_BYTES = 64 << 20
"""At some 60 bytes for a member: about a million."""

_HEADER = struct.Struct("<4s22xHH")
"""Before the bytes of a member: a magic number, and the lengths of its name and of what follows the name."""

_ENCRYPTED = 1

Read = Callable[[int, int], Buffer]
"""From an offset and a length to bytes that are there."""


class Member(NamedTuple):
    """Where the bytes of a member begin, how many they are, and their CRC-32."""

    start: int
    size: int
    crc: int


class _File:
    """What zipfile asks of a file."""

    def __init__(self, read: Read, size: int) -> None:
        self._read, self._size, self._at = read, size, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        if self._at < 0:
            raise io.UnsupportedOperation("a place before the first byte")
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(self._size - self._at, 0)
        size = left if size < 0 else min(size, left)
        if size > MAX_DIRECTORY_BYTES:
            raise ValueError(f"a directory of {size} bytes")
        self._at += size
        return bytes(self._read(self._at - size, size))


def stored_members(read: Read, num_bytes: int) -> dict[str, Member]:
    """The members of a zip of `num_bytes`, by name.

    Raises:
        ValueError: no zip, or one with compressed, encrypted or overlapping members, or two of one name.
    """
    file: Any = _File(read, num_bytes)
    try:
        with ZipFile(file) as archive:
            return _members(file, archive)
    except (CkptError, MemoryError):
        raise
    except Exception as error:  # a stranger's bytes can make zipfile raise anything
        if type(error) is ValueError or (isinstance(error, OSError) and error.errno):
            raise
        raise ValueError(f"no readable zip: {error}") from error


def _members(file: _File, archive: ZipFile) -> dict[str, Member]:
    members: dict[str, Member] = {}
    end = 0
    for info in sorted(archive.infolist(), key=attrgetter("header_offset")):
        shown = repr(info.filename[:80])
        if info.compress_type != ZIP_STORED or info.compress_size != info.file_size:
            raise ValueError(f"{shown} is compressed")
        if info.flag_bits & _ENCRYPTED:
            raise ValueError(f"{shown} is encrypted")
        file.seek(info.header_offset)
        magic, name_bytes, extra_bytes = _HEADER.unpack(file.read(_HEADER.size))
        start = info.header_offset + _HEADER.size + name_bytes + extra_bytes
        if magic != MAGIC or info.header_offset < end or info.filename in members:
            raise ValueError(f"{shown} claims bytes of another member, or its name")
        end = start + info.file_size
        if end > archive.start_dir:
            raise ValueError(f"{shown} claims {info.file_size} bytes, more than the file has")
        members[info.filename] = Member(start, info.file_size, info.CRC)
    return members
