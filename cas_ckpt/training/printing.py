"""What was read from a commit, for people and other programs: nested lists, .npy and .pt files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from cas_ckpt.errors import InvalidInputError, UnsupportedValueError


def as_lists(value: Any) -> Any:
    """A tensor as nested lists of numbers, dense and dequantized; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    strided = value.dequantize() if value.is_quantized else value
    return (strided if strided.layout == torch.strided else strided.to_dense()).tolist()


def write_value(value: Any, path: Path) -> None:
    """Write a tensor, array or value to a file whose name ends in .pt or .npy.

    Raises:
        UnsupportedValueError: numpy has no such dtype. InvalidInputError: another kind of file.
    """
    if path.suffix == ".pt":
        torch.save(value, path)
    elif path.suffix == ".npy":
        np.save(path, _as_array(value), allow_pickle=False)
    else:
        raise InvalidInputError(f"{path}: the name of an output file ends in .npy or .pt")


def _as_array(value: Any) -> np.ndarray[Any, Any]:
    if not isinstance(value, (torch.Tensor, np.ndarray, np.generic, int, float, complex)):
        raise UnsupportedValueError(f"a {type(value).__name__} is no array: write a .pt file instead")
    try:
        return value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    except (TypeError, RuntimeError) as error:
        raise UnsupportedValueError(f"numpy cannot hold {getattr(value, 'dtype', 'this')}: write a .pt file") from error
