"""What of a state is one for all ranks, and what each rank has for itself.

torchsnapshot's rule, of every value in the state dicts, by its path:

    ShardedTensor, DTensor                                 one, whose parts the ranks have
    matches a glob of `replicated` on all ranks, and       one; the commit compares what the ranks hold, and refuses
    is there on all ranks                                  what differs
    anything else                                          each rank's own (`cas_ckpt.PerRank`)

What is in a module under DistributedDataParallel counts as replicated by itself. Equal values of the ranks are stored
once in any case.

A dict or list in which all is each rank's own is kept per rank as a whole: ranks may have it in different forms.

Invariant: paths are those of torchsnapshot: keys joined by "/", in which "%" and "/" are "%25" and "%2F". Nothing is
copied.
"""

from __future__ import annotations

import fnmatch
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from cas_ckpt import PerRank, RNGState
from cas_ckpt.errors import UnsupportedValueError
from cas_ckpt.formats.torchsnapshot_metadata import component

Prepare = Callable[[str, torch.Tensor, bool], torch.Tensor]


def is_sharded(value: Any) -> bool:
    """Whether each rank may have a part of it."""
    return isinstance(value, DTensor) or (isinstance(value, torch.Tensor) and hasattr(value, "local_shards"))


def replicated_globs(replicated: Sequence[str], app_state: Mapping[str, Any]) -> list[str]:
    """The globs that were given, and those of what DistributedDataParallel keeps the same on all ranks."""
    globs = list(replicated)
    if "**" in globs:
        return globs
    for key, value in app_state.items():
        if not isinstance(value, DistributedDataParallel):
            continue
        ignored = set(value.parameters_to_ignore)
        if not ignored:
            globs.append(f"{key}/**")
            continue
        names = [name for name, _ in (*value.named_parameters(), *value.named_buffers())]
        globs += [f"{key}/{name}" for name in names if name not in ignored]
    return globs


def agreed_globs(of_ranks: Sequence[Collection[str]]) -> set[str]:
    """The globs that all ranks gave."""
    return set.intersection(*map(set, of_ranks))


def _children(value: Any) -> Mapping[Any, Any] | None:
    """The children of what torchsnapshot goes into; None of everything else."""
    if type(value) is list:
        return dict(enumerate(value))
    return value if type(value) in (dict, OrderedDict) else None


def leaves(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The path and value of all that is no container, or an empty one."""
    stack = [(component(key), value) for key, value in reversed([*state.items()])]
    while stack:
        path, value = stack.pop()
        children = _children(value)
        if children:
            stack += [(f"{path}/{component(name)}", child) for name, child in reversed([*children.items()])]
        else:
            yield path, value


def replicated_paths(state: Mapping[str, Any], globs: Collection[str]) -> list[str]:
    """Paths of what matches one of `globs` here, without what is sharded."""
    found = leaves(state) if globs else ()
    paths = (path for path, value in found if not is_sharded(value))
    return [path for path in paths if any(fnmatch.fnmatch(path, glob) for glob in globs)]


def sharded_paths(state: Mapping[str, Any]) -> list[str]:
    """Paths of what is sharded."""
    return [path for path, value in leaves(state) if is_sharded(value)]


def containers_of(paths: Collection[str]) -> set[str]:
    """Paths of all containers that lead to `paths`."""
    found: set[str] = set()
    for path in paths:
        while (path := path.rpartition("/")[0]) and path not in found:
            found.add(path)
    return found


def divided(state: Mapping[str, Any], shared: Collection[str], opened: Collection[str]) -> dict[str, Any]:
    """`state` with `PerRank` around what is this rank's own.

    Args:
        shared: Paths of values that are one for all ranks.
        opened: Paths of containers that hold such a value on any rank.
    """

    def part(value: Any, path: str) -> Any:
        if path in shared or isinstance(value, RNGState):  # which is kept per rank by itself
            return value
        children = _children(value)
        if path not in opened or children is None:
            return PerRank(value)
        parts = {name: part(child, f"{path}/{component(name)}") for name, child in children.items()}
        if all(made is child for made, child in zip(parts.values(), children.values(), strict=True)):
            return value  # with what torch notes on it: versions of modules
        return list(parts.values()) if type(value) is list else type(value)(parts)

    return {key: part(value, component(key)) for key, value in state.items()}


def prepared(state: Mapping[str, Any], prepare: Prepare) -> dict[str, Any]:
    """`state` with every tensor that is no part of a divided one replaced by what `prepare` makes of it.

    Raises:
        UnsupportedValueError: there is a divided one.
    """

    def part(value: Any, path: str) -> Any:
        if is_sharded(value):
            raise UnsupportedValueError(f"{path}: what is divided over ranks cannot be prepared: change it beforehand")
        if isinstance(value, torch.Tensor):
            return prepare(path, value, False)
        children = _children(value)
        if children is None:
            return value
        parts = {name: part(child, f"{path}/{component(name)}") for name, child in children.items()}
        return list(parts.values()) if type(value) is list else type(value)(parts)

    return {key: part(value, component(key)) for key, value in state.items()}
