"""Sparse and quantized tensors as containers of plain tensors, and back, new or in place of the content of a live one.

Invariant: `compose(decompose(t))` has the same layout, dtype, shape, indices and bits as `t`.
What a stored container claims is checked before memory is built from it: bytes may come
from strangers. Must not know how a commit is stored.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, cast

import torch

from cas_ckpt.errors import CorruptionError, UnsupportedValueError
from cas_ckpt.objects.spec import Spec
from cas_ckpt.objects.state import Container, Item, Name, Path, TensorItem
from cas_ckpt.training.capture.tensors import (
    DTYPE_NAMES,
    PACKED,
    QUANTIZED_MEMORY,
    SPARSE_LAYOUTS,
    elements_of,
    needed_bytes,
    part_dtype,
    refusal,
    storage_bytes,
    tensor_item,
    torch_dtype,
)
from cas_ckpt.training.torch_internals import EMPTY_AFFINE, EMPTY_PER_CHANNEL, private, sparse_parts

_KINDS = {layout: kind for kind, layout in SPARSE_LAYOUTS.items()}
_BY_ROW = (torch.sparse_csr, torch.sparse_bsr)

COMPOSITE_KINDS = frozenset({*SPARSE_LAYOUTS, "quantized"})
"""Kinds of containers that stand for one torch tensor."""

_CHANNEL_DTYPES = {
    "per_channel_affine": (torch.float64, torch.int64),
    "per_channel_affine_float_qparams": (torch.float32, torch.float32),
}
PACKED_DTYPES = frozenset(map(torch_dtype, PACKED))
"""Dtypes with several elements in a byte."""


def decompose(tensor: torch.Tensor, *, key: str) -> Container:
    """The container of a sparse or quantized tensor; shares its memory.

    Raises:
        UnsupportedValueError: a quantization scheme that the format does not have.
    """
    if tensor.is_quantized:
        return _quantized_parts(tensor, key)
    attrs, parts = _sparse_parts(tensor)
    return Container(_KINDS[tensor.layout], {name: tensor_item(part) for name, part in parts.items()}, attrs)


def _sparse_parts(tensor: torch.Tensor) -> tuple[dict[str, Any], dict[Name, torch.Tensor]]:
    tensor = tensor.detach()
    if tensor.layout == torch.sparse_coo:
        indices, values = sparse_parts(tensor)
        attrs = {"shape": tuple(tensor.shape), "coalesced": tensor.is_coalesced()}
        return attrs, {"indices": indices, "values": values}
    compressed, plain = compressed_indices(tensor)
    parts: dict[Name, torch.Tensor] = {"compressed_indices": compressed, "plain_indices": plain}
    return {"shape": tuple(tensor.shape)}, {**parts, "values": tensor.values()}


def check_indices(tensor: torch.Tensor, path: Path) -> None:
    """Refuse a sparse tensor which no restore could make, since its indices do not fit its shape.

    Raises:
        UnsupportedValueError: names the key.
    """
    if tensor.is_quantized:
        return
    try:
        _sparse(_KINDS[tensor.layout], *_sparse_parts(tensor))
    except RuntimeError as error:
        what = str(error).splitlines()[0]
        raise refusal(path, "sparse tensor whose indices do not fit it", f"{what}: make it anew") from error


def compressed_indices(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The compressed and the plain indices of a tensor of CSR, CSC, BSR or BSC."""
    if tensor.layout in _BY_ROW:
        return tensor.crow_indices(), tensor.col_indices()
    return tensor.ccol_indices(), tensor.row_indices()


def _quantized_parts(tensor: torch.Tensor, key: str) -> Container:
    scheme, dtype = tensor.qscheme(), DTYPE_NAMES[tensor.dtype]
    attrs: dict[str, Any] = {"dtype": dtype, "scheme": str(scheme).removeprefix("torch."), "shape": tuple(tensor.shape)}
    # The raw items; of dtypes with several elements in a byte as a row of bytes.
    memory = storage_bytes(tensor) if dtype in PACKED else tensor
    items = TensorItem(Spec(dtype, tuple(memory.shape)), elements_of(memory))
    children: dict[Name, Item] = {"int_repr": items}
    if scheme == torch.per_tensor_affine:
        attrs |= {"scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}
    elif scheme in (torch.per_channel_affine, torch.per_channel_affine_float_qparams):
        attrs["axis"] = tensor.q_per_channel_axis()
        children["scales"] = tensor_item(tensor.q_per_channel_scales())
        children["zero_points"] = tensor_item(tensor.q_per_channel_zero_points())
    else:
        raise UnsupportedValueError(f"{key}: the format has no quantization scheme {scheme}: dequantize the tensor")
    return Container("quantized", children, attrs)


def compose(kind: str, attrs: Any, parts: Mapping[Name, torch.Tensor], *, key: str) -> torch.Tensor:
    """The tensor of a container of `COMPOSITE_KINDS`.

    Raises:
        CorruptionError: attributes or parts that do not belong together.
        UnsupportedValueError: torch has no such tensors on the device of the parts.
    """
    try:
        with warnings.catch_warnings():  # "beta state" and "deprecated" say nothing to who only restores
            warnings.simplefilter("ignore", UserWarning)
            return _quantized(attrs, parts) if kind == "quantized" else _sparse(kind, attrs, parts)
    except NotImplementedError as error:
        device = next(iter(parts.values())).device
        raise UnsupportedValueError(
            f"{key}: torch {torch.__version__} cannot make a {kind} tensor on {device}: load it to the host"
        ) from error
    except (RuntimeError, TypeError, ValueError, LookupError) as error:
        raise CorruptionError(f"{key}: the parts of a {kind} tensor do not fit together: {error}") from error


def _sparse(kind: str, attrs: Any, parts: Mapping[Name, torch.Tensor]) -> torch.Tensor:
    shape, values = attrs["shape"], parts["values"]
    if kind == "sparse_coo":
        coalesced = bool(attrs["coalesced"])
        return torch.sparse_coo_tensor(
            parts["indices"], values, shape, device=values.device, is_coalesced=coalesced, check_invariants=True
        )
    indices = parts["compressed_indices"], parts["plain_indices"]
    return torch.sparse_compressed_tensor(
        *indices, values, shape, layout=SPARSE_LAYOUTS[kind], device=values.device, check_invariants=True
    )


def _quantized(attrs: Any, parts: Mapping[Name, torch.Tensor]) -> torch.Tensor:
    memory = parts["int_repr"].contiguous()
    if part_dtype(attrs["dtype"]) != memory.dtype or attrs["dtype"] not in (*QUANTIZED_MEMORY, *PACKED):
        raise ValueError(f"{attrs['dtype']} is stored as {memory.dtype}")
    made = _empty_quantized(attrs, parts, memory.device)
    place = storage_bytes(made)[: needed_bytes(made) if attrs["dtype"] not in PACKED else None]
    found = memory.reshape(-1).view(torch.uint8)
    if found.shape != place.shape:  # copy_ would repeat a single byte
        raise ValueError(f"{len(found)} bytes where {len(place)} should be")
    place.copy_(found)
    return made


def _empty_quantized(attrs: Any, parts: Mapping[Name, torch.Tensor], device: torch.device) -> torch.Tensor:
    shape, dtype = attrs["shape"], torch_dtype(attrs["dtype"])
    if attrs["scheme"] == "per_tensor_affine":
        scale, zero_point = float(attrs["scale"]), int(attrs["zero_point"])
        made = private(EMPTY_AFFINE)(shape, scale=scale, zero_point=zero_point, dtype=dtype, device=device)
        return cast(torch.Tensor, made)
    axis, scales, zero_points = attrs["axis"], parts["scales"], parts["zero_points"]
    if (scales.dtype, zero_points.dtype) != _CHANNEL_DTYPES[attrs["scheme"]]:
        raise ValueError(f"scales of {scales.dtype} and zero points of {zero_points.dtype}")
    if not 0 <= axis < len(shape) or not scales.shape == zero_points.shape == (shape[axis],):
        raise ValueError(f"{tuple(scales.shape)} scales along axis {axis} of {shape}")
    make = private(EMPTY_PER_CHANNEL)
    made = make(shape, scales=scales, zero_points=zero_points, axis=axis, dtype=dtype, device=device)
    return cast(torch.Tensor, made)


# --- what can be restored into one that is there ----------------------------------------------


def written_parts(plain: torch.Tensor) -> list[torch.Tensor]:
    """The memory that `copy_` writes; a COO tensor gets new memory instead."""
    if plain.is_quantized:
        return [storage_bytes(plain)]
    if plain.layout == torch.sparse_coo:
        return []
    return [*compressed_indices(plain), plain.values()]


_VALUES_SHAPE = "shape of values"

_OTHER_VALUES = (
    " (torch copies between sparse tensors of as many values only): in a dict or list of yours put None in its place, "
    "which becomes a new tensor; to a module assign what load() gives"
)


def composite_fault(own: Container, item: Item, held: str) -> str:
    """Why `item` cannot replace the content of a sparse or quantized tensor; empty if it can."""
    if not isinstance(item, Container) or item.kind != own.kind:
        return f"the target is a {own.kind} tensor, the commit holds {held}"
    try:
        mine, theirs = _composite_form(own), _composite_form(item)
    except (AttributeError, LookupError, TypeError):  # what is stored may come from strangers
        return f"the commit holds a {own.kind} tensor of which parts are missing: restore it from a copy"
    for name, value in mine.items():
        if theirs[name] != value:
            fault = f"{name} of the target is {value}, in the commit it is {theirs[name]}"
            return fault + (_OTHER_VALUES if name == _VALUES_SHAPE else "")
    return ""


def _composite_form(container: Container) -> dict[str, Any]:
    """The properties that must agree for `copy_` to work: all but the number of elements of a COO tensor."""
    if container.kind == "quantized":
        return {name: container.attrs.get(name) for name in ("dtype", "scheme", "shape", "axis")}
    values: Any = container.children.get("values")
    shape = values.spec.shape if container.kind != "sparse_coo" else values.spec.shape[1:]
    return {"shape": container.attrs["shape"], "dtype": values.spec.dtype, _VALUES_SHAPE: shape}
