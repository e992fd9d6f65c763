"""Messages between two processes of one program, over a pair of sockets that no other process has.

A message is a plain value (None, numbers, texts, bytes, lists, mappings) in msgpack behind its length; open files may
go with it. Messages come whole and in the order in which they were sent.

Invariant: nothing that comes in is run, imported or unpickled. Threads may send at the same time; one thread receives.
Knows nothing of what messages mean.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

LOOK_S = 1.0
"""Interval at which a waiter is asked whether to continue."""

_HEADER = struct.Struct("<QB")
"""Bytes of the message, and the number of files with it."""
_PIECE_BYTES = 1 << 20
_MOST_FILES = 8


class Ended(Exception):
    """The other process is gone, or has closed its end."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message, and the descriptors of the files that came with it, which belong to whoever received it."""

    message: Any
    files: tuple[int, ...] = ()


def _go_on() -> None:
    """Wait, however long it takes."""


class Connection:
    """One end of a pair of connected sockets, which it owns."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._sending = threading.Lock()
        self._came = bytearray()
        self._files: list[int] = []

    @property
    def descriptor(self) -> int:
        """The descriptor of the socket; -1 once it is closed."""
        return self._socket.fileno()

    def send(self, message: Any, *, files: Sequence[int] = (), waiting: Callable[[], object] = _go_on) -> None:
        """Send `message` and copies of the open `files`.

        Args:
            waiting: Called every second in which the other side takes nothing; it may raise.
        Raises:
            Ended: the other end is closed.
        """
        data = msgpack.packb(message, unicode_errors="surrogatepass")
        rest = memoryview(_HEADER.pack(len(data), len(files)) + data)
        with self._sending:
            while rest:
                try:
                    if files:
                        sent = socket.send_fds(self._socket, [rest[:_PIECE_BYTES]], list(files))
                        files = ()
                    else:
                        sent = self._socket.send(rest[:_PIECE_BYTES])
                except BlockingIOError:
                    if not self._ready(select.POLLOUT):
                        waiting()
                except OSError as error:
                    raise Ended from error
                else:
                    rest = rest[sent:]

    def receive(self, *, timeout_s: float) -> Received | None:
        """The next message; None: none came whole within `timeout_s`, and what came of it is kept.

        Raises:
            Ended: no further one will come.
        """
        found = self._next()
        while found is None:
            if not self._ready(select.POLLIN, timeout_s):
                return None
            try:
                data, files, _, _ = socket.recv_fds(self._socket, _PIECE_BYTES, _MOST_FILES, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                continue
            except OSError as error:
                raise Ended from error
            if not data:
                raise Ended
            self._files += files
            self._came += data
            found = self._next()
        return found

    def _next(self) -> Received | None:
        """The first message of what came, if it is there whole."""
        if len(self._came) < _HEADER.size:
            return None
        num_bytes, num_files = _HEADER.unpack_from(self._came)
        end = _HEADER.size + num_bytes
        if len(self._came) < end:
            return None
        with memoryview(self._came) as view:
            message = msgpack.unpackb(view[_HEADER.size : end], unicode_errors="surrogatepass", strict_map_key=False)
        del self._came[:end]
        files, self._files = tuple(self._files[:num_files]), self._files[num_files:]
        return Received(message, files)

    def _ready(self, event: int, timeout_s: float = LOOK_S) -> bool:
        poll = select.poll()
        if self.descriptor < 0:
            raise Ended
        poll.register(self._socket, event)
        return bool(poll.poll(int(timeout_s * 1000)))

    def close(self) -> None:
        """Close this end; a waiter at the other end gets `Ended`. Idempotent."""
        self._socket.close()
        for descriptor in self._files:
            os.close(descriptor)
        self._files = []
