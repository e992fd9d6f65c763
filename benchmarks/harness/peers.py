"""The other checkpointers, each behind the same two calls, used as their own documents say.

Rules that keep the comparison fair: a save counts as done when files and folders are fsynced (we do it
for peers that do not); a load counts as done when the bytes are in the target's own tensors; what a peer
does beyond that (re-applying an optimizer's state dict, say) happens only where its API insists. Every
peer is imported in its constructor, outside the measured time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.harness import disk
from benchmarks.harness.state import State, copy_into, flatten


class NotPossibleError(Exception):
    """The peer cannot do this; the message says why."""


class Peer(Protocol):
    """One way to keep checkpoints in one folder."""

    def save(self, state: State, step: int) -> None:
        """Durable when it returns."""
        ...

    def load(self, state: State) -> None:
        """The newest save of this folder, brought into the tensors of `state`."""
        ...


class _Folder:
    """A checkpoint per step below one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def at(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def newest(self) -> Path:
        return max(self.folder.iterdir(), key=lambda path: int(path.name.partition("-")[2]))


class TorchFile(_Folder):
    """torch.save + fsync of file and folder; torch.load + copy_."""

    mmap = False

    def save(self, state: State, step: int) -> None:
        self.at(step).mkdir()
        torch.save(state.plain(), self.at(step) / "state.pt")
        disk.sync_tree(self.at(step))

    def load(self, state: State) -> None:
        path = self.newest() / "state.pt"
        copy_into(state.plain(), torch.load(path, mmap=self.mmap, weights_only=True))


class TorchMapped(TorchFile):
    """torch.load(mmap=True) + copy_ in place."""

    mmap = True


class Safetensors(_Folder):
    """safetensors: tensors only, so numbers beside them (steps of a schedule ...) are not kept."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        import safetensors.torch

        self.api: Any = safetensors.torch

    def save(self, state: State, step: int) -> None:
        leaves = dict(flatten(state.plain()))
        tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
        if "entries" in state.parts:
            raise NotPossibleError("safetensors keeps tensors only; half of these entries are plain numbers")
        self.at(step).mkdir()
        self.api.save_file(tensors, self.at(step) / "state.safetensors")
        disk.sync_tree(self.at(step))

    def load(self, state: State) -> None:
        targets = dict(flatten(state.plain()))
        loaded = self.api.load_file(self.newest() / "state.safetensors")
        copy_into(targets, loaded)


class DCP(_Folder):
    """torch.distributed.checkpoint in one process (no_dist), sync_files as by default."""

    writer_options: Mapping[str, Any] = {}

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from torch.distributed import checkpoint

        self.api: Any = checkpoint

    def save(self, state: State, step: int) -> None:
        writer = self.api.FileSystemWriter(self.at(step), **self.writer_options)
        self.api.save(state.plain(), storage_writer=writer, no_dist=True)
        disk.sync_tree(self.at(step))

    def load(self, state: State) -> None:
        self.api.load(state.plain(), storage_reader=self.api.FileSystemReader(self.newest()), no_dist=True)

    def count(self, state: State) -> int:
        """Entries, from opening the newest checkpoint and listing it."""
        return len(self.api.FileSystemReader(self.newest()).read_metadata().state_dict_metadata)


class DCPThreads(DCP):
    """The same with thread_count=2."""

    writer_options: Mapping[str, Any] = {"thread_count": 2}


class DCPEightThreads(DCP):
    """The same with eight, and a file for each tensor."""

    writer_options: Mapping[str, Any] = {"thread_count": 8, "single_file_per_rank": False}


class Torchsnapshot(_Folder):
    """torchsnapshot-nightly: take + fsync; restore."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        import torchsnapshot

        self.api: Any = torchsnapshot

    def _app(self, state: State) -> dict[str, Any]:
        return {
            name: part if hasattr(part, "state_dict") else self.api.StateDict(**part)
            for name, part in state.parts.items()
        }

    def save(self, state: State, step: int) -> None:
        self.api.Snapshot.take(str(self.at(step)), app_state=self._app(state))
        disk.sync_tree(self.at(step))

    def load(self, state: State) -> None:
        self.api.Snapshot(str(self.newest())).restore(app_state=self._app(state))

    def count(self, state: State) -> int:
        """Entries, from opening the newest snapshot and reading its manifest."""
        return len(self.api.Snapshot(str(self.newest())).get_manifest())


class Moonclip(_Folder):
    """moonclip, exact precision, synchronous, its own fsync; deltas against the save before in one process."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from moonclip import CheckpointManager

        self.manager = CheckpointManager(str(folder), async_save=False)

    def _split(self, state: State) -> dict[str, Any]:
        own = {"model": "model", "optim": "optimizer"}
        return {own[name]: part for name, part in state.parts.items() if hasattr(part, "state_dict")}

    def save(self, state: State, step: int) -> None:
        rest = {name: part for name, part in state.parts.items() if not hasattr(part, "state_dict")}
        self.manager.save(step=step, extra=rest or None, **self._split(state))
        self.manager.flush()
        disk.sync_tree(self.folder)

    def load(self, state: State) -> None:
        self.manager.load_latest(**self._split(state))


class TorchCheckpointing(_Folder):
    """Meta's torch_checkpointing, synchronous saver (the asynchronous one needs CUDA by default) + fsync.

    Its O_DIRECT is off: 0.1.1 writes unaligned pieces through it, which ext4 refuses with EINVAL.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        from torch_checkpointing import CheckpointManager, SyncCheckpointSaverConfig
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        storage = LocalFileSystemStorageConfig(use_direct_io=False)
        self.manager = CheckpointManager(
            CheckpointManager.Config(save=SyncCheckpointSaverConfig(), storage_config=storage)
        )

    def save(self, state: State, step: int) -> None:
        self.manager.save(str(self.at(step)), state.plain())
        disk.sync_tree(self.at(step))

    def load(self, state: State) -> None:
        target = state.plain()
        loaded = self.manager.load(str(self.newest()), into=target)
        copy_into(target, loaded)


PEERS: dict[str, Callable[[Path], Peer]] = {
    "torch": TorchFile,
    "torch-mmap": TorchMapped,
    "safetensors": Safetensors,
    "dcp": DCP,
    "dcp-2t": DCPThreads,
    "torchsnapshot": Torchsnapshot,
    "moonclip": Moonclip,
    "torch_checkpointing": TorchCheckpointing,
}
