"""Ranks that share a page cache tell one another where verified bytes stand, instead of sending them.

A reader has just verified a chunk; it is still in the page cache. A neighbour that wants a large
part of it takes it from there itself: one copy instead of four (into the socket, out of it, and at
both ends). Which of the stored copies was verified is what the pointer tells. Whatever left the cache
meanwhile is read and verified again, as in any second pass.

Invariant: whether a box is pointed at or sent follows from what every rank knows, so both ends agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cas_ckpt.errors import InternalError
from cas_ckpt.objects import codec
from cas_ckpt.objects.canonical import pack_rows, unpack_canonical
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.spec import Box
from cas_ckpt.storage.shared_cache import NO_TOKEN, TOKEN_BYTES, cache_token
from cas_ckpt.storage.store import Store
from cas_ckpt.transfer.chunk_reader import VerifiedExtent
from cas_ckpt.transfer.fetch import StoredChunk
from cas_ckpt.transfer.peers import Peers

WORTH_READING = 4
"""A neighbour reads the whole chunk from the cache if it wants at least one part in this many."""

_PROBE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class PointedPlace:
    """Where an extent stands that another rank has verified."""

    pack: str
    offset: int
    header_bytes: int
    stored_bytes: int
    first_leaf: int
    num_leaves: int
    leaf_bytes: int

    def overlaps(self, start: int, stop: int) -> bool:
        """Whether it holds any of the chunk's plain bytes from `start` to `stop`."""
        first, last = self.first_leaf, self.first_leaf + self.num_leaves
        return first * self.leaf_bytes < stop and start < last * self.leaf_bytes


@dataclass(frozen=True, slots=True)
class Pointer:
    """A verified chunk."""

    digest: Digest
    num_bytes: int
    places: tuple[PointedPlace, ...]


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """What all ranks told one another before the first target is touched.

    Attributes:
        quotas: By rank, see rounds.py.
        tokens: By rank, whose page cache it reads through; `NO_TOKEN` if it has none that holds its chunks.
    """

    quotas: tuple[int, ...]
    tokens: tuple[bytes, ...]

    @property
    def is_empty(self) -> bool:
        """Whether no two ranks share a cache."""
        shared = [token for token in self.tokens if token != NO_TOKEN]
        return len(set(shared)) == len(shared)

    def points(self, reader: int, receiver: int, *, cell: Box, box: Box) -> bool:
        """Whether `reader` tells `receiver` where the cell stands, instead of sending the box."""
        token = self.tokens[reader]
        if token == NO_TOKEN or token != self.tokens[receiver]:
            return False
        return box.num_elements * WORTH_READING >= cell.num_elements


def meet_neighbours(peers: Peers, store: Store, chunks: Sequence[StoredChunk], *, quota: int) -> Neighbourhood:
    """Tell the own quota and token, and hear the others'; collective.

    Args:
        chunks: Those that this rank verified; unless they are still in memory, nobody is pointed at them.
    """
    token = cache_token(store)
    if token != NO_TOKEN and not _in_memory(store, chunks):
        token = NO_TOKEN
    told = peers.gather_all(quota.to_bytes(8, "little") + token)
    quotas = tuple(int.from_bytes(each[:8], "little") for each in told)
    return Neighbourhood(quotas, tuple(each[8 : 8 + TOKEN_BYTES] for each in told))


def _in_memory(store: Store, chunks: Sequence[StoredChunk]) -> bool:
    """Whether the first and the last chunk are still cached: the first is what is evicted first."""
    ends = [chunk.extents[0] for chunk in [*chunks[:1], *chunks[-1:]]]
    return all(_is_cached(store, extent) for extent in ends)


def _is_cached(store: Store, extent: VerifiedExtent) -> bool:
    if extent.info.encoding != codec.RAW:
        return True
    probe = memoryview(bytearray(min(_PROBE_BYTES, extent.info.stored_bytes)))
    return store.read_into(extent.pack, extent.payload_offset, probe, cached_only=True)


def pack_pointers(chunks: Sequence[StoredChunk]) -> bytes:
    """Where these chunks stand, each as it was verified."""
    return pack_rows([[chunk.digest, chunk.num_bytes, [_row(extent) for extent in chunk.extents]] for chunk in chunks])


def _row(extent: VerifiedExtent) -> list[Any]:
    info = extent.info
    place = [extent.pack, info.offset, info.header_bytes, info.stored_bytes]
    return [*place, info.first_leaf, info.num_leaves, info.leaf_bytes]


def unpack_pointers(data: bytes, *, wanted: int, reader: int) -> list[Pointer]:
    """The pointers that rank `reader` sent, as many as the plan says.

    Raises:
        InternalError: more or fewer. CorruptionError: malformed.
    """
    rows = unpack_canonical(data) if data else []
    if len(rows) != wanted:
        raise InternalError(f"rank {reader} points at {len(rows)} chunks where the plan has {wanted}")
    return [
        Pointer(Digest(digest), num_bytes, tuple(PointedPlace(*place) for place in places))
        for digest, num_bytes, places in rows
    ]
