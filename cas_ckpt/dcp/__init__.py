"""torch.distributed.checkpoint (DCP) on a repository: `dcp.save`, `dcp.async_save`, `dcp.load`.

    import torch.distributed.checkpoint as dcp
    from cas_ckpt.dcp import CasStorageReader, CasStorageWriter

    dcp.save(state, storage_writer=CasStorageWriter("runs/ckpts", branch="main", step=100))
    dcp.load(state, storage_reader=CasStorageReader("runs/ckpts", ref="main"))

See docs/dcp.md.

A save goes

    1. DCP plans on every rank; the writer looks at the repository and takes its turn.
    2. On every rank the plan and the planner's state become a tree, nested again as it was before DCP flattened it.
    3. All ranks commit their trees together: the commit is published here, or nowhere.
    4. On the coordinator, DCP's results are held against the plan.

A load goes

    1. The reader describes the commit to DCP, by flat names; DCP plans reads.
    2. All ranks read the coordinator's commit; the plan is held against the destinations.
    3. Every byte is verified, then copied into place.

Files:

    writer.py       `CasStorageWriter`; copies of states for `dcp.async_save`, each in memory of its own
    reader.py       `CasStorageReader`; a commit in the words of DCP: `Metadata` by flat name
    tree.py         a rank's part of a save as a tree; `CasSavePlanner`, `CasLoadPlanner`
    names.py        the entries of a commit by DCP's flat names, its optimizers by those of targets
    group.py        the ranks that save together, whose turn it is, and which repository
    paths.py        `CheckpointPaths`: folders of a training program stand for tags

Names are imported when they are first used, so that `import cas_ckpt.dcp` does not load torch.distributed.

Invariant: a save is whole or not there, a load touches nothing before all was verified. Must not know DCP's own files
(formats/), the command line or the class `Repository`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cas_ckpt.dcp.group import close_groups
    from cas_ckpt.dcp.paths import CheckpointPaths
    from cas_ckpt.dcp.reader import CasStorageReader
    from cas_ckpt.dcp.tree import CasLoadPlanner, CasSavePlanner
    from cas_ckpt.dcp.writer import CasStorageWriter, StoredEntry
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
    "CasLoadPlanner": "cas_ckpt.dcp.tree",
    "CasSavePlanner": "cas_ckpt.dcp.tree",
    "CasStorageReader": "cas_ckpt.dcp.reader",
    "CasStorageWriter": "cas_ckpt.dcp.writer",
    "CheckpointPaths": "cas_ckpt.dcp.paths",
    "StoredEntry": "cas_ckpt.dcp.writer",
    "close_groups": "cas_ckpt.dcp.group",
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
