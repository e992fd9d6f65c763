"""What is special about restoring optimizers of torch.

Invariant: an optimizer whose parameters are grouped otherwise is refused before anything is
touched, and no state tensor changes its dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from cas_ckpt.objects.state import Container, Item, Path, ValueItem, render_key


def check_optimizer(state: Any, item: Item, path: Path) -> list[str]:
    """Sentences on how the parameter groups of the commit differ from those of the target.

    Args:
        state: The target's own `state_dict()`.
        item: What the commit holds at `path`; groups that were not selected are not checked.
    """
    groups = item.children.get("param_groups") if isinstance(item, Container) else item
    if groups is None:
        return []
    wanted = [len(group["params"]) for group in state["param_groups"]]
    found = _group_sizes(groups)
    if found == wanted:
        return []
    return [
        f"{render_key((*path, 'param_groups'))}: the target has {_in_words(wanted)}, the commit {_in_words(found)}: "
        "build the optimizer over the same parameters in the same groups"
    ]


def _group_sizes(groups: Item) -> list[int]:
    """Parameters in each stored group; -1 for what is no group."""
    if not isinstance(groups, Container):
        return []
    return [_num_params(group) for _, group in sorted(groups.children.items())]


def _num_params(group: Item) -> int:
    params = group.children.get("params") if isinstance(group, Container) else None
    if isinstance(params, Container):
        return len(params.children)
    return len(params.value) if isinstance(params, ValueItem) and isinstance(params.value, list) else -1


def _in_words(sizes: list[int]) -> str:
    return f"{len(sizes)} groups of {', '.join(map(str, sizes[:10]))}{' ...' if len(sizes) > 10 else ''} parameters"


def undo_casts(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Give back their dtype to state tensors that `load_state_dict` cast to their parameter's."""
    if not isinstance(state, Mapping) or "state" not in state:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    indices = [index for group in state["param_groups"] for index in group["params"]]
    for param, index in zip(params, indices, strict=False):
        for name, value in state["state"].get(index, {}).items():
            loaded = optimizer.state[param].get(name) if param in optimizer.state else None
            if isinstance(loaded, torch.Tensor) and _was_cast(loaded, value):
                optimizer.state[param][name] = value.to(loaded.device)


def _was_cast(loaded: torch.Tensor, given: Any) -> bool:
    return isinstance(given, torch.Tensor) and loaded.dtype != given.dtype and loaded.shape == given.shape
