"""Writes packs: one pack at a time, or chunks handed in by many threads.

Invariant: a pack is under its key whole and durable, or not at all; what `finish` returns
names every entry that was handed in. Knows nothing of tensors or of SQL.
"""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Protocol

from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import TooLargeError
from cas_ckpt.objects import codec, pack
from cas_ckpt.objects.digest import DIGEST_BYTES, Digest, ObjectKind
from cas_ckpt.objects.nodes import Node
from cas_ckpt.objects.pack import PACK_PREFIX, ExtentInfo, PackKind
from cas_ckpt.storage.store import Store
from cas_ckpt.transfer.workers import start

QUEUED_BATCHES = 8
"""Batches of chunks that wait for a pack writer: bounds memory, keeps the disk busy."""

NUM_WRITERS = 2
"""Packs written side by side: one is copied into its buffer while the other is on the disk."""

ONE_PUT_BYTES = 8 * 1024 * 1024
"""Nodes up to this much together are written by one request."""

NODE_BATCH_BYTES = 16 * 1024 * 1024
"""Nodes that a `PackSink` holds in memory; one meta pack is written from each batch."""


@dataclass(frozen=True, slots=True)
class WrittenPack:
    """A pack that is durable in the store. Entries are in the order in which they are stored."""

    key: str
    kind: PackKind
    size_bytes: int
    entries: tuple[ExtentInfo, ...]


def _nothing() -> None:
    """There is no buffer to give back."""


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """An extent of a chunk, usually all of it, ready to be written.

    Attributes:
        num_bytes: Plain bytes of the whole chunk.
        digests: Of all leaves of the chunk, joined, also of those that are not in the extent.
        leaves: (first, count) of the leaves in the extent; None for all.
    """

    digest: Digest
    num_bytes: int
    leaf_bytes: int
    digests: bytes
    encoding: int
    payload: Buffer
    leaves: tuple[int, int] | None = None


def pack_key(name: bytes, kind: PackKind) -> str:
    """Where the pack called `name` is stored."""
    return f"{PACK_PREFIX}{name.hex()[:2]}/{name.hex()}.{kind.suffix}"


class _Stream(Protocol):
    """What a pack writer needs of a `StreamWriter`."""

    def write(self, data: Buffer, /) -> object: ...
    def commit(self) -> None: ...
    def abort(self) -> None: ...


class OnePut(BytesIO):
    """A stream that is gathered in memory and put at once: the fewest requests for a small value."""

    def __init__(self, store: Store, key: str) -> None:
        super().__init__()
        self._store = store
        self._key = key

    def commit(self) -> None:
        """Put all of it, durably."""
        self._store.put(self._key, self.getvalue())

    def abort(self) -> None:
        """Forget it."""
        self.close()


class PackWriter:
    """One pack being written. Not thread safe.

    Args:
        stream: Key -> where its bytes go: a store's `open_writer`, or `OnePut` for small packs.
    """

    def __init__(self, stream: Callable[[str], _Stream], kind: PackKind) -> None:
        self._name = secrets.token_bytes(pack.NAME_BYTES)
        self._kind = kind
        self.key = pack_key(self._name, kind)
        self._stream = stream(self.key)
        self._entries: list[ExtentInfo] = []
        header = pack.encode_header(self._name, kind)
        try:
            self._stream.write(header)
        except BaseException:
            self.abort()  # nobody has this writer yet
            raise
        self.size_bytes = len(header)

    @property
    def num_entries(self) -> int:
        """Entries so far."""
        return len(self._entries)

    def add_chunk(self, chunk: EncodedChunk) -> None:
        """Append an extent of a chunk."""
        all_leaves = len(chunk.digests) // DIGEST_BYTES
        first, count = chunk.leaves or (0, all_leaves)
        info = ExtentInfo(
            chunk.digest, ObjectKind.CHUNK, chunk.encoding, chunk.num_bytes, len(chunk.payload), chunk.leaf_bytes,
            first, count, self.size_bytes, pack.entry_header_bytes(all_leaves),
        )  # fmt: skip
        self._append(info, chunk.digests, chunk.payload)

    def add_node(self, node: Node) -> None:
        """Append a node.

        Raises:
            TooLargeError: a node that no reader would take.
        """
        if len(node.data) > pack.MAX_NODE_BYTES:
            raise TooLargeError(
                f"a {node.kind.label} of {len(node.data)} bytes: at most {pack.MAX_NODE_BYTES} are stored in one; put "
                "long values into the state, not into meta="
            )
        info = ExtentInfo(
            node.digest, node.kind, codec.RAW, len(node.data), len(node.data), 0,
            0, 0, self.size_bytes, pack.entry_header_bytes(0),
        )  # fmt: skip
        self._append(info, b"", node.data)

    def _append(self, info: ExtentInfo, digests: bytes, payload: Buffer) -> None:
        self._stream.write(pack.encode_entry_header(info, digests))
        self._stream.write(payload)
        self.size_bytes += info.header_bytes + info.stored_bytes
        self._entries.append(info)

    def finish(self, hints: bytes = b"") -> WrittenPack:
        """The pack, durable: hints, directory and trailer are written, the store has committed.

        Leaves nothing behind when it raises.
        """
        self.size_bytes += len(hints)
        directory = pack.encode_directory(self._entries)
        trailer = pack.encode_trailer(self._name, self._kind, directory, directory_offset=self.size_bytes)
        try:
            if hints:
                self._stream.write(hints)
            self._stream.write(directory)
            self._stream.write(trailer)
            self.size_bytes += len(directory) + len(trailer)
            self._stream.commit()
        except BaseException:
            self.abort()
            raise
        return WrittenPack(self.key, self._kind, self.size_bytes, tuple(self._entries))

    def abort(self) -> None:
        """Leave nothing behind; may be called at any time, more than once."""
        self._stream.abort()


def write_nodes(store: Store, nodes: Sequence[Node], *, hints: bytes = b"") -> WrittenPack:
    """One durable meta pack with `nodes`, and encoded hints (`objects/hints.py`)."""
    num_bytes = len(hints)
    for node in nodes:
        num_bytes += len(node.data)
    writer = PackWriter(partial(OnePut, store) if num_bytes <= ONE_PUT_BYTES else store.open_writer, PackKind.META)
    try:
        for node in nodes:
            writer.add_node(node)
    except BaseException:
        writer.abort()
        raise
    return writer.finish(hints)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Chunks that were handed in together; `release` gives the buffer back that holds them all."""

    chunks: Sequence[EncodedChunk]
    release: Callable[[], None]


class ChunkSink:
    """Takes chunks from many threads and streams them into data packs.

    The first batch waits: if it stays the only one, `finish` writes it without a thread. The
    second starts one writer thread, a full queue starts another. After an error nothing more is
    accepted, and the error is raised by `put` and `finish`.

    Args:
        on_pack: Called, by whoever writes, whenever a pack has become durable.
        num_writers: Packs written side by side, at most.
    """

    def __init__(
        self, store: Store, *, pack_bytes: int, on_pack: Callable[[], None] | None = None,
        num_writers: int = NUM_WRITERS,
    ) -> None:  # fmt: skip
        self._store = store
        self._num_writers = num_writers
        self._pack_bytes = pack_bytes
        self._on_pack = on_pack
        self._queue: queue.Queue[_Batch | None] = queue.Queue(QUEUED_BATCHES)
        self._lock = threading.Lock()
        self._first: _Batch | None = None
        self._taken = False
        self._threads: list[threading.Thread] = []
        self._written: list[WrittenPack] = []
        self._error: BaseException | None = None

    def put(self, *chunks: EncodedChunk, release: Callable[[], None] = _nothing) -> None:
        """Hand `chunks` over, which one writer writes in this order; waits while the queue is full.

        Args:
            release: Called once, as soon as nobody needs the chunks' payloads any more, or has failed.
        """
        if not chunks:
            release()
            return
        batch = _Batch(chunks, release)
        try:
            if self._error is not None:
                raise self._error
            with self._lock:
                if not self._taken:
                    self._taken, self._first = True, batch
                    return
                self._start_writers()
                first, self._first = self._first, None
        except BaseException:
            release()
            raise
        if first is not None:
            self._queue.put(first)
        self._queue.put(batch)

    def _start_writers(self) -> None:
        wanted = self._num_writers if self._queue.full() else 1
        if len(self._threads) < wanted:
            thread = threading.Thread(target=self._loop, name=f"cas-ckpt-pack-{len(self._threads)}", daemon=True)
            start(thread)
            self._threads.append(thread)

    def _loop(self) -> None:
        writer: PackWriter | None = None
        # Also after an error the queue is emptied up to the end mark, so that nobody waits for ever.
        while (batch := self._queue.get()) is not None:
            writer = self._write(writer, batch)
        self._end(writer)

    def _write(self, writer: PackWriter | None, batch: _Batch) -> PackWriter | None:
        """The writer to go on with; None after an error, which `put` and `finish` raise."""
        try:
            try:
                for chunk in batch.chunks:
                    if self._error is not None:
                        break
                    writer = writer or PackWriter(self._store.open_writer, PackKind.DATA)
                    writer.add_chunk(chunk)
                    if writer.size_bytes >= self._pack_bytes or writer.num_entries >= pack.FULL_ENTRIES:
                        self._end(writer)
                        writer = None
            except BaseException:
                if writer is not None:
                    writer.abort()
                raise
        except BaseException as error:  # noqa: BLE001 - raised by put and finish; of `abort` too
            self._error = self._error or error
            writer = None
        finally:
            batch.release()
        return writer

    def _end(self, writer: PackWriter | None) -> None:
        """Make its pack durable; after an error leave nothing of it."""
        if writer is None:
            return
        try:
            if self._error is not None:
                writer.abort()
                return
            self._written.append(writer.finish())
            if self._on_pack is not None:
                self._on_pack()
        except BaseException as error:  # noqa: BLE001 - raised by put and finish
            self._error = self._error or error

    def _join(self) -> None:
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []
        first, self._first = self._first, None
        if first is not None:
            self._end(self._write(None, first))

    def finish(self) -> list[WrittenPack]:
        """Every pack, durable, once all chunks are written.

        Raises:
            Whatever a writer raised first; then no pack that was still open is left.
        """
        self._join()
        if self._error is not None:
            raise self._error
        return self._written

    def abort(self) -> None:
        """Stop the writers and leave no unfinished pack."""
        self._error = self._error or InterruptedError("the commit was given up")
        self._join()


class PackSink:
    """Objects on their way into new packs: chunks through a `ChunkSink`, nodes in batches. Not thread safe."""

    def __init__(self, store: Store, *, pack_bytes: int) -> None:
        self._store = store
        self._chunks = ChunkSink(store, pack_bytes=pack_bytes)
        self._nodes: list[Node] = []
        self._node_bytes = 0
        self._written: list[WrittenPack] = []

    def add_chunk(self, chunk: EncodedChunk) -> None:
        """Add an extent of a chunk."""
        self._chunks.put(chunk)

    def add_node(self, node: Node) -> None:
        """Add a node."""
        self._nodes.append(node)
        self._node_bytes += len(node.data)
        if self._node_bytes >= NODE_BATCH_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._nodes:
            self._written.append(write_nodes(self._store, self._nodes))
            self._nodes, self._node_bytes = [], 0

    def finish(self) -> list[WrittenPack]:
        """Every pack, durable. Raises what `ChunkSink.finish` raises."""
        self._flush()
        return [*self._written, *self._chunks.finish()]

    def abort(self) -> None:
        """Leave no unfinished pack."""
        self._chunks.abort()
