"""Commits, gc, repack and push whose requests are refused from one of them on: what they leave is whole.

To the bucket that is a process that died: nothing comes any more, not even what would take back what was begun.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import numpy as np
import pytest

from cas_ckpt import Repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.errors import CkptError
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.storage import url
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.storage.object_store import ObjectStore
from cas_ckpt.storage.store import Store
from tests.crash.collecting import THOROUGH, World, world
from tests.crash.test_push_every_effect import BRANCHES, Push, send_all
from tests.memory_bucket import MemoryBucket

Work = Callable[[RepositoryHandle], None]
WRITES = ("put", "begin", "put_part", "complete", "delete")


def store_in(bucket: MemoryBucket) -> ObjectStore:
    return ObjectStore(bucket, "", url="s3://bucket")


def after(content: Store, work: Work, *, cut: int | None = None, lost: bool = False) -> tuple[MemoryBucket, Store]:
    """A bucket, and what it holds after `work` on a repository of this `content`, in memory.

    Args:
        cut: So many requests are answered, and none after them.
        lost: One more is done, but its answer does not come back.
    """
    bucket = MemoryBucket()
    for key, _ in content.list(""):
        bucket.put(key, memoryview(content.get(key)), nonce="")
    with closing(store_in(bucket)) as store:
        handle = RepositoryHandle.on_store(store, index_url=":memory:", cache=None)
        bucket.requests.clear()
        bucket.refuse_from, bucket.lose_reply = cut, lost
        with suppress(CkptError):
            work(handle)
    assert cut is None or len(bucket.requests) > cut, "it was cut off"
    left = MemoryStore()
    for name, found in bucket.objects.items():
        left.put(name, found.data)
    return bucket, left


def cuts(content: Store, work: Work, kinds: set[str]) -> Iterator[tuple[int, bool]]:
    """Where to cut: before the first of each kind that writes; of those that decide, after the last, too."""
    bucket, _ = after(content, work)
    firsts: dict[str, int] = {}
    lasts: dict[str, int] = {}
    for number, (method, name) in enumerate(bucket.requests):
        if method in WRITES:
            suffix = name[-5:] if name.startswith("packs/") and method != "delete" else ""
            kind = " ".join(filter(None, (method, room_of(name), suffix)))
            if name == "gc/state":  # each step of the protocol
                kind += f" {sum('gc/state' in other for other in firsts)}"
            firsts.setdefault(kind, number)
            if kind.startswith(DECIDING):
                lasts[kind] = number
    assert firsts.keys() == kinds
    yield from ((number, False) for number in firsts.values())
    yield from ((number, True) for number in lasts.values())


def room_of(name: str) -> str:
    return next((room for room in ("refs", "gc/state", "packs", "sessions", "names", "released") if room in name), "")


DECIDING = ("put gc/state", "put refs", "complete packs .data")
COLLECTING = {
    "put packs .data", "put packs .meta", "put released", "put gc/state 0", "put refs", "put gc/state 1",
    "delete packs", "put gc/state 2",
}  # fmt: skip
PUSHING = {
    "begin packs .data", "put_part packs .data", "complete packs .data", "put packs .meta", "put names",
    "put released", "put refs", "delete released",
}  # fmt: skip


def test_a_repack_that_is_cut_off_at_a_request_of_any_kind_loses_nothing() -> None:
    def collect(handle: RepositoryHandle) -> None:
        collect_garbage(handle, THOROUGH)

    for cut, lost in cuts(world().inner, collect, COLLECTING):
        state = world()
        World(after(state.inner, collect, cut=cut, lost=lost)[1], state.kept).finish()


def test_a_push_that_is_cut_off_at_a_request_of_any_kind_leaves_refs_whole_and_the_next_one_goes_on() -> None:
    push = Push()

    def send(handle: RepositoryHandle) -> None:
        send_all(push.ours, handle, list(BRANCHES))

    theirs = push.inner
    for cut, lost in cuts(theirs, send, PUSHING):
        push.inner = after(theirs, send, cut=cut, lost=lost)[1]  # type: ignore[assignment]
        push.check()
        push.finish()


def state_of(seed: int) -> dict[str, object]:
    return {"w": np.random.default_rng(seed).standard_normal(40_000).astype("float32"), "step": seed}


@pytest.mark.parametrize("lost", [False, True], ids=["refused", "the last reply lost"])
def test_a_commit_that_is_cut_off_at_any_request_loses_nothing(monkeypatch: pytest.MonkeyPatch, lost: bool) -> None:
    for k in itertools.count(int(lost)):
        bucket = MemoryBucket()
        monkeypatch.setitem(url.SCHEMES, "s3", lambda text, bucket=bucket: store_in(bucket))
        with Repository.init("s3://bucket", encoding="raw") as repo:
            first = repo.commit(state_of(1))
        with Repository.open("s3://bucket") as repo:
            bucket.requests.clear()
            bucket.refuse_from, bucket.lose_reply = k, lost
            with suppress(CkptError):
                repo.commit(state_of(2))
            was_cut = len(bucket.requests) > k
            bucket.refuse_from = None
        with Repository.open("s3://bucket") as repo:
            head = repo.resolve("main")
            assert head == first.id or next(iter(repo.log("main"))).parents == (first.id,)
            np.testing.assert_array_equal(repo.load("main")["w"], state_of(1 if head == first.id else 2)["w"])
            again = repo.commit(state_of(3))
            assert repo.fsck(read_data=True).ok
            assert repo.resolve("main") == again.id
        if not was_cut:
            break
    assert k > 10, "a commit has more requests than that"
