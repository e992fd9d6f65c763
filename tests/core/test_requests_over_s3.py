"""Requests that S3 sees, counted on the wire: a cold and a warm log, one tensor, commits."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from cas_ckpt.core.config import Config
from cas_ckpt.core.create import new_store_id, write_config
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.repository import Repository
from cas_ckpt.storage.memory import MemoryStore
from tests.cli.running import call
from tests.committing import commit
from tests.proxy import Proxy
from tests.remote_store import RemoteStore
from tests.servers import S3Server

pytestmark = pytest.mark.slow


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[Proxy]:
    with Proxy(s3.endpoint) as made:
        yield made


@pytest.fixture
def url(s3: S3Server, proxy: Proxy) -> str:
    return S3Server(proxy.endpoint).url(s3.new_bucket())


def upload(source: MemoryStore, s3: S3Server, url: str) -> None:
    bucket = url.removeprefix("s3://").partition("/")[0]

    def put(key: str) -> None:
        s3.client.put_object(Bucket=bucket, Key=f"some/where/{key}", Body=source.get(key))

    s3.client.head_bucket(Bucket=bucket)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(put, [key for key, _ in source.list("")]))


def test_a_log_of_a_thousand_commits_takes_eight_requests_and_then_two(
    s3: S3Server, proxy: Proxy, url: str, tmp_path: Path
) -> None:
    made = MemoryStore(url="s3://elsewhere")
    write_config(made, Config(new_store_id()))
    with closing(RepositoryHandle.on_store(RemoteStore(made), cache=None)) as writer:
        for number in range(1000):
            commit(writer, {"w": np.full(100, number, np.float32)}, message=f"commit {number}", step=number)
    upload(made, s3, url)
    place = str(tmp_path / "cache")
    for most in (8, 2, 2):
        proxy.clear()
        ran = call("-C", url, "log", "--oneline", CAS_CKPT_CACHE=place)
        assert ran.code == 0, ran.err
        assert [line.rpartition(" ")[2] for line in ran.out.splitlines()] == [f"{n}" for n in range(999, -1, -1)]
        assert proxy.count() <= most, [each.target for each in proxy.requests]


def test_one_tensor_takes_six_requests_and_then_one(proxy: Proxy, url: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    state = {f"layer{number:03d}": rng.standard_normal((512, 512)).astype(np.float32) for number in range(48)}
    with Repository.init(url, cache=None) as repo:
        repo.commit(state)
    for most in (6, 1):
        proxy.clear()
        with Repository.open(url, read_only=True, cache=tmp_path / "cache", group=None) as repo:
            assert np.array_equal(repo.read("main", "layer017"), state["layer017"])
        assert proxy.count() <= most, [each.target for each in proxy.requests]
        assert sum(each.received_bytes for each in proxy.requests) <= 1.2e6


def test_a_commit_of_an_unchanged_state_takes_six_requests(proxy: Proxy, url: str) -> None:
    state = {"w": np.ones(300_000, np.float32), "step": 3}
    with Repository.init(url, cache=None) as repo:
        repo.commit(state)
        for _ in range(3):
            proxy.clear()
            repo.commit(state)
            assert proxy.count() <= 6, [(each.method, each.target) for each in proxy.requests]
    with Repository.open(url, cache=None) as repo:
        proxy.clear()
        repo.commit(state)
        first = proxy.count()
        proxy.clear()
        repo.commit(state)
        assert proxy.count() <= 6 and first <= 12, (first, proxy.count())


def test_the_second_ls_diff_and_show_take_one_request_or_two(proxy: Proxy, url: str, tmp_path: Path) -> None:
    with Repository.init(url, cache=None) as repo:
        for number in range(3):
            repo.commit({"w": np.full(300_000, number, np.float32)}, message=f"{number}")
    place = str(tmp_path / "cache")
    looks = {"ls": 1, "diff main~1 main": 1, "show": 2, "log": 2, "resolve main": 1}
    for words, most in looks.items():
        outs = []
        for _ in range(2):
            proxy.clear()
            ran = call("-C", url, *words.split(), CAS_CKPT_CACHE=place)
            assert ran.code == 0, ran.err
            outs.append(ran.out)
        assert outs[0] == outs[1]
        assert proxy.count() <= most, (words, [each.target for each in proxy.requests])
