"""Commit and layout objects.

Invariant: what a state *is* stands in the tree (`root`); who held it, when, why and at what
cost stands here, outside the root. Knows nothing of refs or of storage.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

from cas_ckpt.errors import CorruptionError
from cas_ckpt.objects.digest import DIGEST_BYTES, Digest, ObjectKind
from cas_ckpt.objects.nodes import Node, make_node, open_node

MAX_KIND_CHARS = 64
_KIND = re.compile(rf"[a-z0-9][a-z0-9-]{{0,{MAX_KIND_CHARS - 1}}}\Z")


@dataclass(frozen=True, slots=True)
class LineageEdge:
    """What a state was made from, apart from the history of its branch.

    Attributes:
        kind: How, e.g. "fine-tune-of": see `is_lineage_kind`.
        target: Id of the commit it was made from, which may stand in another repository.
        note: Encoded plain value of the user's, or None.
    """

    kind: str
    target: Digest
    note: bytes | None = None


def is_lineage_kind(kind: str) -> bool:
    """Whether `kind` may name a kind of lineage: small letters, digits and '-'."""
    return _KIND.match(kind) is not None


@dataclass(frozen=True, slots=True)
class CommitObject:
    """One commit.

    Attributes:
        root: Id of the state's tree.
        parents: Ids of the commits that it follows, none for the first.
        time_us: Microseconds since the epoch.
        step: Training step, or None.
        metrics: Finite numbers by name, in the user's order.
        meta: Encoded plain value of the user's metadata, or None.
        layout: Id of the layout node.
        stats: What the commit cost, counts and bytes by name.
        lineage: What the state was made from, in the user's order.
        provenance: Encoded plain value: where and by what it was made; None if nobody asked.
    """

    root: Digest
    parents: tuple[Digest, ...]
    message: str
    author: str
    time_us: int
    step: int | None
    metrics: dict[str, float]
    meta: bytes | None
    layout: Digest
    stats: dict[str, int] = field(default_factory=dict)
    lineage: tuple[LineageEdge, ...] = ()
    provenance: bytes | None = None


@dataclass(frozen=True, slots=True)
class LayoutObject:
    """Who held what when the state was committed.

    Attributes:
        world_size: Number of ranks.
        mesh: Names and sizes of the mesh dimensions, in order; empty for one process.
        placements: Key -> placement per mesh dimension (sharded commits only).
        aliases: Groups of keys that were one tensor, each sorted, sorted.
    """

    world_size: int = 1
    mesh: tuple[tuple[str, int], ...] = ()
    placements: dict[str, list[str]] = field(default_factory=dict)
    aliases: tuple[tuple[str, ...], ...] = ()


def commit_node(commit: CommitObject) -> Node:
    """The node of `commit`; optional fields stand in it only where they say something."""
    payload: dict[str, Any] = {
        "root": commit.root,
        "parents": list(commit.parents),
        "message": commit.message,
        "author": commit.author,
        "time_us": commit.time_us,
        "step": commit.step,
        "metrics": [[name, number] for name, number in commit.metrics.items()],
        "meta": commit.meta,
        "layout": commit.layout,
        "stats": commit.stats,
    }
    if commit.lineage:
        payload["lineage"] = [[edge.kind, edge.target, edge.note] for edge in commit.lineage]
    if commit.provenance is not None:
        payload["provenance"] = commit.provenance
    return make_node(ObjectKind.COMMIT, payload, (commit.root, commit.layout))


def decode_commit(data: bytes) -> CommitObject:
    """The commit in `data`.

    Raises:
        CorruptionError: malformed.
    """
    payload = open_node(ObjectKind.COMMIT, data)
    optional = {name: kinds for name, kinds in _OPTIONAL_TYPES.items() if isinstance(payload, dict) and name in payload}
    _check_fields(payload, _COMMIT_TYPES | optional, "commit")
    ids = [payload["root"], payload["layout"], *payload["parents"]]
    if any(not isinstance(value, bytes) or len(value) != DIGEST_BYTES for value in ids):
        raise CorruptionError("a commit names something that is no id")
    counts = [payload["time_us"], payload["step"] or 0, *payload["stats"].values()]
    if any(type(name) is not str for name in payload["stats"]):
        raise CorruptionError("a commit names its stats by something that is not text")
    if any(type(count) is not int or not -(1 << 63) <= count < 1 << 63 for count in counts):
        raise CorruptionError("a commit counts with something that is no 64-bit integer")
    lineage = _decoded_lineage(payload["lineage"]) if "lineage" in payload else ()
    metrics = _decoded_metrics(payload["metrics"])
    return CommitObject(**payload | {"parents": tuple(payload["parents"]), "lineage": lineage, "metrics": metrics})


def _decoded_metrics(rows: list[Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for row in rows:
        match row:
            case [str() as name, float() as number] if math.isfinite(number) and name not in found:
                found[name] = number
            case _:
                raise CorruptionError("a commit has metrics that are not finite numbers by names, each name once")
    return found


def _decoded_lineage(rows: list[Any]) -> tuple[LineageEdge, ...]:
    if not rows:
        raise CorruptionError("a commit has a lineage that is empty")
    return tuple(map(_edge, rows))


def _edge(row: Any) -> LineageEdge:
    match row:
        case [str() as kind, bytes() as target, None | bytes() as note] if len(target) == DIGEST_BYTES:
            if is_lineage_kind(kind):
                return LineageEdge(kind, Digest(target), note)
    raise CorruptionError("a commit has a lineage that is none")


_COMMIT_TYPES: dict[str, tuple[type, ...]] = {
    "root": (bytes,),
    "parents": (list,),
    "message": (str,),
    "author": (str,),
    "time_us": (int,),
    "step": (int, type(None)),
    "metrics": (list,),
    "meta": (bytes, type(None)),
    "layout": (bytes,),
    "stats": (dict,),
}

_OPTIONAL_TYPES: dict[str, tuple[type, ...]] = {"lineage": (list,), "provenance": (bytes,)}


def layout_node(layout: LayoutObject) -> Node:
    """The node of `layout`; keys that are no valid Unicode (lone surrogates) are left out of it."""
    payload = {
        "world_size": layout.world_size,
        "mesh": [list(dimension) for dimension in layout.mesh],
        "placements": {key: placement for key, placement in layout.placements.items() if _is_text(key)},
        "aliases": [list(group) for group in layout.aliases if all(map(_is_text, group))],
    }
    return make_node(ObjectKind.LAYOUT, payload)


def _is_text(key: str) -> bool:
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True


def decode_layout(data: bytes) -> LayoutObject:
    """The layout in `data`.

    Raises:
        CorruptionError: malformed.
    """
    payload = open_node(ObjectKind.LAYOUT, data)
    _check_fields(payload, {"world_size": (int,), "mesh": (list,), "placements": (dict,), "aliases": (list,)}, "layout")
    groups, mesh = payload["aliases"], payload["mesh"]
    if any(not isinstance(group, list) or not _are(str, group) for group in groups):
        raise CorruptionError("a layout node names aliases that are no keys")
    if any(not isinstance(dim, list) or [type(part) for part in dim] != [str, int] for dim in mesh):
        raise CorruptionError("a layout node has a mesh that is none")
    if not all(_are(str, [key]) and isinstance(v, list) and _are(str, v) for key, v in payload["placements"].items()):
        raise CorruptionError("a layout node has placements that are none")
    dimensions = tuple((name, size) for name, size in mesh)
    return LayoutObject(payload["world_size"], dimensions, payload["placements"], tuple(map(tuple, groups)))


def _are(kind: type, values: list[Any]) -> bool:
    return all(type(value) is kind for value in values)


def _check_fields(payload: Any, types: dict[str, tuple[type, ...]], what: str) -> None:
    if not isinstance(payload, dict) or set(payload) != set(types):
        raise CorruptionError(f"a {what} node has other fields than it should")
    for name, allowed in types.items():
        if not isinstance(payload[name], allowed) or isinstance(payload[name], bool):
            raise CorruptionError(f"field {name!r} of a {what} node is of the wrong type")
