"""Requests and answers of HTTP whose bytes go and come in time: what Python's own client does not see to.

It takes a head that is cut off for a shorter one, so that headers are missing that were sent. Its timeout is for each
piece that comes, so that a server which sends a byte now and then is waited for without end; and for all that is sent
at once, so that a body which goes slowly, but goes, is given up.

    1. the head, from the first byte to the empty line, comes within the timeout, or TimeoutError is raised
    2. a head that ends before its empty line is a ConnectionResetError: the request is sent again, as after any break
    3. of the body at least `LEAST_BYTES` come in each such time, or its end
    4. of a request each `LEAST_BYTES` go within the timeout of the connection

Only the time that is spent waiting for the server counts: whoever reads may take breaks.
Must not know: vendors, what is answered.
"""

from __future__ import annotations

import http.client
import io
import socket
from collections.abc import Mapping
from typing import Any

from cas_ckpt import clock

LEAST_BYTES = 32 << 10


class _TimedStream(io.RawIOBase):
    """What comes over `connection`, in time."""

    def __init__(self, stream: Any, connection: socket.socket) -> None:
        self._stream = stream
        self._connection = connection
        self._timeout_s = connection.gettimeout()
        self._left_s = self._timeout_s
        self._num_bytes = 0
        self.in_head = True

    def body_follows(self) -> None:
        """The head has come."""
        self.in_head = False
        self._left_s, self._num_bytes = self._timeout_s, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._left_s is None:  # whoever made the connection waits for ever
            return int(self._stream.readinto(buffer))
        if self._left_s <= 0:
            raise TimeoutError(f"{self._num_bytes} bytes came in {self._timeout_s} s: too slow to go on")
        before_s = clock.monotonic_s()
        self._connection.settimeout(self._left_s)
        try:
            got = int(self._stream.readinto(buffer))
        finally:
            self._connection.settimeout(self._timeout_s)
            self._left_s -= clock.monotonic_s() - before_s
        if not got and self.in_head and self._num_bytes:
            raise ConnectionResetError("the connection was closed before the headers had come whole")
        self._num_bytes += got
        if self._num_bytes >= LEAST_BYTES and not self.in_head:
            self._left_s, self._num_bytes = self._timeout_s, 0
        return got

    def close(self) -> None:
        self._stream.close()
        super().close()


class TimedAnswer(http.client.HTTPResponse):
    """See above."""

    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self._timed = _TimedStream(self.fp.detach(), sock)
        self.fp = io.BufferedReader(self._timed)

    def begin(self) -> None:
        """Read the head."""
        super().begin()
        self._timed.body_follows()


class _TimedConnection:
    response_class = TimedAnswer

    def send(self, data: Any) -> None:
        """Send `data`, in pieces; a file, or another iterable, comes in pieces of its own."""
        if isinstance(data, (bytes, bytearray, memoryview)):
            view = memoryview(data)
            for at in range(0, view.nbytes, LEAST_BYTES):
                super().send(view[at : at + LEAST_BYTES])  # type: ignore[misc]
        else:
            super().send(data)  # type: ignore[misc]


def timed(pools: Mapping[str, Any]) -> dict[str, Any]:
    """The same classes of pools of connections (those of urllib3), whose requests and answers are timed.

    Those that are timed already stay: one adapter may be reached by several ways.
    """
    made = dict(pools)
    for scheme, pool in pools.items():
        if issubclass(pool.ConnectionCls, _TimedConnection):
            continue
        connection = type(pool.ConnectionCls.__name__, (_TimedConnection, pool.ConnectionCls), {})
        made[scheme] = type(pool.__name__, (pool,), {"ConnectionCls": connection})
    return made
