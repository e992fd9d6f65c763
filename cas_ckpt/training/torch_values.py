"""Teaches objects/values.py the small value types of torch, so that they round-trip by name.

Invariant: a name on disk only ever selects an attribute of torch that has the right type.
Imported for its effect by capture and by restore.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from cas_ckpt.errors import UnsupportedValueError
from cas_ckpt.objects.values import register_value_type

T = TypeVar("T")


def _name(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _named(name: Any, kind: type[T]) -> T:
    """The attribute of torch called `name`, which must be a `kind`."""
    if type(name) is not str:
        raise TypeError(f"the name of a {kind.__name__} is no string")
    found = getattr(torch, name, None)
    if not isinstance(found, kind):
        raise UnsupportedValueError(
            f"torch {torch.__version__} has no {kind.__name__} {name!r}: use a torch that has it"
        )
    return found


def _size(value: Any) -> torch.Size:
    if type(value) is not list or any(type(size) is not int for size in value):
        raise TypeError("a torch.Size is a list of integers")
    return torch.Size(value)


def _device(value: Any) -> torch.device:
    try:
        return torch.device(value)
    except RuntimeError as error:
        raise ValueError(f"no device is called {value!r}") from error


def register_torch_values() -> None:
    """Register torch.Size, dtype, device, layout and memory_format; again is harmless."""
    register_value_type("torch.Size", torch.Size, encode=list, decode=_size)
    register_value_type("torch.device", torch.device, encode=str, decode=_device)
    for tag, kind in (
        ("torch.dtype", torch.dtype),
        ("torch.layout", torch.layout),
        ("torch.memory_format", torch.memory_format),
    ):
        register_value_type(tag, kind, encode=_name, decode=_decoder(kind))


def _decoder(kind: type[T]) -> Any:
    return lambda name: _named(name, kind)


register_torch_values()
