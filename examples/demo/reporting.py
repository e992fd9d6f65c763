"""What a training process tells the story about itself: one JSON object per line of its output."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

import torch

from cas_ckpt import Repository


def tell(event: str, **fields: Any) -> None:
    """Write one line, at once."""
    print(json.dumps({"event": event, **fields}), flush=True)


def events(stream: IO[str]) -> Iterator[dict[str, Any]]:
    """The lines that `tell` wrote in another process, as they come."""
    for line in stream:
        yield json.loads(line)


def commit_and_tell(repo: Repository, state: Mapping[str, Any], *, losses: Sequence[float], **options: Any) -> None:
    """Commit the state; tell what it cost, and what torch.save would have used for it.

    Args:
        losses: Of the steps since the last commit; their mean becomes a metric.
        options: More arguments of `Repository.commit`.
    """
    loss = round(sum(losses) / len(losses), 4)
    commit = repo.commit(state, metrics={"loss": loss}, **options)
    tell(
        "commit",
        id=commit.id,
        root=commit.root,
        step=commit.step,
        loss=loss,
        total_bytes=commit.stats.total_bytes,
        stored_bytes=commit.stats.stored_bytes,
        torch_save_bytes=torch_save_bytes(state),
    )


class _Counter:
    """A file that counts what is written to it and keeps nothing."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def write(self, data: Any) -> int:
        self.num_bytes += memoryview(data).nbytes
        return memoryview(data).nbytes

    def flush(self) -> None:
        """Nothing is held back."""


def torch_save_bytes(state: Mapping[str, Any]) -> int:
    """Bytes that torch.save writes for the state, found by doing it."""
    counter = _Counter()
    torch.save({name: part.state_dict() for name, part in state.items()}, counter)  # type: ignore[arg-type]
    return counter.num_bytes


class WaitHalfWay:
    """Progress of a commit that stops when half of the bytes are hashed, and tells so.

    Whoever reads that line can kill the process and know that it was inside the commit.
    """

    def __init__(self, step: int, *, wait: Callable[[], object] | None = None) -> None:
        self._step = step
        self._wait = wait or threading.Event().wait
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._total_bytes = 0

    def start(self, phase: str, total_bytes: int | None) -> None:
        """The commit begins to hash."""
        self._total_bytes = total_bytes or 0

    def advance(self, num_bytes: int) -> None:
        """Called by the hashing threads; does not return any more after half of the bytes."""
        with self._lock:
            self._done_bytes += num_bytes
            if self._done_bytes * 2 >= self._total_bytes:
                tell("committing", step=self._step, done_bytes=self._done_bytes, total_bytes=self._total_bytes)
                self._wait()

    def finish(self) -> None:
        """Never reached."""
