"""A repository on object storage: what init finds out about it, what it chooses there, and a single writer."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cas_ckpt import Repository
from cas_ckpt.clock import now_s
from cas_ckpt.core.config import EMULATED, HONOURED, read_config
from cas_ckpt.errors import ConflictError, StorageError
from cas_ckpt.storage.url import open_store
from tests.proxy import Proxy, edit, s3_error
from tests.servers import S3Server, credentials, s3_without_conditions


@pytest.fixture(scope="module")
def careless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server that ignores conditions."""
    with credentials(), s3_without_conditions(tmp_path_factory.mktemp("rclone")) as server:
        yield server


def test_a_store_that_ignores_conditions_is_refused_and_left_empty(careless: S3Server) -> None:
    url = careless.url(careless.new_bucket())
    with pytest.raises(StorageError, match="a second create is NOT refused.*single_writer=True"):
        Repository.init(url)
    assert list(open_store(url).list("")) == []


def test_a_store_that_lists_in_no_order_is_refused_and_left_empty(s3: S3Server) -> None:
    bucket = s3.new_bucket()
    with Proxy(s3.endpoint) as proxy:
        proxy.plan(edit(lambda body: body.replace(b"-0</Key>", b"-z</Key>")), match="list-type")
        with pytest.raises(StorageError, match="out of order"):
            Repository.init(s3.url(bucket).replace(s3.endpoint, proxy.endpoint))
    assert list(open_store(s3.url(bucket)).list("")) == []


def test_one_writer_gets_along_without_conditions(careless: S3Server) -> None:
    url = careless.url(careless.new_bucket())
    with Repository.init(url, single_writer=True) as repo:
        first = repo.commit({"model": {"x": 1}}, message="first")
        assert repo.status().conditional_writes == "emulated"
    with Repository.open(url) as repo:
        assert repo._handle.config.conditional_writes == EMULATED
        second = repo.commit({"model": {"x": 2}}, message="second")
        assert [commit.id for commit in repo.log("main")] == [second.id, first.id]
        repo.branch("other", start=first.id)
        with pytest.raises(ConflictError):
            repo.branch("other", start=second.id)
        repo.gc()
        assert repo.fsck(read_data=True).problems == ()
        assert repo.load("main") == {"model": {"x": 2}}
    with pytest.raises(ConflictError, match="holds a repository already"):
        Repository.init(url, single_writer=True)


def test_a_swap_that_is_emulated_still_compares(careless: S3Server) -> None:
    url = careless.url(careless.new_bucket())
    Repository.init(url, single_writer=True).close()
    store = open_store(url)
    read_config(store)
    store.put("a", b"one")
    for stale in (b"", b"two"):
        with pytest.raises(ConflictError):
            store.compare_and_swap("a", stale, b"new")
    store.compare_and_swap("a", b"one", b"two")
    with pytest.raises(ConflictError):
        store.put_if_absent("a", b"new")
    with store.open_writer("a") as writer:
        writer.write(b"new")
        with pytest.raises(ConflictError):
            writer.commit()
    assert store.get("a") == b"two"


def test_a_tail_is_read_of_a_server_that_has_no_ranges_beyond_an_object(careless: S3Server) -> None:
    store = open_store(careless.url(careless.new_bucket()))
    for value in (b"", b"0123456789"):
        store.put("a", value)
        assert store.get_tail("a", 64) == (len(value), value)


def test_a_store_that_keeps_conditions_needs_no_single_writer(s3: S3Server) -> None:
    with Repository.init(s3.url(s3.new_bucket()), single_writer=True) as repo:
        assert repo._handle.config.conditional_writes == HONOURED


def test_defaults_suit_the_place(s3: S3Server, tmp_path: Path) -> None:
    found = {}
    for place in (s3.url(s3.new_bucket()), str(tmp_path / "repo"), "memory://defaults"):
        with Repository.init(place) as repo:
            config = repo._handle.config
            found[place.partition(":")[0]] = (config.encoding, config.pack_bytes >> 20)
    assert list(found.values()) == [("planes", 128), ("auto", 512), ("auto", 512)]


def test_gc_removes_the_uploads_that_dead_writers_left_and_no_others(s3: S3Server) -> None:
    bucket = s3.new_bucket()
    Repository.init(s3.url(bucket, "run")).close()
    for key in ("run/packs/aa/dead.data", "else/where"):
        s3.client.create_multipart_upload(Bucket=bucket, Key=key)
    begun = time.strftime("<Initiated>%Y-%m-%dT%H:%M:%SZ</Initiated>", time.gmtime(now_s() - 7200)).encode()
    with Proxy(s3.endpoint) as proxy, Repository.open(S3Server(proxy.endpoint).url(bucket, "run")) as repo:
        older = edit(lambda body: re.sub(rb"<Initiated>.*?</Initiated>", begun, body))
        proxy.plan(older, method="GET", match="uploads", times=1000)
        assert repo.status().num_temporaries == 1
        assert repo.gc().temporaries == 1
    left = s3.client.list_multipart_uploads(Bucket=bucket)["Uploads"]
    assert [upload["Key"] for upload in left] == ["else/where"]


# --- what may not be deleted ---------------------------------------------------------------------


def deny_deletes(proxy: Proxy) -> None:
    proxy.plan(s3_error(403, "AccessDenied"), method="DELETE", times=10_000)
    proxy.plan(s3_error(403, "AccessDenied"), method="POST", match="delete", times=10_000)


def test_a_bucket_that_denies_deletion_is_written_and_gc_says_what_stays(s3: S3Server) -> None:
    bucket = s3.new_bucket()
    Repository.init(s3.url(bucket, "run")).close()
    with Proxy(s3.endpoint) as proxy, Repository.open(S3Server(proxy.endpoint).url(bucket, "run")) as repo:
        deny_deletes(proxy)
        first = repo.commit({"x": 1})
        for name in ("other", "third"):
            repo.commit({"x": name}, branch=name)
            repo.delete_branch(name, force=True)
        report = repo.gc(min_age_s=0, reflog_expire_s=0)
        assert "AccessDenied" in report.denied
        assert report.denied_packs == 2 and report.denied_bytes
        again = repo.gc(min_age_s=0, reflog_expire_s=0)
        assert again.denied_packs == 2, "the next one tries again"
        with Repository.open(repo.url) as later:
            second = later.commit({"x": 3})
            assert [commit.id for commit in later.log("main")] == [second.id, first.id]
    with Repository.open(s3.url(bucket, "run")) as repo:
        report = repo.gc(min_age_s=0, reflog_expire_s=0)
        assert report.took_over == "deleting" and report.deleted_packs >= 2 and not report.denied
        assert repo.load("main") == {"x": 3}


@pytest.mark.parametrize("lock", [False, True], ids=["versioning", "object lock"])
def test_a_bucket_that_keeps_old_versions_is_collected(s3: S3Server, lock: bool) -> None:
    bucket = s3.new_bucket(ObjectLockEnabledForBucket=lock)
    if lock:
        days = {"ObjectLockEnabled": "Enabled", "Rule": {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": 1}}}
        s3.client.put_object_lock_configuration(Bucket=bucket, ObjectLockConfiguration=days)
    else:
        s3.client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    with Repository.init(s3.url(bucket)) as repo:
        repo.commit({"x": 1})
        for name in ("other", "third"):
            repo.commit({"x": name}, branch=name)
            repo.delete_branch(name, force=True)
        report = repo.gc(min_age_s=0, reflog_expire_s=0)
        assert report.deleted_packs == 2 and not report.denied
        assert repo.load("main") == {"x": 1}
    with Repository.open(s3.url(bucket)) as repo:
        assert repo.fsck(read_data=True).ok
