"""Digests of the leaves of tensors that are in the memory of a device, computed there, and whether they are believed.

    1. `hasher_of` gives the hasher of a device: one a process, for CUDA alone. It imports Triton when it is first asked
       for digests, and compiles the kernels (kernels.py).
    2. The cells are laid out as tables (cells.py), and sorted by what a launch has in common.
    3. Each such set is hashed on a stream of the hasher's own: chunks first, then levels of the trees. Cells that do
       not lie as kernels need it are copied into scratch memory before. The digests come to the host: 32 bytes a leaf.
    4. The first cells of every kind of launch are hashed on the host too. From then on a cell is, now and then.
    5. Where anything fails or differs at first, the process says so once, and hashes on the host from then on.

Invariant: the answer for a cell is the BLAKE3 digests of its leaves, made by kernels that agreed with the host on this
device, or none is given. Only digests come from here: whoever stores a chunk hashes the bytes that are stored
(transfer/save.py). Whoever calls has waited for the work that writes the tensors (`wait_for_devices`), and keeps them
as they are until this returns. Any thread may call; one at a time hashes on a device. Knows no commits.
"""

from __future__ import annotations

import importlib
import logging
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np
import torch

from cas_ckpt import native
from cas_ckpt.errors import InternalError
from cas_ckpt.objects.digest import DIGEST_BYTES
from cas_ckpt.objects.state import CellsToName
from cas_ckpt.training.device.cells import WORD_BYTES, CellGroup, CellRequest, DevicePart, Numbers, Shape, groups_of

_LOGGER = logging.getLogger("cas_ckpt")

AUDIT_SHARE = 1 / 16
"""How often a cell of a trusted launch is hashed on the host: a launch is of gigabytes, a cell of 4 MiB."""

_KERNELS = "cas_ckpt.training.device.kernels"

SCRATCH_BYTES = 256 << 20
"""Cells that are gathered before they are hashed, at most so many bytes at a time."""

LAUNCH_BYTES = 4 << 30
"""Most bytes hashed by one launch: chaining values take a 32nd of it on the device."""

LANES = 128
"""Chunks a program on a GPU hashes: one each thread of four warps."""

HOST_LANES = 1024
"""The same in Triton's interpreter, where an operation takes as long for one lane as for a thousand."""

ALIGNED_BYTES = 512
"""Where cells begin in scratch memory."""


@dataclass(frozen=True, slots=True)
class Hashed:
    """Digests of the leaves of some cells.

    Attributes:
        shape: Of the launch that made them.
        places: (request, position in its `numbers`) of each cell.
        digests: Of each cell: those of its leaves, one after another.
        gathered: Some cells were copied before.
    """

    shape: Shape
    places: Sequence[tuple[int, int]]
    digests: Sequence[bytes]
    gathered: bool


class Hasher:
    """Hashes cells of tensors on one device.

    Args:
        kernels: The module kernels.py, compiled or interpreted.
    """

    def __init__(self, device: torch.device, kernels: ModuleType) -> None:
        self._device = device
        self._kernels = kernels
        self._lock = threading.Lock()
        self._stream: Any = None

    def hash(self, requests: Sequence[CellRequest]) -> list[Hashed]:
        """The digests of all cells, in any order.

        Raises:
            Whatever torch or Triton raise: no memory, no compiler, a fault of the device.
        """
        ready: dict[Shape, list[CellGroup]] = {}
        for group in groups_of(requests):
            for part in _within(group, SCRATCH_BYTES if group.addresses is None else LAUNCH_BYTES):
                ready.setdefault(part.shape, []).append(part)
        found = []
        with self._lock, self._on_own_stream():
            for shape, groups in ready.items():
                for batch in _batches(groups):
                    places = [place for each in batch for place in each.places]
                    gathered = any(each.addresses is None for each in batch)
                    found.append(Hashed(shape, places, self._digests(shape, batch), gathered))
        return found

    def _on_own_stream(self) -> AbstractContextManager[object]:
        if self._device.type != "cuda":
            return nullcontext()
        if self._stream is None:
            # A stream that does not wait for the default one: what trains meanwhile is not in the way.
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        entered = ExitStack()
        entered.enter_context(torch.cuda.device(self._device))
        entered.enter_context(torch.cuda.stream(self._stream))
        return entered

    def _digests(self, shape: Shape, groups: Sequence[CellGroup]) -> list[bytes]:
        scratch = self._gathered(groups)
        counts = np.concatenate([np.full(len(each.places), each.num_leaves, np.int64) for each in groups])
        first = np.cumsum(counts) - counts
        num_leaves = int(counts.sum())
        # As int32: torch cannot fill new memory of other dtypes, as it does if it is told to be deterministic.
        words = torch.empty((num_leaves * shape.chunks_per_leaf, 8), dtype=torch.int32, device=self._device)
        values = words.view(torch.uint32)
        addresses = np.concatenate([found for found, _ in scratch])
        table = self._table(groups, addresses - values.data_ptr(), first)
        cell_of = self._there(np.repeat(np.arange(len(counts), dtype=np.int32), counts))
        self._launch(shape, values, self._there(table), cell_of, num_leaves, max(each.num_bytes for each in groups))
        last = words.view(num_leaves, shape.chunks_per_leaf, 8)[:, 0]
        found = self._here(last).tobytes()
        ends = [*(first * DIGEST_BYTES).tolist(), num_leaves * DIGEST_BYTES]
        return [found[start:stop] for start, stop in pairwise(ends)]

    def _gathered(self, groups: Sequence[CellGroup]) -> list[tuple[Numbers, torch.Tensor]]:
        """Where the cells of each group are, and what keeps that memory: the tensor itself, or a copy of its cells."""
        found = []
        for group in groups:
            if group.addresses is not None:
                found.append((group.addresses, group.memory))
                continue
            room = -(-group.num_bytes // ALIGNED_BYTES) * ALIGNED_BYTES
            space = torch.empty(len(group.places) * room, dtype=torch.uint8, device=self._device)
            for at, corner in enumerate(group.corners.tolist()):
                place = space[at * room : at * room + group.num_bytes].view(group.memory.dtype).view(group.sizes)
                source = group.memory
                for dim, (start, size) in enumerate(zip(corner, group.sizes, strict=True)):
                    source = source.narrow(dim, start, size)
                place.copy_(source)
            found.append((space.data_ptr() + np.arange(len(group.places), dtype=np.int64) * room, space))
        return found

    def _table(self, groups: Sequence[CellGroup], offsets: Numbers, first: Numbers) -> Numbers:
        table = np.zeros((len(offsets), self._kernels.TABLE_COLUMNS), np.int64)
        table[:, 0] = offsets // WORD_BYTES
        table[:, 5] = first
        at = 0
        for group in groups:
            rows = table[at : at + len(group.places)]
            rows[:, 1], rows[:, 2] = group.num_bytes, group.leaf_bytes
            rows[:, 3], rows[:, 4] = group.row_bytes, group.row_step_bytes // WORD_BYTES
            at += len(rows)
        return table

    def _launch(
        self, shape: Shape, values: torch.Tensor, table: torch.Tensor, cell_of: torch.Tensor, num_leaves: int,
        longest_bytes: int,
    ) -> None:  # fmt: skip
        chunks = shape.chunks_per_leaf
        lanes = LANES if self._device.type == "cuda" else HOST_LANES
        counts = torch.empty(num_leaves, dtype=torch.int32, device=self._device)
        num_blocks = 16 if chunks > 1 or shape.whole else max(1, -(-min(longest_bytes, 1024) // 64))
        self._kernels.chunk_values[(-(-num_leaves * chunks // lanes),)](
            values, table, cell_of, values, counts, num_leaves, chunks, num_blocks,
            lanes=lanes, whole=shape.whole, rows=shape.rows, num_warps=4,
        )  # fmt: skip
        step = 1
        while step < chunks:
            parents = num_leaves * -(-chunks // (2 * step))
            self._kernels.parent_values[(-(-parents // lanes),)](
                values, counts, num_leaves, chunks, step, lanes=lanes, num_warps=4
            )
            step *= 2

    def _there(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        host = torch.from_numpy(array)
        return host.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else host

    def _here(self, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        """`tensor` in host memory; all that was launched is done then."""
        found: np.ndarray[Any, Any] = tensor.contiguous().cpu().numpy()
        return found


def _within(group: CellGroup, most_bytes: int) -> Iterator[CellGroup]:
    """`group` in parts of at most `most_bytes`, one cell at least."""
    step = max(1, most_bytes // max(group.num_bytes, 1))
    if len(group.places) <= step:
        yield group
        return
    for at in range(0, len(group.places), step):
        addresses = None if group.addresses is None else group.addresses[at : at + step]
        yield CellGroup(
            group.shape, group.memory, group.sizes, group.places[at : at + step], group.corners[at : at + step],
            addresses, group.num_bytes, group.leaf_bytes, group.row_bytes, group.row_step_bytes,
        )  # fmt: skip


def _batches(groups: Sequence[CellGroup]) -> Iterator[list[CellGroup]]:
    """Groups for one launch each: within the limits of a launch and of scratch memory, one at least."""
    batch: list[CellGroup] = []
    num_bytes = scratch_bytes = 0
    for group in groups:
        more = group.num_bytes * len(group.places)
        copied = more if group.addresses is None else 0
        if batch and (num_bytes + more > LAUNCH_BYTES or scratch_bytes + copied > SCRATCH_BYTES):
            yield batch
            batch, num_bytes, scratch_bytes = [], 0, 0
        batch.append(group)
        num_bytes, scratch_bytes = num_bytes + more, scratch_bytes + copied
    if batch:
        yield batch


# --- whether they are believed ----------------------------------------------------------------


class _OtherDigestsError(Exception):
    """The device and the host disagree."""


class DeviceHasher:
    """The leaf digests of tensors on one device, as long as they can be had and are right. See `LeafHasher`.

    Args:
        import_kernels: Gives the module kernels.py; raises ImportError if there is no Triton.
    """

    has_hashed = False

    def __init__(self, device: torch.device, import_kernels: Callable[[], ModuleType]) -> None:
        self._device = device
        self._import_kernels = import_kernels
        self._lock = threading.RLock()
        self._hasher: Hasher | None = None
        self._refused = False
        self._said_no_memory = False
        self._trusted: set[tuple[bool, bool, bool]] = set()
        # Its own generator: committing must not move anybody's random state.
        self._random = random.Random()

    def cell_digests(self, wanted: Sequence[CellsToName]) -> list[list[bytes]] | None:
        if self._refused:
            return None
        try:
            return self._digests(wanted)
        except torch.OutOfMemoryError as error:
            if not self._said_no_memory:
                self._said_no_memory = True
                _LOGGER.warning("%s: no memory to hash on the device, so the host does: %s", self._device, _line(error))
            return None
        except InternalError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a compiler or driver raises, the host can do it
            self._refuse(error)
            return None

    def _digests(self, wanted: Sequence[CellsToName]) -> list[list[bytes]]:
        with self._lock:
            if self._hasher is None:
                self._hasher = Hasher(self._device, self._import_kernels())
        requests = [CellRequest(_parts(each), each.grid, each.numbers, each.item_bytes) for each in wanted]
        found = [[b""] * len(each.numbers) for each in wanted]
        for hashed in self._hasher.hash(requests):
            self._check(hashed, wanted)
            for (request, position), digests in zip(hashed.places, hashed.digests, strict=True):
                found[request][position] = digests
        return found

    def _check(self, hashed: Hashed, wanted: Sequence[CellsToName]) -> None:
        """Compare with the host: the first and the last cell of a new kind of launch, else sometimes any one.

        Raises:
            _OtherDigestsError: at first they differ. InternalError: they do after they had agreed.
        """
        kind = (hashed.shape.whole, hashed.shape.rows, hashed.gathered)
        if kind not in self._trusted:
            for at in {0, len(hashed.places) - 1}:
                if hashed.digests[at] != _on_host(wanted, hashed.places[at]):
                    raise _OtherDigestsError(f"it gives other digests than the host ({hashed.shape})")
            self._trusted.add(kind)
        elif self._random.random() < AUDIT_SHARE:
            at = self._random.randrange(len(hashed.places))
            if hashed.digests[at] != _on_host(wanted, hashed.places[at]):
                self._refuse(_OtherDigestsError("it gave other digests than the host"))
                raise InternalError(
                    f"{self._device} and the host found different bytes in a tensor, or its hasher failed: if nothing "
                    "changes tensors while a commit runs, commit again (now the host hashes), and compare the commits "
                    "that this process made before with what they should hold"
                )

    def _refuse(self, error: Exception) -> None:
        with self._lock:
            said, self._refused = self._refused, True
        if not said:
            reason = "Triton is not installed" if isinstance(error, ImportError) else _line(error)
            _LOGGER.warning("%s: leaves are hashed on the host from now on: %s", self._device, reason)


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _parts(wanted: CellsToName) -> tuple[DevicePart, ...]:
    parts: tuple[DevicePart, ...] = wanted.source.device_parts()
    return parts


def _on_host(wanted: Sequence[CellsToName], place: tuple[int, int]) -> bytes:
    """Digests of the leaves of one cell, from its bytes."""
    asked = wanted[place[0]]
    cell = asked.source.read(asked.grid.box(asked.numbers[place[1]]))
    return native.leaf_digests(cell, asked.grid.leaf_bytes)


HASHERS: dict[torch.device, DeviceHasher | None] = {}
"""Of every device that was asked about: None if only the host hashes."""

_lock = threading.RLock()


def hasher_of(device: torch.device) -> DeviceHasher | None:
    """The hasher of tensors on `device`; None if only the host hashes."""
    try:
        return HASHERS[device]
    except KeyError:
        with _lock:
            made = DeviceHasher(device, lambda: importlib.import_module(_KERNELS)) if device.type == "cuda" else None
            return HASHERS.setdefault(device, made)
