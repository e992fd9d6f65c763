"""Folders as torchsnapshot 0.1.0 writes them, by what is in their `.snapshot_metadata`: without that library."""

from __future__ import annotations

import base64
import json
import struct
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass
class Divided:
    """A tensor that the ranks have by rows, so many each."""

    whole: torch.Tensor
    rows: tuple[int, ...]


@dataclass
class SnapshotFolder:
    """One in the making; `entries` is its manifest."""

    path: Path
    world_size: int = 1
    entries: dict[str, Any] = field(default_factory=dict)

    def add(self, rank: int, path: str, value: Any, *, replicated: bool = False) -> None:
        """What is under a path of a rank, and all below it."""
        key, kind = f"{rank}/{path}", type(value)
        if kind is list:
            self.entries[key] = {"type": "list"}
            for number, child in enumerate(value):
                self.add(rank, f"{path}/{number}", child, replicated=replicated)
        elif kind in (dict, OrderedDict):
            self.entries[key] = {"type": kind.__name__, "keys": list(value)}
            for name, child in value.items():
                encoded = str(name).replace("%", "%25").replace("/", "%2F")
                self.add(rank, f"{path}/{encoded}", child, replicated=replicated)
        elif isinstance(value, Divided):
            start = sum(value.rows[:rank])
            part = value.whole[start : start + value.rows[rank]]
            zeros = [0] * (value.whole.dim() - 1)
            tensor = self.tensor(f"sharded/{path}_{start}", part)
            shard = {"offsets": [start, *zeros], "sizes": list(part.shape), "tensor": tensor}
            self.entries[key] = {"type": "ShardedTensor", "shards": [shard] if len(part) else []}
        elif replicated and rank > 0 and not isinstance(value, (dict, list)):
            pass  # has an entry under rank 0 alone
        elif isinstance(value, torch.Tensor):
            self.entries[key] = self.tensor(f"{'replicated' if replicated else rank}/{path}", value) | {
                "replicated": replicated
            }
        elif kind in (int, str, bool, bytes, float):
            data = struct.pack("d", value) if kind is float else value
            text = base64.b64encode(data).decode() if isinstance(data, bytes) else str(value)
            self.entries[key] = {
                "type": kind.__name__, "serialized_value": text, "replicated": replicated,
                "readable": str(value) if kind is float else None,
            }  # fmt: skip
        else:
            location = f"{'replicated' if replicated else rank}/{path}"
            self.saved(location, value)
            self.entries[key] = {
                "type": "object", "location": location, "serializer": "torch_save", "obj_type": "x",
                "replicated": replicated,
            }  # fmt: skip

    def tensor(self, location: str, tensor: torch.Tensor) -> dict[str, Any]:
        """The entry of a tensor that is a file of its own."""
        is_raw = not (tensor.is_complex() or tensor.is_quantized)
        if is_raw:
            self.write(location, tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
        else:
            self.saved(location, tensor)
        return {
            "type": "Tensor", "location": location, "serializer": "buffer_protocol" if is_raw else "torch_save",
            "dtype": str(tensor.dtype), "shape": list(tensor.shape), "replicated": False, "byte_range": None,
        }  # fmt: skip

    def batched(self) -> None:
        """Move all tensors of whole files into one, as batching does."""
        data = bytearray()
        for entry in self.entries.values():
            tensors = [shard["tensor"] for shard in entry.get("shards", entry.get("chunks", []))]
            for tensor in tensors or [entry]:
                if tensor["type"] == "Tensor" and tensor["serializer"] == "buffer_protocol":
                    file = self.path / tensor["location"]
                    own = file.read_bytes()
                    file.unlink()
                    tensor["location"] = "batched/0f1e"
                    tensor["byte_range"] = [len(data), len(data) + len(own)]
                    data += own
        self.write("batched/0f1e", bytes(data))

    def chunked(self, key: str) -> None:
        """Cut a tensor into two chunks of rows."""
        entry = self.entries[key]
        data = (self.path / entry["location"]).read_bytes()
        rows = entry["shape"][0]
        row_bytes, cut, chunks = len(data) // rows, rows // 2, []
        for start, stop in ((0, cut), (cut, rows)):
            location = f"{entry['location']}_{start}"
            self.write(location, data[start * row_bytes : stop * row_bytes])
            sizes = [stop - start, *entry["shape"][1:]]
            tensor = {**entry, "location": location, "shape": sizes}
            chunks.append({"offsets": [start, *[0] * (len(sizes) - 1)], "sizes": sizes, "tensor": tensor})
        (self.path / entry["location"]).unlink()
        self.entries[key] = {
            "type": "ChunkedTensor", "dtype": entry["dtype"], "shape": entry["shape"], "chunks": chunks,
            "replicated": entry["replicated"],
        }  # fmt: skip

    def write(self, location: str, data: bytes) -> None:
        file = self.path / location
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)

    def saved(self, location: str, value: Any) -> None:
        file = self.path / location
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(value, file)

    def finish(self) -> Path:
        """Write the metadata."""
        self.path.mkdir(parents=True, exist_ok=True)
        metadata = {"version": "0.1.0", "world_size": self.world_size, "manifest": self.entries}
        (self.path / ".snapshot_metadata").write_text(json.dumps(metadata, indent=2))
        return self.path


def write_snapshot(path: Path, *states: dict[str, Any], replicated: tuple[str, ...] = ()) -> SnapshotFolder:
    """The snapshot that so many ranks took of their states, by key of the app state; `finish` it."""
    folder = SnapshotFolder(path, len(states))
    for rank, state in enumerate(states):
        for key, value in state.items():
            folder.add(rank, key, value, replicated=key in replicated)
    return folder
