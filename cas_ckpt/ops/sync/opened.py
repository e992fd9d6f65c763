"""opened: the repository, or the bundle, that commits come from or go to.

Invariant: a bundle is only read from, and only where the commits that it continues from are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager

from cas_ckpt.core.config import Config, read_config
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.host_cache import AUTO
from cas_ckpt.core.live import read_graph
from cas_ckpt.errors import CorruptionError, InvalidInputError, NotFoundError
from cas_ckpt.index.database import IN_MEMORY
from cas_ckpt.index.index import Index
from cas_ckpt.objects.digest import short
from cas_ckpt.ops.sync.bundle_file import BundleStore
from cas_ckpt.storage.store import Store
from cas_ckpt.storage.url import path_of_url


@contextmanager
def opened(
    url: str, *, read_only: bool, cache: str | os.PathLike[str] | None = AUTO, taker: RepositoryHandle | None = None
) -> Iterator[RepositoryHandle]:
    """The repository at `url`, or the commits of the bundle that the path names, for as long as the block takes.

    Args:
        cache: As for `RepositoryHandle.open`; `cache_place` of the repository on whose behalf it is opened.
        taker: Has to have what a bundle continues from; None: that is not looked at.
    Raises:
        NotFoundError: the bundle continues from commits that are not there. InvalidInputError: it is to be written.
    """
    path = path_of_url(url) if url.startswith("file://") else url
    if os.path.isfile(path):
        if not read_only:
            raise InvalidInputError(f"{url} is a file, nothing is pushed into it: repo.create_bundle writes one")
        with opened_bundle(path) as (store, source):
            if taker is not None:
                require_prerequisites(taker, store)
            yield source
        return
    other = RepositoryHandle.open(url, read_only=read_only, cache=cache)
    try:
        yield other
    finally:
        other.close()


@contextmanager
def opened_bundle(path: str | os.PathLike[str]) -> Iterator[tuple[BundleStore, RepositoryHandle]]:
    """The bundle, and what it carries as a repository that is only read.

    Raises:
        NotFoundError: there is no such file. CorruptionError: it is not a whole bundle.
    """
    with closing(BundleStore(path)) as store, closing(handle_on(store, read_config(store))) as source:
        source.sync()
        if source.damaged:
            raise CorruptionError(f"{store.url}: {next(iter(source.damaged.values()))}: copy the file again")
        yield store, source


def handle_on(store: Store, config: Config) -> RepositoryHandle:
    """A repository on the store of a bundle; its index is in memory."""
    return RepositoryHandle(store, config, Index.open(IN_MEMORY, store_id=config.store_id))


def require_whole(source: RepositoryHandle) -> None:
    """Raise NotFoundError if `source` is a bundle that continues from commits which are not in it."""
    if isinstance(source.store, BundleStore) and source.store.prerequisites:
        raise NotFoundError(
            f"{source.store.url} continues from commit {short(source.store.prerequisites[0])}, which is not in it: "
            "clone the bundle before it first, then fetch this one"
        )


def require_prerequisites(handle: RepositoryHandle, store: BundleStore) -> None:
    """Raise NotFoundError if `handle` lacks a commit that the bundle continues from."""
    lacking = [one for one in store.prerequisites if one not in read_graph(handle)]
    if lacking:
        handle.sync()
        lacking = [one for one in lacking if one not in read_graph(handle)]
    if lacking:
        raise NotFoundError(
            f"{store.url} continues from commit {short(lacking[0])}, which is not here ({len(lacking)} of "
            f"{len(store.prerequisites)} are not): take the bundle before it first"
        )
