"""Which state of a commit belongs to which parameter of a live optimizer, and what does not agree.

By name where both have names: those of modules in the state, else the `param_names` of an optimizer made with
`named_parameters()`. Else by position, as torch does: an optimizer's own `state_dict()` has numbers, and so has an
optimizer whose module is not part of the state. What `get_optimizer_state_dict` flattened is nested again.

What an optimizer has made of its state is looked at once it is loaded.

Invariant: only reads, but for `write_checked`; groups that do not agree are a fault before anything is touched. Must
not know how bytes move.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cas_ckpt.errors import MismatchError, shown_value
from cas_ckpt.objects.state import Container, Flavor, Item, Name, Path, StoredTensor, ValueItem, render_key
from cas_ckpt.objects.values import encode_value
from cas_ckpt.training.capture.tensors import PLAIN_TENSORS, copyable_view, is_kind, part_dtype, spec_of
from cas_ckpt.training.optimizers import (
    GROUPS,
    PARAM_NAMES,
    PARAMS,
    STATE,
    NamedOptimizer,
    OptimizerForm,
    param_names,
    parts_of,
    with_params,
)
from cas_ckpt.training.restore.draft import RestoreDraft, children
from cas_ckpt.training.stateful import unwrapped

_FLAGS = frozenset({"foreach", "maximize", "capturable", "differentiable", "fused"})
"""Options of torch's optimizers that some versions have and others add when they load."""

_BY_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"})
"""Names that torch's schedulers write into the groups of their optimizer."""

_APART = frozenset({PARAMS, PARAM_NAMES}) | _BY_SCHEDULERS | _FLAGS

_SHAPED = frozenset({
    "acc_delta", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq", "momentum_buffer", "prev",
    "square_avg", "sum",
})  # fmt: skip
"""State of torch's optimizers that has the shape of its parameter."""

_DECOUPLED = "decoupled_weight_decay"
"""The option that distinguishes AdamW from Adam; those of torch before 2.7 do not have it."""


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

    def own(self, item: Item, path: Path, draft: RestoreDraft) -> dict[str, Any]:
        """The live state under the keys of the commit.

        Where a parameter has no state yet, and is divided (DTensor), or either of it and of the state in the commit
        does not lie in memory in the order of its dimensions, it gets empty tensors like it for those in the commit
        that have its shape: fused kernels go through both by the strides of the parameter.
        """
        raw, of_commit = self.form.raw, children(children(item).get(STATE))
        state: dict[Name, Any] = {}
        for key, stored in self.stored.items():
            mine = dict(raw[STATE].get(key, {}))
            param, theirs = self.form.params.get(key), children(of_commit.get(stored))
            if param is not None and (
                is_kind(param, "DTensor")
                or not param.is_contiguous()
                or any(
                    draft.layout.orders and render_key((*path, STATE, stored, name)) in draft.layout.orders
                    for name in theirs.keys() - mine
                )
            ):
                mine = {**_empty_like(param, theirs), **mine}
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
        """`built`, which is under the keys of the commit, under those of the live state."""
        live = {stored: key for key, stored in self.stored.items()}
        state = {live.get(key, key): value for key, value in built.get(STATE, {}).items()}
        theirs = built.get(GROUPS, dict(zip(self.groups, self.form.raw[GROUPS], strict=True)))
        groups = [
            with_params(theirs[number], [self.stored[key] for key in keys], keys)
            for number, keys in zip(self.groups, self.form.groups, strict=True)
        ]
        return {**built, STATE: state, GROUPS: groups}


def match_optimizer(form: OptimizerForm, item: Item, path: Path, *, alone: bool) -> Match | str:
    """The match, or a sentence on what does not agree.

    Args:
        item: What the commit holds at `path`; groups that were not selected are not checked.
        alone: Whether no other rank may have the parameters that this optimizer does not have.
    """
    kept = children(item).keys()
    if not kept & {STATE, GROUPS} and not (kept and kept <= form.raw.keys()):
        remedy = ": commit the optimizer, or its state_dict()"
        if any(map(_is_flat, kept)):
            remedy = ", but the flat form of get_optimizer_state_dict: put the module into the target"
        return (
            f"{render_key(path)}: the target is an optimizer, the commit has neither {STATE} nor {GROUPS} there{remedy}"
        )
    stored = stored_groups(item)
    if stored is None:
        return _without_groups(form, item, path)
    everything = [name for group in stored for name in group or ()]
    mine, theirs = _names_of_both(form, names_in(item, stored))
    if mine is None or theirs is None:
        if [len(group) for group in form.groups] != [-1 if group is None else len(group) for group in stored]:
            return _other_groups(form, stored, path)
        keys = [key for group in form.groups for key in group]
        return Match(form, dict(zip(keys, everything, strict=True)), list(range(len(stored))), frozenset())
    called = {name: key for key, name in theirs.items()}
    places = {theirs[key]: number for number, group in enumerate(stored) for key in group or ()}
    groups: list[int] = []
    for number, group in enumerate(form.groups):
        found = {places.get(mine[key], -1) for key in group} or {number}
        if len(found) != 1 or not 0 <= min(found) < len(stored):
            return _other_groups(form, stored, path, mine, theirs)
        groups.append(min(found))
    foreign = frozenset(everything) - {called[name] for name in mine.values()}
    if len(set(groups)) < len(groups) or (alone and (foreign or len(groups) != len(stored))):
        return _other_groups(form, stored, path, mine, theirs)
    return Match(form, {key: called[name] for key, name in mine.items()}, groups, foreign)


def _names_of_both(
    form: OptimizerForm, stored: dict[Name, str] | None
) -> tuple[dict[Any, str] | None, dict[Name, str] | None]:
    """Key -> name in the live state and in the commit, by which they are compared; None where there are none."""
    labels = param_names(form.groups, [group.get(PARAM_NAMES) for group in form.raw[GROUPS]])
    of_module = form.names
    if stored is None or (of_module is None and labels is None):
        return None, stored
    if of_module is not None and all(key == name for key, name in stored.items()):
        return of_module, stored
    known = [names for names in (of_module, labels) if names is not None]
    for mine, theirs in ((names, stored) for names in known):
        if set(mine.values()) <= set(theirs.values()):
            return mine, theirs
    for mine, theirs in ((_unwrapped(names), _unwrapped(stored)) for names in known):
        if mine and theirs and set(mine.values()) <= set(theirs.values()):
            return mine, theirs
    return known[0], stored


def _unwrapped(names: dict[Any, str]) -> dict[Any, str]:
    """Names without what wrappers put into them; nothing if some would be the same."""
    found = dict(zip(names, unwrapped(list(names.values())), strict=True))
    return found if len(set(found.values())) == len(found) else {}


def names_in(item: Item, stored: list[list[Name] | None]) -> dict[Name, str] | None:
    """Key -> name of the parameters in the commit: keys that are names, or `param_names`."""
    keys = [key for group in stored for key in group or ()]
    if all(isinstance(key, str) for key in keys):
        return {key: str(key) for key in keys}
    groups = children(children(item).get(GROUPS))
    listed = [children(groups[number]).get(PARAM_NAMES) for number in sorted(groups)]
    return param_names(stored, [list(_values(names)) for names in listed])


def _values(names: Item | None) -> Iterator[Any]:
    return (each.value for _, each in sorted(children(names).items()) if isinstance(each, ValueItem))


def nested(item: Item, form: OptimizerForm, path: Path, *, alone: bool) -> Item | str:
    """`item` nested again, if `get_optimizer_state_dict` flattened it (`state.NAME.exp_avg`, `param_groups.NAME.lr`).

    The names of the live parameters say where a name ends. Anything else is given back as it is.

    Args:
        alone: Whether no other rank may have the parameters that this optimizer does not have.
    Returns:
        The item; or a sentence on what does not agree with the live groups.
    """
    flat = children(item)
    names = [] if form.names is None else list(form.names.values())
    if not names or not flat or not all(_is_flat(name) for name in flat):
        return item
    parts: dict[str, dict[str, dict[Name, Item]]] = {STATE: {}, GROUPS: {}}
    known = set(names)
    for key, child in flat.items():
        part, _, rest = str(key).partition(".")
        name = _longest(rest, known)
        if name is not None:
            parts[part].setdefault(name, {})[rest.removeprefix(f"{name}.")] = child
        elif alone:
            return f"{render_key((*path, key))}: of no parameter of the target: build the optimizer over the same ones"
    found: dict[Name, Item] = {}
    if parts[STATE]:
        found[STATE] = Container("dict", {name: _deep(entries) for name, entries in parts[STATE].items()})
    if parts[GROUPS]:
        groups = [_group([(name, parts[GROUPS].get(name, {})) for name in each], path) for each in form.named_groups()]
        faults = [group for group in groups if isinstance(group, str)]
        if faults:
            return faults[0]
        found[GROUPS] = Container("list", {n: group for n, group in enumerate(groups) if not isinstance(group, str)})
    return Container("dict", found)


def _is_flat(name: Name) -> bool:
    return isinstance(name, str) and name.startswith((f"{STATE}.", f"{GROUPS}."))


def _longest(rest: str, known: set[str]) -> str | None:
    """The longest of the names that `rest` goes on from."""
    end = len(rest)
    while (end := rest.rfind(".", 0, end)) > 0:
        if rest[:end] in known:
            return rest[:end]
    return None


def _deep(entries: Mapping[Name, Item]) -> Container:
    """The entries of one parameter, nested by their dotted names; as they are where one would take another's place."""
    names = list(map(str, entries))
    if any(other.startswith(f"{name}.") for name in names for other in names):
        return Container("dict", dict(entries))
    made = Container("dict", {})
    branches: dict[tuple[str, ...], Container] = {(): made}
    for dotted, item in entries.items():
        *above, last = str(dotted).split(".")
        for depth in range(1, len(above) + 1):
            path = tuple(above[:depth])
            if path not in branches:
                branches[path] = branches[path[:-1]].children[path[-1]] = Container("dict", {})
        branches[tuple(above)].children[last] = item
    return made


def _group(members: Sequence[tuple[str, Mapping[Name, Item]]], path: Path) -> Container | str:
    """One group of all parameters in `members`, whose options have to be the same."""
    options = dict(members[0][1]) if members else {}
    for name, theirs in members:
        differing = sorted(str(key) for key in options.keys() | theirs.keys() if options.get(key) != theirs.get(key))
        if differing or not theirs:
            return (
                f"{render_key((*path, GROUPS))}: the commit has "
                f"{f'another {differing[0]}' if theirs and differing else 'nothing'} for {name!r} than for "
                f"{members[0][0]!r}, the target has both in one group: build the optimizer with the same groups"
            )
    options.pop(PARAM_NAMES, None)  # of all parameters of a group, in an order that the flat form does not keep
    return Container("dict", {**options, PARAMS: ValueItem([name for name, _ in members])})


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


def _other_groups(
    form: OptimizerForm, stored: list[list[Name] | None], path: Path,
    mine: Mapping[Any, str] | None = None, theirs: Mapping[Name, str] | None = None,
) -> str:  # fmt: skip
    wanted = [len(group) for group in form.groups]
    found = [-1 if group is None else len(group) for group in stored]
    sentence = f"{render_key((*path, GROUPS))}: the target has {_in_words(wanted)}, the commit {_in_words(found)}"
    known = set((theirs or {}).values())
    unknown = [name for name in (mine or {}).values() if name not in known]
    if unknown:
        sentence += f", without {', '.join(map(repr, unknown[:3]))}{' ...' if len(unknown) > 3 else ''}"
    if unknown and theirs and not all(key == name for key, name in theirs.items()):
        sentence += f" but with {', '.join(map(repr, list(theirs.values())[:3]))} as its param_names"
    return sentence + ": build the optimizer over the same parameters in the same groups"


def stored_groups(item: Item) -> list[list[Name] | None] | None:
    """Keys of the parameters in each stored group; None for what is not a group, or where there are no groups."""
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
    values = list(_values(params))
    return values if params is not None and len(values) == len(listed) else None


def _empty_like(param: torch.Tensor, stored: Mapping[Name, Item]) -> dict[Name, torch.Tensor]:
    shape = tuple(param.shape)
    return {
        name: torch.empty_like(param, dtype=part_dtype(each.spec.dtype), requires_grad=False)
        for name, each in stored.items()
        if isinstance(each, StoredTensor)
        and each.flavor == Flavor.TORCH
        and each.spec.shape == shape
        # Of a dtype that torch has: an empty tensor of it has the same spec.
        and spec_of(torch.empty(0, dtype=part_dtype(each.spec.dtype))).dtype == each.spec.dtype
    }


def _in_words(sizes: list[int]) -> str:
    return f"{len(sizes)} groups of {', '.join(map(str, sizes[:10]))}{' ...' if len(sizes) > 10 else ''} parameters"


def compare_groups(
    draft: RestoreDraft, optimizer: torch.optim.Optimizer, match: Match, item: Item, path: Path
) -> list[tuple[set[str], set[str]]]:
    """For each live group the names that the commit lacks, and those that only the commit has; both are noted."""
    stored = children(children(item).get(GROUPS))
    found = []
    for number, group in zip(match.groups, match.form.raw[GROUPS], strict=True):
        here = (*path, GROUPS, number)
        theirs = children(stored.get(number))
        # All names of a class of torch's must be there, else those of the constructor's arguments.
        is_torchs = type(optimizer).__module__.startswith("torch.optim")
        required = set(group) if is_torchs else set(group) & set(getattr(optimizer, "defaults", ()))
        # Adam said nothing of its weight decay before torch 2.7, and takes it for its own default.
        required -= _APART | ({_DECOUPLED} if "amsgrad" in group else set())
        missing = draft.note_missing_names(required - set(theirs), here) if stored else set()
        foreign = {name for name in theirs if isinstance(name, str)} - set(group) - _APART
        if not missing and not is_torchs:
            foreign = set()
        draft.unexpected += [(*here, name) for name in sorted(foreign)]
        decoupled, own = theirs.get(_DECOUPLED), group.get(_DECOUPLED)
        if draft.strict and isinstance(decoupled, ValueItem) and _DECOUPLED in group and decoupled.value != own:
            draft.faults.append(
                f"{render_key((*here, _DECOUPLED))}: the target has {own}, the commit {decoupled.value!r}: one is "
                "Adam, the other AdamW; use the same, or pass strict=False to take what the commit says"
            )
        found.append((missing, foreign))
    return found


def check_shapes(draft: RestoreDraft, optimizer: torch.optim.Optimizer, match: Match, item: Item, path: Path) -> None:
    """Note a fault where state of a parameter's shape has another one: an optimizer without state would take it."""
    is_torchs = type(optimizer).__module__.startswith("torch.optim")
    state = children(children(item).get(STATE)) if is_torchs else {}
    for key, stored in match.stored.items():
        param = match.form.params.get(key)
        if param is None or stored not in state or key in match.form.raw[STATE]:
            continue
        for name, part in children(state[stored]).items():
            if name in _SHAPED and isinstance(part, StoredTensor) and part.spec.shape != tuple(param.shape):
                draft.faults.append(
                    f"{render_key((*path, STATE, stored, name))}: the parameter is {list(param.shape)}, the commit "
                    f"holds {part.spec}: build the optimizer over the same parameters in the same order"
                )


def completed(built: Any, own: Mapping[Any, Any], missing: Iterable[str], foreign: Iterable[str]) -> Any:
    """`built`, which is about to be loaded, without what is `foreign` and with the `missing` parts of `own`."""
    left_out = set(foreign)
    kept = {name: value for name, value in built.items() if name not in left_out}
    return kept | {name: own[name] for name in missing}


def write_checked(adapter: NamedOptimizer, state: Mapping[str, Any], path: Path) -> None:
    """Load `state`, and look at what the optimizer has then: its class may alter what it is given.

    Under FSDP1 nobody looks: to ask is to gather all of it.

    Raises:
        MismatchError: the state of a parameter is not what it was given; names the first key.
    """
    adapter.write(state)
    found = adapter.read() if type(adapter) is NamedOptimizer else None
    if not isinstance(found, OptimizerForm):
        return
    for key, given in state.get(STATE, {}).items():
        called = (found.names or {}).get(key, key)
        fault = _altered(given, found.raw[STATE].get(key), (*path, STATE, called))
        if fault:
            raise MismatchError(
                f"{fault} after its load_state_dict, so that the next commit would hold another state: mend that "
                "method, or set optimizer.state from what load() gives"
            )


def _altered(given: Any, found: Any, path: Path) -> str:
    """The first difference of `found` from `given`, in words; empty if there is none. More than was given is none.

    Tensors are looked at where a class has copied them; on another device by dtype and shape.
    """
    if given is found:
        return ""
    inside, own = parts_of(given), parts_of(found)
    if type(given) is type(found) and (isinstance(given, dict) or (inside and len(inside) == len(own))):
        faults = (_altered(part, own.get(name), (*path, name)) for name, part in inside.items())
        return next(filter(None, faults), "")
    if isinstance(given, torch.Tensor) and isinstance(found, torch.Tensor):
        same = (given.dtype, given.shape) == (found.dtype, found.shape)
        if same and given.device == found.device and type(given) in PLAIN_TENSORS and given.layout == torch.strided:
            same = torch.equal(copyable_view(given), copyable_view(found))
    elif isinstance(found, torch.Tensor):  # torch's optimizers make one of a number that an old version had
        same = isinstance(given, int | float) and found.numel() == 1 and found.item() == given
    else:
        same = type(given) is type(found) and _encoded(given) == _encoded(found)
    return "" if same else f"{render_key(path)}: the commit holds {_shown(given)}, the optimizer has {_shown(found)}"


def _encoded(value: Any) -> bytes:
    return encode_value(value, key="state", allow_pickle=True)


def _shown(value: Any) -> str:
    return f"{spec_of(value)}" if isinstance(value, torch.Tensor) else shown_value(value)
