"""git for PyTorch training state: commit it, check it out, stored once however often it is the same.

    from cas_ckpt import Repository, RNGState, StateDict

Names are imported when they are first used, so that `import cas_ckpt` and the command line
start without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cas_ckpt.core.records import CommitInfo, CommitStats, ImportInfo, LeftOut, Lineage
    from cas_ckpt.core.refs import Head
    from cas_ckpt.core.settings import trusted_hosts
    from cas_ckpt.errors import (
        AmbiguousIdError,
        BackgroundCommitError,
        CancelledError,
        CkptError,
        ConflictError,
        CorruptionError,
        FrozenChangedError,
        InternalError,
        InvalidInputError,
        MemoryBudgetError,
        MismatchError,
        NoRepositoryError,
        NotFoundError,
        OutOfSpaceError,
        PartialRestoreError,
        PeerError,
        PermissionDeniedError,
        SignatureError,
        StateChangedError,
        StillPendingError,
        StorageError,
        TooLargeError,
        TransientStorageError,
        UnsupportedValueError,
        UnsupportedVersionError,
        WorkerError,
    )
    from cas_ckpt.events import Event, on_event
    from cas_ckpt.layout.key_map import KeyMap
    from cas_ckpt.memory import limits
    from cas_ckpt.objects.structures import Named, register_type
    from cas_ckpt.ops.commit.options import CommitOptions, ImportOptions
    from cas_ckpt.ops.retention.policy import Policy
    from cas_ckpt.repository import Repository
    from cas_ckpt.signing import Trust
    from cas_ckpt.training.background.pending import PendingCommit
    from cas_ckpt.training.per_rank import PerRank, RNGState
    from cas_ckpt.training.retention_hook import RetentionHook
    from cas_ckpt.training.stateful import StateDict
    from cas_ckpt.training.verbs import CheckoutReport

__version__ = "0.1.0"

__all__ = [
    "AmbiguousIdError",
    "BackgroundCommitError",
    "CancelledError",
    "CheckoutReport",
    "CkptError",
    "CommitInfo",
    "CommitOptions",
    "CommitStats",
    "ConflictError",
    "CorruptionError",
    "Event",
    "FrozenChangedError",
    "Head",
    "ImportInfo",
    "ImportOptions",
    "InternalError",
    "InvalidInputError",
    "KeyMap",
    "LeftOut",
    "Lineage",
    "MemoryBudgetError",
    "MismatchError",
    "Named",
    "NoRepositoryError",
    "NotFoundError",
    "OutOfSpaceError",
    "PartialRestoreError",
    "PeerError",
    "PendingCommit",
    "PerRank",
    "PermissionDeniedError",
    "Policy",
    "RNGState",
    "Repository",
    "RetentionHook",
    "SignatureError",
    "StateChangedError",
    "StateDict",
    "StillPendingError",
    "StorageError",
    "TooLargeError",
    "TransientStorageError",
    "Trust",
    "UnsupportedValueError",
    "UnsupportedVersionError",
    "WorkerError",
    "__version__",
    "limits",
    "on_event",
    "register_type",
    "trusted_hosts",
]

_MODULES = {
    "cas_ckpt.core.records": ("CommitInfo", "CommitStats", "ImportInfo", "LeftOut", "Lineage"),
    "cas_ckpt.core.refs": ("Head",),
    "cas_ckpt.core.settings": ("trusted_hosts",),
    "cas_ckpt.events": ("Event", "on_event"),
    "cas_ckpt.layout.key_map": ("KeyMap",),
    "cas_ckpt.memory": ("limits",),
    "cas_ckpt.objects.structures": ("Named", "register_type"),
    "cas_ckpt.ops.commit.options": ("CommitOptions", "ImportOptions"),
    "cas_ckpt.ops.retention.policy": ("Policy",),
    "cas_ckpt.repository": ("Repository",),
    "cas_ckpt.signing": ("Trust",),
    "cas_ckpt.training.background.pending": ("PendingCommit",),
    "cas_ckpt.training.per_rank": ("PerRank", "RNGState"),
    "cas_ckpt.training.retention_hook": ("RetentionHook",),
    "cas_ckpt.training.stateful": ("StateDict",),
    "cas_ckpt.training.verbs": ("CheckoutReport",),
}
"""Where the names come from; those that are missing here, from cas_ckpt.errors."""

_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "cas_ckpt.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
