"""The state of one rank, as a planner of DCP has it, as the tree that a commit is made of.

    1. Stock planners: the whole flat state dict is nested again and captured as
       `repo.commit` captures it. What DCP's plan dropped as a replica is there too, so that
       the commit compares it instead of trusting it. What DCP lost of its structure is brought back where the state
       itself shows it (`Nesting`): a dict with `param_groups` has `state` even while that is empty, and where the
       `params` are numbers, the keys of `state` are numbers; places in a list that DCP left out held an empty dict.
       `NamedOptimizers` names the parameters of an optimizer where it says how they are called.
    2. Planners that plan or transform by themselves: the items of the plan, resolved by the planner.

Invariant: dtypes and local shapes are those of the tensors, never those of a (cached) plan.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner, WriteItem, WriteItemType

from cas_ckpt.errors import InvalidInputError, MismatchError, UnsupportedValueError
from cas_ckpt.layout.holdings import holdings
from cas_ckpt.objects.spec import Box, BoxPlacement, Spec
from cas_ckpt.objects.state import Container, Name, Path, TensorItem, render_key, with_tensors
from cas_ckpt.training.capture.capture import capture_state
from cas_ckpt.training.capture.sharded import Piece, ShardElements
from cas_ckpt.training.capture.tensors import DTYPE_NAMES, elements_of, is_sharded, supported, wait_for_devices
from cas_ckpt.training.optimizers import GROUPS, PARAM_NAMES, PARAMS, STATE, OptimizerForm, param_names

_PLANNING = ("create_local_plan", "create_global_plan", "finish_plan", "resolve_data", "lookup_object")
_TRANSFORMING = ("resolve_data", "lookup_object", "transform_object")


def tree_of(
    plan: SavePlan, planner: SavePlanner, versions: Mapping[Path, Mapping[str, int]], *, rank: int, world_size: int,
    members: tuple[int, ...] | None, allow_pickle: bool,
) -> tuple[Container, dict[str, Path]]:  # fmt: skip
    """The tree of a rank, and the path in it of every flat name.

    Args:
        plan: The final plan of this rank.
        versions: Of modules, by where their states are in DCP's form.
        rank, world_size: Of those who save together.
        members: Their world ranks, which meshes name; None where these are the same numbers.
    Raises:
        UnsupportedValueError: something that cannot be expressed. MismatchError: the planner
            resolves an item to something other than planned, or plans what it does not have.
    """
    flat, flat_paths = _flat_state(plan, planner)
    leaves, pieces = _sorted_items(plan, planner, flat)
    nesting = Nesting(flat_paths or {name: (name,) for name in (*leaves, *pieces)}, flat)
    for name in (*leaves, *pieces, *(item.index.fqn for item in plan.items)):
        if name not in nesting.paths:
            raise MismatchError(f"{name}: the plan names it, the planner's mappings do not: plan the state anew")
    # An empty tensor keeps the place: unlike None it keeps a list from being one plain value.
    places = [*leaves.items(), *((name, torch.empty(0)) for name in pieces)]
    original = planner.nested_state_dict if isinstance(planner, CasSavePlanner) and not pieces else None
    state: dict[Any, Any] = nesting.build(places) if original is None else original
    optimizers = NamedOptimizers(state)
    named: dict[Any, Any] = optimizers.renamed(state)
    tree = capture_state(named, allow_pickle=allow_pickle, rank=rank, world_size=world_size, streams=True)
    if members is not None:
        numbers = {world: own for own, world in enumerate(members)}
        tree = with_tensors(tree, lambda item, _: replace(item, placement=_boxes(item, numbers)))
    paths = {name: optimizers.path(path) for name, path in nesting.paths.items()}
    for name, items in pieces.items():
        _graft(tree, paths[name], _item_of_pieces(items, planner, rank, paths[name]))
    for path, found in versions.items():
        tree = _with_versions(tree, path, found)
    return tree, paths


def _sorted_items(
    plan: SavePlan, planner: SavePlanner, flat: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, list[WriteItem]]]:
    """Values by flat name, and the items of tensors that only the plan knows how to cut."""
    pieces: dict[str, list[WriteItem]] = {}
    leaves: dict[str, Any] = {}
    if _is_stock(planner, {*_PLANNING, *_TRANSFORMING}):  # its state dict is saved as it is
        # ... but for values of which only their own write items say how they are cut.
        leaves = {
            name: value
            for name, value in flat.items()
            if not hasattr(value, "__create_write_items__") or (isinstance(value, torch.Tensor) and is_sharded(value))
        }
    for item in plan.items:
        name = item.index.fqn
        if name in leaves:
            continue
        if item.type == WriteItemType.SHARD:
            pieces.setdefault(name, []).append(item)
        else:
            leaves[name] = _resolved(item, planner)
    return leaves, pieces


def _boxes(item: TensorItem, numbers: Mapping[int, int]) -> BoxPlacement | None:
    """The placement of `item` in other numbers of the ranks, those without one left out."""
    if item.placement is None:
        return None
    found: list[tuple[Box, tuple[int, ...]]] = []
    for shard in holdings(item.spec.shape, [item.placement]):
        ranks = tuple(sorted(numbers[rank] for rank in shard.ranks if rank in numbers))
        found.extend((piece, ranks) for piece in shard.pieces if ranks)
    return BoxPlacement(tuple(found))


def _flat_state(plan: SavePlan, planner: SavePlanner) -> tuple[Mapping[str, Any], Mapping[str, Path]]:
    """The flat state dict and DCP's paths; empty where the planner has none."""
    if isinstance(planner, DefaultSavePlanner):
        return planner.state_dict, planner.mappings if planner.flatten_state_dict else {}
    paths = plan.planner_data
    return {}, paths if isinstance(paths, Mapping) else {}


def _is_stock(planner: SavePlanner, methods: Iterable[str]) -> bool:
    """Whether these methods of the planner are DCP's own."""
    return isinstance(planner, DefaultSavePlanner) and all(
        getattr(type(planner), name) is getattr(DefaultSavePlanner, name) for name in methods
    )


def _resolved(item: WriteItem, planner: SavePlanner) -> Any:
    """The tensor or plain value of an item."""
    if item.type == WriteItemType.BYTE_IO and _is_stock(planner, _TRANSFORMING):
        stock: Any = planner
        return stock.lookup_object(item.index)
    found = planner.resolve_data(item)
    if isinstance(found, torch.Tensor):
        return found
    try:
        return torch.load(io.BytesIO(found.getbuffer()), weights_only=True)
    except Exception as error:
        raise UnsupportedValueError(
            f"{item.index.fqn}: the planner gives it as a pickle that is more than plain values, and no code is run "
            "to read it: leave it out, or give it as a plain value"
        ) from error


def _item_of_pieces(items: list[WriteItem], planner: SavePlanner, rank: int, path: Path) -> TensorItem:
    """A tensor of which this rank holds the boxes of `items`."""
    key = render_key(path)
    tensors = [_local(item, planner, path) for item in items]
    dtypes, shapes = {tensor.dtype for tensor in tensors}, {_planned(item, key)[0] for item in items}
    if len(dtypes) != 1 or len(shapes) != 1:
        raise MismatchError(f"{key}: its shards are of {dtypes} and of tensors of {shapes}: they must agree")
    wait_for_devices({tensor.device for tensor in tensors})
    spec = Spec(DTYPE_NAMES[dtypes.pop()], shapes.pop())
    boxes = [_planned(item, key)[1] for item in items]
    pieces = tuple(Piece(box, (0,) * len(box.sizes), at) for at, box in enumerate(boxes) if box.num_elements)
    source = ShardElements(pieces, tuple(map(elements_of, tensors)), spec.item_bytes)
    return TensorItem(spec, source, placement=BoxPlacement(tuple((piece.box, (rank,)) for piece in pieces)))


def _local(item: WriteItem, planner: SavePlanner, path: Path) -> torch.Tensor:
    found = planner.resolve_data(item)
    box = _planned(item, render_key(path))[1]
    if not isinstance(found, torch.Tensor) or tuple(found.shape) != box.sizes:
        what = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        raise MismatchError(f"{render_key(path)}: the plan has a shard of {box.sizes} here, the planner gives {what}")
    return supported(found.detach(), path)


def _planned(item: WriteItem, key: str) -> tuple[tuple[int, ...], Box]:
    """Global shape and box of a shard, as the plan has them."""
    if item.tensor_data is None or item.tensor_data.chunk is None:
        raise InvalidInputError(f"{key}: its write item names no box: the planner must set tensor_data.chunk")
    chunk = item.tensor_data.chunk
    return tuple(item.tensor_data.size), Box(tuple(chunk.offsets), tuple(chunk.sizes))


def _graft(tree: Container, path: Path, item: TensorItem) -> None:
    at = tree
    for name in path[:-1]:
        below = at.children[name]
        if not isinstance(below, Container):
            raise MismatchError(f"{render_key(path)}: there is a plain value above it")
        at = below
    at.children[path[-1]] = item


def _with_versions(item: Container, path: Path, versions: Mapping[str, int]) -> Container:
    """`item`, in which what is at `path`, if there is something of it, is the state of modules of these versions."""
    if not path:
        return replace(item, versions=versions)
    below = item.children.get(path[0])
    if isinstance(below, Container):
        item.children[path[0]] = _with_versions(below, path[1:], versions)
    return item


# --- what DCP flattened, nested again --------------------------------------------------------------

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
        """The path by names of the entry at `path`."""
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


# --- planners: DCP's own, with what its flat form loses; optional, stock planners work as well --


class CasSavePlanner(DefaultSavePlanner):
    """DCP's own planner, which also remembers the state as it was before it was flattened.

    With it a commit is exactly that of `repo.commit` for every state: OrderedDicts, numbers as
    keys and empty dicts, of which DCP's flat form keeps no trace.
    """

    nested_state_dict: dict[str, Any] | None = None

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Plan a save of `state_dict` (`SavePlanner.set_up_planner`), which is remembered."""
        self.nested_state_dict = dict(state_dict)
        super().set_up_planner(state_dict, storage_meta, is_coordinator)


class CasLoadPlanner(DefaultLoadPlanner):
    """DCP's own planner, which puts plain values back under the very keys that the state has.

    DCP itself would put the value of `{1: "one"}` under "1", beside the old one.
    """

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value in its place in the state (`LoadPlanner.load_bytes`)."""
        name = read_item.dest_index.fqn
        holder = DefaultLoadPlanner(flatten_state_dict=False)
        holder.state_dict = {}
        holder.load_bytes(read_item, value)
        at: Any = self.original_state_dict
        path = self.mappings[name] if self.flatten_state_dict else (name,)
        for part in path[:-1]:
            at = at[_own_key(at, part)]
        at[_own_key(at, path[-1])] = holder.state_dict[name]


def _own_key(container: Any, part: str | int) -> Any:
    """The key of `container` that DCP writes as `part`."""
    if not isinstance(container, Mapping) or part in container:
        return part
    return next((key for key in container if str(key) == part), part)
