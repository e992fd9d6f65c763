"""Restoring from S3: ranges that are asked for once, and connections that break on the way."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.tree import load_tree, stored_tensors
from cas_ckpt.errors import CorruptionError
from cas_ckpt.objects.state import TensorCopy
from cas_ckpt.ops.checkout.checkout import fetch_tensors
from tests.builders import ArrayMemory, commit, numbers, same_bytes
from tests.proxy import Proxy, cut_reply, edit, s3_error
from tests.servers import S3Server

STATE = {"wide": numbers(600, 4096, seed=1), **{f"small{n}": numbers(90, 91 + n, seed=n) for n in range(40)}}


class Restore:
    """One restore from S3; what was asked while its handle was opened is forgotten."""

    def __init__(self, s3: S3Server, proxy: Proxy) -> None:
        url = S3Server(proxy.endpoint).url(s3.new_bucket())
        init_repository(url, encoding="raw").close()
        with_index = RepositoryHandle.open(url, index_url=":memory:", cache=None)
        info = commit(with_index, STATE)
        with_index.close()
        self.handle = RepositoryHandle.open(url, index_url=":memory:", cache=None)
        self.handle.sync()
        tree = load_tree(self.handle, bytes.fromhex(info.root))
        self.stored = dict(stored_tensors(tree))
        self.targets = {path: np.full(each.spec.shape, 7, each.spec.dtype) for path, each in self.stored.items()}
        proxy.clear()

    def run(self, **options: Any) -> None:
        copies = [TensorCopy(path, each, ArrayMemory(self.targets[path])) for path, each in self.stored.items()]
        fetch_tensors(self.handle, copies, **options)

    def check(self) -> None:
        assert all(same_bytes(target, STATE[str(path[0])]) for path, target in self.targets.items())


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[Proxy]:
    with Proxy(s3.endpoint) as proxy:
        yield proxy


@pytest.fixture
def one(s3: S3Server, proxy: Proxy) -> Iterator[Restore]:
    found = Restore(s3, proxy)
    yield found
    found.handle.close()


def ranges(proxy: Proxy) -> list[tuple[str, int, int]]:
    """(target, first, last) of what was asked for, in order."""
    found = []
    for request in proxy.requests:
        first, _, last = request.headers["range"].removeprefix("bytes=").partition("-")
        found.append((request.target, int(first), int(last)))
    return sorted(found)


@pytest.mark.parametrize("unseen", [False, True])
def test_each_byte_is_asked_for_once(one: Restore, proxy: Proxy, unseen: bool) -> None:
    one.run(unseen=unseen)
    one.check()
    asked = ranges(proxy)
    total = sum(array.nbytes for array in STATE.values())
    assert total <= sum(last - first + 1 for _, first, last in asked) < 1.01 * total
    assert all(a[0] != b[0] or a[2] < b[1] for a, b in pairwise(asked))
    assert len(asked) <= total // (1 << 20) + 2 < len(STATE) // 2


def test_a_body_that_breaks_off_and_a_server_that_is_busy_cost_no_restore(one: Restore, proxy: Proxy) -> None:
    proxy.plan(cut_reply(100_000), match="packs/", times=2)
    proxy.plan(s3_error(503, "SlowDown"), match="packs/", times=2, after=2)
    one.run()
    one.check()


def test_what_a_server_answers_wrongly_is_found_before_a_target_is_touched(one: Restore, proxy: Proxy) -> None:

    def flipped(body: bytes) -> bytes:
        middle = len(body) // 2
        return body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]

    proxy.plan(edit(flipped), match="packs/", times=50)
    with pytest.raises(CorruptionError):
        one.run()
    assert all((target == 7).all() for target in one.targets.values())
