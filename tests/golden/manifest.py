"""What a loaded state is, as text that can be frozen: one line for each entry."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from tests.properties.states import bits


def described(value: Any, key: str = "") -> dict[str, str]:
    """Key -> what stands there; bytes of tensors as SHA-256 (not by code of ours)."""
    below = f"{key}/" if key else ""
    if isinstance(value, dict):
        found = {key or "(root)": f"{type(value).__name__} of {len(value)}"}
        for name, child in value.items():
            found |= described(child, below + repr(name))
        return found
    if isinstance(value, list | tuple) and any(isinstance(child, torch.Tensor | dict) for child in value):
        found = {key: f"{type(value).__name__} of {len(value)}"}
        for at, child in enumerate(value):
            found |= described(child, f"{below}{at}")
        return found
    return {key: _line(value)}


def _line(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _tensor_line(value)
    if isinstance(value, np.ndarray):
        return f"numpy {value.dtype.str} {value.shape} {_sha(value.tobytes())}"
    text = repr(value)
    return text if len(text) < 100 else f"{type(value).__name__} of {len(text)}: {_sha(text.encode())}"


def _tensor_line(tensor: torch.Tensor) -> str:
    head = f"torch {tensor.dtype} {tuple(tensor.shape)} {tensor.layout}"
    if tensor.layout is torch.sparse_coo:
        return f"{head} {_tensor_line(tensor._indices())} {_tensor_line(tensor._values())}"
    if tensor.layout is torch.sparse_csr:
        parts = tensor.crow_indices(), tensor.col_indices(), tensor.values()
        return " ".join([head, *map(_tensor_line, parts)])
    if tensor.is_quantized:
        return f"{head} {tensor.q_scale()} {tensor.q_zero_point()} {_tensor_line(tensor.int_repr())}"
    return f"{head} {_sha(bits(tensor))}"


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]
