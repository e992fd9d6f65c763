"""What push and pull cost: bytes by what changed, requests by what changed; over S3 too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cas_ckpt import Repository
from cas_ckpt.core import host_cache
from cas_ckpt.core.config import Config
from cas_ckpt.core.create import new_store_id, write_config
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.refs import RefKind
from cas_ckpt.core.revisions import resolve
from cas_ckpt.ops.sync.send import RefUpdate, SendOptions, SyncReport, send
from cas_ckpt.storage.memory import MemoryStore
from tests.builders import commit, new_repository, numbers
from tests.ops.sync.test_push_and_pull import require_same
from tests.remote_store import RemoteStore
from tests.servers import S3Server

LAYERS = 40


def state(changed: int = 0, *, layers: int = LAYERS) -> dict[str, object]:
    """Layers of 80 KB in a nested dict; of `changed` of them other ones."""
    found = {f"layer{number:03}": {"w": numbers(100, 200, seed=number)} for number in range(layers)}
    for number in range(changed):
        found[f"layer{number * 7 % layers:03}"]["w"] = numbers(100, 200, seed=1000 + number)
    return {"model": found, "step": changed}


class Far:
    """A bucket as this host sees it: each look is a new process with its cache."""

    def __init__(self, folder: Path) -> None:
        self.bucket = MemoryStore(url="s3://bucket/llm")
        write_config(self.bucket, Config(new_store_id()))
        self.cache = folder / "cache"

    def open(self) -> tuple[RemoteStore, RepositoryHandle]:
        store = RemoteStore(self.bucket)
        handle = RepositoryHandle.on_store(store, cache=self.cache)
        return store, handle


def push(ours: RepositoryHandle, far: Far) -> tuple[SyncReport, RemoteStore]:
    store, theirs = far.open()
    target = ours.refs.get(RefKind.BRANCH, "main").target
    report = send(ours, theirs, [RefUpdate(RefKind.BRANCH, "main", target)], SendOptions("push"), near=ours)
    theirs.index.close()
    return report, store


def test_a_push_after_a_commit_that_changed_a_hundredth_sends_what_changed(tmp_path: Path) -> None:
    ours, far = new_repository(tmp_path / "ours", encoding="raw"), Far(tmp_path)
    array = numbers(4096, 4096)  # 64 MB in cells of 4 MB
    rest = {f"p{number}": numbers(40_000, seed=number) for number in range(100)}
    commit(ours, {"w": array, "rest": rest})
    whole, _ = push(ours, far)
    array[:100] += 1  # less than a cell
    stats = commit(ours, {"w": array, "rest": rest}).stats
    report, store = push(ours, far)
    assert report.num_bytes <= 1.05 * stats.stored_bytes
    assert report.num_bytes < 0.5 * whole.num_bytes  # 8 cells of 16
    sent = sum(store.tally(name).num_bytes for name in ("put", "write", "compare_and_swap"))
    assert sent <= 1.05 * stats.stored_bytes
    assert store.requests <= 12, store.asked


@pytest.mark.parametrize("changed", [1, 4, 16])
def test_requests_of_a_push_do_not_grow_with_what_stayed(tmp_path: Path, changed: int) -> None:
    counts = []
    for layers in (LAYERS, 3 * LAYERS):
        ours, far = new_repository(tmp_path / f"ours{layers}"), Far(tmp_path / f"{layers}")
        commit(ours, state(layers=layers))
        push(ours, far)
        commit(ours, state(changed, layers=layers))
        report, store = push(ours, far)
        assert report.num_chunks == changed
        counts.append(store.requests)
    assert counts[0] == counts[1] <= 12, counts


def test_requests_of_a_push_of_many_commits_do_not_grow_with_their_number(tmp_path: Path) -> None:
    ours, far = new_repository(tmp_path / "ours"), Far(tmp_path)
    counts = []
    for number in (2, 30):
        for step in range(number):
            commit(ours, {"w": numbers(2000, seed=1000 * number + step)})
        counts.append(push(ours, far)[1].requests)
    assert counts[1] <= counts[0], counts


def test_a_push_of_what_is_there_asks_for_little(tmp_path: Path) -> None:
    ours, far = new_repository(tmp_path / "ours"), Far(tmp_path)
    commit(ours, state())
    push(ours, far)
    report, store = push(ours, far)
    assert report.num_packs == 0
    assert store.requests <= 2, store.asked


def test_a_pull_reads_what_changed_and_asks_in_proportion(tmp_path: Path) -> None:
    ours, far = new_repository(tmp_path / "ours"), Far(tmp_path)
    commit(ours, state())
    push(ours, far)

    def pull(mine: RepositoryHandle) -> tuple[SyncReport, RemoteStore]:
        store, theirs = far.open()
        theirs.sync()
        target = theirs.refs.get(RefKind.BRANCH, "main").target
        report = send(theirs, mine, [RefUpdate(RefKind.BRANCH, "main", target)], SendOptions("pull"), near=mine)
        theirs.index.close()
        return report, store

    mine = new_repository(tmp_path / "mine")
    first, _ = pull(mine)
    assert first.num_chunks == LAYERS
    commit(ours, state(1))
    push(ours, far)
    report, store = pull(mine)
    read = sum(store.tally(name).num_bytes for name in ("get", "get_range", "get_tail", "read_into"))
    assert report.num_chunks == 1
    assert store.requests <= 16, store.asked
    assert read <= 1.05 * report.num_bytes + 64 * 1024
    require_same(ours, mine, "main")


@pytest.mark.slow
def test_push_to_a_bucket_and_clone_from_it(tmp_path: Path, s3: S3Server) -> None:
    url = s3.url(s3.new_bucket())
    with Repository.init(tmp_path / "here") as here, Repository.init(url) as there:
        for changed in range(3):
            commit(here._handle, state(changed))
        commit(here._handle, {"w": np.arange(3_000_000, dtype="float32")}, branch="big")
        here.add_remote("origin", url)
        here.push(all_branches=True)
        there._handle.sync()
        require_same(here._handle, there._handle, "main")
        commit(there._handle, state(5))
        here.pull()
        assert here.resolve("main") == there.resolve("main")
        with Repository.clone(url, tmp_path / "clone") as made:
            for name, here_name in (("main", "main"), ("big", "origin/big"), ("main~2", "main~2")):
                require_same(there._handle, made._handle, name, here_name)
            made.push(refs="main:copy")
        other = s3.url(s3.new_bucket())
        with Repository.clone(url, other) as copy:
            require_same(there._handle, copy._handle, "main")
            assert copy.fsck(read_data=True).ok
        assert resolve(there._handle, "copy") == resolve(here._handle, "main")


@pytest.mark.parametrize("kept", [True, False])
def test_remotes_are_remembered_where_the_opener_said_or_nowhere(tmp_path: Path, s3: S3Server, kept: bool) -> None:
    url, place, usual = s3.url(s3.new_bucket()), tmp_path / "cache", tmp_path / "usual"
    cache = place if kept else None
    with host_cache.cache_at(usual):
        Repository.init(url, cache=None).close()
        Repository.init(tmp_path / "here").close()
        with Repository.open(tmp_path / "here", cache=cache) as here:
            commit(here._handle, state())
            here.add_remote("origin", url)
            here.push()
            here.fetch()
            here.pull()
        Repository.clone(url, tmp_path / "clone", cache=cache).close()
    assert not usual.exists()
    assert place.exists() == kept
