"""The flat names that DCP has for the entries of a commit, and what is there.

DCP flattens a state: dicts and lists become dotted names ("optim.state.0.exp_avg"), and a mapping from each name to its
path remains, in which every key of a dict is text and every number a place in a list.

Invariant: `flat_items` names every entry of a commit as DCP's own flattening of the same state does. Must not know
planners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.errors import MismatchError
from cas_ckpt.objects.layouts import LayoutObject
from cas_ckpt.objects.state import Container, Flavor, Item, Path, StoredTensor, ValueItem
from cas_ckpt.ops.checkout.checkout import fetch_tensors
from cas_ckpt.training.capture.composites import COMPOSITE_KINDS
from cas_ckpt.training.restore.materialize import NewObjects
from cas_ckpt.training.stateful import is_module_state
from cas_ckpt.training.torch_internals import TRAVERSE, private


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
