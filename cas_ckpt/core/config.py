"""The config of a repository, and the state of its garbage collection.

Invariant: a repository of a newer format is refused before anything else is read.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from cas_ckpt.arguments import check_choice, check_whole
from cas_ckpt.core.refs import NONCE_BYTES
from cas_ckpt.errors import CorruptionError, NoRepositoryError, NotFoundError, shown_value
from cas_ckpt.objects.digest import seal, unseal
from cas_ckpt.storage.store import EmulatesConditions, Store, exists

FORMAT_VERSION = 1
INDEX_PATH = Path("index") / "index.sqlite"
"""Where the index of a local repository is, below its root."""

CONFIG_KEY = "config"
POLICY_KEY = "policy"

DEFAULT_BRANCH = "main"
DEFAULT_ENCODING = "auto"
"""Chosen by measurement: docs/decisions/002-encodings.md."""

DEFAULT_PACK_BYTES = 512 * 1024 * 1024
REMOTE_ENCODING = "planes"
REMOTE_PACK_BYTES = 128 * 1024 * 1024
"""Those of a store that is not local: the network is slower than a core that compresses; 002 has the figures."""

HONOURED, EMULATED = "honoured", "emulated"
"""Conditional writes: by the store, or by reading before writing, for one writer at a time."""

MIN_PACK_BYTES = 1024 * 1024

SHORT = re.compile(r"[A-Za-z0-9._/-]{1,200}\Z")
"""Characters of ids, names of branches and encodings: all of them are shown, and some are parts of other names."""


@dataclass(frozen=True, slots=True)
class Config:
    """Fixed at init, but for the default branch.

    Attributes:
        store_id: Random name of this repository; the index carries it too.
        encoding: How new extents are encoded ("raw", "zstd", ...): never part of an id.
        pack_bytes: A data pack is closed once it is this long.
        conditional_writes: HONOURED or EMULATED: what the probe at init found out about the store.
    """

    store_id: str
    default_branch: str = DEFAULT_BRANCH
    encoding: str = DEFAULT_ENCODING
    pack_bytes: int = DEFAULT_PACK_BYTES
    conditional_writes: str = HONOURED


def check_settings(config: Config) -> None:
    """Refuse settings that could not work.

    Raises:
        InvalidInputError: unknown encoding or an impossible pack size.
    """
    from cas_ckpt.objects.codec import EncodingPolicy, has_policy  # brings zstandard: reading a config needs none

    if not (isinstance(config.encoding, str) and has_policy(config.encoding)):
        check_choice("encoding", config.encoding, EncodingPolicy)
    check_whole("pack_bytes", config.pack_bytes, least=MIN_PACK_BYTES)


def read_config(store: Store) -> Config:
    """The repository's config; from now on `store` writes as it says.

    Raises:
        NoRepositoryError: there is none. CorruptionError, UnsupportedVersionError.
    """
    config = decode_config(config_record(store))
    adapt_store(store, config)
    return config


def config_record(store: Store) -> bytes:
    """The record of the config, as it is stored.

    Raises:
        NoRepositoryError: there is none.
    """
    try:
        return store.get(CONFIG_KEY)
    except NotFoundError:
        raise NoRepositoryError(f"{store.url} holds no cas_ckpt repository: Repository.init(path) makes one") from None


def decode_config(record: bytes) -> Config:
    """The config in its record.

    Raises:
        CorruptionError, UnsupportedVersionError.
    """
    payload = unseal("config", record, version=FORMAT_VERSION, key=CONFIG_KEY)
    del payload["nonce"]
    try:
        config = Config(**payload)
    except TypeError as error:
        raise CorruptionError(f"{CONFIG_KEY}: other fields than a config has: {error}") from error
    for name in ("store_id", "default_branch", "encoding"):
        value = getattr(config, name)
        if not isinstance(value, str) or not SHORT.match(value):
            raise CorruptionError(f"{CONFIG_KEY}: a {name} that is {shown_value(value)}")
    if type(config.pack_bytes) is not int or not 0 < config.pack_bytes < 1 << 63:
        raise CorruptionError(f"{CONFIG_KEY}: packs of {shown_value(config.pack_bytes)} bytes")
    if config.conditional_writes not in (HONOURED, EMULATED):
        raise CorruptionError(f"{CONFIG_KEY}: conditional writes that are {config.conditional_writes!r:.40}")
    return config


def encode_config(config: Config) -> bytes:
    """A record of `config`, with a nonce of its own."""
    payload = {**asdict(config), "nonce": secrets.token_bytes(NONCE_BYTES)}
    return seal("config", FORMAT_VERSION, payload, key=CONFIG_KEY)


def adapt_store(store: Store, config: Config) -> None:
    """Let `store` read before it writes, if `config` says so: a store that keeps conditions anyway needs not."""
    if config.conditional_writes == EMULATED and isinstance(store, EmulatesConditions):
        store.emulate_conditions()


def require_there(store: Store) -> None:
    """Raise NoRepositoryError if the repository is gone: what looks empty may have been moved or deleted."""
    if not exists(store, CONFIG_KEY):
        raise NoRepositoryError(f"{store.url} holds no repository any more: it was moved or deleted")
