"""Cloud Storage over a bad network, and in trouble: what is written is there once and whole, reads are right."""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from cas_ckpt import clock
from cas_ckpt.errors import (
    ConflictError,
    CorruptionError,
    NotFoundError,
    PermissionDeniedError,
    StorageError,
    TransientStorageError,
)
from cas_ckpt.storage import bucket, gcs_requests, object_parts
from cas_ckpt.storage import gcs as gcs_module
from cas_ckpt.testing.store_values import noise
from tests.proxy import Fault, Proxy, Request, drop_reply, edit, status
from tests.servers import GcsServer
from tests.storage.bad_luck import LONG, PART, BadLuck, Place, is_refused, sits_out

UPLOAD, COMPOSE, PARTS = "/upload/", "/compose", "some/where/tmp/"


def refusal(code: int, message: str = "by plan") -> Fault:
    """An error as Cloud Storage words it."""
    return status(code, json.dumps({"error": {"code": code, "message": message}}).encode())


class GcsPlace(Place):
    write = "POST"
    parts = UPLOAD
    completion = COMPOSE
    completed_before = refusal(412)
    part_error = "gs://"
    version_header: ClassVar = {"X-Goog-Generation": "7"}

    def __init__(self, server: GcsServer, proxy: Proxy) -> None:
        self.server = server
        self.bucket = server.new_bucket()
        urls = (each.url(self.bucket, part_bytes=PART) for each in (server, GcsServer(proxy.endpoint)))
        super().__init__(proxy, *urls)

    def names(self, prefix: str = "") -> list[str]:
        return [blob.name for blob in self.server.client.list_blobs(self.bucket, prefix=prefix)]

    def leftovers(self) -> list[str]:
        return self.names(PARTS)

    def asks_for_a_version(self, request: Request) -> bool:
        return "generation=" in request.target

    def refusal(self, code: int, name: str, message: str) -> Fault:
        return refusal(code, message)

    def impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gcs_requests, "_READ_TIMEOUT_S", 0.3)

    def small_pages(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gcs_module, "_PAGE", 3)


@pytest.fixture
def place(gcs: GcsServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsPlace]:
    # The pauses between retries take seconds: here only that they are taken matters.
    monkeypatch.setattr(gcs_requests, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(gcs_requests, "_LONGEST_PAUSE_S", 0.002)
    monkeypatch.setattr(object_parts, "_BREAK_PAUSE_S", 0.001)
    monkeypatch.setattr(object_parts, "MIN_UPLOAD_AGE_S", -1e9)
    monkeypatch.setattr(gcs_module, "_MIN_PART_BYTES", PART)
    with Proxy(gcs.endpoint) as proxy:
        place = GcsPlace(gcs, proxy)
        yield place
        place.close()


# --- values in parts ------------------------------------------------------------------------------


@pytest.mark.parametrize("num_parts", [2, 32, 33, 70])
def test_a_value_of_many_parts_is_whole_and_leaves_no_part(place: GcsPlace, num_parts: int) -> None:
    value = noise(PART, seed=num_parts) * (num_parts - 1) + b"the end"
    place.stream("packs/long", value)
    assert place.behind.get_tail("packs/long", 1 << 30)[1] == value
    assert place.names() == ["some/where/packs/long"]
    assert place.proxy.count("DELETE") == 0, "the service removes the parts, for nothing and for good"
    assert place.proxy.count("POST", COMPOSE) == (1 if num_parts <= 32 else 1 + -(-num_parts // 32))


def test_of_two_long_values_for_one_key_one_wins(place: GcsPlace) -> None:
    values = [noise(3 * PART, seed=seed) for seed in range(3)]
    lost: list[ConflictError] = []
    ready = threading.Barrier(len(values))

    def write(value: bytes) -> None:
        with place.store.open_writer("packs/long") as writer:
            writer.write(value)
            ready.wait()
            try:
                writer.commit()
            except ConflictError as error:
                lost.append(error)

    threads = [threading.Thread(target=write, args=(value,)) for value in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lost) == 2
    assert place.behind.get("packs/long") in values
    assert place.names(PARTS) == []


def test_parts_that_the_service_does_not_remove_are_removed(place: GcsPlace) -> None:
    place.proxy.plan(edit(lambda body: body), match=COMPOSE)  # nothing is changed: the server here removes them
    kept = place.server.client.bucket(place.bucket)

    def kept_again(request: Request) -> bool:
        if request.method == "GET" and "prefix=some%2Fwhere%2Ftmp%2F" in request.target:
            name = re.search(r"tmp%2F([0-9a-f]{32})", request.target)
            assert name
            kept.blob(f"some/where/tmp/{name[1]}/00001").upload_from_string(b"x")
        return False

    place.proxy.plan(status(500), when=kept_again)
    place.stream("packs/long", LONG)
    place.proxy.clear()
    assert place.names(PARTS) == []
    place.stream("packs/other", LONG)
    assert place.proxy.count("GET", "tmp%2F") == 1, "the next time it is known"


def test_a_bucket_that_denies_deletion_takes_long_values_and_keeps_their_parts(place: GcsPlace) -> None:
    def deletes(request: Request) -> bool:
        return request.method == "DELETE"

    place.proxy.plan(refusal(403, "does not have storage.objects.delete access"), when=deletes, times=1000)
    place.proxy.plan(refusal(403, "does not have storage.objects.delete access"), method="POST", match=COMPOSE)
    place.stream("packs/long", LONG)
    place.stream("packs/other", LONG)
    assert place.behind.get("packs/long") == LONG
    assert place.behind.get("packs/other") == LONG
    assert len(place.names(PARTS)) == 6
    assert [key for key, _ in place.store.list("")] == ["packs/long", "packs/other"], "parts are no values"
    with pytest.raises(PermissionDeniedError, match="packs/long"):
        place.store.delete("packs/long")


def test_a_value_that_is_given_up_leaves_no_part(place: GcsPlace) -> None:
    with place.store.open_writer("packs/long") as writer:
        writer.write(LONG)
    assert place.names() == []


def test_parts_of_a_dead_writer_are_swept_by_age_and_by_the_servers_clock(place: GcsPlace) -> None:
    bucket = place.server.client.bucket(place.bucket)
    for name, target in (
        ("some/where/tmp/dead/00001", "some/where/packs/left"),
        ("some/where/tmp/dead/00002", "some/where/packs/left"),
        ("some/where/tmp/others/00001", ""),
        ("elsewhere/tmp/dead/00001", "elsewhere/packs/left"),
    ):
        blob = bucket.blob(name)
        blob.metadata = {"cas-ckpt-target": target} if target else {}
        blob.upload_from_string(b"x" * 1000)
    now_s = clock.now_s()
    for skew_s in (-7200, 7200):
        with clock.fixed(lambda skew_s=skew_s: now_s + skew_s):  # type: ignore[misc]
            assert place.store.sweep_temporaries(clock.now_s() - 60).num_files == 0, "it is a second old"
            found = place.store.sweep_temporaries(clock.now_s() + 60, dry_run=True)
            assert (found.num_files, found.num_bytes) == (1, 2000)
    with place.store.open_writer("packs/mine") as writer:
        writer.write(LONG)
        assert place.behind.sweep_temporaries(clock.now_s() + 60).num_files == 1
        writer.commit()
    assert place.behind.get("packs/mine") == LONG, "what this process is writing is no leftover"
    assert place.names("some/where/tmp/") == ["some/where/tmp/others/00001"], "what is not ours stays"
    assert place.names("elsewhere/") == ["elsewhere/tmp/dead/00001"]


class TestGcs(BadLuck):
    pass


# --- a service in trouble -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trouble",
    [refusal(500), refusal(503, "backendError"), status(502), refusal(429, "rateLimitExceeded"), status(408)],
    ids=["500", "503", "502 without words", "429", "408"],
)  # fmt: skip
def test_a_storm_is_sat_out(place: GcsPlace, trouble: Fault) -> None:
    sits_out(place, trouble)


def test_a_storm_without_end_is_a_failure_that_may_pass_and_is_not_fed(place: GcsPlace) -> None:
    place.proxy.plan(refusal(503, "backendError"), times=100_000)
    for call in (
        lambda: place.store.get("a"),
        lambda: place.store.put_if_absent("a", b"x"),
        lambda: list(place.store.list("")),
    ):
        with pytest.raises(TransientStorageError, match="503, backendError.*try later"):
            call()
    assert len(place.proxy.requests) < 120, "a hundred retries for all of them together"


def test_no_retry_begins_after_the_deadline(place: GcsPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gcs_requests, "_DEADLINE_S", 0.0)
    place.proxy.plan(refusal(503), times=1000)
    with pytest.raises(TransientStorageError, match="503"):
        place.store.get("a")
    assert len(place.proxy.requests) == 1


# --- replies that are lost ------------------------------------------------------------------------


def test_a_part_whose_reply_is_lost_is_known_to_be_ours(place: GcsPlace) -> None:
    place.proxy.plan(drop_reply(), method="POST", match=UPLOAD, times=3)
    place.stream("packs/long", LONG)
    assert place.behind.get("packs/long") == LONG
    assert place.names(PARTS) == []


@pytest.mark.parametrize("num_parts", [3, 40])
@pytest.mark.parametrize("times", [1, 2])
def test_a_completion_whose_reply_is_lost_is_known_to_be_ours(place: GcsPlace, num_parts: int, times: int) -> None:
    value = noise(PART) * (num_parts - 1) + b"the end"
    place.proxy.plan(drop_reply(), method="POST", match=COMPOSE, times=times)
    place.stream("packs/long", value)
    assert place.behind.get_tail("packs/long", 1 << 30)[1] == value
    assert place.names() == ["some/where/packs/long"]


@pytest.mark.parametrize("num_parts", [3, 40])
def test_a_completion_that_took_its_parts_away_is_known_to_be_ours(place: GcsPlace, num_parts: int) -> None:
    """Done without a reply, and repeated: the parts are not there any more, as the first attempt removed them."""
    value = noise(PART) * (num_parts - 1) + b"the end"
    told = json.dumps({"error": {"code": 404, "message": "No such object: some/where/tmp/x/00001"}}).encode()
    place.proxy.plan(drop_reply(), method="POST", match=COMPOSE)
    place.proxy.plan(status(404, told), method="POST", match=COMPOSE)
    place.stream("packs/long", value)
    assert place.behind.get_tail("packs/long", 1 << 30)[1] == value
    assert place.names() == ["some/where/packs/long"]


def test_an_upload_that_somebody_swept_is_an_error_and_no_value(place: GcsPlace) -> None:
    with place.store.open_writer("packs/long") as writer:
        writer.write(LONG)
        while len(place.names(PARTS)) < 2:
            pass
        for name in place.names(PARTS):
            place.server.client.bucket(place.bucket).blob(name).delete()
        with pytest.raises(StorageError, match="packs/long"):
            writer.commit()
    with pytest.raises(NotFoundError):
        place.behind.head("packs/long")
    assert place.names() == []


# --- rights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "message", "kind", "said"),
    [
        (403, "x@y does not have storage.objects.get access", PermissionDeniedError, "storage.objects.get.*roles"),
        (401, "Invalid Credentials", PermissionDeniedError, "renew them"),
        (404, "The specified bucket does not exist.", StorageError, "create it"),
        (400, "Bucket is a requester pays bucket but no user project provided.", StorageError, "settings of the URL"),
        (418, "something new", StorageError, "something new"),
        (301, "elsewhere", StorageError, "redirection"),
    ],
)
def test_a_refusal_has_its_kind_and_says_what_to_do(
    place: GcsPlace, code: int, message: str, kind: type, said: str
) -> None:
    is_refused(place, refusal(code, message), kind, f"(?i)refs/main.*{said}")


# --- listings -------------------------------------------------------------------------------------


def test_pages_without_objects_do_not_end_a_listing(place: GcsPlace) -> None:
    place.behind.put("a", b"x")
    empty = [b'{"kind":"storage#objects","nextPageToken":"a%d"}' % number for number in range(3)]
    for body in empty:
        place.proxy.plan(status(200, body), method="GET")
    assert list(place.store.list("")) == [("a", 1)]


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def edited(body: bytes) -> bytes:
        reply = json.loads(body)
        change(reply)
        return json.dumps(reply).encode()

    return edited


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body[: len(body) // 2],
        lambda body: b"[]",
        lambda body: b"[" * 100_000,
        changed(lambda reply: reply.update(nextPageToken="again")),
        changed(lambda reply: reply.update(nextPageToken=7)),
        changed(lambda reply: reply.update(items={"a": 1})),
        changed(lambda reply: reply.update(items=["a"])),
        changed(lambda reply: reply["items"].reverse()),
        changed(lambda reply: reply["items"][0].update(size="-5")),
        changed(lambda reply: reply["items"][0].update(size=None)),
        changed(lambda reply: reply["items"][0].update(size="9" * 5000)),
        changed(lambda reply: reply["items"][0].update(generation="x y")),
        changed(lambda reply: reply["items"][0].pop("name")),
    ],
    ids=[
        "cut short", "no object", "deep", "endless", "no token", "no list", "no entries", "out of order",
        "negative size", "no size", "huge size", "no generation", "no name",
    ],
)  # fmt: skip
def test_a_listing_that_cannot_be_right_is_an_error(place: GcsPlace, change: Callable[[bytes], bytes]) -> None:
    for number in range(3):
        place.behind.put(f"k{number}", b"")
    place.proxy.plan(edit(change), method="GET", times=10_000)
    with pytest.raises(StorageError):
        list(place.store.list(""))


# --- a server that lies ---------------------------------------------------------------------------


def test_a_value_of_another_checksum_is_corrupt(place: GcsPlace) -> None:
    place.behind.put("value", b"right bytes")
    place.proxy.plan(edit(lambda body: b"wrong" + body[5:]), method="GET")
    with pytest.raises(CorruptionError, match="value"):
        place.store.get("value")


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"X-Goog-Generation": "0"},
        {"X-Goog-Generation": "1" * 50},
        {"X-Goog-Generation": "7", "Content-Range": "bytes 5-14/10"},
        {"X-Goog-Generation": "7", "Content-Range": "bytes 14-5/100"},
        {"X-Goog-Generation": "7", "Content-Range": "lines 5-14/100"},
        {"X-Goog-Generation": "7", "Content-Range": "bytes 5-14/" + "9" * 40},
    ],
)
def test_headers_that_cannot_be_right_are_an_error(place: GcsPlace, told: dict[str, str]) -> None:
    place.proxy.plan(status(206, b"0123456789", **told), method="GET", times=1000)
    with pytest.raises(StorageError, match="value"):
        place.store.get_range("value", 5, 10)


def test_an_answer_without_end_is_dropped(place: GcsPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "_MOST_REPLY_BYTES", 1 << 20)
    place.proxy.plan(status(200, b" " * (2 << 20)), method="GET", times=10)
    with pytest.raises(StorageError, match="more than 1 MiB"):
        list(place.store.list(""))


def test_a_packed_answer_that_unfolds_to_gigabytes_is_dropped(place: GcsPlace) -> None:
    bomb = gzip.compress(b" " * (64 << 20))
    place.proxy.plan(status(200, bomb, Content_Encoding="gzip"), method="GET", times=10)
    with pytest.raises(StorageError, match="more than 32 MiB"):
        list(place.store.list(""))


def test_a_packed_value_is_not_unpacked(place: GcsPlace) -> None:
    packed = gzip.compress(b"value")
    place.proxy.plan(status(200, packed, Content_Encoding="gzip", **{"X-Goog-Generation": "7"}), method="GET")
    assert place.store.get("value") == packed


def test_a_redirection_is_not_followed(place: GcsPlace) -> None:
    with Proxy(place.server.endpoint) as elsewhere:
        target = f"{elsewhere.endpoint}/download/storage/v1/b/{place.bucket}/o/x?alt=media"
        place.proxy.plan(status(302, Location=target), times=10)
        with pytest.raises(StorageError, match="redirection"):
            place.store.get("x")
        with pytest.raises(StorageError, match="redirection"):
            place.store.put("x", b"secret")
        assert elsewhere.requests == []
