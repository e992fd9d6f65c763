"""Plans the restoring of a commit into live training state, in place.

    1. `plan_restore` matches the state with the commit's tree and raises if they do not
       agree. It reads specs and keys; it changes nothing.
    2. The caller runs `plan.copies`: every byte is verified, then copied into the tensors.
    3. `plan.finish()` sets plain values and calls `load_state_dict` once per Stateful
       object, generators of random numbers last.

Modules and optimizers are matched by names that do not depend on wrappers (training/names.py), values
that each rank has for itself by the rule of training/state.py.

Invariant: an object that cannot be restored whole is not touched at all. Must not know
where bytes are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from cas_ckpt.errors import InvalidInputError, MismatchError, PartialRestoreError
from cas_ckpt.objects.state import (
    Container,
    Item,
    Name,
    Path,
    StoredTensor,
    TensorCopy,
    ValueItem,
    parse_key,
    render_key,
    walk,
)
from cas_ckpt.training.capture.arrays import wait_for_devices
from cas_ckpt.training.names import Names
from cas_ckpt.training.optimizers import (
    GROUPS,
    PARAM_NAMES,
    PARAMS,
    STATE,
    Match,
    NamedOptimizer,
    OptimizerForm,
    children,
    match_optimizer,
    nested,
)
from cas_ckpt.training.restore.ledger import SHOWN, Ledger, Load, Selection
from cas_ckpt.training.restore.match import describe, fill_tensor
from cas_ckpt.training.restore.materialize import Aliases, Builder, NewObjects
from cas_ckpt.training.restore.merge import HandOver, InPlace, unwrapped
from cas_ckpt.training.state import OPTIONAL as RNG_OPTIONAL
from cas_ckpt.training.state import (
    PerRank,
    RNGState,
    StateDict,
    Stateful,
    check_generator_names,
    is_per_rank,
    is_ranks,
    world_size_of,
)
from cas_ckpt.training.wrappers import NamedModule

# DOC of cas_ckpt.training.restore.restore:
# Compares what an object would save now with what a commit holds for it.
#
# The names of the parts are compared, not the classes: moving or renaming a class must not make its
# commits unreadable, and the state of another kind of optimizer or scheduler has other names.
#
# - What an object saves now and the commit has not is missing: `load_state_dict` would look for it in vain.
# - What only the commit has is unexpected if the object is of a class of torch's whose names are known from the
#   start. Other objects may save more the longer they run, so a fresh one takes it.
# - `StateDict` and whatever numbers its parts by integers take what comes.
#
# Invariant: only reads. Must not know how bytes move.
#

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


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """What a restore will do.

    Attributes:
        copies: Path, stored tensor and target of everything that is read; each memory once.
        finish: To be called once, after all copies are done.
        missing: Keys that the target has and the commit has not (only when not strict).
        unexpected: Keys that the commit has and the target has not. Of a single rank only when not
            strict; of several ranks always, because another rank may have them: what no rank has
            is for the caller to refuse (`refuse_unexpected`).
        per_rank_skipped: Per-rank values that stay as they are, see training/state.py.
    """

    copies: tuple[TensorCopy, ...]
    finish: Callable[[], None]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    per_rank_skipped: tuple[str, ...] = ()


def plan_restore(
    state: Mapping[str, Any],
    tree: Container,
    *,
    strict: bool = True,
    keys: str | Sequence[str] | None = None,
    aliases: Aliases = (),
    rank: int = 0,
    world_size: int = 1,
) -> RestorePlan:
    """The plan that makes `state` what `tree` holds; nothing is touched yet.

    Args:
        strict: Key sets of modules and plain containers must agree; otherwise only what both
            have is restored.
        keys: Glob patterns; only entries that they cover are restored and compared.
        aliases: Groups of paths that were one tensor: what is made new for them is one again.
        rank: Who is asking, of `world_size` ranks that plan to restore the same commit.

    Raises:
        MismatchError: keys, shapes, dtypes, ties or parameter groups do not agree.
        UnsupportedValueError: the target holds something that cannot be restored into.
        NotFoundError: `keys` match nothing.
    """
    if not isinstance(state, MutableMapping):
        raise InvalidInputError(f"the target is a {type(state).__name__}: a dict of names to objects is needed")
    selection = Selection(keys)
    ledger = Ledger(selection, NewObjects(aliases=aliases), strict=strict)
    planner = _Planner(ledger, Names(state), rank, world_size)
    build = planner.in_place.mapping(state, selection.prune(tree), ())
    unexpected = tuple(map(render_key, ledger.unexpected))
    if world_size > 1:
        ledger.unexpected.clear()
    ledger.raise_mismatch()
    wait_for_devices(ledger.devices)
    return RestorePlan(
        tuple(ledger.made.copies),
        lambda: _finish(build, ledger),
        tuple(map(render_key, ledger.missing)),
        unexpected,
        tuple(map(render_key, planner.skipped)),
    )


def refuse_unexpected(keys: Sequence[str]) -> None:
    """Raise MismatchError if there are `keys` in a commit that no rank's target has."""
    ledger = Ledger(Selection(), NewObjects(), strict=True)
    ledger.unexpected.extend(map(parse_key, keys))
    ledger.raise_mismatch()


def refuse_nothing_in_common(tree: Container, unexpected: Sequence[str]) -> None:
    """Raise MismatchError if all that `tree` holds is `unexpected`: no rank has anything of it."""
    nobody = set(unexpected)
    for path, _ in walk(tree):
        if path and not any(render_key(path[:depth]) in nobody for depth in range(1, len(path) + 1)):
            return
    raise MismatchError(
        "target and commit have no key in common, so that nothing would be restored; nothing was touched: "
        f"the commit has {_named([render_key((name,)) for name in tree.children])} at its top, look for a prefix"
    )


def _finish(build: Builder, ledger: Ledger) -> None:
    build()
    # A load may draw random numbers: the generators come last (sorted is stable).
    loads = sorted(ledger.loads, key=lambda load: isinstance(load.target, RNGState | torch.Generator))
    for number, load in enumerate(loads):
        try:
            load.run()
        except Exception as error:  # whatever the object's own load_state_dict raises
            done, left = ([render_key(each.path) for each in part] for part in (loads[:number], loads[number + 1 :]))
            raise PartialRestoreError(
                f"{render_key(load.path)}: load_state_dict of the target's {type(load.target).__name__} raised "
                f"{error!r}. Restored before it: tensors in place, plain values, and {_named(done)}; not restored: "
                f"{_named(left)}. Mend that object, then check out again, all of it or with keys=",
                key=render_key(load.path), restored=tuple(done),
            ) from error  # fmt: skip


def _named(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    return ", ".join(map(repr, keys[:SHOWN])) + more if keys else "no other object"


class _Planner:
    """Decides how each kind of Stateful object is matched.

    Attributes:
        skipped: Per-rank values that are left untouched.
        apart: Whether what is matched is inside of a per-rank value.
    """

    def __init__(self, ledger: Ledger, names: Names, rank: int, world_size: int) -> None:
        self.ledger = ledger
        self.names = names
        self.rank = rank
        self.world_size = world_size
        self.skipped: list[Path] = []
        self.apart = False
        self.in_place = InPlace(ledger, self.stateful)
        self.hand_over = HandOver(ledger, self.stateful)
        self.own_state = OwnState(ledger)

    def stateful(self, target: Stateful, item: Item, path: Path) -> None:
        """Match `target` with `item` and note how it will be loaded."""
        if is_per_rank(target, self.world_size) or (isinstance(target, RNGState) and is_ranks(item)):
            if self.apart:
                self._own(target, item, path)
            else:
                self._per_rank(target, item, path)
        elif is_ranks(item):
            self.ledger.faults.append(unwrapped(target, path))
        else:
            self._shared(target, item, path)

    def _shared(self, target: Stateful, item: Item, path: Path) -> None:
        """A value that is the same on all ranks."""
        adapter = self.names.adapt(target)
        state: Any = adapter.read() if isinstance(adapter, NamedOptimizer) else adapter.state_dict()
        if isinstance(adapter, NamedModule) and isinstance(state, dict):
            build = self._module(state, item, path)
        elif isinstance(state, OptimizerForm):
            self._optimizer(adapter, state, item, path)
            return
        else:
            self._check_rng(target, item, path)
            build = self.own_state.compare(target, state, item, path, self.hand_over.place(state, item, path))
        self._load_later(target, adapter.load_state_dict, build, path)

    def _load_later(self, target: Stateful, load: Callable[[Any], Any], build: Builder, path: Path) -> None:
        self.ledger.loads.append(Load(target, path, lambda: load(build())))

    def _per_rank(self, target: PerRank | RNGState, item: Item, path: Path) -> None:
        """The rule is told in training/state.py."""
        if world_size_of(item, path) != self.world_size:
            self.skipped.append(path)
            return
        if is_ranks(item):
            if self.rank not in item.children:
                if self.ledger.selection.covers(path):
                    self.ledger.faults.append(f"{render_key(path)}: the commit lacks the value of rank {self.rank}")
                return
            item, path = item.children[self.rank], (*path, self.rank)
        self.apart = True
        self._own(target, item, path)
        self.apart = False

    def _own(self, target: PerRank | RNGState, item: Item, path: Path) -> None:
        """This rank's value."""
        if isinstance(target, PerRank):
            build = self.in_place.place(target.value, item, path)
            self.ledger.loads.append(Load(target, path, lambda: setattr(target, "value", build())))
        else:
            self._shared(target, item, path)

    def _module(self, state: dict[Any, Any], item: Item, path: Path) -> Builder:
        """Key sets agree, tensors are filled; the module's own state dict is given back to it."""
        stored = children(item)
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

    def _optimizer(self, adapter: NamedOptimizer, form: OptimizerForm, item: Item, path: Path) -> None:
        alone = self.world_size == 1
        stored = nested(item, form, path, alone=alone)
        match = stored if isinstance(stored, str) else match_optimizer(form, stored, path, alone=alone)
        if isinstance(stored, str) or isinstance(match, str):
            self.ledger.faults.append(str(match))
            return
        item = stored
        self.own_state.check_shapes(adapter.optimizer, match, item, path)
        build = self.hand_over.place(match.own(item), match.wanted(item), path)
        differences = self.own_state.compare_groups(adapter.optimizer, match, item, path)

        def restored() -> dict[str, Any]:
            state = match.restored(build())
            return {**state, GROUPS: completed_groups(state[GROUPS], match, differences)}

        self._load_later(adapter.optimizer, adapter.write, restored, path)

    def _check_rng(self, target: Stateful, item: Item, path: Path) -> None:
        if isinstance(target, RNGState) and self.ledger.selection.covers(path):
            stored = children(children(item).get("generators"))
            check_generator_names(target, {str(name) for name in stored}, key=render_key(path))


def _updated(state: dict[Any, Any], builders: Mapping[Name, Builder]) -> dict[Any, Any]:
    """A module's own state dict (its metadata included) with the restored entries in it."""
    for name, build in builders.items():
        state[name] = build()
    return state
