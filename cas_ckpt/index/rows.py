"""Rows of the index as plain values.

Invariant: digests are bytes of 32, sizes are bytes, leaves are counted from 0 inside their chunk.
Knows nothing of SQL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from cas_ckpt.objects.digest import ObjectKind

if TYPE_CHECKING:  # looking at refs imports this file, and nothing of commits
    from cas_ckpt.objects.nodes import LineageEdge, NodeContent
    from cas_ckpt.objects.pack import ExtentInfo, PackKind

REVISIONS = ("0001", "0002", "0003", "0004", "0005", "0006", "0007", "0008")
"""Every schema revision this version knows, oldest first; the last one is what it needs."""

UNKNOWN_KIND = 0
"""Kind of an object that something refers to and that is in no pack the index has seen."""


@dataclass(frozen=True, slots=True)
class CommitRow:
    """A commit as the log shows it.

    Attributes:
        digest: Id of the commit.
        root: Id of its tree.
        parents: Ids of its parents, the first one first.
        layout: Id of the layout node, if there is one.
        time_us: Microseconds since the epoch.
        step: Training step, or None.
        branch: Name of the branch that it was made on, where this index saw that.
        metrics: Numbers by name.
        meta: The user's metadata as the commit object holds it (an encoded plain value), or None.
        stats: What the commit cost, counts and bytes by name.
        lineage: What its state was made from, apart from its parents.
        provenance: Where and by what it was made (an encoded plain value), or None. Rows of the index have its text.
        signature: Of the commit, or None. Rows of the index have the fingerprint of its key.
    """

    digest: bytes
    root: bytes
    parents: tuple[bytes, ...] = ()
    layout: bytes | None = None
    message: str = ""
    author: str = ""
    time_us: int = 0
    step: int | None = None
    branch: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    meta: bytes | None = None
    stats: Mapping[str, int] = field(default_factory=dict)
    lineage: tuple[LineageEdge, ...] = ()
    provenance: bytes | None = field(default=None, compare=False)
    signature: bytes | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class PackRecord:
    """All that one pack holds, as the index takes it in.

    Attributes:
        name: Unique name of the pack in its store.
        size_bytes: Length of the whole pack.
        edges: (parent, children): which objects a node of this pack refers to.
        commits: Commits among the entries. Their root and layout are known from here, so no
            edges of commits are needed (any that are given are left out).
        num_newer: Entries of kinds that this version does not know; they are not among `entries`.
        contents: What trees, pages, tensor nodes and layouts among the entries say: the rows of manifests.
        parts: Of a pack whose rows are not to be in memory together, which has none itself: reads them part by part.
        num_in_parts: How many entries these have together.
    """

    name: str
    kind: PackKind
    size_bytes: int
    entries: Sequence[ExtentInfo] = ()
    edges: Sequence[tuple[bytes, Sequence[bytes]]] = ()
    commits: Sequence[CommitRow] = ()
    num_newer: int = 0
    contents: Sequence[tuple[bytes, NodeContent]] = ()
    parts: Callable[[], Iterable[PackRecord]] | None = None
    num_in_parts: int = 0


class ListedEntry(NamedTuple):
    """One entry of a state. (A tuple, because lists have a hundred thousand of them.)

    Attributes:
        kind: "tensor", "array", "value", or the kind of a composite tensor ("sparse_coo",
            "quantized", "structured" ...) or of an empty container ("dict", "list" ...).
        dtype, shape: Of a tensor or array, else None.
        num_bytes: Plain bytes (of a value: as it is encoded).
    """

    key: str
    kind: str
    dtype: str | None
    shape: tuple[int, ...] | None
    num_bytes: int


class RefRow(NamedTuple):
    """A ref as it was last seen in the store: a row of `refs`."""

    name: str
    target: bytes
    generation: int
    updated_s: float


class RefState(NamedTuple):
    """The record of a ref, for SQL.

    Attributes:
        record: Hash of the record.
        target: Id of the commit that it names; empty: it was deleted.
        note: Message of an annotated tag, reason of a pin; else empty.
        moves: (position, time in microseconds, old, new, action, author) of each entry of its log, as in `t_ref_moves`.
    """

    name: str
    record: bytes
    target: bytes
    note: str
    moves: Sequence[tuple[int, int, bytes | None, bytes | None, str, str]]


@dataclass(frozen=True, slots=True)
class Usage:
    """How much a set of objects holds.

    Attributes:
        num_chunks: Chunks in it.
        num_bytes: Plain bytes of those chunks.
        num_nodes: Trees, tensor nodes and pages in it.
        node_bytes: Plain bytes of those nodes.
        stored_bytes: Bytes that all of them take in packs, entry headers and second copies included.
    """

    num_chunks: int = 0
    num_bytes: int = 0
    num_nodes: int = 0
    node_bytes: int = 0
    stored_bytes: int = 0


@dataclass(frozen=True, slots=True)
class IndexStats:
    """The index in numbers.

    Attributes:
        num_packs: Packs known.
        pack_bytes: Bytes of all packs together.
        objects: Kind -> (number of objects, their plain bytes).
        num_commits: Commits known.
        num_edges: References between nodes.
        num_missing: Objects that are referred to and are in no known pack.
    """

    num_packs: int
    pack_bytes: int
    objects: Mapping[ObjectKind, tuple[int, int]]
    num_commits: int
    num_edges: int
    num_missing: int


# --- what the commits of a filtered log are to say ---------------------------------------------


@dataclass(frozen=True, slots=True)
class AxisBound:
    """A dimension that some mesh of a layout is to have: its name, and its size if that matters."""

    name: str
    size: int | None = None


SIGNS: Mapping[str, str] = {"<": "<", "<=": "<=", ">": ">", ">=": ">=", "==": "=", "!=": "<>"}
"""How a metric may be compared, and how SQL says it."""


@dataclass(frozen=True, slots=True)
class MetricBound:
    """A comparison of one metric with a number; commits without that metric do not meet it."""

    name: str
    sign: str
    value: float


@dataclass(frozen=True, slots=True)
class CommitFilter:
    """Conditions on commits. None, or an empty tuple, is not a condition.

    Attributes:
        since_us, until_us: Microseconds since the epoch, both included.
        first_step, last_step: Steps, both included; commits without a step meet neither.
        metrics: All of these comparisons.
        author: Part of the author's name, or a pattern (*, ?, [...]) of the whole; case counts for nothing.
        world_size: Ranks that made the commit.
        axes: Dimensions that meshes of its layout are to have, all of them.
    """

    since_us: int | None = None
    until_us: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    metrics: tuple[MetricBound, ...] = ()
    author: str | None = None
    world_size: int | None = None
    axes: tuple[AxisBound, ...] = ()

    def __bool__(self) -> bool:
        return self != _EVERYTHING


_EVERYTHING = CommitFilter()
