"""Reads tensors that torch mapped from a file by their offsets in it instead.

Pages of a mapping that were touched count as memory of the process until it ends or the
system needs them. Where the system tells what is mapped where (Linux), a tensor in a mapping
is read with pread into one buffer per thread; elsewhere, as torch gave it.

Invariant: only a tensor whose memory lies inside a mapping of one of the given files is read
from that file; the caller vouches that the mapping holds what the file holds.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cas_ckpt.objects.state import Container, Item, Name, TensorItem
from cas_ckpt.ops.input_file import FileSource, InputFile, ReadScratch
from cas_ckpt.training.arrays import HostSource

_MAPS = "/proc/self/maps"

SMALL_BYTES = 4096
"""Smaller tensors are read where they are: they are on a page that torch's own reading touches."""


@dataclass(frozen=True, slots=True)
class _Mapping:
    """Addresses [start, stop) are the file from `offset` on."""

    start: int
    stop: int
    offset: int
    file: InputFile


def read_by_offset(tree: Container, files: Sequence[InputFile]) -> Container:
    """`tree` with the source of every tensor that lies in one of `files` replaced."""
    mappings = _mappings(files)
    return _container(tree, mappings, ReadScratch()) if mappings else tree


def _container(container: Container, mappings: Sequence[_Mapping], scratch: ReadScratch) -> Container:
    children: dict[Name, Item] = {}
    for name, item in container.children.items():
        if isinstance(item, Container):
            children[name] = _container(item, mappings, scratch)
        else:
            children[name] = _read_from_file(item, mappings, scratch) if isinstance(item, TensorItem) else item
    return replace(container, children=children)


def _read_from_file(item: TensorItem, mappings: Sequence[_Mapping], scratch: ReadScratch) -> TensorItem:
    num_bytes = item.spec.num_bytes
    if not isinstance(item.source, HostSource) or num_bytes < SMALL_BYTES or not item.source.tensor.is_contiguous():
        return item
    address = item.source.tensor.data_ptr()
    for mapping in mappings:
        if mapping.start <= address and address + num_bytes <= mapping.stop:
            offset = address - mapping.start + mapping.offset
            return replace(item, source=_KeepingSource(mapping.file, offset, item.spec, scratch, item.source))
    return item


@dataclass(frozen=True, slots=True)
class _KeepingSource(FileSource):
    """A file source that keeps the tensor alive: what ties tensors refers to its storage."""

    kept: HostSource


def _mappings(files: Sequence[InputFile]) -> list[_Mapping]:
    """Where in this process's memory each of `files` is mapped, as far as the system tells."""
    by_inode = {_device_and_inode(file): file for file in files}
    by_path = {os.path.realpath(file.path): file for file in files}
    if not files or not os.path.exists(_MAPS):
        return []
    found = []
    with open(_MAPS, encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            # address           perms offset  dev   inode   path
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) < 6 or fields[4] == "0":
                continue
            file = by_inode.get((fields[3], fields[4])) or by_path.get(fields[5])
            if file is not None:
                start, stop = (int(address, 16) for address in fields[0].split("-"))
                found.append(_Mapping(start, stop, int(fields[2], 16), file))
    return found


def _device_and_inode(file: InputFile) -> tuple[str, str]:
    status = os.fstat(file.fd)
    return f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}", str(status.st_ino)
