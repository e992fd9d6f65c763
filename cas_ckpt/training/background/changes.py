"""Changes of tensors that no hook sees, found by torch's version counters and by samples of their elements.

    1. `Watch.add` notes, at the call, the counters of a tensor, the size of its memory, and a few of its elements.
    2. Whoever copies the tensor asks it afterwards: `Watched.check`.
    3. `Watch.look` asks again; `Watch.settle` asks all of them for the last time.

What a counter does not count: writes through `.data`, through NumPy and through the storage, foreach operations on
DTensors, fused operations called without their optimizer. Of these the samples find most that change whole tensors.

A counter moves when an operation has ended, in the thread that made it. So a copy that ends while another thread is
inside of an operation needs a second look, after that thread has come out of it: a commit looks again when that thread
steps or waits for the commit, at the latest before it publishes.

Invariant: a tensor that passes was not changed by an operation that torch counts and that ended before the look.
Must not know how tensors are copied.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch

from cas_ckpt.errors import StateChangedError
from cas_ckpt.training.capture.tensors import Array, host_bits

NUM_SAMPLES = 4
"""Elements of a tensor that are kept, at least: of a tensor that changed everywhere, one would do."""


@dataclass(slots=True)  # not frozen: that would take longer to make, and thousands are made at a call
class _Sample:
    """Some elements of a tensor on the host: the memory that they are in, and their bytes at the call."""

    places: Array
    elements: bytes

    @classmethod
    def of(cls, tensor: torch.Tensor, share: float) -> _Sample:
        """Elements at equal distances; the first one is after this share of such a distance."""
        step = max(1, tensor.numel() // NUM_SAMPLES)
        places = host_bits(tensor).reshape(-1)[int(share * step) :: step]
        return cls(places, places.tobytes())

    def is_unchanged(self) -> bool:
        return self.places.tobytes() == self.elements


@dataclass(slots=True)
class Watched:
    """A tensor as it was at the call.

    Attributes:
        key: What messages call it.
        counted: Those whose counters count its changes, and what they said.
        memory: The storages that hold its elements, and their sizes; kept, whatever becomes of the live tensors.
        samples: Of the tensors on the host that lie in one piece.
    """

    key: str
    counted: tuple[tuple[torch.Tensor, int], ...]
    memory: tuple[tuple[torch.UntypedStorage, int], ...]
    samples: tuple[_Sample, ...]

    def check_counters(self) -> None:
        """Return if nothing that torch counts has changed it.

        Raises:
            StateChangedError: names it.
        """
        if any(storage.nbytes() != num_bytes for storage, num_bytes in self.memory):
            raise _changed(self.key, "its memory was freed or resized")
        if any(tensor._version != version for tensor, version in self.counted):
            raise _changed(self.key, "it was changed in place")

    def check(self) -> None:
        """Return if the counters and the samples are those of the call.

        Raises:
            StateChangedError: names it.
        """
        self.check_counters()
        if not all(sample.is_unchanged() for sample in self.samples):
            raise _changed(self.key, "it was changed in a way that torch does not count (.data, NumPy, the storage)")


def _changed(key: str, how: str) -> StateChangedError:
    return StateChangedError(
        f"{key}: {how} after commit_async(snapshot='lazy') had returned and before it was staged, and not by the step "
        "of an optimizer of torch, which waits: call wait_staged() of the pending commit before you change the state, "
        "or use snapshot='copy'; nothing was published"
    )


class Watch:
    """The tensors of one commit that are read after its call has returned. Threads may share it."""

    def __init__(self) -> None:
        self._tensors: list[Watched] = []
        self._share = Random().random()  # a generator of its own: a commit must not move anybody's random state
        self._lock = threading.Lock()
        self._is_settled = False
        self._error: StateChangedError | None = None

    def __iter__(self) -> Iterator[Watched]:
        return iter(self._tensors)

    def add(self, key: str, tensors: Sequence[torch.Tensor], counting: Sequence[torch.Tensor]) -> Watched:
        """Watch the elements of `tensors` (strided, of the base class), whose changes are counted by `counting`."""
        # Lists, not generators: each of these takes as long as what is in it.
        counted = [(tensor, tensor._version) for tensor in counting]
        memory, samples = [], []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            memory.append((storage, storage.nbytes()))
            if tensor.is_cpu and tensor.is_contiguous() and tensor.numel():
                samples.append(_Sample.of(tensor, self._share))
        watched = Watched(key, tuple(counted), tuple(memory), tuple(samples))
        self._tensors.append(watched)
        return watched

    def look(self, at: Watched | None = None) -> None:
        """Return if no counter of `at` (None: of any tensor) has moved; once settled, what was found then counts.

        Raises:
            StateChangedError: names the first that was changed.
        """
        with self._lock:
            if not self._is_settled:
                for each in self._tensors if at is None else (at,):
                    each.check_counters()
            elif self._error is not None:
                raise self._error

    def settle(self) -> None:
        """Look for the last time: what changes from now on is no business of this commit. Raises nothing."""
        with self._lock:
            if self._is_settled:
                return
            try:
                for each in self._tensors:
                    each.check_counters()
            except StateChangedError as error:
                self._error = error
            self._is_settled = True
