"""A commit whose credentials end for good at one of its requests: nothing is lost, and the next one works."""

from __future__ import annotations

import itertools
from contextlib import suppress

import numpy as np
import pytest

from cas_ckpt import Repository
from cas_ckpt.errors import CkptError
from cas_ckpt.storage import gcs as gcs_module
from cas_ckpt.storage import gcs_requests
from tests.over_s3.test_cut_off_s3 import PART, state
from tests.proxy import Proxy, drop_reply, status
from tests.servers import GcsServer


@pytest.mark.slow
@pytest.mark.parametrize("lost", [False, True], ids=["refused", "the last reply lost"])
def test_a_commit_that_is_cut_off_at_any_request_loses_nothing(
    gcs: GcsServer, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    monkeypatch.setattr(gcs_requests, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(gcs_requests, "_LONGEST_PAUSE_S", 0.002)
    monkeypatch.setattr(gcs_module, "_MIN_PART_BYTES", PART)
    bucket = gcs.new_bucket()
    with Proxy(gcs.endpoint) as proxy:
        for k in itertools.count(2 * lost, 5):
            settings = {"part_bytes": PART, "parallel": 1}
            direct = gcs.url(bucket, f"run-{k}", **settings)
            with Repository.init(direct, encoding="raw") as repo:
                first = repo.commit(state(1))
            proxy.clear()
            with Repository.open(GcsServer(proxy.endpoint).url(bucket, f"run-{k}", **settings)) as repo:
                if lost:
                    proxy.plan(drop_reply(), after=k)
                cut = proxy.plan(status(403, b"denied from here on"), after=k + lost, times=100_000)
                with suppress(CkptError):
                    repo.commit(state(2))
            with Repository.open(direct) as repo:
                head = repo.resolve("main")
                assert head == first.id or next(iter(repo.log("main"))).parents == (first.id,)
                np.testing.assert_array_equal(repo.load("main")["w"], state(1 if head == first.id else 2)["w"])
                again = repo.commit(state(3))
                assert repo.fsck(read_data=True).ok
                assert repo.resolve("main") == again.id
            if cut.struck <= k + lost:
                break
    assert k > 10, "a commit has more requests than that"
