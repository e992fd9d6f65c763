"""S3: the conformance suite over a real server, and what is S3's alone: settings, secrets, processes, requests."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import pytest

from cas_ckpt import clock
from cas_ckpt.errors import CkptError, InvalidInputError, PermissionDeniedError
from cas_ckpt.storage import s3 as s3_module
from cas_ckpt.storage.object_store import ObjectStore
from cas_ckpt.storage.store import ListsVersions, Store
from cas_ckpt.storage.url import open_store
from cas_ckpt.testing import StoreConformance
from cas_ckpt.testing.store_values import at_once, noise
from tests.proxy import Proxy, s3_error, status
from tests.servers import KEY_ID, SECRET_KEY, S3Server
from tests.wrapped_stores import FaultyStore

PART = 256 << 10


class TestS3Store(StoreConformance):
    num_listed = 120

    @pytest.fixture(autouse=True)
    def _in_a_new_bucket(self, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(s3_module, "_PAGE", 50)
        self.url = s3.url(s3.new_bucket())

    def store(self) -> Store:
        return open_store(self.url)

    def reopened(self, store: Store) -> Store:
        return open_store(store.url)


class TestFaultyStoreOverS3(TestS3Store):
    def store(self) -> Store:
        return FaultyStore(open_store(self.url))


@pytest.fixture
def store(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    monkeypatch.setattr(s3_module, "_MIN_PART_BYTES", PART)
    made = opened(s3.url(s3.new_bucket(), part_bytes=PART))
    yield made
    made.close()


def opened(url: str) -> ObjectStore:
    store = open_store(url)
    assert isinstance(store, ObjectStore)
    return store


# --- requests -------------------------------------------------------------------------------------


def test_each_work_costs_as_few_requests_as_it_can(s3: S3Server, store: ObjectStore) -> None:
    with Proxy(s3.endpoint) as proxy:
        counted = opened(store.url.replace(s3.endpoint, proxy.endpoint))
        value = noise(4 * PART)

        def stream() -> None:
            with counted.open_writer("packs/long") as writer:
                writer.write(value)
                writer.commit()

        target = memoryview(bytearray(1000))
        for work, wanted in (
            (lambda: counted.put("a", b"1"), ["PUT"]),
            (lambda: counted.get("a"), ["GET"]),
            (lambda: counted.compare_and_swap("a", b"1", b"2"), ["PUT"]),
            (lambda: counted.compare_and_swap("a", b"2", b"3"), ["PUT"]),
            (lambda: counted.put_if_absent("b", b"1"), ["PUT"]),
            (stream, ["POST", "PUT", "PUT", "PUT", "PUT", "POST"]),
            (lambda: counted.get_tail("packs/long", 1000), ["GET"]),
            (lambda: counted.read_into("packs/long", 5, target), ["GET"]),
            (lambda: counted.get_range("packs/long", 0, 4 * PART), ["GET"] * 4),
            (lambda: counted.head("a"), ["HEAD"]),
            (lambda: list(counted.list("")), ["GET"]),
            (lambda: counted.delete("a"), ["DELETE"]),
            (lambda: counted.delete_many(["a", "b", "packs/long"]), ["POST"]),
        ):
            proxy.clear()
            work()
            assert [request.method for request in proxy.requests] == wanted
        counted.close()


def test_a_value_is_noted_only_as_it_was_read(s3: S3Server, store: ObjectStore) -> None:
    other = opened(store.url)
    store.put("a", b"one")
    other.put("a", b"two")
    other.put("a", b"one")  # the bytes that are expected, whatever happened in between
    store.compare_and_swap("a", b"one", b"three")
    assert other.get("a") == b"three"


def test_memory_of_uploads_is_bounded(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    small = opened(f"{store.url}&parallel=3")
    made: list[int] = []
    monkeypatch.setattr(
        small._workers, "buffer", lambda real=small._workers.buffer: (made.append(0), real())[1], raising=True
    )
    in_flight, most = set[int](), [0]
    real = small.bucket.put_part

    def put_part(name: str, upload: str, number: int, data: memoryview) -> str:
        in_flight.add(number)
        most.append(len(in_flight))
        try:
            return real(name, upload, number, data)
        finally:
            in_flight.discard(number)

    monkeypatch.setattr(small.bucket, "put_part", put_part)

    def stream(key: str) -> None:
        with small.open_writer(key) as writer:
            for _ in range(20):
                writer.write(bytes(PART))
            writer.commit()

    assert at_once(stream, ["a", "b", "c", "d"]) == [None] * 4
    assert max(most) <= 3
    assert small._workers._free == [], "nothing is kept when nobody writes"
    assert all(store.head(key) == 20 * PART for key in "abcd")


def test_a_listing_tells_what_changed(store: ObjectStore) -> None:
    assert isinstance(store, ListsVersions)
    store.put("a", b"1")
    store.put("b", b"1")
    before = {found.key: found.version for found in store.list_versions("")}
    store.put("a", b"2")
    after = {found.key: found.version for found in store.list_versions("")}
    assert before["a"] != after["a"] and before["b"] == after["b"]


# --- settings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("colour=red", "no setting 'colour'; known are checksum, endpoint"),
        ("parallel=0", "parallel='0': wanted a whole number from 1"),
        ("parallel=many", "wanted a whole number"),
        ("part_bytes=1", "part_bytes='1'"),
        ("requester_pays=yes", "one of false, true"),
        ("sse=rot13", "sse='rot13'"),
        ("kms_key_id=x", "goes with sse=aws:kms"),
        ("endpoint=ftp://x", "wanted https://"),
        ("parallel=2&parallel=3", "each setting once"),
        ("checksum=md5", "crc32, none"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(query: str, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        open_store(f"s3://bucket/prefix?{query}")


@pytest.mark.parametrize(
    "url", ["s3://", "s3:///x", "s3://b", "s3://bucket/a b", "s3://bucket/../x", "s3://bucket/tmp/x"]
)
def test_a_bucket_or_prefix_that_cannot_be_is_refused(url: str) -> None:
    with pytest.raises(InvalidInputError):
        open_store(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIAX:hunter2@bucket/x",
        "s3://hunter2@bucket/x",
        "s3://bucket/x?aws_secret_access_key=hunter2",
        "s3://bucket/x?token=hunter2",
        "s3://bucket/x?X-Amz-Signature=hunter2",
        "s3://bucket/x?endpoint=https://user:hunter2@host",
    ],
)
def test_credentials_in_a_url_are_refused_and_never_repeated(url: str) -> None:
    with pytest.raises(InvalidInputError, match="credentials") as found:
        open_store(url)
    assert "hunter2" not in "".join(traceback.format_exception(found.value))


def test_the_url_of_a_store_opens_it_again() -> None:
    text = (
        "s3://bucket/a/b?checksum=none&endpoint=https://host:9000&kms_key_id=arn:aws:kms:eu-west-1:1:key/2"
        "&parallel=4&part_bytes=6000000&path_style=false&profile=p&region=eu-west-1&requester_pays=true&sse=aws:kms"
        "&storage_class=STANDARD_IA"
    )
    assert opened(text).url == text
    assert opened(opened(text).url).bucket.settings == opened(text).bucket.settings  # type: ignore[attr-defined]
    assert opened("s3://bucket/").url == "s3://bucket"
    assert opened("s3://bucket//a//").prefix == "a/"


def test_settings_go_with_the_requests(s3: S3Server) -> None:
    bucket = s3.new_bucket()
    with Proxy(s3.endpoint) as proxy:
        store = opened(
            f"s3://{bucket}/x?endpoint={proxy.endpoint}&sse=aws:kms&kms_key_id=k1&storage_class=STANDARD_IA"
            "&requester_pays=true&region=eu-west-1"
        )
        store.put("a", b"1")
        told = proxy.requests[-1].headers
        assert told["x-amz-server-side-encryption"] == "aws:kms"
        assert told["x-amz-server-side-encryption-aws-kms-key-id"] == "k1"
        assert told["x-amz-storage-class"] == "STANDARD_IA"
        assert told["x-amz-request-payer"] == "requester"
        assert told["x-amz-checksum-crc32"]
        assert "/eu-west-1/s3/" in told["authorization"]
        assert "expect" not in told, "a round trip"
        assert store.get("a") == b"1"
        assert proxy.requests[-1].headers["x-amz-request-payer"] == "requester"
        plain = opened(f"s3://{bucket}/x?endpoint={proxy.endpoint}&checksum=none")
        plain.put("a", b"2")
        assert not [name for name in proxy.requests[-1].headers if "checksum" in name]
        store.close()
        plain.close()


def test_a_missing_boto3_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cas_ckpt.storage.s3")
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(InvalidInputError, match=r"pip install 'cas-ckpt\[s3\]'"):
        open_store("s3://bucket/x")


def test_what_boto3_cannot_find_is_said_in_our_words(monkeypatch: pytest.MonkeyPatch, s3: S3Server) -> None:
    with pytest.raises(InvalidInputError, match="profile"):
        open_store("s3://bucket/x?profile=nobody").get("a")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(PermissionDeniedError, match="no credentials"):
        open_store(s3.url("bucket")).get("a")


# --- secrets ----------------------------------------------------------------------------------------


def test_no_text_of_ours_holds_a_secret(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token-of-the-tests-0123456789")
    caplog.set_level(logging.INFO)
    bucket = s3.new_bucket()
    with Proxy(s3.endpoint) as proxy:
        store = opened(S3Server(proxy.endpoint).url(bucket))
        texts = [repr(store), repr(store.bucket), repr(store.abilities), store.url]
        store.put("a", b"x")
        sent = proxy.requests[-1].headers
        secrets = (SECRET_KEY, "token-of-the-tests-0123456789", sent["authorization"].rpartition("=")[2])
        assert sent["x-amz-security-token"] == secrets[1]
        # A hostile server says back what it was told.
        echo = f"{secrets[0]} {secrets[1]}"
        for trouble in (s3_error(403, "AccessDenied", echo), s3_error(400, "Odd", echo), status(404)):
            for call in (
                lambda: store.get("a"),
                lambda: store.put("a", b""),
                lambda: store.head("a"),
                lambda: list(store.list("")),
                lambda: store.delete_many(["a", "b"]),
                lambda: store.sweep_temporaries(clock.now_s()),
            ):
                proxy.clear()
                proxy.plan(trouble, times=100)
                try:
                    call()
                except CkptError as error:
                    texts += [str(error), repr(error), "".join(traceback.format_exception(error))]
        names = f"<Key>some/where/a</Key><Code>{echo}</Code><Message>{echo}</Message>"
        answers = (
            (f"<DeleteResult><Error>{names}</Error></DeleteResult>", lambda: store.delete_many(["a", "b"])),
            (f"<ListBucketResult><KeyCount>{echo}</KeyCount></ListBucketResult>", lambda: list(store.list(""))),
        )
        for body, call in answers:
            proxy.clear()
            proxy.plan(status(200, f"<?xml version='1.0'?>{body}".encode()), times=100)
            with pytest.raises(CkptError) as found:
                call()
            texts += [str(found.value), repr(found.value), "".join(traceback.format_exception(found.value))]
        proxy.clear()
        proxy.plan(status(301), times=10_000)
        with pytest.raises(CkptError, match="redirect"):
            store.get("a")
        store.close()
    texts.append(caplog.text)
    assert len(texts) > 40
    assert [text for text in texts if any(secret in text for secret in secrets)] == []
    assert KEY_ID not in store.url


# --- processes --------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_connections_of_its_own(store: ObjectStore) -> None:
    value = noise(4 * PART)
    store.put("a", value)
    assert store.get_range("a", 0, len(value)) == value
    child = os.fork()
    if not child:
        code = 1
        try:
            with store.open_writer("of the child".replace(" ", "-")) as writer:
                writer.write(value)
                writer.commit()
            code = 0 if store.get_range("a", 0, len(value)) == value else 2
        finally:
            os._exit(code)
    for _ in range(20):
        assert store.get_range("a", 0, len(value)) == value
    assert os.waitpid(child, 0)[1] == 0
    assert store.get("of-the-child") == value


def test_a_closed_store_can_be_closed_again_and_asked_again(store: ObjectStore) -> None:
    store.put("a", b"x")
    for _ in range(2):
        store.close()
    assert store.get("a") == b"x"


def test_a_bucket_that_is_not_there_is_no_missing_key(s3: S3Server) -> None:
    store = open_store(s3.url("nobody-made-this"))
    calls: list[Any] = [lambda: store.get("a"), lambda: store.put("a", b""), lambda: list(store.list(""))]
    for call in calls:
        with pytest.raises(CkptError, match="there is no such bucket: create it"):
            call()
