"""S3 over a bad network, and from a server in trouble: what is written is there once and whole, reads are right."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import botocore
import pytest
from botocore.retries import standard

from cas_ckpt import clock
from cas_ckpt.errors import NotFoundError, PermissionDeniedError, StorageError, TransientStorageError
from cas_ckpt.storage import object_parts
from cas_ckpt.storage import s3 as s3_module
from tests.proxy import Fault, Proxy, Request, drop_reply, edit, s3_error, status
from tests.servers import S3Server
from tests.storage.bad_luck import LONG, PART, BadLuck, Place, is_refused, sits_out


class S3Place(Place):
    write = "PUT"
    parts = "partNumber"
    completion = "uploadId"
    completed_before = s3_error(404, "NoSuchUpload")
    part_error = "packs/long"
    version_header: ClassVar = {"ETag": '"x"'}

    def __init__(self, server: S3Server, proxy: Proxy) -> None:
        self.server = server
        self.bucket = server.new_bucket()
        urls = (each.url(self.bucket, part_bytes=PART) for each in (server, S3Server(proxy.endpoint)))
        super().__init__(proxy, *urls)

    def uploads(self) -> list[Any]:
        return self.server.client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", [])

    def leftovers(self) -> list[str]:
        return [upload["Key"] for upload in self.uploads()]

    def asks_for_a_version(self, request: Request) -> bool:
        return "if-match" in request.headers

    def refusal(self, code: int, name: str, message: str) -> Fault:
        return s3_error(code, name, message)

    def impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(s3_module, "_READ_TIMEOUT_S", 0.3)

    def small_pages(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(s3_module, "_PAGE", 3)


@pytest.fixture
def place(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Place]:
    # The pauses between retries are the vendor's and take seconds: here only that they are taken matters.
    monkeypatch.setattr(standard.ExponentialBackoff, "delay_amount", lambda self, context: 0.001)
    monkeypatch.setattr(object_parts, "_BREAK_PAUSE_S", 0.001)
    monkeypatch.setattr(object_parts, "MIN_UPLOAD_AGE_S", -1e9)
    monkeypatch.setattr(s3_module, "_MIN_PART_BYTES", PART)
    with Proxy(s3.endpoint) as proxy:
        place = S3Place(s3, proxy)
        yield place
        place.close()


class TestS3(BadLuck):
    pass


# --- a server in trouble -------------------------------------------------------------------------


BARE_429 = pytest.mark.skipif(
    tuple(map(int, botocore.__version__.split(".")[:2])) < (1, 44),
    reason="botocore repeats a request that got 429 without a code in its body from 1.44 on",
)


@pytest.mark.parametrize(
    "trouble",
    [
        s3_error(500, "InternalError"),
        s3_error(503, "SlowDown"),
        status(503),
        pytest.param(status(429), marks=BARE_429),
        s3_error(400, "RequestTimeout"),
    ],
    ids=["500", "SlowDown", "503 without words", "429", "RequestTimeout"],
)
def test_a_storm_is_sat_out(place: S3Place, trouble: Any) -> None:
    sits_out(place, trouble, when=lambda request: request.method != "HEAD" or trouble.status >= 429)


def test_a_storm_without_end_is_a_failure_that_may_pass(place: S3Place) -> None:
    place.proxy.plan(s3_error(503, "SlowDown"), times=100_000)
    with pytest.raises(TransientStorageError, match="SlowDown.*try later"):
        place.store.get("a")
    with pytest.raises(TransientStorageError, match="a in s3://"):
        place.store.put_if_absent("a", b"x")
    with pytest.raises(TransientStorageError):
        list(place.store.list(""))


# --- replies that are lost -----------------------------------------------------------------------


@pytest.mark.parametrize("answer", [None, s3_error(404, "NoSuchUpload")], ids=["asked again", "NoSuchUpload"])
def test_a_completion_whose_reply_is_lost_is_known_to_be_ours(place: S3Place, answer: Any) -> None:
    place.proxy.plan(drop_reply(), method="POST", match="uploadId")
    if answer is not None:
        place.proxy.plan(answer, method="POST", match="uploadId")
    place.stream("packs/long", LONG)
    assert place.behind.get("packs/long") == LONG
    assert place.uploads() == []


def test_an_upload_that_somebody_swept_is_an_error_and_no_value(place: S3Place) -> None:
    with place.store.open_writer("packs/long") as writer:
        writer.write(LONG)
        for upload in place.uploads():
            place.server.client.abort_multipart_upload(
                Bucket=place.bucket, Key=upload["Key"], UploadId=upload["UploadId"]
            )
        with pytest.raises(StorageError, match="packs/long"):
            writer.commit()
    with pytest.raises(NotFoundError):
        place.behind.head("packs/long")


def test_a_write_beside_another_is_asked_for_again(place: S3Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_module, "_CONFLICT_PAUSE_S", 0.001)
    place.proxy.plan(s3_error(409, "ConditionalRequestConflict"), method="PUT", times=3)
    place.store.put_if_absent("a", b"x")
    place.proxy.plan(s3_error(409, "ConditionalRequestConflict"), method="PUT", times=3)
    place.store.compare_and_swap("a", b"x", b"y")
    assert place.behind.get("a") == b"y"


def test_a_write_that_was_done_is_no_conflict_though_its_reply_was_lost_and_then_another_was_under_way(
    place: S3Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Done without a reply; repeated, refused by 409; asked for again, and the condition fails by what was done."""
    monkeypatch.setattr(s3_module, "_CONFLICT_PAUSE_S", 0.001)
    for write in (lambda: place.store.put_if_absent("a", b"x"), lambda: place.store.compare_and_swap("a", b"x", b"y")):
        place.proxy.plan(drop_reply(), method="PUT")
        place.proxy.plan(s3_error(409, "ConditionalRequestConflict"), method="PUT")
        write()
    assert place.behind.get("a") == b"y"


# --- rights, clocks ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        ("AccessDenied", PermissionDeniedError, "policy"),
        ("ExpiredToken", PermissionDeniedError, "renew them"),
        ("InvalidAccessKeyId", PermissionDeniedError, "profile"),
        ("SignatureDoesNotMatch", PermissionDeniedError, "secret key"),
        ("RequestTimeTooSkewed", PermissionDeniedError, "clock"),
        ("InvalidObjectState", PermissionDeniedError, "archive"),
        ("NoSuchBucket", StorageError, "create it"),
        ("SomethingNew", StorageError, "SomethingNew"),
    ],
)
def test_a_refusal_has_its_kind_and_says_what_to_do(place: S3Place, code: str, kind: type, said: str) -> None:
    is_refused(place, s3_error(403, code), kind, f"refs/main.*{said}")


def test_of_many_keys_those_that_may_not_be_deleted_are_named(place: S3Place) -> None:
    names = [f"packs/{number}" for number in range(5)]
    for name in names:
        place.behind.put(name, b"x")
    denied = "<Error><Key>some/where/packs/3</Key><Code>AccessDenied</Code><Message>no</Message></Error>"
    body = f"<?xml version='1.0'?><DeleteResult>{denied}</DeleteResult>".encode()
    place.proxy.plan(status(200, body), method="POST", match="delete")
    with pytest.raises(PermissionDeniedError, match="packs/3.*AccessDenied"):
        place.store.delete_many(names)
    place.store.delete_many(names)
    assert list(place.behind.list("")) == []
    assert place.proxy.count("POST", "delete") == 2, "one request for all of them"


def test_leftovers_are_as_old_as_the_server_says(place: S3Place) -> None:
    place.server.client.create_multipart_upload(Bucket=place.bucket, Key="some/where/packs/left")
    upload = place.uploads()[0]["UploadId"]
    place.server.client.upload_part(
        Bucket=place.bucket, Key="some/where/packs/left", UploadId=upload, PartNumber=1, Body=b"x" * 1000
    )
    place.server.client.create_multipart_upload(Bucket=place.bucket, Key="elsewhere/packs/left")
    now_s = clock.now_s()
    begun = time.strftime("<Initiated>%Y-%m-%dT%H:%M:%SZ</Initiated>", time.gmtime(now_s - 1)).encode()
    place.proxy.plan(edit(lambda body: re.sub(rb"<Initiated>.*?</Initiated>", begun, body)), match="uploads", times=99)
    for skew_s in (-7200, 7200):
        with clock.fixed(lambda skew_s=skew_s: now_s + skew_s):  # type: ignore[misc]
            assert place.store.sweep_temporaries(clock.now_s() - 60).num_files == 0, "it is a second old"
            found = place.store.sweep_temporaries(clock.now_s() + 60, dry_run=True)
            assert (found.num_files, found.num_bytes) == (1, 1000)
    with place.store.open_writer("packs/mine") as writer:
        writer.write(LONG)
        assert place.behind.sweep_temporaries(clock.now_s() + 60).num_files == 1
        writer.commit()
    assert place.behind.get("packs/mine") == LONG, "what this process is writing is no leftover"
    assert [each["Key"] for each in place.uploads()] == ["elsewhere/packs/left"]


@pytest.mark.parametrize(("age_s", "swept"), [(1800, 0), (7200, 1)])
def test_an_upload_that_a_living_writer_elsewhere_may_have_is_spared(
    place: S3Place, monkeypatch: pytest.MonkeyPatch, age_s: int, swept: int
) -> None:
    monkeypatch.undo()
    place.server.client.create_multipart_upload(Bucket=place.bucket, Key="some/where/packs/left")
    begun = time.strftime("<Initiated>%Y-%m-%dT%H:%M:%SZ</Initiated>", time.gmtime(clock.now_s() - age_s)).encode()
    place.proxy.plan(edit(lambda body: re.sub(rb"<Initiated>.*?</Initiated>", begun, body)), match="uploads", times=99)
    assert place.store.sweep_temporaries(clock.now_s()).num_files == swept
    assert len(place.uploads()) == 1 - swept


# --- listings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda body: body[: len(body) // 2], StorageError),
        (lambda body: re.sub(rb"<Contents>.*?</Contents>", b"", body, count=1), TransientStorageError),
        (lambda body: body.replace(b"<IsTruncated>false", b"<IsTruncated>true"), StorageError),
        (lambda body: body.replace(b"some/where/k1", b"some/where/k7"), StorageError),
        (lambda body: body.replace(b"<Size>0</Size>", b"<Size>-5</Size>"), StorageError),
        (lambda body: body.replace(b"<Size>0</Size>", b"<Size>x</Size>"), StorageError),
        (lambda _: b"", StorageError),
        (lambda _: b"<html/>", StorageError),
        (lambda _: b"<ListBucketResult/>", StorageError),
    ],
    ids=[
        "XML cut short",
        "an entry missing",
        "endless",
        "out of order",
        "negative size",
        "no size",
        "no body",
        "a page for people",
        "no fields",
    ],
)
def test_a_listing_that_cannot_be_right_is_an_error(place: S3Place, change: Any, kind: type) -> None:
    for number in range(3):
        place.behind.put(f"k{number}", b"")
    place.proxy.plan(edit(change), method="GET", times=1000)
    with pytest.raises(kind):
        list(place.store.list(""))


def test_objects_that_are_no_keys_are_not_listed(place: S3Place) -> None:
    for name in (
        "some/where/",
        "some/where/a b",
        "some/where/ä",
        "some/where/tmp/x",
        "some/where/a//b",
        "some/whereto",
    ):
        place.server.client.put_object(Bucket=place.bucket, Key=name, Body=b"x")
    place.behind.put("a", b"x")
    assert list(place.store.list("")) == [("a", 1)]
    place.proxy.plan(edit(lambda body: body.replace(b"some/where/a<", b"some/other/a<")), method="GET")
    assert list(place.store.list("a")) == []
