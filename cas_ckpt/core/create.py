"""init: a new repository."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from cas_ckpt.arguments import check_path
from cas_ckpt.core.config import (
    CONFIG_KEY,
    DEFAULT_BRANCH,
    DEFAULT_ENCODING,
    DEFAULT_PACK_BYTES,
    EMULATED,
    REMOTE_ENCODING,
    REMOTE_PACK_BYTES,
    Config,
    adapt_store,
    check_settings,
    config_record,
    decode_config,
    encode_config,
)
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.host_cache import AUTO
from cas_ckpt.core.protocol import GC_STATE_KEY, GcState, encode_gc_state
from cas_ckpt.core.ref_store import DEFAULT_CHANGED_KEY, name_record, swap_record
from cas_ckpt.core.refs import NONCE_BYTES, Generation, Head, check_new_name
from cas_ckpt.core.settings import change_settings, check_url
from cas_ckpt.errors import ConflictError, InvalidInputError, NoRepositoryError, PermissionDeniedError, StorageError
from cas_ckpt.index.index import Index
from cas_ckpt.storage.disk import in_turn, is_temporary, make_folders
from cas_ckpt.storage.file import FileStore
from cas_ckpt.storage.probe import is_probe, probe_conditions, probe_listing
from cas_ckpt.storage.store import RESERVED_PART, EmulatesConditions, Store, exists, translated, writing
from cas_ckpt.storage.url import open_store


def init_repository(
    url: str | os.PathLike[str],
    *,
    default_branch: str = DEFAULT_BRANCH,
    encoding: str | None = None,
    pack_bytes: int | None = None,
    single_writer: bool = False,
    index_url: str | None = None,
    cache: str | os.PathLike[str] | None = AUTO,
) -> RepositoryHandle:
    """A new repository at `url`, opened. A folder must not exist yet, or be empty, or hold what a killed init left.

    Args:
        encoding, pack_bytes: None: what suits a local store, or one behind a network.
        single_writer: Accept a store that ignores conditions; the caller ensures that one process at a time
            writes. Where conditions are kept this changes nothing.
        index_url: Where its index is. One in a database is noted in the repository's settings, if it has no password.
    Raises:
        ConflictError: there is a repository, or something else, already.
        InvalidInputError: bad settings. StorageError: a store that ignores conditions.
        PermissionDeniedError, TransientStorageError: the index cannot be made; then there is no repository either.
    """
    check_new_name(default_branch)
    index_url = None if index_url is None else check_path(index_url)
    store = open_store(url)
    is_local = store.abilities.local
    config = Config(
        new_store_id(),
        default_branch,
        (DEFAULT_ENCODING if is_local else REMOTE_ENCODING) if encoding is None else encoding,
        (DEFAULT_PACK_BYTES if is_local else REMOTE_PACK_BYTES) if pack_bytes is None else pack_bytes,
    )
    check_settings(config)
    try:
        if isinstance(store, FileStore):
            root = store.root
            try:
                taken = root.exists() and not (root.is_dir() and all(map(_is_beginning, root.iterdir())))
            except OSError as error:
                raise translated(error, "reading", str(root)) from error
            if taken:
                raise ConflictError(
                    f"{root} exists and is not an empty folder: open what is there, or choose another place"
                )
            with writing(RESERVED_PART):
                make_folders(store.root / RESERVED_PART)  # where turns are taken
        with in_turn(store, CONFIG_KEY):  # of processes that make it at once one does, and the others find it
            _require_none(store)
            if index_url is not None:  # first, so that there is no repository if it cannot be
                Index.open(index_url, store_id=config.store_id).close()
            try:
                config = _probed(store, config, single_writer=single_writer)
                write_config(store, config)
            except BaseException:
                if index_url is not None:
                    Index.discard(index_url, store_id=config.store_id)
                raise
        if index_url is not None and "://" in index_url:
            with suppress(InvalidInputError):  # with a password: each says it for himself
                check_url(index_url)
                change_settings(store, lambda settings: replace(settings, index_url=index_url))
        return RepositoryHandle.on_store(store, index_url=index_url, cache=cache)
    except BaseException:
        store.close()
        raise


def _probed(store: Store, config: Config, *, single_writer: bool) -> Config:
    """`config` with what a probe of the store's listings and conditional writes allows.

    Raises:
        StorageError: it lists in no order, or it ignores conditions, and `single_writer` was not given.
    """
    if not store.abilities.local:
        probe_listing(store)
    verdict = probe_conditions(store)
    if verdict.conditional:
        return config
    if not single_writer or not isinstance(store, EmulatesConditions):
        raise StorageError(
            f"{store.url}: {verdict.detail}, so commits of several writers could be lost there: use another store, "
            "or, if only one process at a time will ever write, Repository.init(url, single_writer=True)"
        )
    emulating = replace(config, conditional_writes=EMULATED)
    adapt_store(store, emulating)
    return emulating


def open_or_init(
    url: str | os.PathLike[str], *, index_url: str | None = None, cache: str | os.PathLike[str] | None = AUTO
) -> RepositoryHandle:
    """The repository at `url`, a new one if there is none.

    Raises:
        ConflictError: something else is there.
    """
    with suppress(NoRepositoryError):  # it is made below
        return RepositoryHandle.open(url, index_url=index_url, cache=cache)
    try:
        return init_repository(url, index_url=index_url, cache=cache)
    except ConflictError:  # another process made it at the same time
        with suppress(NoRepositoryError):  # something else is there: what init said of it is raised
            return RepositoryHandle.open(url, index_url=index_url, cache=cache)
        raise


def open_allowed(
    url: str | os.PathLike[str], *, index_url: str | None = None, read_only: bool | None = False,
    cache: str | os.PathLike[str] | None = AUTO,
) -> RepositoryHandle:  # fmt: skip
    """The repository at `url`; a reader makes no request to its store before the first question.

    Args:
        read_only: None: only to be read where nothing may be written.
    Raises:
        PermissionDeniedError: it may not be opened so.
    """
    lazy = read_only is not False
    try:
        return RepositoryHandle.open(url, index_url=index_url, read_only=bool(read_only), cache=cache, lazy=lazy)
    except PermissionDeniedError:
        if read_only is not None:
            raise
    return RepositoryHandle.open(url, index_url=index_url, read_only=True, cache=cache, lazy=lazy)


def require_rights(handle: RepositoryHandle) -> None:
    """Raise PermissionDeniedError if nothing may be written there: better now than at a commit."""
    if handle.read_only:
        raise PermissionDeniedError(
            f"{handle.store.url} may not be written by this process: look at its rights, or open it only to be read "
            "(read_only=True)"
        )


def _is_beginning(path: Path) -> bool:
    """Whether `path` is what an init makes before the config, so that an init that was killed left it."""
    if path.is_symlink():
        return False
    if not path.is_dir():  # or it is gone by now: another init is at work
        return is_probe(path.name)
    if path.name == RESERVED_PART:
        return all(is_temporary(each.name) for each in path.iterdir())
    return all(f"{path.name}/{each.name}" == GC_STATE_KEY and not each.is_dir() for each in path.iterdir())


def new_store_id() -> str:
    """A random name for a new repository."""
    return secrets.token_hex(16)


def _require_none(store: Store) -> None:
    if exists(store, CONFIG_KEY):
        raise ConflictError(f"{store.url} holds a repository already: choose another place")


def write_config(store: Store, config: Config) -> None:
    """Create config and gc state; the config comes last, so that half an init is none.

    Raises:
        ConflictError: there is a repository already.
    """
    check_settings(config)
    _require_none(store)
    with suppress(ConflictError):  # an init that died left one, or another init runs: theirs will do
        store.put_if_absent(GC_STATE_KEY, encode_gc_state(GcState(Generation(0, secrets.token_bytes(NONCE_BYTES)))))
    store.put_if_absent(CONFIG_KEY, encode_config(config))


def change_default_branch(handle: RepositoryHandle, name: str) -> None:
    """Let the branch `name`, which the caller has looked at, be the default branch.

    Raises:
        ConflictError: another process changed the config at the same time.
    """
    record = config_record(handle.store)
    config = replace(decode_config(record), default_branch=name)
    with suppress(ConflictError):  # it was changed before
        # First, so that no host that remembers the config goes on with it.
        handle.store.put_if_absent(DEFAULT_CHANGED_KEY, name_record(DEFAULT_CHANGED_KEY))
    swap_record(handle.store, CONFIG_KEY, record, encode_config(config))
    if handle.head == Head(handle.default_branch):  # it has followed no state yet
        handle.head = Head(name)
    handle.config = config
