"""S3 over a bad network, and from a server in trouble: what is written is there once and whole, reads are right."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import botocore
import pytest
from botocore.retries import standard

from cas_ckpt import clock
from cas_ckpt.errors import (
    ConflictError,
    CorruptionError,
    NotFoundError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from cas_ckpt.storage import object_reads, object_uploads
from cas_ckpt.storage import s3 as s3_module
from cas_ckpt.storage.object_store import ObjectStore
from cas_ckpt.storage.url import open_store
from cas_ckpt.testing.store_values import noise
from tests.proxy import Proxy, cut_reply, cut_request, delay, drop_reply, edit, s3_error, status
from tests.servers import S3Server

PART = 256 << 10
LONG = noise(2 * PART + 12_345)
"""A value of three parts."""


class Place:
    """A bucket behind a proxy, with a store that goes through it and a view that does not."""

    def __init__(self, server: S3Server, proxy: Proxy) -> None:
        self.proxy = proxy
        self.server = server
        self.bucket = server.new_bucket()
        self.behind = self.opened(server.url(self.bucket, part_bytes=PART))
        self.store = self.opened(S3Server(proxy.endpoint).url(self.bucket, part_bytes=PART))
        self.store.list("")  # nothing is asked before the first page is wanted

    def opened(self, url: str) -> ObjectStore:
        store = open_store(url)
        assert isinstance(store, ObjectStore)
        return store

    def uploads(self) -> list[Any]:
        return self.server.client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", [])

    def stream(self, key: str, value: bytes) -> None:
        with self.store.open_writer(key) as writer:
            for at in range(0, len(value), 100_000):
                writer.write(value[at : at + 100_000])
            writer.commit()


@pytest.fixture
def place(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    # The pauses between retries are the vendor's and take seconds: here only that they are taken matters.
    monkeypatch.setattr(standard.ExponentialBackoff, "delay_amount", lambda self, context: 0.001)
    monkeypatch.setattr(object_reads, "_BREAK_PAUSE_S", 0.001)
    monkeypatch.setattr(object_uploads, "MIN_UPLOAD_AGE_S", -1e9)
    monkeypatch.setattr(s3_module, "_MIN_PART_BYTES", PART)
    with Proxy(s3.endpoint) as proxy:
        place = Place(s3, proxy)
        yield place
        place.store.close()
        place.behind.close()


# --- the connection is cut ----------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 100_000])
def test_an_upload_that_is_cut_in_the_middle_is_sent_again(place: Place, at: int) -> None:
    place.proxy.plan(cut_request(at), method="PUT", match="small")
    place.store.put("small", LONG[:PART])
    assert place.behind.get("small") == LONG[:PART]
    place.proxy.plan(cut_request(at), method="PUT", match="partNumber", times=3)
    place.stream("packs/long", LONG)
    assert place.behind.get("packs/long") == LONG
    assert place.uploads() == []


def test_an_upload_that_never_goes_through_leaves_nothing_and_says_so(place: Place) -> None:
    place.proxy.plan(cut_request(1000), method="PUT", match="partNumber=2", times=1000)
    with pytest.raises(TransientStorageError, match="packs/long"):
        place.stream("packs/long", LONG)
    assert place.uploads() == [], "its parts are not paid for"
    with pytest.raises(NotFoundError):
        place.behind.head("packs/long")


@pytest.mark.parametrize("at", [0, 1, 70_000, 399_999])
def test_a_read_that_breaks_off_goes_on_where_it_stopped(place: Place, at: int) -> None:
    value = LONG[:500_000]
    place.behind.put("value", value)
    target = bytearray(400_000)
    for read, wanted in (
        (lambda: place.store.get("value"), value),
        (lambda: bytes(place.store.get_range("value", 5, 400_000)), value[5:400_005]),
        (lambda: place.store.get_tail("value", 400_000), (len(value), value[-400_000:])),
        (lambda: (place.store.read_into("value", 7, memoryview(target)), bytes(target))[1], value[7:400_007]),
    ):
        place.proxy.clear()
        place.proxy.plan(cut_reply(at), method="GET", match="value")
        assert read() == wanted
        asked = [request for request in place.proxy.requests if request.method == "GET"]
        assert len(asked) == 2
        assert "if-match" in asked[1].headers, "the rest is asked of the same version"
        assert not at or asked[1].headers["range"] != asked[0].headers.get("range"), "what came is not asked for again"


def test_parts_of_a_long_range_break_off_and_go_on_by_themselves(place: Place) -> None:
    place.behind.put("value", LONG)
    place.proxy.plan(cut_reply(200_000), method="GET", match="value", times=3)
    assert place.store.get_range("value", 0, len(LONG)) == LONG


def test_a_read_that_breaks_off_again_and_again_is_given_up(place: Place) -> None:
    place.behind.put("value", LONG[:500_000])
    place.proxy.plan(cut_reply(10), method="GET", match="value", times=1000)
    with pytest.raises(TransientStorageError, match="value"):
        place.store.get("value")
    assert place.proxy.count("GET", "value") < 10


@pytest.mark.parametrize("size", [PART, len(LONG)], ids=["one request", "parts"])
def test_two_values_are_never_mixed(place: Place, size: int) -> None:
    first, second = noise(size, seed=1), noise(size, seed=2)
    place.behind.put("value", first)
    replaced: list[bool] = []

    def replace(body: bytes) -> bytes:
        if not replaced:
            replaced.append(True)
            place.behind.put("value", second)
        return body

    # What came of the old value is whole (or cut, in the next test); what is asked for next is of the new one.
    place.proxy.plan(cut_reply(200_000), method="GET", match="value")
    place.proxy.plan(edit(replace), method="GET", match="value", times=1000)
    for _ in range(3):
        assert place.store.get_range("value", 0, size) in (first, second)
    assert place.store.get("value") == second
    assert place.behind.get("value") == second


def test_a_value_replaced_between_the_break_and_the_rest_is_read_anew(place: Place) -> None:
    first, second = noise(400_000, seed=1), noise(400_000, seed=2)
    place.behind.put("value", first)

    def break_off(request: object) -> bool:
        place.behind.put("value", second)  # when the rest is asked for
        return False

    place.proxy.plan(cut_reply(200_000), method="GET", match="value")
    place.proxy.plan(status(500), method="GET", match="value", when=lambda r: "if-match" in r.headers and break_off(r))
    for read in (lambda: place.store.get("value"), lambda: bytes(place.store.get_range("value", 0, 400_000))):
        assert read() == second


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
def test_a_storm_is_sat_out(place: Place, trouble: Any) -> None:
    for work in (
        lambda: place.store.put("a", b"x"),
        lambda: place.store.put_if_absent("b", b"x"),
        lambda: place.store.compare_and_swap("a", b"x", b"y"),
        lambda: place.stream("c", LONG),
        lambda: place.store.get("a"),
        lambda: place.store.get_tail("c", 10),
        lambda: place.store.head("a"),
        lambda: list(place.store.list("")),
        lambda: place.store.delete("b"),
        lambda: place.store.delete_many(["a", "b"]),
    ):
        place.proxy.plan(trouble, times=3, when=lambda request: request.method != "HEAD" or trouble.status >= 429)
        work()
        place.proxy.clear()
    assert [key for key, _ in place.behind.list("")] == ["c"]
    assert place.behind.get("c") == LONG


def test_a_storm_without_end_is_a_failure_that_may_pass(place: Place) -> None:
    place.proxy.plan(s3_error(503, "SlowDown"), times=100_000)
    with pytest.raises(TransientStorageError, match="SlowDown.*try later"):
        place.store.get("a")
    with pytest.raises(TransientStorageError, match="a in s3://"):
        place.store.put_if_absent("a", b"x")
    with pytest.raises(TransientStorageError):
        list(place.store.list(""))


def test_a_slow_reply_is_waited_for_and_one_that_never_comes_is_asked_for_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_module, "_READ_TIMEOUT_S", 0.3)
    place.behind.put("a", b"value")
    place.proxy.plan(delay(0.1), method="GET")
    assert place.store.get("a") == b"value"
    place.proxy.plan(delay(1.0), method="GET")
    assert place.store.get("a") == b"value"
    place.proxy.plan(delay(1.0), method="PUT")
    place.store.put_if_absent("b", b"value")
    assert place.behind.get("b") == b"value"


# --- replies that are lost -----------------------------------------------------------------------


def test_a_create_whose_reply_is_lost_is_known_to_be_ours(place: Place) -> None:
    place.proxy.plan(drop_reply(), method="PUT")
    place.store.put_if_absent("a", b"mine")
    assert place.behind.get("a") == b"mine"
    with pytest.raises(ConflictError):
        place.store.put_if_absent("a", b"mine")


def test_a_swap_whose_reply_is_lost_is_known_to_be_ours(place: Place) -> None:
    place.behind.put("a", b"one")
    for before, after in ((b"one", b"two"), (b"two", b"three")):
        place.proxy.clear()
        place.proxy.plan(drop_reply(), method="PUT")
        place.store.compare_and_swap("a", before, after)
        assert place.behind.get("a") == after
    with pytest.raises(ConflictError):
        place.store.compare_and_swap("a", b"two", b"three")


@pytest.mark.parametrize("there", [False, True])
def test_a_lost_reply_with_anothers_write_behind_it_is_an_unknown_outcome(place: Place, there: bool) -> None:
    if there:
        place.behind.put("a", b"one")

    def overtaken(request: object) -> bool:
        place.behind.put("a", b"of another")
        return False

    place.proxy.plan(drop_reply(), method="PUT")
    place.proxy.plan(status(500), method="PUT", when=overtaken)
    store = place.store
    write = partial(store.compare_and_swap, "a", b"one") if there else partial(store.put_if_absent, "a")
    with pytest.raises(TransientStorageError, match="a"):
        write(b"mine")
    assert place.behind.get("a") == b"of another"


def test_a_conflict_that_nobody_retried_is_a_conflict_and_costs_one_request(place: Place) -> None:
    place.behind.put("a", b"one")
    place.proxy.clear()
    with pytest.raises(ConflictError):
        place.store.put_if_absent("a", b"mine")
    assert [request.method for request in place.proxy.requests] == ["PUT"]


@pytest.mark.parametrize("answer", [None, s3_error(404, "NoSuchUpload")], ids=["asked again", "NoSuchUpload"])
def test_a_completion_whose_reply_is_lost_is_known_to_be_ours(place: Place, answer: Any) -> None:
    place.proxy.plan(drop_reply(), method="POST", match="uploadId")
    if answer is not None:
        place.proxy.plan(answer, method="POST", match="uploadId")
    place.stream("packs/long", LONG)
    assert place.behind.get("packs/long") == LONG
    assert place.uploads() == []


def test_an_upload_that_somebody_swept_is_an_error_and_no_value(place: Place) -> None:
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


def test_a_completion_that_is_refused_leaves_the_first_value_and_no_parts(place: Place) -> None:
    place.behind.put("packs/long", b"first")
    with pytest.raises(ConflictError, match="packs/long"):
        place.stream("packs/long", LONG)
    assert place.behind.get("packs/long") == b"first"
    assert place.uploads() == []


def test_a_write_beside_another_is_asked_for_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_module, "_CONFLICT_PAUSE_S", 0.001)
    place.proxy.plan(s3_error(409, "ConditionalRequestConflict"), method="PUT", times=3)
    place.store.put_if_absent("a", b"x")
    place.proxy.plan(s3_error(409, "ConditionalRequestConflict"), method="PUT", times=3)
    place.store.compare_and_swap("a", b"x", b"y")
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
def test_a_refusal_has_its_kind_and_says_what_to_do(place: Place, code: str, kind: type, said: str) -> None:
    place.proxy.plan(s3_error(403, code), times=1000)
    for call in (
        lambda: place.store.get("refs/main"),
        lambda: place.store.put("refs/main", b""),
        lambda: place.store.put_if_absent("refs/main", b""),
        lambda: place.store.delete("refs/main"),
    ):
        with pytest.raises(kind, match=f"refs/main.*{said}") as found:
            call()
        assert not isinstance(found.value, NotFoundError)


def test_of_many_keys_those_that_may_not_be_deleted_are_named(place: Place) -> None:
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


def test_leftovers_are_as_old_as_the_server_says(place: Place) -> None:
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
    place: Place, monkeypatch: pytest.MonkeyPatch, age_s: int, swept: int
) -> None:
    monkeypatch.undo()
    place.server.client.create_multipart_upload(Bucket=place.bucket, Key="some/where/packs/left")
    begun = time.strftime("<Initiated>%Y-%m-%dT%H:%M:%SZ</Initiated>", time.gmtime(clock.now_s() - age_s)).encode()
    place.proxy.plan(edit(lambda body: re.sub(rb"<Initiated>.*?</Initiated>", begun, body)), match="uploads", times=99)
    assert place.store.sweep_temporaries(clock.now_s()).num_files == swept
    assert len(place.uploads()) == 1 - swept


# --- listings -----------------------------------------------------------------------------------------


def test_a_page_that_fails_in_the_middle_of_a_listing_is_no_end(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_module, "_PAGE", 3)
    wanted = [f"k{number}" for number in range(10)]
    for key in wanted:
        place.behind.put(key, b"")
    place.proxy.plan(status(500), method="GET", after=2)
    assert [key for key, _ in place.store.list("")] == wanted
    place.proxy.plan(status(500), method="GET", after=2, times=1000)
    with pytest.raises(TransientStorageError):
        list(place.store.list(""))


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda body: body[: len(body) // 2], StorageError),
        (lambda body: re.sub(rb"<Contents>.*?</Contents>", b"", body, count=1), TransientStorageError),
        (lambda body: body.replace(b"<IsTruncated>false", b"<IsTruncated>true"), StorageError),
        (lambda body: body.replace(b"some/where/k1", b"some/where/k7"), StorageError),
        (lambda body: body.replace(b"<Size>0</Size>", b"<Size>-5</Size>"), StorageError),
        (lambda body: body.replace(b"<Size>0</Size>", b"<Size>x</Size>"), StorageError),
    ],
    ids=["XML cut short", "an entry missing", "endless", "out of order", "negative size", "no size"],
)
def test_a_listing_that_cannot_be_right_is_an_error(place: Place, change: Any, kind: type) -> None:
    for number in range(3):
        place.behind.put(f"k{number}", b"")
    place.proxy.plan(edit(change), method="GET", times=1000)
    with pytest.raises(kind):
        list(place.store.list(""))


def test_objects_that_are_no_keys_are_not_listed(place: Place) -> None:
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


# --- a server that lies -----------------------------------------------------------------------------


def test_a_range_of_other_bytes_than_asked_for_is_refused(place: Place) -> None:
    place.behind.put("value", LONG[:1000])
    headers = {"Content-Range": "bytes 0-9/1000", "ETag": '"x"'}
    place.proxy.plan(status(206, b"0123456789", **headers), method="GET", times=1000)
    with pytest.raises(StorageError, match="value"):
        place.store.get_range("value", 5, 10)
    place.proxy.clear()
    place.proxy.plan(status(200, LONG[:1000], ETag='"x"'), method="GET", times=1000)
    with pytest.raises(StorageError, match="value"):
        place.store.get_range("value", 5, 10)


def test_a_huge_claim_takes_no_memory(place: Place) -> None:
    place.behind.put("value", b"x")
    place.proxy.plan(edit(lambda body: body), method="GET")
    assert place.store.get("value") == b"x"
    with pytest.raises(CorruptionError, match="ends at 1"):
        place.store.get_range("value", 0, 1 << 50)
