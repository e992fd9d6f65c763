"""The records that garbage collection and writers exchange: gc/state, and sessions.

gc/state: which generation of collection there is, and which packs are condemned. Writers read it after the ref that
they will swap, and collectors fence the refs after they have changed it (format.md, "Writing").

Sessions: a long commit announces that it is writing, so that collectors spare its packs. Economy only: nothing is safe
because of a session, and nothing is lost without one: a writer whose packs were collected writes them again. A record
that its process left behind when it died means nothing once it is old.

Invariant: a gc/state that is damaged, lost or older than what was seen is refused; then nothing is committed.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import TracebackType
from typing import Self

from cas_ckpt import clock
from cas_ckpt.core.config import FORMAT_VERSION, require_there
from cas_ckpt.core.ref_store import swap_record
from cas_ckpt.core.refs import NONCE_BYTES, Generation, decode_generation
from cas_ckpt.errors import CkptError, CorruptionError, NotFoundError, UnsupportedVersionError
from cas_ckpt.objects.digest import seal, unseal
from cas_ckpt.objects.pack import PACK_PREFIX
from cas_ckpt.storage.store import Store, few_keys

GC_STATE_KEY = "gc/state"

MAKE_ANEW = 'end every gc, then run repo.repair("state") (an older copy of it would not do)'
"""Advice for a gc/state that is damaged, lost or too old."""


class GcPhase(StrEnum):
    """Phases of a garbage collection, in their order."""

    IDLE = "idle"
    CONDEMNED = "condemned"
    DELETING = "deleting"


@dataclass(frozen=True, slots=True)
class GcState:
    """The garbage collector's record.

    Attributes:
        generation: The collection that began last.
        condemned: Packs that no writer may rely on any more.
        record: The stored bytes: what a swap expects to find. Empty if it was not read.
    """

    generation: Generation = field(default_factory=Generation)
    phase: GcPhase = GcPhase.IDLE
    condemned: tuple[str, ...] = field(default=())
    record: bytes = field(default=b"", compare=False, repr=False)


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


def encode_gc_state(state: GcState) -> bytes:
    """The record of `state`, with a nonce of its own."""
    payload = {
        "generation": state.generation.number,
        "generation_nonce": state.generation.nonce,
        "phase": str(state.phase),
        "condemned": list(state.condemned),
        "nonce": secrets.token_bytes(NONCE_BYTES),
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
        phase, condemned = str(payload["phase"]), tuple(map(str, payload["condemned"]))
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptionError(f"{GC_STATE_KEY}: a record of odd form: {error!r}: {MAKE_ANEW}") from error
    if phase not in tuple(GcPhase):
        raise CorruptionError(f"{GC_STATE_KEY}: unknown phase {phase!r}: {MAKE_ANEW}")
    for key in condemned:
        if not key.startswith(PACK_PREFIX):
            raise CorruptionError(f"{GC_STATE_KEY}: it condemns {key!r:.80}, which is not a pack: {MAKE_ANEW}")
    return GcState(generation, GcPhase(phase), condemned, record)


def swap_gc_state(
    store: Store, state: GcState, *, generation: Generation, phase: GcPhase, condemned: Sequence[str]
) -> GcState:
    """Replace `state` as it was read; the new state.

    Raises:
        ConflictError: another collector changed it meanwhile.
    """
    new = GcState(generation, phase, tuple(condemned))
    record = encode_gc_state(new)
    swap_record(store, GC_STATE_KEY, state.record, record)
    return replace(new, record=record)


# --- sessions ----------------------------------------------------------------------------------

VERSION = 1
PREFIX = "sessions/"

QUIET_S = 30.0
"""A commit shorter than this leaves no record: packs that young are spared anyway."""

DEAD_S = 6 * 3600.0
"""A session that was not heard of for so long is over: one that lives writes at least once a pack."""

_LOGGER = logging.getLogger("cas_ckpt")


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session as it was read: where it runs, since when, and when it was last heard of."""

    key: str
    host: str
    process: int
    started_us: int
    heard_us: int


class Session:
    """One writer's announcement; a context manager that takes it back. Any thread may `beat`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.key = PREFIX + secrets.token_hex(16)
        self._started_s = self._heard_s = clock.now_s()
        self._written = False

    def beat(self) -> None:
        """Say "still writing"; costs a request at most every `QUIET_S` seconds."""
        now_s = clock.now_s()
        if now_s - self._heard_s < QUIET_S:
            return
        try:
            self.announce()
        except CkptError as error:
            _LOGGER.warning("this commit could not be announced, a collection may cost it time: %s", error)

    def announce(self) -> None:
        """Write the record now, under a new name.

        Raises:
            StorageError: the store refuses.
        """
        self._heard_s = clock.now_s()
        payload = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "started_us": int(self._started_s * 1e6),
            "heard_us": int(self._heard_s * 1e6),
        }
        self._store.put(self.key, seal("session", VERSION, payload, key=self.key))
        self._written = True

    def end(self) -> None:
        """Take the announcement back. Idempotent."""
        if self._written:
            self._written = False
            try:
                self._store.delete(self.key)
            except CkptError as error:
                _LOGGER.warning("%s is left behind, it will be ignored once it is old: %s", self.key, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A process that is being torn down (a test's "death") must not act any more.
        if self._written and (error is None or isinstance(error, (Exception, KeyboardInterrupt))):
            self.end()


def live_sessions(store: Store) -> list[SessionRecord]:
    """Sessions that were heard of lately, by our clock; damaged records are none, for nothing depends on them."""
    found = [_read(store, key) for key in few_keys(store, PREFIX)]
    return [session for session in found if session is not None and _is_recent(session, DEAD_S)]


def elsewhere_since_s(store: Store) -> float | None:
    """When the first live session of another machine began, in seconds since 1970; None: there is none.

    What was written since then may be that session's, and no lock of this machine tells whether it is.
    """
    here = socket.gethostname()
    return min((session.started_us / 1e6 for session in live_sessions(store) if session.host != here), default=None)


def sweep_sessions(store: Store) -> int:
    """Delete records that cannot be read, and those whose time is far from ours; how many."""
    swept = 0
    for key in few_keys(store, PREFIX):
        session = _read(store, key)
        if session is None or not _is_recent(session, 4 * DEAD_S):
            store.delete(key)
            swept += 1
    return swept


def _is_recent(session: SessionRecord, limit_s: float) -> bool:
    return abs(session.heard_us - int(clock.now_s() * 1e6)) <= int(limit_s * 1e6)


def _read(store: Store, key: str) -> SessionRecord | None:
    """The session; None if it is gone, or damaged. One of a later version is heard of now: it is not ours to judge."""
    try:
        payload = unseal("session", store.get(key), version=VERSION, key=key)
        return SessionRecord(
            key, str(payload["host"]), int(payload["process"]), int(payload["started_us"]), int(payload["heard_us"])
        )
    except NotFoundError:
        return None
    except UnsupportedVersionError:
        return SessionRecord(key, "", 0, 0, int(clock.now_s() * 1e6))
    except (CkptError, KeyError, TypeError, ValueError) as error:
        _LOGGER.warning("%s is not a session and is ignored: %s", key, error)
        return None
