"""Loads the tree of a commit: containers, stored tensors and values, nothing decoded.

Invariant: level by level, so that the nodes of a level are read by few requests.
"""

from __future__ import annotations

import os
import pathlib
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from numbers import Real
from typing import Any

from cas_ckpt.core.forgotten import naming_forgotten
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.packs import collector_paused, node_children
from cas_ckpt.errors import CorruptionError, InternalError, InvalidInputError, NotFoundError, TooLargeError, shown_value
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.objects.nodes import ContainerEntry, Entry, PageEntry, TensorEntry, TreeNode, decode_tree, name_order
from cas_ckpt.objects.state import (
    CONTAINER_KINDS,
    Container,
    EncodedValue,
    Item,
    Name,
    Path,
    StoredTensor,
    ValueItem,
    is_order,
    parse_key,
    render_key,
    walk,
)
from cas_ckpt.objects.structures import STRUCTURE_KINDS

# DOC of cas_ckpt.core.tree:
# Glob patterns over keys, for `keys=` and `frozen=`.
#
# `*` and `?` stay inside one component, `**` crosses them; a pattern that names a container
# names everything below it. A "/" of the pattern also matches the "." of a module's parameter
# names, so `model/base/**` names the parameters of the submodule `base` of `model`.
#

_TOKEN = re.compile(r"\*\*/|\*\*|\*|\?|/|[^*?/]+")
_MEANING = {"**/": r"(?:.*[/.])?", "**": r".*", "*": r"[^/]*", "?": r"[^/]", "/": r"[/.]"}


@lru_cache(maxsize=256)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The regular expression that keys matching `pattern` match as a whole."""
    parts = [_MEANING.get(token) or re.escape(token) for token in _TOKEN.findall(pattern)]
    return re.compile(f"{''.join(parts)}(?:[/.].*)?", re.DOTALL)


class KeyPatterns:
    """A set of patterns; remembers which of them ever matched.

    Args:
        keys: Whole keys that match too; nobody minds if they are not there.
    """

    def __init__(self, patterns: str | Sequence[str] | None, keys: frozenset[str] = frozenset()) -> None:
        self._keys = keys
        self.patterns = [patterns] if isinstance(patterns, str) else list(patterns or ())
        self._compiled = [compile_pattern(pattern) for pattern in self.patterns]
        self._used = [False] * len(self.patterns)

    def __bool__(self) -> bool:
        return bool(self.patterns or self._keys)

    def matches(self, key: str) -> bool:
        """Whether any pattern matches `key`."""
        found = key in self._keys
        for at, pattern in enumerate(self._compiled):
            if pattern.fullmatch(key):
                self._used[at] = found = True
        return found

    @property
    def unused(self) -> list[str]:
        """Patterns that have matched nothing so far."""
        return [pattern for pattern, used in zip(self.patterns, self._used, strict=True) if not used]


# DOC of cas_ckpt.core.tree:
# How much a stored state may unfold into, before somebody says that more is meant.
#
# Equal containers are stored once: a tree of 40 small nodes, each naming the next one twice, stands for more entries
# than any memory holds. So what unfolds is counted while it is made.
#
# Invariant: a limit is never reached by work that grows with what is stored, only by what it unfolds into.
#

_MEMINFO = pathlib.Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a call may unfold.

    Attributes:
        max_entries: Entries of one state, containers among them, each as often as it occurs.
        max_bytes: Bytes of new tensors and arrays in host memory; None: what the system has available.
    """

    max_entries: int = 1 << 21
    max_bytes: int | None = None


_DEFAULT = Limits()
_current: ContextVar[Limits] = ContextVar("limits", default=_DEFAULT)


def current_limits() -> Limits:
    """The limits of this call."""
    return _current.get()


@contextmanager
def limits(*, max_entries: int | None = None, max_bytes: int | None = None) -> Iterator[None]:
    """Other limits for the calls inside of this thread.

        with cas_ckpt.limits(max_entries=50_000_000):
            repo.diff("a", "b")

    Args:
        max_entries, max_bytes: See `Limits`; None leaves what holds already.
    Raises:
        InvalidInputError: a limit that is below 1, or no number.
    """
    given = {"max_entries": max_entries, "max_bytes": max_bytes}
    wanted = {name: value for name, value in given.items() if value is not None}
    for name, value in wanted.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not value >= 1:
            raise InvalidInputError(f"{name} is {shown_value(value)}: give a number from 1 on")
    before = _current.set(replace(_current.get(), **wanted))
    try:
        yield
    finally:
        _current.reset(before)


def available_bytes() -> int:
    """Host memory that can be filled without others losing theirs; all there is where the system does not tell."""
    try:
        for line in _MEMINFO.read_text("ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass  # not Linux, or a form that is not known: the system does not tell
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


MAX_DEPTH = 200


@collector_paused()
def load_tree(handle: RepositoryHandle, root: Digest) -> Container:
    """The state below `root`: tensors as `StoredTensor`, values as `EncodedValue`.

    Raises:
        NotFoundError, CorruptionError: a node is missing (says if the commit was forgotten) or damaged.
    """
    from cas_ckpt.objects.values import decode_value  # brings numpy, which a log does not need

    with naming_forgotten(handle, root):
        trees = _read_trees(handle, root)
    top = Container("dict", {})
    waiting: list[tuple[Container, Any, Digest]] = [(top, "", root)]
    while waiting:
        below: list[tuple[Container, Any, Digest]] = []
        for parent, name, digest in waiting:
            node, entries = trees[digest]
            attrs = None if node.attrs is None else decode_value(node.attrs)
            made = parent.children[name] = Container(node.kind, {}, attrs)
            below += [(made, entry.name, entry.node) for entry in _fill(made, entries)]
            if made.kind == "odict" and not is_order(made.attrs, made.children):
                raise CorruptionError(f"{name}: the order of an OrderedDict names other entries than it has")
        waiting = below
    return _as_container(top.children[""])


def _read_trees(handle: RepositoryHandle, root: Digest) -> dict[Digest, tuple[TreeNode, list[Entry]]]:
    """Every tree below `root`, each read once, with its entries.

    Equal containers are one node: a few of them could stand for more entries than any memory
    holds, so they are counted before anything is made of them.
    """
    found: dict[Digest, tuple[TreeNode, list[Entry]]] = {}
    level = {root: 1}
    total = 0
    for _ in range(MAX_DEPTH):
        if not level:
            return found
        data = handle.read_nodes(ObjectKind.TREE, [digest for digest in level if digest not in found])
        decoded = {digest: decode_tree(node) for digest, node in data.items()}
        entries = _all_entries(handle, decoded)
        found.update((digest, (node, entries[digest])) for digest, node in decoded.items())
        total += sum(times * len(found[digest][1]) for digest, times in level.items())
        check_entries(total, f"the tree of {root.hex()} stands")
        below: dict[Digest, int] = {}
        for digest, times in level.items():
            for entry in found[digest][1]:
                if isinstance(entry, ContainerEntry):
                    below[entry.node] = below.get(entry.node, 0) + times
        level = below
    raise CorruptionError(f"the tree of {root.hex()} is deeper than {MAX_DEPTH} containers: restore it from a copy")


def check_entries(count: int, what: str, *, times: int = 1) -> None:
    """Raise TooLargeError if `count` is more than `times` the entries that this call may make of a state."""
    most = times * current_limits().max_entries
    if count > most:
        raise TooLargeError(
            f"{what} for more than {most} entries, equal containers counted each time: restore it from a copy, or "
            "raise the limit if it is meant to be so large: with cas_ckpt.limits(max_entries=...)"
        )


def _as_container(item: Item) -> Container:
    if not isinstance(item, Container):
        raise InternalError("the root of a tree is no container")
    return item


def _fill(container: Container, entries: Sequence[Entry]) -> list[ContainerEntry]:
    """Put tensors and values in place; the containers among the entries are the answer."""
    deeper: list[ContainerEntry] = []
    children = container.children
    for entry in entries:
        if isinstance(entry, ContainerEntry):
            deeper.append(entry)
            children[entry.name] = Container("dict", {})  # keeps the order of names
        elif isinstance(entry, TensorEntry):
            children[entry.name] = StoredTensor(entry.spec, entry.flavor, entry.node, entry.inline, entry.single)
        else:
            children[entry.name] = EncodedValue(entry.data)
    return deeper


def _all_entries(handle: RepositoryHandle, trees: dict[Digest, TreeNode]) -> dict[Digest, list[Entry]]:
    """The entries of every tree, those in pages included, in order."""
    gathered: dict[Digest, list[Entry]] = {}
    level = {digest: [node] for digest, node in trees.items()}
    while level:
        pages = list(dict.fromkeys(page.node for nodes in level.values() for node in nodes for page in node.pages))
        data = handle.read_nodes(ObjectKind.TREE_PAGE, pages) if pages else {}
        decoded = {digest: decode_tree(page, page=True) for digest, page in data.items()}
        deeper = {}
        for digest, nodes in level.items():
            if all(node.height == 0 for node in nodes):
                _check_order(nodes)
                gathered[digest] = [entry for node in nodes for entry in node.entries]
            else:
                deeper[digest] = [lower(decoded[page.node], node, page) for node in nodes for page in node.pages]
        level = deeper
    return gathered


def _check_order(nodes: Sequence[TreeNode]) -> None:
    """Names ascend from page to page as they do within one."""
    for before, after in pairwise(nodes):
        if name_order(before.entries[-1].name) >= name_order(after.entries[0].name):
            raise CorruptionError("the pages of a tree are out of order: restore an older commit")


def lower(page: TreeNode, above: TreeNode, entry: PageEntry) -> TreeNode:
    """`page`, if it may stand where `entry` of `above` names it.

    Raises:
        CorruptionError: the wrong height, or another first name.
    """
    first = page.entries[0].name if page.entries else page.pages[0].first
    if page.height != above.height - 1 or name_order(first) != name_order(entry.first):
        raise CorruptionError("a page of a tree stands in the wrong place: restore an older commit")
    return page


def select(tree: Container, patterns: KeyPatterns) -> Container:
    """The part of `tree` whose keys match; containers that hold nothing of it are left out.

    Raises:
        NotFoundError: a pattern matches nothing.
    """
    if not patterns:
        return tree
    chosen = _select(tree, (), patterns)
    if patterns.unused:
        raise NotFoundError(f"no entry matches {', '.join(patterns.unused)}: repo.ls(ref) lists the keys")
    return chosen or Container(tree.kind, {}, tree.attrs)


def _select(container: Container, path: Path, patterns: KeyPatterns) -> Container | None:
    kept: dict[Any, Item] = {}
    for name, child in container.children.items():
        at = (*path, name)
        if isinstance(child, Container) and child.children and child.kind in CONTAINER_KINDS:
            inner = _select(child, at, patterns)
            if inner is not None:
                kept[name] = inner
        elif patterns.matches(render_key(at)):
            kept[name] = child
    # A list of which only some items are wanted would shift them: it becomes a dict by number.
    partial = container.kind in ("list", "tuple", *STRUCTURE_KINDS) and len(kept) < len(container.children)
    return Container("dict" if partial else container.kind, kept, container.attrs) if kept else None


def find(tree: Container, key: str) -> Item:
    """The item under `key`.

    Raises:
        NotFoundError: names the longest part of the key that is there.
    """
    item: Item = tree
    path = parse_key(key)
    for depth, name in enumerate(path):
        if not isinstance(item, Container) or name not in item.children:
            there = render_key(path[:depth]) or "the root"
            raise NotFoundError(f"there is no entry {key!r} ({there} is there): repo.ls(ref) lists the keys")
        item = item.children[name]
    return item


def decode_values(
    tree: Container, *, read_value: Callable[[str, StoredTensor], bytes], allow_pickle: bool = False
) -> Container:
    """`tree` with every value decoded; tensors stay as they are.

    Args:
        read_value: Key and place of a long value -> its encoded bytes.
    """
    return _decode_container(tree, (), read_value, allow_pickle)


def _decode_container(
    tree: Container, path: Path, read_value: Callable[[str, StoredTensor], bytes], allow_pickle: bool
) -> Container:
    from cas_ckpt.objects.values import decode_value

    children: dict[Any, Item] = {}
    for name, child in tree.children.items():
        at = (*path, name)
        if isinstance(child, Container):
            children[name] = _decode_container(child, at, read_value, allow_pickle)
        elif isinstance(child, EncodedValue):
            children[name] = ValueItem(decode_value(child.data, key=render_key(at), allow_pickle=allow_pickle))
        elif isinstance(child, StoredTensor) and child.flavor == "value":
            key = render_key(at)
            data = child.inline if child.inline is not None else read_value(key, child)
            children[name] = ValueItem(decode_value(data, key=key, allow_pickle=allow_pickle))
        else:
            children[name] = child
    return Container(tree.kind, children, tree.attrs)


def stored_tensors(tree: Container) -> Iterator[tuple[Path, StoredTensor]]:
    """All tensors of a loaded tree (long values too), with their paths."""
    for path, item in walk(tree):
        if isinstance(item, StoredTensor):
            yield path, item


def reachable(handle: RepositoryHandle, *roots: Digest) -> set[Digest]:
    """Ids of every node and chunk below these roots, themselves included; each node is read once.

    Raises:
        NotFoundError: one of them is in no pack.
    """
    seen = set(roots)
    level = list(seen)
    while level:
        kinds = {digest: ObjectKind(places[0].kind) for digest, places in handle.locate(level).items()}
        below: dict[Digest, None] = {}
        for kind in set(kinds.values()) - {ObjectKind.CHUNK}:
            nodes = handle.read_nodes(kind, [digest for digest in level if kinds[digest] == kind])
            below.update((child, None) for data in nodes.values() for child in node_children(kind, data))
        level = [digest for digest in below if digest not in seen]
        seen.update(level)
    return seen


# DOC of cas_ckpt.core.tree:
# One entry of a commit by its key, reading only the tree nodes that lead to it.


def find_entry(handle: RepositoryHandle, root: Digest, key: str) -> Item:
    """The item under `key` of the state `root`; a container comes with all that is below it.

    Raises:
        NotFoundError: there is none; names the longest part of the key that is there.
        CorruptionError: a node on the way is damaged.
    """
    found = _entry_at(handle, root, key)
    if found is None or isinstance(found, ContainerEntry):
        return load_tree(handle, root if found is None else found.node)
    return _item(found)


def find_object(handle: RepositoryHandle, root: Digest, key: str) -> Digest | None:
    """The id of the tensor, long value or container under `key`; None if it is so small that it has none.

    Raises:
        NotFoundError, CorruptionError: as for `find_entry`.
    """
    found = _entry_at(handle, root, key)
    if found is None:
        return root
    return found.node if isinstance(found, (ContainerEntry, TensorEntry)) else None


def _entry_at(handle: RepositoryHandle, root: Digest, key: str) -> Entry | None:
    """The entry under `key`; None for the root itself."""
    path = parse_key(key)
    container, entry = root, None
    for depth, name in enumerate(path):
        with naming_forgotten(handle, root):
            entry = _child(handle, container, name)
        if isinstance(entry, ContainerEntry):
            container = entry.node
        elif entry is None or depth + 1 < len(path):
            there = render_key(path[: depth if entry is None else depth + 1]) or "the root"
            raise NotFoundError(f"there is no entry {key!r} ({there} is there): repo.ls(ref) lists the keys")
    return entry


def _item(entry: Entry) -> Item:
    if isinstance(entry, TensorEntry):
        return StoredTensor(entry.spec, entry.flavor, entry.node, entry.inline, entry.single)
    if isinstance(entry, ContainerEntry):
        raise CorruptionError(f"{entry.name!r}: a container stands where an entry should: restore it from a copy")
    return EncodedValue(entry.data)


def _child(handle: RepositoryHandle, container: Digest, name: Name) -> Entry | None:
    """The entry called `name` in one container, by way of the pages that may hold it."""
    node = decode_tree(handle.read_node(ObjectKind.TREE, container))
    order = name_order(name)
    while node.height:
        at = bisect_right(node.pages, order, key=lambda page: name_order(page.first)) - 1
        if at < 0:
            return None
        data = handle.read_node(ObjectKind.TREE_PAGE, node.pages[at].node)
        node = lower(decode_tree(data, page=True), node, node.pages[at])
    return next((entry for entry in node.entries if entry.name == name), None)
