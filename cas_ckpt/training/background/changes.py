"""Which tensors only the step of an optimizer changes, and other changes of them: found after the call.

`TrainedMemory` knows the memory that only optimizers change, so that it may be copied after the call:

    - parameters of the modules in the state, and tensors in the state of its optimizers
    - not the memory of buffers (a forward changes them), nor parameters of layers that a forward rescales
      (`max_norm` of embeddings), nor tensors that torch keeps no version counter of (made in inference mode)

Modules and optimizers are looked for in the state itself and in plain dicts, lists and tuples in it. What a Stateful of
somebody else's holds, or a `state_dict()` that the caller made, cannot be told from loose tensors.

`Watch` finds changes that no hook sees, by torch's version counters and by samples of the elements:

    1. `Watch.add` notes, at the call, the counters of a tensor and where its memory is.
    2. `Watch.begin` keeps a few elements of each, all read at once.
    3. Whoever copies the tensor asks it afterwards: `Watch.check`.
    4. `Watch.look` asks again; `Watch.settle` asks all of them for the last time.

What a counter does not count: writes through `.data`, through NumPy and through the storage, foreach operations on
DTensors, fused operations called without their optimizer. Of these the samples find most that change whole tensors.

A counter moves when an operation has ended, in the thread that made it. So a copy that ends while another thread is
inside of an operation needs a second look, after that thread has come out of it: a commit looks again when a thread
steps or waits for the commit, at the latest before it publishes. An operation that goes on then is not found.

What is noted is kept in columns, not in an object for each tensor: a call of thousands of tensors makes few objects,
which the search of Python's garbage collector at its end goes through.

Invariant: memory is taken for trained only if it is, from its first element to its last, that of such a tensor. A
tensor that passes was not changed by an operation that torch counts and that ended before the look. Asks no object for
its state and changes none. Must not know how tensors are copied.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from cas_ckpt.errors import StateChangedError
from cas_ckpt.training.capture.tensors import PLAIN_TENSORS, locals_of
from cas_ckpt.training.optimizers import NamedOptimizer
from cas_ckpt.training.stateful import NamedModule, found_in
from cas_ckpt.training.torch_internals import buffers_of, params_of, version_of

Array: TypeAlias = np.ndarray[Any, Any]

NUM_SAMPLES = 4
"""Elements of a tensor that are kept: of a tensor that changed everywhere, one would do."""


@dataclass(slots=True)  # not frozen: that would take longer to make, and thousands are made at a call
class Watched:
    """A tensor as it was at the call: which rows of a `Watch` are about it.

    Attributes:
        key: What messages call it.
        first, last: Of the tensors that hold its elements, which keep that memory whatever becomes of the live ones.
        first_counted, last_counted: Of those whose counters count its changes.
    """

    key: str
    first: int
    last: int
    first_counted: int
    last_counted: int


class Watch:
    """The tensors of one commit that are read after its call has returned. Threads may share it."""

    def __init__(self) -> None:
        self._watched: list[Watched] = []
        self._tensors: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._counted: list[torch.Tensor] = []
        self._versions: list[int | None] = []
        self._samples = _Samples()
        self._lock = threading.Lock()
        self._is_settled = False
        self._error: StateChangedError | None = None

    def add(self, key: str, tensors: Sequence[torch.Tensor], counting: Sequence[torch.Tensor]) -> Watched:
        """Watch the elements of `tensors` (strided, of the base class), whose changes are counted by `counting`."""
        first, first_counted = len(self._tensors), len(self._counted)
        for tensor in tensors:
            self._tensors.append(tensor)
            self._addresses.append(tensor.data_ptr())
        for tensor in counting:
            self._counted.append(tensor)
            self._versions.append(version_of(tensor))
        watched = Watched(key, first, len(self._tensors), first_counted, len(self._counted))
        self._watched.append(watched)
        return watched

    def begin(self) -> None:
        """Keep elements of all that was added."""
        self._samples = _Samples.of(self._tensors, self._addresses)

    def _check_counters(self, at: Watched) -> None:
        for row in range(at.first, at.last):
            if self._tensors[row].data_ptr() != self._addresses[row]:
                raise _changed(at.key, "its memory was freed or resized")
        for row in range(at.first_counted, at.last_counted):
            if version_of(self._counted[row]) != self._versions[row]:
                raise _changed(at.key, "it was changed in place")

    def check(self, at: Watched) -> None:
        """Return if the counters and the samples of `at` are those of the call; after it was read.

        Raises:
            StateChangedError: names it.
        """
        self._check_counters(at)
        # What was read as an array is never resized by torch again: its elements are still where they were.
        if not all(self._samples.are_unchanged(row) for row in range(at.first, at.last)):
            raise _changed(at.key, "it was changed in a way that torch does not count (.data, NumPy, the storage)")

    def look(self, at: Watched | None = None) -> None:
        """Return if no counter of `at` (None: of any tensor) has moved; once settled, what was found then counts.

        Raises:
            StateChangedError: names the first that was changed.
        """
        with self._lock:
            if not self._is_settled:
                for each in self._watched if at is None else (at,):
                    self._check_counters(each)
            elif self._error is not None:
                raise self._error

    def settle(self) -> None:
        """Look for the last time: what changes from now on is no business of this commit. Raises nothing."""
        with self._lock:
            if self._is_settled:
                return
            try:
                for each in self._watched:
                    self._check_counters(each)
            except StateChangedError as error:
                self._error = error
            self._is_settled = True


class _Samples:
    """Elements of tensors on the host that lie in one piece, as bits, and where they are in memory."""

    def __init__(self) -> None:
        self._found: list[tuple[dict[int, int], Array, Array]] = []

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], addresses: Sequence[int]) -> _Samples:
        """Elements of each at equal distances; the first one is after a share of such a distance, by chance."""
        samples = cls()
        share = Random().random()  # a generator of its own: a commit must not move anybody's random state
        of_width: dict[int, list[int]] = {}
        for row, tensor in enumerate(tensors):
            if tensor.is_contiguous() and tensor.is_cpu and (num_elements := tensor.numel()):
                of_width.setdefault(tensor.itemsize, []).extend((row, addresses[row], num_elements))
        for item_bytes, found in of_width.items():
            rows, starts, lengths = np.array(found, np.int64).reshape(-1, 3).T
            step = np.maximum(1, lengths // NUM_SAMPLES)
            elements = np.minimum((share * step).astype(np.int64) + step * np.arange(NUM_SAMPLES)[:, None], lengths - 1)
            places = (starts + elements * item_bytes).T[:, :, None] + np.arange(item_bytes)
            numbers = dict(zip(rows.tolist(), range(len(rows)), strict=True))
            samples._found.append((numbers, places, _bytes_at(places)))
        return samples

    def are_unchanged(self, row: int) -> bool:
        for numbers, places, before in self._found:
            number = numbers.get(row)
            if number is not None:
                return bool((_bytes_at(places[number]) == before[number]).all())
        return True


class _Memory:
    """Memory of this process as an array of bytes; what of it is not mapped must not be looked at."""

    def __init__(self, first: int, last: int) -> None:
        self.__array_interface__ = {"data": (first, True), "shape": (last - first + 1,), "typestr": "|u1", "version": 3}


def _bytes_at(places: Array) -> Array:
    """The bytes at these addresses."""
    first = int(places.min())
    memory: Array = np.asarray(_Memory(first, int(places.max())))
    return cast("Array", memory[places - first])


def _changed(key: str, how: str) -> StateChangedError:
    return StateChangedError(
        f"{key}: {how} after commit_async(snapshot='lazy') had returned and before it was staged, and not by the step "
        "of an optimizer of torch, which waits: call wait_staged() of the pending commit before you change the state, "
        "or use snapshot='copy'; nothing was published"
    )


# ------------------------------------------------------------ what only optimizers change

_KINDS = (torch.nn.Module, NamedModule, torch.optim.Optimizer, NamedOptimizer)


class TrainedMemory:
    """The memory of one state that only optimizers change; valid while the live tensors are what they are."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        # By address: the strided tensor that is there, and those whose counters count its changes (None: its own does).
        self._live: dict[int, list[tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]]] = {}
        self._changed_by_forward: set[int] = set()
        for _, found in found_in(state, _KINDS):
            self._add(found)

    def _add(self, found: Any) -> None:
        if isinstance(found, (torch.optim.Optimizer, NamedOptimizer)):
            optimizer = found.optimizer if isinstance(found, NamedOptimizer) else found
            for kept in optimizer.state.values():
                for value in kept.values() if type(kept) is dict else (kept,):
                    for tensor in (value,) if type(value) in PLAIN_TENSORS else _tensors_in(value):
                        self._add_tensor(tensor)
            return
        module = found.module if isinstance(found, NamedModule) else found
        for part in module.modules():
            for buffer in buffers_of(part).values():
                self._add_changed(buffer)
            # Not of the module itself: a module is slow to say that it has no such attribute.
            is_rescaled = vars(part).get("max_norm", getattr(type(part), "max_norm", None)) is not None
            for param in params_of(part).values():
                if is_rescaled:
                    self._add_changed(param)
                elif param is not None:
                    self._add_tensor(param)

    def _add_changed(self, tensor: torch.Tensor | None) -> None:
        """A forward may change it."""
        for local in () if tensor is None else locals_of(tensor):
            self._changed_by_forward.add(local.untyped_storage().data_ptr())

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        if type(tensor) in PLAIN_TENSORS:
            if tensor.layout is torch.strided:
                self._live.setdefault(tensor.data_ptr(), []).append((tensor, None))
            return
        parts = locals_of(tensor)
        for part in parts:
            self._live.setdefault(part.data_ptr(), []).append((part, parts if part is tensor else (tensor, *parts)))

    def counting(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The live tensors whose version counters count every change of the memory of `tensor`; none: copy it now.

        Args:
            tensor: Strided, of the base class, as a capture has it: of a divided one, the local part.
        """
        counting: list[torch.Tensor] = []
        for live, counted in self._live.get(tensor.data_ptr(), ()):
            if live is tensor or _is_same_part(live, tensor):
                counting += (live,) if counted is None else counted
        if self._changed_by_forward and counting and tensor.untyped_storage().data_ptr() in self._changed_by_forward:
            return []
        for each in counting:
            if each.is_inference():
                return []
        return counting if tensor.numel() else []


def _is_same_part(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Of two tensors that begin at one address: whether they end at one, with the same elements."""
    return one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()


def _tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Tensors in dicts, lists and tuples, as optimizers keep them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)) and depth < 10:
        for child in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(child, depth + 1)
