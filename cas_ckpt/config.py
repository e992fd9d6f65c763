"""What a repository says of itself: its config and the state of its garbage collection.

Invariant: a repository of a newer format is refused before anything else is read.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from cas_ckpt.errors import (
    ConflictError,
    CorruptionError,
    InvalidInputError,
    NoRepositoryError,
    NotFoundError,
    StorageError,
)
from cas_ckpt.objects.pack import PACK_PREFIX
from cas_ckpt.objects.record import seal, unseal
from cas_ckpt.storage.store import Store

FORMAT_VERSION = 1
CONFIG_KEY = "config"
GC_STATE_KEY = "gc/state"
POLICY_KEY = "policy"

DEFAULT_BRANCH = "main"
DEFAULT_ENCODING = "auto"
"""Chosen by measurement: docs/decisions/002-encodings.md."""

DEFAULT_PACK_BYTES = 512 * 1024 * 1024
MIN_PACK_BYTES = 1024 * 1024

NONCE_BYTES = 16


@dataclass(frozen=True, slots=True)
class Config:
    """Fixed at init.

    Attributes:
        store_id: Random name of this repository; the index carries it too.
        encoding: How new extents are encoded ("raw", "zstd", ...): never part of an id.
        pack_bytes: A data pack is closed once it is this long.
        conditional_writes: What the probe at init found out about the store.
    """

    store_id: str
    default_branch: str = DEFAULT_BRANCH
    encoding: str = DEFAULT_ENCODING
    pack_bytes: int = DEFAULT_PACK_BYTES
    conditional_writes: str = "honoured"


MAKE_ANEW = 'end every gc, then run repo.repair("state") (an older copy of it would not do)'
"""What helps against a gc/state that is damaged, lost or too old."""

IDLE, CONDEMNED, DELETING = PHASES = ("idle", "condemned", "deleting")
"""Phases of a garbage collection, in their order."""


@dataclass(frozen=True, slots=True)
class Generation:
    """One generation of garbage collection: from the condemning of packs to the next one's.

    Attributes:
        number: Counts up. It may come again after an older gc/state was put back, so it only orders.
        nonce: Drawn when the generation begins, and never again: two generations are equal if, and only if,
            this is. Empty before the first one that a ref has seen.
    """

    number: int = 0
    nonce: bytes = b""

    def next(self) -> Generation:
        """The generation that begins now, after this one."""
        return Generation(self.number + 1, secrets.token_bytes(NONCE_BYTES))


@dataclass(frozen=True, slots=True)
class GcState:
    """The garbage collector's record.

    Attributes:
        generation: The collection that began last.
        phase: One of `PHASES`.
        condemned: Packs that no writer may rely on any more.
        record: The stored bytes: what a swap expects to find. Empty if it was not read.
    """

    generation: Generation = Generation()
    phase: str = IDLE
    condemned: tuple[str, ...] = field(default=())
    record: bytes = field(default=b"", compare=False, repr=False)


def new_store_id() -> str:
    """A random name for a new repository."""
    return secrets.token_hex(16)


def write_config(store: Store, config: Config) -> None:
    """Create config and gc state; the config comes last, so that half an init is none.

    Raises:
        ConflictError: there is a repository already.
    """
    check_settings(config)
    payload = {
        "store_id": config.store_id,
        "default_branch": config.default_branch,
        "encoding": config.encoding,
        "pack_bytes": config.pack_bytes,
        "conditional_writes": config.conditional_writes,
        "nonce": secrets.token_bytes(16),
    }
    _refuse_second(store)
    with suppress(ConflictError):  # an init that died left one, or another init runs: theirs will do
        store.put_if_absent(GC_STATE_KEY, encode_gc_state(GcState(Generation(0, secrets.token_bytes(NONCE_BYTES)))))
    store.put_if_absent(CONFIG_KEY, seal("config", FORMAT_VERSION, payload, key=CONFIG_KEY))


def _refuse_second(store: Store) -> None:
    try:
        store.head(CONFIG_KEY)
    except NotFoundError:
        return
    raise ConflictError(f"{store.url} holds a repository already: choose another place")


def check_settings(config: Config) -> None:
    """Refuse settings that could not work.

    Raises:
        InvalidInputError: unknown encoding or an impossible pack size.
    """
    from cas_ckpt.objects.codec import EncodingPolicy  # brings numpy, which reading a config does not need

    known = [policy.value for policy in EncodingPolicy]
    if config.encoding not in known:
        raise InvalidInputError(f"encoding {config.encoding!r} is not one of {', '.join(known)}")
    if config.pack_bytes < MIN_PACK_BYTES:
        raise InvalidInputError(f"packs of {config.pack_bytes} bytes are too small: at least {MIN_PACK_BYTES}")


def read_config(store: Store) -> Config:
    """The repository's config.

    Raises:
        NoRepositoryError: there is none. CorruptionError, UnsupportedVersionError.
    """
    try:
        record = store.get(CONFIG_KEY)
    except NotFoundError:
        raise NoRepositoryError(f"{store.url} holds no cas_ckpt repository: Repository.init(path) makes one") from None
    payload = unseal("config", record, version=FORMAT_VERSION, key=CONFIG_KEY)
    del payload["nonce"]
    try:
        return Config(**payload)
    except TypeError as error:
        raise CorruptionError(f"{CONFIG_KEY}: other fields than a config has: {error}") from error


def decode_generation(payload: Mapping[str, Any]) -> Generation:
    """The generation that a record of gc/state or of a ref is of.

    Raises:
        KeyError, TypeError, ValueError: it says none.
    """
    number, nonce = payload["generation"], payload["generation_nonce"]
    if type(number) is not int or not isinstance(nonce, bytes):
        raise TypeError(f"a generation of {number!r} and {nonce!r}")
    return Generation(number, nonce)


def require_current(state: GcState, seen: Generation, *, key: str) -> None:
    """Refuse a gc/state that is older than what `key`, which was read before it, says: it was put back from a copy.

    Raises:
        CorruptionError: then packs may have been deleted of which `state` knows nothing.
    """
    own = state.generation
    if seen.number > own.number or (seen.number == own.number and seen.nonce != own.nonce):
        raise CorruptionError(
            f"{key} is of generation {seen.number} of garbage collection, which {GC_STATE_KEY}, at generation "
            f"{own.number}, does not know: one of the two was put back from an older copy. {MAKE_ANEW[0].upper()}"
            f"{MAKE_ANEW[1:]}"
        )


def require_not_older(store: Store, state: GcState, seen: int) -> None:
    """Refuse a gc/state of a lower number than the index has seen.

    Raises:
        CorruptionError: it was put back from an older copy.
    """
    if seen > state.generation.number:
        state = read_gc_state(store)  # once more: another process may have told the index of one that began since
    if seen > state.generation.number:
        require_current(state, Generation(seen), key="the index")


def require_there(store: Store) -> None:
    """Raise NoRepositoryError if the repository is gone: what looks empty may have been moved or deleted."""
    try:
        store.head(CONFIG_KEY)
    except NotFoundError:
        raise NoRepositoryError(f"{store.url} holds no repository any more: it was moved or deleted") from None


def encode_gc_state(state: GcState) -> bytes:
    """The record of `state`, with a nonce of its own."""
    payload = {
        "generation": state.generation.number,
        "generation_nonce": state.generation.nonce,
        "phase": state.phase,
        "condemned": list(state.condemned),
        "nonce": secrets.token_bytes(16),
    }
    return seal("gc-state", FORMAT_VERSION, payload, key=GC_STATE_KEY)


def read_gc_state(store: Store) -> GcState:
    """The state of garbage collection.

    Raises:
        CorruptionError: missing or damaged; then nothing may be committed.
    """
    try:
        record = store.get(GC_STATE_KEY)
    except NotFoundError as error:
        require_there(store)
        raise CorruptionError(f"{GC_STATE_KEY} is missing: {MAKE_ANEW}") from error
    payload = unseal("gc-state", record, version=FORMAT_VERSION, key=GC_STATE_KEY)
    try:
        generation = decode_generation(payload)
        state = GcState(generation, str(payload["phase"]), tuple(map(str, payload["condemned"])), record)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(f"{GC_STATE_KEY}: a record of odd form: {error!r}: {MAKE_ANEW}") from error
    if state.phase not in PHASES:
        raise CorruptionError(f"{GC_STATE_KEY}: unknown phase {state.phase!r}: {MAKE_ANEW}")
    strange = [key for key in state.condemned if not key.startswith(PACK_PREFIX)]
    if strange:
        raise CorruptionError(
            f"{GC_STATE_KEY}: it condemns {strange[0]!r:.80}, which is no pack: {MAKE_ANEW}"
        )
    return state


def swap_gc_state(
    store: Store, state: GcState, *, generation: Generation, phase: str, condemned: Sequence[str]
) -> GcState:
    """Replace `state` as it was read; the new state.

    Raises:
        ConflictError: another collector changed it meanwhile.
    """
    new = GcState(generation, phase, tuple(condemned))
    record = encode_gc_state(new)
    try:
        store.compare_and_swap(GC_STATE_KEY, state.record, record)
    except (ConflictError, StorageError):
        # The reply may be lost although the swap was done: the nonce tells.
        if store.get(GC_STATE_KEY) != record:
            raise
    return replace(new, record=record)


