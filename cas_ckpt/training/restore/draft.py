"""The copies and loads of a restore, and all that speaks against it: collected before anything is touched.

    1. Each tensor, array and generator of the target is matched with what the commit holds for it: what fits
       becomes a copy, what does not becomes a fault.
    2. What only one of the two has is noted as missing or unexpected.
    3. `raise_mismatch` raises once, with all of it and with targets that overlap in memory, before the first byte
       moves.

Invariant: nothing is written here. A dtype is never cast and a shape never broadcast; memory that overlaps itself
or other targets, or that may not be written, is never filled: two targets that share a byte are always found. Must not
know Stateful objects or where bytes are stored.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from operator import attrgetter
from pathlib import Path as FilePath
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from cas_ckpt.errors import InvalidInputError, MismatchError, UnsupportedValueError, shown_value
from cas_ckpt.objects.layouts import LayoutObject
from cas_ckpt.objects.patterns import KeyPatterns
from cas_ckpt.objects.spec import Box, Placement, Spec
from cas_ckpt.objects.state import (
    ArrayTarget,
    Container,
    DerivedTensor,
    Item,
    Name,
    Path,
    StoredTensor,
    TensorCopy,
    ValueItem,
    render_key,
)
from cas_ckpt.training.capture.composites import PACKED_DTYPES, composite_fault, decompose, written_parts
from cas_ckpt.training.capture.sharded import sharded
from cas_ckpt.training.capture.tensors import (
    DTYPE_NAMES,
    PLAIN_TENSORS,
    Array,
    CopiedTensor,
    HostTensor,
    Region,
    elements_of,
    elements_spec,
    is_sharded,
    overlaps_itself,
    same_fields,
    simple_memory,
    spec_of,
    supported,
    view_of,
)
from cas_ckpt.training.per_rank import GENERATOR, set_generator
from cas_ckpt.training.restore.materialize import Builder, NewObjects

SHOWN = 10
"""Keys of each kind that a message names before it counts."""


@dataclass(frozen=True, slots=True)
class Load:
    """One call of a `load_state_dict`, or what takes its place."""

    target: Any
    path: Path
    run: Callable[[], Any]


class RestoreDraft:
    """Collects the copies, loads and mismatches of one restore.

    Attributes:
        copies: All that is to be read.
        loads: What Stateful objects are to be given, in the order of the state.
        missing: Paths that the target has and the commit does not have, with what is there until it is settled.
        unexpected: Paths that the commit has and the target does not have.
        faults: Sentences, each naming a key, what was wanted and found, and what to do.
        devices: Where the targets are, other than the host.
        tied: Tensors whose memory is filled through another target; torch may count their changes on their own.
    """

    def __init__(
        self, selection: KeyPatterns, *, layout: Callable[[], LayoutObject] = LayoutObject, strict: bool = True
    ) -> None:
        self.selection = selection
        self.strict = strict
        self.copies: list[TensorCopy] = []
        self.loads: list[Load] = []
        self.missing: dict[Path, Any] = {}
        self.unexpected: list[Path] = []
        self.faults: list[str] = []
        self.devices: set[torch.device] = set()
        self.tied: list[torch.Tensor] = []
        self._read_layout = layout
        self._filled: dict[Any, tuple[Path, StoredTensor]] = {}
        self._written: list[Memory] = []

    @cached_property
    def made(self) -> NewObjects:
        """New objects for what the target does not have; their copies are among `copies`."""
        return NewObjects(layout=self.layout, copies=self.copies)

    @cached_property
    def layout(self) -> LayoutObject:
        """The layout of the commit: ties, order in memory, versions of modules; read when it is asked for."""
        return self._read_layout()

    @cached_property
    def _read_only(self) -> ReadOnlyMemory:
        """The memory that this process may not write, as it was when this was first asked."""
        return ReadOnlyMemory()

    def note_missing(self, path: Path, value: Any) -> None:
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
            self.missing[path] = value

    def settle_missing(self) -> None:
        """Take what is filled under another key out of `missing`: files often leave out the second of tied tensors."""
        self.missing = {path: None for path, value in self.missing.items() if not self._is_filled(value, path)}

    def _is_filled(self, value: Any, path: Path) -> bool:
        if not isinstance(value, torch.Tensor):
            return False
        try:
            if type(value) not in PLAIN_TENSORS and is_sharded(value):
                return sharded(value, path, supported).region in self._filled
            plain = supported(value, path)
        except UnsupportedValueError:  # nothing fills it
            return False
        if plain.layout != torch.strided or plain.is_quantized:
            return False
        return any(memory.same() in self._filled for memory in memory_of_tensor(plain, path))

    def note_missing_names(self, names: Iterable[str], path: Path) -> set[str]:
        """Those of the parts `names` of the object at `path` that were asked for; they are noted as missing."""
        missing = {name for name in names if self.selection.selects((*path, name))}
        self.missing.update(((*path, name), None) for name in sorted(missing))
        return missing

    # ------------------------------------------------------------ tensors

    def fill_tensor(self, tensor: torch.Tensor, item: Item, path: Path) -> Builder:
        """A builder that gives `tensor` itself, filled; what does not fit is noted as a fault.

        Raises:
            UnsupportedValueError: a kind of tensor that cannot be filled (meta, nested, ...).
        """
        if type(tensor) in PLAIN_TENSORS and (simple := simple_memory(tensor)) is not None:  # nearly all
            spec, stride, _, address, offset = simple
            form = _form_of_tensor(spec.shape, stride, tensor.dtype, False, False)
            low = address + offset * spec.item_bytes
            self._fill(path, item, spec, elements_of(tensor), [Memory("cpu", low, low + form.extent, form, path)])
            return lambda: tensor
        if type(tensor) not in PLAIN_TENSORS and is_sharded(tensor):
            divided = sharded(tensor, path, supported)  # each rank fills what it holds
            memories = self._memories_of(divided.locals, path)
            fault = "elements of the local tensor share memory" if any(map(overlaps_self, divided.locals)) else ""
            self._fill(
                path, item, divided.spec, divided.elements(), memories, divided.placement, region=divided.region,
                fault=fault,
            )  # fmt: skip
            return lambda: tensor
        plain = supported(tensor, path)
        if plain.layout != torch.strided or plain.is_quantized:
            return self._replace_content(tensor, plain, item, path)
        fault = "elements of the target share memory (expanded?)" if overlaps_self(plain) else ""
        self._fill(path, item, spec_of(plain), elements_of(plain), self._memories_of([plain], path), fault=fault)
        return lambda: tensor

    def _memories_of(self, parts: Sequence[torch.Tensor], path: Path) -> list[Memory]:
        """The memory of the strided tensors that a target consists of here; notes where they are."""
        self.devices.update(part.device for part in parts if not part.is_cpu)
        return [memory for part in parts for memory in memory_of_tensor(part, path)]

    def may_fill(self, tensor: torch.Tensor, stored: StoredTensor, path: Path) -> bool:
        """Whether `fill_tensor` could fill a tensor which need not be filled; notes a fault if the specs differ."""
        plain = supported(tensor, path)
        if plain.layout != torch.strided or plain.is_quantized or overlaps_self(plain):
            return False
        if self._read_only.holds(memory_of_tensor(plain, path)):
            return False
        if spec_of(plain) != stored.spec:
            self.faults.append(f"{render_key(path)}: {_other_spec(spec_of(plain), stored)}")
            return False
        return True

    def _fill(
        self,
        path: Path,
        item: Item,
        found: Spec,
        target: ArrayTarget,
        memories: Sequence[Memory],
        placement: Placement | None = None,
        *,
        region: Region | None = None,
        fault: str = "",
    ) -> None:
        """Fill `target`, which is `found`, with `item`; memory that is tied is filled once. What does not fit is noted.

        Args:
            memories: Where the target is, one for each of its parts in this process; none if it is empty.
            placement: How the target is divided over the ranks; None: all of it is wanted here.
            region: Names the memory of a divided target.
            fault: Why the target cannot be filled with anything.
        """
        if not isinstance(item, StoredTensor):
            fault = f"the target is {found}, the commit holds {describe(item)}"
        elif found is not item.spec and found != item.spec:
            fault = _other_spec(found, item)
        elif fault:
            fault = f"{fault}: clone() it"
        elif self._read_only.holds(memories):
            fault = _READ_ONLY
        else:
            mine = (path, item)
            if region is None and memories:
                region = memories[0].same()
            first = mine if region is None else self._filled.setdefault(region, mine)
            if first is mine:
                self.copies.append(TensorCopy(path, item, target, placement))
                for memory in memories:
                    memory.content = (item, placement)
                self._written += memories
            elif not _same_content(first[1], item):
                self.faults.append(
                    f"{render_key(first[0])} and {render_key(path)} are one tensor in the target but two different "
                    "ones in the commit: untie the target"
                )
            elif isinstance(target, HostTensor | CopiedTensor):
                self.tied.append(target.tensor)
            return
        self.faults.append(f"{render_key(path)}: {fault}")

    def _replace_content(self, tensor: torch.Tensor, plain: torch.Tensor, item: Item, path: Path) -> Builder:
        """`fill_tensor` for sparse and quantized tensors: made new, then copied into the target's tensor."""
        if plain.device.type != "cpu":
            self.devices.add(plain.device)
        fault = composite_fault(decompose(plain, key=render_key(path)), item, describe(item))
        if fault:
            self.faults.append(f"{render_key(path)}: {fault}")
            return lambda: tensor
        build = self.made.builder(item, path)
        if plain.dtype in PACKED_DTYPES:
            return build  # torch cannot copy these: the parent gets a new tensor
        memories = [memory for part in written_parts(plain) for memory in memory_of_tensor(part, path)]
        if self._read_only.holds(memories):
            self.faults.append(f"{render_key(path)}: {_READ_ONLY}")
        self._written += memories

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
        elif (found := elements_spec(array, path)) == stored.spec and not may_fill_array(array):
            self.faults.append(f"{key}: the target is a read-only or overlapping array: copy() it")
        else:
            self._fill(path, stored, found, view_of(array), memory_of_array(array, path))
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
    parts = [each.parts if isinstance(each, DerivedTensor) else () for each in (a, b)]
    return a.spec == b.spec and a.node == b.node and a.inline == b.inline and parts[0] == parts[1]


def children(item: Item | None) -> Mapping[Name, Item]:
    """The named items of a container, or of a value that is a mapping or a list."""
    if isinstance(item, Container):
        return item.children
    value = item.value if isinstance(item, ValueItem) else None
    if isinstance(value, list):
        value = dict(enumerate(value))
    return {name: ValueItem(child) for name, child in value.items()} if isinstance(value, Mapping) else {}


def describe(item: Item) -> str:
    """`item` in words."""
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


def _other_spec(found: Spec, stored: StoredTensor) -> str:
    what = "dtype (no dtype is cast but by a key_map)" if found.shape == stored.spec.shape else "shape"
    return f"the target is {found}, the commit holds {stored.spec}: give the target that {what}"


_READ_ONLY = "the memory of the target is mapped read-only (a file?): clone() it"


# --- where targets lie in memory --------------------------------------------------------------
# Targets are sorted by address. Of those whose ranges hang together, two strided ones never share a byte if they are
# apart modulo some step, as the columns of a matrix are; whatever is left `numpy.shares_memory` decides, pair by pair.

MAX_PAIRS = 1 << 18
"""Pairs that are decided one by one, at most; of more than these each counts as overlapping."""

_MAX_WORK = 1 << 16
"""Steps that `numpy.shares_memory` may take for one pair; a harder one counts as overlapping."""

_MAX_STEPS = 8
"""Steps that targets are compared modulo, the most frequent ones."""

_MAPS = FilePath("/proc/self/maps")


class _Form(NamedTuple):
    """How the elements of a tensor lie, apart from where: one object for all tensors that are alike.

    Attributes:
        before: Bytes from the lowest address to the element with index 0 in every dimension.
        extent: Bytes from the lowest address to behind the highest.
        run: Bytes that lie in one piece: all of them, or those of one element.
        dims: (step, size) of the dimensions that such pieces are apart by; steps in bytes, all positive.
        order: Equal where the same elements are read in the same way and order.
    """

    before: int
    extent: int
    run: int
    dims: tuple[tuple[int, int], ...]
    order: tuple[Any, ...]


def _form(shape: tuple[int, ...], stride: tuple[int, ...], unit: int, item_bytes: int, *reading: Any) -> _Form:
    """Of elements that are `stride` times `unit` bytes apart; `reading` says how their bytes are read."""
    axes = tuple((step * unit, size) for step, size in zip(stride, shape, strict=True) if size > 1)
    before = -sum(step * (size - 1) for step, size in axes if step < 0)
    dims = tuple((abs(step), size) for step, size in axes if step)
    extent = sum(step * (size - 1) for step, size in dims) + item_bytes
    order = (tuple(shape), axes, item_bytes, reading)
    if extent == prod(size for _, size in dims) * item_bytes:
        return _Form(before, extent, extent, (), order)
    return _Form(before, extent, item_bytes, dims, order)


@lru_cache(maxsize=4096)
def _form_of_tensor(shape: Any, stride: tuple[int, ...], dtype: torch.dtype, is_conj: bool, is_neg: bool) -> _Form:
    return _form(shape, stride, dtype.itemsize, dtype.itemsize, DTYPE_NAMES.get(dtype, dtype), is_conj, is_neg)


@lru_cache(maxsize=4096)
def _form_of_array(shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]) -> _Form:
    return _form(shape, strides, 1, dtype.itemsize, dtype.name if dtype.isnative else dtype.str, False, False)


@dataclass(slots=True, eq=False)
class Memory:
    """The memory of one tensor or array that has elements, and what a restore writes there.

    Attributes:
        space: What the addresses count in: "cpu", or a device.
        low, high: The lowest address, and the one behind the highest.
        key: Its name in messages, or its path.
        content: The stored tensor, and its placement or its box; None: something else.
    """

    space: str
    low: int
    high: int
    form: _Form
    key: str | Path
    content: tuple[StoredTensor, Placement | Box | None] | None = None

    def same(self) -> tuple[Any, ...]:
        """Equal for the same elements, read in the same way and order."""
        return self.space, self.low + self.form.before, self.form.order

    @property
    def name(self) -> str:
        return self.key if isinstance(self.key, str) else render_key(self.key)


def memory_of_tensor(tensor: torch.Tensor, key: str | Path) -> list[Memory]:
    """The memory of a strided tensor; nothing for one without elements."""
    low = tensor.data_ptr() if tensor.numel() else 0
    if not low:
        return []
    form = _form_of_tensor(tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return [Memory("cpu" if tensor.is_cpu else str(tensor.device), low, low + form.extent, form, key)]


def memory_of_array(array: Array, key: str | Path) -> list[Memory]:
    """The memory of an array; nothing for one without elements."""
    if not array.size:
        return []
    form = _form_of_array(array.shape, array.strides, array.dtype)
    low = array.__array_interface__["data"][0] - form.before
    return [Memory("cpu", low, low + form.extent, form, key)]


class ReadOnlyMemory:
    """The parts of this process's memory that the operating system does not let it write, as they are now.

    Known on Linux only; elsewhere nothing counts as read-only.
    """

    def __init__(self) -> None:
        try:
            lines = _MAPS.read_text("ascii", "replace").splitlines()
        except OSError:
            lines = []
        places = [place for place, rights, *_ in (line.split(maxsplit=2) for line in lines) if "w" not in rights]
        ranges = sorted(tuple(int(end, 16) for end in place.split("-")) for place in places)
        self._starts, self._ends = [start for start, _ in ranges], [end for _, end in ranges]

    def holds(self, memories: Iterable[Memory]) -> bool:
        """Whether a byte of `memories` cannot be written."""
        for memory in memories:
            at = bisect_left(self._starts, memory.high) - 1
            if memory.space == "cpu" and at >= 0 and self._ends[at] > memory.low:
                return True
        return False


def overlap_faults(written: Sequence[Memory]) -> list[str]:
    """A sentence for each pair of targets that share memory without being one tensor in target and commit."""
    faults = []
    for one, other in overlapping(written):
        if one.content is not None and other.content is not None and one.same() == other.same():
            (stored, part), (other_stored, other_part) = one.content, other.content
            if part == other_part and _same_content(stored, other_stored):
                continue
        names = " and ".join(sorted((one.name, other.name)))
        faults.append(f"{names} overlap in the target's memory: one would overwrite the other, clone() one")
    return faults


def overlapping(memories: Sequence[Memory]) -> Iterator[tuple[Memory, Memory]]:
    """Pairs of `memories` that share bytes; each that overlaps any is in some pair."""
    spaces: dict[str, list[Memory]] = {}
    for memory in memories:
        spaces.setdefault(memory.space, []).append(memory)
    for members in spaces.values():
        lows, highs = (np.fromiter(map(attrgetter(name), members), np.int64) for name in ("low", "high"))
        order = np.argsort(lows, kind="stable")
        apart = lows[order[1:]] >= np.maximum.accumulate(highs[order])[:-1]
        bounds = np.array([0, *(np.flatnonzero(apart) + 1), len(members)])
        for at in np.flatnonzero(np.diff(bounds) > 1):
            yield from _in_cluster([members[each] for each in order[bounds[at] : bounds[at + 1]]])


def _in_cluster(cluster: Sequence[Memory]) -> Iterator[tuple[Memory, Memory]]:
    """Pairs among those whose address ranges hang together; `cluster` is sorted by address."""
    first_of: dict[Any, Memory] = {}
    for memory in cluster:
        first = first_of.setdefault(memory.same(), memory)
        if first is not memory:
            yield first, memory
    distinct = list(first_of.values())
    lows = np.array([memory.low for memory in distinct])
    steps = Counter(step for memory in distinct for step, _ in memory.form.dims).most_common(_MAX_STEPS)
    widths = [(step, np.array([_width(memory.form, step) for memory in distinct])) for step, _ in steps]
    shared, num_pairs = np.zeros(len(distinct), bool), 0
    for number, memory in enumerate(distinct):
        near = slice(number + 1, int(np.searchsorted(lows, memory.high)))
        may_meet = ~(shared[near] & shared[number])  # of those of which each is in a pair, no more are wanted
        for step, width in widths:  # what is apart modulo a step is apart
            shift = (lows[near] - memory.low) % step
            may_meet &= (shift < width[number]) | (step - shift < width[near])
        for at in (np.flatnonzero(may_meet) + number + 1).tolist():
            if not (shared[number] and shared[at]):
                num_pairs += 1
                if num_pairs > MAX_PAIRS or _share(memory, distinct[at]):
                    shared[number] = shared[at] = True
                    yield memory, distinct[at]


def _width(form: _Form, step: int) -> int:
    """From the first byte of any element to behind the last one, whole steps apart."""
    return form.run + sum(other * (size - 1) for other, size in form.dims if other % step)


def _share(one: Memory, other: Memory) -> bool:
    try:
        return bool(np.shares_memory(_array(one), _array(other), max_work=_MAX_WORK))  # type: ignore[arg-type]  # its stub knows only two values
    except np.exceptions.TooHardError:
        return True


def _array(memory: Memory) -> Array:
    """An array over the bytes at these addresses; it is never read, so that they may be those of a device.

    Of bytes, and not of items `|V4`: with these NumPy 2.1.0 crashes on Python 3.12 and newer.
    """
    interface = {
        "data": (memory.low, True),
        "shape": (*(size for _, size in memory.form.dims), memory.form.run),
        "strides": (*(step for step, _ in memory.form.dims), 1),
        "typestr": "|u1",
        "version": 3,
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))
