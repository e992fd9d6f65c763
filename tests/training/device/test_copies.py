"""What is asked of CUDA around copies, with a CUDA that only takes notes; real ones: tests/gpu/."""

from __future__ import annotations

import gc
import logging
import threading
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from cas_ckpt import InvalidInputError
from cas_ckpt.training.capture.tensors import wait_for_devices
from cas_ckpt.training.device import copies
from cas_ckpt.training.device.copies import on_own_stream, pin, unpin
from cas_ckpt.transfer.staging import Arena, StagingPool

CUDA = torch.device("cuda", 0)


class Notes:
    """Stands for torch.cuda: notes what was asked, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, error: int = 0, capturing: bool = False) -> None:
        self.asked: list[str] = []
        self.error = error
        self.num_streams = 0
        names = {
            "Stream": self.make_stream, "stream": self.entered, "device": self.entered, "cudart": lambda: self,
            "is_available": lambda: True, "is_initialized": lambda: True, "synchronize": self.synchronize,
            "is_current_stream_capturing": lambda: capturing,
        }  # fmt: skip
        for name, stand_in in names.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(copies, "_streams", copies._Streams())

    def make_stream(self, device: torch.device) -> Notes:
        self.num_streams += 1
        return self

    @contextmanager
    def entered(self, what: Any) -> Any:
        yield

    def synchronize(self, *_: Any) -> None:
        self.asked.append("wait")

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        self.asked.append(f"pin {num_bytes >> 20}")
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.asked.append("unpin")
        return 0


def test_a_copy_is_over_at_its_end_even_if_it_failed_and_each_thread_has_one_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes = Notes(monkeypatch)
    with on_own_stream(CUDA):
        notes.asked.append("copy")
    with pytest.raises(KeyError), on_own_stream(CUDA):
        raise KeyError
    assert notes.asked == ["copy", "wait", "wait"] and notes.num_streams == 1

    def in_another_thread() -> None:
        with on_own_stream(CUDA):
            pass

    thread = threading.Thread(target=in_another_thread)
    thread.start()
    thread.join()
    assert notes.num_streams == 2


def test_arenas_are_pinned_before_they_are_used_and_let_go_before_they_move(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = Notes(monkeypatch)
    pool = StagingPool(prepare=pin, dismiss=unpin)
    first = pool.take(1 << 20, budget_bytes=1 << 30)
    assert first is not None and notes.asked == ["pin 2"]
    pool.give(first)
    second = pool.take(3 << 20, budget_bytes=1 << 30)  # grown
    assert second is not None and notes.asked == ["pin 2", "unpin", "pin 4"]
    pool.give(second)
    pool.close()
    assert notes.asked[3:] == ["unpin"]


def test_memory_that_cannot_be_pinned_is_used_all_the_same_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    notes = Notes(monkeypatch, error=2)
    with caplog.at_level(logging.WARNING, "cas_ckpt"):
        arena = Arena(1 << 20)
        pin(arena)
        unpin(arena)
        arena.close()
    assert notes.asked == ["pin 2"]
    assert "could not be pinned (CUDA error 2)" in caplog.text


def test_an_arena_that_nobody_closes_is_let_go_before_its_memory_is_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = Notes(monkeypatch)
    arena = Arena(1 << 20)
    pin(arena)
    del arena
    gc.collect()
    assert notes.asked == ["pin 2", "unpin"]


def test_inside_of_a_capture_of_a_graph_nothing_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = Notes(monkeypatch)
    wait_for_devices([CUDA])
    assert notes.asked == ["wait"]
    Notes(monkeypatch, capturing=True)
    with pytest.raises(InvalidInputError, match="before or after the capture"):
        wait_for_devices([CUDA])
