"""Servers that mean harm: memory and time stay bounded, errors are typed, nothing is believed that was not checked."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import socket
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from botocore.configprovider import BOTOCORE_DEFAUT_SESSION_VARIABLES
from botocore.retries import standard
from botocore.utils import ContainerMetadataFetcher
from google.auth.compute_engine import _metadata

from cas_ckpt.errors import CkptError, CorruptionError, StorageError, TooLargeError, TransientStorageError
from cas_ckpt.storage import bucket, gcs, gcs_requests, object_parts, s3
from cas_ckpt.storage.object_store import ObjectStore
from cas_ckpt.storage.url import open_store
from tests.listener import Listener
from tests.servers import credentials
from tests.tls import new_key, pem

pytestmark = pytest.mark.slow

Serve = Callable[[str, socket.socket], None]


class Hostile(Listener):
    """Serves every request by `serve(first line, connection)`, and then cuts the connection.

    Args:
        pause_s: Waited for after every 64 KiB of a request.
    """

    def __init__(self, serve: Serve, *, pause_s: float = 0) -> None:
        super().__init__(self._answer)
        self._serve = serve
        self._pause_s = pause_s
        self.num_requests = 0

    def _answer(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as asked:
            try:
                first = asked.readline().decode("latin-1").strip()
                length = 0
                while line := asked.readline().decode("latin-1").strip():
                    name, _, value = line.partition(":")
                    if name.lower() == "content-length":
                        length = int(value)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
                while length and (got := len(asked.read1(min(length, 1 << 16)))):
                    length -= got
                    time.sleep(self._pause_s)
                if first:
                    self.num_requests += 1
                    self._serve(first, connection)
            except OSError:
                return


def head(status: int = 200, **headers: object) -> bytes:
    """Status and headers; what both vendors want to see of an object is there."""
    told = {"ETag": '"x"', "X_Goog_Generation": 7, "Connection": "close", **headers}
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in told.items())
    return f"HTTP/1.1 {status} by plan\r\n{lines}\r\n".encode()


def for_ever(*pieces: bytes) -> Serve:
    """Send the first piece once and the second again and again."""

    def serve(first: str, connection: socket.socket) -> None:
        connection.sendall(pieces[0])
        while True:
            connection.sendall(pieces[1])

    return serve


def drip(before: bytes, piece: bytes = b"x") -> Serve:
    def serve(first: str, connection: socket.socket) -> None:
        connection.sendall(before)
        while True:
            connection.sendall(piece)
            time.sleep(0.01)

    return serve


def once(answer: bytes) -> Serve:
    return lambda first, connection: connection.sendall(answer)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(standard.ExponentialBackoff, "delay_amount", lambda self, context: 0.001)
    monkeypatch.setattr(gcs_requests, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(gcs_requests, "_LONGEST_PAUSE_S", 0.002)
    monkeypatch.setattr(gcs_requests, "_BUDGET", 25)
    monkeypatch.setattr(object_parts, "_BREAK_PAUSE_S", 0.001)
    for vendor in (gcs_requests, s3):
        monkeypatch.setattr(vendor, "_READ_TIMEOUT_S", 2.0)
    monkeypatch.setattr(bucket, "_LONGEST_REPLY_S", 0.3)
    with credentials():
        yield


@pytest.fixture(params=["s3", "gs"])
def opened(request: pytest.FixtureRequest) -> Iterator[Callable[[Hostile], ObjectStore]]:
    made: list[ObjectStore] = []

    def opened(server: Hostile) -> ObjectStore:
        store = open_store(f"{request.param}://bucket/ckpts?endpoint={server.endpoint}")
        assert isinstance(store, ObjectStore)
        made.append(store)
        return store

    yield opened
    for store in made:
        store.close()


Opened = Callable[[Hostile], ObjectStore]


def peak_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def reads_of(store: ObjectStore) -> list[Callable[[], object]]:
    target = memoryview(bytearray(1000))
    return [
        lambda: store.get("refs/main"),
        lambda: store.get_range("packs/a", 0, 1000),
        lambda: store.get_tail("packs/a", 1000),
        lambda: store.read_into("packs/a", 0, target),
    ]


def refused(call: Callable[[], object]) -> CkptError:
    try:
        answer = call()
    except CkptError as error:
        return error
    raise AssertionError(f"wanted an error, found {answer!r:.200}")


def test_what_goes_slowly_over_the_line_is_waited_for(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    for vendor in (gcs_requests, s3):
        monkeypatch.setattr(vendor, "_CONNECT_TIMEOUT_S", 0.3)

    def serve(first: str, connection: socket.socket) -> None:
        body = b"" if first.startswith("PUT") else b'{"name": "ckpts/packs/a", "generation": "7", "size": "8000000"}'
        connection.sendall(head(Content_Length=len(body)) + body)

    with Hostile(serve, pause_s=0.01) as server:
        opened(server).put("packs/a", bytes(8_000_000))


def test_a_value_longer_than_any_record_is_refused_before_it_comes(opened: Opened) -> None:
    with Hostile(for_ever(head(Content_Length=1 << 50), bytes(1 << 16))) as server:
        store = opened(server)
        assert peak_bytes(lambda: refused(lambda: store.get("refs/main"))) < 32 << 20
        assert isinstance(refused(lambda: store.get("refs/main")), CorruptionError)
        assert isinstance(refused(lambda: store.compare_and_swap("refs/main", b"a", b"b")), CorruptionError)


def test_a_range_of_more_bytes_than_asked_for_is_refused(opened: Opened) -> None:
    told = head(206, Content_Range="bytes 0-1048575/1048576", Content_Length=1 << 20)
    with Hostile(for_ever(told, bytes(1 << 16))) as server:
        store = opened(server)
        for read in reads_of(store)[1:]:
            assert isinstance(refused(read), StorageError)


def test_a_body_longer_than_it_says_is_cut_where_it_says(opened: Opened) -> None:
    with Hostile(once(head(Content_Length=5) + b"12345-and-more")) as server:
        assert opened(server).get("refs/main") == b"12345"


def test_a_body_shorter_than_it_says_is_no_value(opened: Opened) -> None:
    with Hostile(once(head(Content_Length=50) + b"12345")) as server:
        for read in reads_of(opened(server)):
            refused(read)
        assert server.num_requests < 60


def test_an_answer_that_drips_or_does_not_end_is_given_up(opened: Opened) -> None:
    chunked = head(Transfer_Encoding="chunked")
    for serve in (drip(chunked, b"1\r\n \r\n"), for_ever(chunked, b"10000\r\n" + b" " * 65536 + b"\r\n")):
        with Hostile(serve) as server:
            store = opened(server)
            assert peak_bytes(lambda store=store: refused(lambda: list(store.list("")))) < 128 << 20  # type: ignore[misc]


def test_an_error_whose_text_does_not_end_is_an_error(opened: Opened) -> None:
    with Hostile(for_ever(head(403, Transfer_Encoding="chunked"), b"10000\r\n" + b"x" * 65536 + b"\r\n")) as server:
        store = opened(server)
        for call in (*reads_of(store), lambda: store.put("a", b"x"), lambda: store.delete("a")):
            assert peak_bytes(lambda call=call: refused(call)) < 128 << 20  # type: ignore[misc]
            assert len(str(refused(call))) < 2000


def test_headers_that_do_not_end_are_an_error(opened: Opened) -> None:
    with Hostile(for_ever(b"HTTP/1.1 200 OK\r\n", b"x-a: " + b"y" * 1000 + b"\r\n")) as server:
        assert peak_bytes(lambda: refused(lambda: opened(server).get("refs/main"))) < 32 << 20


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"HTTP/1.1 2",
        b"HTTP/1.1 200 OK\r\nx-a: ",
        head(Transfer_Encoding="chunked"),
        head(Transfer_Encoding="chunked") + b"5; ",
        head(Content_Length=60_000),
        head(Content_Length=60_000, Content_Encoding="gzip"),
        head(403, Content_Length=60_000),
    ],
    ids=["nothing", "status", "header", "size of a chunk", "extension of a chunk", "body", "packed body", "error"],
)
def test_an_answer_that_drips_wherever_it_is_is_given_up_in_time(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    for vendor in (gcs_requests, s3):
        monkeypatch.setattr(vendor, "_READ_TIMEOUT_S", 0.1)
    with Hostile(drip(begun, b"0")) as server:
        store = opened(server)
        for call in (lambda: store.get("refs/main"), lambda: list(store.list("")), lambda: store.put("a", b"x")):
            assert isinstance(refused(call), StorageError)


def _by_proxy(place: str, tmp_path: Path) -> dict[str, str]:
    return {"HTTPS_PROXY": place}


def _by_sts(place: str, tmp_path: Path) -> dict[str, str]:
    token = tmp_path / "token"
    token.write_text("token")
    role = {"AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/trainer", "AWS_WEB_IDENTITY_TOKEN_FILE": str(token)}
    return {**role, "AWS_ENDPOINT_URL_STS": place}


def _by_container(place: str, tmp_path: Path) -> dict[str, str]:
    return {"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{place}/credentials"}


def _by_instance(place: str, tmp_path: Path) -> dict[str, str]:
    return {"AWS_EC2_METADATA_SERVICE_ENDPOINT": place, "AWS_EC2_METADATA_DISABLED": "false"}


def _by_account(place: str, tmp_path: Path) -> dict[str, str]:
    account = {"type": "service_account", "client_email": "trainer@tests.iam", "private_key": pem(new_key())}
    (tmp_path / "account.json").write_text(json.dumps({**account, "token_uri": f"{place}/token"}))
    return {"GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path / "account.json")}


def _by_metadata(place: str, tmp_path: Path) -> dict[str, str]:
    host = place.removeprefix("http://")
    return {"GCE_METADATA_HOST": host, "GCE_METADATA_IP": host, "CLOUDSDK_CONFIG": str(tmp_path), "HOME": str(tmp_path)}


@pytest.mark.parametrize(
    ("store", "led"),
    [
        ("s3", _by_proxy), ("gs", _by_proxy), ("s3", _by_sts), ("s3", _by_container), ("s3", _by_instance),
        ("gs", _by_account), ("gs", _by_metadata),
    ],
)  # fmt: skip
def test_what_leads_to_a_bucket_is_given_up_in_time_when_it_drips(
    store: str, led: Callable[[str, Path], dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for vendor in (gcs_requests, s3):
        monkeypatch.setattr(vendor, "_READ_TIMEOUT_S", 0.1)
        monkeypatch.setattr(vendor, "_CONNECT_TIMEOUT_S", 0.1)
    monkeypatch.setattr(ContainerMetadataFetcher, "TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(ContainerMetadataFetcher, "SLEEP_TIME", 0.001)
    monkeypatch.setitem(BOTOCORE_DEFAUT_SESSION_VARIABLES, "metadata_service_timeout", (None, None, 0.1, float))
    monkeypatch.setattr(_metadata.ping, "__defaults__", (0.1, 1))  # seconds, tries
    if led is not _by_proxy:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with Hostile(drip(b"HTTP/1.1 200 OK\r\nMetadata-Flavor: Google\r\nx-a: ", b"0")) as server:
        for name, value in led(server.endpoint, tmp_path).items():
            monkeypatch.setenv(name, value)
        anonymous = "&anonymous=true" if store == "gs" and led is _by_proxy else ""
        opened = open_store(f"{store}://bucket/ckpts?endpoint=https://bucket.invalid{anonymous}")
        try:
            assert isinstance(refused(lambda: opened.get("refs/main")), StorageError)
            assert server.num_requests
        finally:
            opened.close()


@pytest.mark.parametrize("answer", [b"", b"\x00\xff" * 100, b"HTTP/9.9 999 x\r\n\r\n", b"HTTP/1.1 200\r\n\r\n{}"])
def test_what_is_no_answer_at_all_is_an_error(opened: Opened, answer: bytes) -> None:
    with Hostile(once(answer)) as server:
        store = opened(server)
        for call in (
            *reads_of(store),
            lambda: store.head("a"),
            lambda: list(store.list("")),
            lambda: store.put("a", b""),
        ):
            assert isinstance(refused(call), StorageError)


@pytest.mark.slow
def test_a_packed_answer_that_unfolds_to_gigabytes_is_dropped(opened: Opened) -> None:
    bomb = gzip.compress(b" " * (256 << 20), 1)
    told = head(Content_Encoding="gzip", Content_Length=len(bomb), Content_Type="application/json")
    with Hostile(once(told + bomb)) as server:
        store = opened(server)
        assert peak_bytes(lambda: refused(lambda: list(store.list("")))) < 160 << 20


@pytest.mark.slow
def test_xml_that_unfolds_to_gigabytes_is_an_error() -> None:
    entities = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10}">' for n in range(1, 12))
    body = (
        f'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY e0 "{"x" * 1000}">{entities}]><ListBucketResult><Name>&e11;</Name>'
    )
    answer = (body + "</ListBucketResult>").encode()
    for status in (200, 403):
        with Hostile(once(head(status, Content_Length=len(answer)) + answer)) as server:
            store = open_store(f"s3://bucket/ckpts?endpoint={server.endpoint}")
            assert peak_bytes(lambda store=store: refused(lambda: list(store.list("")))) < 64 << 20  # type: ignore[misc]
            store.close()


def test_leftovers_without_end_are_not_listed_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcs, "_MOST_PARTS_LISTED", 2000)
    number = itertools.count()

    def serve(first: str, connection: socket.socket) -> None:
        named = [next(number) for _ in range(500)]
        items = [
            {
                "name": f"ckpts/tmp/{one:032x}/00001", "size": "1", "generation": "1",
                "updated": "2020-01-01T00:00:00Z", "metadata": {"cas-ckpt-target": "ckpts/packs/a"},
            }
            for one in named
        ]  # fmt: skip
        body = json.dumps({"kind": "storage#objects", "items": items, "nextPageToken": f"t{named[-1]}"}).encode()
        connection.sendall(head(Content_Length=len(body)) + body)

    with Hostile(serve) as server:
        store = open_store(f"gs://bucket/ckpts?endpoint={server.endpoint}")
        assert isinstance(store, ObjectStore)
        assert isinstance(refused(lambda: store.sweep_temporaries(1e12)), TooLargeError)
        store.close()
    assert server.num_requests == 5


def test_uploads_and_parts_without_end_are_not_listed_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "_MOST_UPLOADS_LISTED", 2000)
    monkeypatch.setattr(s3.S3Bucket, "max_parts", 20)
    number = itertools.count(1)

    def serve(first: str, connection: socket.socket) -> None:
        at = next(number)
        begun = time.strftime("%Y-%m-%dT%H:%M:%SZ")
        one = f"<Upload><Key>ckpts/a</Key><UploadId>u</UploadId><Initiated>{begun}</Initiated></Upload>"
        uploads = f"<NextKeyMarker>k{at}</NextKeyMarker>{one * 500}<IsTruncated>true</IsTruncated>"
        parts = f"<IsTruncated>true</IsTruncated><NextPartNumberMarker>{at}</NextPartNumberMarker>"
        name, said = ("ListMultipartUploads", uploads) if "uploads" in first else ("ListParts", parts)
        body = f"<?xml version='1.0'?><{name}Result>{said}</{name}Result>".encode()
        connection.sendall(head(Content_Length=len(body)) + body)

    with Hostile(serve) as server:
        store = open_store(f"s3://bucket/ckpts?endpoint={server.endpoint}")
        assert isinstance(store, ObjectStore)
        assert isinstance(refused(lambda: store.sweep_temporaries(1e12)), TooLargeError)
        assert server.num_requests == 5
        assert isinstance(refused(lambda: store.bucket.upload_bytes("ckpts/a", "u")), TooLargeError)
        assert server.num_requests < 40
        store.close()


def test_a_nonce_of_strange_letters_is_just_another(opened: Opened) -> None:
    def serve(first: str, connection: socket.socket) -> None:
        if first.startswith(("PUT", "POST")):
            connection.sendall(head(500, Content_Length=0))
        else:
            told = json.dumps({"size": "1", "generation": "9", "metadata": {"cas-ckpt-nonce": "ä" * 32}}).encode()
            body = b"" if first.startswith("HEAD") else told
            connection.sendall(head(x_amz_meta_cas_ckpt_nonce="\xe4" * 32, Content_Length=len(body)) + body)

    with Hostile(serve) as server:
        assert isinstance(refused(lambda: opened(server).put_if_absent("a", b"x")), TransientStorageError)


def test_a_short_secret_is_hidden_as_a_word_and_a_long_one_wherever_it_is() -> None:
    said = bucket.shown("s3://bucket: b refused, key=b, xlong-secretx", ["b", "long-secret"])
    assert said == "s3://bucket: *** refused, key=***, x***x"
    assert bucket.is_clean(StorageError("bucket"), ["b"])
    assert not bucket.is_clean(StorageError("key=b"), ["b"])
