"""What the vendors' files share: a client of each process, answers of bounded length, errors that hold no secret.

Invariant: what a server says takes bounded memory and time, and is shown without secrets and control characters.
Must not know: vendors, objects.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterable
from typing import Any

from cas_ckpt import clock
from cas_ckpt.errors import StorageError

_MOST_REPLY_BYTES = 32 << 20
"""Longest answer that is not an object: a page of a listing is some hundred KB."""

_LONGEST_REPLY_S = 120


class ClientOfProcess:
    """A vendor's client, made with the first request, as it reads files and looks for credentials. Threads share it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._client: Any = None
        self._lock = threading.RLock()

    def get(self) -> Any:
        """The client of this process."""
        client = self._client
        if client is not None:
            return client
        with self._lock:
            if self._client is None:
                self._client = self._make()
            return self._client

    @property
    def made(self) -> Any:
        """The client, or None before the first request."""
        return self._client

    def close(self) -> None:
        """Close its connections; the next request makes a new client."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def after_fork(self) -> None:
        """In a child process: the connections are the parent's."""
        self._lock = threading.RLock()
        self._client = None


def whole_reply(pieces: Iterable[bytes], drop: Callable[[], object]) -> bytes:
    """An answer that is not an object, from its pieces.

    Raises:
        StorageError: it is too long, or takes too long; `drop` was called then.
    """
    begun_s, taken, size = clock.monotonic_s(), [], 0
    for piece in pieces:
        taken.append(piece)
        size += len(piece)
        if size > _MOST_REPLY_BYTES or clock.monotonic_s() - begun_s > _LONGEST_REPLY_S:
            drop()
            raise StorageError(
                f"an answer of more than {_MOST_REPLY_BYTES >> 20} MiB, or of {_LONGEST_REPLY_S} s: it was dropped"
            )
    return b"".join(taken)


_SHORT = 8


def _found(secret: str) -> re.Pattern[str]:
    """Where a text says `secret`; a short one only as a word of its own, for it may be part of any."""
    literal = re.escape(secret)
    return re.compile(rf"(?<![A-Za-z0-9]){literal}(?![A-Za-z0-9])" if len(secret) < _SHORT else literal)


def shown(text: str, secrets: Collection[str]) -> str:
    """`text` without secrets, which a hostile server may send back, and without what moves the cursor of a terminal."""
    for secret in secrets:
        text = _found(secret).sub("***", text)
    return "".join(character if character.isprintable() else "?" for character in text)


def is_clean(error: BaseException | None, secrets: Collection[str]) -> bool:
    """Whether the texts of `error`, and of what it was raised from, hold no secret."""
    while error is not None:
        if any(_found(secret).search(str(error)) for secret in secrets):
            return False
        error = error.__cause__ or error.__context__
    return True
