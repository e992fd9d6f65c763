"""The data files of a DCP folder, and their items read whole.

Objects, and what cannot be read by offset, are decoded at once: the stream's own compression is
undone, and torch's weights-only loader judges the rest.

Invariant: only bytes of the item's own place are ever read, and no code in them is run. Must
not know how a tensor is read in boxes, nor commits.
"""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from pathlib import Path as FilePath
from typing import Any

import zstandard

from cas_ckpt.errors import InvalidInputError, UnsupportedValueError
from cas_ckpt.ops.input_file import InputFile
from cas_ckpt.ops.model_files import check_inside
from cas_ckpt.training.dcp_folder_metadata import MAX_DECODED_BYTES, FolderMetadata, Place
from cas_ckpt.training.torch_file import ZIP_MAGIC, check_extent, check_old_file, check_zip, load_weights

_MAX_OPEN_FILES = 128
_ZSTD = ("stream.zstd", "1")


class DataFiles:
    """The data files of a folder; a limited number is open at a time. May be shared by threads."""

    def __init__(self, folder: FilePath, *, follow_links: bool = False) -> None:
        self.folder = folder
        self.follow_links = follow_links
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        self._open: OrderedDict[str, InputFile] = OrderedDict()

    def get(self, name: str) -> InputFile:
        """The file, open as long as the answer lives.

        Raises:
            InvalidInputError: it is not there, or no longer as long as it was; or it is a link that leads out of
                the folder, unless links are followed.
        """
        with self._lock:
            file = self._open.get(name)
            if file is None:
                file = self._open[name] = self._opened(name)
            self._open.move_to_end(name)
            if len(self._open) > _MAX_OPEN_FILES:
                self._open.popitem(last=False)
            return file

    def _opened(self, name: str) -> InputFile:
        if not self.follow_links:
            check_inside(self.folder / name, self.folder)
        file = InputFile(self.folder / name)
        if self._sizes.setdefault(name, file.size) != file.size:
            raise InvalidInputError(f"{file.path}: was changed meanwhile: import it again when nobody writes")
        return file


def check_places(metadata: FolderMetadata, files: DataFiles) -> None:
    """See that every item lies inside its file and that no two share bytes.

    Raises:
        InvalidInputError: names the file.
    """
    by_file: dict[str, list[tuple[int, int]]] = {}
    for place in metadata.places():
        by_file.setdefault(place.file, []).append((place.offset, place.offset + place.length))
    for name, ranges in sorted(by_file.items()):
        size, end = files.get(name).size, 0
        for start, stop in sorted(ranges):
            if start < end:
                raise InvalidInputError(f"{name}: two items are said to share bytes from {start} on: write it again")
            if stop > size:
                raise InvalidInputError(f"{name}: an item ends at byte {stop} of {size}: truncated; fetch it again")
            end = stop


def load_object(files: DataFiles, place: Place, *, key: str) -> Any:
    """The plain object at `place`.

    Raises:
        UnsupportedValueError, InvalidInputError: as `load_item`.
    """
    what = f"{key} in {place.file}"
    content = load_item(files, place, MAX_DECODED_BYTES, what=what)
    check_extent(content, place.length, what=what)
    return content


def load_item(files: DataFiles, place: Place, limit: int, *, what: str) -> Any:
    """What torch.save wrote at `place`; at most `limit` bytes, if it has to be decompressed.

    Raises:
        UnsupportedValueError: it is more than torch's weights-only loader takes.
        InvalidInputError: malformed.
    """
    data = _decoded_bytes(files, place, limit, what)
    stream = io.BytesIO(data)
    if data[: len(ZIP_MAGIC)] == ZIP_MAGIC:
        check_zip(stream, len(data), what=what)
        stream.seek(0)
    else:
        check_old_file(data, what=what)
    try:
        return load_weights(stream, what=what, is_mapped=False)
    except InvalidInputError as error:
        if type(error.__cause__).__name__ == "UnpicklingError":  # by name: nothing here imports pickle
            raise UnsupportedValueError(str(error)) from error
        raise


def _decoded_bytes(files: DataFiles, place: Place, limit: int, what: str) -> bytes:
    """The bytes of an item as torch.save wrote them."""
    if place.length > MAX_DECODED_BYTES:
        raise InvalidInputError(f"{what}: {place.length} bytes to be decoded at once: too long to be an object")
    data = bytes(files.get(place.file).read(place.offset, place.length))
    for transform in place.transforms:
        if tuple(transform.partition("/")[::2]) != _ZSTD:
            raise UnsupportedValueError(f"{what}: written through {transform[:80]!r}, of which only zstd is known")
        data = _decompressed(data, min(limit, MAX_DECODED_BYTES), what)
    return data


def _decompressed(data: bytes, limit: int, what: str) -> bytes:
    try:
        with zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True) as stream:
            plain = stream.read(limit + 1)
    except zstandard.ZstdError as error:
        raise InvalidInputError(f"{what}: no zstd stream can be read there: {error}; fetch it again") from error
    if len(plain) > limit:
        raise InvalidInputError(f"{what}: decompresses to more than {limit} bytes: the metadata tells of less")
    return plain
