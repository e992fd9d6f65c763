"""A listener for tests at a free port of this machine; each connection is served by a thread of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Self


class Listener:
    """Serves connections by `serve` until the end of the block."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self._serve_one = serve
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve_one, args=(connection,), daemon=True).start()
