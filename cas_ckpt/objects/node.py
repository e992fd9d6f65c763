"""Nodes: small structured objects as canonical bytes under an id.

Invariant: the bytes of a node follow from its content alone; decoding accepts nothing that
encoding would not write. What the kinds of nodes hold: tensor_node.py, tree_node.py, commit.py.
Knows nothing of where nodes are stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cas_ckpt.errors import CorruptionError, UnsupportedVersionError
from cas_ckpt.objects.canonical import pack_array, pack_canonical, unpack_canonical
from cas_ckpt.objects.digest import Digest, object_id
from cas_ckpt.objects.kinds import ObjectKind

VERSION = 1
"""Version of every node's layout; a reader refuses a higher one."""

_LABELS = {kind: pack_canonical(kind.label) for kind in ObjectKind}


@dataclass(frozen=True, slots=True)
class Node:
    """A structured object ready to be stored: its kind, id, bytes and the ids it names."""

    kind: ObjectKind
    digest: Digest
    data: bytes
    children: tuple[Digest, ...] = ()


def make_node(kind: ObjectKind, payload: Any, children: Iterable[Digest] = ()) -> Node:
    """The node of `kind` with this payload (lists, dicts, str, int, bytes, None)."""
    return packed_node(kind, pack_canonical(payload), children)


def packed_node(kind: ObjectKind, payload: bytes, children: Iterable[Digest]) -> Node:
    """The node of `kind` whose payload is packed already."""
    data = pack_array([_LABELS[kind], pack_canonical(VERSION), payload])
    return Node(kind, object_id(kind.label, data), data, tuple(children))


def open_node(kind: ObjectKind, data: bytes) -> Any:
    """The payload of a node of `kind`.

    Raises:
        CorruptionError: not canonical, or another kind.
        UnsupportedVersionError: written by a newer version.
    """
    head = unpack_canonical(data)
    if not isinstance(head, list) or len(head) != 3 or head[0] != kind.label or type(head[1]) is not int:
        raise CorruptionError(f"expected a {kind.label} node, found something else: run repo.rebuild_index()")
    if head[1] < 1:
        raise CorruptionError(f"a {kind.label} node of version {head[1]}, which never was")
    if head[1] > VERSION:
        raise UnsupportedVersionError(
            f"{kind.label} node of version {head[1]}, this cas_ckpt reads up to {VERSION}: upgrade cas_ckpt"
        )
    return head[2]
