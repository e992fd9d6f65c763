"""Entries of a manifest, named as torchsnapshot names them.

Invariant: plain data; what an entry says of its place is its key in the commit, and its serializer is "cas_ckpt".
"""

from __future__ import annotations

import base64
import struct
from dataclasses import dataclass, field

SERIALIZER = "cas_ckpt"

PRIMITIVES = (int, str, bool, bytes, float)
"""Types of values that stand in a manifest."""


@dataclass
class Entry:
    """What is under one path of a snapshot."""

    type: str


@dataclass
class TensorEntry(Entry):
    """A tensor: whole, or one rank's part of a divided one."""

    type: str = field(default="Tensor", init=False)
    location: str
    serializer: str
    dtype: str
    shape: list[int]
    replicated: bool
    byte_range: list[int] | None = None


@dataclass
class Shard:
    """A region of a divided tensor: where it begins, how long it is along each dimension, and what it is."""

    offsets: list[int]
    sizes: list[int]
    tensor: TensorEntry


@dataclass
class ShardedTensorEntry(Entry):
    """A tensor that the ranks have in parts: those of one rank."""

    type: str = field(default="ShardedTensor", init=False)
    shards: list[Shard]


@dataclass
class ObjectEntry(Entry):
    """Any other value."""

    type: str = field(default="object", init=False)
    location: str
    serializer: str
    obj_type: str
    replicated: bool


@dataclass
class ListEntry(Entry):
    """A list; its items have its path and their number."""

    type: str = field(default="list", init=False)


@dataclass
class DictEntry(Entry):
    """A dict, with its keys."""

    type: str = field(default="dict", init=False)
    keys: list[str | int]


@dataclass
class OrderedDictEntry(Entry):
    """An OrderedDict, with its keys in order."""

    type: str = field(default="OrderedDict", init=False)
    keys: list[str | int]


@dataclass
class PrimitiveEntry(Entry):
    """An int, str, bool, bytes or float, with its value as text."""

    serialized_value: str
    replicated: bool
    readable: str | None = None

    @classmethod
    def of(cls, value: int | str | bool | bytes | float, *, replicated: bool) -> PrimitiveEntry:
        """The entry of a value."""
        readable = str(value) if type(value) is float else None
        data = struct.pack("d", value) if type(value) is float else value
        text = base64.b64encode(data).decode() if isinstance(data, bytes) else str(data)
        return cls(type(value).__name__, text, replicated, readable)

    def get_value(self) -> int | str | bool | bytes | float:
        """The value."""
        text = self.serialized_value
        if self.type == "int":
            return int(text)
        if self.type == "bool":
            return text == "True"
        if self.type == "str":
            return text
        data = base64.b64decode(text)
        value: float = struct.unpack("d", data)[0] if self.type == "float" else 0.0
        return data if self.type == "bytes" else value


@dataclass
class SnapshotMetadata:
    """All entries of a snapshot, by "<rank>/<path>", and how many ranks took it.

    Attributes:
        version: Of cas_ckpt.
    """

    version: str
    world_size: int
    manifest: dict[str, Entry]


def is_container_entry(entry: Entry) -> bool:
    """Whether it is a list or a dict."""
    return isinstance(entry, ListEntry | DictEntry | OrderedDictEntry)


def is_fully_replicated_entry(entry: Entry) -> bool:
    """Whether it is one value for all ranks, and whole."""
    return bool(getattr(entry, "replicated", False))
