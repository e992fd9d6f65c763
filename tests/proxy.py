"""A proxy of HTTP between a client and a test server: latency, bandwidth, and bad luck, request by request.

    with Proxy("http://127.0.0.1:4000") as proxy:
        proxy.latency_s, proxy.bytes_per_s = 0.03, 200e6
        proxy.plan(status(503), method="PUT", times=3)       # the next three PUTs; the fourth passes
        proxy.plan(cut_reply(100_000), match="packs/")       # one download ends after so many bytes of its body
        ... a client that talks to proxy.endpoint ...
        proxy.requests                                       # what was asked, in order

As a process of its own, for benchmarks: `python -m tests.proxy UPSTREAM [LATENCY_S [BYTES_PER_S]]` prints its endpoint.
It serves one request at a time for each connection, as HTTP/1.1 clients send them.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO
from urllib.parse import urlsplit

from tests.listener import Listener

BLOCK = 256 << 10


@dataclass
class Request:
    """A request as it came; `status` once it was answered (0: never); bytes are those of bodies."""

    method: str
    target: str
    headers: dict[str, str]
    status: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0

    @property
    def length(self) -> int:
        return int(self.headers.get("content-length", 0))


@dataclass(frozen=True)
class Fault:
    """What happens to a request in place of being passed on.

    Attributes:
        status, body, headers: Answered without asking the server.
        cut_request_at: So many bytes of the request's body are passed on, then both connections are cut.
        cut_head_at: So many bytes of the answer's status and headers are passed on, then the connection is closed.
        cut_reply_at: So many bytes of the answer's body are passed on, then the connection is cut.
        drop_reply: The server does it, the client hears nothing.
        delay_s: Before the answer.
        edit: Changes the answer's body (and its Content-Length).
    """

    status: int = 0
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    cut_request_at: int | None = None
    cut_head_at: int | None = None
    cut_reply_at: int | None = None
    drop_reply: bool = False
    delay_s: float = 0.0
    edit: Callable[[bytes], bytes] | None = None


def status(code: int, body: bytes = b"", **headers: str) -> Fault:
    return Fault(status=code, body=body, headers=tuple(headers.items()))


def s3_error(code: int, name: str, message: str = "by plan") -> Fault:
    """An error as S3 words it."""
    text = f"<?xml version='1.0'?><Error><Code>{name}</Code><Message>{message}</Message></Error>"
    return Fault(status=code, body=text.encode())


def cut_request(at: int = 0) -> Fault:
    return Fault(cut_request_at=at)


def cut_head(at: int) -> Fault:
    return Fault(cut_head_at=at)


def cut_reply(at: int = 0) -> Fault:
    return Fault(cut_reply_at=at)


def drop_reply() -> Fault:
    return Fault(drop_reply=True)


def delay(seconds: float) -> Fault:
    return Fault(delay_s=seconds)


def edit(change: Callable[[bytes], bytes]) -> Fault:
    return Fault(edit=change)


@dataclass
class Plan:
    """A fault, and the requests that it is for."""

    fault: Fault
    matches: Callable[[Request], bool]
    times: int
    after: int
    struck: int = 0


class Proxy(Listener):
    """Listens at `endpoint`; threads serve its connections until the end of the block."""

    def __init__(self, upstream: str, *, latency_s: float = 0.0, bytes_per_s: float = 0.0) -> None:
        super().__init__(self._serve)
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname or "127.0.0.1", parts.port or 80)
        self.latency_s = latency_s
        self.bytes_per_s = bytes_per_s
        self.requests: list[Request] = []
        self._plans: list[Plan] = []
        self._lock = threading.Lock()
        self._busy_until = {"up": 0.0, "down": 0.0}
        self._connections: set[socket.socket] = set()

    def __exit__(self, *exc_info: object) -> None:
        super().__exit__(*exc_info)
        self.cut_connections()

    def plan(
        self, fault: Fault, *, method: str = "", match: str = "", times: int = 1, after: int = 0,
        when: Callable[[Request], bool] = lambda request: True,
    ) -> Plan:  # fmt: skip
        """Let `fault` happen to the next `times` requests of this method whose target holds `match`, but the first
        `after` of them."""

        def matches(request: Request) -> bool:
            return request.method == (method or request.method) and match in request.target and when(request)

        made = Plan(fault, matches, times, after)
        with self._lock:
            self._plans.append(made)
        return made

    def clear(self) -> None:
        """Forget plans and requests."""
        with self._lock:
            self._plans.clear()
            self.requests.clear()

    def cut_connections(self) -> None:
        """Cut whatever is open."""
        with self._lock:
            connections, self._connections = self._connections, set()
        for connection in connections:
            _cut(connection)

    def count(self, method: str = "", match: str = "") -> int:
        """Requests so far."""
        with self._lock:
            return sum(each.method == (method or each.method) and match in each.target for each in self.requests)

    # --- serving -----------------------------------------------------------------------------

    def _serve(self, client: socket.socket) -> None:
        server: socket.socket | None = None
        with self._lock:
            self._connections.add(client)
        try:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            asked = client.makefile("rb", BLOCK)
            server = socket.create_connection(self._upstream)
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            answered = server.makefile("rb", BLOCK)
            while self._pass_on(client, asked, server, answered):
                pass
        except (OSError, ValueError):
            pass
        finally:
            with self._lock:
                self._connections.discard(client)
            _cut(client)
            if server is not None:
                _cut(server)

    def _pass_on(self, client: socket.socket, asked: BinaryIO, server: socket.socket, answered: BinaryIO) -> bool:
        """Serve one request; whether the connection goes on."""
        first, headers = _head_of(asked)
        if not first:
            return False
        method, target, _ = first.split(" ", 2)
        request = Request(method, target, {name.lower(): value for name, value in headers})
        with self._lock:
            self.requests.append(request)
            fault = self._fault_of(request)
        if fault.delay_s or self.latency_s:
            time.sleep(fault.delay_s + self.latency_s)
        if request.headers.get("expect"):
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if fault.status:
            self._move(asked, None, request.length, "up")
            reason = f"HTTP/1.1 {fault.status} by plan\r\n"
            more = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fault.headers)
            body = b"" if method == "HEAD" else fault.body
            client.sendall(f"{reason}{more}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            request.status = fault.status
            return True
        server.sendall(_text_of(first, [each for each in headers if each[0].lower() != "expect"]))
        wanted = request.length if fault.cut_request_at is None else min(request.length, fault.cut_request_at)
        self._move(asked, server, wanted, "up")
        request.sent_bytes = wanted
        if fault.cut_request_at is not None:
            return False
        return self._answer(client, answered, request, fault)

    def _answer(self, client: socket.socket, answered: BinaryIO, request: Request, fault: Fault) -> bool:
        first, headers = _head_of(answered)
        if not first:
            return False
        request.status = int(first.split(" ", 2)[1])
        told = {name.lower(): value for name, value in headers}
        is_empty = request.method == "HEAD" or request.status in (204, 304)
        length = None if is_empty else told.get("content-length")
        is_chunked = "chunked" in told.get("transfer-encoding", "").lower() and not is_empty
        if fault.drop_reply or fault.edit:
            body = b"" if is_empty else _chunks(answered) if is_chunked else answered.read(int(length or 0))
            if fault.drop_reply:
                return False
            assert fault.edit is not None
            body = fault.edit(body)
            kept = [each for each in headers if each[0].lower() not in ("content-length", "transfer-encoding")]
            client.sendall(_text_of(first, [*kept, ("Content-Length", str(len(body)))]) + body)
            return True
        client.sendall(_text_of(first, headers)[: fault.cut_head_at])
        if fault.cut_head_at is not None:
            client.shutdown(socket.SHUT_WR)  # not reset: what was sent arrives
            return False
        if fault.cut_reply_at is not None:
            self._move(answered, client, min(int(length or 0), fault.cut_reply_at), "down")
            return False
        if is_chunked:
            while size_line := answered.readline():
                client.sendall(size_line)
                size = int(size_line.split(b";")[0], 16)
                self._move(answered, client, size, "down")
                request.received_bytes += size
                client.sendall(answered.readline())
                if not size:
                    break
        elif not is_empty and length is None:
            while block := answered.read1(BLOCK):  # type: ignore[attr-defined]
                client.sendall(block)
            return False
        else:
            self._move(answered, client, int(length or 0), "down")
            request.received_bytes = int(length or 0)
        return told.get("connection", "").lower() != "close"

    def _fault_of(self, request: Request) -> Fault:
        for plan in self._plans:
            if not plan.matches(request):
                continue
            plan.struck += 1
            if plan.after < plan.struck <= plan.after + plan.times:
                return plan.fault
        return Fault()

    def _move(self, source: BinaryIO, target: socket.socket | None, num_bytes: int, way: str) -> None:
        """Pass on so many bytes, no faster than all connections together may."""
        block = memoryview(bytearray(min(BLOCK, max(num_bytes, 1))))
        while num_bytes > 0:
            got = source.readinto(block[: min(len(block), num_bytes)])  # type: ignore[attr-defined]
            if not got:
                raise OSError("cut")
            if self.bytes_per_s:
                self._take_turn(got, way)
            if target is not None:
                target.sendall(block[:got])
            num_bytes -= got

    def _take_turn(self, num_bytes: int, way: str) -> None:
        with self._lock:
            now = time.monotonic()
            start = max(now, self._busy_until[way])
            self._busy_until[way] = start + num_bytes / self.bytes_per_s
        if start - now > 0.002:
            time.sleep(start - now)


def _head_of(stream: BinaryIO) -> tuple[str, list[tuple[str, str]]]:
    """The first line and the headers; an empty line at the end of the stream."""
    first = stream.readline().decode("latin-1").strip()
    headers = []
    while line := stream.readline().decode("latin-1").strip():
        name, _, value = line.partition(":")
        headers.append((name, value.strip()))
    return first, headers


def _text_of(first: str, headers: list[tuple[str, str]]) -> bytes:
    return "\r\n".join([first, *(f"{name}: {value}" for name, value in headers), "", ""]).encode("latin-1")


def _chunks(stream: BinaryIO) -> bytes:
    body = b""
    while size := int(stream.readline().split(b";")[0], 16):
        body += stream.read(size)
        stream.readline()
    stream.readline()
    return body


def _cut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    connection.close()


def main() -> None:
    upstream, *numbers = sys.argv[1:]
    latency_s, bytes_per_s = [float(each) for each in numbers] + [0.0] * (2 - len(numbers))
    with Proxy(upstream, latency_s=latency_s, bytes_per_s=bytes_per_s) as proxy:
        print(proxy.endpoint, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
