"""Plans the restoring of a commit into live training state, in place.

    1. `plan_restore` matches the state with the commit's tree and raises if they do not
       agree. It reads specs and keys; it changes nothing.
    2. The caller runs `plan.copies`: every byte is verified, then copied into the tensors.
    3. `plan.finish()` sets plain values and calls `load_state_dict` once per Stateful
       object, generators of random numbers last.

Invariant: an object that cannot be restored whole is not touched at all. Must not know
where bytes are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from cas_ckpt.errors import InvalidInputError
from cas_ckpt.objects.state import Container, Item, Name, Path, TensorCopy, ValueItem, render_key
from cas_ckpt.training.arrays import wait_for_devices
from cas_ckpt.training.leaves import fill_tensor
from cas_ckpt.training.ledger import Ledger
from cas_ckpt.training.materialize import Aliases, Builder, NewObjects
from cas_ckpt.training.merge import HandOver, InPlace
from cas_ckpt.training.optimizers import check_optimizer, undo_casts
from cas_ckpt.training.rng import RNGState, check_generator_names
from cas_ckpt.training.selection import Selection
from cas_ckpt.training.stateful import Stateful


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """What a restore will do.

    Attributes:
        copies: Path, stored tensor and target of everything that is read; each memory once.
        finish: To be called once, after all copies are done.
        missing: Keys that the target has and the commit has not (only when not strict).
        unexpected: Keys that the commit has and the target has not (only when not strict).
    """

    copies: tuple[TensorCopy, ...]
    finish: Callable[[], None]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def plan_restore(
    state: Mapping[str, Any],
    tree: Container,
    *,
    strict: bool = True,
    keys: str | Sequence[str] | None = None,
    aliases: Aliases = (),
) -> RestorePlan:
    """The plan that makes `state` what `tree` holds; nothing is touched yet.

    Args:
        strict: Key sets of modules and plain containers must agree; otherwise only what both
            have is restored.
        keys: Glob patterns; only entries that they cover are restored and compared.
        aliases: Groups of paths that were one tensor: what is made new for them is one again.

    Raises:
        MismatchError: keys, shapes, dtypes, ties or parameter groups do not agree.
        UnsupportedValueError: the target holds something that cannot be restored into.
        NotFoundError: `keys` match nothing.
    """
    if not isinstance(state, MutableMapping):
        raise InvalidInputError(f"the target is a {type(state).__name__}: a dict of names to objects is needed")
    selection = Selection(keys)
    planner = _Planner(Ledger(selection, NewObjects(aliases=aliases), strict=strict))
    build = planner.in_place.mapping(state, selection.prune(tree), ())
    ledger = planner.ledger
    ledger.raise_mismatch()
    wait_for_devices(ledger.devices)
    return RestorePlan(
        tuple(ledger.made.copies),
        lambda: _finish(build, ledger),
        tuple(map(render_key, ledger.missing)),
        tuple(map(render_key, ledger.unexpected)),
    )


def _finish(build: Builder, ledger: Ledger) -> None:
    build()
    # A load may draw random numbers: the generators come last (sorted is stable).
    for _, load in sorted(ledger.loads, key=lambda entry: isinstance(entry[0], RNGState)):
        load()


class _Planner:
    """Decides how each kind of Stateful object is matched."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.in_place = InPlace(ledger, self.stateful)
        self.hand_over = HandOver(ledger, self.stateful)

    def stateful(self, target: Stateful, item: Item, path: Path) -> None:
        """Match `target` with `item` and note how it will be loaded."""
        state = target.state_dict()
        if isinstance(target, torch.nn.Module) and isinstance(state, dict):
            build = self._module(state, item, path)
        else:
            self._check(target, state, item, path)
            build = self.hand_over.place(state, item, path)
        self.ledger.loads.append((target, lambda: _load(target, build(), path)))

    def _module(self, state: dict[Any, Any], item: Item, path: Path) -> Builder:
        """Key sets agree, tensors are filled; the module's own state dict is given back to it."""
        stored = _children(item)
        for name in state:
            if name not in stored:
                self.ledger.note_missing((*path, name))
        builders: dict[Name, Builder] = {}
        for name, child in stored.items():
            if name in state:
                builders[name] = self._module_entry(state[name], child, (*path, name))
            else:
                self.ledger.unexpected.append((*path, name))
        return lambda: _updated(state, builders)

    def _module_entry(self, value: Any, item: Item, path: Path) -> Builder:
        if isinstance(value, torch.Tensor) and not is_lazy(value):
            return fill_tensor(value, item, path, self.ledger)
        return self.hand_over.place(value, item, path)

    def _check(self, target: Stateful, state: Any, item: Item, path: Path) -> None:
        if isinstance(target, torch.optim.Optimizer):
            self.ledger.faults.extend(check_optimizer(state, item, path))
        elif isinstance(target, RNGState) and self.ledger.selection.covers(path):
            stored = _children(_children(item).get("generators", ValueItem({})))
            check_generator_names(target, {str(name) for name in stored}, key=render_key(path))


def _children(item: Item) -> Mapping[Name, Item]:
    """The named items of a container, or of a value that is a mapping."""
    if isinstance(item, Container):
        return item.children
    value = item.value if isinstance(item, ValueItem) else None
    return {name: ValueItem(child) for name, child in value.items()} if isinstance(value, Mapping) else {}


def _updated(state: dict[Any, Any], builders: Mapping[Name, Builder]) -> dict[Any, Any]:
    """A module's own state dict (its metadata included) with the restored entries in it."""
    for name, build in builders.items():
        state[name] = build()
    return state


def _load(target: Stateful, state: Any, path: Path) -> None:
    try:
        target.load_state_dict(state)
    except Exception as error:
        error.add_note(f"raised by {type(target).__name__}.load_state_dict while restoring {render_key(path)!r}")
        raise
    if isinstance(target, torch.optim.Optimizer):
        undo_casts(target, state)
