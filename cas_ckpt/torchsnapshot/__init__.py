"""torchsnapshot: the interface of that library, over a repository.

    from cas_ckpt.torchsnapshot import Snapshot, StateDict      # instead of: from torchsnapshot import ...

    snapshot = Snapshot.take("runs/a/step-10", {"model": model, "optim": optim, "progress": StateDict(step=10)})
    Snapshot("runs/a/step-10").restore({"model": model, "optim": optim, "progress": progress})

Every snapshot is a commit with a tag, in one repository for all snapshots of a folder: `runs/a/.cas_ckpt` with the tag
`step-10`. So what is equal is stored once, and everything is verified before a tensor is touched.

    1. places.py: from the path of a snapshot to its repository and its tag; the file in the snapshot's folder
    2. sharing.py: what of a state is one for all ranks, and what each rank has for itself
    3. opened.py: repositories that stay open, and the branches that snapshots go to
    4. taking.py: what the ranks do together to take one
    5. snapshot.py: `Snapshot` and `PendingSnapshot`: the verbs; `import_snapshot` for folders of torchsnapshot
    6. contents.py: what a snapshot holds, by rank and path, in the words of torchsnapshot; manifest.py: its entries
    7. targets.py: objects to be restored, as a checkout takes them
    8. removal.py: snapshots that were replaced or deleted give their space back
    9. stateful.py: `StateDict`, `Stateful`; failures.py: errors that handlers for torchsnapshot's catch, too

Invariant: commits hold the state dicts of the objects, names and all, as torchsnapshot would have saved them; nothing
is pickled unless asked for. torchsnapshot itself is not imported.
"""

from __future__ import annotations

from cas_ckpt.torchsnapshot.opened import close_repositories
from cas_ckpt.torchsnapshot.removal import delete_snapshot
from cas_ckpt.torchsnapshot.snapshot import PendingSnapshot, Snapshot, import_snapshot
from cas_ckpt.torchsnapshot.stateful import RNGState, StateDict, Stateful

__all__ = [
    "PendingSnapshot",
    "RNGState",
    "Snapshot",
    "StateDict",
    "Stateful",
    "close_repositories",
    "delete_snapshot",
    "import_snapshot",
]
