"""moto's S3 as a process: prints its port, ends when its standard input does.

moto looks whether a condition holds and writes afterwards: of two writers at once both may win. S3 does it in one
step, so conditional requests are let in one by one here.
"""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3 import models
from werkzeug.serving import WSGIRequestHandler, make_server

_one_by_one = threading.Lock()


class QuietHandler(WSGIRequestHandler):
    """Keeps connections, writes no log."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body in one packet, else each answer waits for an acknowledgement
    disable_nagle_algorithm = True

    def handle_expect_100(self) -> bool:
        answered = super().handle_expect_100()
        self.wfile.flush()
        return answered

    def log(self, kind: str, message: str, *args: Any) -> None: ...


def serialized(app: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
    def called(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if not environ.keys() & {"HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH"} or environ["REQUEST_METHOD"] == "GET":
            return app(environ, start_response)
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        environ["wsgi.input"] = io.BytesIO(body)
        with _one_by_one:
            return list(app(environ, start_response))

    return called


def main() -> None:
    logging.disable(logging.CRITICAL)
    models.S3_UPLOAD_PART_MIN_SIZE = 0  # so that a few hundred KB are several parts
    app = serialized(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=QuietHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
