"""Compares what an object would save now with what a commit holds for it.

The names of the parts are compared, not the classes: moving or renaming a class must not make its
commits unreadable, and the state of another kind of optimizer or scheduler has other names.

- What an object saves now and the commit has not is missing: `load_state_dict` would look for it in vain.
- What only the commit has is unexpected if the object is of a class of torch's whose names are known from the
  start. Other objects may save more the longer they run, so a fresh one takes it.
- `StateDict` and whatever numbers its parts by integers take what comes.

Invariant: only reads. Must not know how bytes move.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from cas_ckpt.objects.state import Container, Item, Path, StoredTensor, ValueItem, render_key
from cas_ckpt.training.leaves import describe
from cas_ckpt.training.ledger import Ledger
from cas_ckpt.training.materialize import Builder
from cas_ckpt.training.optimizer_match import Match, children
from cas_ckpt.training.optimizers import GROUPS, PARAM_NAMES, PARAMS, STATE
from cas_ckpt.training.rng import OPTIONAL as RNG_OPTIONAL
from cas_ckpt.training.rng import RNGState
from cas_ckpt.training.stateful import StateDict, Stateful

_FLAGS = frozenset({"foreach", "maximize", "capturable", "differentiable", "fused"})
"""Options of torch's optimizers that some versions have and others add when they load."""

_BY_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"})
"""What torch's schedulers write into the groups of their optimizer."""

_APART = frozenset({PARAMS, PARAM_NAMES}) | _BY_SCHEDULERS | _FLAGS

_SHAPED = frozenset({
    "acc_delta", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq", "momentum_buffer", "prev",
    "square_avg", "sum",
})  # fmt: skip
"""State of torch's optimizers that has the shape of its parameter."""

_DECOUPLED = "decoupled_weight_decay"
"""What tells AdamW from Adam; those of torch before 2.7 do not say it."""


class OwnState:
    """Compares the objects of one restore with the commit; what differs goes into the ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def compare(self, target: Stateful, own: Any, item: Item, path: Path, build: Builder) -> Builder:
        """`build` for what `target` is given, completed by its own parts where the commit has none."""
        if isinstance(target, StateDict) or not isinstance(own, Mapping):
            return build
        if not _is_mapping(item):
            if own and self.ledger.selection.covers(path):
                fault = f"{render_key(path)}: the target saves a dict, the commit holds {describe(item)}"
                self.ledger.faults.append(f"{fault}: commit and restore objects of one kind")
            return build
        mine, stored = _names(target, own), _names(target, children(item))
        missing = self._missing(mine - stored - (RNG_OPTIONAL if isinstance(target, RNGState) else frozenset()), path)
        foreign = stored - mine if missing or _is_scheduler(target) else frozenset()
        self.ledger.unexpected += [(*path, name) for name in sorted(foreign)]
        return (lambda: _completed(build(), own, missing, foreign)) if missing or foreign else build

    def _missing(self, names: Iterable[str], path: Path) -> set[str]:
        """Those of `names` that were asked for; they are noted."""
        wanted = {name for name in names if self.ledger.selection.covers((*path, name))}
        self.ledger.missing += [(*path, name) for name in sorted(wanted)]
        return wanted

    def compare_groups(self, optimizer: torch.optim.Optimizer, match: Match, item: Item, path: Path) -> list[Any]:
        """For each live group the names that the commit lacks, and those that only the commit has."""
        stored = children(children(item).get(GROUPS))
        found = []
        for number, group in zip(match.groups, match.form.raw[GROUPS], strict=True):
            here = (*path, GROUPS, number)
            theirs = children(stored.get(number))
            missing = self._missing(_required(optimizer, group) - set(theirs), here) if stored else set()
            foreign = _foreign(group, theirs) if missing or _is_torchs(optimizer) else set()
            self.ledger.unexpected += [(*here, name) for name in sorted(foreign)]
            self._check_decoupled(group, theirs, here)
            found.append((missing, foreign))
        return found

    def check_shapes(self, optimizer: torch.optim.Optimizer, match: Match, item: Item, path: Path) -> None:
        """What torch's optimizers have of each parameter's shape must have it: an optimizer without state takes any."""
        state = children(children(item).get(STATE)) if _is_torchs(optimizer) else {}
        for key, stored in match.stored.items():
            param = match.form.params.get(key)
            if param is None or stored not in state or key in match.form.raw[STATE]:
                continue
            for name, part in children(state[stored]).items():
                if name in _SHAPED and isinstance(part, StoredTensor) and part.spec.shape != tuple(param.shape):
                    self.ledger.faults.append(
                        f"{render_key((*path, STATE, stored, name))}: the parameter is {list(param.shape)}, the commit "
                        f"holds {part.spec}: build the optimizer over the same parameters in the same order"
                    )

    def _check_decoupled(self, group: Mapping[str, Any], stored: Mapping[Any, Item], here: Path) -> None:
        theirs, mine = stored.get(_DECOUPLED), group.get(_DECOUPLED)
        if self.ledger.strict and isinstance(theirs, ValueItem) and _DECOUPLED in group and theirs.value != mine:
            self.ledger.faults.append(
                f"{render_key((*here, _DECOUPLED))}: the target has {mine}, the commit {theirs.value!r}: one is Adam, "
                "the other AdamW; use the same, or pass strict=False to take what the commit says"
            )


def _required(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> set[str]:
    """Names that a stored group must have: all of a class of torch's, else those of the constructor's arguments."""
    names = set(group) if _is_torchs(optimizer) else set(group) & set(getattr(optimizer, "defaults", ()))
    # Adam said nothing of its weight decay before torch 2.7, and takes it for its own default.
    return names - _APART - ({_DECOUPLED} if "amsgrad" in group else set())


def _foreign(group: Mapping[str, Any], stored: Mapping[Any, Item]) -> set[str]:
    return {name for name in stored if isinstance(name, str)} - set(group) - _APART


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim")


def completed_groups(groups: list[dict[str, Any]], match: Match, differences: list[Any]) -> list[dict[str, Any]]:
    """Groups that are about to be loaded, with what the commit lacks as it is and without what is foreign."""
    own = match.form.raw[GROUPS]
    return [
        _completed(group, mine, missing, foreign)
        for group, mine, (missing, foreign) in zip(groups, own, differences, strict=True)
    ]


def _completed(built: Any, own: Mapping[Any, Any], missing: Iterable[str], foreign: Iterable[str]) -> Any:
    left_out = set(foreign)
    kept = {name: value for name, value in built.items() if name not in left_out}
    return kept | {name: own[name] for name in missing}


def _is_mapping(item: Item) -> bool:
    if isinstance(item, Container):
        return item.kind in ("dict", "odict")
    return isinstance(item, ValueItem) and isinstance(item.value, Mapping)


def _is_scheduler(target: Stateful) -> bool:
    return isinstance(target, torch.optim.lr_scheduler.LRScheduler)


def _names(target: Stateful, state: Mapping[Any, Any]) -> frozenset[str]:
    """The names that count; those of torch's schedulers that are private come and go with torch's versions."""
    names = (name for name in state if isinstance(name, str))
    if _is_scheduler(target):
        return frozenset(name for name in names if not name.startswith("_") and name != "verbose")
    return frozenset(names)
