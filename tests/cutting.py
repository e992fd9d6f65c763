"""A relay of TCP between a client and a server that cuts connections when it is told to.

with Relay(path_of_a_socket) as relay:
    relay.cut_after(3)      # the third message from the client on does not arrive, and the connection is gone
    ... a client that talks to 127.0.0.1, relay.port ...
"""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from typing import Self

BLOCK = 64 << 10


class Relay:
    """Listens at `port`; threads pass on what comes, until the end of the block."""

    def __init__(self, socket_path: str) -> None:
        self._path = socket_path
        self._lock = threading.Lock()
        self._left: int | None = None
        self._lose_reply = False
        self._open: set[socket.socket] = set()
        self.cuts = 0
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        with self._lock:
            left = list(self._open)
        for one in left:
            _cut(one)

    def cut_after(self, messages: int, *, lose_reply: bool = False) -> None:
        """Cut the connection that sends the last of so many messages.

        Args:
            lose_reply: The server gets that message, and its answer is lost.
        """
        with self._lock:
            self._left, self._lose_reply = messages, lose_reply

    def stop_cutting(self) -> None:
        with self._lock:
            self._left = None

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            server.connect(self._path)
            with self._lock:
                self._open |= {client, server}
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=self._pass_on, args=(source, target, source is client), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_client: bool) -> None:
        with suppress(OSError):
            while data := source.recv(BLOCK):
                if is_client and self._is_last():
                    _cut(source)
                    if self._lose_reply:
                        target.sendall(data)
                    break
                target.sendall(data)
        _cut(source)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)  # after what is on its way there
        with self._lock:
            self._open -= {source}

    def _is_last(self) -> bool:
        with self._lock:
            if self._left is None:
                return False
            self._left -= 1
            if self._left > 0:
                return False
            self._left = None
            self.cuts += 1
            return True


def _cut(end: socket.socket) -> None:
    """The other side gets a reset, as from a host that is gone."""
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.shutdown(socket.SHUT_RD)
    end.close()
