"""Modules and optimizers under FSDP1, whose parameters are pieces of flat ones.

Only torch knows which part of a flat parameter is what, so its own helpers do the naming; they
are collective: every rank of the module's group has to commit.

Invariant: state dicts are sharded ones, whatever type the user set for calls of their own, and
committing initializes no optimizer. Must not know commits.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from cas_ckpt.training.optimizers import GROUPS, PARAMS, STATE, NamedOptimizer, OptimizerForm
from cas_ckpt.training.wrappers import NamedModule, survey

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
