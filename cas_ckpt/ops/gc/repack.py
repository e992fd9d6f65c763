"""repack: copies what is needed out of packs that are to go, before they are condemned.

Invariant: everything that is copied is verified first, so damage never spreads, and where there is a copy elsewhere
already, that one is read and verified before the other may go: a pack with a damaged entry that is needed is left
alone, complete, for repair. A chunk whose leaves are in several extents is put together. Nothing is deleted here, and
dying in the middle leaves copies that the next collection finds to be superfluous.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from cas_ckpt.arguments import Buffer
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.packs import pack_batches, read_copy, read_nodes
from cas_ckpt.errors import CorruptionError, NotFoundError
from cas_ckpt.index.garbage import Living
from cas_ckpt.objects import codec
from cas_ckpt.objects.digest import Digest, ObjectKind
from cas_ckpt.objects.nodes import Node
from cas_ckpt.objects.pack import ExtentInfo, Location
from cas_ckpt.parallel.workers import run_all
from cas_ckpt.progress import Progress
from cas_ckpt.transfer.arrivals import chunk_spans
from cas_ckpt.transfer.chunk_reader import ChunkReader
from cas_ckpt.transfer.pack_writer import EncodedChunk, PackSink
from cas_ckpt.transfer.sources import SpanMemory, Unit, Wanted, limits_of, longest_bytes, plan_units, requests_at_once

_LOGGER = logging.getLogger("cas_ckpt")


@dataclass(slots=True)
class Copies:
    """Result of copying.

    Attributes:
        packs: Packs of which everything that is needed is stored elsewhere now.
        num_bytes: Stored bytes that were written.
        damaged: Pack -> what is wrong with it; these stay.
    """

    packs: list[str] = field(default_factory=list)
    num_bytes: int = 0
    damaged: dict[str, str] = field(default_factory=dict)


class Repacker:
    """Copies the needed extents of packs into new packs. Called by one thread."""

    def __init__(self, handle: RepositoryHandle, living: Living, progress: Progress) -> None:
        self._handle = handle
        self._living = living
        self._progress = progress
        self._sink = PackSink(handle.store, pack_bytes=handle.config.pack_bytes)
        self._leaving: frozenset[str] = frozenset()
        self._done: set[bytes] = set()
        self._copies = Copies()

    def copy(self, packs: Sequence[str]) -> Copies:
        """Copy what is needed of `packs` and has no intact copy in others; all copies are durable when it returns.

        Raises:
            OutOfSpaceError, StorageError: nothing of what was begun may be relied on.
        """
        self._leaving = frozenset(packs)
        try:
            present = self._handle.present_packs()
            for batch in pack_batches((pack, present.get(pack, 0)) for pack in packs):
                self._copy_batch([pack for pack, _ in batch])
            self._copies.num_bytes = sum(pack.size_bytes for pack in self._sink.finish())
        except BaseException:
            self._sink.abort()
            raise
        return self._copies

    def _copy_batch(self, packs: Sequence[str]) -> None:
        """Copy some packs, of which the index is asked once."""
        entries = self._living.live_entries(packs)
        try:
            located = self._handle.locate(
                [extent.digest for extents in entries.values() for extent in extents], here=True
            )
        except (CorruptionError, NotFoundError):
            located = None  # one of them has lost something: each is asked for by itself, and that one stays
        for pack in packs:
            self._copy_pack(pack, entries[pack], located)

    def _copy_pack(
        self, pack: str, extents: Sequence[ExtentInfo], located: Mapping[bytes, Sequence[Location]] | None
    ) -> None:
        try:
            if located is None:
                located = self._handle.locate([extent.digest for extent in extents], here=True)
            nodes = [extent for extent in extents if extent.kind != ObjectKind.CHUNK]
            self._copy_nodes([node for node in nodes if not self._is_kept_node(node, located[node.digest])], located)
            self._done.update(node.digest for node in nodes)
            chunks = {extent.digest: extent for extent in extents if extent.kind == ObjectKind.CHUNK}
            left = [chunk for chunk in chunks.values() if chunk.digest not in self._done]
            self._progress.advance(sum(map(_num_bytes, extents)) - sum(map(_num_bytes, left)))
            self._copy_chunks(left, located)
        except (CorruptionError, NotFoundError) as error:
            _LOGGER.warning("%s is left as it is: %s", pack, error)
            self._copies.damaged[pack] = str(error)
            return
        self._copies.packs.append(pack)

    def _is_kept_node(self, extent: ExtentInfo, places: Sequence[Location]) -> bool:
        """Whether the node is stored, intact, in a pack that stays, or was copied into one."""
        if extent.digest in self._done:
            return True
        staying = self._staying(places)
        try:
            if staying:
                read_copy(self._handle.store, ObjectKind(extent.kind), extent.digest, staying)
        except (CorruptionError, NotFoundError):
            return False  # damaged: the twin that is to go may be the last one
        return bool(staying)

    def _staying(self, places: Sequence[Location]) -> list[Location]:
        """The places in packs that stay."""
        return [place for place in places if place.pack not in self._leaving]

    def _copy_nodes(self, extents: Sequence[ExtentInfo], located: Mapping[bytes, Sequence[Location]]) -> None:
        by_kind: dict[ObjectKind, list[Digest]] = {}
        source = _Located(self._handle, located)
        for extent in extents:
            by_kind.setdefault(ObjectKind(extent.kind), []).append(extent.digest)
        for kind, digests in by_kind.items():
            for digest, data in read_nodes(source, kind, digests).items():
                self._sink.add_node(Node(kind, digest, data))

    def _copy_chunks(self, chunks: Sequence[ExtentInfo], located: Mapping[bytes, Sequence[Location]]) -> None:
        """Copy those chunks that have no intact copy in packs that stay; over a network many are read at once."""
        store = self._handle.store
        units: list[Unit[ExtentInfo]] = [Unit((), (chunk,)) for chunk in chunks]
        if not store.abilities.local:
            spans = (
                chunk_spans(self._staying(located[chunk.digest]) or located[chunk.digest], chunk.num_bytes)
                for chunk in chunks
            )
            units = plan_units(map(Wanted, chunks, spans), limits_of(store))

        def make_worker() -> Callable[[Unit[ExtentInfo]], None]:
            memory = SpanMemory(store)
            reader = ChunkReader(memory)

            def work(unit: Unit[ExtentInfo]) -> None:
                with suppress(CorruptionError, NotFoundError):  # of which chunk it is, its own reading says
                    memory.load(unit.spans)
                for chunk in unit.items:
                    places = located[chunk.digest]
                    if not _is_intact(reader, chunk, self._staying(places)):
                        self._copy_chunk(reader, chunk, places)
                    self._done.add(chunk.digest)
                    self._progress.advance(_num_bytes(chunk))

            return work

        run_all(units, make_worker, num_threads=requests_at_once(store, longest_bytes(units)))

    def _copy_chunk(self, reader: ChunkReader, extent: ExtentInfo, places: Sequence[Location]) -> None:
        payloads: list[Buffer] = []
        extents = reader.intact(
            extent.digest, places, extent.num_bytes, lambda found: payloads.append(reader.payload(found))
        )
        first = extents[0]
        if len(extents) == 1:
            payload, encoding = payloads[0], first.info.encoding
        else:
            plain = memoryview(bytearray(extent.num_bytes))
            reader.read(extents, plain)
            encoded = codec.encode_extent(plain, policy="raw", item_bytes=1)
            payload, encoding = encoded.payload, encoded.encoding
        self._sink.add_chunk(
            EncodedChunk(extent.digest, extent.num_bytes, first.info.leaf_bytes, first.digests, encoding, payload)
        )


def _num_bytes(extent: ExtentInfo) -> int:
    return extent.header_bytes + extent.stored_bytes


def _is_intact(reader: ChunkReader, chunk: ExtentInfo, staying: Sequence[Location]) -> bool:
    try:
        if staying:
            reader.verify(chunk.digest, staying, chunk.num_bytes)
    except (CorruptionError, NotFoundError):
        return False  # incomplete, or damaged: the twin that is to go may be the last one
    return bool(staying)


class _Located:
    """Where objects are, asked for all of a batch together."""

    def __init__(self, handle: RepositoryHandle, located: Mapping[bytes, Sequence[Location]]) -> None:
        self.store = self.cached_store = handle.store  # what is copied is what is stored
        self.num_requests = handle.num_requests
        self._handle = handle
        self._located = located

    def locate(self, digests: Iterable[Digest], *, here: bool = False) -> Mapping[bytes, Sequence[Location]]:
        """The places that are known."""
        return self._located

    def relocate(self, digest: Digest, tried: Collection[str]) -> Sequence[Location]:
        """Where it is stored now that one of the packs `tried` is gone."""
        return self._handle.relocate(digest, tried, here=True)
