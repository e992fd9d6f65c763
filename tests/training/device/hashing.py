"""Requests for hashers of devices, and what they must answer."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from cas_ckpt.native import leaf_digests
from cas_ckpt.objects.spec import DTYPE_BYTES, Grid, Spec, grid_for
from cas_ckpt.training.capture.tensors import CopiedTensor, spec_of
from cas_ckpt.training.device.cells import CellRequest
from cas_ckpt.training.device.hasher import Hasher

CPU = torch.device("cpu")


def request(tensor: torch.Tensor, grid: Grid | None = None, numbers: Iterable[int] | None = None) -> CellRequest:
    """All cells of a tensor, or some; of its canonical grid, or of another."""
    grid = grid or grid_for(spec_of(tensor))
    wanted = range(grid.num_cells) if numbers is None else list(numbers)
    return CellRequest(CopiedTensor(tensor).device_parts(), grid, wanted, tensor.element_size())


def one_cell(num_bytes: int, leaf_bytes: int, *, start: int = 0) -> CellRequest:
    """Random bytes as one cell; `start`: how far behind an aligned address they begin."""
    tensor = random_bytes(num_bytes + start)[start:]
    return request(tensor, Grid((num_bytes,), (max(num_bytes, 1),), leaf_bytes), [0])


def random_bytes(num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def random_tensor(dtype: torch.dtype, *shape: int, seed: int = 0, device: torch.device = CPU) -> torch.Tensor:
    """A tensor of random bits.

    They are moved as bytes: torch neither copies raw memory of quantized dtypes, nor complex32 without a warning.
    """
    num_bytes = Spec("uint8", shape).num_elements * dtype.itemsize
    return random_bytes(num_bytes, seed).to(device).view(dtype).view(shape)


def answers(hasher: Hasher, requests: list[CellRequest]) -> dict[tuple[int, int], bytes]:
    """What the hasher says, by (request, position)."""
    found: dict[tuple[int, int], bytes] = {}
    for hashed in hasher.hash(requests):
        for place, digests in zip(hashed.places, hashed.digests, strict=True):
            assert place not in found
            found[place] = digests
    return found


def expected(requests: list[CellRequest]) -> dict[tuple[int, int], bytes]:
    """What blake3 says of the bytes of the cells."""
    return {
        (number, at): digests_of(_cell(each, cell), each.grid.leaf_bytes)
        for number, each in enumerate(requests)
        for at, cell in enumerate(each.numbers)
    }


def _cell(asked: CellRequest, number: int) -> torch.Tensor:
    memory = asked.parts[0].memory
    return memory[asked.grid.box(number).slices] if memory.numel() else memory


def digests_of(cell: torch.Tensor, leaf_bytes: int) -> bytes:
    data = cell.cpu().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()
    if not data:
        return leaf_digests(memoryview(b""), leaf_bytes) or _empty()
    return leaf_digests(memoryview(data), leaf_bytes)


def _empty() -> bytes:
    from blake3 import blake3

    return blake3(b"").digest()


def dtypes() -> list[torch.dtype]:
    """Every dtype that a commit takes."""
    return [found for name in DTYPE_BYTES if isinstance(found := getattr(torch, name, None), torch.dtype)]
