"""Cloud Storage: the conformance suite over a real server, and what is Cloud Storage's alone."""

from __future__ import annotations

import os
import sys
import warnings

import pytest
import requests

from cas_ckpt.errors import InvalidInputError, StorageError
from cas_ckpt.storage.gcs import GcsBucket, GcsSettings
from cas_ckpt.storage.object_store import ObjectStore
from cas_ckpt.storage.store import Store
from cas_ckpt.storage.url import open_store
from cas_ckpt.testing import StoreConformance
from tests.proxy import Proxy
from tests.servers import GcsServer
from tests.wrapped_stores import FaultyStore


class TestGcsStore(StoreConformance):
    @pytest.fixture(autouse=True)
    def _in_a_new_bucket(self, gcs: GcsServer) -> None:
        self.url = gcs.url(gcs.new_bucket())

    def store(self) -> Store:
        return open_store(self.url)

    def reopened(self, store: Store) -> Store:
        return open_store(store.url)


class TestGcsStoreWithParts(TestGcsStore):
    """Parts are small here, so that most values of the suite are composed."""

    num_listed = 10

    @pytest.fixture(autouse=True)
    def _in_a_new_bucket(self, gcs: GcsServer) -> None:
        self.url = gcs.url(gcs.new_bucket(), part_bytes=1 << 20, parallel=4)


class TestFaultyGcsStore(TestGcsStore):
    num_listed = 10

    def store(self) -> Store:
        return FaultyStore(super().store())


# --- what a URL says ------------------------------------------------------------------------------


def bucket_of(url: str) -> GcsBucket:
    store = open_store(url)
    assert isinstance(store, ObjectStore) and isinstance(store.bucket, GcsBucket)
    return store.bucket


def test_a_url_says_who_pays_and_how_values_are_kept() -> None:
    key = "projects/p/locations/eu/keyRings/r/cryptoKeys/k"
    url = f"gs://bucket/a/b?kms_key={key}&parallel=4&part_bytes=2097152&storage_class=NEARLINE&user_project=p-1"
    settings = bucket_of(url).settings
    assert settings == GcsSettings("bucket", None, False, "p-1", key, "NEARLINE", 4, 2 << 20)
    assert open_store(url).url == url
    assert open_store("gs://bucket").url == "gs://bucket"


@pytest.mark.parametrize(
    ("url", "anonymous"),
    [
        ("gs://bucket/a", False),
        ("gs://bucket/a?anonymous=true", True),
        ("gs://bucket/a?endpoint=https://storage-x.p.googleapis.com", False),
        ("gs://bucket/a?endpoint=http://localhost:4443", True),
        ("gs://bucket/a?endpoint=HTTP://localhost:4443", True),
    ],
)
def test_credentials_go_where_there_is_tls_and_nowhere_else(url: str, anonymous: bool) -> None:
    assert bucket_of(url).settings.anonymous == anonymous


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("gs://bucket/a?endpoint=http://host&anonymous=false", "without TLS"),
        ("gs://bucket/a?endpoint=HTTP://host&anonymous=false", "without TLS"),
        ("gs://bucket/a?anonymous=yes", "true or false"),
        ("gs://bucket/a?endpoint=ftp://host", "https://host"),
        ("gs://bucket/a?endpoint=https://u:p@host", "no credentials"),
        ("gs://user:secret@bucket/a", "no credentials"),
        ("gs://bucket/a?access_token=secret", "no credentials"),
        ("gs://bucket/a?kms_key=k", "cryptoKeys"),
        ("gs://bucket/a?storage_class=cold%20one", "STANDARD or NEARLINE"),
        ("gs://bucket/a?user_project=a/b", "id of a project"),
        ("gs://bucket/a?part_bytes=1", "whole number"),
        ("gs://bucket/a?region=x", "known are anonymous, endpoint, kms_key"),
        ("gs:///a", "bucket"),
        ("gs://bucket/../a", "part"),
    ],
)
def test_a_url_that_cannot_be_is_refused_without_its_secrets(url: str, said: str) -> None:
    with pytest.raises(InvalidInputError, match=said) as found:
        open_store(url)
    assert "secret" not in str(found.value) and "u:p" not in str(found.value)


def test_what_the_url_says_is_in_every_request(gcs: GcsServer) -> None:
    key = "projects/p/locations/eu/keyRings/r/cryptoKeys/k"
    name = gcs.new_bucket()
    with Proxy(gcs.endpoint) as proxy:
        url = GcsServer(proxy.endpoint).url(name, user_project="payer", kms_key=key, storage_class="NEARLINE")
        store = open_store(f"{url}&part_bytes=1048576")
        store.put("a", b"x")
        assert gcs.client.bucket(name).get_blob("some/where/a").storage_class == "NEARLINE"
        store.put("b", bytes(3 << 20))
        assert store.get("a") + bytes(store.get_range("a", 0, 1)) + store.get_tail("a", 1)[1] == b"xxx"
        assert store.head("a") == 1
        assert list(store.list("")) == [("a", 1), ("b", 3 << 20)]
        store.delete("a")
        store.close()
    assert {"userProject=payer" in request.target for request in proxy.requests} == {True}
    writes = [request.target for request in proxy.requests if request.method == "POST"]
    assert {"kmsKeyName=projects%2Fp" in target for target in writes} == {True}


def test_values_of_a_public_bucket_are_not_answered_from_caches(gcs: GcsServer) -> None:
    name = gcs.new_bucket()
    store = open_store(gcs.url(name, part_bytes=1 << 20))
    store.put("refs/main", b"x")
    store.put("packs/long", bytes(2 << 20))
    told = requests.get(f"{gcs.endpoint}/storage/v1/b/{name}/o", timeout=10).json()["items"]
    assert {one["contentType"] for one in told} == {"application/octet-stream"}
    assert {one.get("cacheControl") for one in told} <= {"no-store, no-transform", None}
    store.close()


# --- one client for each process ------------------------------------------------------------------


def test_a_child_process_has_connections_of_its_own(gcs: GcsServer) -> None:
    store = open_store(gcs.url(gcs.new_bucket(), part_bytes=1 << 20))
    value = bytes(range(256)) * 8192
    store.put("a", value)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside threads: what is tried out here
        child = os.fork()
    if not child:
        done = 1
        try:
            store.put("b", store.get("a"))
            store.close()
            done = 0
        finally:
            os._exit(done)
    for _ in range(20):
        assert store.get("a") == value
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.get("b") == value
    store.close()


def test_a_store_that_was_closed_connects_again(gcs: GcsServer) -> None:
    store = open_store(gcs.url(gcs.new_bucket()))
    store.put("a", b"x")
    store.close()
    store.close()
    assert store.get("a") == b"x"
    store.close()


def test_a_missing_library_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cas_ckpt.storage.gcs", "cas_ckpt.storage.gcs_requests"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "google.cloud", None)
    with pytest.raises(InvalidInputError, match=r"pip install 'cas-ckpt\[gcs\]'"):
        open_store("gs://bucket/a")


def test_no_bucket_is_not_an_empty_one(gcs: GcsServer) -> None:
    store = open_store(gcs.url("no-such-bucket"))
    for call in (lambda: list(store.list("")), lambda: store.put("a", b"x"), lambda: store.put_if_absent("a", b"x")):
        with pytest.raises(StorageError, match="no such bucket"):
            call()
    store.close()
