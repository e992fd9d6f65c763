"""One process stands for one rank of a world whose other ranks do not exist (torch's "fake" backend)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Be `rank` of `size`; collectives return at once and move nothing. Gone at the end, whatever happens."""
    from torch.distributed.tensor import debug
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of torch about its own calls
            yield
    finally:
        dist.destroy_process_group()
        # These hold meshes of the world that is gone, and with them its groups.
        for clear in ("_clear_python_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache"):
            getattr(debug, clear, _clear_cache_of_torch_2_9)()


def _clear_cache_of_torch_2_9() -> None:
    dtensor: Any = DTensor
    dtensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
