"""From packs to index rows: what a writer knows already, and what a rebuild reads back.

Invariant: the rows that `read_pack` makes from a pack's bytes are the rows that
`pack_record` made when it was written, so a rebuilt index equals the lost one.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

from cas_ckpt.errors import CkptError, CorruptionError, NotFoundError
from cas_ckpt.index.rows import CommitRow, PackRecord
from cas_ckpt.objects import pack
from cas_ckpt.objects.digest import Digest, ObjectKind, object_id, short
from cas_ckpt.objects.nodes import Node, decode_chunk_page, decode_commit, decode_tensor, decode_tree
from cas_ckpt.objects.pack import ExtentInfo, Location, PackKind, coalesced
from cas_ckpt.storage.store import Store

if TYPE_CHECKING:
    from cas_ckpt.transfer.pack_writer import WrittenPack


PACKS_PER_BATCH = 256
BYTES_PER_BATCH = 1 << 30
"""Packs whose entries are held in memory at a time."""


def pack_record(written: WrittenPack, nodes: Sequence[Node]) -> PackRecord:
    """The rows of a pack that was just written; `nodes` are those that stand in it."""
    own = {entry.digest for entry in written.entries}
    present = [node for node in nodes if node.digest in own]
    return PackRecord(
        name=written.key,
        kind=written.kind,
        size_bytes=written.size_bytes,
        entries=written.entries,
        edges=[(node.digest, node.children) for node in present if _has_edges(node.kind)],
        commits=[commit_row(node.digest, node.data) for node in present if node.kind == ObjectKind.COMMIT],
    )


def _has_edges(kind: ObjectKind) -> bool:
    return kind in (ObjectKind.TREE, ObjectKind.TREE_PAGE, ObjectKind.TENSOR, ObjectKind.CHUNK_PAGE)


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
    )


def read_directory(store: Store, key: str) -> tuple[PackKind, int, list[ExtentInfo]]:
    """Kind, size and entries of the stored pack `key`, from one or two reads of its end.

    Raises:
        CorruptionError: truncated, damaged, or stored under a name that is not its own.
    """
    trailer, entries = _read_end(store, key)
    return trailer.kind, trailer.size_bytes, entries


def _read_end(store: Store, key: str) -> tuple[pack.Trailer, list[ExtentInfo]]:
    """The trailer, and the entries of kinds that this version knows."""
    size, tail = store.get_tail(key, pack.TAIL_GUESS_BYTES)
    trailer = pack.decode_trailer(tail[-pack.TRAILER_BYTES :], size_bytes=size, key=key)
    if trailer.name.hex() not in key:
        raise CorruptionError(f"{key}: this pack says that it is {trailer.name.hex()}: restore it from a copy")
    wanted = size - trailer.directory_offset
    if wanted > len(tail):
        tail = bytes(store.get_range(key, trailer.directory_offset, wanted))
    directory = tail[len(tail) - wanted : len(tail) - pack.TRAILER_BYTES]
    return trailer, pack.decode_directory(directory, trailer, key=key)


def read_pack(store: Store, key: str) -> PackRecord:
    """The rows of the stored pack `key`.

    Raises:
        CorruptionError: damaged; restore the pack from a copy.
    """
    trailer, infos = _read_end(store, key)
    edges: list[tuple[bytes, Sequence[bytes]]] = []
    commits = []
    for info, data in _nodes(store, key, infos):
        if info.kind == ObjectKind.COMMIT:
            commits.append(commit_row(info.digest, data))
        elif _has_edges(info.kind):
            edges.append((info.digest, node_children(info.kind, data)))
    num_newer = trailer.num_entries - len(infos)
    return PackRecord(key, trailer.kind, trailer.size_bytes, infos, edges, commits, num_newer)


def _nodes(store: Store, key: str, infos: Iterable[ExtentInfo]) -> Iterator[tuple[ExtentInfo, bytes]]:
    """The nodes of a pack with their bytes, verified; those that stand near one another are read together."""
    nodes = sorted((info for info in infos if info.kind != ObjectKind.CHUNK), key=lambda info: info.offset)
    for span in coalesced(nodes, extent=lambda info: info):
        start, stop = span[0].offset, max(info.end for info in span)
        data = memoryview(store.get_range(key, start, stop - start))
        for info in span:
            at = info.offset + info.header_bytes - start
            node = bytes(data[at : at + info.stored_bytes])
            if object_id(info.kind.label, node) != info.digest:
                raise CorruptionError(
                    f"{key} at {info.offset}: {info.kind.label} {short(info.digest)} is damaged: restore it from a copy"
                )
            yield info, node


def node_children(kind: ObjectKind, data: bytes) -> tuple[Digest, ...]:
    """The ids that a tree node, tensor node or page names, each once, in order."""
    if kind == ObjectKind.CHUNK_PAGE:
        return _unique(decode_chunk_page(data))
    if kind == ObjectKind.TENSOR:
        tensor = decode_tensor(data)
        return _unique(tensor.pages or tensor.chunks)
    tree = decode_tree(data, page=kind == ObjectKind.TREE_PAGE)
    entries = [getattr(entry, "node", None) for entry in tree.entries] + [page.node for page in tree.pages]
    return _unique(node for node in entries if node is not None)


def _unique(digests: Iterable[Digest]) -> tuple[Digest, ...]:
    return tuple(dict.fromkeys(digests))


def pack_batches(packs: Iterable[tuple[str, int]]) -> Iterator[list[tuple[str, int]]]:
    """(pack, its size), some at a time: as many as may have their entries in memory together."""
    batch: list[tuple[str, int]] = []
    num_bytes = 0
    for key, size in packs:
        batch.append((key, size))
        num_bytes += size
        if len(batch) >= PACKS_PER_BATCH or num_bytes >= BYTES_PER_BATCH:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


# DOC of cas_ckpt.core.packs:
# Reads nodes: small objects that stand near each other are read together, and each is verified.
#
# Invariant: no node leaves this file whose bytes do not have its id. Knows where objects stand
# only by asking.
#


class Whereabouts(Protocol):
    """A store, and who knows where objects stand in it."""

    store: Store

    def locate(self, digests: Iterable[Digest]) -> Mapping[bytes, Sequence[Location]]: ...

    def relocate(self, digest: Digest, tried: Collection[str]) -> Sequence[Location]: ...


def read_nodes(source: Whereabouts, kind: ObjectKind, digests: Sequence[Digest]) -> dict[Digest, bytes]:
    """The bytes of many nodes of one kind, verified; near ones are read together.

    Raises:
        NotFoundError, CorruptionError.
    """
    located = source.locate(digests)
    found: dict[Digest, bytes] = {}
    for span in _spans({digest: located[digest][0] for digest in digests}):
        try:
            found.update(_read_span(source.store, kind, span))
        except (CorruptionError, NotFoundError):
            # Another copy may be intact, and the others of the span certainly are.
            found.update((digest, _read_any(source, kind, digest, located[digest])) for digest, _ in span)
    return found


def _read_span(store: Store, kind: ObjectKind, span: list[tuple[Digest, Location]]) -> dict[Digest, bytes]:
    first, last = span[0][1], span[-1][1]
    start, stop = first.offset, last.offset + last.header_bytes + last.stored_bytes
    data = memoryview(store.get_range(first.pack, start, stop - start))
    found = {}
    for digest, place in span:
        at = place.offset + place.header_bytes - start
        found[digest] = _checked(kind, digest, bytes(data[at : at + place.stored_bytes]), place)
    return found


def _read_any(source: Whereabouts, kind: ObjectKind, digest: Digest, places: Sequence[Location]) -> bytes:
    try:
        return read_copy(source.store, kind, digest, places)
    except NotFoundError:
        return read_copy(source.store, kind, digest, source.relocate(digest, [place.pack for place in places]))


def read_copy(store: Store, kind: ObjectKind, digest: Digest, places: Sequence[Location]) -> bytes:
    """One node from the first of `places` that has it intact.

    Raises:
        CorruptionError, NotFoundError: none has; what was wrong first.
    """
    failure: CkptError | None = None
    for place in places:
        try:
            data = store.get_range(place.pack, place.offset + place.header_bytes, place.stored_bytes)
            return _checked(kind, digest, bytes(data), place)
        except (CorruptionError, NotFoundError) as error:
            failure = failure or error
    raise failure or NotFoundError(f"{kind.label} {short(digest)} is in no pack: it was collected, or never was here")


def _checked(kind: ObjectKind, digest: Digest, data: bytes, place: Location) -> bytes:
    if object_id(kind.label, data) != digest:
        raise CorruptionError(
            f"{kind.label} {short(digest)} in {place.pack} at offset {place.offset}: "
            "the stored bytes do not have this id: restore it from a copy"
        )
    return data


def _spans(places: Mapping[Digest, Location]) -> list[list[tuple[Digest, Location]]]:
    """Objects grouped so that each group is one short read of one pack."""
    ordered = sorted(places.items(), key=lambda item: (item[1].pack, item[1].offset))
    by_pack = (list(group) for _, group in groupby(ordered, key=lambda item: item[1].pack))
    return [span for group in by_pack for span in coalesced(group, extent=lambda item: item[1])]


# DOC of cas_ckpt.core.packs:
# Keeps Python's cyclic garbage collector out of the way while many small objects are made.
#
# What is built in such a block is a tree without cycles: searching it again and again finds
# nothing and costs up to half of the time. Reference counting goes on as always.
#


@contextmanager
def collector_paused() -> Iterator[None]:
    """No cyclic collection begins inside the block (in any thread); afterwards all is as before."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
