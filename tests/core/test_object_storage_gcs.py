"""A repository on Cloud Storage whose bucket keeps more than it is told to: as test_object_storage.py does on S3."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator

import pytest

from cas_ckpt import Repository
from cas_ckpt.clock import now_s
from cas_ckpt.errors import PermissionDeniedError
from cas_ckpt.storage import gcs_requests
from tests.proxy import Fault, Proxy, Request, edit, status
from tests.servers import GcsServer


@pytest.fixture
def proxy(gcs: GcsServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    monkeypatch.setattr(gcs_requests, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(gcs_requests, "_LONGEST_PAUSE_S", 0.002)
    with Proxy(gcs.endpoint) as proxy:
        yield proxy


def denied(message: str) -> Fault:
    return status(403, json.dumps({"error": {"code": 403, "message": message}}).encode())


def deletes(request: Request) -> bool:
    """Also those that many are sent in as one."""
    return request.method == "DELETE" or "/batch/" in request.target


def replaces(request: Request) -> bool:
    """Writes over an object that is there."""
    return re.search(r"ifGenerationMatch=[1-9]", request.target) is not None


def fill(repo: Repository) -> str:
    """Two branches that are deleted again; the id of what stays."""
    first = repo.commit({"x": 1})
    for name in ("other", "third"):
        repo.commit({"x": name}, branch=name)
        repo.delete_branch(name, force=True)
    return first.id


def test_a_bucket_that_denies_deletion_is_written_and_gc_says_what_stays(gcs: GcsServer, proxy: Proxy) -> None:
    bucket = gcs.new_bucket()
    Repository.init(gcs.url(bucket, "run")).close()
    with Repository.open(GcsServer(proxy.endpoint).url(bucket, "run")) as repo:
        proxy.plan(denied("does not have storage.objects.delete access"), when=deletes, times=10_000)
        first = fill(repo)
        report = repo.gc(min_age_s=0, reflog_expire_s=0)
        assert "storage.objects.delete" in report.denied
        assert report.denied_packs == 2 and report.denied_bytes
        with Repository.open(repo.url) as later:
            second = later.commit({"x": 3})
            assert [commit.id for commit in later.log("main")] == [second.id, first]
    with Repository.open(gcs.url(bucket, "run")) as repo:
        report = repo.gc(min_age_s=0, reflog_expire_s=0)
        assert report.took_over == "deleting" and report.deleted_packs >= 2 and not report.denied
        assert repo.load("main") == {"x": 3}


def test_a_bucket_with_a_retention_policy_refuses_a_second_commit_and_keeps_the_first(
    gcs: GcsServer, proxy: Proxy
) -> None:
    """There no object may be replaced, refs neither."""
    bucket = gcs.new_bucket()
    with Repository.init(gcs.url(bucket, "run")) as repo:
        first = repo.commit({"x": 1})
    with Repository.open(GcsServer(proxy.endpoint).url(bucket, "run")) as repo:
        policy = "is subject to bucket's retention policy and cannot be deleted or overwritten until 2030"
        for matched in (deletes, replaces):
            proxy.plan(denied(policy), when=matched, times=10_000)
        with pytest.raises(PermissionDeniedError, match=r"refs/heads/main.*retention policy"):
            repo.commit({"x": 2})
    with Repository.open(gcs.url(bucket, "run")) as repo:
        assert repo.resolve("main") == first.id
        assert repo.load("main") == {"x": 1}
        assert repo.fsck(read_data=True).ok


def test_a_bucket_that_keeps_old_versions_is_collected(gcs: GcsServer) -> None:
    bucket = gcs.new_bucket()
    versioned = gcs.client.bucket(bucket)
    versioned.versioning_enabled = True
    versioned.patch()
    with Repository.init(gcs.url(bucket)) as repo:
        fill(repo)
        report = repo.gc(min_age_s=0, reflog_expire_s=0)
        assert report.deleted_packs == 2 and not report.denied
    with Repository.open(gcs.url(bucket)) as repo:
        assert repo.load("main") == {"x": 1}
        assert repo.fsck(read_data=True).ok


@pytest.mark.parametrize(("age_s", "swept"), [(1800, 0), (7200, 1)])
def test_gc_removes_the_parts_that_dead_writers_left_once_they_are_old(
    gcs: GcsServer, proxy: Proxy, age_s: int, swept: int
) -> None:
    bucket = gcs.new_bucket()
    Repository.init(gcs.url(bucket, "run")).close()
    for number in (1, 2):
        part = gcs.client.bucket(bucket).blob(f"run/tmp/dead/0000{number}")
        part.metadata = {"cas-ckpt-target": "run/packs/aa/dead.data"}
        part.upload_from_string(b"x" * 1000)
    made = time.strftime('"updated":"%Y-%m-%dT%H:%M:%SZ"', time.gmtime(now_s() - age_s)).encode()
    with Repository.open(GcsServer(proxy.endpoint).url(bucket, "run")) as repo:
        older = edit(lambda body: re.sub(rb'"updated":\s*"[^"]*"', made, body))
        proxy.plan(older, method="GET", match="tmp%2F", times=1000)
        report = repo.gc(min_age_s=0)
        assert (report.temporaries, report.temporary_bytes) == (swept, 2000 * swept)
    left = [blob.name for blob in gcs.client.list_blobs(bucket, prefix="run/tmp/")]
    assert len(left) == 2 * (1 - swept)
