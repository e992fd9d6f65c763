"""Plans the restoring of a commit into live training state, in place.

    1. `plan_restore` matches the state with the commit's tree and raises if they do not
       agree. It reads specs and keys; it changes nothing.
    2. The caller runs `plan.copies`: every byte is verified, then copied into the tensors.
    3. `plan.finish()` sets plain values and calls `load_state_dict` once per Stateful
       object, generators of random numbers last.

Modules and optimizers are matched by names that do not depend on wrappers (naming.py), values
that each rank has for itself by the rule of per_rank.py.

Invariant: an object that cannot be restored whole is not touched at all. Must not know
where bytes are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from cas_ckpt.errors import InvalidInputError, MismatchError, PartialRestoreError
from cas_ckpt.objects.state import Container, Item, Name, Path, TensorCopy, parse_key, render_key, walk
from cas_ckpt.training.arrays import wait_for_devices
from cas_ckpt.training.leaves import fill_tensor
from cas_ckpt.training.ledger import SHOWN, Ledger, Load
from cas_ckpt.training.materialize import Aliases, Builder, NewObjects
from cas_ckpt.training.merge import HandOver, InPlace, unwrapped
from cas_ckpt.training.naming import Names
from cas_ckpt.training.optimizer_match import children, match_optimizer, nested
from cas_ckpt.training.optimizers import GROUPS, NamedOptimizer, OptimizerForm
from cas_ckpt.training.own_state import OwnState, completed_groups
from cas_ckpt.training.per_rank import PerRank, is_per_rank, is_ranks, world_size_of
from cas_ckpt.training.rng import RNGState, check_generator_names
from cas_ckpt.training.selection import Selection
from cas_ckpt.training.stateful import Stateful
from cas_ckpt.training.wrappers import NamedModule


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
        per_rank_skipped: Per-rank values that stay as they are, see per_rank.py.
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
        """The rule is told in per_rank.py."""
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
