"""Credentials for Cloud Storage: Google's own chain, over TLS that is verified; nothing of them is ever shown."""

from __future__ import annotations

import json
import logging
import ssl
import threading
import traceback
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from cas_ckpt.errors import CkptError, PermissionDeniedError, StorageError, TransientStorageError
from cas_ckpt.storage import gcs_requests
from cas_ckpt.storage.store import Store
from cas_ckpt.storage.url import open_store
from tests.tls import certificate_file, new_key, pem

TOKEN = "ya29.token-of-the-tests"

Answer = tuple[int, bytes]


class Service(ThreadingHTTPServer):
    """A service with TLS, and with tokens; `answers` are given in turn, the last one again and again."""

    daemon_threads = True

    def __init__(self, certificate: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.endpoint = f"https://127.0.0.1:{self.server_port}"
        self.answers: list[Callable[[BaseHTTPRequestHandler], Answer]] = []
        self.token: Answer = (
            200,
            json.dumps({"access_token": TOKEN, "expires_in": 3600, "token_type": "Bearer"}).encode(),
        )
        self.num_tokens = self.num_requests = 0

    def handle_error(self, request: object, client_address: object) -> None: ...


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None: ...

    def handle_any(self) -> None:
        service = self.server
        assert isinstance(service, Service)
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/token":
            service.num_tokens += 1
            status, body = service.token
        else:
            service.num_requests += 1
            answer = service.answers.pop(0) if len(service.answers) > 1 else service.answers[0]
            status, body = answer(self)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = handle_any  # noqa: N815 - names of the library


def refused(status: int) -> Callable[[BaseHTTPRequestHandler], Answer]:
    """A refusal that sends back what was sent, as a hostile server may."""
    return lambda asked: (
        status,
        json.dumps({"error": {"message": f"denied: {asked.headers['Authorization']}"}}).encode(),
    )


def misshapen(asked: BaseHTTPRequestHandler) -> Answer:
    """An answer that is no refusal, with what was sent where something else belongs."""
    sent = asked.headers["Authorization"].removeprefix("Bearer ")
    one = {"name": "ckpts/refs/main", "size": sent, "generation": sent}
    return 200, json.dumps({**one, "kind": "storage#objects", "items": [one]}).encode()


def found(asked: BaseHTTPRequestHandler) -> Answer:
    assert asked.headers["Authorization"] == f"Bearer {TOKEN}"
    return 200, json.dumps({"size": "7", "generation": "1"}).encode()


@pytest.fixture(scope="module")
def key() -> rsa.RSAPrivateKey:
    return new_key()


@pytest.fixture
def service(key: rsa.RSAPrivateKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    certificate = certificate_file(tmp_path / "certificate.pem", key)
    account = {
        "type": "service_account", "client_email": "trainer@tests.iam", "private_key": pem(key), "private_key_id": "1",
        "project_id": "tests", "client_id": "1",
    }  # fmt: skip
    monkeypatch.setattr(gcs_requests, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(gcs_requests, "_LONGEST_PAUSE_S", 0.002)
    monkeypatch.setattr(gcs_requests, "_BUDGET", 50)
    with Service(certificate) as service:
        threading.Thread(target=service.serve_forever, args=(0.02,), daemon=True).start()
        file = tmp_path / "account.json"
        file.write_text(json.dumps({**account, "token_uri": f"{service.endpoint}/token"}))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
        yield service
        service.shutdown()


@pytest.fixture
def store(service: Service) -> Iterator[Store]:
    store = open_store(f"gs://bucket/ckpts?endpoint={service.endpoint}")
    yield store
    store.close()


def test_credentials_are_those_of_googles_chain_and_a_token_serves_many_requests(
    service: Service, store: Store
) -> None:
    service.answers = [found]
    assert [store.head("refs/main") for _ in range(3)] == [7, 7, 7]
    assert service.num_tokens == 1


def test_a_token_that_is_not_taken_any_more_is_renewed(service: Service, store: Store) -> None:
    service.answers = [refused(401), found]
    assert store.head("refs/main") == 7
    assert service.num_tokens == 2


@pytest.mark.parametrize("status", [200, 400, 401, 403, 404, 412, 416, 418, 503])
def test_a_server_that_sends_back_the_token_gets_it_into_no_error_and_no_log(
    service: Service, store: Store, status: int, caplog: pytest.LogCaptureFixture,
    key: rsa.RSAPrivateKey,
) -> None:  # fmt: skip
    caplog.set_level(logging.DEBUG)
    service.answers = [misshapen if status == 200 else refused(status)]
    shown = [repr(store), repr(vars(store)), store.url]
    for call in (
        lambda: store.get("refs/main"),
        lambda: store.head("refs/main"),
        lambda: store.put("refs/main", b"x"),
        lambda: store.put_if_absent("refs/main", b"x"),
        lambda: store.delete("refs/main"),
        lambda: list(store.list("")),
    ):
        try:
            call()
        except CkptError as error:
            shown += [str(error), repr(error), *traceback.format_exception(error)]
    assert len(shown) > 3
    assert TOKEN not in caplog.text
    assert not any(TOKEN in text or pem(key).splitlines()[1] in text for text in shown)


def test_credentials_that_have_expired_say_so(service: Service, store: Store) -> None:
    service.token = 400, b'{"error": "invalid_grant", "error_description": "account not found"}'
    with pytest.raises(PermissionDeniedError, match="refs/main.*renew"):
        store.get("refs/main")
    assert service.num_requests == 0


def test_a_token_service_in_trouble_is_a_failure_that_may_pass(service: Service, store: Store) -> None:
    service.token = 503, b"{}"
    with pytest.raises((TransientStorageError, PermissionDeniedError), match="refs/main"):
        store.get("refs/main")


def test_no_credentials_at_all_are_said_to_be_missing(
    service: Service, store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "not there"))
    with pytest.raises(PermissionDeniedError, match="refs/main.*no credentials.*anonymous=true"):
        store.get("refs/main")


def test_a_certificate_that_nobody_vouches_for_is_refused_at_once(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REQUESTS_CA_BUNDLE")
    store = open_store(f"gs://bucket/ckpts?endpoint={service.endpoint}&anonymous=true")
    with pytest.raises(StorageError, match="certificate or TLS is not taken") as refusal:
        store.get("refs/main")
    assert not isinstance(refusal.value, TransientStorageError)
    assert service.num_requests == 0
    store.close()
