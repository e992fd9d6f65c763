"""All that is used of torch beside its public interface.

    private                       a private function, class or constant, by its dotted name
    version_of, local_part, ...   private attributes of tensors and modules
    takes_shapes                  what a module does that loads its tensors in its own way
    stager_class                  DCP's copier of states, with memory that we give it
    save                          torch.save, with what a write raised

torch may change any of it in any release. So nothing is looked up before it is needed: where a name is gone, what
needs it says so (`UnsupportedVersionError`) and all else goes on. A torch that is newer than those that the test suite
was run with is named in one warning.

Invariant: no other module of the package uses such a name (tests/test_source.py keeps that). Importing this imports
nothing of torch.distributed.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from copy import copy
from functools import cache
from importlib import import_module
from typing import IO, Any

import torch

from cas_ckpt.errors import UnsupportedVersionError

_LOGGER = logging.getLogger("cas_ckpt")

OLDEST, NEWEST = (2, 9), (2, 15)
"""The releases of torch that tests were run with, the first and the last; see docs/guide.md."""

_DCP = "torch.distributed.checkpoint"

STAGER = f"{_DCP}._state_dict_stager.StateDictStager"
TRAVERSE = f"{_DCP}._traverse.traverse_state_dict"
STORAGE_UTILS = f"{_DCP}._storage_utils"
STORAGE_INFO = f"{_DCP}.filesystem._StorageInfo"
DCP_VERSION = f"{_DCP}.filesystem.CURRENT_DCP_VERSION"
CHUNK_LIST = f"{_DCP}.planner_helpers._create_chunk_list"
DEFAULT_STORE = "torch.distributed.distributed_c10d._get_default_store"
EMPTY_AFFINE = "torch._empty_affine_quantized"
EMPTY_PER_CHANNEL = "torch._empty_per_channel_affine_quantized"
SAFE_GLOBALS = "torch._weights_only_unpickler._get_allowed_globals"

NAMES: Mapping[str, str] = {
    STAGER: "dcp.async_save without async_stager=",
    TRAVERSE: "loading or exporting a commit through DCP",
    STORAGE_UTILS: "CheckpointPaths.installed()",
    STORAGE_INFO: "exporting a DCP folder",
    DCP_VERSION: "exporting a DCP folder",
    CHUNK_LIST: "dcp.load from a repository",
    DEFAULT_STORE: "a commit or checkout of several ranks together",
    EMPTY_AFFINE: "loading a quantized tensor",
    EMPTY_PER_CHANNEL: "loading a quantized tensor",
    SAFE_GLOBALS: "importing a file of torch.save",
}
"""Private functions, classes and constants, and what needs them."""

_VERSION = "torch.Tensor._version"
_INDICES, _VALUES = "torch.Tensor._indices", "torch.Tensor._values"
_LOCAL_TENSOR = "torch.distributed.tensor.DTensor._local_tensor"
_PARAMETERS, _BUFFERS = "torch.nn.Module._parameters", "torch.nn.Module._buffers"
_MODULES = "torch.nn.Module._modules"
_LOAD = "torch.nn.Module._load_from_state_dict"
_LOAD_HOOKS = "torch.nn.Module._load_state_dict_pre_hooks"

ATTRIBUTES: Mapping[str, str] = {
    _VERSION: "committing a tensor",
    _INDICES: "committing a sparse tensor",
    _VALUES: "committing a sparse tensor",
    _LOCAL_TENSOR: "committing or restoring a DTensor",
    _PARAMETERS: "committing or restoring a module",
    _BUFFERS: "committing a module in the background",
    _MODULES: "committing or restoring a module",
    _LOAD: "restoring a module that changes the shapes of its tensors",
    _LOAD_HOOKS: "restoring a module that changes the shapes of its tensors",
}
"""Private attributes by the class that has them, and what needs them."""

OVERRIDDEN = ("_stage_untyped_storage", "_offload_tensor", "_deepcopy_dispatch")
"""Of the stager: where torch has no such name any more, its own way is taken, and copies take new memory."""


def missing(name: str) -> UnsupportedVersionError:
    """The error for a name of `NAMES` or `ATTRIBUTES` that this torch does not have."""
    feature = {**NAMES, **ATTRIBUTES}[name]
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST, NEWEST))
    return UnsupportedVersionError(
        f"torch {torch.__version__} has no {name}, which {feature} needs: install a torch from "
        f"{oldest} to {newest}, or a newer cas_ckpt"
    )


def private(name: str) -> Any:
    """The attribute of torch for a name of `NAMES`.

    Raises:
        UnsupportedVersionError: nothing.
    """
    home, _, last = name.rpartition(".")
    try:
        return getattr(import_module(home), last)
    except (ImportError, AttributeError) as error:
        raise missing(name) from error


def warn_of_unknown_release(version: str) -> None:
    """Log a warning if this is a release of torch that is newer than those of the test suite."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and (int(numbers[1]), int(numbers[2])) > NEWEST:
        _LOGGER.warning(
            "torch %s is newer than this version of cas_ckpt, which was tested with torch up to %s: what does not fit "
            "says so; look for a newer cas_ckpt",
            version, ".".join(map(str, NEWEST)),
        )  # fmt: skip


warn_of_unknown_release(torch.__version__)  # a module is imported once in a process


# ------------------------------------------------------------ attributes


def version_of(tensor: torch.Tensor) -> int | None:
    """How often torch has counted a change in place; None where it does not count, as for inference tensors."""
    try:
        return None if tensor.is_inference() else tensor._version
    except AttributeError as error:
        raise missing(_VERSION) from error


def typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    """`storage` with the dtype that torch's functions which rebuild tensors ask it for."""
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def local_part(divided: Any) -> torch.Tensor:
    """The tensor that a DTensor has here; unlike that of `to_local()` it is no part of a graph."""
    try:
        local: torch.Tensor = divided._local_tensor
    except AttributeError as error:
        raise missing(_LOCAL_TENSOR) from error
    return local


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values of a tensor in COO form, coalesced or not."""
    try:
        return tensor._indices(), tensor._values()
    except AttributeError as error:
        raise missing(_INDICES) from error


def params_of(module: torch.nn.Module) -> Mapping[str, torch.nn.Parameter | None]:
    """The module's own parameters by name; the mapping is torch's own."""
    try:
        return module._parameters
    except AttributeError as error:
        raise missing(_PARAMETERS) from error


def buffers_of(module: torch.nn.Module) -> Mapping[str, torch.Tensor | None]:
    """The module's own buffers by name; the mapping is torch's own."""
    try:
        return module._buffers
    except AttributeError as error:
        raise missing(_BUFFERS) from error


def children_of(module: torch.nn.Module) -> Mapping[str, torch.nn.Module | None]:
    """The modules in a module by name, each as often as it is there; the mapping is torch's own."""
    try:
        return module._modules
    except AttributeError as error:
        raise missing(_MODULES) from error


def loads_by_itself(module: torch.nn.Module) -> bool:
    """Whether the class has a way of its own to load what is in the module, without the modules in it."""
    name = _LOAD.rpartition(".")[2]
    return getattr(type(module), name, None) is not getattr(torch.nn.Module, name, None)


_REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Exceptions of a class that cannot load without values, or without the modules in it."""


def takes_shapes(owner: torch.nn.Module, shapes: Mapping[str, tuple[int, ...]], version: int | None) -> bool:
    """Whether a module that `loads_by_itself` takes tensors of these shapes, which may be others than its own have.

    Observers of quantization resize their buffers; a later version may reshape what an earlier one saved. Tried with a
    copy of the module whose tensors have no memory and which has no modules in it: nothing of `owner` changes.

    Args:
        shapes: Of what there is for it, by the names of its parameters and buffers.
        version: Of the module that saved them; None: that of `owner`, as for a state that tells none.
    """
    faults: list[str] = []
    try:
        trial: Any = copy(owner)
        own: dict[str, Any] = {**owner._parameters, **owner._buffers}
        empty: dict[str, Any] = {
            name: None if each is None else torch.empty_like(each, device="meta") for name, each in own.items()
        }
        state = {name: empty[name].new_empty(shape) for name, shape in shapes.items()}
        trial.__dict__ |= {
            "_parameters": {name: empty[name] for name in owner._parameters},
            "_buffers": {name: empty[name] for name in owner._buffers},
            "_modules": {}, "_load_state_dict_pre_hooks": OrderedDict(),
        }  # fmt: skip
        told = owner._version if version is None else version
        trial._load_from_state_dict(state, "", {"version": told}, False, [], [], faults)
    except _REFUSALS:
        return False
    return not faults


def save(state: Any, file: IO[bytes], **given: Any) -> None:
    """torch.save to an open file; raises what a write raised, which torch reports as a position it did not expect."""
    try:
        torch.save(state, file, **given)
    except RuntimeError as error:
        cause = error.__context__
        if isinstance(cause, (OSError, MemoryError)):
            raise cause from None
        raise


# ------------------------------------------------------------ DCP


@cache
def stager_class() -> Any:
    """DCP's own copier of states to the host, which takes the memory of copies where it is told.

    It is made with a function that gives the room for the copy of a storage, of its length, or None: torch takes new
    memory then. Its `stage` gives the copy of a state; `close` ends it.

    Raises:
        UnsupportedVersionError: this torch has none.
    """
    theirs: Any = private(STAGER)

    class Stager(theirs):  # type: ignore[misc]
        def __init__(self, room_for: Callable[[torch.UntypedStorage], torch.UntypedStorage | None]) -> None:
            super().__init__()
            self._room_for = room_for

        def _stage_untyped_storage(self, storage: torch.UntypedStorage, non_blocking: bool = False) -> Any:
            room = self._room_for(storage)
            if room is None:
                return super()._stage_untyped_storage(storage, non_blocking)
            return room.copy_(storage, non_blocking=False)

        def _offload_tensor(self, x: torch.Tensor, memo: dict[int, Any], non_blocking: bool = False) -> Any:
            if x.layout != torch.strided:  # torch's own asks them for their storage, which they do not have
                memo[id(x)] = copy = x.detach().to("cpu", copy=True)
                return copy
            return super()._offload_tensor(x, memo, non_blocking)

        def close(self) -> None:
            super().close()
            # A cycle, which torch 2.9 and 2.10 leave: it would keep the copies until Python looks for cycles.
            getattr(self, "_deepcopy_dispatch", {}).clear()

    return Stager
