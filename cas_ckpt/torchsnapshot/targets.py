"""Objects that are to be restored, as a checkout takes them.

    a module, an optimizer, RNGState    itself, if the names in its state dict are those that a commit of it has
    a module in a wrapper, a scheduler,   a `Target`: it is given all that the snapshot has for it, as torchsnapshot
    a StateDict, any other object         does it; a wrapped module's names must agree, unless not strict
    what each rank has for itself       the rank's own. Taken by another number of ranks: it is read beforehand, and
                                          loaded after the checkout; ranks that took no part in the snapshot keep what
                                          they have, and a module or optimizer among this is an error

Invariant: until the checkout nothing of an object is changed. Must not know repositories.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from cas_ckpt import PerRank, RNGState
from cas_ckpt.errors import MismatchError
from cas_ckpt.torchsnapshot.contents import Contents, Name, Node

_WRAPPERS = frozenset({"module", "_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Names that commits of modules leave out, and snapshots keep."""

_TORCH_ONLY = "rng_state"
"""The only name in the random state of a snapshot that was imported from torchsnapshot."""

_FLATTENING = "FullyShardedDataParallel"
"""Modules under it are committed in parts; their own state dict says what the snapshot has."""


class _TorchState:
    """The random state of torch alone, as torchsnapshot keeps it."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set it."""
        torch.set_rng_state(state[_TORCH_ONLY])


@dataclass(slots=True, eq=False)
class Target:
    """An object, as something that is given the whole state that was taken.

    Attributes:
        of: The object.
        template: What it has now, which is filled where it can be.
        own: Paths in it of what each rank has for itself.
        given: Of these, what was read beforehand, by path; None: the checkout brings all of it.
        is_strict: None: `load_state_dict` of the object is not told.
    """

    of: Any
    template: Any
    own: Sequence[tuple[Name, ...]] = ()
    given: Mapping[tuple[Name, ...], Any] | None = None
    is_strict: bool | None = None

    def state_dict(self) -> Any:
        """What the object has now, each rank's own marked."""
        state = self.template
        for path in self.own:
            state = _replaced(state, path, PerRank(_at(state, path)))
        return state

    def load_state_dict(self, state_dict: Any) -> None:
        """Give the object the state, without what no rank of this number has."""
        state = state_dict
        for path in self.own:
            if self.given is None:
                state = _replaced(state, path, _at(state, path).value)
            elif path in self.given:
                state = _replaced(state, path, self.given[path])
            else:
                state = _without(state, path)
        if self.is_strict is None:
            self.of.load_state_dict(state)
        else:
            self.of.load_state_dict(state, strict=self.is_strict)


@dataclass(frozen=True, slots=True)
class Planned:
    """How one object is restored.

    Attributes:
        target: For the checkout; None: it takes no part.
        later: The object, and the state that it is given after the checkout.
        left: Why the object is left as it is; empty: it is not.
    """

    target: Any = None
    later: tuple[Target, Any] | None = None
    left: str = ""


def plan_object(stateful: Any, key: str, contents: Contents, *, rank: int, world_size: int, strict: bool) -> Planned:
    """How `stateful` is restored from what is stored under `key`.

    Raises:
        NotInSnapshotError: nothing is. MismatchError: a wrapped module has other names; or a module, optimizer or
            scheduler has to come from a rank that there was not.
    """
    node = contents.of_key(key)
    is_same = contents.world_size == world_size
    inner = node.children.get(rank, node) if node.is_per_rank else node
    if isinstance(stateful, RNGState) and [*inner.children] == [_TORCH_ONLY]:
        return Planned(later=(Target(_TorchState(), None), contents.read(inner)))
    if not node.is_per_rank:
        own = dict(_per_rank(node))
        target = _checked_out(stateful, node, [*own], strict=strict)
        if own and not is_same:
            there = {path: each.children[rank] for path, each in own.items() if rank in each.children}
            target.given = {path: contents.read(each) for path, each in there.items()}
        return Planned(target)
    if is_same and rank in node.children:
        is_rng = isinstance(stateful, RNGState)  # which is per rank by itself
        return Planned(stateful if is_rng else PerRank(_checked_out(stateful, node.children[rank], (), strict=strict)))
    if rank in node.children:
        is_strict = strict if isinstance(stateful, torch.nn.Module) else None
        return Planned(later=(Target(stateful, None, is_strict=is_strict), contents.read(node.children[rank])))
    why = f"{key}: each rank's own, of {contents.world_size} ranks, so that there is nothing for rank {rank} to take"
    if isinstance(stateful, torch.nn.Module | torch.optim.Optimizer | LRScheduler):
        raise MismatchError(f"{why}: take snapshots with replicated=, or restore by as many ranks")
    return Planned(left=why)


def _checked_out(stateful: Any, node: Node, own: Sequence[tuple[Name, ...]], *, strict: bool) -> Any:
    """The object itself, if a checkout finds in it the names that the snapshot has; else a `Target`."""
    if isinstance(stateful, torch.optim.Optimizer | RNGState) and not own:
        return stateful
    if isinstance(stateful, torch.nn.Module) and not own and not _is_wrapped(stateful):
        return stateful
    is_module = isinstance(stateful, torch.nn.Module)
    return Target(stateful, _template(stateful, node, strict=strict), own, is_strict=strict if is_module else None)


def _is_wrapped(module: torch.nn.Module) -> bool:
    """Whether commits name things in it otherwise than its state dict does."""
    kinds = {kind.__name__ for each in module.modules() for kind in type(each).__mro__}
    names = {part for name, _ in module.named_modules() for part in name.split(".")}
    return _FLATTENING in kinds or not _WRAPPERS.isdisjoint(names)


def _template(stateful: Any, node: Node, *, strict: bool) -> Any:
    """What the object has now of what is stored.

    Raises:
        MismatchError: it is a module whose names are not those that are stored.
    """
    state = stateful.state_dict()
    if not isinstance(state, Mapping):
        return state
    if isinstance(stateful, torch.nn.Module) and strict:
        missing = sorted(state.keys() - node.children.keys())
        unexpected = sorted(map(str, node.children.keys() - state.keys()))
        if missing or unexpected:
            raise MismatchError(
                f"{node.key}: the module and the snapshot do not agree; nothing was touched. Only the module has "
                f"{', '.join(missing[:5]) or 'nothing'}, only the snapshot {', '.join(unexpected[:5]) or 'nothing'}: "
                "restore with strict=False to leave that"
            )
    kept = {name: value for name, value in state.items() if name in node.children}
    return kept if type(state) is dict else OrderedDict(kept)


def _per_rank(node: Node) -> list[tuple[tuple[Name, ...], Node]]:
    """What at and below `node` is each rank's own, with the path from there."""
    if node.is_per_rank:
        return [((), node)]
    below = [(name, found) for name, child in node.children.items() for found in _per_rank(child)]
    return [((name, *path), found) for name, (path, found) in below]


# --- parts of states by path ------------------------------------------------------------------


def _at(value: Any, path: tuple[Name, ...]) -> Any:
    """What is there; None: nothing."""
    for name in path:
        try:
            value = value[name]
        except (LookupError, TypeError):
            return None
    return value


def _without(value: Any, path: tuple[Name, ...]) -> Any:
    """A copy of `value` without what is at `path`, if that is in a dict."""
    above = _at(value, path[:-1])
    if not isinstance(above, dict):
        return value
    return _replaced(value, path[:-1], {name: each for name, each in above.items() if name != path[-1]})


def _replaced(value: Any, path: tuple[Name, ...], part: Any) -> Any:
    """A copy of `value` that has `part` at `path`."""
    if not path:
        return part
    name, rest = path[0], path[1:]
    if isinstance(value, list) or (value is None and isinstance(name, int)):
        items = list(value or ())
        number = int(name)
        items += [None] * (number + 1 - len(items))
        items[number] = _replaced(items[number], rest, part)
        return items
    made = dict(value or {})
    made[name] = _replaced(made.get(name), rest, part)
    return made
