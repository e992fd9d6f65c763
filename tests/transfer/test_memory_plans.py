"""How a budget of memory is divided: what comes out takes no more than it, and never too little to go on."""

from __future__ import annotations

from typing import Any, get_args

from hypothesis import given
from hypothesis import strategies as st

from cas_ckpt.memory import DEFAULT_BYTES, LEAST_DEFAULT_BYTES
from cas_ckpt.objects.codec import EncodingPolicy
from cas_ckpt.objects.digest import LEAF_BYTES
from cas_ckpt.storage.store import Abilities
from cas_ckpt.transfer import fetch
from cas_ckpt.transfer.chunk_reader import StoredChunk
from cas_ckpt.transfer.save import SaveMemory, divide, held_bytes, least_bytes, thread_bytes

LOCAL = Abilities(durable=True, local=True, writer_bytes=8 << 20)
FAR = Abilities(durable=True, local=False, parallel=16, writer_bytes=8 << 20, in_flight_bytes=128 << 20)


def taken(room: SaveMemory, state: dict[str, Any]) -> int:
    """What a save takes that has so much room."""
    each = thread_bytes(state["policy"], state["read_bytes"])
    sizes = {name: value for name, value in state.items() if name not in ("policy", "read_bytes")}
    held = held_bytes(**sizes, num_writers=room.num_writers)
    return held + room.num_threads * each


@given(
    memory_bytes=st.integers(1, 1 << 33), num_threads=st.integers(1, 64), num_entries=st.integers(0, 1 << 20),
    num_bytes=st.integers(0, 1 << 42), policy=st.sampled_from(get_args(EncodingPolicy)),
    abilities=st.sampled_from([LOCAL, FAR]), read_bytes=st.integers(0, 1 << 25),
)  # fmt: skip
def test_a_save_takes_no_more_than_its_budget_or_the_least(memory_bytes: int, num_threads: int, **state: Any) -> None:
    room = divide(memory_bytes, num_threads=num_threads, **state)
    assert 1 <= room.num_threads <= num_threads
    assert 1 <= room.num_writers <= room.num_threads
    assert taken(room, state) <= max(memory_bytes, least_bytes(**state))


def test_by_default_each_thread_has_a_pack() -> None:
    state: dict[str, Any] = {"num_entries": 300, "num_bytes": 1 << 34, "policy": "auto"}
    assert divide(DEFAULT_BYTES, num_threads=4, abilities=LOCAL, **state) == SaveMemory(4, 4)
    state["policy"] = "raw"
    assert divide(DEFAULT_BYTES, num_threads=16, abilities=LOCAL, **state) == SaveMemory(16, 16)
    assert least_bytes(abilities=LOCAL, **state) < LEAST_DEFAULT_BYTES


def test_a_restore_has_the_threads_and_rounds_that_fit() -> None:
    chunks = [StoredChunk("w", None, 4 << 20) for _ in range(10)]  # type: ignore[arg-type]
    assert fetch.threads_within(DEFAULT_BYTES, chunks, 16) == 16
    assert fetch.threads_within(40 << 20, chunks, 16) == 2
    assert fetch.threads_within(1, chunks, 16) == 1
    assert fetch.round_bytes(1 << 40, 10, most=64 << 20) == 64 << 20
    assert 8 * fetch.round_bytes(100 << 20, 10, most=64 << 20) < 80 << 20
    assert fetch.round_bytes(1, 10, most=64 << 20) == LEAF_BYTES
