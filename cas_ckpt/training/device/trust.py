"""Which tensors are hashed on their device, and whether what comes from there is believed.

    1. `hasher_of` gives the hasher of a device: one a process, for CUDA alone.
    2. It imports Triton when it is first asked for digests, and compiles the kernels.
    3. The first cells of every kind of launch are hashed on the host too. From then on a cell is, now and then.
    4. Where anything fails or differs at first, the process says so once, and hashes on the host from then on.

Invariant: a digest that was not made by kernels that agreed with the host on this device is never given. Only digests
come from here: whoever stores a chunk hashes the bytes that are stored (transfer/save.py).
"""

from __future__ import annotations

import importlib
import logging
import random
import threading
from collections.abc import Callable, Sequence
from types import ModuleType

import torch

from cas_ckpt import native
from cas_ckpt.errors import InternalError
from cas_ckpt.objects.state import CellsToName
from cas_ckpt.training.device.cells import CellRequest, DevicePart
from cas_ckpt.training.device.hasher import Hashed, Hasher

_LOGGER = logging.getLogger("cas_ckpt")

AUDIT_SHARE = 1 / 16
"""How often a cell of a trusted launch is hashed on the host: a launch is of gigabytes, a cell of 4 MiB."""

_KERNELS = "cas_ckpt.training.device.kernels"


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
"""By device; tests give the CPU one."""

_lock = threading.RLock()


def hasher_of(device: torch.device) -> DeviceHasher | None:
    """The hasher of tensors on `device`; None if only the host hashes."""
    try:
        return HASHERS[device]
    except KeyError:
        with _lock:
            made = DeviceHasher(device, lambda: importlib.import_module(_KERNELS)) if device.type == "cuda" else None
            return HASHERS.setdefault(device, made)
