"""The state of a torch optimizer, by the names of its parameters instead of their numbers.

    {"state": {"layers.0.weight": {"step": ..., "exp_avg": ...}},
     "param_groups": [{"lr": ..., "params": ["layers.0.weight", ...]}]}

This is the form of torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, but made
without the step that torch takes there when an optimizer has no state yet.

Invariant: reading changes nothing, and loading changes neither the dtype of a state tensor nor the type of what it is
in. Must not know where names come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cas_ckpt.errors import MismatchError
from cas_ckpt.objects.structures import made_like, structure_of

STATE, GROUPS, PARAMS = "state", "param_groups", "params"

PARAM_NAMES = "param_names"
"""Extra key in the groups of an optimizer made with named_parameters(): names, in the order of `params`."""


@dataclass(frozen=True, slots=True)
class OptimizerForm:
    """An optimizer's `state_dict()`, and the names of its parameters there.

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

    def named_groups(self) -> list[list[str]]:
        """The names of the parameters, by group; nothing if they have none."""
        names = self.names
        return [] if names is None else [[names[key] for key in group] for group in self.groups]

    def numbered(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """`state`, which may be by names and in another order, in the form and order of `raw`.

        Raises:
            MismatchError: other names than this optimizer has, or in other groups.
        """
        names = self.names
        if not names or not all(isinstance(name, str) for group in state[GROUPS] for name in group[PARAMS]):
            return dict(state)
        keys = {name: key for key, name in names.items()}
        saved = {name: number for number, group in enumerate(state[GROUPS]) for name in group[PARAMS]}
        for names_of, other, who, whom in ((saved, keys, "state", "optimizer"), (keys, saved, "optimizer", "state")):
            unknown = [name for name in names_of if name not in other]
            if unknown:
                raise MismatchError(
                    f"the {who} has {len(unknown)} parameters that the {whom} does not have, such as {unknown[0]!r}: "
                    "build the optimizer over the same parameters"
                )
        groups = []
        for number, own in enumerate(self.groups):
            found = {saved[names[key]] for key in own} or {number}
            theirs = state[GROUPS][min(found)] if min(found) < len(state[GROUPS]) else {PARAMS: ()}
            if len(found) > 1 or len(theirs[PARAMS]) != len(own) or len(state[GROUPS]) != len(self.groups):
                raise MismatchError(
                    f"group {number} of the optimizer has other parameters than a group of the state: "
                    "build the optimizer over the same parameters in the same groups"
                )
            groups.append(with_params(theirs, [names[key] for key in own], own))
        return {**state, STATE: {keys.get(name, name): each for name, each in state[STATE].items()}, GROUPS: groups}


def with_params(group: Mapping[str, Any], stored: Sequence[Any], keys: Sequence[Any]) -> dict[str, Any]:
    """A saved group with its parameters in the order of `stored`, called by `keys`; `param_names` follow."""
    saved, names = group.get(PARAMS), group.get(PARAM_NAMES)
    if isinstance(saved, list) and isinstance(names, list) and len(saved) == len(names) and set(saved) >= set(stored):
        called = dict(zip(saved, names, strict=True))
        return {**group, PARAMS: list(keys), PARAM_NAMES: [called[key] for key in stored]}
    return {**group, PARAMS: list(keys)}


def param_names(groups: Sequence[Any], names: Sequence[Any]) -> dict[Any, str] | None:
    """Key -> name, from the `params` and `param_names` of each group; None unless all have a name of their own."""
    found: dict[Any, str] = {}
    for keys, called in zip(groups, names, strict=True):
        if not isinstance(keys, list) or not isinstance(called, list) or len(called) != len(keys):
            return None
        if not {*map(type, keys)} <= {int, str}:
            return None
        found.update(zip(keys, called, strict=True))
    distinct = len(set(map(str, found.values()))) == sum(map(len, groups))
    return found if found and distinct and all(isinstance(name, str) for name in found.values()) else None


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
        """Load a state of the form that `read` gave: what is in it keeps its types, its tensors their dtypes."""
        with _uncast(self.optimizer):
            self.optimizer.load_state_dict(dict(raw))
        _undo_casts(self.optimizer, raw)


@dataclass(frozen=True, slots=True)
class _Uncast:
    """The state of one parameter, which torch's load leaves as it is because it does not see what it is.

    Attributes:
        moves_step: Whether `step` goes to the device of the parameter too.
    """

    state: Any
    moves_step: bool


@contextmanager
def _uncast(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """While torch's own `load_state_dict` runs it brings state to its parameters' devices, and changes nothing else.

    Left alone it casts every floating-point tensor to the dtype of its parameter, and calls the type of each iterable
    with one generator: a deque loses its maxlen, a text becomes the repr of a generator. So the state of each parameter
    is hidden when all hooks of the user's have seen it, and is there again when the class takes it over.
    """
    loading: list[torch.optim.Optimizer] = []  # the one itself, or the one in it to which it leaves the load

    def hide(found: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        if not isinstance(state.get(STATE), dict) or GROUPS not in state:
            return None
        moves = {
            key: bool(group.get("capturable") or group.get("fused")) for group in state[GROUPS] for key in group[PARAMS]
        }
        loading.append(found)
        vars(found)["__setstate__"] = partial(_show, found)
        shown = state[STATE].items()
        return {**state, STATE: {key: _Uncast(each, moves[key]) if key in moves else each for key, each in shown}}

    try:
        hook = optimizer.register_load_state_dict_pre_hook(hide)
    except AttributeError:  # wraps another optimizer, and never was made as one: its load is its own
        yield
        return
    try:
        yield
    finally:
        hook.remove()
        for found in (*loading, optimizer):  # a wrapper may have taken over what the one in it had meanwhile
            vars(found).pop("__setstate__", None)


def _show(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    for param, each in state[STATE].items():
        if isinstance(each, _Uncast):
            state[STATE][param] = copy(_on_device(each.state, param.device, moves_step=each.moves_step))
    type(optimizer).__setstate__(optimizer, state)


def _on_device(value: Any, device: torch.device, *, moves_step: bool, name: Any = None) -> Any:
    """`value` with its tensors on `device`, by torch's rule for `step`; the very object if nothing has to move."""
    if isinstance(value, torch.Tensor):
        return value if name == "step" and not moves_step else value.to(device)
    found = parts_of(value)
    moved = {name: _on_device(part, device, moves_step=moves_step, name=name) for name, part in found.items()}
    if all(moved[name] is part for name, part in found.items()):
        return value
    if structure_of(value) is not None:
        return made_like(value, moved)
    if isinstance(value, tuple):
        return tuple(moved.values())
    copied = copy(value)
    for name, part in moved.items():
        copied[name] = part
    return copied


def parts_of(value: Any) -> Mapping[Any, Any]:
    """Items of a dict, list, tuple, named tuple or dataclass, by name or number; none of anything else."""
    if isinstance(value, dict):
        return value
    if (found := structure_of(value)) is not None:
        return found.fields
    return dict(enumerate(value)) if isinstance(value, list | tuple) else {}


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
    """Give back their dtype to state tensors that a `load_state_dict` other than torch's cast to their parameter's."""
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
