"""gc, repack and push whose connection ends for good at a request of each kind: what they leave is whole.

To the bucket that is a process that died: nothing comes any more, not even what would take back what was begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from botocore.retries import standard

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.errors import CkptError
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.storage import s3 as s3_module
from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.storage.store import Store
from cas_ckpt.storage.url import open_store
from tests.crash.collecting import THOROUGH, World, world
from tests.crash.test_push_every_effect import BRANCHES, Push, send_all
from tests.proxy import Proxy, Request, drop_reply, s3_error
from tests.servers import S3Server

PART = 64 << 10

Work = Callable[[RepositoryHandle], None]


class Bucket:
    """Repositories in a bucket, behind a proxy that can end the connection."""

    def __init__(self, s3: S3Server, proxy: Proxy) -> None:
        self.s3, self.proxy, self.name, self.number = s3, proxy, s3.new_bucket(), 0

    def after(self, content: Store, work: Work, *, cut: int | None = None, lost: bool = False) -> MemoryStore:
        """What the bucket holds after `work` on a repository of this `content`, in memory.

        Args:
            cut: So many requests are answered, and none after them.
            lost: One more is done, but its answer does not come back.
        """
        self.number += 1
        prefix = f"run-{self.number}/"
        for key, _ in content.list(""):
            self.s3.client.put_object(Bucket=self.name, Key=prefix + key, Body=content.get(key))
        self.proxy.clear()
        store = open_store(S3Server(self.proxy.endpoint).url(self.name, prefix, part_bytes=PART, parallel=1))
        handle = RepositoryHandle.on_store(store, index_url=":memory:", cache=None)
        self.proxy.clear()
        if cut is not None:
            if lost:
                self.proxy.plan(drop_reply(), after=cut)
            self.proxy.plan(s3_error(403, "ExpiredToken"), after=cut + lost, times=100_000)
        with suppress(CkptError):
            work(handle)
        store.close()
        assert cut is None or len(self.proxy.requests) > cut + lost, "it was cut off"
        left = MemoryStore()
        for each in self.s3.client.list_objects_v2(Bucket=self.name, Prefix=prefix)["Contents"]:
            body = self.s3.client.get_object(Bucket=self.name, Key=each["Key"])["Body"]
            left.put(each["Key"].removeprefix(prefix), body.read())
        return left

    def cuts(self, content: Store, work: Work) -> list[tuple[int, bool]]:
        """Where to cut: before the first of each kind that changes something; of those that decide, after the last."""
        self.after(content, work)
        firsts: dict[str, int] = {}
        lasts: dict[str, int] = {}
        for number, request in enumerate(self.proxy.requests):
            if request.method not in ("GET", "HEAD"):
                kind = kind_of(request)
                if "gc/state" in kind:  # each step of the protocol
                    kind += f" {sum('gc/state' in other for other in firsts)}"
                firsts.setdefault(kind, number)
                if kind.startswith(DECIDING):
                    lasts[kind] = number
        self.kinds = firsts.keys()
        return [(number, False) for number in firsts.values()] + [(number, True) for number in lasts.values()]


def kind_of(request: Request) -> str:
    """Its method, what it is about, and what it does with that."""
    path, _, query = request.target.partition("?")
    room = next((name for name in ROOMS if f"/{name}" in path), "")
    words = (request.method, room, path[-5:] if room == "packs" else "", query.partition("=")[0])
    return " ".join(filter(None, words))


ROOMS = ("refs", "gc/state", "packs", "sessions", "names", "released")
DECIDING = ("PUT gc/state", "PUT refs", "POST packs .data uploadId")
COLLECTING = {
    "PUT packs .data", "PUT packs .meta", "PUT released", "PUT gc/state 0", "PUT refs", "PUT gc/state 1", "POST delete",
    "PUT gc/state 2",
}  # fmt: skip
PUSHING = {
    "POST packs .data uploads", "PUT packs .data uploadId", "POST packs .data uploadId", "PUT packs .meta", "PUT names",
    "PUT released", "PUT refs", "DELETE released",
}  # fmt: skip


@pytest.fixture
def bucket(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    monkeypatch.setattr(standard.ExponentialBackoff, "delay_amount", lambda self, context: 0.001)
    monkeypatch.setattr(s3_module, "_MIN_PART_BYTES", PART)
    with Proxy(s3.endpoint) as proxy:
        yield Bucket(s3, proxy)


@pytest.mark.slow
def test_a_repack_that_is_cut_off_at_a_request_of_any_kind_loses_nothing(bucket: Bucket) -> None:
    def collect(handle: RepositoryHandle) -> None:
        collect_garbage(handle, THOROUGH)

    cuts = bucket.cuts(world().inner, collect)
    assert bucket.kinds == COLLECTING
    for cut, lost in cuts:
        state = world()
        World(bucket.after(state.inner, collect, cut=cut, lost=lost), state.kept).finish()


@pytest.mark.slow
def test_a_push_that_is_cut_off_at_a_request_of_any_kind_leaves_refs_whole_and_the_next_one_goes_on(
    bucket: Bucket,
) -> None:
    push = Push()

    def send(handle: RepositoryHandle) -> None:
        send_all(push.ours, handle, list(BRANCHES))

    theirs = push.inner
    cuts = bucket.cuts(theirs, send)
    assert bucket.kinds == PUSHING
    for cut, lost in cuts:
        push.inner = bucket.after(theirs, send, cut=cut, lost=lost)
        push.check()
        push.finish()
