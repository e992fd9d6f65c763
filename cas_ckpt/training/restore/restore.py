"""Plans the restoring of a commit into live training state, in place.

    1. `plan_restore` matches the state with the commit's tree and raises if they do not
       agree. It reads specs and keys; it changes nothing.
    2. The caller runs `plan.copies`: every byte is verified, then copied into the tensors.
    3. `plan.finish()` sets plain values and calls `load_state_dict` once per Stateful
       object, generators of random numbers last.

Two rules of matching, by who owns the structure:

- *In place*, for what the user holds (the state itself, dicts and lists in it, a module's state
  dict): key sets must agree, tensors and arrays are filled, plain values are replaced.
- *Handed over*, for what a Stateful object will be given: the commit is the truth. Tensors that
  the object has with the same spec are filled and given back, all others are made new, and
  what only the object has is left out.

What a Stateful object would save now is compared with what the commit holds for it, by the names of the parts, not by
classes: moving or renaming a class must not make its commits unreadable, and the state of another kind of optimizer or
scheduler has other names.

- What an object saves now and the commit does not have is missing: `load_state_dict` would look for it in vain.
- What only the commit has is unexpected if the object is of a class of torch's whose names are known from the
  start. Other objects may save more the longer they run, so a fresh one takes it.
- `StateDict` and whatever numbers its parts by integers take what comes.

Modules and optimizers are matched by names that do not depend on wrappers (training/stateful.py), values
that each rank has for itself by the rule of training/per_rank.py.

Invariant: matching reads; builders write, after all bytes are in place. An object that cannot be restored whole is
not touched at all. Must not know where bytes are stored.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from cas_ckpt.core.tree import select
from cas_ckpt.errors import InvalidInputError, MismatchError, PartialRestoreError, UnsupportedValueError
from cas_ckpt.objects.digest import ATOMS
from cas_ckpt.objects.layouts import LayoutObject
from cas_ckpt.objects.patterns import KeyPatterns
from cas_ckpt.objects.state import (
    RANKS,
    Container,
    Flavor,
    Item,
    Name,
    Path,
    StoredTensor,
    TensorCopy,
    ValueItem,
    in_order,
    parse_key,
    render_key,
    walk,
    world_size_of,
)
from cas_ckpt.objects.structures import STRUCTURE_KINDS, Named, is_mutable, made_like, retyped, structure_of, types_in
from cas_ckpt.training.capture.capture import MAX_DEPTH
from cas_ckpt.training.capture.tensors import DTYPE_NAMES, PLAIN_TENSORS, is_array, is_sharded, wait_for_devices
from cas_ckpt.training.optimizers import GROUPS, NamedOptimizer, OptimizerForm
from cas_ckpt.training.per_rank import GENERATOR, OPTIONAL_PARTS, PerRank, RNGState, check_generator_names, rng_item
from cas_ckpt.training.restore.draft import SHOWN, Load, RestoreDraft, children, describe, may_fill_array
from cas_ckpt.training.restore.materialize import Builder, constant, container_builder
from cas_ckpt.training.restore.optimizers import (
    check_shapes,
    compare_groups,
    completed,
    match_optimizer,
    nested,
    write_checked,
)
from cas_ckpt.training.stateful import (
    NamedModule,
    Names,
    StateDict,
    Stateful,
    is_module_state,
    is_stateful,
    set_versions,
)
from cas_ckpt.training.torch_internals import buffers_of, params_of, takes_shapes

_MAPPINGS = ("dict", "odict")
_SEQUENCES = ("list", "tuple")


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """A restore that was planned: copies to make, and how to finish.

    Attributes:
        copies: Path, stored tensor and target of everything that is read; each memory once.
        finish: To be called once, after all copies are done.
        missing: Keys that the target has and the commit does not have (only when not strict).
        unexpected: Keys that the commit has and the target does not have. Of a single rank only when not
            strict; of several ranks always, because another rank may have them: what no rank has
            is for the caller to refuse (`refuse_unexpected`).
        per_rank_skipped: Per-rank values that stay as they are, see training/per_rank.py.
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
    layout: Callable[[], LayoutObject] = LayoutObject,
    rank: int = 0,
    world_size: int = 1,
) -> RestorePlan:
    """The plan that makes `state` what `tree` holds; nothing is touched yet.

    Args:
        strict: Key sets of modules and plain containers must agree; otherwise only what both
            have is restored.
        keys: Glob patterns; only entries that they cover are restored and compared.
        layout: Gives that of the commit: which keys are one tensor, how tensors lie in memory, versions of modules.
            Asked only if something is made new, or is the state of a module.
        rank: Who is asking, of `world_size` ranks that plan to restore the same commit.

    Raises:
        MismatchError: keys, shapes, dtypes, ties or parameter groups do not agree.
        UnsupportedValueError: the target holds something that cannot be restored into.
        NotFoundError: `keys` match nothing.
    """
    if not isinstance(state, MutableMapping):
        raise InvalidInputError(f"the target is a {type(state).__name__}: a dict of names to objects is needed")
    selection = KeyPatterns(keys)
    draft = RestoreDraft(selection, layout=layout, strict=strict)
    planner = _Walk(draft, Names(state), rank, world_size)
    build = planner.mapping(state, select(tree, selection, into_live=True), (), planner.in_place)
    draft.settle_missing()
    unexpected = tuple(map(render_key, draft.unexpected))
    if world_size > 1:
        draft.unexpected.clear()
    draft.raise_mismatch()
    if draft.devices:
        wait_for_devices(draft.devices)
    return RestorePlan(
        tuple(draft.copies),
        partial(_finish, build, draft.loads, draft.tied),
        tuple(map(render_key, draft.missing)),
        unexpected,
        tuple(map(render_key, planner.skipped)),
    )


def refuse_unexpected(keys: Sequence[str]) -> None:
    """Raise MismatchError if there are `keys` in a commit that no rank's target has."""
    draft = RestoreDraft(KeyPatterns(None))
    draft.unexpected.extend(map(parse_key, keys))
    draft.raise_mismatch()


def refuse_nothing_in_common(tree: Container, unexpected: Sequence[str]) -> None:
    """Raise MismatchError if all that `tree` holds is `unexpected`: no rank has anything of it."""
    nobody = set(unexpected)
    for path, _ in walk(tree):
        if path and not any(render_key(path[:depth]) in nobody for depth in range(1, len(path) + 1)):
            return
    raise MismatchError(
        "target and commit have no key in common, so that nothing would be restored; nothing was touched: "
        f"the commit has {_listed([render_key((name,)) for name in tree.children])} at its top, look for a prefix"
    )


def _finish(build: Builder, noted: Sequence[Load], tied: Sequence[torch.Tensor]) -> None:
    for tensor in tied:  # so that autograd sees that the bytes changed
        torch.autograd.graph.increment_version(tensor)
    build()
    # A load may draw random numbers: the generators come last (sorted is stable).
    loads = sorted(noted, key=lambda load: isinstance(load.target, RNGState | torch.Generator))
    for number, load in enumerate(loads):
        try:
            load.run()
        except Exception as error:  # whatever the object's own load_state_dict raises
            done, left = ([render_key(each.path) for each in part] for part in (loads[:number], loads[number + 1 :]))
            raise PartialRestoreError(
                f"{render_key(load.path)}: load_state_dict of the target's {type(load.target).__name__} raised "
                f"{error!r}. Restored before it: tensors in place, plain values, and {_listed(done)}; not restored: "
                f"{_listed(left)}. Mend that object, then check out again, all of it or with keys=",
                key=render_key(load.path), restored=tuple(done),
            ) from error  # fmt: skip


def _listed(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    return ", ".join(map(repr, keys[:SHOWN])) + more if keys else "no other object"


@dataclass(slots=True)
class _Walk:
    """Goes through a live state and a stored one side by side.

    Attributes:
        skipped: Per-rank values that are left untouched.
        in_per_rank: Whether what is matched is inside of a per-rank value.
    """

    draft: RestoreDraft
    names: Names
    rank: int
    world_size: int
    skipped: list[Path] = field(default_factory=list)
    in_per_rank: bool = False

    # ------------------------------------------------------------ in place

    def in_place(self, target: Any, item: Item, path: Path) -> Builder:
        """A builder for what is at `path` afterwards, where `target` is now."""
        draft = self.draft
        if len(path) > MAX_DEPTH:
            return draft.made.builder(item, path)  # which refuses it
        if type(target) in ATOMS and type(item) is ValueItem and draft.selection.selects(path):
            return constant(item.value)  # the most frequent case, and nothing of what follows concerns it
        if isinstance(item, Container) and item.kind == RANKS and not is_stateful(target):
            draft.faults.append(_not_per_rank(target, path))
            return lambda: target
        if isinstance(target, torch.Tensor):
            return draft.fill_tensor(target, item, path)
        if isinstance(target, np.ndarray) and not target.dtype.hasobject:
            return draft.fill_array(target, item, path)
        if is_stateful(target):
            self.stateful(target, item, path)
            return lambda: target
        if isinstance(target, torch.Generator):
            # Generators are set when everything else is in place, since loading may draw numbers.
            draft.loads.append(Load(target, path, draft.fill_generator(target, item, path)))
            return lambda: target
        mine, stored = structure_of(target), as_structure(item)
        if mine is not None and stored is not None and mine.kind == stored.kind:
            return self._structure(target, mine, stored, path)
        kind = item.kind if isinstance(item, Container) else ""
        if (type(target) is dict or is_module_state(target)) and kind in _MAPPINGS:
            return self.mapping(target, item, path, self.in_place)
        if draft.selection.selects(path) and not holds_fixed(target):
            return self._new(target, item, path)
        if type(target) in (dict, OrderedDict) and kind in _MAPPINGS:
            return self.mapping(target, item, path, self.in_place)
        if type(target) in (list, tuple) and kind in _SEQUENCES:
            return self._sequence(target, item, path)
        draft.faults.append(
            f"{render_key(path)}: the target is a {type(target).__name__}, the commit holds {describe(item)}"
        )
        return lambda: target

    def mapping(self, target: Any, item: Item, path: Path, place: Callable[[Any, Item, Path], Builder]) -> Builder:
        """A builder that changes the items of a mapping, each by the rule `place`, and gives the mapping."""
        builders = self._children(target, item, path, place)
        # Of a part the others keep their places, and so does what is restored.
        order: Sequence[Name] = ()
        if type(target) is OrderedDict and isinstance(item, Container) and item.kind == "odict":
            order = in_order(item) if self.draft.selection.selects(path) else ()

        versions = self.draft.layout.versions.get(render_key(path)) if is_module_state(target) else None

        def change() -> Any:
            for name, build in builders.items():
                value = build()
                if target[name] is not value:
                    target[name] = value
            for name in order:
                if name in target:
                    target.move_to_end(name)
            if versions is not None:
                set_versions(target, versions, builders)
            return target

        return change

    def _structure(self, target: Any, mine: Named, stored: Container, path: Path) -> Builder:
        """Fields are matched by name, whatever the class is called; a dataclass that is not frozen stays the object."""
        builders = self._children(mine.fields, stored, path, self.in_place)

        def change() -> Any:
            built = {str(name): build() for name, build in builders.items()}
            changed = {name: value for name, value in built.items() if value is not mine.fields[name]}
            if not is_mutable(target):
                return made_like(target, mine.fields | changed) if changed else target
            for name, value in changed.items():
                object.__setattr__(target, name, value)
            # What the class computed of its fields and kept (`functools.cached_property`) is of the former ones.
            kept = getattr(target, "__dict__", {})
            for name in [name for name in kept if isinstance(getattr(type(target), name, None), cached_property)]:
                del kept[name]
            return target

        return change

    def _sequence(self, target: Any, item: Item, path: Path) -> Builder:
        builders = self._children(dict(enumerate(target)), item, path, self.in_place)

        def change() -> Any:
            items = target if type(target) is list else list(target)
            changed = False
            for name, build in builders.items():
                value = build()
                if items[name] is not value:
                    items[name], changed = value, True
            # The old tuple if none of its items was replaced, so that its parent keeps it too.
            return tuple(items) if changed and items is not target else target

        return change

    def _children(
        self, own: Mapping[Any, Any], item: Item, path: Path, place: Callable[[Any, Item, Path], Builder]
    ) -> dict[Any, Builder]:
        """Builders for what both have; notes what only one of them has."""
        stored = item.children if isinstance(item, Container) else {}
        for name in own:
            if name not in stored:
                self.draft.note_missing((*path, name), own[name])
        builders = {}
        for name, child in stored.items():
            if name in own:
                builders[name] = place(own[name], child, (*path, name))
            else:
                self.draft.unexpected.append((*path, name))
        return builders

    # ------------------------------------------------------------ handed over

    def handed_over(self, target: Any, item: Item, path: Path) -> Builder:
        """A builder for what an object is given at `path`, where it has `target` now."""
        draft = self.draft
        if is_stateful(target):
            self.stateful(target, item, path)
            return lambda: target
        if isinstance(item, StoredTensor):
            if isinstance(target, torch.Tensor) and not is_lazy(target) and item.flavor == Flavor.TORCH:
                if is_sharded(target) or draft.may_fill(target, item, path):
                    return draft.fill_tensor(target, item, path)
            elif is_array(target) and item.flavor == Flavor.NUMPY and may_fill_array(target):
                return draft.fill_array(target, item, path)
            return draft.made.builder(item, path)
        kind = item.kind if isinstance(item, Container) else ""
        if kind == RANKS:
            draft.faults.append(_not_per_rank(target, path))
        stored = as_structure(item)
        if stored is not None and len(path) <= MAX_DEPTH:
            mine = structure_of(target)
            builders = self._given(target, stored, path)
            if mine is None or mine.kind != stored.kind or set(mine.fields) != set(builders):
                return container_builder(stored, builders, path)
            return lambda: made_like(target, {str(name): build() for name, build in builders.items()})
        if isinstance(item, Container) and kind in (*_MAPPINGS, *_SEQUENCES) and len(path) <= MAX_DEPTH:
            return container_builder(item, self._given(target, item, path), path)
        if isinstance(target, torch.Generator) and kind == GENERATOR:
            return draft.fill_generator(target, item, path)
        return self._new(target, item, path)

    def _given(self, target: Any, item: Container, path: Path) -> dict[Name, Builder]:
        """Builders for all that the commit has, and for what was not asked for as it is."""
        own: Mapping[Any, Any] = {}
        if isinstance(target, Mapping):
            own = dict(target)
        elif (found := structure_of(target)) is not None:
            own = found.fields
        elif isinstance(target, list | tuple):
            own = dict(enumerate(target))
        builders: dict[Any, Builder] = {}
        for name, child in item.children.items():
            builders[name] = self.handed_over(own.get(name), child, (*path, name))
        for name, value in own.items():
            if name not in builders and not self.draft.selection.selects((*path, name)):
                builders[name] = constant(value)
        return builders

    def _new(self, target: Any, item: Item, path: Path) -> Builder:
        """A builder of something new, its structures of the classes that `target` has at and inside it."""
        build = self.draft.made.builder(item, path)
        types = types_in(target) if isinstance(item, ValueItem) else {}
        return (lambda: retyped(build(), types)) if types else build

    # ------------------------------------------------------------ Stateful objects

    def stateful(self, target: Stateful, item: Item, path: Path) -> None:
        """Match `target` with `item` and note how it will be loaded."""
        if isinstance(target, RNGState) and self.draft.selection.selects(path):  # a part does not tell what it is of
            item = rng_item(item)
        is_ranks = isinstance(item, Container) and item.kind == RANKS
        if isinstance(target, PerRank) or (isinstance(target, RNGState) and (self.world_size > 1 or is_ranks)):
            self._per_rank(target, item, path)
        elif is_ranks:
            self.draft.faults.append(_not_per_rank(target, path))
        else:
            self._shared(target, item, path)

    def _shared(self, target: Stateful, item: Item, path: Path) -> None:
        """A value that is the same on all ranks."""
        if isinstance(target, StateDict) and not _holds_dict(item):
            if [*target] != [path[-1]]:
                self.draft.faults.append(
                    f"{render_key(path)}: the target is a StateDict, the commit holds {describe(item)}: put a plain "
                    f"value there, or StateDict({path[-1]}=0), which takes it under that name"
                )
                return
            item = Container("dict", {path[-1]: item})
        adapter = self.names.adapt(target)
        load: Callable[[Any], Any] = adapter.load_state_dict
        state: Any = adapter.read() if isinstance(adapter, NamedOptimizer) else adapter.state_dict()
        if isinstance(adapter, NamedModule) and isinstance(state, dict):
            # Given back to the module itself, its metadata included.
            if not isinstance(item, Container) or item.kind == "odict":  # the order is the module's own
                item = Container("dict", dict(children(item)))
            entry = partial(self._module_entry, children(item), cache(adapter.owners))
            build = self.mapping(state, item, path, entry)
        elif isinstance(state, OptimizerForm):
            planned = self._optimizer(adapter.optimizer, state, item, path)
            if planned is None:
                return
            target, load, build = adapter.optimizer, partial(write_checked, adapter, path=path), planned
        else:
            if isinstance(target, RNGState) and self.draft.selection.selects(path):
                stored = children(children(item).get("generators"))
                check_generator_names(target, {str(name) for name in stored}, key=render_key(path))
            build = self._compared(target, state, item, path, self.handed_over(state, item, path))
        self.draft.loads.append(Load(target, path, lambda: load(build())))

    def _module_entry(
        self,
        stored: Mapping[Any, Item],
        owners: Callable[[], Mapping[str, torch.nn.Module]],
        value: Any,
        item: Item,
        path: Path,
    ) -> Builder:
        """A builder for an entry of a module's state dict; `stored` is all that the commit has of it."""
        if not isinstance(value, torch.Tensor) or is_lazy(value):
            return self.handed_over(value, item, path)
        if type(value) in PLAIN_TENSORS and isinstance(item, StoredTensor) and value.shape != item.spec.shape:
            alike = item.flavor == Flavor.TORCH and item.spec.dtype == DTYPE_NAMES.get(value.dtype)
            if alike and not value.is_meta and self._is_reshaped(stored, owners(), path):
                return self.draft.made.builder(item, path)
        return self.draft.fill_tensor(value, item, path)

    def _is_reshaped(self, stored: Mapping[Any, Item], owners: Mapping[str, torch.nn.Module], path: Path) -> bool:
        """Whether the module that has the tensor at `path` loads the stored one, of another shape, by itself."""
        prefix = str(path[-1]).rpartition(".")[0]
        owner = owners.get(prefix)
        if owner is None:
            return False
        start = f"{prefix}." if prefix else ""
        tensors = {name: stored.get(start + name) for name in (*params_of(owner), *buffers_of(owner))}
        versions = self.draft.layout.versions.get(render_key(path[:-1]))
        shapes = {name: each.spec.shape for name, each in tensors.items() if isinstance(each, StoredTensor)}
        return takes_shapes(owner, shapes, None if versions is None else versions.get(prefix, 1))

    def _optimizer(
        self, optimizer: torch.optim.Optimizer, form: OptimizerForm, item: Item, path: Path
    ) -> Builder | None:
        """A builder for a state of torch's form; None if it does not agree, which is noted."""
        draft, alone = self.draft, self.world_size == 1
        stored = nested(item, form, path, alone=alone)
        match = stored if isinstance(stored, str) else match_optimizer(form, stored, path, alone=alone)
        if isinstance(stored, str) or isinstance(match, str):
            draft.faults.append(str(match))
            return None
        check_shapes(draft, optimizer, match, stored, path)
        build = self.handed_over(match.own(stored, path, draft), match.wanted(stored), path)
        differences = compare_groups(draft, optimizer, match, stored, path)

        def restored() -> dict[str, Any]:
            state = match.restored(build())
            groups = [
                completed(group, own, missing, foreign)
                for group, own, (missing, foreign) in zip(state[GROUPS], form.raw[GROUPS], differences, strict=True)
            ]
            return {**state, GROUPS: groups}

        return restored

    def _per_rank(self, target: PerRank | RNGState, item: Item, path: Path) -> None:
        """This rank's value; the rule is in training/per_rank.py."""
        was_inside = self.in_per_rank
        if not was_inside:
            if world_size_of(item, path) != self.world_size:
                self.skipped.append(path)
                return
            if isinstance(item, Container) and item.kind == RANKS:
                if self.rank not in item.children:
                    if self.draft.selection.selects(path):
                        self.draft.faults.append(f"{render_key(path)}: the commit lacks the value of rank {self.rank}")
                    return
                item, path = item.children[self.rank], (*path, self.rank)
        self.in_per_rank = True
        if isinstance(target, PerRank):
            build = self.in_place(target.value, item, path)
            self.draft.loads.append(Load(target, path, lambda: setattr(target, "value", build())))
        else:
            self._shared(target, item, path)
        self.in_per_rank = was_inside

    def _compared(self, target: Stateful, own: Any, item: Item, path: Path, build: Builder) -> Builder:
        """`build` for what `target` is given, completed by its own parts where the commit has none; notes differences.

        Args:
            own: What `target` would save now.
        """
        draft = self.draft
        if isinstance(target, StateDict) or not isinstance(own, Mapping):
            return build
        if not _holds_dict(item):
            if own and draft.selection.selects(path):
                fault = f"{render_key(path)}: the target saves a dict, the commit holds {describe(item)}"
                draft.faults.append(f"{fault}: commit and restore objects of one kind")
            return build
        is_scheduler = isinstance(target, torch.optim.lr_scheduler.LRScheduler)
        mine, stored = (_compared_names(state, is_scheduler=is_scheduler) for state in (own, children(item)))
        optional = OPTIONAL_PARTS if isinstance(target, RNGState) else frozenset()
        missing = draft.note_missing_names(mine - stored - optional, path)
        foreign = stored - mine if missing or is_scheduler else frozenset()
        draft.unexpected += [(*path, name) for name in sorted(foreign)]
        return (lambda: completed(build(), own, missing, foreign)) if missing or foreign else build


def _holds_dict(item: Item) -> bool:
    if isinstance(item, ValueItem):
        return isinstance(item.value, Mapping)
    return isinstance(item, Container) and item.kind in _MAPPINGS


def _compared_names(state: Iterable[Any], *, is_scheduler: bool) -> frozenset[str]:
    """The names that count; those of torch's schedulers that are private come and go with torch's versions."""
    names = frozenset(name for name in state if isinstance(name, str))
    if is_scheduler:
        return frozenset(name for name in names if not name.startswith("_") and name != "verbose")
    return names


def _not_per_rank(target: Any, path: Path) -> str:
    """The fault of a target that is one for all ranks where the commit has one for each."""
    return (
        f"{render_key(path)}: the target is a {type(target).__name__}, the commit holds a value for each rank: "
        "give the target PerRank(value), or load() the commit and choose a rank's"
    )


def as_structure(item: Item) -> Container | None:
    """A stored named tuple or dataclass as a container of its fields; None for everything else."""
    if isinstance(item, Container):
        return item if item.kind in STRUCTURE_KINDS else None
    found = structure_of(item.value) if isinstance(item, ValueItem) else None
    if found is None:
        return None
    fields: dict[Name, Item] = {name: ValueItem(value) for name, value in found.fields.items()}
    return Container(found.kind, fields, {"name": found.name, "fields": list(found.fields)})


def holds_fixed(value: Any, depth: int = 0) -> bool:
    """Whether there is a tensor, an array or a Stateful object at or inside `value`."""
    if depth > MAX_DEPTH:
        raise UnsupportedValueError(f"the target nests deeper than {MAX_DEPTH} levels, or contains itself: flatten it")
    if isinstance(value, torch.Tensor | torch.Generator) or is_array(value) or is_stateful(value):
        return True
    found = structure_of(value)
    if found is not None:
        return any(holds_fixed(part, depth + 1) for part in found.fields.values())
    if type(value) in (dict, OrderedDict, list, tuple):
        inside = value.values() if isinstance(value, dict) else value
        return not ATOMS.issuperset(map(type, inside)) and any(holds_fixed(part, depth + 1) for part in inside)
    return False
