"""Where the index of a team is, and the roles that it has there; no repository is opened for either."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace

from cas_ckpt.core.config import read_config
from cas_ckpt.core.settings import change_settings, check_url
from cas_ckpt.errors import InvalidInputError
from cas_ckpt.index.postgres import from_settings
from cas_ckpt.index.roles import roles_sql
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
    """The SQL that makes roles for the index of the repository at `place` (index/roles.py)."""
    with closing(open_store(place)) as store:
        store_id = read_config(store).store_id
    return roles_sql(store_id, maintainer=maintainer, writer=writer, reader=reader)
