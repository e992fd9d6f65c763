"""How a restore divides its budget of memory: threads that read and verify, and messages between ranks.

What a restore takes, at most, besides the targets:

    what it knows of the state   `ENTRY_BYTES` for each tensor, `CHUNK_BYTES` for each chunk
    the database, and threads    `FIXED_BYTES`
    each thread                  of an encoded chunk: the payload, what it is decoded to, a plane, and where it waits
    over a network               spans that are read at one time: half of the rest (sources.py)
    among ranks                  a round of messages that go out and one that comes in, and copies of both on their way

Invariant: pure; what comes out takes no more than the budget, unless that is less than `least_bytes`, which works.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cas_ckpt.objects import codec
from cas_ckpt.objects.digest import LEAF_BYTES
from cas_ckpt.transfer.filling import StoredChunk

FIXED_BYTES = 20 * 1024 * 1024
ENTRY_BYTES = 1_000
CHUNK_BYTES = 700
"""Measured (docs/benchmarks/memory.md): of a checkout of 100,000 small tensors, of a chunk each."""

ENCODED_COPIES, PLAIN_COPIES = 4, 2
LONGEST_BYTES = 4 * 1024 * 1024
"""Chunks are cut to about this (objects/spec.py)."""

ROUND_COPIES = 4


def threads_within(memory_bytes: int, chunks: Sequence[StoredChunk], num_threads: int) -> int:
    """So many threads, or as many of them as fit, with these chunks; one always."""
    left = memory_bytes - FIXED_BYTES - len(chunks) * (ENTRY_BYTES + CHUNK_BYTES)
    return max(1, min(num_threads, left // max(_thread_bytes(chunks), 1)))


def round_bytes(memory_bytes: int, num_chunks: int, *, most: int) -> int:
    """What a rank sends, and gets, in one round: `most`, or what fits."""
    left = memory_bytes - FIXED_BYTES - num_chunks * (ENTRY_BYTES + CHUNK_BYTES)
    return max(LEAF_BYTES, min(most, left // (2 * ROUND_COPIES)))


def least_bytes(num_entries: int, num_chunks: int) -> int:
    """What a restore takes at least."""
    return FIXED_BYTES + num_entries * ENTRY_BYTES + num_chunks * CHUNK_BYTES + 2 * ENCODED_COPIES * LONGEST_BYTES


def _thread_bytes(chunks: Iterable[StoredChunk]) -> int:
    longest = 0
    for chunk in chunks:
        is_plain = all(place.encoding == codec.RAW for place in chunk.places)
        longest = max(longest, chunk.num_bytes * (PLAIN_COPIES if is_plain else ENCODED_COPIES))
    return longest
