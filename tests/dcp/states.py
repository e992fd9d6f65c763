"""States as training has them, and saves and loads of DCP in one process."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from cas_ckpt.dcp import CasStorageReader, CasStorageWriter


@contextmanager
def alone() -> Iterator[None]:
    """DCP warns whenever it works without a process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield


def save(state: dict[str, Any], writer: CasStorageWriter, **how: Any) -> Any:
    with alone():
        return dcp.save(state, storage_writer=writer, no_dist=True, **how)


def load(state: dict[str, Any], reader: CasStorageReader, **how: Any) -> None:
    with alone():
        dcp.load(state, storage_reader=reader, no_dist=True, **how)


def trained(seed: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A small model and its optimizer after one step; tensors inline, of one chunk and of several leaves."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(40, 700), torch.nn.Linear(700, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    model(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    return model, optimizer


def plain_state(seed: int = 0) -> dict[str, Any]:
    """Everything whose structure DCP's flat form keeps, or can be told again from what it keeps."""
    model, optimizer = trained(seed)
    shared = torch.arange(seed, seed + 600.0)
    sgd = torch.optim.SGD(model.parameters(), lr=seed + 1.0)
    return {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "fresh": sgd.state_dict(),
        "tied": {"a": shared, "b": shared},
        "half": torch.full((33, 77), seed, dtype=torch.bfloat16),
        "scalar": torch.tensor(seed),
        "empty": torch.zeros(0, 4),
        "turned": torch.arange(seed, seed + 3000.0).reshape(30, 100).t(),
        "pair": (torch.full((2,), seed), {"x": seed}),
        "rows": [{"x": torch.full((2,), seed)}, [1, 2], "text"],
        "array": np.arange(5) + seed,
        "words": ["a", "b" * (2000 + seed)],
        "nothing": None,
        "no_items": [],
        "bytes": b"\x00" * (seed + 1),
        "size": torch.Size((seed, 2)),
    }


def awkward_state() -> dict[str, Any]:
    """What DCP's flat form loses: only CasSavePlanner keeps it."""
    return {
        "by_number": {1: torch.ones(2), 2: "two"},
        "empty": {},
        "deep": {"empty": {}, "full": 1},
        "ordered": OrderedDict(b=torch.ones(3), a=1),
        "settings": OrderedDict(lr=0.1),
    }


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal in types, structure and bits."""
    if isinstance(one, torch.Tensor):
        alike = isinstance(other, torch.Tensor) and one.dtype == other.dtype and one.shape == other.shape
        return alike and torch.equal(one.reshape(-1), other.reshape(-1))
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        keys = isinstance(other, dict) and one.keys() == other.keys()
        return keys and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, list | tuple) and not isinstance(one, torch.Size):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def by_helper(pair: tuple[torch.nn.Module, torch.optim.Optimizer], *, flat: bool = False) -> dict[str, Any]:
    """What `get_state_dict` makes of a model and its optimizer."""
    model, optimizer = get_state_dict(*pair, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    return {"model": model, "optim": optimizer}
