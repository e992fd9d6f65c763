"""The state of a torch optimizer, by the names of its parameters instead of their numbers.

    {"state": {"layers.0.weight": {"step": ..., "exp_avg": ...}},
     "param_groups": [{"lr": ..., "params": ["layers.0.weight", ...]}]}

This is the form of torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, but made
without the step that torch takes there when an optimizer has no state yet.

Invariant: reading changes nothing, and loading changes the dtype of no state tensor. Must not
know where names come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cas_ckpt.errors import MismatchError

STATE, GROUPS, PARAMS = "state", "param_groups", "params"


@dataclass(frozen=True, slots=True)
class OptimizerForm:
    """What an optimizer's `state_dict()` gave, and how its parameters are called there.

    Attributes:
        raw: The state itself.
        groups: The keys of the parameters, by group; torch's are numbers.
        names: Key -> name; None if parameters have no names.
        params: Key -> parameter, where it is known.
    """

    raw: dict[str, Any]
    groups: list[list[Any]]
    names: dict[Any, str] | None
    params: dict[Any, torch.Tensor]

    def named(self) -> dict[str, Any]:
        """The state by names, or as it is if there are none."""
        if self.names is None:
            return self.raw
        names = self.names
        groups = [
            {**group, PARAMS: [names[key] for key in keys]}
            for group, keys in zip(self.raw[GROUPS], self.groups, strict=True)
        ]
        return {**self.raw, STATE: {names.get(key, key): each for key, each in self.raw[STATE].items()}, GROUPS: groups}

    def numbered(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """`state`, which may be by names, in the form of `raw`.

        Raises:
            MismatchError: a name that this optimizer does not have.
        """
        keys = {name: key for key, name in (self.names or {}).items()}
        if not keys or not all(isinstance(name, str) for group in state[GROUPS] for name in group[PARAMS]):
            return dict(state)
        unknown = [name for group in state[GROUPS] for name in group[PARAMS] if name not in keys]
        if unknown:
            raise MismatchError(
                f"the state has {len(unknown)} parameters that the optimizer has not, {unknown[0]!r} for one: "
                "build the optimizer over the same parameters"
            )
        groups = [{**group, PARAMS: [keys[name] for name in group[PARAMS]]} for group in state[GROUPS]]
        return {**state, STATE: {keys.get(name, name): each for name, each in state[STATE].items()}, GROUPS: groups}


class NamedOptimizer:
    """An optimizer as a Stateful that names its parameters.

    Args:
        names: Of all parameters in the order of the groups; None keeps torch's numbers.
    """

    __slots__ = ("names", "optimizer")

    def __init__(self, optimizer: torch.optim.Optimizer, names: Sequence[str] | None) -> None:
        self.optimizer = optimizer
        self.names = names

    def state_dict(self) -> Any:
        """The state by names, where that can be; its tensors are the live ones."""
        found = self.read()
        return found.named() if isinstance(found, OptimizerForm) else found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave, or what torch's own `state_dict` gives."""
        found = self.read()
        self.write(found.numbered(state_dict) if isinstance(found, OptimizerForm) else state_dict)

    def read(self) -> OptimizerForm | Any:
        """The optimizer's own state; just what it gave if that is not of torch's form."""
        raw = self.optimizer.state_dict()
        params = [group[PARAMS] for group in self.optimizer.param_groups]
        if not _is_torchs(raw, list(map(len, params))):
            return raw
        groups = [list(group[PARAMS]) for group in raw[GROUPS]]
        keys = [key for group in groups for key in group]
        names = None if self.names is None else dict(zip(keys, self.names, strict=True))
        if names is not None and raw[STATE].keys() & set(names.values()):
            names = None  # the optimizer has something of its own under the name of a parameter
        return OptimizerForm(raw, groups, names, dict(zip(keys, (p for group in params for p in group), strict=True)))

    def write(self, raw: Mapping[str, Any]) -> None:
        """Load a state of the form that `read` gave."""
        self.optimizer.load_state_dict(dict(raw))
        _undo_casts(self.optimizer, raw)


def _is_torchs(raw: Any, sizes: list[int]) -> bool:
    """Whether a state has groups of numbered parameters, as many as the optimizer has."""
    if not isinstance(raw, dict) or not isinstance(raw.get(STATE), dict) or not isinstance(raw.get(GROUPS), list):
        return False
    if not all(isinstance(group, dict) and isinstance(group.get(PARAMS), list) for group in raw[GROUPS]):
        return False
    numbers = [key for group in raw[GROUPS] for key in group[PARAMS]]
    distinct = len(set(numbers)) == len(numbers) if all(type(key) is int for key in numbers) else False
    return distinct and [len(group[PARAMS]) for group in raw[GROUPS]] == sizes


def _undo_casts(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Give back their dtype to state tensors that `load_state_dict` cast to their parameter's."""
    if not isinstance(state, Mapping) or STATE not in state:
        return
    params = [param for group in optimizer.param_groups for param in group[PARAMS]]
    indices = [index for group in state[GROUPS] for index in group[PARAMS]]
    for param, index in zip(params, indices, strict=False):
        for name, value in state[STATE].get(index, {}).items():
            loaded = optimizer.state[param].get(name) if param in optimizer.state else None
            if isinstance(loaded, torch.Tensor) and _was_cast(loaded, value):
                optimizer.state[param][name] = value.to(loaded.device)


def _was_cast(loaded: torch.Tensor, given: Any) -> bool:
    return isinstance(given, torch.Tensor) and loaded.dtype != given.dtype and loaded.shape == given.shape
