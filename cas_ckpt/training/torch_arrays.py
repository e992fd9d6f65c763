"""Files of torch.save that hold NumPy arrays or numbers, such as the random states that trainers keep.

torch.load(weights_only=True) refuses them unless NumPy's constructors are allowed for the whole process. Here the
pickle is read as data instead, and each constructor in it is matched exactly with what NumPy and torch write:

    numpy._core.multiarray._reconstruct(ndarray, (0,), b"b") with a state -> np.frombuffer of the bytes in it
    numpy._core.multiarray.scalar(dtype, bytes)                           -> the same, of one element
    collections.Counter, set, bytearray, complex, torch.device, parameters -> what torch's loader makes of them
    torch._utils._rebuild_tensor_v2(storage, offset, size, stride, ...)   -> a view of the mapped file

Invariant: nothing is imported or called by name. Arrays are booleans, integers, floats and complex numbers; the
bytes are as many as the shape says. Must not know states or commits.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pickle import UnpicklingError
from typing import Any, TypeAlias

import numpy as np
import torch

from cas_ckpt.errors import InvalidInputError
from cas_ckpt.objects.spec import DTYPE_BYTES, Spec
from cas_ckpt.training.capture.capture import MAX_DEPTH
from cas_ckpt.training.capture.tensors import TORCH_DTYPES
from cas_ckpt.training.pickles import PERSISTENT, Made, Named, read_pickle

Array: TypeAlias = np.ndarray[Any, Any]

_NUMPY = ("numpy._core.multiarray", "numpy.core.multiarray")
_ARRAYS = frozenset(f"{module}._reconstruct" for module in _NUMPY)
_SCALARS = frozenset(f"{module}.scalar" for module in _NUMPY)
_ARRAY, _DTYPE, _ENCODE = "numpy.ndarray", "numpy.dtype", "_codecs.encode"
TYPED, UNTYPED = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"
UNTYPED_STORAGES = ("torch.storage.UntypedStorage", "torch.UntypedStorage")
_ORDERED, _SIZE = "collections.OrderedDict", "torch.Size"

STORAGE_DTYPES = {
    "torch.DoubleStorage": "float64", "torch.FloatStorage": "float32", "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16", "torch.LongStorage": "int64", "torch.IntStorage": "int32",
    "torch.ShortStorage": "int16", "torch.CharStorage": "int8", "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool", "torch.ComplexDoubleStorage": "complex128", "torch.ComplexFloatStorage": "complex64",
}  # fmt: skip
"""What the elements of a storage are, by the class that torch.save names for it."""

_BYTES = frozenset({"__builtin__.bytes", "builtins.bytes"})
"""What protocol 2 calls without an argument for no bytes."""

_DTYPES = {f"torch.{name}": dtype for name, dtype in TORCH_DTYPES.items()}
_PARAMETER = "torch._utils._rebuild_parameter"

_VALUES: dict[str, tuple[Callable[..., Any], tuple[type, ...]]] = {
    "collections.Counter": (Counter, (dict,)), "torch.device": (torch.device, (str, int)),
    **{f"{home}.set": (set, (list,)) for home in ("__builtin__", "builtins")},
    **{f"{home}.complex": (complex, (float, float)) for home in ("__builtin__", "builtins")},
    **{f"{home}.bytearray": (bytearray, (bytes,)) for home in ("__builtin__", "builtins")},
}  # fmt: skip
"""What else torch calls weights: what makes it, of arguments of these types, the last of which may be missing."""

_ALLOWED = frozenset(
    {*_BYTES, *_ARRAYS, *_SCALARS, _ARRAY, _DTYPE, _ENCODE, TYPED, _ORDERED, _SIZE, *STORAGE_DTYPES, *_DTYPES, *_VALUES,
     _PARAMETER}
)  # fmt: skip

_CODE = re.compile("b1|[iu][1248]|f[248]|c8|c16")
"""Elements whose bytes are their values."""

MALFORMED = (TypeError, ValueError, LookupError, RuntimeError, ArithmeticError, struct.error)
"""What reading a stranger's description of tensors and arrays may raise."""

LOCAL_HEADER = struct.Struct("<26xHH")
"""Of a member of a zip: the lengths of its name and of what follows the name; then come its bytes."""


def read_with_arrays(archive: zipfile.ZipFile, fd: int, *, what: str) -> Any:
    """What the checked file of torch.save holds; its tensors are views of the file, mapped.

    Args:
        fd: The open file that `archive` reads.
        what: What is being read, for messages.
    Raises:
        InvalidInputError: it holds something else than plain values, tensors and arrays (then caused by
            an UnpicklingError), or a tensor that is not inside of its storage.
    """
    pickles = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise InvalidInputError(f"{what}: {len(pickles)} pickles in it, wanted one: not a file of torch.save")
    try:
        content = read_pickle(archive.read(pickles[0]), allowed=_ALLOWED, what=what)
        return _Reader(archive, pickles[0].filename.removesuffix("data.pkl"), fd).value(content)
    except (InvalidInputError, *MALFORMED) as error:
        text = str(error) if isinstance(error, InvalidInputError) else f"{what}: cannot be read as plain data: {error}"
        raise InvalidInputError(text) from UnpicklingError(str(error))


class _Reader:
    """Makes values of what a pickle describes; what is referred to twice is made once."""

    def __init__(self, archive: zipfile.ZipFile, folder: str, fd: int) -> None:
        self._archive, self._folder, self._fd = archive, folder, fd
        self._made: dict[int, Any] = {}
        self._storages: dict[str, torch.Tensor] = {}

    def value(self, described: Any, depth: int = 0) -> Any:
        """The value of `described`."""
        if depth > MAX_DEPTH:
            raise ValueError("it nests too deep, or refers to itself")
        if not isinstance(described, (dict, list, tuple, Made, Named)):
            return described
        if id(described) not in self._made:
            self._made[id(described)] = self._new(described, depth + 1)
        return self._made[id(described)]

    def _new(self, described: Any, depth: int) -> Any:
        if isinstance(described, dict):
            items = {self.value(key, depth): self.value(each, depth) for key, each in described.items()}
            if not isinstance(described, OrderedDict):
                return items
            ordered = OrderedDict(items)  # with its attributes: the `_metadata` of a module's state
            ordered.__dict__.update(self.value(vars(described), depth))
            return ordered
        if isinstance(described, (list, tuple)):
            return type(described)(self.value(each, depth) for each in described)
        if isinstance(described, Made) and described.name in _ARRAYS:
            return _array(described)
        if isinstance(described, Made) and described.name in _SCALARS:
            dtype, data = described.args
            return _elements(_dtype(dtype), (), _bytes(data), is_fortran=False)[()]
        if isinstance(described, Made) and described.name == TYPED and described.state is None:
            return self._tensor(described)
        if isinstance(described, Made) and described.name == _SIZE:
            return torch.Size(_integers(*described.args))
        if isinstance(described, Made) and (described.name == _ENCODE or described.name in _BYTES):
            return _bytes(described)
        if isinstance(described, Named) and described.name in _DTYPES:
            return _DTYPES[described.name]
        if isinstance(described, Made) and described.state is None and described.name in _VALUES:
            make, types = _VALUES[described.name]
            given = [self.value(each, depth) for each in described.args]
            if [type(each) for each in given] in (list(types), list(types[:-1])):
                return make(*given)
        if isinstance(described, Made) and described.state is None and described.name == _PARAMETER:
            data, requires_grad, hooks = (self.value(each, depth) for each in described.args)
            if isinstance(data, torch.Tensor) and type(requires_grad) is bool and not hooks:
                return torch.nn.Parameter(data.detach(), requires_grad)
        raise ValueError(f"{described.name} is not made in a way that is known")

    def _tensor(self, made: Made) -> torch.Tensor:
        found = described_tensor(made)
        shape, stride = found.spec.shape, found.stride
        elements = self._storage(found.key).view(TORCH_DTYPES[found.spec.dtype])
        last = found.first + sum((count - 1) * step for count, step in zip(shape, stride, strict=True))
        if math.prod(shape) and last >= len(elements):
            raise ValueError(f"a tensor of size {shape} and stride {stride} outside of its storage")
        if not math.prod(shape):
            return torch.empty(shape, dtype=elements.dtype)
        bits = made.args[6] if len(made.args) > 6 else None
        return _with_bits(elements.as_strided(shape, stride, found.first), bits).requires_grad_(made.args[4])

    @cached_property
    def _data(self) -> mmap.mmap:
        """The whole file, mapped once: each mapping holds a descriptor."""
        return mmap.mmap(self._fd, 0, access=mmap.ACCESS_COPY)

    def _storage(self, key: str) -> torch.Tensor:
        """The bytes of a storage, in the mapped file."""
        if key not in self._storages:
            info = self._archive.getinfo(f"{self._folder}data/{key}")
            data = self._data
            name_bytes, extra_bytes = LOCAL_HEADER.unpack_from(data, info.header_offset)
            begin = info.header_offset + LOCAL_HEADER.size + name_bytes + extra_bytes
            if begin + info.file_size > len(data):
                raise ValueError(f"storage {key} ends behind the file")
            held = memoryview(data)[begin : begin + info.file_size]
            none = torch.empty(0, dtype=torch.uint8)
            self._storages[key] = torch.frombuffer(held, dtype=torch.uint8) if held else none
        return self._storages[key]


@dataclass(frozen=True, slots=True)
class DescribedTensor:
    """What a pickle of torch.save says of a tensor: its elements begin at number `first` of the storage `key`."""

    spec: Spec
    stride: tuple[int, ...]
    first: int
    key: str


def described_tensor(made: Made) -> DescribedTensor:
    """What is said of a tensor that is made by `TYPED` or `UNTYPED`.

    Raises:
        One of `MALFORMED`: it is not made as torch makes it.
    """
    # A storage is named ("storage", type, key, location, count); if it has no dtype, that is the last argument.
    storage, first, shape, stride, requires_grad, hooks, *rest = made.args
    is_storage = isinstance(storage, Made) and storage.name == PERSISTENT
    if not is_storage or type(requires_grad) is not bool or hooks or len(rest) > 1:
        raise ValueError("a tensor that is not made as torch makes it")
    kind, named, key, _device, _count = storage.args[0]
    if kind != "storage" or not isinstance(named, Named) or type(key) is not str:
        raise ValueError("a storage that is not named as torch names it")
    if made.name == UNTYPED:
        dtype = rest[0].name.removeprefix("torch.") if isinstance(rest[0], Named) else ""
        if named.name not in UNTYPED_STORAGES or dtype not in DTYPE_BYTES:
            raise ValueError("a storage without a dtype")
    else:
        dtype = STORAGE_DTYPES[named.name]
    numbers = (first, *_integers(shape), *_integers(stride))
    if type(first) is not int or min(numbers) < 0 or len(shape) != len(stride):
        raise ValueError(f"a tensor of size {shape} and stride {stride} at {first}")
    return DescribedTensor(Spec(dtype, shape), stride, first, key)


def _with_bits(tensor: torch.Tensor, bits: Any) -> torch.Tensor:
    """`tensor` with the bits that torch writes beside its memory: that its values are conjugated, or negated."""
    if bits is None:
        return tensor
    if type(bits) is not dict or not bits.keys() <= {"conj", "neg"} or not all(each is True for each in bits.values()):
        raise ValueError("a tensor with bits that are not known")
    if "conj" in bits:
        tensor = tensor.conj()
    return tensor.neg() if "neg" in bits else tensor


def _array(made: Made) -> Array:
    kind, shape, code = made.args
    if not isinstance(kind, Named) or kind.name != _ARRAY or shape != (0,) or _bytes(code) != b"b":
        raise ValueError("an array that is not made as NumPy makes it")
    version, shape, dtype, is_fortran, data = made.state
    if version != 1 or type(is_fortran) is not bool:
        raise ValueError("an array whose state is not as NumPy writes it")
    return _elements(_dtype(dtype), _integers(shape), _bytes(data), is_fortran=is_fortran)


def _elements(dtype: np.dtype[Any], shape: tuple[int, ...], data: bytes, *, is_fortran: bool) -> Array:
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"an array of shape {shape} and dtype {dtype} with {len(data)} bytes")
    return np.frombuffer(bytearray(data), dtype).reshape(shape, order="F" if is_fortran else "C")


def _dtype(made: Any) -> np.dtype[Any]:
    if not isinstance(made, Made) or made.name != _DTYPE or type(made.args[0]) is not str:
        raise ValueError("a dtype that is not made as NumPy makes it")
    code, order = made.args[0], made.state[1]
    plain = (3, order, None, None, None, -1, -1, 0)
    if made.args[1:] != (False, True) or made.state != plain or order not in ("<", ">", "|"):
        raise ValueError(f"the dtype {code[:20]!r} with a state that is not a number's")
    if not _CODE.fullmatch(code):
        raise ValueError(f"the dtype {code[:20]!r}, which is not a number's")
    dtype: np.dtype[Any] = np.dtype(order + code)
    return dtype


def _bytes(described: Any) -> bytes:
    """Bytes, which pickles of protocol 2 write as text in Latin-1."""
    if isinstance(described, Made) and described.name == _ENCODE and described.args[1:] == ("latin1",):
        text = described.args[0]
        return str.encode(text, "latin-1")
    if isinstance(described, Made) and described.name in _BYTES and not described.args:
        return b""
    if type(described) is not bytes:
        raise ValueError("bytes that are not written as pickle writes them")
    return described


def _integers(value: Any) -> tuple[int, ...]:
    if type(value) is not tuple or not all(type(each) is int for each in value):
        raise ValueError("a shape that is not a tuple of integers")
    return value
