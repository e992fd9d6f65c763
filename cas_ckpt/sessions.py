"""Sessions: a long commit's announcement that it is writing, so that collectors spare its packs.

Invariant: economy only. Nothing is safe because of a session, and nothing is lost without one:
a writer whose packs were collected writes them again. A record that its process left behind
when it died means nothing once it is old.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from cas_ckpt import clock
from cas_ckpt.errors import CkptError, NotFoundError, UnsupportedVersionError
from cas_ckpt.objects.record import seal, unseal
from cas_ckpt.storage.store import Store

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
        """Write the record now, under a name that nobody has used before.

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
        if error is None or isinstance(error, (Exception, KeyboardInterrupt)):
            self.end()


def live_sessions(store: Store) -> list[SessionRecord]:
    """Sessions that were heard of lately, by our clock; damaged records are none, for nothing depends on them."""
    now_us = int(clock.now_s() * 1e6)
    found = []
    for key, _ in list(store.list(PREFIX)):
        try:
            session = _read(store, key)
        except UnsupportedVersionError:
            session = SessionRecord(key, "", 0, 0, now_us)  # of a later version: it may be alive
        if session is not None and abs(session.heard_us - now_us) <= int(DEAD_S * 1e6):
            found.append(session)
    return found


def elsewhere_since_s(store: Store) -> float | None:
    """When the first live session of another machine began, in seconds since 1970; None: there is none.

    What was written since then may be that session's, and no lock of this machine tells whether it is.
    """
    here = socket.gethostname()
    return min((session.started_us / 1e6 for session in live_sessions(store) if session.host != here), default=None)


def sweep_sessions(store: Store) -> int:
    """Delete records that cannot be read, and those whose time is far from ours; how many."""
    now_us = int(clock.now_s() * 1e6)
    swept = 0
    for key, _ in list(store.list(PREFIX)):
        try:
            session = _read(store, key)
        except UnsupportedVersionError:
            continue  # of a later version: not ours to judge
        if session is None or abs(session.heard_us - now_us) > 4 * int(DEAD_S * 1e6):
            store.delete(key)
            swept += 1
    return swept


def _read(store: Store, key: str) -> SessionRecord | None:
    try:
        payload = unseal("session", store.get(key), version=VERSION, key=key)
        return SessionRecord(
            key, str(payload["host"]), int(payload["process"]), int(payload["started_us"]), int(payload["heard_us"])
        )
    except NotFoundError:
        return None
    except UnsupportedVersionError:
        raise
    except (CkptError, KeyError, TypeError, ValueError) as error:
        _LOGGER.warning("%s is no session and is ignored: %s", key, error)
        return None
