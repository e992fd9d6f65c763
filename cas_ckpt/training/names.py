"""Names of parameters that do not depend on what a module is wrapped in.

    DistributedDataParallel, DataParallel ("module."), torch.compile ("_orig_mod."): left out of keys
    FSDP1, checkpoint_wrapper: torch leaves them out of state dicts; here of parameters' names too
    fully_shard (FSDP2), tensor parallel: change no names

An optimizer gets its parameters' names from the modules that stand in the same state:

1. Modules are looked for in the state itself and in plain dicts, lists and tuples in it, in the
   order of their keys (not in that of insertion, which is no part of a state).
2. If one module has all parameters of the optimizer, they are called as that module calls them;
   the first such module counts.
3. Else each parameter has the key of its (first) module in front: `gen.layers.0.weight`, and
   `models.gen.layers.0.weight` where the state is `{"models": {"gen": ...}}`.
4. A tied parameter has the first name that its module gives it.
5. If a parameter is found nowhere, or two would be called the same, or the optimizer's state
   does not have torch's form, everything keeps torch's numbers.

Invariant: naming changes no module, no optimizer and no state. Must not know commits.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch

from cas_ckpt.objects.nodes import name_order
from cas_ckpt.objects.state import Name, render_key
from cas_ckpt.objects.structures import structure_of
from cas_ckpt.training.optimizers import GROUPS, PARAMS, STATE, NamedOptimizer, OptimizerForm
from cas_ckpt.training.wrappers import NamedModule, survey

# DOC of cas_ckpt.training.names:
# Modules and optimizers under FSDP1, whose parameters are pieces of flat ones.
#
# Only torch knows which part of a flat parameter is what, so its own helpers do the naming; they
# are collective: every rank of the module's group has to commit.
#
# Invariant: state dicts are sharded ones, whatever type the user set for calls of their own, and
# committing initializes no optimizer. Must not know commits.
#

_COMPILED = "_orig_mod."


def is_flat(module: torch.nn.Module) -> bool:
    """Whether there is an FSDP1 module in `module`."""
    return survey(module).flat


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

    def _read(self) -> Any:
        with _sharded(self.module):
            return self.module.state_dict()

    def _load(self, state: Any) -> None:
        with _sharded(self.module):
            self.module.load_state_dict(state)


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
            each[PARAMS] = sorted(each[PARAMS], key=lambda key: order.get(_prefix(_clean(key)), len(order)))
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


def _prefix(name: str) -> str:
    """The prefix of the module that a parameter belongs to."""
    return name[: name.rfind(".") + 1]


_MAX_DEPTH = 100
_LOOKED_INTO = (dict, list, tuple, torch.nn.Module, NamedModule)


class Names:
    """The modules of one state, and what they call their parameters.

    Valid as long as no parameter of theirs is replaced.
    """

    def __init__(self, state: Mapping[Any, Any]) -> None:
        self._state = state
        self._surveys: dict[int, dict[int, str]] = {}

    def adapt(self, value: Any) -> Any:
        """A Stateful that gives the state of `value` by names; `value` itself if it has no such form."""
        if isinstance(value, torch.nn.Module):
            return FlatModule(value) if is_flat(value) else NamedModule(value)
        if isinstance(value, torch.optim.Optimizer):
            return self._optimizer(value)
        return value

    def without_grad(self) -> Iterator[str]:
        """The keys of all parameters whose requires_grad is False; of tied ones the first.

        Buffers are not among them (a running mean changes while its layer is frozen), nor are parameters
        under FSDP1, which flattens them, or of modules inside other objects.
        """
        for path, module in self._modules:
            names = {} if is_flat(module) else self._of(module)
            for param in module.parameters() if names else ():
                if not param.requires_grad:
                    yield render_key((*path, names[id(param)]))

    def _optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if len({id(param) for param in params}) < len(params):
            return NamedOptimizer(optimizer, None)
        for _, module in self._modules:
            names = self._of(module)
            if all(id(param) in names for param in params):
                if is_flat(module):
                    return FlatOptimizer(optimizer, module)
                return NamedOptimizer(optimizer, [names[id(param)] for param in params])
        return NamedOptimizer(optimizer, self._prefixed(params))

    @cached_property
    def _modules(self) -> list[tuple[tuple[Any, ...], torch.nn.Module]]:
        """Looked for when the first optimizer is met: most states of a million entries have none."""
        return list(_modules_in(self._state, (), frozenset()))

    def _prefixed(self, params: list[torch.Tensor]) -> list[str] | None:
        """Names of parameters of several modules; None if they cannot all be told apart."""
        found: dict[int, str] = {}
        for path, module in self._modules:
            if not is_flat(module):
                for number, name in self._of(module).items():
                    found.setdefault(number, ".".join([*map(str, path), name]))
        names = [found.get(id(param)) for param in params]
        known = [name for name in names if name is not None]
        return known if len(set(known)) == len(names) else None

    def _of(self, module: torch.nn.Module) -> dict[int, str]:
        if id(module) not in self._surveys:
            self._surveys[id(module)] = survey(module).params
        return self._surveys[id(module)]


def with_names(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """`state` with its modules and optimizers replaced by Statefuls that name things as this page says.

    For whoever asks the objects of a state themselves, as torch.distributed.checkpoint does:

        dcp.save(with_names({"model": model, "optim": optimizer}), storage_writer=CasStorageWriter("runs/ckpts"))

    stores what `repo.commit({"model": model, "optim": optimizer})` does.
    Commits and checkouts do the same without being asked. Dicts are copied, so what is assigned to the
    result does not reach `state`; what is loaded into its Statefuls does. Calling it twice does no harm;
    what is no mapping is given back as it is.
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


def _modules_in(
    value: Any, path: tuple[Any, ...], inside: frozenset[int]
) -> Iterator[tuple[tuple[Any, ...], torch.nn.Module]]:
    """Modules with their keys, in the order of the keys."""
    if isinstance(value, torch.nn.Module):
        yield path, value
    elif isinstance(value, NamedModule):
        yield path, value.module
    elif id(value) not in inside and len(path) < _MAX_DEPTH:
        found = structure_of(value)
        named = value if found is None else found.fields
        pairs = named.items() if isinstance(named, Mapping) else enumerate(named)
        children = {
            name: child for name, child in pairs if isinstance(child, _LOOKED_INTO) or structure_of(child) is not None
        }
        for name in sorted(children, key=_order):
            yield from _modules_in(children[name], (*path, name), inside | {id(value)})


def _order(name: Any) -> tuple[int, int, bytes]:
    known: tuple[type, ...] = (str, int)
    named: Name = name if type(name) in known else repr(name)
    return name_order(named)
