"""Turns live training state into plain structure, without copying or changing anything.

    1. The state is walked depth first; Stateful objects are asked for their state_dict().
    2. Tensors and arrays become items that read their memory later, while a commit runs.
    3. Dicts become containers; lists, tuples and OrderedDicts only if something inside needs
       it, else they are one plain value.

Invariant: no byte is copied, no random number drawn, no tensor changed. Must not know how
values are encoded: that is checked when the commit encodes them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from typing import Any, TypeVar

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from cas_ckpt.errors import InvalidInputError, UnsupportedValueError, shown_value
from cas_ckpt.objects.state import ORDER, Container, Item, Name, Path, ValueItem, render_key
from cas_ckpt.objects.structures import Named, structure_of
from cas_ckpt.objects.values import register_value_type
from cas_ckpt.training.capture.arrays import (
    DTYPE_NAMES,
    array_item,
    holds_objects,
    needed_bytes,
    tensor_item,
    wait_for_devices,
)
from cas_ckpt.training.capture.composites import decompose, is_composite
from cas_ckpt.training.capture.sharded import is_kind, is_sharded, sharded
from cas_ckpt.training.names import Names
from cas_ckpt.training.state import (
    PerRank,
    RNGState,
    generator_item,
    is_per_rank,
    is_stateful,
    own_value,
    ranks_container,
)
from cas_ckpt.training.wrappers import NamedModule

# DOC of cas_ckpt.training.capture.capture:
# Teaches objects/values.py the small value types of torch, so that they round-trip by name.
#
# Invariant: a name on disk only ever selects an attribute of torch that has the right type.
# Imported for its effect by capture and by restore.
#

T = TypeVar("T")


def _name(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _named(name: Any, kind: type[T]) -> T:
    """The attribute of torch called `name`, which must be a `kind`."""
    if type(name) is not str:
        raise TypeError(f"the name of a {kind.__name__} is no string")
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
    for tag, kind in (
        ("torch.dtype", torch.dtype),
        ("torch.layout", torch.layout),
        ("torch.memory_format", torch.memory_format),
    ):
        register_value_type(tag, kind, encode=_name, decode=_decoder(kind))


def _decoder(kind: type[T]) -> Any:
    return lambda name: _named(name, kind)


register_torch_values()


MAX_DEPTH = 100
"""Containers inside one another, at most; far below Python's recursion limit."""

MAX_NAME_BYTES = 4096
"""UTF-8 bytes of one name, at most."""

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})
_PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})


def capture_state(
    state: Mapping[str, Any], *, allow_pickle: bool = False, rank: int = 0, world_size: int = 1, streams: bool = False
) -> Container:
    """The state as a container that reads the live memory when it is committed.

    Args:
        state: Names to Stateful objects, tensors, arrays, plain values, and dicts, lists and
            tuples of these.
        allow_pickle: Leave containers that have no form here (odd keys, object arrays) whole,
            as values that the commit may pickle.
        rank: Whose state this is, of `world_size` ranks: what is kept per rank stands under it.
        streams: Take a BytesIO as the bytes that it holds.

    Raises:
        UnsupportedValueError: something that cannot be expressed; names its key and type.
        InvalidInputError: `state` is no mapping, or a name is over-long or holds NUL.
    """
    if not isinstance(state, Mapping):
        raise InvalidInputError(
            f"a state is a mapping of names to objects, this is a {type(state).__name__}: wrap it in a dict"
        )
    capture = _Capture(allow_pickle, Names(state), rank, world_size, streams=streams)
    root = capture.mapping("dict", state, ())
    wait_for_devices(capture.devices)
    return root


class _Capture:
    """One walk over a state.

    Attributes:
        num_fixed: Tensors and Stateful objects met so far: what keeps a list or an
            OrderedDict from being one plain value.
        active: Ids of the containers that the walk is inside of.
        names: What modules and optimizers call their parameters (training/names.py).
        apart: Whether the walk is inside of a per-rank value: what is in there is not kept per rank once more.
    """

    __slots__ = ("active", "allow_pickle", "apart", "devices", "names", "num_fixed", "rank", "streams", "world_size")

    def __init__(self, allow_pickle: bool, names: Names, rank: int, world_size: int, *, streams: bool) -> None:
        self.streams = streams
        self.allow_pickle = allow_pickle
        self.names = names
        self.rank = rank
        self.world_size = world_size
        self.num_fixed = 0
        self.apart = False
        self.active: set[int] = set()
        self.devices: set[torch.device] = set()

    def item(self, value: Any, path: Path) -> Item:
        """The item for any value of a state."""
        kind = type(value)
        if kind in _ATOMS:
            return ValueItem(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if kind is dict:
            return self._dict(value, path)
        if kind is list or kind is tuple:
            return self._sequence(kind.__name__, value, path)
        if isinstance(value, np.ndarray):
            return self._array(value, path)
        if is_stateful(value):
            return self._stateful(value, path)
        if is_module_state(value):
            return self.mapping("dict", value, path)
        if kind is BytesIO and self.streams:
            self.num_fixed += 1
            return ValueItem(value.getvalue())
        if kind is OrderedDict:
            return self._ordered(value, path)
        if isinstance(value, torch.Generator):
            self.num_fixed += 1
            return generator_item(value)
        found = structure_of(value)
        return ValueItem(value) if found is None else self._structure(value, found, path)

    def mapping(self, kind: str, value: Mapping[Any, Any], path: Path) -> Container:
        """A mapping as a container, whatever it holds."""
        with self._inside(value, path):
            return Container(kind, self._children(value.items(), path))

    def _children(self, pairs: Iterable[tuple[Any, Any]], path: Path) -> dict[Name, Item]:
        return {check_name(name, path): self.item(value, (*path, name)) for name, value in pairs}

    def _dict(self, value: dict[Any, Any], path: Path) -> Item:
        if self.allow_pickle and any(type(name) is not str and type(name) is not int for name in value):
            return ValueItem(value)
        return self.mapping("dict", value, path)

    def _ordered(self, value: Mapping[Any, Any], path: Path) -> Item:
        before = self.num_fixed
        container = self.mapping("odict", value, path)
        if self.num_fixed == before:
            return ValueItem(value)
        return Container("odict", container.children, {ORDER: list(container.children)})

    def _sequence(self, kind: str, value: Any, path: Path) -> Item:
        if _ATOMS.issuperset(map(type, value)):
            return ValueItem(value)
        before = self.num_fixed
        with self._inside(value, path):
            children = self._children(enumerate(value), path)
        plain = self.num_fixed == before and not any(isinstance(child, Container) for child in children.values())
        return ValueItem(value) if plain else Container(kind, children)

    def _structure(self, value: Any, found: Named, path: Path) -> Item:
        """A named tuple or dataclass: by the rule of lists."""
        before = self.num_fixed
        with self._inside(value, path):
            children = self._children(found.fields.items(), path)
        plain = self.num_fixed == before and not any(isinstance(child, Container) for child in children.values())
        attrs = {"name": found.name, "fields": list(found.fields)}
        return ValueItem(value) if plain else Container(found.kind, children, attrs)

    def _stateful(self, value: Any, path: Path) -> Item:
        self.num_fixed += 1
        with self._inside(value, path):
            if is_per_rank(value, self.world_size):
                return self._per_rank(value, path)
            adapter = self.names.adapt(value)
            state = adapter.state_dict()
            if isinstance(adapter, NamedModule) and type(state) is OrderedDict:
                return self.mapping("dict", state, path)
            return self.item(state, path)

    def _per_rank(self, value: PerRank | RNGState, path: Path) -> Item:
        if self.apart:
            return self.item(own_value(value), path)
        self.apart = True
        item = self.item(own_value(value), (*path, self.rank))
        self.apart = False
        return ranks_container(self.rank, item, self.world_size)

    def _tensor(self, tensor: torch.Tensor, path: Path) -> Item:
        self.num_fixed += 1
        if type(tensor) not in _PLAIN_TENSORS and is_sharded(tensor):
            divided = sharded(tensor, path, supported)
            self.devices.update(part.device for part in divided.locals if part.device.type != "cpu")
            return divided.item()
        plain = supported(tensor, path)
        if plain.device.type != "cpu":
            self.devices.add(plain.device)
        return decompose(plain, key=render_key(path)) if is_composite(plain) else tensor_item(plain)

    def _array(self, array: np.ndarray[Any, Any], path: Path) -> Item:
        key = render_key(path)
        if holds_objects(array) and self.allow_pickle:
            return ValueItem(array)
        self.num_fixed += 1
        if type(array) is not np.ndarray and type(array) is not np.memmap:
            raise _refusal(key, f"numpy subclass {type(array).__name__}", "store numpy.asarray(it) and what it loses")
        return array_item(array, key=key)

    @contextmanager
    def _inside(self, value: Any, path: Path) -> Iterator[None]:
        if id(value) in self.active:
            raise _refusal(render_key(path), f"{type(value).__name__} that contains itself", "break the cycle")
        if len(self.active) >= MAX_DEPTH:
            raise _refusal(render_key(path[:8]), f"structure deeper than {MAX_DEPTH} levels", "flatten it")
        self.active.add(id(value))
        yield
        self.active.discard(id(value))


def is_module_state(value: Any) -> bool:
    """Whether `value` is what a module's `state_dict()` gave: it is stored as a dict, not as an OrderedDict."""
    return type(value) is OrderedDict and hasattr(value, "_metadata")


def check_name(name: Any, path: Path) -> Name:
    """`name` itself, if it can name a child.

    Raises:
        UnsupportedValueError: neither str nor int (bool is no int here).
        InvalidInputError: a name that keys cannot hold.
    """
    if type(name) is str:
        if len(name) > MAX_NAME_BYTES // 4 or "\0" in name or not name.isascii():
            _check_odd_name(name, path)
        return name
    if type(name) is int and -(1 << 63) <= name < 1 << 63:
        return name
    raise _refusal(
        render_key(path),
        f"dict with the key {shown_value(name)} of type {type(name).__name__}",
        "use str or 64-bit int keys",
    )


def _check_odd_name(name: str, path: Path) -> None:
    try:
        num_bytes = len(name.encode())
    except UnicodeEncodeError:
        num_bytes = -1
    if "\0" in name or not 0 <= num_bytes <= MAX_NAME_BYTES:
        raise InvalidInputError(
            f"{render_key(path) or 'the state'}: the name {name[:40]!r}... cannot be stored: names are Unicode text "
            f"without NUL, {MAX_NAME_BYTES} bytes of UTF-8 at most"
        )


def supported(tensor: torch.Tensor, path: Path) -> torch.Tensor:
    """`tensor` as a torch.Tensor of the base class whose memory can be read.

    Raises:
        UnsupportedValueError: meta, nested, fake, lazy or freed tensors, dtypes that the format
            does not have, tensors that wrap others (`sharded` is for those over ranks); names the key.
    """
    if type(tensor) not in _PLAIN_TENSORS:
        tensor = _base_of(tensor, path)
    what = _fault_of(tensor)
    if what is not None:
        raise _refusal(render_key(path), *what)
    return tensor


def _base_of(tensor: torch.Tensor, path: Path) -> torch.Tensor:
    key, name = render_key(path), type(tensor).__name__
    if is_kind(tensor, "AsyncCollectiveTensor"):
        arrived: Any = tensor
        return supported(arrived.wait(), path)
    if is_lazy(tensor):
        raise _refusal(key, f"uninitialized parameter ({name})", "run the model once before committing")
    wraps = tensor.is_nested or is_traceable_wrapper_subclass(tensor)
    if wraps:
        raise _refusal(key, f"tensor subclass {name} that wraps other tensors", "store the tensors inside it")
    return tensor.as_subclass(torch.Tensor)


def _fault_of(tensor: torch.Tensor) -> tuple[str, str] | None:
    """What keeps a tensor from being read, and what to do about it."""
    if tensor.is_meta:
        return "meta tensor", "it has no data: materialize it (to_empty, load) first"
    if tensor.is_nested:
        return "nested tensor", "store its values and offsets"
    if tensor.dtype not in DTYPE_NAMES:
        return f"tensor of dtype {tensor.dtype}", "convert it to another dtype"
    if is_composite(tensor):
        return None
    if tensor.layout != torch.strided:
        return f"tensor of layout {tensor.layout}", "convert it with to_dense()"
    storage = tensor.untyped_storage()
    if storage.device != tensor.device or storage.nbytes() < needed_bytes(tensor):
        return "tensor whose storage was freed or never was", "gather (unshard) it before committing"
    return None


def _refusal(key: str, what: str, remedy: str) -> UnsupportedValueError:
    return UnsupportedValueError(f"{key or '(root)'}: cannot store a {what}: {remedy}")
