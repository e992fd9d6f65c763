"""One process stands for one rank of a world whose other ranks do not exist (torch's "fake" backend)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


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
        debug._clear_python_sharding_prop_cache()
        debug._clear_fast_path_sharding_prop_cache()
