"""Raw bits in and out of torch tensors of every dtype and layout."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cas_ckpt.objects.spec import DTYPE_BYTES
from cas_ckpt.training.capture.tensors import (
    TORCH_DTYPES,
    CastTarget,
    CopiedTensor,
    HostTensor,
    elements_of,
    host_bits,
    overlaps_itself,
    spec_of,
    tensor_item,
)
from tests.searches import tries
from tests.training.roundtrip import boxes, checkout, commit, load, same_state

STRIDED_DTYPES = sorted(name for name in TORCH_DTYPES if not name.startswith(("q", "quint")))


def random_tensor(name: str, *shape: int) -> torch.Tensor:
    """A tensor of random bits (random bools for bool)."""
    num_bytes = int(np.prod(shape)) * DTYPE_BYTES[name]
    bits = torch.randint(0, 2 if name == "bool" else 256, (num_bytes,), dtype=torch.uint8)
    return bits.view(TORCH_DTYPES[name]).reshape(shape)


def region_of(tensor: torch.Tensor) -> Any:
    """What memory an item says that the tensor is."""
    identity: Any = tensor_item(tensor).identity
    return identity and identity[0]


def bits_of(tensor: torch.Tensor) -> bytes:
    return host_bits(tensor).tobytes()


@pytest.mark.parametrize("name", STRIDED_DTYPES)
def test_every_dtype_comes_back_bit_for_bit(name: str) -> None:
    tensor = random_tensor(name, 5, 7)
    tree = commit({"x": tensor})
    made = load(tree)["x"]
    target = random_tensor(name, 5, 7)
    checkout(tree, {"x": target})
    assert made.dtype == target.dtype == tensor.dtype
    assert bits_of(made) == bits_of(target) == bits_of(tensor)


def test_no_dtype_of_the_format_is_left_untried() -> None:
    assert {*STRIDED_DTYPES, "qint8", "quint8", "qint32", "quint4x2", "quint2x4"} >= set(TORCH_DTYPES)


def variants(base: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same kind of tensor in many layouts."""
    return {
        "transposed": base.t(),
        "rows skipped": base[::2],
        "columns skipped": base[:, 1::3],
        "offset": base[2:, 3:],
        "expanded": base[0].expand(4, *base[0].shape),
        "0-d": base[1, 2],
        "empty": base[:0],
        "empty in the middle": base[:, :0],
        "3-d permuted": base.reshape(2, 3, -1).permute(2, 0, 1),
        "windows": base.flatten().as_strided((3, 4), (1, 1)),
    }


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e4m3fn", "complex128", "uint16", "bool"])
def test_every_layout_is_read_in_its_logical_order(name: str) -> None:
    base = random_tensor(name, 6, 8)
    for label, tensor in variants(base).items():
        made = load(commit({"x": tensor}))["x"]
        assert made.shape == tensor.shape, label
        assert bits_of(made) == bits_of(tensor.contiguous()), label


@pytest.mark.parametrize("name", ["float32", "bfloat16", "complex128", "bool"])
def test_a_view_is_filled_without_touching_its_neighbours(name: str) -> None:
    source = variants(random_tensor(name, 6, 8))
    for label in ("transposed", "rows skipped", "columns skipped", "offset", "0-d", "3-d permuted"):
        base = random_tensor(name, 6, 8)
        inside = variants(torch.zeros(6, 8, dtype=torch.bool))[label].fill_(True)
        mask = inside if inside._base is None else inside._base.reshape(6, 8)
        before = base.clone()
        checkout(commit({"x": source[label]}), {"x": variants(base)[label]})
        assert bits_of(variants(base)[label].contiguous()) == bits_of(source[label].contiguous()), label
        assert bits_of(base[~mask]) == bits_of(before[~mask]), label


def test_reading_a_host_tensor_copies_nothing() -> None:
    tensor = torch.arange(12.0).reshape(3, 4).t()[1:]
    view = elements_of(tensor).read(spec_of(tensor).box)
    tensor[0, 0] = 77.0
    assert view.view(np.float32)[0, 0] == 77.0
    assert view.strides == (4, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e5m2])
def test_the_bytes_of_a_small_tensor_are_those_of_its_array_however_it_lies(dtype: torch.dtype) -> None:
    whole = torch.randint(0, 2, (4, 6)).to(dtype)
    for tensor in (whole, whole[1:3], whole.t(), whole[:, ::2], whole[2, 3], whole[:0], whole[1:2].expand(3, 6)):
        source = elements_of(tensor)
        assert isinstance(source, HostTensor)
        assert source.to_bytes() == source.read(spec_of(tensor).box).tobytes()


def test_a_target_takes_bytes_at_once_only_if_it_lies_as_they_do() -> None:
    whole = torch.zeros(4, 6)
    before, rows = whole._version, torch.ones(2, 6)
    assert HostTensor(whole[1:3]).fill(HostTensor(rows).to_bytes())
    assert whole._version == before + 1
    assert whole.sum(1).tolist() == [0, 6, 6, 0]
    assert not HostTensor(whole.t()).fill(bytes(96))
    assert not HostTensor(whole[:, ::2]).fill(bytes(48))
    assert not HostTensor(whole[0]).fill(bytes(28))
    assert whole._version == before + 1
    assert whole.sum(1).tolist() == [0, 6, 6, 0]


def test_a_view_keeps_its_memory_alive() -> None:
    source = HostTensor(torch.full((1000,), 3.0))
    view = source.read(spec_of(source.tensor).box)
    del source
    gc.collect()
    assert (view.view(np.float32) == 3.0).all()


def test_a_parameter_is_read_without_entering_autograd() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    assert elements_of(parameter).read(spec_of(parameter).box).view(np.float32).sum() == 3.0
    assert parameter.grad_fn is None


def test_inference_tensors_are_read_and_filled() -> None:
    with torch.inference_mode():
        tensor = torch.ones(3)
    identity: Any = tensor_item(tensor).identity
    assert identity[1] is None
    checkout(commit({"x": torch.zeros(3)}), {"x": tensor})
    assert tensor.sum() == 0


def test_a_default_device_changes_nothing() -> None:
    tensor = torch.ones(4)
    with torch.device("meta"):
        tree = commit({"x": tensor})
        made = load(tree)["x"]
    assert made.device.type == "cpu"
    assert made.sum() == 4


@pytest.mark.parametrize(
    "make", [torch.conj, lambda t: t.conj().imag, lambda t: t.conj().imag[::2]], ids=["conj", "neg", "neg, strided"]
)
def test_conjugated_and_negated_views_are_stored_by_value(make: Any) -> None:
    tensor = make(torch.randn(6, dtype=torch.complex64))
    assert tensor.is_conj() or tensor.is_neg()
    tree = commit({"x": tensor})
    assert torch.equal(load(tree)["x"], tensor.clone())
    target = make(torch.randn(6, dtype=torch.complex64))
    checkout(tree, {"x": target})
    assert torch.equal(target, tensor)


@pytest.mark.parametrize("name", STRIDED_DTYPES)
def test_copying_through_host_memory_gives_the_same_bits_as_views(name: str) -> None:
    # What runs for tensors on other devices, here on one that can also be viewed.
    base, other = random_tensor(name, 6, 8), random_tensor(name, 6, 8)
    for label in ("transposed", "columns skipped", "offset", "0-d", "3-d permuted"):
        tensor, target = variants(base)[label], variants(other)[label]
        for box in boxes(tuple(tensor.shape)):
            viewed, copied = HostTensor(tensor).read(box), CopiedTensor(tensor).read(box)
            assert viewed.tobytes() == copied.tobytes()
            assert not np.shares_memory(viewed, copied)
            array = CopiedTensor(target).open(box)
            np.copyto(array, viewed)
            CopiedTensor(target).done(box, array)
        assert bits_of(tensor) == bits_of(target), label


@pytest.mark.parametrize("kind", [HostTensor, CopiedTensor, lambda tensor: CastTarget(tensor, torch.float64)])
def test_filling_moves_the_version_counter_so_that_autograd_notices(kind: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    loss = (weight * weight).sum()
    before = weight._version
    target, box = kind(weight.detach()), spec_of(weight).box
    array = target.open(box)
    array[...] = 0
    target.done(box, array)
    assert weight._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_region_is_shared_by_ties_only() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 4))
    assert region_of(weight) == region_of(weight.detach()) == region_of(weight[:])
    others = [weight.t(), weight[:2], weight.flatten(), weight.detach().clone(), weight.view(torch.int32)]
    assert all(region_of(other) != region_of(weight) for other in others)
    assert region_of(torch.empty(0)) is None


def test_a_region_never_equals_one_of_later_memory_at_the_same_address() -> None:
    memory = bytearray(64)
    earlier = region_of(torch.frombuffer(memory, dtype=torch.float32))
    later = region_of(torch.frombuffer(memory, dtype=torch.float32))
    assert earlier is not None
    assert later is not None
    assert earlier[1:] == later[1:], "not the same address: this test shows nothing"
    assert earlier != later


def test_a_region_can_be_compared_after_its_memory_is_gone() -> None:
    tensor = torch.ones(3)
    region = region_of(tensor)
    seen = {region}
    del tensor
    gc.collect()
    assert region in seen
    assert region != region_of(torch.ones(3))


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
@settings(max_examples=tries(45, 150), deadline=None)
def test_overlap_is_found_exactly_for_dense_and_sliced_layouts(shape: list[int], data: st.DataObject) -> None:
    strides = data.draw(st.lists(st.integers(0, 9), min_size=len(shape), max_size=len(shape)))
    addresses = [sum(i * s for i, s in zip(index, strides, strict=True)) for index in np.ndindex(*shape)]
    if len(set(addresses)) < len(addresses):
        assert overlaps_itself(shape, strides)


def test_ordinary_layouts_do_not_count_as_overlapping() -> None:
    base = torch.zeros(4, 6, 8)
    for view in (base, base.permute(2, 0, 1), base[::2, 1:, ::3], base[:, :, :1], base[0, 0, 0]):
        assert not overlaps_itself(view.shape, view.stride())
    assert overlaps_itself(base[:1].expand(3, 6, 8).shape, base[:1].expand(3, 6, 8).stride())


@given(st.data())
@settings(max_examples=tries(30, 100), deadline=None)
def test_any_strided_view_round_trips(data: st.DataObject) -> None:
    tensor = random_tensor(data.draw(st.sampled_from(["int8", "float16", "float32", "int64", "complex128"])), 4, 6, 5)
    for _ in range(data.draw(st.integers(0, 3))):
        axis = data.draw(st.integers(0, tensor.dim() - 1))
        start, step = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 3))
        tensor = tensor.transpose(0, axis)[start::step]
    assert same_state(load(commit({"x": tensor})), {"x": tensor})
    target = torch.empty_like(tensor, memory_format=torch.preserve_format)
    assert elements_of(target) is not None
    checkout(commit({"x": tensor}), {"x": target})
    assert same_state({"x": target}, {"x": tensor})
