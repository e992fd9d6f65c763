"""For frameworks that know folders only: their checkpoint folders become tags of a repository.

torchtitan, Lightning's FSDP strategies and Accelerate call `dcp.save(checkpoint_id=folder)` or
make a `FileSystemWriter(folder)` of their own; neither can be given another writer. While
`CheckpointPaths.installed()` is entered, what DCP would write into such a folder is committed,
and what it would read from it is read from the commit that has the folder's tag.

Invariant: outside of `installed()` DCP is as it was; paths outside the root keep going to files.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from cas_ckpt.core.refs import check_new_name
from cas_ckpt.dcp.reader import CasStorageReader
from cas_ckpt.dcp.writer import CasStorageWriter
from cas_ckpt.errors import InvalidInputError
from cas_ckpt.training.torch_internals import STORAGE_UTILS, private

_ODD = re.compile(r"[^A-Za-z0-9._/-]+")


class CheckpointPaths:
    """Folders below `root` as tags of a repository.

        paths = CheckpointPaths("runs/ckpts", root="outputs/checkpoint")
        with paths.installed():
            trainer.train()      # outputs/checkpoint/step-10 is now the tag step-10

    What frameworks write beside DCP (meta.pt, schedulers) stays in the folders.
    """

    def __init__(self, repository: Any, *, root: str | os.PathLike[str], **options: Any) -> None:
        """Nothing is opened yet.

        Args:
            repository: As for `CasStorageWriter`.
            root: Folder that the framework keeps its checkpoints in.
            options: Further arguments of `CasStorageWriter`, such as branch, process_group, timeout_s.
        """
        self._repository = repository
        self._root = Path(os.path.abspath(root))
        self._options = options

    def tag(self, path: str | os.PathLike[str]) -> str:
        """The tag of a folder.

        Raises:
            InvalidInputError: it is not below the root.
        """
        if not self.covers(path):
            raise InvalidInputError(f"{os.fspath(path)} is not a folder below {self._root}: choose another root=")
        return check_new_name(_ODD.sub("-", Path(os.path.abspath(path)).relative_to(self._root).as_posix()))

    def covers(self, path: str | os.PathLike[str]) -> bool:
        """Whether `path` is a folder below the root."""
        return self._root in Path(os.path.abspath(path)).parents

    def writer(self, path: str | os.PathLike[str]) -> CasStorageWriter:
        """A writer whose commit gets the folder's tag."""
        writer = CasStorageWriter(self._repository, **self._options)
        writer._name_tags(self.tag, path)
        return writer

    def reader(self, path: str | os.PathLike[str]) -> CasStorageReader:
        """A reader of the commit that has the folder's tag."""
        reader = CasStorageReader(self._repository, ref=self.tag(path))
        reader._revision_of = self.tag
        return reader

    @contextmanager
    def installed(self) -> Iterator[None]:
        """DCP goes to the repository for every folder below the root. For one thread; not to be nested."""
        kinds: tuple[Any, ...] = (FileSystemWriter, FileSystemReader)
        stand_ins = {kind: _stand_in(self, kind) for kind in kinds}
        try:
            for module in (dcp, private(STORAGE_UTILS)):
                for kind in kinds:
                    setattr(module, kind.__name__, stand_ins[kind])
            yield
        finally:
            for kind, stand_in in stand_ins.items():
                stand_in.paths = None
                _put_back(stand_in, kind)


_TypeOfTheirs: Any = type(FileSystemWriter)  # that of protocols, since it is an AsyncStager too


class _StandIn(_TypeOfTheirs):  # type: ignore[misc]
    """The type of classes that stand where one of DCP's stood.

    While they are installed a call with a folder below the root makes our writer or reader; any other call, and
    every call afterwards (of a module that kept the class), makes what DCP's class makes. Classes derived
    from one are derived from DCP's, and go to files.
    """

    paths: CheckpointPaths | None
    theirs: Any

    def __call__(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        if "theirs" not in vars(self):  # derived from it by somebody else
            return super().__call__(path, *args, **kwargs)
        if self.paths is None or not self.paths.covers(path):
            return self.theirs(path, *args, **kwargs)
        return self.paths.writer(path) if self.theirs is FileSystemWriter else self.paths.reader(path)

    def __instancecheck__(self, instance: Any) -> bool:
        if "theirs" not in vars(self):
            return bool(super().__instancecheck__(instance))
        ours = CasStorageWriter if self.theirs is FileSystemWriter else CasStorageReader
        return isinstance(instance, self.theirs | ours)


def _stand_in(paths: CheckpointPaths, theirs: Any) -> Any:
    def validate_checkpoint_id(cls: Any, checkpoint_id: Any) -> bool:
        return bool(cls.paths and cls.paths.covers(checkpoint_id)) or bool(theirs.validate_checkpoint_id(checkpoint_id))

    said = {"paths": paths, "theirs": theirs, "__module__": theirs.__module__, "__doc__": theirs.__doc__}
    said["validate_checkpoint_id"] = classmethod(validate_checkpoint_id)
    return _StandIn(theirs.__name__, (theirs,), said)


def _put_back(stand_in: Any, theirs: Any) -> None:
    """DCP's class in every module that has the stand-in: also those that were first imported meanwhile."""
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is stand_in:
                setattr(module, name, theirs)
