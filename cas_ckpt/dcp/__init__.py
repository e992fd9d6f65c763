"""Storage for torch.distributed.checkpoint: `dcp.save`, `dcp.async_save` and `dcp.load` on a repository.

    import torch.distributed.checkpoint as dcp
    from cas_ckpt.dcp import CasStorageReader, CasStorageWriter

    dcp.save(state, storage_writer=CasStorageWriter("runs/ckpts", branch="main", step=100))
    dcp.load(state, storage_reader=CasStorageReader("runs/ckpts", ref="main"))

See docs/dcp.md. Knows nothing itself; the work is in training/dcp_*.py.
"""

from __future__ import annotations

from cas_ckpt.dcp.storage.group import close_groups
from cas_ckpt.dcp.storage.paths import CheckpointPaths
from cas_ckpt.dcp.storage.reader import CasStorageReader
from cas_ckpt.dcp.storage.tree import CasLoadPlanner, CasSavePlanner
from cas_ckpt.dcp.storage.writer import CasStorageWriter, StoredEntry
from cas_ckpt.training.stateful import with_names

__all__ = [
    "CasLoadPlanner",
    "CasSavePlanner",
    "CasStorageReader",
    "CasStorageWriter",
    "CheckpointPaths",
    "StoredEntry",
    "close_groups",
    "with_names",
]
