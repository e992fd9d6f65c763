"""Makes new objects for a stored state: nested Python containers, tensors, arrays, values.

    1. Memory for every tensor is allocated (tied ones share it) and listed as copies.
    2. The caller's `fetch` verifies and fills all of it.
    3. Containers, sparse and quantized tensors are put together.

Invariant: what a stored container claims is checked before it is believed. Must not know
where bytes are stored, nor live objects.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, TypeAlias

import numpy as np
import torch

from cas_ckpt.errors import CorruptionError, InvalidInputError, TooLargeError, UnsupportedVersionError
from cas_ckpt.memory import available_bytes, current_limits
from cas_ckpt.objects.layouts import LayoutObject
from cas_ckpt.objects.spec import Spec, check_known
from cas_ckpt.objects.state import (
    RANKS,
    ArrayTarget,
    Container,
    Flavor,
    Item,
    Name,
    Path,
    StoredTensor,
    TensorCopy,
    ValueItem,
    in_order,
    parse_key,
    render_key,
    walk,
)
from cas_ckpt.objects.structures import STRUCTURE_KINDS, Named, checked, known_instance
from cas_ckpt.training.capture.capture import MAX_DEPTH
from cas_ckpt.training.capture.composites import COMPOSITE_KINDS, compose
from cas_ckpt.training.capture.tensors import (
    CastTarget,
    elements_of,
    new_array,
    new_tensor,
    part_dtype,
    structured,
    view_of,
    wait_for_devices,
)
from cas_ckpt.training.per_rank import GENERATOR, new_generator, set_generator
from cas_ckpt.training.stateful import set_versions

NO_LAYOUT = LayoutObject()
"""Nothing is tied, all tensors lie in the order of their dimensions, no version of a module is known."""

_ALWAYS_BYTES = 64 << 20
"""So much is tried however little memory the system says to have."""

Fetch: TypeAlias = Callable[[Sequence[TensorCopy]], object]
Builder: TypeAlias = Callable[[], Any]
"""Gives an object once all bytes are in place; called once."""


def materialize(
    tree: Item, fetch: Fetch, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    layout: LayoutObject = NO_LAYOUT,
) -> Any:  # fmt: skip
    """The state of `tree` as new objects: dict, OrderedDict, list, tuple, tensors, arrays, values.

    Args:
        fetch: Verifies and fills all copies; called once. Nothing is returned if it raises.
        device: Where torch tensors go; host memory by default.
        dtype: What dense floating-point tensors of torch become, each value rounded; None: what they are.
        layout: Of the commit: which keys are one tensor, how tensors lie in memory, versions of modules.

    Raises:
        CorruptionError: containers that no commit writes. TooLargeError: more bytes than there is memory.
    """
    made = NewObjects(device=device, dtype=dtype, layout=layout)
    check_bytes(tree, made)
    return made.filled(tree, (), fetch)


class NewObjects:
    """Allocates memory for stored tensors and notes what is to be copied there.

    Attributes:
        copies: What `fetch` must fill before any builder is called.
        group_of: Path of a tensor that is tied to others -> their number.
    """

    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        layout: LayoutObject = NO_LAYOUT,
        copies: list[TensorCopy] | None = None,
    ) -> None:
        self.device = torch.device("cpu" if device is None else device)
        self.dtype = dtype
        self.casts = True
        self.copies = [] if copies is None else copies
        self._layout = layout
        self.group_of = {parse_key(key): number for number, group in enumerate(layout.aliases) for key in group}
        self._shared: dict[int, tuple[Spec, Any]] = {}

    def filled(self, item: Item, path: Path, fetch: Fetch) -> Any:
        """The object for `item`; `fetch` fills all memory that was noted until now."""
        build = self.builder(item, path)
        # Work that is queued may still use memory that torch has just given again; other threads write there.
        wait_for_devices({self.device})
        fetch(self.copies)
        return build()

    def builder(self, item: Item, path: Path) -> Builder:
        """A builder for any item; its memory is allocated now."""
        if isinstance(item, StoredTensor):
            return constant(self._tensor(item, path))
        if isinstance(item, ValueItem):
            return constant(item.value)
        if not isinstance(item, Container) or len(path) > MAX_DEPTH:
            raise CorruptionError(f"{render_key(path[:8])}: nothing can be made of this entry, or it nests too deep")
        if item.kind == "structured" or item.kind in COMPOSITE_KINDS or item.kind == GENERATOR:
            return self._whole(item, path)
        children = {name: self.builder(child, (*path, name)) for name, child in item.children.items()}
        build = container_builder(item, children, path)
        versions = self._layout.versions.get(render_key(path)) if self._layout.versions else None
        return build if versions is None or item.kind != "dict" else partial(_module_state, build, versions)

    def _tensor(self, stored: StoredTensor, path: Path) -> Any:
        """New memory, or that of a tensor which is tied to this one."""
        group = self.group_of.get(path)
        if group is None:
            return self._allocate(stored, path)
        if group not in self._shared:
            self._shared[group] = (stored.spec, self._allocate(stored, path))
        spec, shared = self._shared[group]
        if spec != stored.spec:
            raise CorruptionError(f"{render_key(path)}: {stored.spec} is listed as tied to a tensor of {spec}")
        return shared

    def _allocate(self, stored: StoredTensor, path: Path) -> Any:
        if not (stored.spec.is_known and stored.spec.fits_array):
            check_known(stored.spec, render_key(path))
        try:
            made, target = self._new(stored, path)
        except (RuntimeError, MemoryError) as error:
            where = "host memory" if stored.flavor == Flavor.NUMPY else f"memory of {self.device}"
            raise TooLargeError(
                f"{render_key(path)}: {stored.spec.num_bytes} bytes of {where} cannot be had for {stored.spec}: "
                "choose keys, or read() it region by region"
            ) from error
        self.copies.append(TensorCopy(path, stored, target))
        return made

    def _new(self, stored: StoredTensor, path: Path) -> tuple[Any, ArrayTarget]:
        if stored.flavor == Flavor.NUMPY:
            array = new_array(stored.spec, key=render_key(path))
            return array, view_of(array)
        dtype = part_dtype(stored.spec.dtype)
        order = self._layout.orders.get(render_key(path), ()) if self._layout.orders else ()
        if order and len(order) != len(stored.spec.shape):
            raise CorruptionError(f"{render_key(path)}: the layout orders {len(order)} dimensions of {stored.spec}")
        if self.dtype is not None and dtype.is_floating_point and self.casts:
            tensor = new_tensor(stored.spec.shape, self.dtype, self.device, order)
            ask_for_large_pages(tensor)
            return tensor, CastTarget(tensor, dtype)
        tensor = new_tensor(stored.spec.shape, dtype, self.device, order)
        ask_for_large_pages(tensor)
        return tensor, elements_of(tensor)

    def _whole(self, container: Container, path: Path) -> Builder:
        """A builder for a container that is one tensor, array or generator: its parts are plain tensors."""
        key, kind, attrs = render_key(path), container.kind, container.attrs
        generator = new_generator(attrs, key=key, device=self.device) if kind == GENERATOR else None
        parts: dict[Name, Any] = {}
        self.casts = False  # the parts of a tensor have the dtypes that belong together
        for name, part in container.children.items():
            if not isinstance(part, StoredTensor):
                raise CorruptionError(f"{render_key((*path, name))}: a part of a {kind} tensor is not a tensor")
            parts[name] = self._allocate(part, (*path, name))
        self.casts = True
        if generator is not None:
            return lambda: set_generator(generator, parts.get("state"), key=key)
        if kind in COMPOSITE_KINDS:
            return lambda: compose(kind, attrs, parts, key=key)
        if not isinstance(parts.get("items"), np.ndarray):
            raise CorruptionError(f"{key}: a structured array has no items")
        return lambda: structured(parts["items"], attrs, key=key)


def check_bytes(tree: Item, made: NewObjects) -> None:
    """Refuse what would not fit into host memory, before any of it is allocated.

    Raises:
        TooLargeError: more bytes than the limit says, or than the system has available.
    """
    on_host, wanted = made.device.type == "cpu", 0
    tied: dict[int, int] = {}
    for path, item in walk(tree):
        if isinstance(item, StoredTensor) and (on_host or item.flavor == Flavor.NUMPY):
            group = made.group_of.get(path)
            if group is None:
                wanted += _num_bytes(item)
            else:
                tied[group] = max(tied.get(group, 0), _num_bytes(item))
    wanted += sum(tied.values())
    most = current_limits().max_bytes or max(available_bytes(), _ALWAYS_BYTES)
    if wanted > most:
        raise TooLargeError(
            f"the state has {wanted} bytes of tensors, {most} may be taken: choose keys, read() regions, or check out "
            "into tensors that are there; with cas_ckpt.limits(max_bytes=...) it is tried all the same"
        )


def _num_bytes(stored: StoredTensor) -> int:
    try:
        return stored.spec.num_bytes
    except (InvalidInputError, UnsupportedVersionError):  # whoever makes it says so
        return 0


def _module_state(build: Builder, versions: Mapping[str, int]) -> Any:
    """The state of a module as its `state_dict()` gives it, so that a module which loads it learns the versions."""
    state = OrderedDict(build())
    set_versions(state, versions, state)
    return state


def constant(value: Any) -> Builder:
    """A builder that gives `value`."""
    return lambda: value


def container_builder(item: Container, children: Mapping[Name, Builder], path: Path) -> Builder:
    """A builder for a container like `item`; values kept per rank are a dict by rank.

    Raises:
        CorruptionError: a list or tuple whose children are not numbered, a structure with other fields than it lists.
        UnsupportedVersionError: a kind that this version does not know.
    """
    kind = item.kind
    if kind in STRUCTURE_KINDS:  # of the registered class, else a `Named`
        key = render_key(path)
        name, fields = checked(kind, item.attrs, children, key=key)
        return lambda: known_instance(Named(kind, name, {each: children[each]() for each in fields}), key=key)
    if kind in ("dict", RANKS):
        return lambda: {name: build() for name, build in children.items()}
    if kind == "odict":
        order = dict.fromkeys((*(name for name in in_order(item) if name in children), *children))
        return lambda: OrderedDict((name, children[name]()) for name in order)
    if kind not in ("list", "tuple"):
        raise UnsupportedVersionError(f"{render_key(path)}: containers of kind {kind!r} are newer than this version")
    if any(type(name) is not int for name in children):
        raise CorruptionError(f"{render_key(path)}: the items of a {kind} are not numbered")
    ordered = [children[name] for name in sorted(children)]
    made = list if kind == "list" else tuple
    return lambda: made(build() for build in ordered)


# --- large pages -----------------------------------------------------------------------------
# To give memory that was never touched takes long, page by page: docs/decisions/004-two-passes.md. NumPy asks by itself
# for its arrays. A hint: where it is not followed nothing changes but the time.

WORTH_BYTES = 1 << 20
"""Shorter tensors are left alone; from here on most are mapped by themselves, and the kernel joins neighbours."""


def ask_for_large_pages(tensor: torch.Tensor) -> None:
    """Say that the memory of `tensor`, which is dense and not touched yet, may be of large pages."""
    num_bytes = tensor.nbytes
    if num_bytes < WORTH_BYTES or tensor.device.type != "cpu":
        return
    if (advise := _madvise()) is not None:
        # Whole pages that are the tensor's alone.
        first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (tensor.data_ptr() + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        advise(ctypes.c_void_p(first), ctypes.c_size_t(stop - first), mmap.MADV_HUGEPAGE)


@cache
def _madvise() -> Any:
    """The call of the system; None where it is not there."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        return ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
