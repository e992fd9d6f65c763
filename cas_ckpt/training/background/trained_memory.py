"""Memory that only the step of an optimizer changes, so that it may be copied after the call.

    - parameters of the modules in the state, and tensors in the state of its optimizers
    - not the memory of buffers (a forward changes them), nor parameters of layers that a forward rescales
      (`max_norm` of embeddings), nor tensors that torch keeps no version counter of (made in inference mode)

Modules and optimizers are looked for in the state itself and in plain dicts, lists and tuples in it. What a Stateful of
somebody else's holds, or a `state_dict()` that the caller made, cannot be told from loose tensors.

Invariant: memory is taken for trained only if it is, from its first element to its last, that of such a tensor. Asks no
object for its state and changes none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from cas_ckpt.training.capture.tensors import PLAIN_TENSORS, locals_of
from cas_ckpt.training.optimizers import NamedOptimizer
from cas_ckpt.training.stateful import NamedModule, found_in
from cas_ckpt.training.torch_internals import buffers_of, params_of

_KINDS = (torch.nn.Module, NamedModule, torch.optim.Optimizer, NamedOptimizer)


class TrainedMemory:
    """The memory of one state that only optimizers change; valid while the live tensors are what they are."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        # By address: the strided tensor that is there, and those whose counters count its changes (None: its own does).
        self._live: dict[int, list[tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]]] = {}
        self._changed_by_forward: set[int] = set()
        for _, found in found_in(state, _KINDS):
            self._add(found)

    def _add(self, found: Any) -> None:
        if isinstance(found, (torch.optim.Optimizer, NamedOptimizer)):
            optimizer = found.optimizer if isinstance(found, NamedOptimizer) else found
            for kept in optimizer.state.values():
                for value in kept.values() if type(kept) is dict else (kept,):
                    for tensor in (value,) if type(value) in PLAIN_TENSORS else _tensors_in(value):
                        self._add_tensor(tensor)
            return
        module = found.module if isinstance(found, NamedModule) else found
        for part in module.modules():
            for buffer in buffers_of(part).values():
                self._add_changed(buffer)
            # Not of the module itself: a module is slow to say that it has no such attribute.
            is_rescaled = vars(part).get("max_norm", getattr(type(part), "max_norm", None)) is not None
            for param in params_of(part).values():
                if is_rescaled:
                    self._add_changed(param)
                elif param is not None:
                    self._add_tensor(param)

    def _add_changed(self, tensor: torch.Tensor | None) -> None:
        """A forward may change it."""
        for local in () if tensor is None else locals_of(tensor):
            self._changed_by_forward.add(local.untyped_storage().data_ptr())

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        if type(tensor) in PLAIN_TENSORS:
            if tensor.layout is torch.strided:
                self._live.setdefault(tensor.data_ptr(), []).append((tensor, None))
            return
        parts = locals_of(tensor)
        for part in parts:
            self._live.setdefault(part.data_ptr(), []).append((part, parts if part is tensor else (tensor, *parts)))

    def counting(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The live tensors whose version counters count every change of the memory of `tensor`; none: copy it now.

        Args:
            tensor: Strided, of the base class, as a capture has it: of a divided one, the local part.
        """
        counting: list[torch.Tensor] = []
        for live, counted in self._live.get(tensor.data_ptr(), ()):
            if live is tensor or _is_same_part(live, tensor):
                counting += (live,) if counted is None else counted
        if self._changed_by_forward and counting and tensor.untyped_storage().data_ptr() in self._changed_by_forward:
            return []
        for each in counting:
            if each.is_inference():
                return []
        return counting if tensor.numel() else []


def _is_same_part(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Of two tensors that begin at one address: whether they end at one, with the same elements."""
    return one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()


def _tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Tensors in dicts, lists and tuples, as optimizers keep them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)) and depth < 10:
        for child in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(child, depth + 1)
