"""The entries of a commit by the flat names that DCP has for them, whatever a target calls an optimizer's parameters.

DCP flattens a state: dicts and lists become dotted names ("optim.state.0.exp_avg"), and a mapping from each name to its
path remains, in which every key of a dict is text and every number a place in a list.

A commit has an optimizer's parameters by names or by numbers, and so has a target of `dcp.load`. Where they differ:

- Target by numbers, commit by names: number k is the k-th parameter of the commit's groups, which is what torch's
  own `state_dict()` would have called it. The groups must be of the same sizes, and `param_names`, if the target
  has them, the commit's names in the commit's order.
- Target by names, commit by numbers: by the commit's `param_names`. Without them nothing says which is which.
- Target in the flat form of `get_optimizer_state_dict`: its options are those of the parameter's group.

Which parameter is which is decided as for a checkout (training/restore/optimizers.py); here it is held against what
the names made DCP read.

Invariant: `flat_items` names every entry of a commit as DCP's own flattening of the same state does; no name means two
entries, and what cannot be decided is an error before anything is read. Must not know planners.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.errors import MismatchError
from cas_ckpt.objects.layouts import LayoutObject
from cas_ckpt.objects.state import Container, Flavor, Item, Name, Path, StoredTensor, ValueItem
from cas_ckpt.ops.checkout.checkout import fetch_tensors
from cas_ckpt.training.capture.composites import COMPOSITE_KINDS
from cas_ckpt.training.optimizers import GROUPS, PARAM_NAMES, PARAMS, STATE, OptimizerForm
from cas_ckpt.training.restore.materialize import NewObjects
from cas_ckpt.training.restore.optimizers import match_optimizer, names_in, stored_groups
from cas_ckpt.training.stateful import is_module_state, unwrapped
from cas_ckpt.training.torch_internals import TRAVERSE, private

_LOGGER = logging.getLogger("cas_ckpt")

_BY_NAMES = "or load by names (get_state_dict, with_names)"

FlatItems = Mapping[str, tuple[Path, Any]]
"""Flat name -> (DCP's path, what is there)."""


def flat_items(tree: Container, *, flatten: bool = True) -> dict[str, tuple[Path, Any]]:
    """DCP's flat name -> (DCP's path, what is there) for every entry of a decoded tree.

    What is there is an `Item`, or a plain value that was part of a longer one.

    Args:
        flatten: False names the outermost entries only, as planners do that do not flatten.
    Raises:
        MismatchError: two entries would have one name.
    """
    found: dict[str, tuple[Path, Any]] = {}
    entries = flat_entries(tree) if flatten else [((str(name),), child) for name, child in tree.children.items()]
    for path, entry in entries:
        name = ".".join(map(str, path))
        if name in found:
            raise MismatchError(
                f"two entries of the commit are called {name!r} in DCP's flat form: use repo.checkout, "
                "or CasStorageReader(flatten=False) with planners that do not flatten"
            )
        found[name] = (path, entry)
    return found


def flat_entries(tree: Container) -> list[tuple[Path, Any]]:
    """DCP's path of every entry of a decoded tree, and what is there: see `flat_items`; by torch's own rule.

    A list without tensors and mappings in it is one entry: a list of items.
    """
    found: list[tuple[Path, Any]] = []
    shadow = {name: _shadow(child) for name, child in tree.children.items()}
    visit = cast(Any, lambda path, entry: found.append((path, entry)))
    private(TRAVERSE)(shadow, visit, keep_traversing=_is_tensor)
    return found


def _shadow(item: Item) -> Any:
    """`item` with real dicts and lists where DCP looks for them."""
    if isinstance(item, Container):
        if item.kind in ("dict", "odict"):
            return {name: _shadow(child) for name, child in item.children.items()}
        if item.kind == "list":
            return [_shadow(item.children[place]) for place in sorted(item.children)]
        return item
    if isinstance(item, ValueItem) and isinstance(item.value, Mapping | list):
        return item.value
    return item


def _is_tensor(leaf: object) -> bool:
    """Whether DCP sees a torch.Tensor here."""
    return leaf.kind in COMPOSITE_KINDS if isinstance(leaf, Container) else is_plain_tensor(leaf)


def is_plain_tensor(item: Any) -> bool:
    """Whether `item` is described to DCP as a tensor."""
    return isinstance(item, StoredTensor) and item.flavor == Flavor.TORCH


def stored_object(
    handle: RepositoryHandle, item: Any, path: Path, layout: Callable[[], LayoutObject] = LayoutObject
) -> Any:
    """The object at `path`, made anew: of an item, of a list of items, or a part of a longer value.

    Args:
        layout: Gives that of the commit.
    """
    if isinstance(item, ValueItem):
        return item.value
    if isinstance(item, list):  # one without tensors and mappings, which is one value to DCP
        return [stored_object(handle, each, (*path, number), layout) for number, each in enumerate(item)]
    if not isinstance(item, Container | StoredTensor):
        return item  # part of a longer value
    made = NewObjects(layout=layout()) if isinstance(item, Container) else NewObjects()
    return made.filled(item, path, partial(fetch_tensors, handle, unseen=True))


# --- states of modules: DCP flattens them, their versions are attributes that it does not look at ------


def module_states(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The states of modules in a state, and where they are in DCP's form."""
    if is_module_state(value):
        yield path, value
    if isinstance(value, Mapping):
        for name, child in value.items():
            yield from module_states(child, (*path, str(name)))
    elif isinstance(value, list):
        for place, child in enumerate(value):
            yield from module_states(child, (*path, place))


# --- optimizers, by whatever name a target knows their parameters ---------------------------------


@dataclass(frozen=True, slots=True)
class StoredOptimizer:
    """An optimizer of the commit.

    Attributes:
        path: Where it is, as DCP has it.
        item: What is there.
        groups: The keys of the parameters by group, all names or all numbers.
        names: Those of the parameters by group, where the commit has them: the keys, or the `param_names`.
        state: Keys of the parameters that have state, as text.
        entries: What the state of a parameter is called: exp_avg and the like.
    """

    path: Path
    item: Item
    groups: tuple[tuple[Name, ...], ...]
    names: tuple[tuple[str, ...], ...] | None
    state: frozenset[str]
    entries: frozenset[str]

    @property
    def is_named(self) -> bool:
        """Whether the keys are names."""
        return any(isinstance(key, str) for group in self.groups for key in group)

    @property
    def keys(self) -> list[Name]:
        """All keys, in the order of the groups."""
        return [key for group in self.groups for key in group]

    def flat(self, *below: Name) -> str:
        """DCP's name for what is below."""
        return ".".join(map(str, (*self.path, *below)))

    def others(self) -> dict[str, str]:
        """The commit's name of each parameter -> that of a target of the other kind."""
        if self.is_named:
            return {str(key): str(number) for number, key in enumerate(self.keys)}
        names = [name for group in self.names or () for name in group]
        return dict(zip(map(str, self.keys), names, strict=False))


class StoredOptimizers:
    """All optimizers of one commit."""

    def __init__(self, items: FlatItems, tree: Container) -> None:
        self._items = items
        self.found = tuple(_stored_in(tree, items))
        self._by_numbers: set[Path] = set()
        self._flat_forms = {
            ".".join(map(str, (*path[:-1], part, "")))
            for path, _ in items.values()
            for part in (STATE, GROUPS)
            if path and isinstance(path[-1], str) and path[-1].startswith(f"{GROUPS}.")
        }

    @cached_property
    def aliases(self) -> dict[str, str]:
        """A target's flat name -> that of the commit, for all that the commit calls otherwise."""
        found: dict[str, str] = {}
        for optimizer in self.found:
            depth, others = len(optimizer.path), optimizer.others()
            for name, (path, _) in self._items.items():
                if len(path) > depth + 2 and path[:depth] == optimizer.path:
                    for below in _also_called(path[depth:], optimizer, others):
                        found.setdefault(optimizer.flat(*below), name)
        return {alias: name for alias, name in found.items() if alias not in self._items}

    def alias(self, name: str) -> str | None:
        """The commit's flat name for what a target calls `name`; None if it has no such thing.

        Raises:
            MismatchError: state of a parameter, by a name or number that this commit does not know.
        """
        real = self.aliases.get(name) if self.found else None
        for optimizer in self.found:
            number = _number(name, optimizer.flat(STATE, "")) if optimizer.is_named else None
            if real is not None and number is not None:
                self._by_numbers.add(optimizer.path)
            if real is None:
                _refuse_unknown(optimizer, name, by_numbers=optimizer.path in self._by_numbers)
        if real is None and any(_number(name, start, ends=True) is not None for start in self._flat_forms):
            raise MismatchError(
                f"{name}: the commit has the flat form of get_optimizer_state_dict, which has neither numbers nor "
                "groups: load with flatten_optimizer_state_dict=True, or use repo.checkout"
            )
        return real

    def check(self, state: Mapping[str, Any], wanted: Iterable[str], *, partial: bool) -> None:
        """Nothing of a target's optimizers is taken for something else, or left out without a word.

        Args:
            state: The target, by flat names.
            wanted: What is read of the commit, by the names that the target has for it.
            partial: The target is content with what there is.
        Raises:
            MismatchError: names the optimizer.
        """
        if not self.found:
            return
        names = set(wanted)
        for optimizer in self.found:
            own = [state.get(optimizer.flat(GROUPS, number, PARAMS)) for number in range(len(optimizer.groups))]
            labels = [state.get(optimizer.flat(GROUPS, number, PARAM_NAMES)) for number in range(len(own))]
            listed = [group for group in own if isinstance(group, list) and group]
            is_numbered, is_named = (any(_all(kind, group) for group in listed) for kind in (int, str))
            if optimizer.is_named and (is_numbered or self._reads_numbers(optimizer, names)):
                more = optimizer.flat(GROUPS, len(own), PARAMS) in state
                _check_numbers(optimizer, [*own, *([[]] if more else [])], [*labels, *([None] if more else [])])
            elif optimizer.names is None and is_named and any(optimizer.groups):
                raise MismatchError(_no_names(optimizer))
            # A parameter's name may read as the number of a group, as in a bare ParameterList.
            has_digits = any(isinstance(key, str) and key.isdecimal() for key in optimizer.keys)
            if has_digits and not any(isinstance(group, list) for group in own):
                _check_digits(optimizer, names)
            if not partial:
                _check_state(optimizer, [key for group in listed for key in group], state, is_named=is_named)

    def params(self, name: str, own: Any) -> list[Any] | None:
        """The list for a target that has `own` under `name`; None: the commit's own list.

        Args:
            own: Names or numbers of the parameters, or their `param_names`.
        """
        for optimizer in self.found:
            for number, group in enumerate(optimizer.groups):
                if name == optimizer.flat(GROUPS, number, PARAM_NAMES) and name not in self._items:
                    names = list(map(str, group))
                    return own if isinstance(own, list) and unwrapped(map(str, own)) == unwrapped(names) else names
                if name == optimizer.flat(GROUPS, number, PARAMS) and isinstance(own, list) and own:
                    if optimizer.is_named and _all(int, own):
                        return list(own)
                    if not optimizer.is_named and group and _all(str, own):
                        return list(optimizer.names[number]) if optimizer.names else None
        return None

    def _reads_numbers(self, optimizer: StoredOptimizer, wanted: set[str]) -> bool:
        start = optimizer.flat(STATE, "")
        found = (name for name in wanted if _number(name, start) is not None and name not in self._items)
        return any(name in self.aliases for name in found)


class Entries(dict[str, Any]):
    """A mapping by flat names that also answers to those of `alias`, without listing them."""

    def __init__(self, entries: Mapping[str, Any], alias: Callable[[str], str | None]) -> None:
        super().__init__(entries)
        self._alias = alias

    def __contains__(self, name: object) -> bool:
        """Whether there is such an entry, by whatever name."""
        return super().__contains__(name) or (isinstance(name, str) and self._alias(name) is not None)

    def __missing__(self, name: str) -> Any:
        real = self._alias(name)
        if real is None:
            raise KeyError(name)
        return self[real]

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _check_numbers(optimizer: StoredOptimizer, own: Sequence[Any], labels: Sequence[Any]) -> None:
    """A target by numbers has the parameters of a commit by names, in its order.

    Args:
        own, labels: `params` and `param_names` of the target, by group; None where it has none.
    """
    groups = [group if isinstance(group, list) else [] for group in own]
    form = OptimizerForm({STATE: {}, GROUPS: [{PARAM_NAMES: called} for called in labels]}, groups, None, {})
    found = match_optimizer(form, optimizer.item, optimizer.path, alone=True)
    if isinstance(found, str):
        raise MismatchError(f"{found}, {_BY_NAMES}")
    keys = list(map(str, optimizer.keys))
    for number, name in found.stored.items():
        read = str(number) if str(number) in keys else keys[number] if number < len(keys) else None
        if read != name:
            raise MismatchError(
                f"{optimizer.flat()}: the target has the parameters by numbers, and number {number} would get the "
                f"state of {read!r} in place of that of {name!r}: build the optimizer in the order of the commit, "
                f"{_BY_NAMES}"
            )


def _check_digits(optimizer: StoredOptimizer, wanted: Iterable[str]) -> None:
    """The flat form calls the options of a parameter "1" as the nested form calls those of group 1."""
    start = optimizer.flat(GROUPS, "")
    found = next((name for name in wanted if _number(name, start) is not None), None)
    if found is not None:
        raise MismatchError(
            f"{found}: in the flat form parameters whose names are numbers look like numbers of groups: load with "
            "flatten_optimizer_state_dict=False, or use repo.checkout"
        )


def _check_state(optimizer: StoredOptimizer, own: Sequence[Any], state: Mapping[str, Any], *, is_named: bool) -> None:
    """A target that has parameters but no state yet would get the options alone; one with less state is logged."""
    start, known = optimizer.flat(STATE, ""), optimizer.state
    if own and is_named and optimizer.names:
        others = {name: key for key, name in optimizer.others().items()}
        known = known & {str(key) if optimizer.is_named else others.get(str(key)) for key in own}
    having = {name[len(start) :].rpartition(".")[0] for name in state if name.startswith(start)} & set(map(str, own))
    if having and len(having) < len(known):
        _LOGGER.warning(
            "%s: the commit has the state of %d parameters, the target of %d: the rest is not loaded",
            optimizer.flat(), len(known), len(having),
        )  # fmt: skip
    if own and known and not any(name.startswith(start) for name in state):
        raise MismatchError(
            f"{optimizer.flat()}: the commit has the state of {len(known)} parameters, the target's optimizer "
            "has none yet, and DCP fills only what is there: make it with get_state_dict(model, optimizer), use "
            "repo.checkout, or pass DefaultLoadPlanner(allow_partial_load=True) to go without it"
        )


def _stored_in(item: Item, items: FlatItems, path: Path = ()) -> Iterator[StoredOptimizer]:
    if not isinstance(item, Container):
        return
    listed = stored_groups(item) if GROUPS in item.children else None
    groups = tuple(tuple(group or ()) for group in listed or ())
    keys = [key for group in groups for key in group]
    if any(".".join(map(str, (*path, GROUPS, number, PARAMS))) in items for number in range(len(groups))) and (
        len(set(map(str, keys))) == len(keys) and (_all(int, keys) or _all(str, keys))
    ):
        called = names_in(item, listed or []) if keys else None
        names = None if called is None else tuple(tuple(called[key] for key in group) for group in groups)
        depth, start = len(path) + 1, (*path, STATE)
        below = [other for other, _ in items.values() if len(other) > depth and other[:depth] == start]
        has_state = {str(other[depth]) for other in below} & set(map(str, keys))
        entries = frozenset(str(other[-1]) for other in below)
        yield StoredOptimizer(path, item, groups, names, frozenset(has_state), entries)
    for name, child in item.children.items():
        yield from _stored_in(child, items, (*path, name if item.kind == "list" else str(name)))


def _also_called(below: Path, optimizer: StoredOptimizer, others: Mapping[str, str]) -> Iterator[Path]:
    part, key, *rest = below
    if part == STATE and key in others:
        yield (STATE, others[str(key)], *rest)
    elif part == GROUPS and rest[0] == PARAMS and optimizer.is_named:
        yield (GROUPS, key, PARAM_NAMES)
    elif part == GROUPS and type(key) is int and rest[0] not in (PARAMS, PARAM_NAMES) and optimizer.names is not None:
        for name in optimizer.names[key] if key < len(optimizer.names) else ():
            yield (GROUPS, name, *rest)


def _refuse_unknown(optimizer: StoredOptimizer, name: str, *, by_numbers: bool) -> None:
    start = optimizer.flat(STATE, "")
    param, group = _number(name, start), _number(name, optimizer.flat(GROUPS, ""))
    if by_numbers and param is not None and param >= len(optimizer.keys):
        raise MismatchError(
            f"{optimizer.flat()}: the target has a parameter of the number {param}, the commit has "
            f"{len(optimizer.keys)} parameters, by names: build the optimizer over the same parameters"
        )
    if by_numbers and group is not None and group >= len(optimizer.groups):
        raise MismatchError(
            f"{optimizer.flat()}: the target has the parameters by numbers and a group of the number {group}, the "
            f"commit by names in groups of {[len(each) for each in optimizer.groups]}: build the optimizer with the "
            f"same groups, {_BY_NAMES}"
        )
    if not name.startswith(start) or optimizer.names is not None or not optimizer.keys:
        return
    *above, last = name[len(start) :].split(".")
    if param is None or (len(above) > 1 and last in optimizer.entries):  # 0.weight.exp_avg, of a Sequential
        raise MismatchError(_no_names(optimizer))


def _number(name: str, start: str, *, ends: bool = False) -> int | None:
    """The number that follows `start` in a flat name; with `ends`, only if no more than one part follows it."""
    part, _, rest = name[len(start) :].partition(".") if name.startswith(start) else ("", "", "")
    return int(part) if part.isascii() and part.isdigit() and not (ends and "." in rest) else None


def _no_names(optimizer: StoredOptimizer) -> str:
    return (
        f"{optimizer.flat()}: the target has the parameters by names, the commit by numbers without "
        'param_names: repo.checkout(REF, into={"model": model, "optim": optimizer}) matches them by their order, '
        "and so does dcp.load of the optimizer's own state_dict()"
    )


def _all(kind: type, values: Iterable[Any]) -> bool:
    return all(type(value) is kind for value in values)
