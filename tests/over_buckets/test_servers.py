"""What people do every day, over real servers of S3 and Cloud Storage: the vendors' files below, the verbs above."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest
from botocore.retries import standard

from cas_ckpt import Repository
from cas_ckpt.errors import CkptError, ConflictError
from cas_ckpt.storage import gcs as gcs_module
from cas_ckpt.storage import s3 as s3_module
from tests.builders import numbers
from tests.proxy import Proxy, drop_reply, s3_error, status
from tests.servers import GcsServer, S3Server

PART = 64 << 10


@pytest.fixture(params=["s3", "gcs"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> S3Server | GcsServer:
    monkeypatch.setattr(standard.ExponentialBackoff, "delay_amount", lambda self, context: 0.001)
    for module in (s3_module, gcs_module):
        monkeypatch.setattr(module, "_MIN_PART_BYTES", PART)
    return request.getfixturevalue(request.param)


@pytest.fixture
def url(server: S3Server | GcsServer) -> str:
    return server.url(server.new_bucket(), part_bytes=PART)


@pytest.fixture
def repo(url: str) -> Iterator[Repository]:
    with Repository.init(url, encoding="raw", cache=None) as made:
        yield made


def state_of(step: int) -> dict[str, object]:
    """A tensor of several parts, one that stays the same, a number."""
    return {"own": numbers(300, 200, seed=step), "shared": numbers(300, 200), "step": step}


def same(found: dict[str, object], wanted: dict[str, object]) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        np.testing.assert_array_equal(found[key], value)


def test_what_is_committed_is_in_the_log_and_comes_back_whole_and_in_parts(repo: Repository) -> None:
    ids = [repo.commit(state_of(step), message=f"step {step}", step=step).id for step in (1, 2)]
    with Repository.open(repo.url, cache=None) as other:
        assert [(each.id, each.step) for each in other.log("main")] == [(ids[1], 2), (ids[0], 1)]
        for step, id_ in enumerate(ids, 1):
            same(other.load(id_), state_of(step))
        target = {**state_of(7), "shared": np.zeros((300, 200), np.float32)}
        other.checkout("main", into=target)
        same(target, state_of(2))
        np.testing.assert_array_equal(other.read("main", "own")[7:9], state_of(2)["own"][7:9])


def test_two_writers_of_one_branch_lose_no_commit_and_one_name_is_made_once(repo: Repository) -> None:
    first = repo.commit({"step": 1})
    with Repository.open(repo.url, cache=None) as other:
        made = [each.commit({"step": step}).id for step, each in enumerate((repo, other, repo, other), 2)]
        assert [each.id for each in other.log("main")] == [*reversed(made), first.id]
        repo.branch("side", start=first.id)
        with pytest.raises(ConflictError):
            other.branch("side", start=made[0])
        assert other.resolve("side") == first.id


def test_a_push_and_a_pull_copy_what_is_missing(repo: Repository) -> None:
    with Repository.init("memory://", cache=None) as here, Repository.init("memory://", cache=None) as there:
        for step in (1, 2):
            here.commit(state_of(step))
        for each in (here, there):
            each.add_remote("origin", repo.url)
        here.push()
        same(repo.load("main"), state_of(2))
        assert here.push().num_bytes == 0
        there.pull()
        assert there.resolve("main") == here.resolve("main")
        same(there.load("main~1"), state_of(1))


def test_a_collection_deletes_what_no_branch_leads_to_and_fsck_finds_the_rest_whole(repo: Repository) -> None:
    kept = repo.commit(state_of(1))
    for step in (2, 3):
        repo.commit(state_of(step), branch="gone")
    repo.delete_branch("gone", force=True)
    report = repo.gc(min_age_s=0, reflog_expire_s=0)
    assert report.deleted_packs >= 2
    with Repository.open(repo.url, cache=None) as other:
        assert other.fsck(read_data=True).ok
        assert other.resolve("main") == kept.id
        same(other.load("main"), state_of(1))


@pytest.mark.slow
@pytest.mark.parametrize("lost", [False, True], ids=["refused", "the last reply lost"])
def test_a_commit_that_is_cut_off_loses_nothing(server: S3Server | GcsServer, repo: Repository, lost: bool) -> None:
    """At any request: test_cut_off.py."""
    refused = s3_error(403, "ExpiredToken") if isinstance(server, S3Server) else status(403, b"denied from here on")
    repo.commit(state_of(0))
    for cut, step in ((4, 1), (10, 2)):
        before = repo.resolve("main")
        with Proxy(server.endpoint) as proxy:
            with Repository.open(repo.url.replace(server.endpoint, proxy.endpoint), cache=None) as dying:
                proxy.clear()
                if lost:
                    proxy.plan(drop_reply(), after=cut)
                plan = proxy.plan(refused, after=cut + lost, times=100_000)
                with suppress(CkptError):
                    dying.commit(state_of(step))
            assert plan.struck > cut + lost
        made = repo.resolve("main") != before
        same(repo.load("main"), state_of(step if made else step - 1))
        repo.commit(state_of(step))
        assert repo.fsck(read_data=True).ok
