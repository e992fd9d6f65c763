"""From DCP's flat names to nested state, and back.

DCP flattens a state: dicts and lists become dotted names ("optim.state.0.exp_avg"), and a
mapping from each name to its path remains, in which every key of a dict is text and every
number a place in a list. What it lost is brought back where the state itself shows it:

- optimizers: a dict with `param_groups` has `state` even while that is empty, and where the `params`
  are numbers, the keys of `state` are numbers;
- places in a list that DCP left out held an empty dict.

DCP has asked the objects at the top of a state for their `state_dict()` by then, which numbers an
optimizer's parameters. `NamedOptimizers` names them where it says how they are called.

Invariant: `flat_items` names every entry of a commit as DCP's own flattening of the same state
does. Must not know planners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias, cast

import torch

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.errors import MismatchError
from cas_ckpt.objects.layouts import LayoutObject
from cas_ckpt.objects.state import Container, Flavor, Item, Name, Path, StoredTensor, ValueItem
from cas_ckpt.ops.checkout.checkout import fetch_tensors
from cas_ckpt.training.capture.composites import COMPOSITE_KINDS
from cas_ckpt.training.optimizers import GROUPS, PARAM_NAMES, PARAMS, STATE, OptimizerForm, param_names
from cas_ckpt.training.restore.materialize import NewObjects
from cas_ckpt.training.stateful import is_module_state
from cas_ckpt.training.torch_internals import TRAVERSE, private

FlatPaths: TypeAlias = Mapping[str, Path]
"""DCP's mapping: flat name -> path of text and list places."""


class Nesting:
    """The structure that DCP flattened, as far as it can be known.

    Attributes:
        paths: Flat name -> path, keys of optimizer state being numbers where they were.
    """

    def __init__(self, flat_paths: FlatPaths, values: Mapping[str, Any]) -> None:
        """Nothing is copied.

        Args:
            flat_paths: As DCP made them.
            values: What is under each flat name; only `param_groups` are looked at.
        """
        optimizers = _optimizers(flat_paths, values)
        numbered = {prefix for prefix, kind in optimizers.items() if kind is int}
        self._flat = dict(flat_paths)
        self.paths = {name: _exact(path, numbered) for name, path in flat_paths.items()}
        filled = {path[: at + 1] for path in self.paths.values() for at in _places_of_state(path)}
        self._empty = [(*prefix, STATE) for prefix in optimizers if (*prefix, STATE) not in filled]

    def build(self, leaves: Iterable[tuple[str, Any]]) -> dict[Name, Any]:
        """The nested state that holds each (flat name, leaf) at its path."""
        root = _Branch(is_list=False)
        for path in self._empty:
            _descend(root, (*path, ""), path)
        for name, leaf in leaves:
            path = self.paths[name]
            _descend(root, self._flat[name], path[:-1])[path[-1]] = leaf
        built: dict[Name, Any] = _finished(root)
        return built


class _Branch(dict[Name, Any]):
    """A container in the making, distinct from dicts that are leaves."""

    def __init__(self, *, is_list: bool) -> None:
        super().__init__()
        self.is_list = is_list


def _descend(root: _Branch, flat: Path, above: Path) -> _Branch:
    """The container at `above`; a place in a list is known by a number in DCP's own path."""
    at = root
    for depth, name in enumerate(above):
        below = at.get(name)
        if below is None:
            below = at[name] = _Branch(is_list=type(flat[depth + 1]) is int)
        at = below
    return at


def _finished(branch: _Branch) -> Any:
    made = {name: _finished(child) if isinstance(child, _Branch) else child for name, child in branch.items()}
    if not branch.is_list:
        return made
    last = max((place for place in made if isinstance(place, int)), default=-1)
    return [made.get(place, {}) for place in range(last + 1)]


def _optimizers(flat_paths: FlatPaths, values: Mapping[str, Any]) -> dict[Path, type]:
    """Paths of the optimizers, and what their parameters are called by: `int` or `str`."""
    found: dict[Path, set[type]] = {}
    for name, path in flat_paths.items():
        if len(path) > 2 and path[-1] == PARAMS and path[-3] == GROUPS and type(path[-2]) is int:
            params = values.get(name)
            kinds = {type(param) for param in params} if isinstance(params, list) else {object}
            found.setdefault(path[:-3], set()).update(kinds)
    return {path: (kinds or {int}).pop() for path, kinds in found.items() if kinds in (set(), {int}, {str})}


def _places_of_state(path: Path) -> Iterator[int]:
    return (at for at, name in enumerate(path) if name == STATE)


def _exact(path: Path, numbered: set[Path]) -> Path:
    if not numbered or STATE not in path:
        return path
    for at in _places_of_state(path):
        key = path[at + 1] if at + 1 < len(path) else None
        if path[:at] in numbered and type(key) is str and key.isascii() and key.isdigit() and str(int(key)) == key:
            path = (*path[: at + 1], int(key), *path[at + 2 :])
    return path


class NamedOptimizers:
    """The optimizers at the top of a nested state that have the names of their parameters (`param_names`).

    `repo.commit` names the parameters of an optimizer as the module in the same state does. These get the
    same names if one module's state, at the top of this one, has tensors of all of them; or if they are names of
    several modules, each with its module's key in front. All others keep their numbers.
    """

    def __init__(self, state: Mapping[Name, Any]) -> None:
        tensors = {key: _tensor_names(value) for key, value in state.items()}
        with_key = {f"{key}.{name}": key for key, names in tensors.items() for name in names}
        self._names: dict[Name, dict[int, str]] = {}
        for key, value in state.items():
            names = _param_names(value)
            wanted = set(names.values())
            in_one = any(wanted <= each for each in tensors.values())
            in_several = wanted <= with_key.keys() and len({with_key[name] for name in wanted}) > 1
            if names and (in_one or in_several) and not wanted & value[STATE].keys():
                self._names[key] = names

    def renamed(self, state: Mapping[Name, Any]) -> dict[Name, Any]:
        """`state` with these optimizers by names; no tensor is copied."""
        named = dict(state)
        for key, names in self._names.items():
            groups = [group[PARAMS] for group in state[key][GROUPS]]
            named[key] = OptimizerForm(state[key], groups, names, {}).named()
        return named

    def path(self, path: Path) -> Path:
        """Where what is at `path` is by names."""
        names = self._names.get(path[0], {})
        if len(path) < 3 or path[1] != STATE or type(path[2]) is not int or path[2] not in names:
            return path
        return (*path[:2], names[path[2]], *path[3:])


def _tensor_names(value: Any) -> set[str]:
    if not isinstance(value, Mapping):
        return set()
    return {name for name, child in value.items() if isinstance(name, str) and isinstance(child, torch.Tensor)}


def _param_names(value: Any) -> dict[int, str]:
    """Number -> name of all parameters of an optimizer's state dict; nothing if not all have one of their own."""
    if type(value) is not dict or not isinstance(value.get(STATE), dict) or not isinstance(value.get(GROUPS), list):
        return {}
    groups = [group if isinstance(group, dict) else {} for group in value[GROUPS]]
    found = param_names([group.get(PARAMS) for group in groups], [group.get(PARAM_NAMES) for group in groups]) or {}
    return found if all(type(number) is int for number in found) else {}


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
    """What is at `path`, new: of an item, of a list of items, or a part of a longer value.

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
