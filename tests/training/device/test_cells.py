"""The tables that a device is given: what they say is where the bytes of the cells are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cas_ckpt.errors import InternalError
from cas_ckpt.objects.spec import Box, Grid, grid_for
from cas_ckpt.training.capture.tensors import spec_of
from cas_ckpt.training.device import hasher as module
from cas_ckpt.training.device.cells import CellRequest, DevicePart, groups_of
from cas_ckpt.training.device.hasher import Hasher
from tests.searches import tries
from tests.training.device.hashing import CPU, answers, dtypes, expected, one_cell, random_tensor, request
from tests.training.device.host_kernels import Launches


def check(*requests: CellRequest) -> Launches:
    """All cells have the digests of their bytes; what was launched."""
    kernels = Launches()
    assert answers(Hasher(CPU, kernels), list(requests)) == expected(list(requests))  # type: ignore[arg-type]
    return kernels


@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_every_dtype_is_hashed_by_its_bytes(dtype: torch.dtype) -> None:
    check(request(random_tensor(dtype, 3, 1001)), request(random_tensor(dtype)), request(random_tensor(dtype, 4096)))


def test_contiguous_and_banded_cells_are_read_where_they_are() -> None:
    matrix = random_tensor(torch.bfloat16, 4096, 4096)
    grid = grid_for(spec_of(matrix))
    assert grid.cell[1] < 4096  # cells beside one another
    assert check(request(matrix, grid, [0, 1, grid.num_cells - 1])).shapes == {(True, True)}
    rows = random_tensor(torch.float32, 1 << 16, 16)
    assert check(request(rows, numbers=[0])).shapes == {(True, False)}
    direct = [request(matrix, grid, [0]), request(rows, numbers=[0])]
    assert all(group.addresses is not None for group in groups_of(direct))


def test_memory_that_no_table_describes_is_gathered() -> None:
    base = random_tensor(torch.float16, 129, 257)
    views = [base.t(), base[:, ::2], base[1:, 1:], base.flatten()[1:].view(257 * 129 - 1), base[None, 1:, 3:]]
    cubes = [random_tensor(torch.float32, 6, 10, 12)[:, 2:9, 3:11], random_tensor(torch.int8, 5, 7, 9).permute(1, 2, 0)]
    requests = [request(view) for view in views + cubes]
    assert any(group.addresses is None for group in groups_of(requests))
    check(*requests)


def test_expanded_memory_is_hashed_as_its_elements() -> None:
    check(request(random_tensor(torch.float32, 1, 512).expand(9, 512)), request(random_tensor(torch.int64).expand(300)))


@settings(max_examples=tries(20, 60))
@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3), item=st.sampled_from([1, 2, 4, 8, 16]),
    order=st.randoms(use_true_random=False), leaf=st.sampled_from([64, 96, 128, 1024, 1040, 4096]),
)  # fmt: skip
def test_any_box_of_any_strided_memory_is_hashed_by_its_bytes(shape, item, order, leaf) -> None:  # type: ignore[no-untyped-def]
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[item]
    axes = order.sample(range(len(shape)), len(shape))
    room = [size * order.choice([1, 1, 2]) + order.choice([0, 0, 3]) for size in shape]
    tensor = random_tensor(dtype, *room).permute(axes)
    tensor = tensor[tuple(slice(order.randrange(3), None, order.choice([1, 1, 2])) for _ in axes)]
    if not tensor.numel():
        return
    cell = tuple(order.randint(1, size) for size in tensor.shape)
    check(request(tensor, Grid(tuple(tensor.shape), cell, leaf)))


def test_cells_of_shards_are_found_in_the_piece_that_holds_them() -> None:
    matrix = random_tensor(torch.float32, 64, 256)
    upper = DevicePart(matrix[:32].contiguous().view(torch.int32), Box((0, 0), (32, 256)), (0, 0))
    moved = torch.cat([torch.zeros(3, 256), matrix[32:]]).view(torch.int32)
    lower = DevicePart(moved, Box((32, 0), (32, 256)), (3, 0))
    grid = Grid((64, 256), (16, 256), 4096)
    whole = request(matrix, grid)
    found = answers(Hasher(CPU, Launches()), [CellRequest((upper, lower), grid, range(4), 4)])  # type: ignore[arg-type]
    assert found == expected([whole])


def test_a_cell_that_no_piece_holds_whole_is_refused() -> None:
    matrix = random_tensor(torch.float32, 64, 256).view(torch.int32)
    part = DevicePart(matrix[:24], Box((0, 0), (24, 256)), (0, 0))
    with pytest.raises(InternalError, match="is not in the memory"):
        list(groups_of([CellRequest((part,), Grid((64, 256), (16, 256), 4096), [0, 1], 4)]))


def test_many_cells_are_hashed_in_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAUNCH_BYTES", 3000)
    monkeypatch.setattr(module, "SCRATCH_BYTES", 3000)
    tensor = random_tensor(torch.uint8, 20_000)
    check(request(tensor, Grid((20_000,), (1000,), 512)), request(tensor[1:], Grid((19_999,), (1024,), 512)))


def test_lengths_of_no_bytes_and_of_a_few_are_hashed() -> None:
    check(*(one_cell(length, 1024, start=start) for length in (0, 1, 3, 4, 5, 64, 65) for start in (0, 1, 4)))
