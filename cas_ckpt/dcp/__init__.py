"""torch.distributed.checkpoint (DCP) on a repository: `dcp.save`, `dcp.async_save`, `dcp.load`, and DCP folders.

    import torch.distributed.checkpoint as dcp
    from cas_ckpt.dcp import CasStorageReader, CasStorageWriter

    dcp.save(state, storage_writer=CasStorageWriter("runs/ckpts", branch="main", step=100))
    dcp.load(state, storage_reader=CasStorageReader("runs/ckpts", ref="main"))

See docs/dcp.md.

    storage/    writers, readers and planners: DCP saves into a repository and loads from it
    folder/     import and export of the folders that DCP itself writes

Names are imported when they are first used, so that who imports or exports a folder does not load torch.distributed's
checkpointing. Must not know the command line or the class `Repository`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_HOMES = {
    "CasLoadPlanner": "cas_ckpt.dcp.storage.tree",
    "CasSavePlanner": "cas_ckpt.dcp.storage.tree",
    "CasStorageReader": "cas_ckpt.dcp.storage.reader",
    "CasStorageWriter": "cas_ckpt.dcp.storage.writer",
    "CheckpointPaths": "cas_ckpt.dcp.storage.paths",
    "StoredEntry": "cas_ckpt.dcp.storage.writer",
    "close_groups": "cas_ckpt.dcp.storage.group",
    "with_names": "cas_ckpt.training.stateful",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
