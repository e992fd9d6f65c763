"""Matches one stored tensor with one live tensor or array of the target.

Invariant: a dtype is never cast and a shape never broadcast; memory that overlaps itself or
may not be written is never filled. Must not know containers or Stateful objects.
"""

from __future__ import annotations

from typing import Any

import torch

from cas_ckpt.objects.spec import Spec
from cas_ckpt.objects.state import Container, Item, Path, StoredTensor, ValueItem, render_key
from cas_ckpt.training.capture.arrays import (
    Array,
    elements_spec,
    overlaps_itself,
    region_of,
    region_of_array,
    same_fields,
    spec_of,
    storage_bytes,
    target_of,
    view_of,
)
from cas_ckpt.training.capture.capture import supported
from cas_ckpt.training.capture.composites import PACKED_DTYPES, decompose, is_composite
from cas_ckpt.training.capture.sharded import is_sharded, sharded
from cas_ckpt.training.restore.ledger import Ledger
from cas_ckpt.training.restore.materialize import Builder, constant
from cas_ckpt.training.restore.memory import memory_of_array, memory_of_tensor
from cas_ckpt.training.state import GENERATOR, set_generator


def describe(item: Item) -> str:
    """What stands in a commit, in words."""
    if isinstance(item, StoredTensor):
        return f"{item.spec}"
    if isinstance(item, ValueItem):
        return f"a plain value of type {type(item.value).__name__}"
    return f"a {item.kind}" if isinstance(item, Container) else "something unknown"


def fits(found: Spec, stored: StoredTensor, path: Path, ledger: Ledger) -> bool:
    """Whether the specs are equal; notes the fault if not."""
    if found == stored.spec:
        return True
    what = "dtype" if found.shape == stored.spec.shape else "shape"
    ledger.faults.append(
        f"{render_key(path)}: the target is {found}, the commit holds {stored.spec}: give the target that {what}"
        + (" (no dtype is cast)" if what == "dtype" else "")
    )
    return False


def fill_tensor(tensor: torch.Tensor, item: Item, path: Path, ledger: Ledger) -> Builder:
    """A builder that gives `tensor` itself, filled; what does not fit is noted as a fault.

    Raises:
        UnsupportedValueError: a kind of tensor that cannot be filled (meta, nested, ...).
    """
    if is_sharded(tensor):
        return _fill_sharded(tensor, item, path, ledger)
    plain = supported(tensor, path)
    ledger.devices.add(plain.device)
    if is_composite(plain):
        return _replace_content(tensor, plain, item, path, ledger)
    if not isinstance(item, StoredTensor):
        ledger.faults.append(f"{render_key(path)}: the target is {spec_of(plain)}, the commit holds {describe(item)}")
    elif fits(spec_of(plain), item, path, ledger):
        if tensor_overlaps(plain):
            ledger.faults.append(f"{render_key(path)}: elements of the target share memory (expanded?): clone() it")
        elif is_read_only(plain, ledger):
            ledger.faults.append(_read_only(path))
        else:
            ledger.fill(path, item, target_of(plain), region_of(plain), memories=memory_of_tensor(plain))
    return constant(tensor)


def _fill_sharded(tensor: torch.Tensor, item: Item, path: Path, ledger: Ledger) -> Builder:
    """The same for a tensor that is divided over ranks: each fills what it holds."""
    divided = sharded(tensor, path, supported)
    ledger.devices.update(part.device for part in divided.locals)
    if not isinstance(item, StoredTensor):
        ledger.faults.append(f"{render_key(path)}: the target is {divided.spec}, the commit holds {describe(item)}")
    elif fits(divided.spec, item, path, ledger):
        if any(map(tensor_overlaps, divided.locals)):
            ledger.faults.append(f"{render_key(path)}: elements of the local tensor share memory: clone() it")
        elif any(is_read_only(part, ledger) for part in divided.locals):
            ledger.faults.append(_read_only(path))
        else:
            memories = [memory for part in divided.locals for memory in memory_of_tensor(part)]
            ledger.fill(path, item, divided.target(), divided.region, divided.placement, memories=memories)
    return constant(tensor)


def is_read_only(tensor: torch.Tensor, ledger: Ledger) -> bool:
    """Whether the operating system does not let a strided tensor be written."""
    return ledger.read_only.holds(memory_of_tensor(tensor))


def _read_only(path: Path) -> str:
    return f"{render_key(path)}: the memory of the target is mapped read-only (a file?): clone() it"


def tensor_overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements of a strided tensor may share memory."""
    return not tensor.is_contiguous() and tensor.numel() > 1 and overlaps_itself(tensor.shape, tensor.stride())


def _replace_content(tensor: torch.Tensor, plain: torch.Tensor, item: Item, path: Path, ledger: Ledger) -> Builder:
    """Sparse and quantized tensors: made new, then copied into the target's tensor."""
    own = decompose(plain, key=render_key(path))
    fault = _composite_fault(own, item)
    if fault:
        ledger.faults.append(f"{render_key(path)}: {fault}")
        return constant(tensor)
    build = ledger.made.builder(item, path)
    if plain.dtype in PACKED_DTYPES:
        return build  # torch cannot copy these: the parent gets a new tensor
    parts = _written_parts(plain)
    if any(is_read_only(part, ledger) for part in parts):
        ledger.faults.append(_read_only(path))
    ledger.note_written(path, [memory for part in parts for memory in memory_of_tensor(part)])

    def replace() -> torch.Tensor:
        with torch.no_grad():
            tensor.copy_(build())  # of a detached one the indices and scales would be its own
        return tensor

    return replace


def _written_parts(plain: torch.Tensor) -> list[torch.Tensor]:
    """The memory that `copy_` writes; a COO tensor gets new memory instead."""
    if plain.is_quantized:
        return [storage_bytes(plain)]
    if plain.layout == torch.sparse_coo:
        return []
    by_row = plain.layout in (torch.sparse_csr, torch.sparse_bsr)
    indices = (plain.crow_indices(), plain.col_indices()) if by_row else (plain.ccol_indices(), plain.row_indices())
    return [*indices, plain.values()]


def _composite_fault(own: Container, item: Item) -> str:
    """Why `item` cannot replace the content of a sparse or quantized tensor; empty if it can."""
    if not isinstance(item, Container) or item.kind != own.kind:
        return f"the target is a {own.kind} tensor, the commit holds {describe(item)}"
    if item.kind == "quantized":
        same = ("dtype", "scheme", "shape", "axis")
        return _difference({name: own.attrs.get(name) for name in same}, {name: item.attrs.get(name) for name in same})
    mine, theirs = _sparse_form(own), _sparse_form(item)
    return _difference(mine, theirs)


def _sparse_form(container: Container) -> dict[str, Any]:
    """What must agree for `copy_` to work: all but the number of elements of a COO tensor."""
    values: Any = container.children.get("values")
    shape = values.spec.shape if container.kind != "sparse_coo" else values.spec.shape[1:]
    return {"shape": container.attrs["shape"], "dtype": values.spec.dtype, "shape of values": shape}


def _difference(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    for name, value in mine.items():
        if theirs[name] != value:
            return f"{name} of the target is {value}, in the commit it is {theirs[name]}"
    return ""


def fill_array(array: Array, item: Item, path: Path, ledger: Ledger) -> Builder:
    """A builder that gives `array` itself, filled; what does not fit is noted as a fault.

    Raises:
        UnsupportedValueError: an array whose elements are no bytes.
    """
    key = render_key(path)
    stored = _elements(array, item)
    if stored is None:
        ledger.faults.append(f"{key}: the target is an array of {array.dtype}, the commit holds {describe(item)}")
    elif fits(elements_spec(array, key=key), stored, path, ledger):
        if may_fill(array):
            ledger.fill(path, stored, view_of(array), region_of_array(array), memories=memory_of_array(array))
        else:
            ledger.faults.append(f"{key}: the target is a read-only or overlapping array: copy() it")
    return constant(array)


def fill_generator(target: torch.Generator, item: Item, path: Path, ledger: Ledger) -> Builder:
    """A builder that sets `target` to the stored state and gives it; what does not fit is noted as a fault."""
    state = item.children.get("state") if isinstance(item, Container) and item.kind == GENERATOR else None
    if not isinstance(state, StoredTensor):
        ledger.faults.append(
            f"{render_key(path)}: the target is a generator of {target.device.type}, the commit holds {describe(item)}"
        )
    elif state.spec != spec_of(target.get_state()):
        ledger.faults.append(
            f"{render_key(path)}: the target is a generator of {target.device.type}, the commit holds the state of a "
            "generator of another kind of device: give the target one of that kind, or choose keys without it"
        )
    else:
        build = ledger.made.builder(state, path)
        return lambda: set_generator(target, build(), key=render_key(path))
    return constant(target)


def may_fill(array: Array) -> bool:
    """Whether the array can be written, each element by itself."""
    return array.flags.writeable and not (array.size and overlaps_itself(array.shape, array.strides, array.itemsize))


def _elements(array: Array, item: Item) -> StoredTensor | None:
    """The stored elements of an array; None if `item` is none, or one with other fields."""
    if array.dtype.names is not None and isinstance(item, Container) and item.kind == "structured":
        item = item.children.get("items", item) if same_fields(array, item.attrs) else item
    return item if isinstance(item, StoredTensor) else None
