"""A commit in the making: what of a state stands inline, what has to be hashed, what ties.

Invariant: the nodes that come out follow from keys, specs and bytes alone. Pure apart from
reading small tensors: it neither hashes chunks nor writes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from cas_ckpt.errors import InternalError, InvalidInputError
from cas_ckpt.layout.grid import grid_for
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.node import (
    INLINE_BYTES,
    ContainerEntry,
    Entry,
    Node,
    TensorEntry,
    ValueEntry,
    tensor_nodes,
    tree_nodes,
)
from cas_ckpt.objects.spec import Box, Spec
from cas_ckpt.objects.state import Container, Item, Name, TensorItem, ValueItem, render_name
from cas_ckpt.transfer.save import TensorWork

ValueEncoder: TypeAlias = Callable[[Any, str], bytes]

MAX_KEY_BYTES = 4096


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


@dataclass(slots=True)
class Draft:
    """A whole state in the making.

    Attributes:
        tensors: Every tensor to be hashed, tied ones once each; `works` has them once.
        aliases: Groups of keys that are one tensor in memory.
        inline_bytes: Plain bytes of what stands in tree nodes.
    """

    root: DraftContainer
    tensors: list[DraftTensor]
    works: list[TensorWork]
    aliases: tuple[tuple[str, ...], ...]
    num_entries: int
    num_tensors: int
    inline_bytes: int

    @property
    def total_bytes(self) -> int:
        """Plain bytes of all tensors (each tied group once) and inline values."""
        return self.inline_bytes + sum(work.spec.num_bytes for work in self.works)


class _BytesSource:
    """A long encoded value, as the elements of a uint8 tensor."""

    def __init__(self, data: bytes) -> None:
        self._array = np.frombuffer(data, np.uint8)

    def read(self, box: Box) -> np.ndarray[Any, Any]:
        return self._array[box.slices]


def draft_state(state: Container, *, encode_value: ValueEncoder) -> Draft:
    """Go through `state` once.

    Args:
        encode_value: (value, key) -> its bytes; raises UnsupportedValueError naming the key.
    Raises:
        InvalidInputError: a key that is too long.
    """
    return _Drafter(encode_value).draft(state)


class _Drafter:
    def __init__(self, encode_value: ValueEncoder) -> None:
        self._encode_value = encode_value
        self._tensors: list[DraftTensor] = []
        self._works: dict[Any, TensorWork] = {}
        self._ties: dict[Any, list[str]] = {}
        self._num_entries = 0
        self._num_tensors = 0
        self._inline_bytes = 0

    def draft(self, state: Container) -> Draft:
        root = self._container(state, "", "")
        aliases = sorted(tuple(sorted(keys)) for keys in self._ties.values() if len(keys) > 1)
        return Draft(
            root, self._tensors, list(self._works.values()), tuple(aliases),
            self._num_entries, self._num_tensors, self._inline_bytes,
        )  # fmt: skip

    def _container(self, container: Container, name: Name, key: str) -> DraftContainer:
        attrs = None if container.attrs is None else self._encode_value(container.attrs, key)
        made = DraftContainer(name, container.kind, attrs)
        prefix = f"{key}/" if key else ""
        made.entries = [
            self._child(item, name, prefix + render_name(name)) for name, item in container.children.items()
        ]
        return made

    def _child(self, item: Item, name: Name, key: str) -> Entry | DraftTensor | DraftContainer:
        if isinstance(item, Container):
            return self._container(item, name, key)
        if len(key) > MAX_KEY_BYTES // 4 and len(key.encode("utf-8", "surrogatepass")) > MAX_KEY_BYTES:
            raise InvalidInputError(f"key {key[:60]!r}... is longer than {MAX_KEY_BYTES} bytes: shorten it")
        self._num_entries += 1
        if isinstance(item, TensorItem):
            return self._tensor(item, name, key)
        if isinstance(item, ValueItem):
            return self._value(item, name, key)
        raise InternalError(f"{key}: a {type(item).__name__} cannot be committed")

    def _tensor(self, item: TensorItem, name: Name, key: str) -> Entry | DraftTensor:
        self._num_tensors += 1
        num_bytes = item.spec.num_bytes
        if item.identity is not None and num_bytes:
            self._ties.setdefault((item.identity[0], item.spec.dtype), []).append(key)
        if num_bytes <= INLINE_BYTES:
            inline = np.ascontiguousarray(item.source.read(item.spec.box)).tobytes()
            self._inline_bytes += num_bytes
            return TensorEntry(name, item.spec, item.flavor, None, inline)
        return self._pending(item, name, key)

    def _value(self, item: ValueItem, name: Name, key: str) -> Entry | DraftTensor:
        data = self._encode_value(item.value, key)
        if len(data) <= INLINE_BYTES:
            self._inline_bytes += len(data)
            return ValueEntry(name, data)
        return self._pending(TensorItem(Spec("uint8", (len(data),)), _BytesSource(data), "value"), name, key)

    def _pending(self, item: TensorItem, name: Name, key: str) -> DraftTensor:
        tie = (item.identity[0], item.spec.dtype) if item.identity is not None else len(self._works)
        work = self._works.get(tie)
        if work is None:
            work = self._works[tie] = TensorWork(item.spec, grid_for(item.spec), item.source)
        self._tensors.append(DraftTensor(name, key, item.flavor, item, work))
        return self._tensors[-1]


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
