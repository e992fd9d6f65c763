"""A commit in the making: what of a state stands inline, what has to be hashed, what ties.

Invariant: the nodes that come out follow from keys, specs and bytes alone. Pure apart from
reading small tensors: it neither hashes chunks nor writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from cas_ckpt.errors import InternalError, InvalidInputError
from cas_ckpt.layout.grid import grid_for
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.node import Node
from cas_ckpt.objects.spec import Box, Grid, Spec
from cas_ckpt.objects.state import Container, EncodedValue, Item, Name, TensorItem, ValueItem, render_name
from cas_ckpt.objects.tensor_node import tensor_nodes
from cas_ckpt.objects.tree_node import INLINE_BYTES, ContainerEntry, Entry, TensorEntry, ValueEntry, tree_nodes
from cas_ckpt.transfer.save import TensorWork

ValueEncoder: TypeAlias = Callable[[Any, str], bytes]

MAX_KEY_BYTES = 4096

VALUE_FLAVOR = "value"
"""Flavor of the tensor of bytes that a long value is stored as."""


@dataclass(slots=True)
class DraftTensor:
    """A tensor that is too large to stand inline; tied tensors share one `work`."""

    name: Name
    key: str
    flavor: str
    item: TensorItem
    work: TensorWork


@dataclass(slots=True)
class DraftContainer:
    """A container whose tree node is made once its tensors are hashed."""

    name: Name
    kind: str
    attrs: bytes | None
    entries: list[Entry | DraftTensor | DraftContainer] = field(default_factory=list)


class _BytesSource:
    """A long encoded value, as the elements of a uint8 tensor."""

    def __init__(self, data: bytes) -> None:
        self._array = np.frombuffer(data, np.uint8)

    def read(self, box: Box) -> np.ndarray[Any, Any]:
        return self._array[box.slices]


class Draft:
    """A whole state in the making. Complete once `works` has been gone through.

    Attributes:
        root: The state's outermost container.
        tensors: Every tensor that is kept in chunks; tied ones share a work.
        containers: All below the root, by key.
        num_entries, num_tensors: Entries so far, and how many of them are tensors.
        inline_bytes: Plain bytes of what stands in tree nodes.
    """

    def __init__(self, state: Container, *, encode_value: ValueEncoder) -> None:
        """Nothing is read before `works` is gone through.

        Args:
            encode_value: (value, key) -> its bytes; raises UnsupportedValueError naming the key.
        """
        self._state = state
        self._encode_value = encode_value
        self._works: dict[Any, TensorWork] = {}
        self._ties: dict[Any, list[str]] = {}
        self.root = DraftContainer("", state.kind, None)
        self.tensors: list[DraftTensor] = []
        self.containers: dict[str, DraftContainer] = {}
        self.num_entries = 0
        self.num_tensors = 0
        self.inline_bytes = 0
        self.num_chunks_elsewhere = 0

    def works(self) -> Iterator[TensorWork]:
        """Go through the state, once; each tensor that has to be hashed, tied ones once.

        A generator, so that threads can hash what was found while the rest is still looked at.

        Raises:
            InvalidInputError: a key that is too long. UnsupportedValueError: names the key.
        """
        waiting = [(self._state, self.root, "")]
        while waiting:
            container, made, key = waiting.pop()
            made.attrs = None if container.attrs is None else self._encoded(container.attrs, key)
            prefix = f"{key}/" if key else ""
            for name, item in container.children.items():
                at = prefix + render_name(name)
                if isinstance(item, Container):
                    below = DraftContainer(name, item.kind, None)
                    made.entries.append(below)
                    self.containers[at] = below
                    waiting.append((item, below, at))
                    continue
                entry, is_new = self._entry(item, name, at)
                made.entries.append(entry)
                if is_new and isinstance(entry, DraftTensor):
                    yield entry.work

    @property
    def all_works(self) -> list[TensorWork]:
        """Every tensor that has to be hashed, as far as `works` has come."""
        return list(self._works.values())

    def add_elsewhere(self, *, num_bytes: int, num_entries: int, num_tensors: int, num_chunks: int) -> None:
        """Count entries that other ranks made below this draft."""
        self.inline_bytes += num_bytes
        self.num_entries += num_entries
        self.num_tensors += num_tensors
        self.num_chunks_elsewhere += num_chunks

    def inline_tensors(self) -> Iterator[tuple[str, TensorEntry]]:
        """The tensors that stand in the tree itself, with their keys; as far as `works` has come."""
        waiting = [(self.root, "")]
        while waiting:
            container, prefix = waiting.pop()
            for entry in container.entries:
                key = prefix + render_name(entry.name)
                if isinstance(entry, DraftContainer):
                    waiting.append((entry, f"{key}/"))
                elif isinstance(entry, TensorEntry) and entry.inline is not None:
                    yield key, entry

    @property
    def num_chunks(self) -> int:
        """Chunks of the whole state, equal ones counted each time, tied ones once."""
        return self.num_chunks_elsewhere + sum(work.grid.num_cells for work in self._works.values())

    @property
    def aliases(self) -> tuple[tuple[str, ...], ...]:
        """Groups of keys that are one tensor in memory, each sorted, sorted."""
        return tuple(sorted(tuple(sorted(keys)) for keys in self._ties.values() if len(keys) > 1))

    @property
    def total_bytes(self) -> int:
        """Plain bytes of all tensors (each tied group once) and inline values."""
        return self.inline_bytes + sum(work.spec.num_bytes for work in self._works.values())

    def _entry(self, item: Item, name: Name, key: str) -> tuple[Entry | DraftTensor, bool]:
        """The entry of a tensor or value, and whether a tensor has to be hashed for it."""
        if len(key) > MAX_KEY_BYTES // 4 and len(key.encode("utf-8", "surrogatepass")) > MAX_KEY_BYTES:
            raise InvalidInputError(f"key {key[:60]!r}... is longer than {MAX_KEY_BYTES} bytes: shorten it")
        self.num_entries += 1
        if isinstance(item, TensorItem):
            return self._tensor(item, name, key)
        if isinstance(item, ValueItem):
            return self._value(item.value, name, key)
        if isinstance(item, EncodedValue):
            return self._value(item, name, key)
        raise InternalError(f"{key}: a {type(item).__name__} cannot be committed")

    def _tensor(self, item: TensorItem, name: Name, key: str) -> tuple[Entry | DraftTensor, bool]:
        self.num_tensors += 1
        spec = item.spec
        num_bytes = spec.num_bytes
        tie = None
        if item.identity is not None and num_bytes:
            tie = (item.identity[0], spec.dtype)
            self._ties.setdefault(tie, []).append(key)
        if num_bytes > INLINE_BYTES:
            return self._pending(item, name, key, tie)
        inline = item.source.read(spec.box).tobytes()
        self.inline_bytes += num_bytes
        return TensorEntry(name, spec, item.flavor, None, inline), False

    def _encoded(self, value: Any, key: str) -> bytes:
        return value.data if isinstance(value, EncodedValue) else self._encode_value(value, key)

    def _value(self, value: Any, name: Name, key: str) -> tuple[Entry | DraftTensor, bool]:
        data = self._encoded(value, key)
        if len(data) <= INLINE_BYTES:
            self.inline_bytes += len(data)
            return ValueEntry(name, data), False
        return self._pending(TensorItem(Spec("uint8", (len(data),)), _BytesSource(data), VALUE_FLAVOR), name, key, None)

    def _pending(self, item: TensorItem, name: Name, key: str, tie: Any) -> tuple[DraftTensor, bool]:
        same = tie if tie is not None else len(self.tensors)
        work = self._works.get(same)
        is_new = work is None
        if work is None:
            work = self._works[same] = TensorWork(item.spec, _grid(item.spec, key), item.source)
        self.tensors.append(DraftTensor(name, key, item.flavor, item, work))
        return self.tensors[-1], is_new


def _grid(spec: Spec, key: str) -> Grid:
    try:
        return grid_for(spec)
    except InvalidInputError as error:
        raise InvalidInputError(f"{key}: {error}") from error


def draft_nodes(draft: Draft) -> tuple[list[Node], Digest]:
    """All nodes of the state, children before parents, and the id of its root.

    Every work of the draft must be hashed. Raises InternalError if one is not.
    """
    made: dict[Digest, Node] = {}
    root = _container_node(draft.root, made)
    return list(made.values()), root


def _container_node(container: DraftContainer, made: dict[Digest, Node]) -> Digest:
    entries: list[Entry] = []
    for entry in container.entries:
        if isinstance(entry, DraftContainer):
            entries.append(ContainerEntry(entry.name, _container_node(entry, made)))
        elif isinstance(entry, DraftTensor):
            entries.append(_tensor_entry(entry, made))
        else:
            entries.append(entry)
    nodes = tree_nodes(container.kind, container.attrs, entries)
    made.update((node.digest, node) for node in nodes)
    return nodes[-1].digest


def _tensor_entry(tensor: DraftTensor, made: dict[Digest, Node]) -> TensorEntry:
    chunks = chunk_ids(tensor.work)
    spec = tensor.item.spec
    if len(chunks) == 1:
        return TensorEntry(tensor.name, spec, tensor.flavor, chunks[0], None, single=True)
    nodes = tensor_nodes(spec, tensor.work.grid, chunks)
    made.update((node.digest, node) for node in nodes)
    return TensorEntry(tensor.name, spec, tensor.flavor, nodes[-1].digest, None)


def chunk_ids(work: TensorWork) -> list[Digest]:
    """The chunk ids of a hashed tensor.

    Raises:
        InternalError: a cell was never hashed.
    """
    ids = [digest for digest in work.chunks if digest is not None]
    if len(ids) != work.grid.num_cells:
        raise InternalError(f"{len(ids)} of {work.grid.num_cells} cells of {work.spec} were hashed")
    return ids
