"""Matches a stored state with live objects, part by part.

Two rules, by who owns the structure:

- `InPlace` for what the user holds (the state itself, dicts and lists in it, a module's state
  dict): key sets must agree, tensors and arrays are filled, plain values are replaced.
- `HandOver` for what a Stateful object will be given: the commit is the truth. Tensors that
  the object has with the same spec are filled and given back, all others are made new, and
  what only the object has is left out.

Invariant: matching reads; builders write, after all bytes are in place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, MutableMapping
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from cas_ckpt.errors import UnsupportedValueError
from cas_ckpt.objects.canonical import ATOMS
from cas_ckpt.objects.state import Container, Item, Name, Path, StoredTensor, ValueItem, in_order, render_key
from cas_ckpt.objects.structures import STRUCTURE_KINDS, Named, is_mutable, made_like, retyped, structure_of, types_in
from cas_ckpt.training.capture.arrays import is_array, spec_of
from cas_ckpt.training.capture.capture import MAX_DEPTH, is_module_state, supported
from cas_ckpt.training.capture.composites import is_composite
from cas_ckpt.training.capture.sharded import is_sharded
from cas_ckpt.training.restore.ledger import Ledger, Load
from cas_ckpt.training.restore.match import (
    describe,
    fill_array,
    fill_generator,
    fill_tensor,
    fits,
    is_read_only,
    may_fill,
    tensor_overlaps,
)
from cas_ckpt.training.restore.materialize import Builder, constant, container_builder
from cas_ckpt.training.state import GENERATOR, Stateful, is_ranks, is_stateful

_MAPPINGS = ("dict", "odict")
_SEQUENCES = ("list", "tuple")


class PlanStateful(Protocol):
    """Plans the loading of one Stateful object; notes the load in the ledger."""

    def __call__(self, target: Stateful, item: Item, path: Path) -> None:
        """Match `target` with what the commit holds at `path`."""
        ...


class HandOver:
    """The rule for what Stateful objects are given: see the module's docstring."""

    def __init__(self, ledger: Ledger, plan_stateful: PlanStateful) -> None:
        self.ledger = ledger
        self.plan_stateful = plan_stateful

    def place(self, target: Any, item: Item, path: Path) -> Builder:
        """A builder for what the object is given at `path`, where it has `target` now."""
        if is_stateful(target):
            self.plan_stateful(target, item, path)
            return constant(target)
        if is_ranks(item):
            self.ledger.faults.append(unwrapped(target, path))
        if isinstance(item, StoredTensor):
            return self._tensor(target, item, path)
        stored = as_structure(item)
        if stored is not None and len(path) <= MAX_DEPTH:
            return self._structure(target, stored, path)
        if isinstance(item, Container) and item.kind in (*_MAPPINGS, *_SEQUENCES) and len(path) <= MAX_DEPTH:
            return container_builder(item, self._children(target, item, path), path)
        if isinstance(target, torch.Generator) and isinstance(item, Container) and item.kind == GENERATOR:
            return fill_generator(target, item, path, self.ledger)
        return typed_builder(target, item, path, self.ledger)

    def _structure(self, target: Any, stored: Container, path: Path) -> Builder:
        """A new instance of the target's class if that has these fields."""
        mine = structure_of(target)
        children = self._children(target, stored, path)
        if mine is None or mine.kind != stored.kind or set(mine.fields) != set(children):
            return container_builder(stored, children, path)
        return lambda: made_like(target, {str(name): build() for name, build in children.items()})

    def _children(self, target: Any, item: Container, path: Path) -> dict[Name, Builder]:
        own = children_of(target)
        builders: dict[Name, Builder] = {}
        for name, child in item.children.items():
            here = (*path, name)
            builders[name] = self.place(own.get(name), child, here)
        for name, value in own.items():
            if name not in builders and not self.ledger.selection.covers((*path, name)):
                builders[name] = constant(value)
        return builders

    def _tensor(self, target: Any, item: StoredTensor, path: Path) -> Builder:
        if isinstance(target, torch.Tensor) and not is_lazy(target) and item.flavor == "torch":
            if is_sharded(target):
                return fill_tensor(target, item, path, self.ledger)
            plain = supported(target, path)
            may_fill_it = not (is_composite(plain) or tensor_overlaps(plain) or is_read_only(plain, self.ledger))
            if may_fill_it and fits(spec_of(plain), item, path, self.ledger):
                return fill_tensor(target, item, path, self.ledger)
        elif is_array(target) and item.flavor == "numpy" and may_fill(target):
            return fill_array(target, item, path, self.ledger)
        return self.ledger.made.builder(item, path)


class InPlace:
    """The rule for what the user holds: see the module's docstring."""

    def __init__(self, ledger: Ledger, plan_stateful: PlanStateful) -> None:
        self.ledger = ledger
        self.plan_stateful = plan_stateful

    def place(self, target: Any, item: Item, path: Path) -> Builder:
        """A builder for what stands at `path` afterwards, where `target` stands now."""
        if len(path) > MAX_DEPTH:
            return self.ledger.made.builder(item, path)  # which refuses it
        if is_ranks(item) and not is_stateful(target):
            self.ledger.faults.append(unwrapped(target, path))
            return constant(target)
        if isinstance(target, torch.Tensor):
            return fill_tensor(target, item, path, self.ledger)
        if isinstance(target, np.ndarray) and not target.dtype.hasobject:
            return fill_array(target, item, path, self.ledger)
        if is_stateful(target):
            self.plan_stateful(target, item, path)
            return constant(target)
        if isinstance(target, torch.Generator):
            return self._generator(target, item, path)
        mine, stored = structure_of(target), as_structure(item)
        if mine is not None and stored is not None and mine.kind == stored.kind:
            return self._structure(target, mine, stored, path)
        kind = item.kind if isinstance(item, Container) else ""
        if (type(target) is dict or is_module_state(target)) and kind in _MAPPINGS:
            return self.mapping(target, item, path)
        if self.ledger.selection.covers(path) and not holds_fixed(target):
            return typed_builder(target, item, path, self.ledger)
        if type(target) in (dict, OrderedDict) and kind in _MAPPINGS:
            return self.mapping(target, item, path)
        if type(target) in (list, tuple) and kind in _SEQUENCES:
            return self._sequence(target, item, path)
        self.ledger.faults.append(
            f"{render_key(path)}: the target is a {type(target).__name__}, the commit holds {describe(item)}"
        )
        return constant(target)

    def mapping(self, target: Any, item: Item, path: Path) -> Builder:
        """A builder that changes the items of a mapping and gives the mapping."""
        builders = self._children(target, item, path)
        is_whole = self.ledger.selection.covers(path)  # else the others keep their places, and so does what is restored

        def change() -> Any:
            for name, build in builders.items():
                _assign(target, name, build())
            if is_whole and type(target) is OrderedDict and isinstance(item, Container) and item.kind == "odict":
                for name in in_order(item):
                    if name in target:
                        target.move_to_end(name)
            return target

        return change

    def _structure(self, target: Any, mine: Named, stored: Container, path: Path) -> Builder:
        """Fields are matched by name, whatever the class is called; a dataclass that is not frozen stays the object."""
        builders = self._children(mine.fields, stored, path)

        def change() -> Any:
            built = {str(name): build() for name, build in builders.items()}
            changed = {name: value for name, value in built.items() if value is not mine.fields[name]}
            if not is_mutable(target):
                return made_like(target, mine.fields | changed) if changed else target
            for name, value in changed.items():
                object.__setattr__(target, name, value)
            _forget_cached(target)
            return target

        return change

    def _generator(self, target: torch.Generator, item: Item, path: Path) -> Builder:
        """Generators are set when everything else is in place, since loading may draw numbers."""
        build = fill_generator(target, item, path, self.ledger)
        self.ledger.loads.append(Load(target, path, build))
        return constant(target)

    def _sequence(self, target: Any, item: Item, path: Path) -> Builder:
        own = children_of(target)
        builders = self._children(own, item, path)

        def change() -> Any:
            for name, build in builders.items():
                _assign(own if type(target) is tuple else target, name, build())
            return _tuple_like(target, own) if type(target) is tuple else target

        return change

    def _children(self, own: Mapping[Any, Any], item: Item, path: Path) -> dict[Name, Builder]:
        """Builders for what both have; notes what only one of them has."""
        stored = item.children if isinstance(item, Container) else {}
        for name in own:
            if name not in stored:
                self.ledger.note_missing((*path, name))
        builders = {}
        for name, child in stored.items():
            if name in own:
                builders[name] = self.place(own[name], child, (*path, name))
            else:
                self.ledger.unexpected.append((*path, name))
        return builders


def unwrapped(target: Any, path: Path) -> str:
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
    children: dict[Name, Item] = {name: ValueItem(value) for name, value in found.fields.items()}
    return Container(found.kind, children, {"name": found.name, "fields": list(found.fields)})


def typed_builder(target: Any, item: Item, path: Path, ledger: Ledger) -> Builder:
    """A builder of something new, its structures of the classes that `target` has at and inside it."""
    build = ledger.made.builder(item, path)
    types = types_in(target) if isinstance(item, ValueItem) else {}
    return (lambda: retyped(build(), types)) if types else build


def _assign(target: MutableMapping[Any, Any], name: Name, value: Any) -> None:
    if target[name] is not value:
        target[name] = value


def _tuple_like(target: tuple[Any, ...], own: Mapping[Any, Any]) -> tuple[Any, ...]:
    """The old tuple if none of its items was replaced, so that its parent keeps it too."""
    items = tuple(own.values())
    return target if all(a is b for a, b in zip(items, target, strict=True)) else items


def children_of(value: Any) -> dict[Any, Any]:
    """The items of a container by name; nothing for what is no container."""
    if isinstance(value, Mapping):
        return dict(value)
    found = structure_of(value)
    if found is not None:
        return dict(found.fields)
    return dict(enumerate(value)) if isinstance(value, list | tuple) else {}


def _forget_cached(target: Any) -> None:
    """What a dataclass computed of its fields and kept (`functools.cached_property`) is of the former ones."""
    kept = getattr(target, "__dict__", {})
    for name in [name for name in kept if isinstance(getattr(type(target), name, None), cached_property)]:
        del kept[name]


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
