"""import of a DCP folder: what torch.distributed.checkpoint saved becomes a commit.

    1. read `.metadata`, as data; every claim is checked      (dcp/folder/metadata.py)
    2. see that all items are inside their files              (dcp/folder/tensors.py)
    3. objects are loaded; tensors are left where they are    (dcp/folder/tensors.py)
    4. nest them along the paths that the folder tells, else by flat key; commit like any state

The root is that of the commit of the nested state, except for what DCP does not save: kinds of
mappings, integer keys (they come as text), empty dicts, ties.

Invariant: memory does not grow with tensors, whoever sharded them and how.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

from cas_ckpt.dcp.folder.metadata import FolderMetadata, read_folder_metadata
from cas_ckpt.dcp.folder.tensors import ChunkedSource, DataFiles, Scratch, check_places, load_object
from cas_ckpt.errors import InvalidInputError
from cas_ckpt.objects.state import Container, Item, Name, Path, TensorItem, ValueItem, render_key
from cas_ckpt.training.capture.capture import MAX_DEPTH, capture_state, check_name

MAX_GAPS = 10_000
"""Places of lists that the folder says nothing about, at most."""


def folder_tree(folder: FilePath, *, allow_pickle: bool = False, follow_links: bool = False) -> Container:
    """The state that a folder holds; its tensors are read when it is committed. Nobody may write there meanwhile.

    Needs a buffer per thread for tensors; a saved chunk that is compressed is decoded whole.
    Objects (tuples that hold tensors among them) are loaded whole.

    Args:
        follow_links: Read what symbolic links lead to outside of the folder.
    Raises:
        InvalidInputError: what is wrong with the folder, or the code that it wants to run.
        UnsupportedValueError: an entry that cannot be expressed, by its key.
    """
    metadata = read_folder_metadata(folder, follow_links=follow_links)
    files = DataFiles(folder, follow_links=follow_links)
    check_places(metadata, files)
    leaves = _leaves(metadata, files, allow_pickle=allow_pickle)
    return nested({metadata.paths.get(key, (key,)): item for key, item in leaves.items()}, count=len(leaves))


def _leaves(metadata: FolderMetadata, files: DataFiles, *, allow_pickle: bool) -> dict[str, Item]:
    scratch = Scratch()
    objects = {key: load_object(files, place, key=key) for key, place in metadata.objects.items()}
    leaves: dict[str, Item] = {}
    for key, item in capture_state(objects, allow_pickle=allow_pickle).children.items():
        leaves[str(key)] = item
    for key, tensor in metadata.tensors.items():
        leaves[key] = TensorItem(tensor.spec, ChunkedSource(tensor, files, scratch, key=key))
    return leaves


# --- structure ------------------------------------------------------------------------------


def nested(leaves: Mapping[Path, Item], *, count: int) -> Container:
    """`leaves` in dicts and lists: a name of text is a key of a dict, a number a place in a list.

    Args:
        count: Leaves there should be: fewer means that two had one path.
    Raises:
        InvalidInputError: paths that cannot all be there.
    """
    if len(leaves) != count:
        raise InvalidInputError("two keys have one path: the checkpoint was saved wrong; save it again")
    root: dict[Name, Any] = {}
    for path, leaf in leaves.items():
        if len(path) > MAX_DEPTH:
            raise InvalidInputError(f"{render_key(path[:8])}: structure deeper than {MAX_DEPTH} levels: flatten it")
        place = root
        for depth, name in enumerate(path[:-1]):
            place = place.setdefault(check_name(name, path[:depth]), {})
            if type(place) is not dict:
                raise _conflict(path)
        if place.setdefault(check_name(path[-1], path[:-1]), leaf) is not leaf:
            raise _conflict(path)
    if any(type(name) is not str for name in root):
        raise InvalidInputError("a number stands where the first name of a path should: save the checkpoint again")
    return Container("dict", {name: _item(child, (name,)) for name, child in root.items()})


def _item(place: Any, path: Path) -> Item:
    if type(place) is not dict:
        leaf: Item = place
        return leaf
    children = {name: _item(child, (*path, name)) for name, child in place.items()}
    kinds = {type(name) for name in children}
    if kinds == {int}:
        return _list(children, path)
    if kinds != {str}:
        raise _conflict(path)
    return Container("dict", children)


def _list(children: Mapping[Name, Item], path: Path) -> Item:
    """A list as capture has it. DCP leaves gaps where empty dicts were."""
    numbers = [name for name in children if type(name) is int]
    length = max(numbers) + 1
    if min(numbers) < 0 or length - len(numbers) > MAX_GAPS:
        raise InvalidInputError(f"{render_key(path)}: a list of {length} of which {len(numbers)} places are told of")
    items = [children.get(number) or Container("dict", {}) for number in range(length)]
    values = [item.value for item in items if isinstance(item, ValueItem)]
    return ValueItem(values) if len(values) == length else Container("list", dict(enumerate(items)))


def _conflict(path: Path) -> InvalidInputError:
    return InvalidInputError(f"{render_key(path)}: something else stands in its way: save the checkpoint again")
