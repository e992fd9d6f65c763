"""Which repository a storage writer or reader works on: an open one, or a URL to be opened.

Invariant: what is pickled holds no handle, lock or connection; what was opened here is closed here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cas_ckpt.errors import InvalidInputError
from cas_ckpt.index.database import IN_MEMORY
from cas_ckpt.refs import Head
from cas_ckpt.repository import RepositoryHandle


class RepositoryPlace:
    """An open repository, or where to find one.

    Attributes:
        brought: Head of an open repository in the process that this one was sent from, without its commit if a
            branch was checked out: what is saved there since moves that, and tells nobody here. Else None.
    """

    brought: Head | None = None

    def __init__(self, repository: Any, index_url: str | None = None) -> None:
        """Nothing is opened.

        Args:
            repository: A path, a URL, a `Repository`, or the handle of one.
            index_url: As for `Repository.open`; for paths and URLs.
        Raises:
            InvalidInputError: something else.
        """
        handle = getattr(repository, "_handle", repository)  # a Repository's own; training/ is below face.py
        self._handle = handle if isinstance(handle, RepositoryHandle) else None
        self._index_url = index_url
        if self._handle is None and not isinstance(repository, str | os.PathLike):
            raise InvalidInputError(f"{type(repository).__name__} is no repository: give a path, a URL or a Repository")
        self.url = str(os.fspath(repository)) if self._handle is None else self._handle.store.url

    @contextmanager
    def opened(self) -> Iterator[RepositoryHandle]:
        """The repository; closed again behind the caller if it was opened for this.

        Raises:
            NoRepositoryError: there is none at the URL.
        """
        if self._handle is not None:
            yield self._handle
            return
        handle = RepositoryHandle.open(self.url, index_url=self._index_url)
        handle.head = self.brought or handle.head
        try:
            yield handle
        finally:
            handle.close()

    def __getstate__(self) -> dict[str, Any]:
        if self.url.startswith("memory://"):
            raise InvalidInputError(
                f"{self.url} lives in this process only: AsyncCheckpointerType.PROCESS needs a repository in a folder"
            )
        index_url = self._index_url
        if self._handle is not None and self._handle.index.place != IN_MEMORY:
            index_url = self._handle.index.place
            if "://" in index_url:  # what an index says of its place leaves out the password
                raise InvalidInputError(
                    f"an open repository whose index is at {index_url} cannot be sent to another process: "
                    "give the writer the repository's URL and index_url="
                )
        brought = self.brought
        if self._handle is not None:
            head = self._handle.head
            brought = head if head.branch is None else Head(head.branch)
        return {"_handle": None, "_index_url": index_url, "url": self.url, "brought": brought}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
