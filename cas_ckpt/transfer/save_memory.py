"""How a save divides its budget of memory: threads that hash, buffers on their way to the packs, packs being written.

What a save takes, at most, besides the state:

    what it knows of the state   `ENTRY_BYTES` for each tensor and value, `CELL_BYTES` for each cell
    the database, and threads    `FIXED_BYTES`
    each pack being written      what the store says (`Abilities.writer_bytes`), and `in_flight_bytes` of the store once
    each hashing thread          scratch for a cell, or two copies of it while it is encoded; what its source reads at
                                 a time, unless that is memory of the state
    each buffer                  a cell, and what it became when it was encoded

Invariant: pure; what comes out takes no more than the budget, unless that is less than `least_bytes`, which works.
"""

from __future__ import annotations

from dataclasses import dataclass

from cas_ckpt.objects.codec import EncodingPolicy
from cas_ckpt.storage.store import Abilities
from cas_ckpt.transfer.pack_writer import NUM_WRITERS, QUEUED_BATCHES

BATCH_BYTES = 4 * 1024 * 1024
"""Cells that are taken, asked about and written together: one large one, or many small ones."""

SPARE_BUFFERS = QUEUED_BATCHES + NUM_WRITERS + 1
"""Buffers beyond one for each hashing thread: those that wait in the sink, and are being written."""

LEAST_BUFFERS = 2
"""One may wait in the sink for another."""

FIXED_BYTES = 20 * 1024 * 1024
ENTRY_BYTES = 2_400
CELL_BYTES = 700
"""Measured (docs/benchmarks/memory.md): of a commit of 100,000 small tensors, and of one of many cells."""

_ENCODED_SHARE = {EncodingPolicy.RAW: 0.0, EncodingPolicy.AUTO: 0.5, EncodingPolicy.ZSTD: 1.0, EncodingPolicy.PLANES: 1}
"""How long what is stored may be, of a cell: what AUTO does not halve stays as it is."""


@dataclass(frozen=True, slots=True)
class SaveMemory:
    """What a save may have at one time."""

    num_threads: int
    num_buffers: int
    num_writers: int


def divide(
    memory_bytes: int, *, num_threads: int, num_entries: int, num_bytes: int, policy: EncodingPolicy,
    abilities: Abilities, read_bytes: int = 0,
) -> SaveMemory:  # fmt: skip
    """The most threads, buffers and writers that fit; one thread, two buffers and one writer if nothing does.

    Args:
        num_threads: Wanted.
        num_entries, num_bytes: Of the state.
        read_bytes: What a source holds, for each thread that reads it.
    """
    buffer_bytes, thread_bytes = _each(policy, read_bytes)
    held = held_bytes(num_entries=num_entries, num_bytes=num_bytes, abilities=abilities, num_writers=0)
    left = memory_bytes - held
    wanted = NUM_WRITERS * abilities.writer_bytes + (LEAST_BUFFERS + 2) * buffer_bytes + 2 * thread_bytes
    num_writers = NUM_WRITERS if left >= wanted else 1
    left -= num_writers * abilities.writer_bytes + LEAST_BUFFERS * buffer_bytes
    threads = max(1, min(num_threads, left // (thread_bytes + buffer_bytes)))
    spare = (left - threads * thread_bytes) // buffer_bytes
    return SaveMemory(threads, LEAST_BUFFERS + max(0, min(spare, threads + SPARE_BUFFERS - LEAST_BUFFERS)), num_writers)


def least_bytes(
    *, num_entries: int, num_bytes: int, policy: EncodingPolicy, abilities: Abilities, read_bytes: int = 0
) -> int:
    """What a save takes at least. Arguments as for `divide`."""
    buffer_bytes, thread_bytes = _each(policy, read_bytes)
    held = held_bytes(num_entries=num_entries, num_bytes=num_bytes, abilities=abilities, num_writers=1)
    return held + LEAST_BUFFERS * buffer_bytes + thread_bytes


def held_bytes(*, num_entries: int, num_bytes: int, abilities: Abilities, num_writers: int = NUM_WRITERS) -> int:
    """What a save holds throughout, however many cells are under way. Arguments as for `divide`."""
    known = num_entries * ENTRY_BYTES + num_bytes // BATCH_BYTES * CELL_BYTES
    return FIXED_BYTES + known + abilities.in_flight_bytes + num_writers * abilities.writer_bytes


def _each(policy: EncodingPolicy, read_bytes: int) -> tuple[int, int]:
    """Bytes of a buffer with what came of it, and of what a thread has besides."""
    scratch_bytes = BATCH_BYTES * (1 if policy is EncodingPolicy.RAW else 2)
    return int(BATCH_BYTES * (1 + _ENCODED_SHARE[policy])), scratch_bytes + read_bytes
