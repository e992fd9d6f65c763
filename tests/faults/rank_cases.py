"""A repository in memory that ranks (threads) open, each for itself, states that torch divides, counts of cost."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from cas_ckpt import Repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.parallel.peers import Peers
from cas_ckpt.repository.opened import TIMEOUT_S, Ranks
from cas_ckpt.storage.store import Store
from cas_ckpt.storage.url import open_store
from tests.effects import Effects
from tests.thread_peers import run_ranks
from tests.training.fake_world import fake_world
from tests.wrapped_stores import CountingStore, Damage, FaultyStore

MIB = 1 << 20

_OPENING = threading.Lock()
_names = count()

Wrap = Callable[[Store], Store]


class Place:
    """A repository in memory; whoever opens it has a handle and an index of its own, as a process would.

    Attributes:
        store: What is really stored.
    """

    def __init__(self, **settings: Any) -> None:
        self.url = f"memory://faults-{next(_names)}"
        Repository.init(self.url, group=None, **settings).close()
        self.store = open_store(self.url)

    def open(self, wrap: Wrap | None = None, *, group: Peers | None = None) -> Repository:
        """The repository, its store seen through `wrap`."""
        with _OPENING:  # the migrations of an index keep their state in a module
            if wrap is None:
                return Repository.open(self.url, group=group)
            return Repository(RepositoryHandle.on_store(wrap(self.store)), Ranks(group, TIMEOUT_S))

    def on_ranks(
        self,
        size: int,
        work: Callable[[Repository, int], Any],
        *,
        wrap: Mapping[int, Wrap] | None = None,
        outcomes: bool = False,
        timeout_s: float = 30,
    ) -> list[Any]:
        """What `work(repository, rank)` returns on each rank (with `outcomes`: or raises).

        Args:
            wrap: Rank -> what its store is seen through.
        """

        def run(peers: Peers) -> Any:
            with self.open((wrap or {}).get(peers.rank), group=peers) as repo:
                return work(repo, peers.rank)

        if outcomes:
            return run_ranks(size, run, timeout_s=timeout_s, outcomes=True)
        return run_ranks(size, run, timeout_s=timeout_s)

    def keys(self, end: str = "") -> dict[str, int]:
        """Key -> size of what is stored under keys that end so."""
        return {key: size for key, size in self.store.list("") if key.endswith(end)}


def failing(effects: Effects) -> Wrap:
    """Sees a store whose effects fare as planned."""
    return lambda store: FaultyStore(store, effects=effects)


def damaged(key: str, damage: Damage) -> Wrap:
    """Sees a store that damages `key` whenever it is read."""

    def wrap(store: Store) -> Store:
        faulty = FaultyStore(store)
        faulty.damage[key] = damage
        return faulty

    return wrap


class Counting:
    """Opens stores that count."""

    def __init__(self) -> None:
        self.stores: list[CountingStore] = []

    def __call__(self, store: Store) -> Store:
        self.stores.append(CountingStore(store))
        return self.stores[-1]


def opcodes(work: Callable[[], object]) -> int:
    """How many bytecodes of Python `work` runs: its cost, the same on every machine."""
    total = 0

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal total
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        total += event == "opcode"
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks whether any frame wants them when it is told to trace
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return total


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random numbers that are the same every time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_rank(size: int, make: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
    """What each rank of a world of `size` makes; its DTensors may be used when that world is gone."""
    made = []
    for rank in range(size):
        with fake_world(rank, size):
            made.append(make(rank))
    return made


def divide(whole: torch.Tensor, size: int, *placements: Any) -> DTensor:
    """This rank's part of `whole` over a mesh of `size` ranks; to be called inside `by_rank`."""
    return distribute_tensor(whole.clone(), init_device_mesh("cpu", (size,)), list(placements), src_data_rank=None)


def divided(whole: torch.Tensor, size: int, *placements: Any, key: str = "w") -> list[dict[str, Any]]:
    """`whole` over `size` ranks, as the state of each."""
    return by_rank(size, lambda rank: {key: divide(whole, size, *placements)})
