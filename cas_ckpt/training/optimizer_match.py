"""Which state of a commit belongs to which parameter of a live optimizer.

By name where both have names; else by position, as torch does: commits of earlier versions, and
optimizers whose modules are not part of the state, have numbers.

Invariant: groups that do not agree are a fault before anything is touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cas_ckpt.objects.state import Container, Item, Name, Path, StoredTensor, ValueItem, render_key
from cas_ckpt.training.arrays import spec_of
from cas_ckpt.training.composites import part_dtype
from cas_ckpt.training.optimizers import GROUPS, PARAMS, STATE, OptimizerForm
from cas_ckpt.training.sharded import is_kind


@dataclass(frozen=True, slots=True)
class Match:
    """A live optimizer and a stored one, put side by side.

    Attributes:
        stored: Key of a parameter in the live state -> its key in the commit.
        groups: Number of each live group in the commit.
        foreign: Keys in the commit of parameters that this optimizer does not have.
    """

    form: OptimizerForm
    stored: dict[Any, Name]
    groups: list[int]
    foreign: frozenset[Name]

    def own(self, item: Item) -> dict[str, Any]:
        """The live state under the keys of the commit.

        Where a divided parameter (DTensor) has no state yet, it gets empty tensors that are
        divided alike for those in the commit that have the parameter's shape.
        """
        raw, of_commit = self.form.raw, children(children(item).get(STATE))
        state: dict[Name, Any] = {}
        for key, stored in self.stored.items():
            mine = dict(raw[STATE].get(key, {}))
            param = self.form.params.get(key)
            if param is not None and is_kind(param, "DTensor"):
                mine = {**_empty_like(param, children(of_commit.get(stored))), **mine}
            if mine or key in raw[STATE]:
                state[stored] = mine
        state.update({key: value for key, value in raw[STATE].items() if key not in self.stored})
        groups = dict(zip(self.groups, raw[GROUPS], strict=True))
        return raw | {STATE: state, GROUPS: groups}

    def wanted(self, item: Item) -> Item:
        """`item` without the state of parameters that other ranks have."""
        state = item.children.get(STATE) if isinstance(item, Container) else None
        if not self.foreign or not isinstance(item, Container) or not isinstance(state, Container):
            return item
        kept = {name: child for name, child in state.children.items() if name not in self.foreign}
        return Container(item.kind, {**item.children, STATE: Container(state.kind, kept, state.attrs)}, item.attrs)

    def restored(self, built: Mapping[str, Any]) -> dict[str, Any]:
        """What was built under the keys of the commit, under those of the live state."""
        live = {stored: key for key, stored in self.stored.items()}
        state = {live.get(key, key): value for key, value in built.get(STATE, {}).items()}
        theirs = built.get(GROUPS, dict(zip(self.groups, self.form.raw[GROUPS], strict=True)))
        groups = [{**theirs[number], PARAMS: keys} for number, keys in zip(self.groups, self.form.groups, strict=True)]
        return {**built, STATE: state, GROUPS: groups}


def match_optimizer(form: OptimizerForm, item: Item, path: Path, *, alone: bool) -> Match | str:
    """The match, or a sentence on what does not agree.

    Args:
        item: What the commit holds at `path`; groups that were not selected are not checked.
        alone: Whether no other rank may have the parameters that this optimizer does not have.
    """
    stored = _stored_groups(item)
    keys = [key for group in form.groups for key in group]
    if stored is None:
        return _without_groups(form, item, path)
    everything = [name for group in stored for name in group or ()]
    names = form.names
    if names is None or not all(isinstance(name, str) for name in everything):
        if [len(group) for group in form.groups] != [-1 if group is None else len(group) for group in stored]:
            return _other_groups(form, stored, path)
        return Match(form, dict(zip(keys, everything, strict=True)), list(range(len(stored))), frozenset())
    places = {name: number for number, group in enumerate(stored) for name in group or ()}
    groups: list[int] = []
    for number, group in enumerate(form.groups):
        found = {places.get(names[key], -1) for key in group} or {number}
        if len(found) != 1 or not 0 <= min(found) < len(stored):
            return _other_groups(form, stored, path)
        groups.append(min(found))
    foreign = frozenset(everything) - frozenset(names.values())
    if len(set(groups)) < len(groups) or (alone and (foreign or len(groups) != len(stored))):
        return _other_groups(form, stored, path)
    return Match(form, {key: names[key] for key in keys}, groups, foreign)


def _without_groups(form: OptimizerForm, item: Item, path: Path) -> Match | str:
    keys = [key for group in form.groups for key in group]
    state = children(children(item).get(STATE))
    by_name = any(isinstance(key, str) for key in state)
    if by_name and form.names is None and not state.keys() <= form.raw[STATE].keys() | set(keys):
        return (
            f"{render_key((*path, STATE))}: the commit has the state by names, the target's parameters have none: "
            f"add {GROUPS} to the keys, or the module to the state"
        )
    stored = {key: form.names[key] if by_name and form.names is not None else key for key in keys}
    foreign = frozenset(state) - frozenset(stored.values()) - form.raw[STATE].keys()
    return Match(form, stored, list(range(len(form.groups))), foreign if by_name else frozenset())


def _other_groups(form: OptimizerForm, stored: list[list[Name] | None], path: Path) -> str:
    wanted = [len(group) for group in form.groups]
    found = [-1 if group is None else len(group) for group in stored]
    sentence = f"{render_key((*path, GROUPS))}: the target has {_in_words(wanted)}, the commit {_in_words(found)}"
    known = {name for group in stored for name in group or ()}
    unknown = [name for name in (form.names or {}).values() if name not in known]
    if unknown and all(isinstance(name, str) for name in known):
        sentence += f", without {', '.join(map(repr, unknown[:3]))}{' ...' if len(unknown) > 3 else ''}"
    return sentence + ": build the optimizer over the same parameters in the same groups"


def _stored_groups(item: Item) -> list[list[Name] | None] | None:
    """Keys of the parameters in each stored group; None for what is no group, or for no groups at all."""
    groups: Item | None = item.children.get(GROUPS) if isinstance(item, Container) else item
    if groups is None:
        return None
    found = children(groups)
    return [_params(found[number]) for number in sorted(found)] if all(type(name) is int for name in found) else []


def _params(group: Item) -> list[Name] | None:
    params = children(group).get(PARAMS)
    if isinstance(params, ValueItem) and not isinstance(params.value, list):
        return None
    listed = children(params)
    values = [each.value for _, each in sorted(listed.items()) if isinstance(each, ValueItem)]
    return values if params is not None and len(values) == len(listed) else None


def _empty_like(param: torch.Tensor, stored: Mapping[Name, Item]) -> dict[Name, torch.Tensor]:
    shape = tuple(param.shape)
    return {
        name: torch.empty_like(param, dtype=part_dtype(each.spec.dtype), requires_grad=False)
        for name, each in stored.items()
        if isinstance(each, StoredTensor) and each.flavor == "torch" and each.spec.shape == shape and _is_torchs(each)
    }


def _is_torchs(stored: StoredTensor) -> bool:
    """Whether torch has the dtype: an empty tensor of it has the same spec."""
    return spec_of(torch.empty(0, dtype=part_dtype(stored.spec.dtype))).dtype == stored.spec.dtype


def children(item: Item | None) -> Mapping[Name, Item]:
    """The named items of a container, or of a value that is a mapping or a list."""
    if isinstance(item, Container):
        return item.children
    value = item.value if isinstance(item, ValueItem) else None
    if isinstance(value, list):
        value = dict(enumerate(value))
    return {name: ValueItem(child) for name, child in value.items()} if isinstance(value, Mapping) else {}


def _in_words(sizes: list[int]) -> str:
    return f"{len(sizes)} groups of {', '.join(map(str, sizes[:10]))}{' ...' if len(sizes) > 10 else ''} parameters"
