"""Raw bits of torch tensors and NumPy arrays: views of host memory, boxes copied for everything else.

Duty: say which tensors and arrays can be read, and give every strided one, whatever its dtype, as an `ArraySource`
and `ArrayTarget` of raw items. Invariant: dtype, byte order and bits pass unchanged; memory of the host is never
copied; the version counter of a tensor moves before its bytes do; nothing that holds Python objects is taken for bytes.
Must not know commits; keys only for messages.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.lib import format as npy_format
from torch.nn.parameter import is_lazy

from cas_ckpt.errors import CkptError, CorruptionError, InvalidInputError, UnsupportedValueError
from cas_ckpt.objects.spec import DTYPE_BYTES, NUMPY_PREFIX, Box, Spec, dtype_bytes, raw_dtype, shared_spec
from cas_ckpt.objects.state import Container, Flavor, LeafHasher, Path, TensorItem, render_key
from cas_ckpt.training.device.cells import DevicePart
from cas_ckpt.training.device.copies import Batch, Batches, on_own_stream, to_device
from cas_ckpt.training.device.hasher import HASHERS, hasher_of
from cas_ckpt.training.torch_internals import local_part, version_of
from cas_ckpt.transfer.hashing import ROW_BYTES, ROW_WORDS, WORD_BYTES

Array: TypeAlias = np.ndarray[Any, Any]
Region: TypeAlias = tuple[Any, ...]

TORCH_DTYPES: dict[str, torch.dtype] = {
    name: found for name in DTYPE_BYTES if isinstance(found := getattr(torch, name, None), torch.dtype)
}
"""The dtypes of the format that this torch has, by name."""

_NUMPY_HAS = frozenset({torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.float16})
"""Dtypes that `Tensor.numpy` gives directly; the others take the way through the storage."""

DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}

_RAW_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Torch dtypes that stand for raw items and that every device can copy."""


SPARSE_LAYOUTS: dict[str, torch.layout] = {
    "sparse_coo": torch.sparse_coo,
    "sparse_csr": torch.sparse_csr,
    "sparse_csc": torch.sparse_csc,
    "sparse_bsr": torch.sparse_bsr,
    "sparse_bsc": torch.sparse_bsc,
}
"""Sparse tensors, which have parts, by the kinds of their containers."""

_SPARSE = frozenset(SPARSE_LAYOUTS.values())

_SIMPLE_DTYPES = {
    dtype: name for dtype, name in DTYPE_NAMES.items() if not dtype.is_complex and not name.startswith(("q", "complex"))
}
"""Dtypes of tensors that are neither quantized nor conjugated."""

QUANTIZED_MEMORY = {"qint8": torch.int8, "quint8": torch.uint8, "qint32": torch.int32}
PACKED = ("quint4x2", "quint2x4")
"""Dtypes with several elements in a byte."""

HOST = torch.device("cpu")

PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
"""Classes of tensors that are read as they are, without a look at what they wrap."""


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called `name`.

    Raises:
        UnsupportedValueError: this torch has no such dtype.
    """
    found = TORCH_DTYPES.get(name)
    if found is None:
        raise UnsupportedValueError(f"torch {torch.__version__} has no dtype {name!r}: use a torch that has it")
    return found


def part_dtype(name: str) -> torch.dtype:
    """The dtype of the plain tensor that holds a part stored under dtype `name`."""
    if name in PACKED:
        return torch.uint8
    return QUANTIZED_MEMORY.get(name) or torch_dtype(name)


def spec_of(tensor: torch.Tensor) -> Spec:
    """Dtype name and shape of a tensor whose dtype is in `DTYPE_NAMES`."""
    return _spec(tensor.dtype, tensor.shape)


@lru_cache(maxsize=4096)
def _spec(dtype: torch.dtype, shape: torch.Size) -> Spec:
    # Models repeat their shapes: one Spec for all is kinder to the garbage collector.
    return shared_spec(DTYPE_NAMES[dtype], tuple(shape))


def new_tensor(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, order: Sequence[int] = ()
) -> torch.Tensor:
    """A tensor whose elements are undefined; with an `order`, its dimensions lie in memory so, the outermost first."""
    if order:
        made = new_tensor(tuple(shape[at] for at in order), dtype, device)
        return made.permute([order.index(at) for at in range(len(order))])
    # As raw items: neither does torch warn of its experiments then, nor does it try to fill
    # memory of a dtype that it cannot fill (torch.use_deterministic_algorithms).
    return torch.empty(shape, dtype=_RAW_DTYPES[dtype.itemsize], device=device).view(dtype)


def needed_bytes(tensor: torch.Tensor) -> int:
    """Bytes that the storage of `tensor` must have for its last element to be inside."""
    if not tensor.numel():
        return 0
    if tensor.is_contiguous():
        return int(tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset() + last + 1) * tensor.element_size()


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of `tensor` as one uint8 tensor, the same memory."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def is_kind(tensor: torch.Tensor, *names: str) -> bool:
    """Whether `tensor` is of one of these classes of torch.distributed, which need not be imported for it."""
    return any(
        kind.__name__ in names and kind.__module__.startswith("torch.distributed") for kind in type(tensor).__mro__
    )


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether `tensor` may be divided over ranks."""
    return is_kind(tensor, "DTensor", "ShardedTensor")


def supported(tensor: torch.Tensor, path: Path) -> torch.Tensor:
    """`tensor` as a torch.Tensor of the base class whose memory can be read.

    Raises:
        UnsupportedValueError: meta, nested, fake, lazy or freed tensors, dtypes that the format
            does not have, tensors that wrap others (`sharded` is for those over ranks); names the key.
    """
    if type(tensor) not in PLAIN_TENSORS:
        tensor = _base_of(tensor, path)
    if tensor.is_meta:
        fault = "meta tensor", "it has no data: materialize it (to_empty, load) first"
    elif tensor.is_nested:
        fault = "nested tensor", "store its values and offsets"
    elif tensor.dtype not in DTYPE_NAMES:
        fault = f"tensor of dtype {tensor.dtype}", "convert it to another dtype"
    elif not tensor.numel() and not spec_of(tensor).fits_array:
        fault = f"tensor of the shape {list(tensor.shape)}", "no array can have these sizes: reshape it"
    elif tensor.is_quantized or tensor.layout in _SPARSE:
        return tensor
    elif tensor.layout != torch.strided:
        fault = f"tensor of layout {tensor.layout}", "convert it with to_dense()"
    else:
        storage = tensor.untyped_storage()
        if storage.device == tensor.device and storage.nbytes() >= needed_bytes(tensor):
            return tensor
        fault = "tensor whose storage was freed or never was", "gather (unshard) it before committing"
    raise refusal(path, *fault)


def _base_of(tensor: torch.Tensor, path: Path) -> torch.Tensor:
    name = type(tensor).__name__
    if is_kind(tensor, "AsyncCollectiveTensor"):
        arrived: Any = tensor
        return supported(arrived.wait(), path)
    if is_lazy(tensor):
        raise refusal(path, f"uninitialized parameter ({name})", "run the model once before committing")
    if name == "MaskedTensor" and type(tensor).__module__.startswith("torch."):
        raise refusal(path, "masked tensor", "store its get_data() and get_mask()")
    if tensor.is_nested or hasattr(tensor, "__tensor_flatten__"):
        raise refusal(path, f"tensor subclass {name} that wraps other tensors", "store the tensors inside it")
    try:
        return tensor.as_subclass(torch.Tensor)
    except RuntimeError as error:  # of torch 2.9: a FakeTensor
        what = f"tensor subclass {name} whose storage was freed or never was"
        raise refusal(path, what, "commit the tensor that it stands for") from error


def refusal(path: Path, what: str, remedy: str) -> UnsupportedValueError:
    """The error for `what` at `path`, which no commit can hold."""
    return UnsupportedValueError(f"{render_key(path) or '(root)'}: cannot store a {what}: {remedy}")


def host_bits(tensor: torch.Tensor) -> Array:
    """The elements of a host tensor as raw items: same memory, shape, strides and offset."""
    item_bytes = tensor.element_size()
    dtype = raw_dtype(item_bytes)
    if tensor.dtype in _NUMPY_HAS:
        return (tensor.detach() if tensor.requires_grad else tensor).numpy().view(dtype)
    shape = tuple(tensor.shape)
    if not tensor.numel():
        return np.empty(shape, dtype)
    strides = tuple(stride * item_bytes for stride in tensor.stride())
    memory = storage_bytes(tensor).numpy()
    return np.ndarray(shape, dtype, memory, tensor.storage_offset() * item_bytes, strides)


def copyable_view(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` outside autograd, as raw items unless its bits are not its values (conj, neg)."""
    if tensor.is_conj() or tensor.is_neg():
        return tensor.detach()
    raw = torch.empty(0, dtype=_RAW_DTYPES[tensor.element_size()], device=tensor.device)
    return raw.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _host_like(view: torch.Tensor) -> torch.Tensor:
    """New host memory for `view`, as raw items; pinned for CUDA, where torch keeps the blocks for reuse."""
    dtype = _RAW_DTYPES[view.element_size()]
    return torch.empty(view.shape, dtype=dtype, device="cpu", pin_memory=view.device.type == "cuda")


@lru_cache(maxsize=4096)
def _chars(num_bytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    return ctypes.c_char * num_bytes


@dataclass(slots=True)
class HostTensor:
    """Elements of a tensor in host memory, as a source and as a target: views."""

    tensor: torch.Tensor
    _bits: Array | None = None

    def read(self, box: Box) -> Array:
        """Threads may race to make the view: all make the same."""
        bits = host_bits(self.tensor) if self._bits is None else self._bits
        if box.sizes == bits.shape:
            return bits  # not kept: of a hundred thousand small tensors it would be 60 MB
        self._bits = bits
        return bits[box.slices]

    def to_bytes(self) -> bytes:
        """A call for each of a hundred thousand small tensors, not four and an array."""
        tensor = self.tensor
        if tensor.is_contiguous():
            return _chars(tensor.nbytes).from_address(tensor.data_ptr()).raw
        return host_bits(tensor).tobytes()

    def fill(self, data: bytes) -> bool:
        """Bring all elements into place, as `open` and `done` would; False, if they do not lie as `data` does."""
        tensor = self.tensor
        if not tensor.is_contiguous() or tensor.nbytes != len(data):
            return False
        torch.autograd.graph.increment_version(tensor)
        ctypes.memmove(tensor.data_ptr(), data, len(data))
        return True

    def open(self, box: Box) -> Array:
        """Moves the version counter, so that autograd and `frozen=` see that the bytes changed."""
        torch.autograd.graph.increment_version(self.tensor)
        return self.read(box)

    def done(self, box: Box, array: Array) -> None:
        """The bytes are in place already."""

    def rearranged(self, index: Any, order: Sequence[int]) -> HostTensor:
        return HostTensor(self.tensor.detach()[index].permute(tuple(order)))


@dataclass(slots=True)
class CopiedTensor:
    """Elements of a tensor that is elsewhere, or whose bits are not its values, as a source and as a target: copies.

    Attributes:
        batch: What brings it to the host together with others, and its number there; None: it is copied alone.
    """

    tensor: torch.Tensor
    batch: tuple[Batch, int] | None = None

    @property
    def is_private(self) -> bool:
        """True: what is read is a copy."""
        return True

    def _part(self, box: Box) -> torch.Tensor:
        """The elements of `box` where they are, as raw items that are their values."""
        part = copyable_view(self.tensor)[box.slices]
        if not (part.is_conj() or part.is_neg()):
            return part
        if part.dtype == torch.complex32:  # as real numbers: torch warns of new memory of this dtype
            real = torch.view_as_real(part.conj() if part.is_conj() else part).resolve_neg().clone()
            if part.is_conj():
                real[..., 1].neg_()
            return copyable_view(torch.view_as_complex(real))
        return copyable_view(part.resolve_conj().resolve_neg())

    def read(self, box: Box) -> Array:
        """Nobody changes the answer."""
        if self.batch is not None:
            return self._brought(self.batch, box)
        with on_own_stream(self.tensor.device):
            part = self._part(box)
            host = _host_like(part)
            host.copy_(part, non_blocking=True)
        return host_bits(host)

    def copy_into(self, box: Box, target: Array) -> None:
        if self.batch is not None:
            np.copyto(target, self._brought(self.batch, box))
            return
        with on_own_stream(self.tensor.device):
            host = torch.from_numpy(target.view(_numpy_raw(target.itemsize)))
            part = self._part(box)
            host.view(part.dtype).copy_(part, non_blocking=True)

    def _brought(self, batch: tuple[Batch, int], box: Box) -> Array:
        together, number = batch
        elements = together.read(number).view(raw_dtype(self.tensor.element_size())).reshape(self.tensor.shape)
        return elements if box.sizes == elements.shape else elements[box.slices]

    def leaf_hasher(self) -> LeafHasher | None:
        return None if self.tensor.is_conj() or self.tensor.is_neg() else hasher_of(self.tensor.device)

    def device_parts(self) -> tuple[DevicePart, ...]:
        """Where the elements are, for `leaf_hasher`."""
        view = copyable_view(self.tensor)
        box = Box((0,) * view.dim(), tuple(view.shape))
        return (DevicePart(view, box, box.offsets),)

    def sums(self, box: Box) -> Array | None:
        """Summed where the elements are, only the sums come over."""
        with on_own_stream(self.tensor.device):
            return _word_sums(self._part(box).contiguous().reshape(-1).view(torch.uint8)).cpu().numpy().view(np.uint64)

    def open(self, box: Box) -> Array:
        """The array is the caller's own until `done`."""
        return host_bits(_host_like(copyable_view(self.tensor)[box.slices]))

    def done(self, box: Box, array: Array) -> None:
        """The copy is over when this returns. Moves the version counter, as `HostTensor` does."""
        torch.autograd.graph.increment_version(self.tensor)
        place = copyable_view(self.tensor)
        host = torch.from_numpy(array.view(_numpy_raw(array.itemsize)))
        to_device(host.view(place.dtype), place[box.slices])

    def rearranged(self, index: Any, order: Sequence[int]) -> CopiedTensor:
        return CopiedTensor(self.tensor.detach()[index].permute(tuple(order)))


def _word_sums(data: torch.Tensor) -> torch.Tensor:
    """`word_sums` of bytes on any device, as int64: sums wrap around alike."""
    num_rows, rest = divmod(len(data), ROW_BYTES)
    whole = data[: num_rows * ROW_BYTES]
    if whole.data_ptr() % WORD_BYTES or whole.storage_offset() % WORD_BYTES:
        whole = whole.clone()
    rows = [whole.view(torch.int64).view(num_rows, ROW_WORDS)]
    if rest:
        last = torch.zeros(ROW_BYTES, dtype=torch.uint8, device=data.device)
        last[:rest] = data[num_rows * ROW_BYTES :]
        rows.append(last.view(torch.int64).view(1, ROW_WORDS))
    columns = torch.stack([each.sum(0) for each in rows]).sum(0)
    return torch.cat([*(each.sum(1) for each in rows), columns])


@dataclass(frozen=True, slots=True)
class CastTarget:
    """Elements of a tensor of another dtype than the stored one: filled in host memory, cast by `done`."""

    tensor: torch.Tensor
    stored: torch.dtype

    def open(self, box: Box) -> Array:
        """The array is the caller's own until `done`."""
        return np.empty(box.sizes, raw_dtype(self.stored.itemsize))

    def done(self, box: Box, array: Array) -> None:
        """The copy is over when this returns."""
        host = torch.from_numpy(array.view(_numpy_raw(array.itemsize))).view(self.stored)
        to_device(host, self.tensor[box.slices])

    def rearranged(self, index: Any, order: Sequence[int]) -> CastTarget:
        return CastTarget(self.tensor.detach()[index].permute(tuple(order)), self.stored)


def _numpy_raw(item_bytes: int) -> np.dtype[Any]:
    """The numpy dtype that torch takes for raw items."""
    return np.dtype({1: "u1", 2: "<i2", 4: "<i4", 8: "<i8", 16: "<c16"}[item_bytes])


def cast_items(items: Array, stored: str, wanted: str) -> Array:
    """Raw items of the dtype called `stored` as those of `wanted`, each value rounded as torch does."""
    given = torch.from_numpy(np.ascontiguousarray(items).view(_numpy_raw(items.itemsize))).view(torch_dtype(stored))
    # NumPy has given one to what has no dimensions.
    return host_bits(given.to(torch_dtype(wanted))).reshape(items.shape)


def elements_of(tensor: torch.Tensor) -> HostTensor | CopiedTensor:
    """The elements of any strided tensor, as a source and as a target. A target must not overlap itself."""
    is_host = tensor.is_cpu and not (tensor.is_conj() or tensor.is_neg()) and HASHERS.get(HOST) is None
    return HostTensor(tensor) if is_host else CopiedTensor(tensor)


def memory_of(tensor: torch.Tensor) -> Region:
    """Identity of the tensor's memory, equal for tied tensors; without elements, for equal views of one storage.

    Holds the storage weakly: a region never equals one of a later storage at the same address.
    """
    storage = tensor.untyped_storage()
    place = (weakref.ref(storage), storage.data_ptr(), tensor.storage_offset())
    bits = (tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return (*place, tuple(tensor.shape), tensor.stride(), *bits)


def tensor_item(tensor: torch.Tensor) -> TensorItem:
    """A strided tensor as an item. Its identity is `(region, version counter)`, None if it has no elements.

    Two items are tied when their regions agree; one item is unchanged since a former capture
    when the whole identities agree and the version is not None.
    """
    identity = None
    if tensor.numel():
        identity = memory_of(tensor), version_of(tensor)
    spec = _spec(tensor.dtype, tensor.shape)
    return TensorItem(spec, elements_of(tensor), Flavor.TORCH, identity, order=_order(tensor))


def _order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The dimensions as they lie in memory, the outermost first; None: in their order, or elements share memory."""
    shape, stride = tensor.shape, tensor.stride()
    if not all(shape) or not all(stride):
        return None
    # Of equal strides the longer dimension is outside; dimensions of 1 are where their stride says.
    order = tuple(sorted(range(len(shape)), key=lambda at: (-stride[at], -shape[at], at)))
    return None if order == tuple(range(len(shape))) else order


def simple_item(tensor: torch.Tensor) -> TensorItem | None:
    """As `supported` and `tensor_item`, for tensors of `PLAIN_TENSORS`, in half of the time; None: call these."""
    found = simple_memory(tensor)
    if found is None:
        return None
    spec, contiguous, storage, address, offset = found
    # The tuples of the form, not new ones: what is not made needs no search by the garbage collector.
    region = (weakref.ref(storage), address, offset, spec.shape, contiguous, tensor.dtype, False, False)
    source = HostTensor(tensor) if HASHERS.get(HOST) is None else CopiedTensor(tensor)
    return TensorItem(spec, source, Flavor.TORCH, (region, version_of(tensor)))


def simple_memory(tensor: torch.Tensor) -> tuple[Spec, tuple[int, ...], torch.UntypedStorage, int, int] | None:
    """Spec, strides, storage, its address and the offset in it, of a tensor in one piece on the host; None: of others.

    Its bits are its values, as those of nearly all. Each question to torch is asked once, for thousands of tensors are
    asked at a call.
    """
    dtype = tensor.dtype
    if dtype not in _SIMPLE_DTYPES or not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    spec, num_bytes, contiguous = _form(dtype, tensor.shape)
    storage, offset = tensor.untyped_storage(), int(tensor.storage_offset())
    address = storage.data_ptr()  # 0: it was freed, or there is none
    end = offset * dtype.itemsize + num_bytes
    if tensor.stride() != contiguous or not num_bytes or not address or storage.nbytes() < end or tensor.is_neg():
        return None
    return spec, contiguous, storage, address, offset


@lru_cache(maxsize=4096)
def _form(dtype: torch.dtype, shape: torch.Size) -> tuple[Spec, int, tuple[int, ...]]:
    """Of tensors in one piece: their spec, their bytes, their strides in elements."""
    spec = _spec(dtype, shape)
    strides = [1]
    for size in reversed(spec.shape[1:]):
        strides.append(strides[-1] * max(1, size))
    return spec, spec.num_bytes, tuple(reversed(strides)) if spec.shape else ()


def overlaps_itself(shape: Iterable[int], stride: Iterable[int], item: int = 1) -> bool:
    """Whether two elements may share memory (expanded tensors and the like); may err towards True.

    Args:
        item: Size of one element in the unit of `stride`.
    """
    reach = item - 1
    for step, size in sorted((abs(step), size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if size == 0:
            return False
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False


def bring_small_together(state: Container) -> None:
    """Let the small tensors of `state` that are on a device be brought to the host many at a time.

    In the order in which a commit reads them, so that what one thread reads comes together.
    """
    batches = Batches()
    waiting = [state]
    while waiting:
        for item in waiting.pop().children.values():
            if isinstance(item, Container):
                waiting.append(item)
            elif isinstance(item, TensorItem):
                for source in getattr(item.source, "locals", (item.source,)):
                    if isinstance(source, CopiedTensor):
                        source.batch = batches.add(source.tensor)


def wait_for_devices(devices: Iterable[torch.device]) -> None:
    """Return when all work queued on these devices is done, so that any thread may copy.

    Raises:
        InvalidInputError: inside of a capture of a CUDA graph.
    """
    for device in devices:
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                raise InvalidInputError(
                    f"a CUDA graph is being captured on {device}: its work has not run, so that there is nothing to "
                    "commit or to restore; call this before or after the capture"
                )
            torch.cuda.synchronize(device)
        elif device.type not in ("cpu", "meta"):
            torch.get_device_module(device.type).synchronize()


# --- NumPy arrays -------------------------------------------------------------------------

_TORCH_LIKE = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip
_NAMES: dict[str, str] = {np.dtype(name).newbyteorder("<").str: name for name in _TORCH_LIKE}

_PLAIN_KINDS = frozenset("biufcSUmM")


@dataclass(frozen=True, slots=True)
class ArrayView:
    """An array as source and as target: raw views of its own memory."""

    bits: Array

    def read(self, box: Box) -> Array:
        """A view of the elements of `box`, to be read or filled."""
        return self.bits[box.slices]

    open = read

    def to_bytes(self) -> bytes:
        """All elements in C order, copied."""
        return self.bits.tobytes()

    def done(self, box: Box, array: Array) -> None:
        """The bytes are in place already."""

    def rearranged(self, index: Any, order: Sequence[int]) -> ArrayView:
        return ArrayView(self.bits[index].transpose(tuple(order)))


def is_array(value: Any) -> bool:
    """Whether `value` is an array that is stored by its elements."""
    return type(value) is np.ndarray or type(value) is np.memmap


def view_of(array: Array) -> ArrayView:
    """The array's memory as raw items."""
    plain = array if type(array) is np.ndarray else array.view(np.ndarray)
    return ArrayView(plain.view(raw_dtype(array.itemsize)))


def array_item(array: Array, path: Path) -> TensorItem | Container:
    """An array as an item; an array with fields as a container "structured".

    Raises:
        UnsupportedValueError: object arrays and dtypes that have no name on disk.
    """
    descr = None if array.dtype.names is None else _descr(array.dtype, path)
    # The version in the identity is None: numpy counts none, an array is never known to be unchanged.
    region = region_of_array(array)
    item = TensorItem(elements_spec(array, path), view_of(array), Flavor.NUMPY, region and (region, None))
    return item if descr is None else Container("structured", {"items": item}, {"descr": descr})


def elements_spec(array: Array, path: Path) -> Spec:
    """The spec of the array's elements, e.g. of "float32" or "np:<M8[ns]"; with fields, each is so many bytes."""
    name = _elements_name(array.dtype, array.dtype.str)
    if name is None:
        raise UnsupportedValueError(
            f"{render_key(path)}: a numpy array of dtype {array.dtype} has no bytes to store: convert it to a numeric "
            "or string dtype"
        )
    return shared_spec(name, array.shape)


@lru_cache(maxsize=256)
def _elements_name(dtype: np.dtype[Any], text: str) -> str | None:
    """The name of such elements in specs; None: they have no bytes to store.

    Args:
        text: `dtype.str`: what is equal for NumPy, as m8[s] and m8[1000ms] are, may have another.
    """
    if dtype.names is not None:
        return f"{NUMPY_PREFIX}|V{dtype.itemsize}"
    name = _NAMES.get(text)
    if name is not None and dtype == name:
        return name
    is_plain = dtype.kind in _PLAIN_KINDS or (dtype.kind == "V" and dtype.type is np.void)
    return NUMPY_PREFIX + text if is_plain and dtype.itemsize and not dtype.hasobject else None


def region_of_array(array: Array) -> tuple[Any, ...] | None:
    """Identity of the array's memory, equal for the same elements; None if there are none."""
    if not array.size:
        return None
    return ("numpy", array.__array_interface__["data"][0], array.shape, array.strides, array.dtype.str)


def _descr(dtype: np.dtype[Any], path: Path) -> Any:
    """A plain value from which numpy makes `dtype` again."""
    if dtype.hasobject or not dtype.itemsize:
        raise UnsupportedValueError(
            f"{render_key(path)}: a structured array of {dtype} has no bytes to store: drop its object fields"
        )
    try:
        descr = npy_format.dtype_to_descr(dtype)
        if npy_format.descr_to_dtype(descr) == dtype:
            return descr
    except (ValueError, TypeError):
        pass  # numpy has no description of it: refused below, like one that does not give the same dtype again
    raise UnsupportedValueError(
        f"{render_key(path)}: numpy cannot describe the dtype {dtype}: copy the fields into arrays of their own"
    )


def new_array(spec: Spec, *, key: str) -> Array:
    """An array for a stored tensor of flavor "numpy", its elements undefined."""
    try:
        dtype_bytes(spec.dtype)
        return np.empty(spec.shape, np.dtype(spec.dtype.removeprefix(NUMPY_PREFIX)))
    except (CkptError, TypeError) as error:
        raise CorruptionError(f"{key}: no numpy array can hold {spec}: {error}") from error


def structured(items: Array, attrs: Any, *, key: str) -> Array:
    """The array with fields of a container "structured"; shares memory with `items`."""
    try:
        return items.view(npy_format.descr_to_dtype(attrs["descr"]))
    except (TypeError, ValueError, LookupError) as error:
        raise CorruptionError(f"{key}: the fields of a structured array cannot be read: {error}") from error


def same_fields(array: Array, attrs: Any) -> bool:
    """Whether `array` has the dtype that a container "structured" records."""
    try:
        return bool(npy_format.descr_to_dtype(attrs["descr"]) == array.dtype)
    except (TypeError, ValueError, LookupError):
        return False


def locals_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The strided tensors that hold its elements here: itself, or its local parts; none that has no memory."""
    if type(tensor) in PLAIN_TENSORS:
        return (tensor,) if tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_nested else ()
    if is_kind(tensor, "DTensor"):
        found = (local_part(tensor),)
    elif is_kind(tensor, "ShardedTensor"):
        legacy: Any = tensor
        found = tuple(shard.tensor for shard in legacy.local_shards())
    else:
        found = (tensor,)
    return tuple(each for each in found if each.layout == torch.strided and not each.is_meta and not each.is_nested)
