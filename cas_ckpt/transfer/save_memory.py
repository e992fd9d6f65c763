"""How a save divides its budget of memory: threads that hash and write, packs being written.

What a save takes, at most, besides the state:

    what it knows of the state   `ENTRY_BYTES` for each tensor and value, `CELL_BYTES` for each cell
    the database, and threads    `FIXED_BYTES`
    each pack being written      what the store says (`Abilities.writer_bytes`), and `in_flight_bytes` of the store once
    each thread                  scratch for a cell, or two copies of it while it is encoded; what its source reads at
                                 a time, unless that is memory of the state; a buffer: cells that are copied, and what
                                 they became when they were encoded

Invariant: pure; what comes out takes no more than the budget, unless that is less than `least_bytes`, which works.
"""

from __future__ import annotations

from dataclasses import dataclass

from cas_ckpt.objects.codec import EncodingPolicy
from cas_ckpt.storage.store import Abilities
from cas_ckpt.transfer.pack_writer import NUM_WRITERS

BATCH_BYTES = 4 * 1024 * 1024
"""Cells that are taken, asked about and written together: one large one, or many small ones."""

FIXED_BYTES = 20 * 1024 * 1024
ENTRY_BYTES = 2_400
CELL_BYTES = 700
"""Measured (docs/benchmarks/memory.md): of a commit of 100,000 small tensors, and of one of many cells."""

_ENCODED_SHARE = {"raw": 0.0, "auto": 0.5}
"""How long what is stored may be, of a cell: what AUTO does not halve stays as it is."""


@dataclass(frozen=True, slots=True)
class SaveMemory:
    """The memory budget of a save."""

    num_threads: int
    num_writers: int


def divide(
    budget_bytes: int, *, num_threads: int, num_entries: int, num_bytes: int, policy: EncodingPolicy,
    abilities: Abilities, read_bytes: int = 0,
) -> SaveMemory:  # fmt: skip
    """The most threads that fit, and then a pack for each of them, or as many as fit; one of each if nothing does.

    Args:
        num_threads: Wanted.
        num_entries, num_bytes: Of the state.
        read_bytes: What a source holds, for each thread that reads it.
    """
    each = thread_bytes(policy, read_bytes)
    held = held_bytes(num_entries=num_entries, num_bytes=num_bytes, abilities=abilities, num_writers=1)
    threads = max(1, min(num_threads, (budget_bytes - held) // each))
    spare = max(0, budget_bytes - held - threads * each)
    return SaveMemory(threads, min(threads, 1 + spare // max(1, abilities.writer_bytes)))


def least_bytes(
    *, num_entries: int, num_bytes: int, policy: EncodingPolicy, abilities: Abilities, read_bytes: int = 0
) -> int:
    """Least memory of a save. Arguments as for `divide`."""
    held = held_bytes(num_entries=num_entries, num_bytes=num_bytes, abilities=abilities, num_writers=1)
    return held + thread_bytes(policy, read_bytes)


def held_bytes(*, num_entries: int, num_bytes: int, abilities: Abilities, num_writers: int = NUM_WRITERS) -> int:
    """Memory that a save holds throughout, independent of cells in progress. Arguments as for `divide`."""
    known = num_entries * ENTRY_BYTES + num_bytes // BATCH_BYTES * CELL_BYTES
    return FIXED_BYTES + known + abilities.in_flight_bytes + num_writers * abilities.writer_bytes


def thread_bytes(policy: EncodingPolicy, read_bytes: int) -> int:
    """Memory of each thread: scratch, a buffer, and what came of it."""
    scratch_bytes = BATCH_BYTES * (1 if policy == "raw" else 2)
    return scratch_bytes + int(BATCH_BYTES * (1 + _ENCODED_SHARE.get(policy, 1.0))) + read_bytes
