"""What goes between a process and its worker: trees of items, requests, commits, as plain values and back.

A tree is a list of rows, parents before their children, so that no depth is too deep:

    ["c", parent, name, kind, attrs, whether they are encoded, versions]     a container
    ["t", parent, name, dtype, shape, flavor, identity, placement, order, source]
    ["v", parent, name, encoded value]

Invariant: what is unpacked equals what was packed, but for sources, which the two sides make for themselves, and for
identities, which are numbers here: equal for tensors that are the same memory.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable
from dataclasses import asdict, fields
from typing import Any

from cas_ckpt.core.records import CommitInfo, CommitStats
from cas_ckpt.core.refs import Head
from cas_ckpt.errors import InternalError, UnsupportedValueError
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.spec import Spec, pack_placement, unpack_placement
from cas_ckpt.objects.state import ArraySource, Container, EncodedValue, Flavor, Item, TensorItem, ValueItem, render_key
from cas_ckpt.objects.values import decode_value, encode_value
from cas_ckpt.ops.commit.request import CommitRequest, checked_fields, decoded_lineage, working_folder

_OWN_WAY = frozenset({
    "head", "other_parents", "parents", "lineage", "meta", "provenance", "command", "folder", "frozen_keys", "look",
    "announce",
})  # fmt: skip
"""Fields of a request that are not plain values."""


class Identities:
    """Numbers in place of what says that tensors are the same memory; the same number in the next tree."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._seen: dict[Hashable, int] = {}
        self._next = 0

    def pack(self, identity: tuple[Any, ...] | None) -> list[Any] | None:
        """(memory, version) as numbers."""
        if identity is None:
            return None
        memory, version = identity[0], identity[-1] if len(identity) > 1 else None
        number = self._numbers.get(memory)
        if number is None:
            number, self._next = self._next, self._next + 1
        self._seen[memory] = number
        self._numbers[memory] = number
        return [number, list(version) if isinstance(version, tuple) else version]

    def end_tree(self) -> None:
        """Forget memory that was not in the tree."""
        self._numbers, self._seen = self._seen, {}


def pack_tree(
    tree: Container, *, identities: Identities, pack_source: Callable[[TensorItem], Any], allow_pickle: bool
) -> list[Any]:
    """`tree` as rows.

    Args:
        pack_source: What the other side makes the source of a tensor from.
    Raises:
        UnsupportedValueError: names the key.
    """
    rows: list[Any] = []
    waiting: list[tuple[Item, int, Any, tuple[Any, ...]]] = [(tree, -1, "", ())]
    while waiting:
        item, parent, name, path = waiting.pop()
        if isinstance(item, Container):
            versions = None if item.versions is None else dict(item.versions)
            rows.append(["c", parent, name, item.kind, *_packed_attrs(item, path, allow_pickle), versions])
            own = len(rows) - 1
            waiting.extend((child, own, below, (*path, below)) for below, child in reversed(item.children.items()))
        elif isinstance(item, TensorItem):
            placement = None if item.placement is None else pack_placement(item.placement)
            rows.append([
                "t", parent, name, item.spec.dtype, list(item.spec.shape), str(item.flavor),
                identities.pack(item.identity), placement, item.order, pack_source(item),
            ])  # fmt: skip
        elif isinstance(item, EncodedValue):
            rows.append(["v", parent, name, item.data])
        elif isinstance(item, ValueItem):
            data = encode_value(item.value, key=render_key(path), allow_pickle=allow_pickle)
            rows.append(["v", parent, name, data])
        else:
            raise InternalError(f"{render_key(path)}: a {type(item).__name__} cannot be committed")
    identities.end_tree()
    return rows


def _packed_attrs(container: Container, path: tuple[Any, ...], allow_pickle: bool) -> list[Any]:
    attrs = container.attrs
    if attrs is None:
        return [None, False]
    if isinstance(attrs, EncodedValue):
        return [attrs.data, True]
    data = encode_value(attrs, key=render_key(path), allow_pickle=allow_pickle)
    return [data, False]


def unpack_tree(rows: list[Any], make_source: Callable[[Spec, Any], ArraySource]) -> Container:
    """The tree that `pack_tree` packed.

    Args:
        make_source: The source of a tensor, from what `pack_source` made of it.
    """
    containers: dict[int, Container] = {}
    for at, (code, parent, name, *rest) in enumerate(rows):
        made: Item
        if code == "c":
            kind, data, is_encoded, versions = rest
            attrs = None if data is None else EncodedValue(data) if is_encoded else _decoded_attrs(data)
            made = containers[at] = Container(kind, {}, attrs, versions)
        elif code == "t":
            dtype, shape, flavor, identity, placement, order, source = rest
            spec = Spec(dtype, tuple(shape))
            made = TensorItem(
                spec, make_source(spec, source), Flavor(flavor), _identity(identity),
                None if placement is None else unpack_placement(placement), order if order is None else tuple(order),
            )  # fmt: skip
        else:
            made = EncodedValue(rest[0])
        if parent >= 0:
            containers[parent].children[name] = made
    return containers[0]


def _decoded_attrs(data: bytes) -> Any:
    try:
        return decode_value(data)
    except UnsupportedValueError:  # pickled: they are stored as they are
        return EncodedValue(data)


def _identity(packed: Any) -> tuple[Any, ...] | None:
    if packed is None:
        return None
    number, version = packed
    return number, tuple(version) if isinstance(version, list) else version


def pack_request(request: CommitRequest) -> dict[str, Any]:
    """`request` without its head and callbacks.

    Raises:
        InvalidInputError: as for `checked_fields`.
    """
    checked = checked_fields(request)
    packed = {each.name: getattr(request, each.name) for each in fields(request) if each.name not in _OWN_WAY}
    packed["frozen"] = None if request.frozen is None else _listed(request.frozen)
    packed["frozen_keys"] = sorted(request.frozen_keys)
    packed["other_parents"] = list(request.other_parents)
    packed["command"] = list(map(str, sys.argv if request.command is None else request.command))
    packed["folder"] = working_folder() if request.folder is None else request.folder
    packed |= {each.name: getattr(checked, each.name) for each in fields(checked)}
    return packed


def _listed(patterns: Any) -> list[str]:
    return [patterns] if isinstance(patterns, str) else list(patterns)


def unpack_request(packed: dict[str, Any], **own: Any) -> CommitRequest:
    """The request that `pack_request` packed, with the fields `own`."""
    given = dict(packed)
    provenance = given.pop("provenance")
    return CommitRequest(
        **own,
        frozen_keys=frozenset(given.pop("frozen_keys")),
        meta=_decoded(given.pop("meta")),
        other_parents=tuple(map(Digest, given.pop("other_parents"))),
        lineage=decoded_lineage(given.pop("lineage")),
        provenance=False if provenance is None else _decoded(provenance),
        **given,
    )


def _decoded(data: bytes | None) -> Any:
    return None if data is None else decode_value(data)


def pack_head(head: Head) -> list[Any]:
    """`head` as a plain value."""
    return [head.branch, head.commit, list(head.parts)]


def unpack_head(packed: Any) -> Head:
    """What `pack_head` packed."""
    branch, commit, parts = packed
    return Head(branch, commit, tuple(parts))


def pack_commit(made: CommitInfo) -> dict[str, Any]:
    """`made` as a plain value."""
    packed = {each.name: getattr(made, each.name) for each in fields(made)}
    packed["meta"] = _encoded(made.meta)
    packed["stats"] = asdict(made.stats)
    packed["lineage"] = [[each.kind, each.target, _encoded(each.meta)] for each in made.lineage]
    return packed


def unpack_commit(packed: dict[str, Any]) -> CommitInfo:
    """What `pack_commit` packed."""
    given = dict(packed)
    return CommitInfo(
        parents=tuple(given.pop("parents")),
        meta=_decoded(given.pop("meta")),
        stats=CommitStats(**given.pop("stats")),
        lineage=tuple(decoded_lineage(given.pop("lineage"))),
        **given,
    )


def _encoded(value: Any) -> bytes | None:
    return None if value is None else encode_value(value, key="commit metadata")
