"""Commits as rows of the index, and as the verbs answer with them.

nodes -> rows   `pack_record`, `commit_row`, when a pack was written
rows -> people  `CommitInfo` and its kin
"""

from __future__ import annotations

import datetime
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from cas_ckpt.errors import CorruptionError, NotFoundError
from cas_ckpt.index.rows import CommitFilter, CommitRow, PackRecord
from cas_ckpt.objects.digest import SHORT_HEX, Digest, ObjectKind, short
from cas_ckpt.objects.layouts import LayoutObject, decode_layout
from cas_ckpt.objects.nodes import (
    Node,
    NodeContent,
    decode_chunk_page,
    decode_commit,
    decode_rows,
    decode_tensor,
    open_tree,
    own_tree,
)
from cas_ckpt.objects.pack import PackKind

if TYPE_CHECKING:
    from cas_ckpt.core.handle import RepositoryHandle
    from cas_ckpt.index.history import PlainIndex
    from cas_ckpt.index.index import Index
    from cas_ckpt.transfer.pack_writer import WrittenPack

MOST_ITEMS = 3
MOST_TEXT = 60


class Brief:
    """A dataclass whose repr fits on a screen: long collections are counted, long texts cut."""

    __slots__ = ()

    def __repr__(self) -> str:
        shown = ((one.name, getattr(self, one.name)) for one in fields(self) if one.repr)  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{name}={_brief(value)}' for name, value in shown)})"


def _brief(value: Any) -> str:
    if isinstance(value, (tuple, list, Mapping, frozenset, set)) and len(value) > MOST_ITEMS:
        return f"<{len(value)} items>"
    if isinstance(value, tuple):
        return f"({', '.join(map(_brief, value))}{',' * (len(value) == 1)})"
    text = repr(value)
    return text if isinstance(value, Brief) or len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 3]}..."


@dataclass(frozen=True, slots=True)
class CommitStats:
    """Contents and cost of a commit, in bytes and counts.

    Attributes:
        total_bytes: Plain bytes of all tensors and values.
        new_bytes: Plain bytes that no earlier commit had (chunks and nodes).
        stored_bytes: Bytes written for them into packs, without the commit object itself.
        num_entries, num_tensors: Entries of the state, and how many of them are tensors.
        num_chunks, num_new_chunks: Chunks of the state, and how many were new.
    """

    total_bytes: int = 0
    new_bytes: int = 0
    stored_bytes: int = 0
    num_entries: int = 0
    num_tensors: int = 0
    num_chunks: int = 0
    num_new_chunks: int = 0


CONTINUED_FROM = "continued-from"
"""Kind of the lineage that names what a state came from when others committed to its branch meanwhile."""

PARTLY_FROM = "partly-from"
"""Kind of the lineage that names a commit of which a part was restored into a state that came from another one."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """Origins of a state, beyond the parents of its commit.

    Lineage keeps nothing from being collected: pin what must stay.

    Attributes:
        kind: "fine-tune-of", "quantized-from", "merged-from", or any other word of small letters,
            digits and "-".
        target: The commit: any revision when it is given to `commit`, a whole id when it is read back.
        meta: A plain value of the user's, or None.
    """

    kind: str
    target: str
    meta: Any = None


@dataclass(frozen=True, slots=True, repr=False)
class CommitInfo(Brief):
    """One commit. Ids are hexadecimal; `time_s` counts from the epoch.

    Attributes:
        meta: The user's metadata, or None.
        stats: What it cost when it was made.
        lineage: What its state was made from, apart from its parents.
        forgotten: Its data may be gone: only this record stays (said by `log` and `show`).
        restored_s: When its state was last restored whole, and with it proven to be intact; None: not that the index
            knew (said by `log` and `show`). Not part of what makes two commits equal.
    """

    id: str
    root: str
    parents: tuple[str, ...]
    message: str
    author: str
    time_s: float
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    meta: Any = None
    stats: CommitStats = field(default_factory=CommitStats)
    lineage: tuple[Lineage, ...] = ()
    forgotten: bool = False
    restored_s: float | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        shown = {"step": self.step, "message": self.message, "metrics": self.metrics}
        parts = [f"{name}={_brief(value)}" for name, value in shown.items() if value]
        return f"CommitInfo({', '.join([self.short_id, *parts])})"

    @property
    def short_id(self) -> str:
        """The leading digits of the id."""
        return self.id[:SHORT_HEX]

    @property
    def time(self) -> datetime.datetime:
        """When it was made, in UTC."""
        return datetime.datetime.fromtimestamp(self.time_s, datetime.UTC)


LEFT_OUT = "left_out"
"""Under this name the metadata of a commit that an import made has what it did not take: file -> why."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file or folder that an import did not take.

    Attributes:
        name: Its name in the folder that was imported.
        reason: Why, in words.
    """

    name: str
    reason: str


@dataclass(frozen=True, slots=True, repr=False)
class ImportInfo(CommitInfo):
    """The commit that an import made.

    Attributes:
        left_out: What is in the folder and not in the commit, by name; empty if it is all there.
        renamed: How names of tensors differ from those in the files, a sentence for each state; empty if none does.
    """

    left_out: tuple[LeftOut, ...] = ()
    renamed: tuple[str, ...] = ()


def import_info(commit: CommitInfo, left_out: tuple[LeftOut, ...], renamed: tuple[str, ...]) -> ImportInfo:
    """`commit` as the answer of an import."""
    known = {each.name: getattr(commit, each.name) for each in fields(commit)}
    return ImportInfo(**known, left_out=left_out, renamed=renamed)


def info_from_row(row: CommitRow, *, forgotten: bool = False, restored_us: int | None = None) -> CommitInfo:
    """The commit in an index row."""
    known = {name: int(row.stats.get(name, 0)) for name in CommitStats.__slots__}
    return CommitInfo(
        id=row.digest.hex(),
        root=row.root.hex(),
        parents=tuple(map(bytes.hex, row.parents)),
        message=row.message,
        author=row.author,
        time_s=row.time_us / 1e6,
        step=row.step,
        metrics=dict(row.metrics),
        meta=None if row.meta is None else _decoded_meta(row.meta),
        stats=CommitStats(**known),
        lineage=tuple(
            Lineage(edge.kind, edge.target.hex(), None if edge.note is None else _decoded_meta(edge.note))
            for edge in row.lineage
        ),
        forgotten=forgotten,
        restored_s=None if restored_us is None else restored_us / 1e6,
    )


_COMMITS_PER_READ = 500


def infos_of_log(
    index: Index | PlainIndex, rows: Iterator[CommitRow], forgotten: Collection[bytes]
) -> Iterator[CommitInfo]:
    """The commits, and what others than their records say of them: one question for some hundreds."""
    from cas_ckpt.index import history

    while batch := list(islice(rows, _COMMITS_PER_READ)):
        restored = index.read(history.proven, [row.root for row in batch])
        for row in batch:
            yield info_from_row(row, forgotten=row.digest in forgotten, restored_us=restored.get(row.root))


def _decoded_meta(data: bytes) -> Any:
    from cas_ckpt.objects.values import decode_value  # brings numpy, which most logs do not need

    return decode_value(data, key="commit metadata")


def commit_of(handle: RepositoryHandle, digest: Digest) -> CommitRow:
    """The commit's row, read from its verified object.

    Raises:
        NotFoundError: no such commit. CorruptionError: its object is damaged.
    """
    try:
        data = handle.read_node(ObjectKind.COMMIT, digest)
    except NotFoundError as error:
        raise NotFoundError(f"there is no commit {short(digest)} here: {error}") from error
    return commit_row(digest, data)


def layout_of(handle: RepositoryHandle, row: CommitRow) -> LayoutObject:
    """The layout of the commit's state.

    Raises:
        CorruptionError: it names no layout, or that is damaged. NotFoundError: it is not there.
    """
    if row.layout is None:
        raise CorruptionError(f"commit {row.digest.hex()} names no layout: restore it from a copy")
    return decode_layout(handle.read_node(ObjectKind.LAYOUT, Digest(row.layout)))


def log_rows(
    handle: RepositoryHandle,
    starts: Sequence[Digest],
    *,
    limit: int | None = None,
    first_parent: bool = False,
    wanted: CommitFilter | None = None,
) -> Iterator[CommitRow]:
    """The index rows of all commits that `starts` lead to, in the order of the log.

    Raises:
        NotFoundError: one of `starts` is in no pack. CorruptionError: it may be in a pack that is damaged.
    """
    from cas_ckpt.index import history  # not needed to name commits alone

    try:
        return history.log(handle.index, starts, limit=limit, first_parent=first_parent, whole=True, wanted=wanted)
    except NotFoundError:
        preview = handle.preview
        more = {} if wanted or preview is None else preview.commits_behind(starts)
    if more:
        with suppress(NotFoundError):  # pages tell only so far back: the packs tell it all
            return history.log(handle.index, starts, limit=limit, first_parent=first_parent, whole=True, more=more)
    # Packs that another process wrote since the index was last brought up to date, or that
    # one wrote which died before it could update the index: at the head, or behind it.
    handle.sync()
    handle.locate(starts, here=True)  # says what is in no pack, or in none that is intact
    return history.log(handle.index, starts, limit=limit, first_parent=first_parent, wanted=wanted)


_PIECES = (128, 2048, None)


def log_rows_in_pieces(
    handle: RepositoryHandle, starts: Sequence[Digest], *, first_parent: bool = False
) -> Iterator[CommitRow]:
    """As `log_rows`, for who may want a few alone: the cost follows what is taken, of a line of commits from one head.

    What a commit leads to never changes, so that a longer log begins as a shorter one does.
    """
    num_rows = 0
    for most in _PIECES:
        before = num_rows
        for row in islice(log_rows(handle, starts, limit=most, first_parent=first_parent), before, None):
            num_rows += 1
            yield row
        if most is None or num_rows < most:
            return


PART_BYTES = 4 * 1024 * 1024
PART_ENTRIES = 20_000
"""Nodes, and entries, of a pack whose rows are brought into an index together: they take up to 100 MB of memory."""

OWN_PART_BYTES = 1024 * 1024
"""Nodes of a pack that was just written: what was committed is in memory, too."""

WITH_EDGES = frozenset({ObjectKind.TREE, ObjectKind.TREE_PAGE, ObjectKind.TENSOR, ObjectKind.CHUNK_PAGE})
"""Nodes whose edges are rows; those of commits follow from their own rows."""

WITH_CONTENT = frozenset({ObjectKind.TREE, ObjectKind.TREE_PAGE, ObjectKind.TENSOR, ObjectKind.LAYOUT})
"""Nodes that say something of a manifest."""


class NodeRows:
    """Rows for a `PackRecord`, collected node by node.

    Attributes:
        edges, commits, contents: As in `PackRecord`.
    """

    def __init__(self) -> None:
        self.edges: list[tuple[bytes, Sequence[bytes]]] = []
        self.commits: list[CommitRow] = []
        self.contents: list[tuple[bytes, NodeContent]] = []

    def add(self, kind: ObjectKind, digest: Digest, data: bytes) -> None:
        """Take in a node that has its id.

        Raises:
            CorruptionError: malformed. UnsupportedVersionError: a later version wrote it.
        """
        if kind == ObjectKind.COMMIT:
            self.commits.append(commit_row(digest, data))
            return
        children, content = node_content(kind, data)
        if kind in WITH_EDGES:
            self.edges.append((digest, children))
        if content is not None:
            self.contents.append((digest, content))


def node_children(kind: ObjectKind, data: bytes) -> tuple[Digest, ...]:
    """The ids that a tree node, tensor node or page names, each once, in order."""
    return node_content(kind, data)[0]


def node_content(kind: ObjectKind, data: bytes) -> tuple[tuple[Digest, ...], NodeContent | None]:
    """The ids that a node names, each once, in order; and what it says that the index has rows for, checked.

    Raises:
        CorruptionError: malformed.
    """
    if kind == ObjectKind.CHUNK_PAGE:
        return _unique(decode_chunk_page(data)), None
    if kind == ObjectKind.TENSOR:
        tensor = decode_tensor(data)
        return _unique(tensor.pages or tensor.chunks), tensor
    if kind in (ObjectKind.TREE, ObjectKind.TREE_PAGE):
        raw = open_tree(data, page=kind == ObjectKind.TREE_PAGE)
        tree = decode_rows(raw)
        entries = [getattr(entry, "node", None) for entry in tree.entries] + [page.node for page in tree.pages]
        return _unique(node for node in entries if node is not None), raw
    return (), decode_layout(data) if kind == ObjectKind.LAYOUT else None


def _unique(digests: Iterable[Digest]) -> tuple[Digest, ...]:
    return tuple(dict.fromkeys(digests))


def pack_record(written: WrittenPack, nodes: Sequence[Node]) -> PackRecord:
    """The rows of a pack that was just written; `nodes` are those that are in it."""
    if written.kind is PackKind.DATA:
        return _data_record(written)
    own = {entry.digest: entry for entry in written.entries}
    present = [node for node in nodes if node.digest in own]
    if sum(len(node.data) for node in present) > OWN_PART_BYTES or len(present) > PART_ENTRIES:

        def parts() -> Iterator[PackRecord]:
            for part in _cut(present):
                entries = tuple(own[node.digest] for node in part)
                yield _node_record(replace(written, entries=entries), part)

        return PackRecord(
            written.key, written.kind, written.size_bytes, parts=parts, num_in_parts=len(written.entries)
        )  # fmt: skip
    return _node_record(written, present)


def _node_record(written: WrittenPack, present: Sequence[Node]) -> PackRecord:
    """The rows of all these nodes together, however long one of them is."""
    return PackRecord(
        name=written.key,
        kind=written.kind,
        size_bytes=written.size_bytes,
        entries=written.entries,
        edges=[(node.digest, node.children) for node in present if node.kind in WITH_EDGES],
        commits=[commit_row(node.digest, node.data) for node in present if node.kind == ObjectKind.COMMIT],
        contents=[(node.digest, content) for node in present if (content := _content(node)) is not None],
    )


def _data_record(written: WrittenPack) -> PackRecord:
    """The rows of a pack of chunks; of one with many of them in parts."""
    key, kind, size_bytes, entries = written.key, written.kind, written.size_bytes, written.entries
    if len(entries) <= PART_ENTRIES:
        return PackRecord(key, kind, size_bytes, entries)

    def parts() -> Iterator[PackRecord]:
        for start in range(0, len(entries), PART_ENTRIES):
            yield PackRecord(key, kind, size_bytes, entries[start : start + PART_ENTRIES])

    return PackRecord(key, kind, size_bytes, parts=parts, num_in_parts=len(entries))


def _cut(nodes: Sequence[Node]) -> Iterator[Sequence[Node]]:
    start = num_bytes = 0
    for at, node in enumerate(nodes):
        if at > start and (at - start >= PART_ENTRIES or num_bytes + len(node.data) > OWN_PART_BYTES):
            yield nodes[start:at]
            start, num_bytes = at, 0
        num_bytes += len(node.data)
    if start < len(nodes):
        yield nodes[start:]


def _content(node: Node) -> NodeContent | None:
    """Rows of a node that was made by this commit."""
    if node.kind in (ObjectKind.TREE, ObjectKind.TREE_PAGE):
        return own_tree(node)
    return node_content(node.kind, node.data)[1] if node.kind in WITH_CONTENT else None


def commit_row(digest: Digest, data: bytes) -> CommitRow:
    """The row of the commit whose node is `data`."""
    commit = decode_commit(data)
    return CommitRow(
        digest=digest,
        root=commit.root,
        parents=commit.parents,
        layout=commit.layout,
        message=commit.message,
        author=commit.author,
        time_us=commit.time_us,
        step=commit.step,
        branch=None,
        metrics=commit.metrics,
        meta=commit.meta,
        stats=commit.stats,
        lineage=commit.lineage,
        provenance=commit.provenance,
        signature=commit.signature,
    )
