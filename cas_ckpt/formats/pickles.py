"""Pickles of strangers: what they may call is on a list, and what they ask for is bounded.

    read_pickle         as data: what a pickle names becomes a `Made`, and nothing of it is imported
    read_torch_pickle   as torch.save wrote it: tensors over storages that the caller has, NumPy's arrays of numbers
    Pickler             writes for torch.save what the latter reads of classes that are not imported, and `Items`

Python's own unpickler reads them, the one in Python: that in C takes memory for every length and place that a few
bytes claim, and follows a key that nests until the process dies.

Invariant: nothing is imported or called but what is on the list here. Must not know files, states or commits.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from argparse import Namespace
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import PosixPath, PurePosixPath
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from cas_ckpt.errors import CkptError, InvalidInputError, UnsupportedValueError
from cas_ckpt.objects.structures import DATACLASS, EnumValue, Named, register_type
from cas_ckpt.training.capture.capture import MAX_DEPTH
from cas_ckpt.training.capture.tensors import SPARSE_LAYOUTS
from cas_ckpt.training.torch_internals import SAFE_GLOBALS, private, typed_storage

MAX_GROWTH = 100
FREE_BYTES = 1 << 30
"""Objects may have more bytes than the file (copies, expanded tensors): up to this, or this many times."""

_OPCODES = re.findall(
    r"\w+",
    "PROTO FRAME STOP MARK POP POP_MARK BINPUT LONG_BINPUT MEMOIZE BINGET LONG_BINGET NONE NEWTRUE NEWFALSE BININT "
    "BININT1 BININT2 LONG1 BINFLOAT SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINSTRING SHORT_BINBYTES BINBYTES "
    "BINBYTES8 EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3 TUPLE EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS EMPTY_SET "
    "ADDITEMS GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD BINPERSID",
)
"""Opcodes that state is written with; among the others are those that ask for memory by a number."""

_MOVED = MappingProxyType(
    {"__builtin__": "builtins", "numpy.core.multiarray": "numpy._core.multiarray", "pathlib._local": "pathlib"}
)
"""Modules by the names that older versions write."""

_COPIED_BYTES = 64
"""An element of a dict, a list or a text that is copied, at most."""

_COPIED = (str, bytes, bytearray, list, tuple, dict, set)
"""Types that calls may copy. Those that take tensors copy none; the others take nothing else that has elements."""

Storage = Callable[[str, torch.dtype, int], torch.UntypedStorage]
"""From the key of a storage, the dtype and the number of its elements to its bytes."""


class Stream(Protocol):
    """A file of pickles: reading beyond its end takes no memory."""

    def read(self, size: int = ..., /) -> bytes:
        """The next bytes."""
        ...

    def readline(self) -> bytes:
        """The next line."""
        ...


def most_bytes(file_bytes: int) -> int:
    """Bytes that objects of a file of so many bytes may have."""
    return max(FREE_BYTES, MAX_GROWTH * file_bytes)


class Made:
    """Something that a pickle names, as a class; an instance is what it would make: of what, and with which state."""

    __slots__ = ("args", "state")
    name: ClassVar[str]

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = None


@cache
def _named(name: str) -> type[Made]:
    return type("Made", (Made,), {"name": name, "__slots__": ()})


def read_pickle(data: bytes, *, allowed: Collection[str], what: str) -> Any:
    """The object that the pickle `data` describes: plain values, sets, OrderedDicts, `Made` and classes of these.

    Args:
        allowed: "module.name" of everything that may be named.
        what: What is being read, for messages.
    Raises:
        InvalidInputError: no pickle of protocol 2 to 5. UnsupportedValueError: it names what is not allowed.
    """
    found = {name: _ordered if name == "collections.OrderedDict" else _named(name) for name in allowed}
    return _read(_Unpickler(io.BytesIO(data), found, frozenset(allowed), most_bytes(len(data)), what))


def plain_pickle(value: Any) -> bytes:
    """A pickle of plain values, as `read_pickle` reads it.

    Raises:
        UnsupportedValueError: there are others in it, which whoever unpickles it would make.
    """
    data = pickle.dumps(value, protocol=4)
    read_pickle(data, allowed=(), what="what is to be pickled")
    return data


def read_torch_pickle(stream: Stream, storage: Storage, *, file_bytes: int, what: str) -> Any:
    """The object in the pickle of torch.save at the place of `stream`; bytes behind it are left.

    Raises:
        InvalidInputError: torch writes no such pickle. UnsupportedValueError: it names what no state needs.
    """
    return _read(_TorchUnpickler(stream, storage, most_bytes(file_bytes), what))


def _read(unpickler: _Unpickler) -> Any:
    try:
        return unpickler.load()
    except (CkptError, MemoryError):
        raise
    except Exception as error:  # a stranger's bytes can make it raise anything
        reason = f"no pickle can be read there ({type(error).__name__}: {error}"[:300]
        raise InvalidInputError(f"{unpickler.what}: {reason}): fetch or write it again") from error


class _Unpickler(pickle._Unpickler):
    """Python's unpickler with the opcodes that state is written with, and names from a list.

    Args:
        found: What stands for each name.
        called: Those that may be called.
        left: Bytes that calls may copy.
    """

    dispatch: ClassVar[dict[int, Any]] = {
        code: pickle._Unpickler.dispatch[code] for code in (getattr(pickle, name)[0] for name in _OPCODES)
    }
    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, stream: Any, found: Any, called: Collection[str], left: int, what: str) -> None:
        super().__init__(stream, encoding="utf-8")
        self.found, self.left, self.what = found, left, what
        self.called = {id(found[name]) for name in called if name in found}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{_MOVED.get(module, module)}.{name}"
        if full not in self.found:
            raise UnsupportedValueError(
                f"{self.what}: wants to run {full[:200]!r}. Code in a file is never run: if you trust it, load it "
                "with torch yourself and commit what it gives"
            )
        return self.found[full]

    def load_reduce(self) -> None:
        args, call = self.stack.pop(), self.stack[-1]
        self.stack[-1] = self.make(call, args)

    def make(self, call: Any, args: Any) -> Any:
        """The result of calling `call`."""
        if type(args) is not tuple or id(call) not in self.called:
            name = next((name for name, each in self.found.items() if each is call), "something")
            raise InvalidInputError(
                f"{self.what}: calls {name[:80]}, which saved state never does: a bomb, or damaged; fetch the file "
                "from somewhere else"
            )
        self.count(_COPIED_BYTES * sum(len(each) for each in args if isinstance(each, _COPIED)))
        return call(*args)

    def count(self, num_bytes: int) -> None:
        """Note that so many bytes are made."""
        self.left -= num_bytes
        if self.left < 0:
            raise InvalidInputError(f"{self.what}: a pickle that copies its own content without end: a bomb")

    def load_build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if type(made) is OrderedDict and type(state) is dict:
            # Of `Module.state_dict()`; other attributes are in no commit, and could hide methods.
            if "_metadata" in state:
                vars(made)["_metadata"] = state["_metadata"]
        else:
            self.build(made, state)

    def build(self, made: Any, state: Any) -> None:
        """Give `made` the state that is written for it."""
        if not isinstance(made, Made) or made.state is not None:
            raise ValueError("it gives a state to something that has none")
        made.state = state

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def load_setitems(self) -> None:
        self._set_items(self.pop_mark())

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise ValueError("it sets items of something that is not a dict")
        for key, value in zip(_plain(items[::2]), items[1::2], strict=True):
            target[key] = value

    def load_additems(self) -> None:
        items, target = self.pop_mark(), self.stack[-1]
        if type(target) is not set:
            raise ValueError("it adds to something that is not a set")
        target.update(_plain(items))

    dispatch.update(
        {pickle.REDUCE[0]: load_reduce, pickle.NEWOBJ[0]: load_reduce, pickle.BUILD[0]: load_build,
         pickle.SETITEM[0]: load_setitem, pickle.SETITEMS[0]: load_setitems, pickle.ADDITEMS[0]: load_additems}
    )  # fmt: skip


def _plain(keys: Iterable[Any]) -> Iterable[Any]:
    """`keys`, seen not to nest deeper than hash can follow."""
    for key in keys:
        if isinstance(key, tuple) and any(isinstance(each, tuple) for each in key):
            raise ValueError("a key of tuples in tuples")
        yield key


# --- what torch.save writes -----------------------------------------------------------------

_CODE = re.compile("b1|[iu][1248]|f[248]|c8|c16")
"""NumPy's elements whose bytes are their values."""

_REBUILDS = ("tensor", "tensor_v2", "tensor_v3", "parameter", "meta_tensor_no_storage")
_CALLED = (*(f"torch._utils._rebuild_{name}" for name in _REBUILDS), *("torch.nn.parameter.Parameter", "torch.device"))
"""Torch's own, which make nothing but views of storages, and objects around them."""

_PACKED = 4
"""Quantized elements in a byte, at most."""

_DTENSOR = "torch.distributed.tensor:DTensor"
_OF_TYPE, _SUBCLASS = "torch._tensor:_rebuild_from_type_v2", "torch._utils:_rebuild_wrapper_subclass"

_KNOWN = frozenset({
    _DTENSOR, "torch.distributed.device_mesh:DeviceMesh", "torch.distributed._mesh_layout:_FlatLayout",
    "torch.distributed._mesh_layout:_MeshLayout", "torch.distributed.tensor._dtensor_spec:DTensorSpec",
    "torch.distributed.tensor._dtensor_spec:ShardOrderEntry", "torch.distributed.tensor._dtensor_spec:TensorMeta",
    "torch.distributed.tensor.placement_types:Partial", "torch.distributed.tensor.placement_types:Replicate",
    "torch.distributed.tensor.placement_types:Shard", "torch.distributed.tensor.placement_types:_StridedShard",
    "deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler", "deepspeed.runtime.fp16.loss_scaler:LossScaler",
    "deepspeed.utils.tensor_fragment:fragment_address",
})  # fmt: skip
"""Classes whose instances are attributes alone: they come in as dataclasses do, by their fields."""

_ARGS = "__new__"
"""The field of what such a class is made of, if it is a tuple or a tensor."""

_ENUMS = frozenset({
    "deepspeed.runtime.zero.config:ZeroStageEnum", "megatron.core.enums:ModelType",
    "megatron.core.rerun_state_machine:RerunDiagnostic", "megatron.core.rerun_state_machine:RerunMode",
    "megatron.core.rerun_state_machine:RerunState", "megatron.core.transformer.enums:AttnBackend",
    "megatron.core.transformer.enums:CudaGraphScope", "signal:Signals",
})  # fmt: skip
"""Their members come in as data, and are looked up by whoever loads them, if the class is imported there."""

_LAYOUTS = {str(layout): layout for layout in (torch.strided, *SPARSE_LAYOUTS.values())}


class _Dtype:
    """NumPy's dtype of numbers, which is given the order of its bytes later."""

    def __init__(self, code: str) -> None:
        self.dtype = np.dtype(code)

    def order_is(self, state: Any) -> None:
        """Take the state that NumPy writes of such a dtype."""
        order = state[1] if _is_tuple_of(state, (str, int, type(None))) else None
        if order not in ("<", ">", "|") or state != (3, order, None, None, None, -1, -1, 0):
            raise ValueError(f"the dtype {self.dtype} with a state that is not a number's")
        self.dtype = self.dtype.newbyteorder(order)


class _TorchUnpickler(_Unpickler):
    """Makes the values; each name that is called stands for what makes no more than its arguments hold."""

    def __init__(self, stream: Stream, storage: Storage, left: int, what: str) -> None:
        self._storage = storage
        own = {
            "_codecs.encode": _latin_1, "builtins.bytes": lambda: b"", "builtins.bytearray": _bytearray,
            "builtins.set": _set, "builtins.complex": complex, "torch.Size": _size,
            "collections.Counter": _counter, "collections.OrderedDict": _ordered,
            "numpy.ndarray": np.ndarray, "numpy.dtype": self._dtype, "numpy._core.multiarray.scalar": _scalar,
            "numpy._core.multiarray._reconstruct": _empty_array, "torch._tensor._rebuild_from_type_v2": self._of_type,
            "torch._utils._rebuild_sparse_tensor": _sparse, "torch.serialization._get_layout": _layout,
            "torch._utils._rebuild_qtensor": self._quantized,
            "torch._utils._rebuild_parameter_with_state": self._parameter,
            _SUBCLASS.replace(":", "."): partial(_instance, _DTENSOR),
            "torch._utils._rebuild_device_tensor_from_cpu_tensor": self._on_host,
            "argparse.Namespace": Namespace, "types.SimpleNamespace": SimpleNamespace, "pathlib.PosixPath": _path,
            **{name.replace(":", "."): partial(_instance, name) for name in _KNOWN},
            **{name.replace(":", "."): partial(_member, name) for name in _ENUMS},
        }  # fmt: skip
        self._torch = private(SAFE_GLOBALS)()
        found = {**self._torch, **own}
        super().__init__(stream, found, {*own, *_CALLED} - {"numpy.ndarray"}, left, what)

    def persistent_load(self, pid: Any) -> Any:
        """A storage: ("storage", type, key, location, number of elements), of torch before 1.6 with a None more."""
        if type(pid) is not tuple or len(pid) not in (5, 6):
            raise ValueError("a storage that is not named as torch names it")
        kind, named, key, _, count, *view = pid
        is_known = type(kind) is str and kind == "storage" and type(key) is str and type(count) is int and count >= 0
        if not is_known or any(each is not None for each in view):
            raise ValueError("a storage that is not named as torch names it")
        dtype = torch.uint8 if named is torch.UntypedStorage else named.dtype
        return typed_storage(self._storage(key, dtype, count), dtype)

    def build(self, made: Any, state: Any) -> None:
        """Give an array of NumPy, its dtype, a namespace or an instance of a class the state that is written for it."""
        if isinstance(made, _Dtype):
            made.order_is(state)
            return
        if (
            isinstance(made, (Named, Namespace, SimpleNamespace))
            and type(state) is dict
            and {*map(type, state)} <= {str}
        ):
            if any(name.startswith("__") for name in state):  # of an instance, some hide methods
                raise ValueError("attributes with names that are Python's own")
            self.count(_COPIED_BYTES * len(state))
            (made.fields if isinstance(made, Named) else vars(made)).update(state)
            return
        if type(made) is not np.ndarray or made.shape != (0,) or type(state) is not tuple:
            raise ValueError("it gives a state to something that has none")
        version, shape, named, is_fortran, data = state
        is_known = type(version) is int and version == 1 and _is_tuple_of(shape, (int,)) and type(named) is _Dtype
        is_known = is_known and type(is_fortran) is bool
        if not is_known or not isinstance(data, bytes):
            raise ValueError("an array with a state that is not written as NumPy writes it")
        self.count(len(data))
        dtype = named.dtype
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data):
            raise ValueError(f"an array of shape {shape} and dtype {dtype} with {len(data)} bytes")
        made.__setstate__((1, shape, dtype.newbyteorder("="), is_fortran, data))
        # By itself NumPy makes bytes of the other order into those of this machine.
        made.dtype = dtype  # type: ignore[misc]

    def _dtype(self, code: Any, _align: bool, _copy: bool) -> _Dtype:
        if type(code) is not str or not _CODE.fullmatch(code):
            raise UnsupportedValueError(f"{self.what}: an array of {str(code)[:20]!r}, no numbers: save it otherwise")
        return _Dtype(code)

    def _of_type(self, call: Any, _kind: Any, args: Any, state: Any) -> Any:
        if call is self.found[_SUBCLASS.replace(":", ".")]:
            made, (_, slots) = _instance(_DTENSOR, *args[1:]), state
            self.build(made, slots)
            return made
        return self.make(call, args)  # attributes of tensors are in no commit

    def _parameter(self, data: Any, requires_grad: Any, hooks: Any, _state: Any) -> Any:
        return self._torch["torch._utils._rebuild_parameter"](data, requires_grad, hooks)  # as `_of_type`

    def _quantized(self, storage: Any, offset: Any, size: Any, stride: Any, how: Any, *rest: Any) -> Any:
        """As torch's own, which makes tensors: of what is in lists, and of the size before it has the storage."""
        if type(how) is not tuple or not _is_tuple_of(size, (int,)):
            raise TypeError("a quantized tensor that is not written as torch writes it")
        if math.prod(size) > storage.nbytes() * _PACKED:
            raise ValueError("a quantized tensor longer than its storage: a bomb")
        for each in how:
            if isinstance(each, torch.Tensor):
                _check_own(each)
            elif type(each) is list and any(type(number) not in (int, float) for number in each):
                raise TypeError("a quantized tensor whose scales are no numbers")
        return self._torch["torch._utils._rebuild_qtensor"](storage, offset, size, stride, how, *rest)

    def _on_host(self, data: torch.Tensor, dtype: torch.dtype, _device: str, requires_grad: bool) -> torch.Tensor:
        if not isinstance(data, torch.Tensor) or type(dtype) is not torch.dtype:
            raise TypeError("a tensor of another device that is made of no tensor")
        self.count(16 * data.numel())
        return data.to(dtype).requires_grad_(requires_grad)


def _instance(name: str, *args: Any) -> Named:
    return Named(DATACLASS, name, {_ARGS: args} if args else {})


def _member(name: str, value: Any) -> EnumValue:
    if type(value) not in (int, str):
        raise TypeError("a member of an enum that has no plain value")
    module, qualname = name.split(":")
    return EnumValue(module, qualname, value)


def _is_tuple_of(value: Any, kinds: tuple[type, ...]) -> bool:
    """Whether it is a tuple of these alone: comparing a tensor makes another."""
    return type(value) is tuple and all(type(each) in kinds for each in value)


def _latin_1(text: str, encoding: str = "latin1") -> bytes:
    """Bytes, as pickles of protocol 2 write them."""
    if type(encoding) is not str or encoding not in ("latin1", "latin-1"):
        raise ValueError("bytes that are not written as pickle writes them")
    return str.encode(text, "latin-1")


def _bytearray(data: Any = b"", *encoding: str) -> bytearray:
    if type(data) not in (bytes, str):
        raise ValueError("a bytearray of a length instead of content, which saved state never has: a bomb")
    return bytearray(_latin_1(data, *encoding) if encoding else data)


def _counter(counts: Any = MappingProxyType({})) -> Counter[Any]:
    if not isinstance(counts, (dict, MappingProxyType)):
        raise TypeError("a Counter of something else than a dict")
    return Counter(counts)


def _elements(items: Any) -> Any:
    """`items`, seen to be something whose elements were counted."""
    if type(items) not in (list, tuple, set):
        raise TypeError(f"elements of a {type(items).__name__}")
    return items


def _set(items: Any) -> set[Any]:
    return set(_plain(_elements(items)))


def _size(sizes: Any = ()) -> torch.Size:
    return torch.Size(_elements(sizes))


def _ordered(items: Any = ()) -> OrderedDict[Any, Any]:
    pairs = list(_elements(items))
    if any(type(pair) not in (list, tuple) for pair in pairs):
        raise TypeError("an OrderedDict of something else than pairs")
    return OrderedDict(zip(_plain(key for key, _ in pairs), (value for _, value in pairs), strict=True))


def _path(*parts: Any) -> PurePosixPath:
    if any(type(part) is not str for part in parts):
        raise TypeError("a path of something else than texts")
    return PosixPath(*parts)


def _layout(name: Any) -> torch.layout:
    return _LAYOUTS[name if type(name) is str else ""]


def _empty_array(kind: Any, shape: Any, code: Any) -> Any:
    if kind is not np.ndarray or not _is_tuple_of(shape, (int,)) or shape != (0,) or code != b"b":
        raise ValueError("an array that is not made as NumPy makes it")
    return np.empty(0, np.int8)


def _scalar(dtype: _Dtype, data: Any) -> Any:
    if type(data) is not bytes:
        raise TypeError(f"a number made of a {type(data).__name__}")
    return np.frombuffer(data, dtype.dtype).reshape(())[()]


def _check_own(part: Any) -> None:
    """Refuse a tensor that is longer than its storage: some of torch's functions make a copy."""
    if not isinstance(part, torch.Tensor) or part.layout is not torch.strided:
        raise TypeError("a part of a tensor that is no plain tensor")
    if part.numel() * part.itemsize > part.untyped_storage().nbytes():
        raise ValueError("a part of a tensor that is longer than its storage: a bomb")


def _sparse(layout: torch.layout, parts: Any) -> torch.Tensor:
    """As torch's own, which notes each for a later check; here whoever captures the tensor checks its indices."""
    if type(parts) is not tuple:
        raise TypeError("a sparse tensor without its parts")
    is_coo = layout is torch.sparse_coo
    *indices, values, size = parts[:3] if is_coo else parts
    coalesced = parts[3:]
    for part in (*indices, values):
        _check_own(part)
    if any(each.dtype not in ((torch.int64,) if is_coo else (torch.int64, torch.int32)) for each in indices):
        raise TypeError("indices of a sparse tensor that are not int64")  # torch would convert them
    if not is_coo:
        rows, columns = indices
        return torch.sparse_compressed_tensor(rows, columns, values, size, layout=layout, check_invariants=False)
    (at,), known = indices, coalesced[0] if coalesced else None
    return torch.sparse_coo_tensor(at, values, size, is_coalesced=known, check_invariants=False)


# --- dicts with other keys than commits have ---------------------------------------------------


@dataclass(slots=True)
class Items:
    """A dict that has such keys as Megatron's distributed optimizer, tuples of dtypes."""

    items: list[tuple[Any, Any]]


register_type(Items, name="cas_ckpt:Items")


def storable(value: Any, depth: int = 0) -> Any:
    """`value` with `Items` in place of such dicts, in dicts, lists and tuples; what is too deep stays as it is."""
    if depth > MAX_DEPTH:
        return value
    if type(value) is dict:
        inside = {key: storable(each, depth + 1) for key, each in value.items()}
        return Items([*inside.items()]) if any(type(key) is tuple for key in inside) else inside
    return type(value)(storable(each, depth + 1) for each in value) if type(value) in (list, tuple) else value


def restored(value: Any) -> Any:
    """What was given to `storable`."""
    if type(value) is Items:
        return {key: restored(each) for key, each in value.items}
    if type(value) is dict:
        return {key: restored(each) for key, each in value.items()}
    return type(value)(map(restored, value)) if type(value) in (list, tuple) else value


# --- written again --------------------------------------------------------------------------


def is_written(value: Named | EnumValue) -> bool:
    """Whether `Pickler` writes it as what it stands for."""
    name = value.name if isinstance(value, Named) else f"{value.module}:{value.qualname}"
    return name in _KNOWN or name in _ENUMS


class _Global(str):
    """The name of a class or function that is to be written as such."""

    __slots__ = ()


class Pickler(pickle._Pickler):
    """Python's pickler, which writes instances of the known classes by the names of these: they need not be there."""

    dispatch: ClassVar[dict[type, Any]] = {**pickle._Pickler.dispatch}
    save: Callable[[Any], None]
    write: Callable[[bytes], Any]
    memoize: Callable[[Any], None]
    save_reduce: Callable[..., None]

    def _save_global(self, name: _Global) -> None:
        self.write(pickle.GLOBAL + name.replace(":", "\n").encode() + b"\n")

    def _save_known(self, value: Named) -> None:
        made, args = _Global(value.name), value.fields.get(_ARGS, ())
        state = {name: each for name, each in value.fields.items() if name != _ARGS}
        if value.name not in _KNOWN:
            self._save_as_it_is(value)
        elif value.name == _DTENSOR:
            parts = (_Global(_SUBCLASS), made, (made, *args), (None, state))
            self._save_made(value, _Global(_OF_TYPE), parts, pickle.REDUCE)
        else:
            self._save_made(value, made, args, pickle.NEWOBJ)
            if state:
                self.save(state)
                self.write(pickle.BUILD)

    def _save_member(self, value: EnumValue) -> None:
        name = f"{value.module}:{value.qualname}"
        if name in _ENUMS:
            self._save_made(value, _Global(name), (value.value,), pickle.REDUCE)
        else:
            self._save_as_it_is(value)

    def _save_items(self, value: Items) -> None:
        self.save(dict(value.items))
        self.memoize(value)

    def _save_made(self, value: Any, call: _Global, args: tuple[Any, ...], opcode: bytes) -> None:
        self.save(call)
        self.save(args)
        self.write(opcode)
        self.memoize(value)

    def _save_as_it_is(self, value: Any) -> None:
        self.save_reduce(*value.__reduce_ex__(2), obj=value)

    dispatch.update({_Global: _save_global, Named: _save_known, EnumValue: _save_member, Items: _save_items})
