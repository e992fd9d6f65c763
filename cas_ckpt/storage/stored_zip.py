"""Zips in which nothing is compressed, as torch.save and bundles are: where the bytes of each member are in the file.

Invariant: members lie inside of the file and share no byte, so that what is read is never more than the file has.
Must not know what the members are.
"""

from __future__ import annotations

import io
import struct
from operator import attrgetter
from typing import Any
from zipfile import ZIP_STORED, ZipFile

MAGIC = b"PK\x03\x04"
"""The first bytes of a zip with members."""

MAX_DIRECTORY_BYTES = 64 << 20
"""At some 60 bytes for a member: about a million."""

_HEADER = struct.Struct("<4s22xHH")
"""Before the bytes of a member: a magic number, and the lengths of its name and of what follows the name."""

_ENCRYPTED = 1


class _Limited(io.BufferedReader):
    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > MAX_DIRECTORY_BYTES:
            raise ValueError(f"a directory of {size} bytes")
        return super().read(size)


def stored_members(raw: Any) -> dict[str, tuple[int, int]]:
    """Name of each member of the zip -> where its bytes begin, and how many they are.

    Args:
        raw: A file that can seek and read into a buffer; it stays open.
    Raises:
        ValueError: no zip, or one with compressed, encrypted or overlapping members, or two of one name.
    """
    file = _Limited(raw)
    try:
        with ZipFile(file) as archive:
            return _places(file, archive)
    except OSError:
        raise
    except Exception as error:  # a stranger's bytes can make zipfile raise anything
        raise error if type(error) is ValueError else ValueError(f"no readable zip: {error}") from error
    finally:
        file.detach()


def _places(file: _Limited, archive: ZipFile) -> dict[str, tuple[int, int]]:
    places: dict[str, tuple[int, int]] = {}
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
        if magic != MAGIC or info.header_offset < end or info.filename in places:
            raise ValueError(f"{shown} claims bytes of another member, or its name")
        end = start + info.file_size
        if end > archive.start_dir:
            raise ValueError(f"{shown} claims {info.file_size} bytes, more than the file has")
        places[info.filename] = start, info.file_size
    return places
