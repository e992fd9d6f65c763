"""A commit whose connection ends for good at one of its requests: nothing is lost, and the next one works."""

from __future__ import annotations

import itertools
from contextlib import suppress

import numpy as np
import pytest
from botocore.retries import standard

from cas_ckpt import Repository
from cas_ckpt.errors import CkptError
from cas_ckpt.storage import s3 as s3_module
from tests.proxy import Proxy, drop_reply, s3_error
from tests.servers import S3Server

PART = 64 << 10


def state(seed: int) -> dict[str, object]:
    return {"w": np.random.default_rng(seed).standard_normal(100_000).astype("float32"), "step": seed}


@pytest.mark.slow
@pytest.mark.parametrize("lost", [False, True], ids=["refused", "the last reply lost"])
def test_a_commit_that_is_cut_off_at_any_request_loses_nothing(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    monkeypatch.setattr(standard.ExponentialBackoff, "delay_amount", lambda self, context: 0.001)
    monkeypatch.setattr(s3_module, "_MIN_PART_BYTES", PART)
    bucket = s3.new_bucket()
    with Proxy(s3.endpoint) as proxy:
        for k in itertools.count(2 * lost, 5):
            settings = {"part_bytes": PART, "parallel": 1}
            direct = s3.url(bucket, f"run-{k}", **settings)
            with Repository.init(direct, encoding="raw") as repo:
                first = repo.commit(state(1))
            proxy.clear()
            with Repository.open(S3Server(proxy.endpoint).url(bucket, f"run-{k}", **settings)) as repo:
                if lost:
                    proxy.plan(drop_reply(), after=k)
                cut = proxy.plan(s3_error(403, "ExpiredToken"), after=k + lost, times=100_000)
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
