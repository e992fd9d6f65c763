"""Writes packs: one pack at a time, or chunks handed in by many threads.

Invariant: a pack is under its key whole and durable, or not at all; what `finish` returns
names every entry that was handed in. Knows nothing of tensors or of SQL.
"""

from __future__ import annotations

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
from cas_ckpt.parallel.workers import run_all
from cas_ckpt.storage.store import Store

NUM_WRITERS = 2
"""Packs written side by side, by those who do not say how many there may be."""

BYTES_BEFORE_ANOTHER = 32 * 1024 * 1024
"""So much is written for each pack that is open before another is begun: a small commit leaves no many small packs."""

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
    """The methods of a `StreamWriter` that a pack writer needs."""

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

    Attributes:
        entries: Those so far, in the order in which they are stored.
        size_bytes: Bytes so far.
    """

    def __init__(self, stream: Callable[[str], _Stream], kind: PackKind) -> None:
        self._name = secrets.token_bytes(pack.NAME_BYTES)
        self._kind = kind
        self.key = pack_key(self._name, kind)
        self._stream = stream(self.key)
        self.entries: list[ExtentInfo] = []
        header = pack.encode_header(self._name, kind)
        try:
            self._stream.write(header)
        except BaseException:
            self.abort()  # nobody has this writer yet
            raise
        self.size_bytes = len(header)

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
        self.entries.append(info)

    def finish(self, hints: bytes = b"") -> WrittenPack:
        """The pack, durable: hints, directory and trailer are written, the store has committed.

        Leaves nothing behind when it raises.
        """
        self.size_bytes += len(hints)
        directory = pack.encode_directory(self.entries)
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
        return WrittenPack(self.key, self._kind, self.size_bytes, tuple(self.entries))

    def abort(self) -> None:
        """Leave nothing behind; may be called at any time, more than once."""
        self._stream.abort()


def write_nodes(store: Store, nodes: Sequence[Node], *, hints: bytes = b"") -> WrittenPack:
    """One durable meta pack with `nodes`, and encoded hints (`encode_hints`)."""
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


class ChunkSink:
    """Takes chunks from many threads; each writes what it hands in, into a data pack that is lent to it meanwhile.

    So no thread waits for another to write (docs/decisions/020). A pack that nobody has is gone on with before another
    is begun. After an error nothing more is accepted, packs that are open leave nothing behind, and the error is raised
    by `put` and `finish`.

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
        self._changed = threading.Condition()
        self._lent: dict[int, PackWriter | None] = {}  # thread -> the pack that it has, or is to begin
        self._waiting: list[PackWriter] = []
        self._num_bytes = 0
        self._written: list[WrittenPack] = []
        self._error: BaseException | None = None

    def put(self, *chunks: EncodedChunk) -> None:
        """Write `chunks`, in this order, into one pack; nobody looks at their payloads any more when this returns."""
        if not chunks:
            return
        writer: PackWriter | None = None
        try:
            writer = self._lend() or PackWriter(self._store.open_writer, PackKind.DATA)
            for chunk in chunks:
                writer.add_chunk(chunk)
            if self._error is not None:
                raise self._error
            full = writer.size_bytes >= self._pack_bytes or len(writer.entries) >= pack.FULL_ENTRIES
            if full:
                self._end(writer)
        except BaseException as error:
            writer = self._give_back(None, error=error) or writer  # a signal may have come before it was ours
            if writer is not None:
                writer.abort()
            raise
        self._give_back(None if full else writer, num_bytes=sum(len(chunk.payload) for chunk in chunks))

    def _lend(self) -> PackWriter | None:
        """A pack for this thread alone; None: it is to begin one."""
        with self._changed:
            while self._error is None:
                if self._waiting:
                    self._lent[threading.get_ident()] = self._waiting[-1]
                    return self._waiting.pop()
                num_lent = len(self._lent)
                if num_lent < self._num_writers and self._num_bytes >= num_lent * BYTES_BEFORE_ANOTHER:
                    return self._lent.setdefault(threading.get_ident())
                self._changed.wait()
            raise self._error

    def _give_back(
        self, writer: PackWriter | None, *, num_bytes: int = 0, error: BaseException | None = None
    ) -> PackWriter | None:  # fmt: skip
        """Let others go on with `writer`; the pack that was lent to this thread."""
        with self._changed:
            lent = self._lent.pop(threading.get_ident(), None)
            self._num_bytes += num_bytes
            self._error = self._error or error
            if writer is not None:
                self._waiting.append(writer)
            self._changed.notify_all()
        return lent

    def _end(self, writer: PackWriter) -> None:
        self._written.append(writer.finish())
        if self._on_pack is not None:
            self._on_pack()

    def finish(self) -> list[WrittenPack]:
        """Every pack, durable; nobody puts any more.

        Raises:
            Whatever went wrong first; then no pack that was still open is left.
        """
        try:
            if self._error is not None:
                raise self._error
            run_all(self._waiting, lambda: self._end, num_threads=len(self._waiting))
        except BaseException as error:
            self._error = self._error or error
            self.abort()
            raise
        self._waiting = []
        return self._written

    def abort(self) -> None:
        """Accept nothing more, and leave no unfinished pack."""
        self._error = self._error or InterruptedError("the commit was given up")
        with self._changed:
            waiting, self._waiting = self._waiting, []
        for writer in waiting:
            writer.abort()


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
