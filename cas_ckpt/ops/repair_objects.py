"""Brings objects that are lost here from other repositories, by id, and writes them into new packs.

Invariant: what is written was verified against its id after it was read from the other side, and
nothing that is here is touched. Below a node that is brought, whatever is not here is brought too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from cas_ckpt.errors import CkptError, CorruptionError
from cas_ckpt.index.catalog import Index
from cas_ckpt.index.database import IN_MEMORY
from cas_ckpt.index.rows import Location
from cas_ckpt.objects.commit import decode_commit
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.kinds import ObjectKind
from cas_ckpt.objects.node import Node
from cas_ckpt.pack_index import node_children
from cas_ckpt.repository import RepositoryHandle
from cas_ckpt.storage.store import Store
from cas_ckpt.storage.url import open_store
from cas_ckpt.transfer.chunk_reader import ChunkReader
from cas_ckpt.transfer.pack_writer import ChunkSink, EncodedChunk, WrittenPack, write_nodes

NODE_BATCH_BYTES = 16 * 1024 * 1024
BATCH = 500


def open_source(url: str) -> RepositoryHandle:
    """Another repository, to be read from; its index is made anew in memory if it has none that can be used.

    Raises:
        NoRepositoryError and others: it cannot be opened.
    """
    try:
        handle = RepositoryHandle.open(url, read_only=True)
        handle.sync()
        return handle
    except CorruptionError:
        store = open_store(url)
        from cas_ckpt.config import read_config

        config = read_config(store)
        handle = RepositoryHandle(store, config, Index.open(IN_MEMORY, store_id=config.store_id), read_only=True)
        handle.sync()
        return handle


@dataclass(slots=True)
class PackSink:
    """Writes nodes and extents of chunks into new packs; `finish` makes all of them durable."""

    store: Store
    pack_bytes: int
    _nodes: list[Node] = field(default_factory=list)
    _node_bytes: int = 0
    _written: list[WrittenPack] = field(default_factory=list)
    _chunks: ChunkSink | None = None

    def add_node(self, node: Node) -> None:
        """Add a node."""
        self._nodes.append(node)
        self._node_bytes += len(node.data)
        if self._node_bytes >= NODE_BATCH_BYTES:
            self._flush()

    def add_chunk(self, chunk: EncodedChunk) -> None:
        """Add an extent of a chunk."""
        if self._chunks is None:
            self._chunks = ChunkSink(self.store, pack_bytes=self.pack_bytes)
        self._chunks.put(chunk)

    def _flush(self) -> None:
        if self._nodes:
            self._written.append(write_nodes(self.store, self._nodes))
            self._nodes, self._node_bytes = [], 0

    def finish(self) -> list[WrittenPack]:
        """The packs, durable."""
        self._flush()
        if self._chunks is not None:
            self._written += self._chunks.finish()
        return self._written

    def abort(self) -> None:
        """Leave no unfinished pack."""
        if self._chunks is not None:
            self._chunks.abort()


def kept() -> None:
    """The payload is a copy of its own: there is no buffer to give back."""


@dataclass(slots=True)
class ObjectFetcher:
    """Fetches objects from some repositories into a sink.

    Attributes:
        lacks: Tells which of some ids are not whole here.
        is_bare: Whether a commit keeps only its own object (it was forgotten).
        found: Ids that were fetched (or, without a sink, would be).
        nowhere: Ids that no source has intact.
    """

    sources: Sequence[RepositoryHandle]
    sink: PackSink | None
    lacks: Callable[[Iterable[bytes]], set[bytes]]
    is_bare: Callable[[bytes], bool]
    found: set[bytes] = field(default_factory=set)
    nowhere: set[bytes] = field(default_factory=set)

    def fetch(self, wanted: Iterable[bytes]) -> None:
        """Bring `wanted`, and what is below and not here either."""
        waiting = sorted(set(wanted))
        while waiting:
            batch, waiting = waiting[:BATCH], waiting[BATCH:]
            below: set[bytes] = set()
            for digest in batch:
                children = self._fetch_one(digest)
                if children is None:
                    self.nowhere.add(digest)
                else:
                    self.found.add(digest)
                    below.update(children)
            below -= self.found | self.nowhere | set(waiting)
            waiting += sorted(self.lacks(below))

    def _fetch_one(self, digest: bytes) -> tuple[bytes, ...] | None:
        """What the object names, once it is brought; None if no source has it intact."""
        for source in self.sources:
            try:
                places = source.index.locate([digest]).get(digest, [])
                if places:
                    return self._bring(source, Digest(digest), places)
            except CkptError:
                continue
        return None

    def _bring(self, source: RepositoryHandle, digest: Digest, places: Sequence[Location]) -> tuple[bytes, ...]:
        kind = ObjectKind(places[0].kind)
        if kind == ObjectKind.CHUNK:
            self._bring_chunk(source, digest, places)
            return ()
        data = source.read_node(kind, digest)
        children = self._named(kind, digest, data)
        if self.sink is not None:
            self.sink.add_node(Node(kind, digest, data))
        return children

    def _named(self, kind: ObjectKind, digest: Digest, data: bytes) -> tuple[bytes, ...]:
        if kind == ObjectKind.COMMIT:
            commit = decode_commit(data)
            own = () if self.is_bare(digest) else (commit.root, commit.layout)
            return (*own, *commit.parents)
        return () if kind == ObjectKind.LAYOUT else node_children(kind, data)

    def _bring_chunk(self, source: RepositoryHandle, digest: Digest, places: Sequence[Location]) -> None:
        reader = ChunkReader(source.store)
        extents = reader.verify(digest, places, places[0].num_bytes)
        if self.sink is None:
            return
        for extent in extents:
            info = extent.info
            self.sink.add_chunk(
                EncodedChunk(
                    digest, info.num_bytes, info.leaf_bytes, extent.digests, info.encoding, reader.payload(extent),
                    release=kept, leaves=(info.first_leaf, info.num_leaves),
                )
            )  # fmt: skip
