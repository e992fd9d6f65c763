"""Divided tensors for tests, and what they are captured as."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from cas_ckpt.layout.holdings import held_by
from cas_ckpt.objects.spec import MeshPlacement, raw_dtype
from cas_ckpt.objects.state import TensorCopy, TensorItem
from cas_ckpt.training.capture.capture import capture_state
from cas_ckpt.training.capture.tensors import host_bits

CUTS_STRIDES = pytest.mark.skipif(
    torch.__version__ < "2.10", reason="torch 2.9 cuts strided shards of unequal parts in another way: they are refused"
)


def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def divide(whole: torch.Tensor, mesh: DeviceMesh, *placements: Any) -> DTensor:
    return distribute_tensor(whole, mesh, list(placements), src_data_rank=None)


def captured(tensor: torch.Tensor) -> TensorItem:
    item = capture_state({"x": tensor}).children["x"]
    assert isinstance(item, TensorItem)
    return item


def placement_of(tensor: torch.Tensor) -> MeshPlacement:
    placement = captured(tensor).placement
    assert isinstance(placement, MeshPlacement)
    return placement


def reads_as(item: TensorItem, whole: torch.Tensor, rank: int) -> bool:
    """Whether every piece of this rank, read by its global box, has the bits of `whole` there."""
    assert item.placement is not None
    bits = host_bits(whole.contiguous())
    pieces = held_by(rank, item.spec.shape, item.placement)
    return all(
        np.ascontiguousarray(item.source.read(box)).tobytes() == np.ascontiguousarray(bits[box.slices]).tobytes()
        for box, _ in pieces
    )


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits (0 and 1 for bool)."""
    count = int(np.prod(shape)) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def fetch_held(copies: Sequence[TensorCopy], rank: int) -> None:
    """Fill the targets with what `rank` holds of them, piece by piece."""
    for copy in copies:
        stored, placement = copy.stored, copy.placement
        assert stored.inline is not None
        whole = np.frombuffer(stored.inline, raw_dtype(stored.spec.item_bytes)).reshape(stored.spec.shape)
        held = [(stored.spec.box, ())] if placement is None else held_by(rank, stored.spec.shape, placement)
        for box, _ in held:
            array = copy.target.open(box)
            assert array.shape == box.sizes
            np.copyto(array.view(whole.dtype), whole[box.slices])
            copy.target.done(box, array)
