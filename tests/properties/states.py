"""Random training states, and an account of what a state is that asks none of our own code.

Two states are the same state exactly if their accounts are equal: keys, types, dtypes, shapes
and bytes; not the order of dicts, not memory layout, not ties.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

TORCH_DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64,
    torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
)  # fmt: skip
_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
NUMPY_DTYPES = ("float32", "int64", "bool", "complex128", "<U3", "<M8[ns]", ">i4", "uint16")
SHAPES = ((), (0,), (1,), (7,), (3, 5), (2, 0, 3), (300,), (2, 1, 129), (40, 33))
LARGE = (512, 512)
"""As float32 the smallest matrix of more than one chunk."""


def torch_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """A tensor of random bits (NaNs of every kind among them); bools are proper."""
    size = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 2 if dtype is torch.bool else 256, size, np.uint8)
    made = torch.empty(shape, dtype=_RAW[dtype.itemsize])
    made.numpy().reshape(-1)[...] = data.view(made.numpy().dtype)
    return made.view(dtype)


def numpy_array(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    """An array of small numbers, or of what the dtype makes of them."""
    return np.random.default_rng(seed).integers(0, 99, shape).astype(dtype)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as elements of a dtype that torch can copy without a word."""
    return tensor.detach().view(_RAW[tensor.dtype.itemsize])


def bits(tensor: torch.Tensor) -> bytes:
    """The elements in C order."""
    return bytes(raw(tensor).contiguous().numpy().tobytes())


def account(value: Any) -> Any:
    """What a value is, as something to compare and to hash."""
    if isinstance(value, torch.Tensor):
        return ("torch", str(value.dtype), tuple(value.shape), bits(value))
    if isinstance(value, np.ndarray):
        return ("numpy", value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes())
    if isinstance(value, dict):
        inside = [((type(name).__name__, name), account(item)) for name, item in value.items()]
        return (type(value).__name__, tuple(inside) if isinstance(value, OrderedDict) else frozenset(inside))
    if isinstance(value, list | tuple):
        return (type(value).__name__, tuple(account(item) for item in value))
    return (type(value).__name__, struct.pack("<d", value) if isinstance(value, float) else value)


def leaves(value: Any) -> list[Any]:
    """Every tensor and array of a state; dicts in the order of their names."""
    if isinstance(value, dict):
        names = sorted(value, key=lambda name: (type(name).__name__, name))
        return [leaf for name in names for leaf in leaves(value[name])]
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return [value] if isinstance(value, torch.Tensor | np.ndarray) else []


def ties(value: Any) -> list[list[int]]:
    """Groups of leaves, by number, that are one tensor."""
    groups: dict[int, list[int]] = {}
    for number, leaf in enumerate(leaves(value)):
        if isinstance(leaf, torch.Tensor) and leaf.numel():
            groups.setdefault(leaf.data_ptr(), []).append(number)
    return [group for group in groups.values() if len(group) > 1]


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same structure with every tensor and array replaced; what was tied stays tied."""
    made: dict[int, Any] = {}

    def replaced(item: Any) -> Any:
        if isinstance(item, dict):
            return type(item)((name, replaced(child)) for name, child in item.items())
        if isinstance(item, list | tuple):
            return type(item)(replaced(child) for child in item)
        if not isinstance(item, torch.Tensor | np.ndarray):
            return item
        if id(item) not in made:
            made[id(item)] = change(item)
        return made[id(item)]

    return replaced(value)


def copied(leaf: Any) -> Any:
    """The leaf in memory of its own."""
    return raw(leaf).clone().view(leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf.copy()


def blank(leaf: Any) -> Any:
    """A leaf of the same dtype and shape that holds something else (zeros)."""
    if isinstance(leaf, np.ndarray):
        return np.zeros_like(leaf)
    return torch.zeros_like(raw(leaf)).view(leaf.dtype)


SEEDS = st.integers(0, 3)
NAMES = st.sampled_from(["a", "b", "w", "layer.0", "x/y", "~", "1", 1, -3, ""])
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 2**63), st.floats(), st.text(max_size=4), st.binary(max_size=4),
    st.sampled_from(["long text " * 200, b"long bytes" * 300]), st.lists(st.integers(0, 3), max_size=3),
    st.tuples(st.integers(0, 3), st.text(max_size=2)),
)  # fmt: skip
TORCH_TENSORS = st.builds(torch_tensor, st.sampled_from(TORCH_DTYPES), st.sampled_from(SHAPES), SEEDS)
NUMPY_ARRAYS = st.builds(numpy_array, st.sampled_from(NUMPY_DTYPES), st.sampled_from(SHAPES), SEEDS)
LARGE_TENSORS = st.builds(torch_tensor, st.just(torch.float32), st.just(LARGE), SEEDS)
LEAVES = st.one_of(TORCH_TENSORS, TORCH_TENSORS, NUMPY_ARRAYS, VALUES)


def _containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.dictionaries(NAMES, children, max_size=4),
        st.lists(children, max_size=3),
        st.lists(children, max_size=2).map(tuple),
        st.dictionaries(st.sampled_from("abc"), children, max_size=2).map(OrderedDict),
    )


@st.composite
def states(draw: st.DrawFn) -> dict[str, Any]:
    """Nested states; one in some has a tensor of several chunks, one in some has tied tensors."""
    state = draw(
        st.dictionaries(st.sampled_from(["model", "opt", "x"]), st.recursive(LEAVES, _containers, max_leaves=6))
    )
    if draw(st.integers(0, 4)) == 0:
        state["large"] = draw(LARGE_TENSORS)
    shared = draw(st.none() | TORCH_TENSORS.filter(lambda tensor: tensor.numel() > 0))
    if shared is not None:
        state |= {"tied": [shared, {"again": shared}], "also": shared}
    return state
