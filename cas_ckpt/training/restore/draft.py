"""What a restore will do, and what speaks against it: collected before anything is touched.

    1. Each tensor, array and generator of the target is matched with what the commit holds for it: what fits
       becomes a copy, what does not becomes a fault.
    2. What only one of the two has is noted as missing or unexpected.
    3. `raise_mismatch` raises once, with all of it, before the first byte moves.

Invariant: nothing is written here. A dtype is never cast and a shape never broadcast; memory that overlaps itself
or other targets, or that may not be written, is never filled. Must not know Stateful objects or where bytes are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch

from cas_ckpt.errors import InvalidInputError, MismatchError, UnsupportedValueError, shown_value
from cas_ckpt.objects.layouts import LayoutObject
from cas_ckpt.objects.patterns import KeyPatterns
from cas_ckpt.objects.spec import Box, Placement, Spec
from cas_ckpt.objects.state import ArrayTarget, Container, Item, Path, StoredTensor, TensorCopy, ValueItem, render_key
from cas_ckpt.training.capture.composites import PACKED_DTYPES, decompose
from cas_ckpt.training.capture.sharded import sharded
from cas_ckpt.training.capture.tensors import (
    PLAIN_TENSORS,
    Array,
    elements_of,
    elements_spec,
    is_sharded,
    memory_of,
    overlaps_itself,
    region_of_array,
    same_fields,
    simple_item,
    spec_of,
    storage_bytes,
    supported,
    view_of,
)
from cas_ckpt.training.per_rank import GENERATOR, set_generator
from cas_ckpt.training.restore.materialize import Builder, NewObjects
from cas_ckpt.training.restore.memory import (
    Memory,
    ReadOnlyMemory,
    memory_of_array,
    memory_of_region,
    memory_of_tensor,
    overlapping,
)

SHOWN = 10
"""Keys of each kind that a message names before it counts."""


@dataclass(frozen=True, slots=True)
class Load:
    """One call of a `load_state_dict`, or what takes its place."""

    target: Any
    path: Path
    run: Callable[[], Any]


@dataclass(slots=True, unsafe_hash=True)  # not frozen, as TensorItem, but never changed
class Written:
    """Memory that a restore writes, and what into it.

    Attributes:
        key: Its name in messages, or its path.
        content: The stored tensor, and its placement or its box; None: something else.
    """

    memory: Memory
    key: str | Path
    content: tuple[StoredTensor, Placement | Box | None] | None


def overlap_faults(written: Sequence[Written]) -> list[str]:
    """A sentence for each pair of targets that share memory without being one tensor in target and commit."""
    faults = []
    for pair in overlapping(list(map(attrgetter("memory"), written))):
        one, other = (written[at] for at in pair)
        if one.content is not None and other.content is not None and one.memory.is_same(other.memory):
            (stored, part), (other_stored, other_part) = one.content, other.content
            if part == other_part and _same_content(stored, other_stored):
                continue
        names = " and ".join(
            sorted(each.key if isinstance(each.key, str) else render_key(each.key) for each in (one, other))
        )
        faults.append(f"{names} overlap in the target's memory: one would overwrite the other, clone() one")
    return faults


class RestoreDraft:
    """Collects the copies, loads and mismatches of one restore.

    Attributes:
        copies: All that is to be read.
        loads: What Stateful objects are to be given, in the order of the state.
        missing: Paths that the target has and the commit does not have.
        unexpected: Paths that the commit has and the target does not have.
        faults: Sentences, each naming a key, what was wanted and found, and what to do.
        devices: Where the targets are, other than the host.
    """

    def __init__(
        self, selection: KeyPatterns, *, layout: Callable[[], LayoutObject] = LayoutObject, strict: bool = True
    ) -> None:
        self.selection = selection
        self.strict = strict
        self.copies: list[TensorCopy] = []
        self.loads: list[Load] = []
        self.missing: list[Path] = []
        self.unexpected: list[Path] = []
        self.faults: list[str] = []
        self.devices: set[torch.device] = set()
        self._read_layout = layout
        self._filled: dict[Any, tuple[Path, StoredTensor]] = {}
        self._values_of_missing: list[tuple[Path, Any]] = []
        self._written: list[Written] = []

    @cached_property
    def made(self) -> NewObjects:
        """New objects for what the target does not have; their copies are among `copies`."""
        return NewObjects(layout=self.layout, copies=self.copies)

    @cached_property
    def layout(self) -> LayoutObject:
        """What the commit says of the state besides its content; read when it is asked for."""
        return self._read_layout()

    @cached_property
    def _read_only(self) -> ReadOnlyMemory:
        """What the operating system does not let this process write."""
        return ReadOnlyMemory()

    def note_missing(self, path: Path, value: Any = None) -> None:
        """The commit has nothing at `path`, where the target has `value`; only counts if it was asked for.

        Raises:
            InvalidInputError: the target has a name there that no key can hold.
        """
        if not isinstance(path[-1], (str, int)):
            if not self.selection.selects(path[:-1]):
                return
            where = render_key(path[:-1]) or "the target"
            raise InvalidInputError(f"{where} has the key {shown_value(path[-1])}: give text or integers as keys")
        if self.selection.selects(path):
            self.missing.append(path)
            self._values_of_missing.append((path, value))

    def settle_missing(self) -> None:
        """Take what is filled under another key out of `missing`: files often leave out the second of tied tensors."""
        filled = {path for path, value in self._values_of_missing if self._is_filled(value, path)}
        self.missing = [path for path in self.missing if path not in filled]
        self._values_of_missing.clear()

    def _is_filled(self, value: Any, path: Path) -> bool:
        if not isinstance(value, torch.Tensor):
            return False
        try:
            if type(value) not in PLAIN_TENSORS and is_sharded(value):
                return sharded(value, path, supported).region in self._filled
            plain = supported(value, path)
        except UnsupportedValueError:  # nothing fills it
            return False
        is_plain = plain.layout == torch.strided and not plain.is_quantized and plain.numel() > 0
        return is_plain and memory_of(plain) in self._filled

    def note_missing_names(self, names: Iterable[str], path: Path) -> set[str]:
        """Those of the parts `names` of the object at `path` that were asked for; they are noted as missing."""
        missing = {name for name in names if self.selection.selects((*path, name))}
        self.missing += [(*path, name) for name in sorted(missing)]
        return missing

    # ------------------------------------------------------------ tensors

    def fill_tensor(self, tensor: torch.Tensor, item: Item, path: Path) -> Builder:
        """A builder that gives `tensor` itself, filled; what does not fit is noted as a fault.

        Raises:
            UnsupportedValueError: a kind of tensor that cannot be filled (meta, nested, ...).
        """
        placement: Placement | None = None
        elements: Any
        parts: Sequence[torch.Tensor] = ()
        memories: list[Memory] = []
        simple = simple_item(tensor) if type(tensor) in PLAIN_TENSORS else None
        if simple is not None and simple.identity is not None:  # nearly all
            found, elements, region = simple.spec, simple.source, simple.identity[0]
            memories.append(memory_of_region(region))
        elif type(tensor) not in PLAIN_TENSORS and is_sharded(tensor):
            divided = sharded(tensor, path, supported)  # each rank fills what it holds
            found, placement, parts = divided.spec, divided.placement, divided.locals
            elements, region, shared = divided.elements(), divided.region, "elements of the local tensor share memory"
        else:
            plain = supported(tensor, path)
            if plain.layout != torch.strided or plain.is_quantized:
                return self._replace_content(tensor, plain, item, path)
            found, parts = spec_of(plain), (plain,)
            elements, region = elements_of(plain), memory_of(plain) if plain.numel() else None
            shared = "elements of the target share memory (expanded?)"
        overlaps = False
        for part in parts:
            memories += memory_of_tensor(part)
            overlaps = overlaps or (not part.is_contiguous() and overlaps_self(part))
            if part.device.type != "cpu":
                self.devices.add(part.device)
        if not isinstance(item, StoredTensor):
            self.faults.append(f"{render_key(path)}: the target is {found}, the commit holds {describe(item)}")
        elif found is not item.spec and found != item.spec:
            self._note_other_spec(found, item, path)
        elif overlaps:
            self.faults.append(f"{render_key(path)}: {shared}: clone() it")
        elif self._read_only.holds(memories):
            self.faults.append(_read_only_fault(path))
        else:
            self._fill(path, item, elements, region, placement, memories=memories)
        return lambda: tensor

    def may_fill(self, tensor: torch.Tensor, stored: StoredTensor, path: Path) -> bool:
        """Whether `fill_tensor` could fill a tensor which need not be filled; notes a fault if the specs differ."""
        plain = supported(tensor, path)
        if plain.layout != torch.strided or plain.is_quantized or overlaps_self(plain):
            return False
        if self._read_only.holds(memory_of_tensor(plain)):
            return False
        if spec_of(plain) != stored.spec:
            self._note_other_spec(spec_of(plain), stored, path)
            return False
        return True

    def _note_other_spec(self, found: Spec, stored: StoredTensor, path: Path) -> None:
        what = "dtype" if found.shape == stored.spec.shape else "shape"
        self.faults.append(
            f"{render_key(path)}: the target is {found}, the commit holds {stored.spec}: give the target that {what}"
            + (" (no dtype is cast)" if what == "dtype" else "")
        )

    def _fill(
        self,
        path: Path,
        stored: StoredTensor,
        target: ArrayTarget,
        region: Any,
        placement: Placement | None = None,
        *,
        memories: Sequence[Memory],
    ) -> None:
        """Fill `target` with `stored`; memory that is tied is filled once.

        Args:
            region: Names the memory of the target, None if nothing else can share it.
            placement: How the target is divided over the ranks; None: all of it is wanted here.
            memories: Where the target is, one for each of its parts in this process.
        """
        mine = (path, stored)
        first = mine if region is None else self._filled.setdefault(region, mine)
        if first is mine:
            self.copies.append(TensorCopy(path, stored, target, placement))
            for memory in memories:
                self._written.append(Written(memory, path, (stored, placement)))
        elif not _same_content(first[1], stored):
            names = f"{render_key(first[0])} and {render_key(path)}"
            self.faults.append(
                f"{names} are one tensor in the target but two different ones in the commit: untie the target"
            )

    def _replace_content(self, tensor: torch.Tensor, plain: torch.Tensor, item: Item, path: Path) -> Builder:
        """`fill_tensor` for sparse and quantized tensors: made new, then copied into the target's tensor."""
        if plain.device.type != "cpu":
            self.devices.add(plain.device)
        fault = _composite_fault(decompose(plain, key=render_key(path)), item)
        if fault:
            self.faults.append(f"{render_key(path)}: {fault}")
            return lambda: tensor
        build = self.made.builder(item, path)
        if plain.dtype in PACKED_DTYPES:
            return build  # torch cannot copy these: the parent gets a new tensor
        memories = [memory for part in _written_parts(plain) for memory in memory_of_tensor(part)]
        if self._read_only.holds(memories):
            self.faults.append(_read_only_fault(path))
        self._written += [Written(memory, path, None) for memory in memories]

        def replace() -> torch.Tensor:
            with torch.no_grad():
                tensor.copy_(build())  # of a detached one the indices and scales would be its own
            return tensor

        return replace

    # ------------------------------------------------------------ arrays and generators

    def fill_array(self, array: Array, item: Item, path: Path) -> Builder:
        """A builder that gives `array` itself, filled; what does not fit is noted as a fault.

        Raises:
            UnsupportedValueError: an array whose elements are no bytes.
        """
        key, stored = render_key(path), item
        if array.dtype.names is not None and isinstance(item, Container) and item.kind == "structured":
            stored = item.children.get("items", item) if same_fields(array, item.attrs) else item
        if not isinstance(stored, StoredTensor):
            self.faults.append(f"{key}: the target is an array of {array.dtype}, the commit holds {describe(item)}")
        elif (found := elements_spec(array, path)) != stored.spec:
            self._note_other_spec(found, stored, path)
        elif may_fill_array(array):
            self._fill(path, stored, view_of(array), region_of_array(array), memories=memory_of_array(array))
        else:
            self.faults.append(f"{key}: the target is a read-only or overlapping array: copy() it")
        return lambda: array

    def fill_generator(self, target: torch.Generator, item: Item, path: Path) -> Builder:
        """A builder that sets `target` to the stored state and gives it; what does not fit is noted as a fault."""
        key = render_key(path)
        state = item.children.get("state") if isinstance(item, Container) and item.kind == GENERATOR else None
        if isinstance(state, StoredTensor) and state.spec == spec_of(target.get_state()):
            build = self.made.builder(state, path)
            return lambda: set_generator(target, build(), key=key)
        held = (
            "the state of a generator of another kind of device: give the target one of that kind, or choose keys "
            "without it"
            if isinstance(state, StoredTensor)
            else describe(item)
        )
        self.faults.append(f"{key}: the target is a generator of {target.device.type}, the commit holds {held}")
        return lambda: target

    def raise_mismatch(self) -> None:
        """Raise MismatchError if anything speaks against the restore."""
        faults = self.faults + overlap_faults(self._written)
        found = []
        if self.strict and self.missing:
            found.append(_counted("in the target but not in the commit", list(map(render_key, self.missing))))
        if self.strict and self.unexpected:
            found.append(_counted("in the commit but not in the target", list(map(render_key, self.unexpected))))
        if found:
            found.append("pass strict=False to restore only what both have, or keys=... to choose")
        if faults:
            found.append(_counted("do not fit", faults))
        if found:
            raise MismatchError("target and commit do not agree; nothing was touched\n  " + "\n  ".join(found))


def _counted(head: str, lines: Sequence[str]) -> str:
    shown = list(lines[:SHOWN])
    if len(lines) > SHOWN:
        shown.append(f"... and {len(lines) - SHOWN} more")
    return f"{head} ({len(lines)}):" + "".join(f"\n    {line}" for line in shown)


def _same_content(a: StoredTensor, b: StoredTensor) -> bool:
    """Whether two stored tensors have the same elements."""
    return a.spec == b.spec and a.node == b.node and a.inline == b.inline


def describe(item: Item) -> str:
    """What a commit holds, in words."""
    if isinstance(item, StoredTensor):
        return f"{item.spec}"
    if isinstance(item, ValueItem):
        return f"a plain value of type {type(item.value).__name__}"
    return f"a {item.kind}" if isinstance(item, Container) else "something unknown"


def overlaps_self(tensor: torch.Tensor) -> bool:
    """Whether elements of a strided tensor may share memory."""
    return not tensor.is_contiguous() and tensor.numel() > 1 and overlaps_itself(tensor.shape, tensor.stride())


def may_fill_array(array: Array) -> bool:
    """Whether the array can be written, each element by itself."""
    return array.flags.writeable and not (array.size and overlaps_itself(array.shape, array.strides, array.itemsize))


def _read_only_fault(path: Path) -> str:
    return f"{render_key(path)}: the memory of the target is mapped read-only (a file?): clone() it"


def _written_parts(plain: torch.Tensor) -> list[torch.Tensor]:
    """The memory that `copy_` writes; a COO tensor gets new memory instead."""
    if plain.is_quantized:
        return [storage_bytes(plain)]
    if plain.layout == torch.sparse_coo:
        return []
    by_row = plain.layout in (torch.sparse_csr, torch.sparse_bsr)
    indices = (plain.crow_indices(), plain.col_indices()) if by_row else (plain.ccol_indices(), plain.row_indices())
    return [*indices, plain.values()]


_VALUES_SHAPE = "shape of values"

_OTHER_VALUES = (
    " (torch copies between sparse tensors of as many values only): in a dict or list of yours put None in its place, "
    "which becomes a new tensor; to a module assign what load() gives"
)


def _composite_fault(own: Container, item: Item) -> str:
    """Why `item` cannot replace the content of a sparse or quantized tensor; empty if it can."""
    if not isinstance(item, Container) or item.kind != own.kind:
        return f"the target is a {own.kind} tensor, the commit holds {describe(item)}"
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
    """What must agree for `copy_` to work: all but the number of elements of a COO tensor."""
    if container.kind == "quantized":
        return {name: container.attrs.get(name) for name in ("dtype", "scheme", "shape", "axis")}
    values: Any = container.children.get("values")
    shape = values.spec.shape if container.kind != "sparse_coo" else values.spec.shape[1:]
    return {"shape": container.attrs["shape"], "dtype": values.spec.dtype, _VALUES_SHAPE: shape}
