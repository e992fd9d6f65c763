"""What a snapshot holds, as torchsnapshot names it: "<rank>/<key of the app state>/<path>".

    one value for all ranks        "0/model/weight"; every rank reads it, under its own number too
    each rank's own                "0/progress/step", "1/progress/step"
    divided over ranks             "0/model/table", "1/model/table": any of them is the whole tensor

The listing of the commit says what there is; tensors are read when they are asked for. Values are read with the
container that they are in, as long as that holds no tensor.

Invariant: nothing is written, no other rank is asked. Must not know where the repository is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import unquote

import cas_ckpt
from cas_ckpt import Repository
from cas_ckpt.formats.torchsnapshot_metadata import component
from cas_ckpt.objects.state import parse_key, render_key
from cas_ckpt.torchsnapshot.failures import NotInSnapshotError
from cas_ckpt.torchsnapshot.manifest import (
    PRIMITIVES,
    SERIALIZER,
    DictEntry,
    Entry,
    ListEntry,
    ObjectEntry,
    OrderedDictEntry,
    PrimitiveEntry,
    Shard,
    ShardedTensorEntry,
    SnapshotMetadata,
    TensorEntry,
)

Name = str | int
_VALUES = frozenset({"value", "dict", "odict", "list", "tuple", "ranks"})
"""Kinds of listed entries that are no tensors: plain values, and containers without content."""


@dataclass(slots=True, eq=False)
class Node:
    """An entry of the commit, or a container of entries.

    Attributes:
        path: Its names in the commit.
        kind: As `Repository.entry` gives it, of containers whose names are numbers; else "" or "dict".
        children: By name; empty of what is no container.
        shape, dtype: Of a tensor.
        has_tensors: Whether it is a tensor or an array, or one is in it.
        regions: Who held what: ranks, offsets and sizes. Empty of containers, and of snapshots by one rank.
    """

    path: tuple[Name, ...]
    kind: str = ""
    children: dict[Name, Node] = field(default_factory=dict)
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    has_tensors: bool = False
    regions: list[tuple[frozenset[int], list[int], list[int]]] = field(default_factory=list)

    @property
    def key(self) -> str:
        """As `Repository.read` takes it."""
        return render_key(self.path)

    @property
    def is_per_rank(self) -> bool:
        """Whether its children are each rank's own."""
        return self.kind == "ranks"

    def named(self, text: str) -> Node | None:
        """The child that a component of a path names."""
        number = text.removeprefix("-")
        is_number = number.isascii() and number.isdigit() and len(number) < 20
        child = self.children.get(int(text)) if is_number else None
        return child or self.children.get(text)

    def leaves(self) -> Iterator[Node]:
        """All entries at and below it that are no containers."""
        if not self.children:
            yield self
        for child in self.children.values():
            yield from child.leaves()


@dataclass(frozen=True, slots=True)
class Found:
    """What a path names: the entry, and the names that lead on inside of its value."""

    node: Node
    inside: tuple[str, ...] = ()


class Contents:
    """What one commit holds."""

    def __init__(self, repo: Repository, commit: str, *, allow_pickle: bool = False) -> None:
        """Lists the commit."""
        self.repo, self.commit, self.allow_pickle = repo, commit, allow_pickle
        held_by = repo.show(commit).world_size or 1
        self.world_size = held_by
        self.root = Node((), "dict")
        by_key: dict[str, Node] = {}
        for entry in repo.ls(commit):
            at, is_tensor = self.root, entry.kind not in _VALUES
            for name in parse_key(entry.key):
                at.has_tensors = at.has_tensors or is_tensor
                at = at.children.setdefault(name, Node((*at.path, name)))
            at.kind, at.shape, at.dtype, at.has_tensors = entry.kind, entry.shape, entry.dtype, is_tensor
            by_key[entry.key] = at
        self._name_kinds(self.root)
        if held_by > 1:  # of a snapshot that was imported nobody knows who held what
            for row in repo.shards(commit):
                node = by_key[row.key]
                node.regions.append((frozenset(row.ranks), list(row.offsets), list(row.sizes)))

    def _name_kinds(self, node: Node) -> None:
        """Ask for the kinds of containers whose names are numbers: lists, tuples, dicts, or each rank's own."""
        if node.children and node is not self.root:
            is_numbered = all(type(name) is int for name in node.children)
            node.kind = self.repo.entry(self.commit, node.key).kind if is_numbered else "dict"
            if node.is_per_rank:
                self.world_size = max(self.world_size, *(int(rank) + 1 for rank in node.children))
        for child in node.children.values():
            if child.children:
                self._name_kinds(child)

    # ------------------------------------------------------------ one entry

    def of_key(self, key: str) -> Node:
        """What is stored for a key of the app state.

        Raises:
            NotInSnapshotError: there is nothing.
        """
        node = self.root.children.get(key)
        if node is None:
            raise NotInSnapshotError(
                f"{key!r} is absent in both manifest and flattened state of the snapshot, which has "
                f"{', '.join(map(repr, self.root.children)) or 'nothing'}"
            )
        return node

    def find(self, path: str) -> Found:
        """What "<rank>/<path>" names.

        Raises:
            NotInSnapshotError: there is nothing of this name for this rank.
        """
        rank_text, _, rest = path.partition("/")
        names = rest.split("/") if rest else []
        at: Node | None = self.root
        if not rank_text.isascii() or not rank_text.isdigit() or len(rank_text) > 9 or not names:
            at = None
        for depth, name in enumerate(names):
            at = None if at is None else at.named(unquote(name))
            if at is not None and at.is_per_rank:
                at = at.children.get(int(rank_text))
            if at is not None and not at.children and at.kind in _VALUES and depth + 1 < len(names):
                return Found(at, tuple(map(unquote, names[depth + 1 :])))
        if at is None:
            raise NotInSnapshotError(
                f'The supplied path "{path}" does not exist in the snapshot\'s manifest: a path is '
                f"<rank>/<key>/<names>; snapshot.get_manifest() has all of them"
            )
        return Found(at)

    def value(self, found: Found) -> Any:
        """The value, read and verified: new objects.

        Raises:
            NotInSnapshotError: the path leads into a value that has no such part.
        """
        value = self.read(found.node)
        for name in found.inside:
            try:
                value = value[int(name)] if isinstance(value, list) else _item(value, name)
            except (LookupError, ValueError, TypeError) as error:
                raise NotInSnapshotError(f"{found.node.key} is a value that has no part {name!r}") from error
        return value

    def read(self, node: Node) -> Any:
        """All of an entry or container, as new objects; of each rank's own, a dict by rank."""
        return self.repo.read(self.commit, node.key, allow_pickle=self.allow_pickle)

    def state_of(self, key: str, rank: int) -> Any:
        """The state that a rank has under a key: its own, and what is one for all.

        Raises:
            NotInSnapshotError: nothing is stored for the key, or not for this rank.
        """
        node = self.of_key(key)
        if node.is_per_rank:
            own = node.children.get(rank)
            if own is None:
                raise NotInSnapshotError(
                    f"{key!r} is each rank's own, of {self.world_size} ranks: there is none for rank {rank}"
                )
            return self.read(own)
        loaded = self.repo.load(self.commit, keys=node.key, allow_pickle=self.allow_pickle)[key]
        return _own(loaded, node, rank)

    # ------------------------------------------------------------ all of it

    @cached_property
    def metadata(self) -> SnapshotMetadata:
        """All entries, as torchsnapshot lists them."""
        values: dict[int, Any] = {}
        self._read_values(self.root, values)
        manifest: dict[str, Entry] = {}
        for rank in range(self.world_size):
            for key, node in self.root.children.items():
                self._add(manifest, node, f"{rank}/{component(key)}", rank, values)
        return SnapshotMetadata(cas_ckpt.__version__, self.world_size, manifest)

    def _read_values(self, node: Node, values: dict[int, Any]) -> None:
        """Read every value; of a container without tensors all at once."""
        if node.has_tensors or node is self.root:
            for child in node.children.values():
                self._read_values(child, values)
        else:
            values[id(node)] = self.read(node)

    def _add(
        self, manifest: dict[str, Entry], node: Node, path: str, rank: int, values: Mapping[int, Any], own: bool = False
    ) -> None:
        """Add what a rank has at and below `node`."""
        if node.is_per_rank:
            if id(node) in values:
                if rank in values[id(node)]:
                    _add_value(manifest, values[id(node)][rank], path, node.key, listed=True, replicated=False)
            elif rank in node.children:
                self._add(manifest, node.children[rank], path, rank, values, own=True)
            return
        if id(node) in values:
            everybody = frozenset(range(self.world_size))
            holders = next((leaf.regions[0][0] for leaf in node.leaves() if leaf.regions), everybody)
            is_all = not own and len(holders) == self.world_size > 1
            listed = own or (rank == 0 if is_all else rank in holders)
            _add_value(manifest, values[id(node)], path, node.key, listed=listed, replicated=is_all)
            return
        if node.children:
            names: list[Name] = [
                name for name, child in node.children.items() if not child.is_per_rank or rank in child.children
            ]
            manifest[path] = ListEntry() if node.kind in ("list", "tuple") else DictEntry(names)
            for name, child in node.children.items():
                self._add(manifest, child, f"{path}/{component(name)}", rank, values, own)
            return
        entry = self._tensor(node, rank, own)
        if entry is not None:
            manifest[path] = entry

    def _tensor(self, node: Node, rank: int, own: bool) -> Entry | None:
        """The entry of a tensor or array for a rank; None: it is in that of rank 0, or another one's."""
        mine = [(offsets, sizes) for ranks, offsets, sizes in node.regions if rank in ranks]
        holders = node.regions[0][0] if node.regions else range(self.world_size)
        is_all = not own and len(node.regions) <= 1 and len(holders) == self.world_size > 1
        if not own and self.world_size > 1 and (rank > 0 if is_all else not mine):
            return None
        if node.kind == "array":
            return ObjectEntry(node.key, SERIALIZER, "numpy.ndarray", is_all)
        if not own and len(node.regions) > 1:
            return ShardedTensorEntry([Shard(offsets, sizes, _whole(node, sizes, False)) for offsets, sizes in mine])
        return _whole(node, node.shape or (), is_all)


def _whole(node: Node, shape: tuple[int, ...] | list[int], replicated: bool) -> TensorEntry:
    return TensorEntry(node.key, SERIALIZER, f"torch.{node.dtype}", list(shape), replicated)


def _add_value(manifest: dict[str, Entry], value: Any, path: str, key: str, *, listed: bool, replicated: bool) -> None:
    """Add a plain value, and what is in it; containers are listed for every rank."""
    if type(value) is list:
        manifest[path] = ListEntry()
        pairs = list(enumerate(value))
    elif type(value) in (dict, OrderedDict):
        names = list(value)
        manifest[path] = DictEntry(names) if type(value) is dict else OrderedDictEntry(names)
        pairs = list(value.items())
    else:
        if listed and type(value) in PRIMITIVES:
            manifest[path] = PrimitiveEntry.of(value, replicated=replicated)
        elif listed:
            kind = f"{type(value).__module__}.{type(value).__name__}"
            manifest[path] = ObjectEntry(key, SERIALIZER, kind, replicated)
        return
    for name, child in pairs:
        _add_value(manifest, child, f"{path}/{component(name)}", key, listed=listed, replicated=replicated)


def _item(value: Any, name: str) -> Any:
    """The item of a dict that a component of a path names."""
    return {str(each): child for each, child in value.items()}[name] if isinstance(value, dict) else value[name]


def _own(loaded: Any, node: Node, rank: int) -> Any:
    """`loaded`, which `node` describes, with the rank's own in place of everybody's."""
    if not any(child.is_per_rank or child.children for child in node.children.values()):
        return loaded
    kept: dict[Any, Any] = {}
    for name, child in node.children.items():
        value = loaded[name]
        if child.is_per_rank:
            if rank in child.children:
                kept[name] = value[rank]
        else:
            kept[name] = _own(value, child, rank)
    if isinstance(loaded, list | tuple):
        return type(loaded)(kept.values())
    return type(loaded)((name, kept[name]) for name in loaded if name in kept)
