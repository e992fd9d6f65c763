"""Where the index of a team is, of which folder it is, and the roles that it has; no repository is opened for that."""

from __future__ import annotations

import os
from contextlib import closing, suppress
from dataclasses import replace

from cas_ckpt.core.config import CONFIG_KEY, read_config
from cas_ckpt.core.settings import change_settings, check_url
from cas_ckpt.errors import CkptError, ConflictError, InvalidInputError, PermissionDeniedError
from cas_ckpt.index import remembered
from cas_ckpt.index.index import Index
from cas_ckpt.index.postgres import from_settings, roles_sql
from cas_ckpt.storage.file import FileStore
from cas_ckpt.storage.store import Store
from cas_ckpt.storage.url import open_store


def set_shared_index(place: str | os.PathLike[str], url: str) -> str:
    """Note in the settings of the repository at `place` that its index is in the database `url`; "": in none.

    Raises:
        InvalidInputError: not the URL of a PostgreSQL database, or one with a secret in it.
        NoRepositoryError: there is none.
    """
    if url:
        check_url(url)
        if "://" not in url:
            raise InvalidInputError("an index that all share is in PostgreSQL: give postgresql+psycopg://HOST/DATABASE")
        from_settings(url)
    with closing(open_store(place)) as store:
        read_config(store)
        return change_settings(store, lambda settings: replace(settings, index_url=url)).index_url


def shared_index_roles(place: str | os.PathLike[str], *, maintainer: str, writer: str, reader: str) -> str:
    """The SQL that makes roles for the index of the repository at `place` (index/postgres.py)."""
    with closing(open_store(place)) as store:
        store_id = read_config(store).store_id
    return roles_sql(store_id, maintainer=maintainer, writer=writer, reader=reader)


def note_folder(index: Index, store: Store, *, take: bool = False) -> None:
    """Note that a shared index is of the repository in `store`, if that is in a folder and was not noted.

    A folder that is noted and not there any more was moved, or another computer calls it so.

    Args:
        take: Whatever is noted: its rows were made from this folder.
    Raises:
        ConflictError: it is of another folder, which is there: one of the two is a copy, and their packs and refs would
            mix in it.
    """
    if not index.is_shared or not isinstance(store, FileStore):
        return
    here, noted = store.root.resolve().as_uri(), index.read(remembered.read_meta, remembered.FOLDER)
    if noted == here:
        return
    if noted is not None and not take and _is_copy(store, noted, index.store_id):
        raise ConflictError(
            f"index {index.place}: it is of {noted}, which is there, and {here} is a copy with the same id: they would "
            "mix. Open this one with another index (index_url=); on the command line, cas-ckpt index set --clear gives "
            "it one of its own, and cas-ckpt index rebuild makes the shared one the index of this folder"
        )
    if not index.read_only:
        with suppress(PermissionDeniedError):  # a role that reads
            index.write(remembered.write_meta, remembered.FOLDER, here)


def _is_copy(store: FileStore, noted: str, store_id: str) -> bool:
    """Whether another folder than that of `store` is at `noted`, with a repository of this id."""
    if not noted.startswith("file://"):
        return False
    try:
        other = open_store(noted)
        if not isinstance(other, FileStore) or read_config(other).store_id != store_id:
            return False
        return _numbers(other) != _numbers(store)
    except (CkptError, OSError):
        return False


def _numbers(store: FileStore) -> list[int]:
    """Numbers that distinguish a folder from its copies, independent of name and mount."""
    return [os.stat(path).st_ino for path in (store.root, store.root / CONFIG_KEY)]
