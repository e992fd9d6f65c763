"""No thread goes on after `run_all` has raised, whatever hit it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from cas_ckpt.parallel import workers
from cas_ckpt.parallel.workers import run_all


class Interrupted(BaseException):
    """Stands for Ctrl-C."""


def test_threads_that_run_already_stop_when_another_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []
    gate = threading.Event()

    class Refusing(threading.Thread):
        def start(self) -> None:
            if started:
                raise Interrupted
            started.append(self)
            super().start()

    def endless() -> Iterator[int]:
        yield 0
        while True:
            gate.wait(0.001)
            yield 1

    def make_worker() -> Callable[[int], None]:
        return lambda item: None

    monkeypatch.setattr(workers.threading, "Thread", Refusing)  # type: ignore[attr-defined]
    with pytest.raises(Interrupted):
        run_all(endless(), make_worker, num_threads=3)
    gate.set()
    assert not started[0].is_alive()
