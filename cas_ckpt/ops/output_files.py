"""New files that appear together, whole, or not at all.

    1. every name is checked to be free
    2. each file is written under a temporary name beside its place, and synced
    3. all are linked to their names, in order; the folder is synced
An error removes the temporaries, the names that step 3 gave, and a folder that was made.
A crash in 3 leaves whole files, perhaps not all: the last one given is the one to trust.

Invariant: without `force` no file that was there before is ever replaced.
Must not know: what is written.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from cas_ckpt.errors import ConflictError, InvalidInputError
from cas_ckpt.storage.durable import make_folders, sync_file, sync_folder
from cas_ckpt.storage.trouble import translated

_BUFFER_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Written:
    temporary: Path
    path: Path


class OutputFiles:
    """A set of files of one folder in the making; a context manager that publishes on success."""

    def __init__(self, folder: Path, names: Sequence[str], *, force: bool = False) -> None:
        """Check that all of `names` can be made in `folder`.

        Raises:
            ConflictError: one exists already (unless `force`). InvalidInputError: `folder` is a file.
        """
        self._folder = folder
        self._force = force
        self._written: list[_Written] = []
        self._made_folder = False
        if folder.exists() and not folder.is_dir():
            raise InvalidInputError(f"{folder} is no folder: choose another place")
        for name in names:
            _check_free(folder / name, force=force)

    def __enter__(self) -> OutputFiles:
        with self._translating(self._folder):
            if not self._folder.is_dir():
                make_folders(self._folder)
                self._made_folder = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._discard()
            return
        try:
            self._publish()
        except BaseException:
            self._discard()
            raise

    @contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """A file to be written now; it is durable when the block ends, but has no name yet.

        Raises:
            OutOfSpaceError, PermissionDeniedError, StorageError.
        """
        path = self._folder / name
        temporary = self._folder / f".{name[:200]}.{secrets.token_hex(8)}.tmp"
        with self._translating(path), open(temporary, "xb", buffering=_BUFFER_BYTES) as file:
            self._written.append(_Written(temporary, path))
            yield file
            file.flush()
            sync_file(file.fileno())

    @contextmanager
    def _translating(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise translated(error, "writing", str(path)) from error

    def _publish(self) -> None:
        given: list[Path] = []
        try:
            for written in self._written:
                self._name(written)
                given.append(written.path)
            with self._translating(self._folder):
                sync_folder(self._folder)
        except BaseException:
            if not self._force:  # what `force` replaced cannot be brought back
                _remove(given)
            raise

    def _name(self, written: _Written) -> None:
        with self._translating(written.path):
            if self._force:
                os.replace(written.temporary, written.path)
                return
            try:
                os.link(written.temporary, written.path)
            except FileExistsError:
                raise _exists(written.path) from None
            os.unlink(written.temporary)

    def _discard(self) -> None:
        _remove([written.temporary for written in self._written])
        if self._made_folder:
            with suppress(OSError):
                self._folder.rmdir()


def _remove(paths: Sequence[Path]) -> None:
    """Remove unfinished files, after the error that is being raised; one that stays is told apart by its name."""
    for path in paths:
        with suppress(OSError):
            path.unlink()


def _check_free(path: Path, *, force: bool) -> None:
    if path.is_dir() and not path.is_symlink():
        raise ConflictError(f"{path} is a folder: choose another name")
    if not force and os.path.lexists(path):
        raise _exists(path)


def _exists(path: Path) -> ConflictError:
    return ConflictError(f"{path} exists already and is kept: choose another place, or force")
