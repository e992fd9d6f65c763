"""A commit that is cut off at any of its requests, over whatever server."""

from __future__ import annotations

import itertools
from contextlib import suppress

import numpy as np

from cas_ckpt import Repository
from cas_ckpt.errors import CkptError
from tests.proxy import Fault, Proxy, drop_reply
from tests.servers import GcsServer, S3Server

PART = 64 << 10


def state(seed: int) -> dict[str, object]:
    return {"w": np.random.default_rng(seed).standard_normal(100_000).astype("float32"), "step": seed}


def cut_off_at_any_request(server: S3Server | GcsServer, denial: Fault, *, lost: bool) -> None:
    """Nothing is lost, whichever request of a commit is the first to be denied, and the next commit works.

    Args:
        denial: The answer to all requests from there on.
        lost: The request before that one is done, and its reply is lost.
    """
    bucket = server.new_bucket()
    with Proxy(server.endpoint) as proxy:
        for k in itertools.count(2 * lost, 5):
            settings = {"part_bytes": PART, "parallel": 1}
            direct = server.url(bucket, f"run-{k}", **settings)
            with Repository.init(direct, encoding="raw") as repo:
                first = repo.commit(state(1))
            proxy.clear()
            with Repository.open(type(server)(proxy.endpoint).url(bucket, f"run-{k}", **settings)) as repo:
                if lost:
                    proxy.plan(drop_reply(), after=k)
                cut = proxy.plan(denial, after=k + lost, times=100_000)
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
