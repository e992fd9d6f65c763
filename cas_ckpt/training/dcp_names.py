"""From DCP's flat names to nested state, and back.

DCP flattens a state: dicts and lists become dotted names ("optim.state.0.exp_avg"), and a
mapping from each name to its path remains, in which every key of a dict is text and every
number a place in a list. What it lost is brought back where the state itself tells it:

- optimizers: a dict with `param_groups` whose `params` are numbers has numbers as keys of
  `state`, and has `state` even while that is empty;
- places in a list that DCP left out held an empty dict.

Invariant: `flat_items` names every entry of a commit as DCP's own flattening of the same state
does. Must not know storage or planners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from torch.distributed.checkpoint._traverse import traverse_state_dict

from cas_ckpt.errors import MismatchError
from cas_ckpt.objects.state import Container, Item, Name, Path, StoredTensor, ValueItem
from cas_ckpt.training.composites import COMPOSITE_KINDS

FlatPaths: TypeAlias = Mapping[str, Path]
"""DCP's mapping: flat name -> path of text and list places."""

_GROUPS, _STATE, _PARAMS = "param_groups", "state", "params"


class Nesting:
    """The structure that DCP flattened, as far as it can be known.

    Attributes:
        paths: Flat name -> path, keys of optimizer state being numbers where they were.
    """

    def __init__(self, flat_paths: FlatPaths, values: Mapping[str, Any]) -> None:
        """Nothing is copied.

        Args:
            flat_paths: As DCP made them.
            values: What stands under each flat name; only `param_groups` are looked at.
        """
        numbered = _numbered_optimizers(flat_paths, values)
        self._flat = dict(flat_paths)
        self.paths = {name: _exact(path, numbered) for name, path in flat_paths.items()}
        filled = {path[: at + 1] for path in self.paths.values() for at in _places_of_state(path)}
        self._empty = [(*prefix, _STATE) for prefix in numbered if (*prefix, _STATE) not in filled]

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
    """A container in the making, to be told from dicts that are leaves."""

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


def _numbered_optimizers(flat_paths: FlatPaths, values: Mapping[str, Any]) -> dict[Path, None]:
    """Paths of the optimizers whose parameters are numbers."""
    found: dict[Path, bool] = {}
    for name, path in flat_paths.items():
        if len(path) > 2 and path[-1] == _PARAMS and path[-3] == _GROUPS and type(path[-2]) is int:
            params = values.get(name)
            numbers = isinstance(params, list) and all(type(param) is int for param in params)
            found[path[:-3]] = found.get(path[:-3], True) and numbers
    return {path: None for path, numbered in found.items() if numbered}


def _places_of_state(path: Path) -> Iterator[int]:
    return (at for at, name in enumerate(path) if name == _STATE)


def _exact(path: Path, numbered: Mapping[Path, None]) -> Path:
    if not numbered or _STATE not in path:
        return path
    for at in _places_of_state(path):
        key = path[at + 1] if at + 1 < len(path) else None
        if path[:at] in numbered and type(key) is str and key.isascii() and key.isdigit() and str(int(key)) == key:
            path = (*path[: at + 1], int(key), *path[at + 2 :])
    return path


def flat_items(tree: Container, *, flatten: bool = True) -> dict[str, tuple[Path, Any]]:
    """DCP's flat name -> (DCP's path, what stands there) for every entry of a decoded tree.

    What stands there is an `Item`, or a plain value that was part of a longer one.

    Args:
        flatten: False names the outermost entries only, as planners do that do not flatten.
    Raises:
        MismatchError: two entries would have one name.
    """
    found: dict[str, tuple[Path, Any]] = {}

    def visit(path: Path, leaf: Any) -> None:
        name = ".".join(map(str, path))
        if name in found:
            raise MismatchError(
                f"two entries of the commit are called {name!r} in DCP's flat form: use repo.checkout, "
                "or CasStorageReader(flatten=False) with planners that do not flatten"
            )
        found[name] = (path, leaf)

    if flatten:
        _traverse(tree, visit)
    else:
        for name, child in tree.children.items():
            visit((str(name),), child)
    return found


def _traverse(tree: Container, visit: Callable[[Path, Any], None]) -> None:
    shadow = {name: _shadow(child) for name, child in tree.children.items()}
    traverse_state_dict(shadow, visit, keep_traversing=_is_tensor)  # type: ignore[arg-type]


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
    if isinstance(leaf, Container):
        return leaf.kind in COMPOSITE_KINDS
    return isinstance(leaf, StoredTensor) and leaf.flavor == "torch"
