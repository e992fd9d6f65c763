"""Turns live training state into plain structure, without copying or changing anything.

    1. The state is walked depth first; Stateful objects are asked for their state_dict().
    2. Tensors and arrays become items that read their memory later, while a commit runs.
    3. Dicts become containers; lists, tuples and OrderedDicts only if something inside needs
       it, else they are one plain value.

Importing this module also teaches objects/values.py the small value types of torch (dtype, device, ...).

Invariant: no byte is copied, no random number drawn, no tensor changed. Must not know how
values are encoded: that is checked when the commit encodes them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from typing import Any, TypeVar

import numpy as np
import torch

from cas_ckpt.errors import InvalidInputError, UnsupportedValueError, shown_value
from cas_ckpt.objects.state import ORDER, RANKS, WORLD_SIZE, Container, Item, Name, Path, ValueItem, render_key
from cas_ckpt.objects.structures import structure_of
from cas_ckpt.objects.values import register_value_type
from cas_ckpt.training.capture.composites import check_indices, decompose
from cas_ckpt.training.capture.sharded import sharded
from cas_ckpt.training.capture.tensors import (
    HOST,
    PLAIN_TENSORS,
    array_item,
    bring_small_together,
    is_array,
    is_sharded,
    refusal,
    simple_item,
    supported,
    tensor_item,
    wait_for_devices,
)
from cas_ckpt.training.device.hasher import HASHERS
from cas_ckpt.training.per_rank import PerRank, RNGState, generator_item
from cas_ckpt.training.stateful import NamedModule, Names, is_module_state, is_stateful, module_versions

T = TypeVar("T")

MAX_DEPTH = 100
"""Containers inside one another, at most; far below Python's recursion limit."""

MAX_NAME_BYTES = 4096
"""UTF-8 bytes of one name, at most."""

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})


def capture_state(
    state: Mapping[str, Any], *, allow_pickle: bool = False, rank: int = 0, world_size: int = 1, streams: bool = False
) -> Container:
    """The state as a container that reads the live memory when it is committed.

    Args:
        state: Names to Stateful objects, tensors, arrays, plain values, and dicts, lists and
            tuples of these.
        allow_pickle: Leave containers that have no form here (odd keys, object arrays) whole,
            as values that the commit may pickle.
        rank: Whose state this is, of `world_size` ranks: what is kept per rank is stored under it.
        streams: Take a BytesIO as the bytes that it holds.

    Raises:
        UnsupportedValueError: something that cannot be expressed; names its key and type.
        InvalidInputError: `state` is not a mapping, or a name is over-long or holds NUL.
    """
    if not isinstance(state, Mapping):
        raise InvalidInputError(
            f"a state is a mapping of names to objects, this is a {type(state).__name__}: wrap it in a dict"
        )
    capture = _Capture(allow_pickle, Names(state), rank, world_size, streams)
    root = Container("dict", capture.children(state, state.items(), ()), versions=module_versions(state))
    if capture.devices:
        wait_for_devices(capture.devices)
    if capture.devices or HASHERS.get(HOST) is not None:
        bring_small_together(root)
    return root


@dataclass(slots=True)
class _Capture:
    """One walk over a state.

    Attributes:
        names: What modules and optimizers call their parameters (training/stateful.py).
        num_fixed: Tensors and Stateful objects met so far: what keeps a list or an
            OrderedDict from being one plain value.
        in_per_rank: Whether the walk is inside of a per-rank value: what is in there is not kept per rank once more.
        active: Ids of the containers that the walk is inside of.
        devices: Where tensors were met, other than the host.
    """

    allow_pickle: bool
    names: Names
    rank: int
    world_size: int
    streams: bool
    num_fixed: int = 0
    in_per_rank: bool = False
    active: set[int] = field(default_factory=set)
    devices: set[torch.device] = field(default_factory=set)

    def item(self, value: Any, path: Path) -> Item:
        """The item for any value of a state."""
        kind = type(value)
        if kind in _ATOMS:
            return ValueItem(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if kind is dict:
            if self.allow_pickle and any(type(name) is not str and type(name) is not int for name in value):
                return ValueItem(value)
            return Container("dict", self.children(value, value.items(), path))
        if kind is list or kind is tuple:
            if _ATOMS.issuperset(map(type, value)):
                return ValueItem(value)
            return self._value_unless_fixed(value, kind.__name__, enumerate(value), path)
        if isinstance(value, np.ndarray):
            return self._array(value, path)
        if is_stateful(value):
            return self._stateful(value, path)
        if is_module_state(value):
            return Container("dict", self.children(value, value.items(), path), versions=module_versions(value))
        if kind is BytesIO and self.streams:
            self.num_fixed += 1
            return ValueItem(value.getvalue())
        if kind is OrderedDict:
            before = self.num_fixed
            children = self.children(value, value.items(), path)
            return ValueItem(value) if self.num_fixed == before else Container("odict", children, {ORDER: [*children]})
        if isinstance(value, torch.Generator):
            self.num_fixed += 1
            return generator_item(value)
        found = structure_of(value)
        if found is None:
            return ValueItem(value)
        attrs = {"name": found.name, "fields": list(found.fields)}
        return self._value_unless_fixed(value, found.kind, found.fields.items(), path, attrs)

    def children(self, value: Any, pairs: Iterable[tuple[Any, Any]], path: Path) -> dict[Name, Item]:
        """The items of what is in the container `value`."""
        self._enter(value, path)
        children: dict[Name, Item] = {}
        for name, child in pairs:
            # Most of what a state holds: without a call, and a path, for each.
            item = simple_item(child) if type(child) in PLAIN_TENSORS else None
            if item is not None:
                self.num_fixed += 1
            children[check_name(name, path)] = item or self.item(child, (*path, name))
        self.active.discard(id(value))
        return children

    def _enter(self, value: Any, path: Path) -> None:
        if id(value) in self.active:
            raise refusal(path, f"{type(value).__name__} that contains itself", "break the cycle")
        if len(self.active) >= MAX_DEPTH:
            raise refusal(path[:8], f"structure deeper than {MAX_DEPTH} levels", "flatten it")
        self.active.add(id(value))

    def _value_unless_fixed(
        self, value: Any, kind: str, pairs: Iterable[tuple[Any, Any]], path: Path, attrs: dict[str, Any] | None = None
    ) -> Item:
        """A list, tuple, named tuple or dataclass: one plain value if nothing in it needs more."""
        before = self.num_fixed
        children = self.children(value, pairs, path)
        if self.num_fixed == before and not any(isinstance(child, Container) for child in children.values()):
            return ValueItem(value)
        return Container(kind, children, attrs)

    def _stateful(self, value: Any, path: Path) -> Item:
        self.num_fixed += 1
        self._enter(value, path)
        if isinstance(value, PerRank) or (isinstance(value, RNGState) and self.world_size > 1):
            own = value.value if isinstance(value, PerRank) else value.state_dict()
            if self.in_per_rank:
                item = self.item(own, path)
            else:
                self.in_per_rank = True
                mine = self.item(own, (*path, self.rank))
                item = Container(RANKS, {self.rank: mine}, {WORLD_SIZE: self.world_size})
                self.in_per_rank = False
        else:
            adapter = self.names.adapt(value)
            state = self.names.state_dict(adapter)
            if isinstance(adapter, NamedModule) and type(state) is OrderedDict:
                item = Container("dict", self.children(state, state.items(), path), versions=module_versions(state))
            else:
                item = self.item(state, path)
        self.active.discard(id(value))
        return item

    def _tensor(self, tensor: torch.Tensor, path: Path) -> Item:
        self.num_fixed += 1
        if type(tensor) not in PLAIN_TENSORS and is_sharded(tensor):
            divided = sharded(tensor, path, supported)
            self.devices.update(part.device for part in divided.locals if part.device.type != "cpu")
            return divided.item()
        plain = supported(tensor, path)
        if not plain.is_cpu:
            self.devices.add(plain.device)
        if plain.layout != torch.strided or plain.is_quantized:
            parts = decompose(plain, key=render_key(path))
            check_indices(plain, path)
            return parts
        return tensor_item(plain)

    def _array(self, array: np.ndarray[Any, Any], path: Path) -> Item:
        if array.dtype.hasobject and self.allow_pickle:
            return ValueItem(array)
        self.num_fixed += 1
        if not is_array(array):
            raise refusal(path, f"numpy subclass {type(array).__name__}", "store numpy.asarray(it) and what it loses")
        return array_item(array, path)


def check_name(name: Any, path: Path) -> Name:
    """`name` itself, if it can name a child.

    Raises:
        UnsupportedValueError: neither str nor int (bool does not count as int here).
        InvalidInputError: a name that keys cannot hold.
    """
    if type(name) is str:
        if len(name) > MAX_NAME_BYTES // 4 or "\0" in name or not name.isascii():
            try:
                num_bytes = len(name.encode())
            except UnicodeEncodeError:
                num_bytes = -1
            if "\0" in name or not 0 <= num_bytes <= MAX_NAME_BYTES:
                raise InvalidInputError(
                    f"{render_key(path) or 'the state'}: the name {name[:40]!r}... cannot be stored: names are Unicode "
                    f"text without NUL, {MAX_NAME_BYTES} bytes of UTF-8 at most"
                )
        return name
    if type(name) is int and -(1 << 63) <= name < 1 << 63:
        return name
    raise refusal(
        path, f"dict with the key {shown_value(name)} of type {type(name).__name__}", "use str or 64-bit int keys"
    )


# ------------------------------------------------------------ small values of torch
# They round-trip by name. A name on disk only ever selects an attribute of torch that has the right type.


def _name(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _named(name: Any, kind: type[T]) -> T:
    """The attribute of torch called `name`, which must be a `kind`."""
    if type(name) is not str:
        raise TypeError(f"the name of a {kind.__name__} is not a string")
    found = getattr(torch, name, None)
    if not isinstance(found, kind):
        raise UnsupportedValueError(
            f"torch {torch.__version__} has no {kind.__name__} {name!r}: use a torch that has it"
        )
    return found


def _size(value: Any) -> torch.Size:
    if type(value) is not list or any(type(size) is not int for size in value):
        raise TypeError("a torch.Size is a list of integers")
    return torch.Size(value)


def _device(value: Any) -> torch.device:
    try:
        return torch.device(value)
    except RuntimeError as error:
        raise ValueError(f"no device is called {value!r}") from error


def register_torch_values() -> None:
    """Register torch.Size, dtype, device, layout and memory_format; again is harmless."""
    register_value_type("torch.Size", torch.Size, encode=list, decode=_size)
    register_value_type("torch.device", torch.device, encode=str, decode=_device)
    for kind in (torch.dtype, torch.layout, torch.memory_format):
        register_value_type(f"torch.{kind.__name__}", kind, encode=_name, decode=partial(_named, kind=kind))


register_torch_values()
