"""Objects with a state: the protocol, and modules and optimizers as objects that follow it by names without wrappers.

Names of parameters do not depend on what a module is wrapped in:

    DistributedDataParallel, DataParallel ("module."), torch.compile ("_orig_mod."): left out of keys
    FSDP1, checkpoint_wrapper: torch leaves them out of state dicts; here of parameters' names too
    fully_shard (FSDP2), tensor parallel: change no names

An optimizer gets its parameters' names from the modules in the same state:

1. Modules are looked for in the state itself and in plain dicts, lists and tuples in it, in the
   order of their keys (not in that of insertion, which is not part of a state).
2. If one module has all parameters of the optimizer, they are called as that module calls them;
   the first such module counts.
3. Else each parameter has the key of its (first) module in front: `gen.layers.0.weight`, and
   `models.gen.layers.0.weight` where the state is `{"models": {"gen": ...}}`.
4. A tied parameter has the first name that its module gives it.
5. If a parameter is found nowhere, or two would be called the same, or the optimizer's state
   does not have torch's form, everything keeps torch's numbers.

Parameters under FSDP1 are pieces of flat ones. Only torch knows which part of a flat parameter is what, so its own
helpers do the naming; they are collective: every rank of the module's group has to commit. Their state dicts are
sharded ones, whatever type the user set for calls of their own.

Invariant: naming changes no module, no optimizer and no state, and initializes no optimizer; a name is shortened by
what a wrapper adds, never by what a user's module happens to call "module". Must not know commits.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch

from cas_ckpt.objects.nodes import name_order
from cas_ckpt.objects.state import render_key
from cas_ckpt.objects.structures import structure_of
from cas_ckpt.training.optimizers import GROUPS, PARAMS, STATE, NamedOptimizer, OptimizerForm
from cas_ckpt.training.torch_internals import children_of, loads_by_itself, params_of


@runtime_checkable
class Stateful(Protocol):
    """An object that gives its state as a mapping and takes it back: modules, optimizers, loaders, ..."""

    def state_dict(self) -> Any:
        """The state; its tensors may be the live ones. Must change nothing that matters."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take over a state that `state_dict` gave, here or in another process."""
        ...


def is_stateful(value: Any) -> TypeGuard[Stateful]:
    """Whether `value` is an object (not a class) with both methods."""
    if isinstance(value, type):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


class StateDict(dict[str, Any]):
    """A dict that is Stateful: for progress counters, histories, loose tensors.

        progress = StateDict(step=0, best=None)

    A checkout makes its content exactly that of the commit, in place: the same dict object,
    and the same tensor objects where specs agree.
    """

    def state_dict(self) -> dict[str, Any]:
        """The content as a plain dict; values are the live ones."""
        return dict(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Hold exactly what `state_dict` holds."""
        content = dict(state_dict)
        self.clear()
        self.update(content)


# ------------------------------------------------------------ names of modules

_IN_KEYS = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod"}
"""Wrappers by class, and the child whose name is in state dicts."""

_IN_MODULES = {
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "ActivationWrapper": "_checkpoint_wrapped_module",
    "_FabricModule": "_forward_module",  # of Lightning's Fabric
}
"""Wrappers whose hooks leave the child's name out of state dicts already."""

_HOMES = ("torch.", "lightning.", "lightning_fabric.")
"""Packages that these classes are in."""

WRAPPERS = frozenset({*_IN_KEYS.values(), *_IN_MODULES.values()})
"""Components that wrappers add to names."""


@dataclass(slots=True)
class Survey:
    """Facts about the names in a module.

    Attributes:
        params: id(parameter) -> its first name, without wrappers.
        prefixes: Prefix of keys in the state dict -> what it is without wrappers; only of wrappers.
        modules: Prefix of a module, without wrappers -> its number in the order of torch's `modules()`.
        flat: Whether there is an FSDP1 module.
    """

    params: dict[int, str] = field(default_factory=dict)
    prefixes: dict[str, str] = field(default_factory=dict)
    modules: dict[str, int] = field(default_factory=dict)
    flat: bool = False

    def clean(self, key: str) -> str:
        """A key of the state dict without the names of wrappers."""
        if not self.prefixes:
            return key
        end = len(key)
        while (end := key.rfind(".", 0, end)) >= 0:
            short = self.prefixes.get(key[: end + 1])
            if short is not None:
                return short + key[end + 1 :]
        return key

    def clean_module(self, name: str) -> str:
        """The name of a module without the names of wrappers."""
        return self.clean(f"{name}.x").removesuffix("x").removesuffix(".") if name else ""


@dataclass(frozen=True, slots=True)
class _Kind:
    """A class of modules: the child that it wraps, whose name is in state dicts or is hidden there."""

    shown: str | None
    hidden: str | None
    is_flat: bool
    may_be_gathered: bool


@lru_cache(maxsize=1024)
def _kind(of: type) -> _Kind:
    names = [kind.__name__ for kind in of.__mro__ if kind.__module__.startswith(_HOMES)]
    shown = next((_IN_KEYS[name] for name in names if name in _IN_KEYS), None)
    hidden = next((_IN_MODULES[name] for name in names if name in _IN_MODULES), None)
    return _Kind(shown, hidden, "FullyShardedDataParallel" in names, "FSDPModule" in names)


def survey(module: torch.nn.Module, raw: str = "", clean: str = "", found: Survey | None = None) -> Survey:
    """Names in `module`.

    Modules under fully_shard that are gathered at the moment are resharded, which is what their
    `state_dict()` does too: while they are gathered, their parameters are not those of the optimizer.

    Args:
        raw, clean: The prefix of `module` in its root, with wrappers and without; for modules in modules.
        found: What was seen before it in its root, to be completed.
    """
    found = found or Survey()
    of: Any = type(module)
    kind = _kind(of)
    found.flat = found.flat or kind.is_flat
    found.modules.setdefault(clean, len(found.modules))
    if kind.may_be_gathered:
        gathered: Any = module
        gathered.reshard()
    for name, param in params_of(module).items():
        if param is not None:
            found.params.setdefault(id(param), clean + name)
    for name, child in children_of(module).items():
        if child is None:
            continue
        if name == kind.shown:
            found.prefixes[f"{raw}{name}."] = clean
            survey(child, f"{raw}{name}.", clean, found)
        elif name == kind.hidden:
            survey(child, raw, clean, found)
        else:
            survey(child, f"{raw}{name}.", f"{clean}{name}.", found)
    return found


def unwrapped(names: Iterable[str]) -> list[str]:
    """Names without what wrappers put into them."""
    return [".".join(part for part in name.split(".") if part not in WRAPPERS) for name in names]


@dataclass(frozen=True, slots=True, eq=False)
class NamedModule:
    """A module as a Stateful whose keys do not depend on wrappers."""

    module: torch.nn.Module

    def state_dict(self, found: Survey | None = None) -> Any:
        """The module's own state dict; a copy where keys had to be shortened.

        Args:
            found: What a survey has found just now.
        """
        state: Any = self.module.state_dict()
        found = found or survey(self.module)
        if not found.prefixes or not isinstance(state, dict):
            return state
        named: Any = OrderedDict((found.clean(key), value) for key, value in state.items())
        if hasattr(state, "_metadata"):
            # Of a wrapper and the module in it, which have one name, the module comes later.
            named._metadata = {found.clean_module(name): about for name, about in state._metadata.items()}
        return named

    def load_state_dict(self, state_dict: Any) -> None:
        """Load what `state_dict` gave, here or under other wrappers."""
        found = survey(self.module)
        if not found.prefixes:
            self._load(state_dict)
            return
        # In the module's own dict, which has its wrappers' names.
        state: Any = self.module.state_dict()
        own = {found.clean(key): key for key in state}
        for name in own.keys() - state_dict.keys():
            del state[own[name]]
        state.update({own.get(name, name): value for name, value in state_dict.items()})
        if is_module_state(state) and is_module_state(state_dict):
            told = state_dict._metadata
            for name in state._metadata:
                state._metadata[name] = told.get(found.clean_module(name), state._metadata[name])
        self._load(state)

    def owners(self) -> dict[str, torch.nn.Module]:
        """The modules whose class has a `_load_from_state_dict` of its own, by their names without wrappers."""
        found, owners = survey(self.module), {}
        for raw, module in self.module.named_modules(remove_duplicate=False):
            parts = found.clean_module(raw).split(".")
            # Of a wrapper and the module in it, which have one name, the module comes later.
            owners[".".join(part for part in parts if part not in _IN_MODULES.values())] = module
        return {name: module for name, module in owners.items() if loads_by_itself(module)}

    def _load(self, given: Any) -> None:
        """Load a state; one of the names that the module gives is what it takes, whatever torch expects besides.

        Some modules save more than they look for (the quantization of bitsandbytes, hooks), or less: torch would not
        let them load their own state.
        """
        is_torchs = type(self.module).load_state_dict is torch.nn.Module.load_state_dict
        # Under FSDP1 the state is a gathered one, and its keys are torch's own.
        if is_torchs and not isinstance(self, FlatModule) and self.module.state_dict().keys() == given.keys():
            self.module.load_state_dict(given, strict=False)
        else:
            self.module.load_state_dict(given)


# ------------------------------------------------------------ versions of modules
# torch gives each module the version that its state is of, so that the module can bring the state of an old version up
# to date: `_metadata` of a state dict, {name of a module: {"version": number}}. A module without one is of version 1.


def is_module_state(value: Any) -> bool:
    """Whether `value` is what a module's `state_dict()` gave: it is stored as a dict, not as an OrderedDict."""
    return type(value) is OrderedDict and hasattr(value, "_metadata")


def module_versions(state: Any) -> dict[str, int] | None:
    """The versions in a module's state that are not 1, by the names of the modules; None of another state."""
    if not is_module_state(state) or not isinstance(state._metadata, Mapping):
        return None
    names = _names_in_keys(state, state._metadata)
    found = {  # of a wrapper and the module in it, which have one name, the module comes later
        name: about.get("version") for name, about in zip(names, state._metadata.values(), strict=True)
        if isinstance(name, str) and isinstance(about, Mapping)
    }  # fmt: skip
    return {name: number for name, number in found.items() if type(number) is int and 0 <= number != 1}


def set_versions(state: Any, stored: Mapping[str, int], keys: Collection[Any]) -> None:
    """Say in a module's `state` which versions the modules were of that `keys` are from; the others stay as they are.

    Args:
        stored: Those that are not 1.
        keys: What is restored of it. A module of whose own tensors, or of whose modules', none is restored keeps its
            version: it would bring up to date what is of today.
    """
    given = set(map(str, keys))
    left = set(map(str, state)) - given
    within = _modules_of(map(str, keys))
    kept = (_modules_of(left).keys() - within) | ({*map(_module_of, left)} - {*map(_module_of, given)})
    known = {name: number for name, number in {**within, **stored}.items() if name not in kept}
    told = OrderedDict(getattr(state, "_metadata", ()))
    called = dict(zip(told, _names_in_keys(state, told), strict=True))
    for name in {**told, **known}:
        number = known.get(called.get(name, name))
        if number is not None:
            told[name] = {**told.get(name, {}), "version": number}
    state._metadata = told


def _names_in_keys(state: Mapping[Any, Any], names: Iterable[Any]) -> list[Any]:
    """Names of modules in the keys of a module's state.

    Hooks of wrappers, and torch's `get_model_state_dict`, leave the names of wrappers out of the keys alone.
    """
    names = list(names)
    if not any(isinstance(name, str) and not WRAPPERS.isdisjoint(name.split(".")) for name in names):
        return names
    modules, found = _modules_of(map(str, state)), []
    for name in names:
        called = name
        if isinstance(name, str):
            called = ""
            for part in name.split("."):
                longer = f"{called}.{part}" if called else part
                called = called if part in WRAPPERS and longer not in modules else longer
        found.append(called)
    return found


def _module_of(key: str) -> str:
    return key.rpartition(".")[0]


def _modules_of(keys: Iterable[str]) -> dict[str, int]:
    """The names of all modules that these are in, each as of version 1."""
    found = {"": 1}
    for key in keys:
        name = key
        while (name := _module_of(name)) not in found:
            found[name] = 1
    return found


# ------------------------------------------------------------ FSDP1

_COMPILED = "_orig_mod."


@contextmanager
def _sharded(module: torch.nn.Module) -> Iterator[Any]:
    """FSDP's class, while state dicts of `module` are sharded ones."""
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
    from torch.distributed.fsdp.api import ShardedOptimStateDictConfig, ShardedStateDictConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 warns of its own end, and of its own calls
        fsdp: Any = FullyShardedDataParallel
        configs = ShardedStateDictConfig(offload_to_cpu=False), ShardedOptimStateDictConfig(offload_to_cpu=False)
        with fsdp.state_dict_type(module, StateDictType.SHARDED_STATE_DICT, *configs):
            yield fsdp


class FlatModule(NamedModule):
    """A module with FSDP1 in it: its state dict is sharded."""

    __slots__ = ()

    def state_dict(self, found: Survey | None = None) -> Any:
        with _sharded(self.module):
            return super().state_dict(found)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        with _sharded(self.module):
            super().load_state_dict(state_dict)


class FlatOptimizer(NamedOptimizer):
    """An optimizer over an FSDP1 module: torch names and shards its state."""

    __slots__ = ("module",)

    def __init__(self, optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> None:
        super().__init__(optimizer, None)
        self.module = module

    def read(self) -> OptimizerForm:
        """The state with torch's names as keys; names are these without wrappers."""
        with _sharded(self.module) as fsdp:
            group = _group_of(self.module, fsdp)
            raw = fsdp.optim_state_dict(self.module, self.optimizer, self.optimizer.state_dict(), group=group)
        raw = {**raw, STATE: dict(raw[STATE]), GROUPS: [dict(group) for group in raw[GROUPS]]}
        order = survey(self.module).modules
        for each in raw[GROUPS]:
            # Flat parameters come in the order of FSDP's units: here, in that of the modules.
            each[PARAMS] = sorted(
                each[PARAMS], key=lambda key: order.get((name := _clean(key))[: name.rfind(".") + 1], len(order))
            )
        groups = [list(each[PARAMS]) for each in raw[GROUPS]]
        return OptimizerForm(raw, groups, {key: _clean(key) for keys in groups for key in keys}, {})

    def write(self, raw: Mapping[str, Any]) -> None:
        """Load a state that all ranks have pieces of."""
        with _sharded(self.module) as fsdp:
            group = _group_of(self.module, fsdp)
            state = fsdp.optim_state_dict_to_load(self.module, self.optimizer, dict(raw), group=group)
            super().write(state)


def _group_of(module: torch.nn.Module, fsdp: Any) -> Any:
    """The process group of the outermost FSDP1 module, as torch's own helpers choose it."""
    group = fsdp.fsdp_modules(module)[0].process_group
    return None if isinstance(group, tuple) else group


def _clean(key: str) -> str:
    return key.replace(_COMPILED, "")


# ------------------------------------------------------------ the names in a state

_MAX_DEPTH = 100
_LOOKED_INTO = (dict, list, tuple)
_MODULES = (torch.nn.Module, NamedModule)


@dataclass(eq=False)
class Names:
    """The modules of one state, and what they call their parameters.

    Valid as long as no parameter of theirs is replaced.
    """

    state: Mapping[Any, Any]
    _surveys: dict[int, tuple[torch.nn.Module, Survey]] = field(default_factory=dict, init=False)

    def adapt(self, value: Any) -> Any:
        """A Stateful that gives the state of `value` by names; `value` itself if it has no such form."""
        if isinstance(value, torch.nn.Module):
            return FlatModule(value) if self._survey(value).flat else NamedModule(value)
        if isinstance(value, torch.optim.Optimizer) and hasattr(value, GROUPS):  # else it has a state of its own form
            return self._optimizer(value)
        return value

    def state_dict(self, adapter: Any) -> Any:
        """The state of what `adapt` gave just now; modules are not surveyed once more."""
        if isinstance(adapter, NamedModule) and id(adapter.module) in self._surveys:
            return adapter.state_dict(self._survey(adapter.module))
        return adapter.state_dict()

    def without_grad(self) -> Iterator[str]:
        """The keys of all parameters whose requires_grad is False; of tied ones the first.

        Buffers are not among them (a running mean changes while its layer is frozen), nor are parameters
        under FSDP1, which flattens them, or of modules inside other objects.
        """
        for path, module in self._modules:
            found = self._survey(module)
            names = {} if found.flat else found.params
            for param in module.parameters() if names else ():
                if not param.requires_grad:
                    yield render_key((*path, names[id(param)]))

    def _optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if len({id(param) for param in params}) < len(params):
            return NamedOptimizer(optimizer, None)
        for _, module in self._modules:
            names = self._survey(module).params
            if all(id(param) in names for param in params):
                if self._survey(module).flat:
                    return FlatOptimizer(optimizer, module)
                return NamedOptimizer(optimizer, [names[id(param)] for param in params])
        return NamedOptimizer(optimizer, self._prefixed(params))

    @cached_property
    def _modules(self) -> list[tuple[tuple[Any, ...], torch.nn.Module]]:
        """Looked for when the first optimizer is met: most states of a million entries have none."""
        return list(_modules_in(self.state))

    def _prefixed(self, params: list[torch.Tensor]) -> list[str] | None:
        """Names of parameters of several modules; None if two would be the same."""
        found: dict[int, str] = {}
        for path, module in self._modules:
            if not self._survey(module).flat:
                for number, name in self._survey(module).params.items():
                    found.setdefault(number, ".".join([*map(str, path), name]))
        names = [found.get(id(param)) for param in params]
        known = [name for name in names if name is not None]
        return known if len(set(known)) == len(names) else None

    def _survey(self, module: torch.nn.Module) -> Survey:
        found = self._surveys.get(id(module))
        if found is None:
            found = self._surveys[id(module)] = module, survey(module)  # kept: its number is nobody else's then
        return found[1]


def _modules_in(state: Mapping[Any, Any]) -> Iterator[tuple[tuple[Any, ...], torch.nn.Module]]:
    """Modules with their keys, in the order of the keys."""
    for path, found in found_in(state, _MODULES):
        yield path, found.module if isinstance(found, NamedModule) else found


def found_in(
    value: Any, kinds: tuple[type, ...], path: tuple[Any, ...] = (), inside: frozenset[int] = frozenset()
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Objects of these kinds in plain dicts, lists, tuples and their like, with their keys, in the order of these."""
    if isinstance(value, kinds):
        yield path, value
    elif id(value) not in inside and len(path) < _MAX_DEPTH:
        found = structure_of(value)
        named = value if found is None else found.fields
        pairs = named.items() if isinstance(named, Mapping) else enumerate(named)
        children = {
            name: child
            for name, child in pairs
            if isinstance(child, (*_LOOKED_INTO, *kinds)) or structure_of(child) is not None
        }
        for name in sorted(children, key=lambda name: name_order(name if type(name) in (str, int) else repr(name))):
            yield from found_in(children[name], kinds, (*path, name), inside | {id(value)})


def with_names(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """`state` with its modules and optimizers replaced by Statefuls that name things as this page says.

    For whoever asks the objects of a state themselves, as torch.distributed.checkpoint does:

        dcp.save(with_names({"model": model, "optim": optimizer}), storage_writer=CasStorageWriter("runs/ckpts"))

    stores what `repo.commit({"model": model, "optim": optimizer})` does.
    Commits and checkouts do the same without being asked. Dicts are copied, so what is assigned to the
    result does not reach `state`; what is loaded into its Statefuls does. Calling it twice does no harm;
    what is not a mapping is given back as it is.
    """
    if not isinstance(state, Mapping):
        return state
    names = Names(state)
    return {name: _renamed(value, names, frozenset({id(state)})) for name, value in state.items()}


def _renamed(value: Any, names: Names, inside: frozenset[int]) -> Any:
    if type(value) is dict and id(value) not in inside and len(inside) < _MAX_DEPTH:
        below = inside | {id(value)}
        return {name: _renamed(child, names, below) for name, child in value.items()}
    return names.adapt(value)
