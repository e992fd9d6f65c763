"""Modules that wrap others, and what names are like without them.

Invariant: a name is shortened by what a wrapper adds, never by what a user's module happens
to call "module". Must not know optimizers or commits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

_IN_KEYS = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod"}
"""Wrappers by class, and the child whose name stands in state dicts."""

_IN_MODULES = {"FullyShardedDataParallel": "_fsdp_wrapped_module", "ActivationWrapper": "_checkpoint_wrapped_module"}
"""Wrappers whose hooks leave the child's name out of state dicts already."""

WRAPPERS = frozenset({*_IN_KEYS.values(), *_IN_MODULES.values()})
"""What wrappers put between the dots of a name."""


@dataclass(slots=True)
class Survey:
    """What is to be known about the names in a module.

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


@dataclass(frozen=True, slots=True)
class _Kind:
    """A class of modules: the child that it wraps, whose name is in state dicts or is hidden there."""

    shown: str | None
    hidden: str | None
    is_flat: bool
    may_be_gathered: bool


@lru_cache(maxsize=1024)
def _kind(of: type) -> _Kind:
    names = [kind.__name__ for kind in of.__mro__ if kind.__module__.startswith("torch.")]
    shown = next((_IN_KEYS[name] for name in names if name in _IN_KEYS), None)
    hidden = next((_IN_MODULES[name] for name in names if name in _IN_MODULES), None)
    return _Kind(shown, hidden, "FullyShardedDataParallel" in names, "FSDPModule" in names)


def survey(module: torch.nn.Module) -> Survey:
    """Names in `module`.

    Modules under fully_shard that are gathered at the moment are resharded, which is what their
    `state_dict()` does too: while they are gathered, their parameters are not those of the optimizer.
    """
    found = Survey()
    _walk(module, "", "", found)
    return found


def _walk(module: torch.nn.Module, raw: str, clean: str, found: Survey) -> None:
    of: Any = type(module)
    kind = _kind(of)
    found.flat = found.flat or kind.is_flat
    found.modules.setdefault(clean, len(found.modules))
    if kind.may_be_gathered:
        reshard: Any = module.reshard
        reshard()
    for name, param in module._parameters.items():
        if param is not None:
            found.params.setdefault(id(param), clean + name)
    for name, child in module._modules.items():
        if child is None:
            continue
        if name == kind.shown:
            found.prefixes[f"{raw}{name}."] = clean
            _walk(child, f"{raw}{name}.", clean, found)
        elif name == kind.hidden:
            _walk(child, raw, clean, found)
        else:
            _walk(child, f"{raw}{name}.", f"{clean}{name}.", found)


class NamedModule:
    """A module as a Stateful whose keys do not depend on wrappers."""

    __slots__ = ("module",)

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def state_dict(self) -> Any:
        """The module's own state dict; a plain dict where keys had to be shortened."""
        state = self._read()
        found = survey(self.module)
        if not found.prefixes or not isinstance(state, dict):
            return state
        return {found.clean(key): value for key, value in state.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave, here or under other wrappers."""
        found = survey(self.module)
        self._load(self._own_keys(state_dict, found) if found.prefixes else state_dict)

    def _own_keys(self, state_dict: Mapping[str, Any], found: Survey) -> Any:
        """`state_dict` in the module's own dict, which has its wrappers' names and torch's versions."""
        state = self._read()
        own = {found.clean(key): key for key in state}
        for name in own.keys() - state_dict.keys():
            del state[own[name]]
        state.update({own.get(name, name): value for name, value in state_dict.items()})
        return state

    def _read(self) -> Any:
        return self.module.state_dict()

    def _load(self, state: Any) -> None:
        load: Callable[[Any], Any] = self.module.load_state_dict
        load(state)
