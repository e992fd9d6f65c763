"""What is not in memory is read through the page cache as long as that is fast enough, and past it otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from cas_ckpt import clock
from cas_ckpt.transfer import fetch
from cas_ckpt.transfer.fetch import SLICE_BYTES, TRIED_BYTES, read_not_in_memory

CHUNK_BYTES = 4 << 20
PAST_S = 0.004
"""Seconds that a chunk takes past the page cache."""


@dataclass
class Chunk:
    """As much of a chunk as the choice looks at."""

    num_bytes: int = CHUNK_BYTES
    places: list[Any] = field(default_factory=list)


@dataclass
class Disk:
    """Reads chunks in a time of its own; what was read which way, in turn."""

    through_s: Callable[[int], float]
    now_s: float = 0.0
    past: list[Chunk] = field(default_factory=list)
    through: list[Chunk] = field(default_factory=list)

    def read_past(self, chunks: Sequence[Any]) -> None:
        self.past += chunks
        self.now_s += len(chunks) * PAST_S

    def read_through(self, chunks: Sequence[Any]) -> None:
        for chunk in chunks:
            self.now_s += self.through_s(len(self.through) * CHUNK_BYTES)
            self.through.append(chunk)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Disk]:
    """Read 2 GiB with so much memory left."""

    def work(through_s: Callable[[int], float], *, worth: float = 1.1, available_bytes: int = 1 << 40) -> Disk:
        disk, chunks = Disk(through_s), [Chunk() for _ in range(512)]
        monkeypatch.setattr(clock, "monotonic_s", lambda: disk.now_s)
        monkeypatch.setattr(fetch, "available_bytes", lambda: available_bytes)
        monkeypatch.setattr(fetch, "bytes_to_read", lambda some: sum(each.num_bytes for each in some))
        read_not_in_memory(chunks, disk.read_past, disk.read_through, worth=worth)  # type: ignore[arg-type]
        assert sorted(map(id, disk.past + disk.through)) == sorted(map(id, chunks)), "each once"
        return disk

    return work


def bytes_of(chunks: Sequence[Chunk]) -> int:
    return sum(chunk.num_bytes for chunk in chunks)


def test_a_disk_that_is_as_fast_either_way_fills_the_page_cache(read: Callable[..., Disk]) -> None:
    assert bytes_of(read(lambda _: PAST_S).past) <= 2 * (TRIED_BYTES + CHUNK_BYTES)


@pytest.mark.parametrize("times", [1.4, 2.0, 3.0])
def test_what_is_slow_through_the_page_cache_is_read_past_it_after_one_look(
    read: Callable[..., Disk], times: float
) -> None:
    assert bytes_of(read(lambda _: times * PAST_S).through) <= SLICE_BYTES + CHUNK_BYTES


@pytest.mark.parametrize(("worth", "times"), [(1.1, 1.2), (1.1, 1.25), (1.1, 1.4), (1.9, 2.5), (1.9, 4.0), (1.9, 8.0)])
def test_what_is_lost_to_a_slow_page_cache_is_a_slice_more_than_two_slices_may_lose(
    read: Callable[..., Disk], worth: float, times: float
) -> None:
    disk = read(lambda _: times * PAST_S, worth=worth)
    assert disk.past
    lost = len(disk.through) * (times - worth)
    assert lost <= (2 * (worth - 1) + times - worth) * (SLICE_BYTES / CHUNK_BYTES + 1)


def test_one_slow_moment_of_a_disk_does_not_cost_a_second_read(read: Callable[..., Disk]) -> None:
    disk = read(lambda done: PAST_S * (3.5 if done < SLICE_BYTES else 1.2), worth=1.9)
    assert bytes_of(disk.past) <= 2 * (TRIED_BYTES + CHUNK_BYTES)


def test_where_memory_gets_slow_on_the_way_the_rest_is_read_past_the_page_cache(read: Callable[..., Disk]) -> None:
    disk = read(lambda done: PAST_S * (0.8 if done < 1 << 30 else 3))
    assert 1 << 30 <= bytes_of(disk.through) <= (1 << 30) + 2 * SLICE_BYTES


def test_where_reads_past_the_page_cache_are_made_twice_it_may_be_slower(read: Callable[..., Disk]) -> None:
    assert bytes_of(read(lambda _: 1.8 * PAST_S, worth=1.9).past) <= 2 * (TRIED_BYTES + CHUNK_BYTES)


def test_with_little_memory_left_nothing_is_read_through_the_page_cache(read: Callable[..., Disk]) -> None:
    assert not read(lambda _: PAST_S / 9, available_bytes=1 << 30).through
