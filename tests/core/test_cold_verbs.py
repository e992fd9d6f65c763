"""Every verb that looks answers the same on a host that knows nothing, a part, or all of a remote repository."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cas_ckpt.core.config import Config
from cas_ckpt.core.create import new_store_id, write_config
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.refs import RefKind
from cas_ckpt.repository import Repository
from cas_ckpt.storage.memory import MemoryStore
from tests.committing import commit
from tests.remote_store import RemoteStore

pytestmark = pytest.mark.slow

VERBS: dict[str, Callable[[Repository], Any]] = {
    "log": lambda repo: repo.log(),
    "log --all": lambda repo: repo.log(all_refs=True),
    "log -n 2": lambda repo: repo.log(limit=2),
    "log --metric": lambda repo: repo.log(where=["loss<3"]),
    "log --step": lambda repo: repo.log(step="2:4"),
    "log --key": lambda repo: repo.log(keys="model/w0"),
    "log main~2": lambda repo: repo.log("main~2"),
    "log --first-parent": lambda repo: repo.log(first_parent=True),
    "show": lambda repo: repo.show("main"),
    "show main~3": lambda repo: repo.show("main~3"),
    "ls": lambda repo: repo.ls("main"),
    "ls pattern": lambda repo: repo.ls("main~1", "model/*"),
    "entry": lambda repo: repo.entry("main", "model/w1"),
    "read": lambda repo: repo.read("main", "model/w1").tolist(),
    "read region": lambda repo: repo.read("main~2", "model/w1", np.s_[3:9]).tolist(),
    "read value": lambda repo: repo.read("main", "step"),
    "load": lambda repo: {name: each.tolist() for name, each in repo.load("main", keys="model/*")["model"].items()},
    "find": lambda repo: list(repo.find("model/w*")),
    "find_commits": lambda repo: list(repo.find_commits("model/w0")),
    "diff": lambda repo: repo.diff("main~1", "main"),
    "diff side": lambda repo: repo.diff("side", "main"),
    "resolve": lambda repo: repo.resolve("main~4"),
    "resolve step": lambda repo: repo.resolve("main@step:3"),
    "merge_base": lambda repo: repo.merge_base("main", "side"),
    "is_ancestor": lambda repo: repo.is_ancestor("main~3", "main"),
    "lineage": lambda repo: repo.lineage("main"),
    "holders": lambda repo: repo.holders("main", "model/w1"),
    "nearest": lambda repo: repo.nearest("main"),
    "metrics": lambda repo: repo.metrics(),
    "best": lambda repo: repo.best("loss"),
    "latest": lambda repo: repo.latest(),
    "branches": lambda repo: repo.branches(),
    "tags": lambda repo: repo.tags(),
    "reflog": lambda repo: repo.reflog("side"),
    "unique": lambda repo: repo.unique("side"),
    "freed": lambda repo: repo.freed("side"),
    "stats": lambda repo: repo.stats(),
    "commit_stats": lambda repo: repo.commit_stats("main"),
    "du": lambda repo: repo.du(),
    "shards": lambda repo: list(repo.shards("main")),
    "status": lambda repo: repo.status(),
    "sql": lambda repo: repo.sql("SELECT count(*) FROM commits").rows,
}


@pytest.fixture(scope="module")
def bucket() -> MemoryStore:
    inner = MemoryStore(url="s3://bucket/llm")
    write_config(inner, Config(new_store_id()))
    rng = np.random.default_rng(1)
    weights = {f"w{number}": rng.standard_normal(3000).astype(np.float32) for number in range(3)}
    with Repository(RepositoryHandle.on_store(RemoteStore(inner), cache=None)) as repo:
        for number in range(6):
            model = weights | {"w0": rng.standard_normal(3000).astype(np.float32)}
            repo.commit({"model": model, "step": number}, branch="main", step=number, metrics={"loss": float(number)})
            if number == 3:
                repo.tag("v1")
                _fork(inner, {"model": weights, "step": 9})
    return inner


def _fork(inner: MemoryStore, state: dict[str, Any]) -> None:
    """A commit on a branch of its own; by another user, as one who goes on with main goes on from his last commit."""
    with Repository(RepositoryHandle.on_store(RemoteStore(inner), cache=None)) as repo:
        repo.branch("side", start="main")
        repo.commit(state, branch="side", step=9)


@pytest.fixture(scope="module")
def answers(bucket: MemoryStore) -> dict[str, Any]:
    found = {}
    for name, ask in VERBS.items():
        with closing(RepositoryHandle.on_store(RemoteStore(bucket), cache=None)) as handle:
            handle.sync()
            with Repository(handle) as repo:
                found[name] = repr(ask(repo))
    assert "[]" not in found.values(), "an answer of nothing says nothing"
    return found


@pytest.mark.parametrize("verb", VERBS)
def test_a_host_that_knows_nothing_answers_the_same(bucket: MemoryStore, answers: dict[str, Any], verb: str) -> None:
    with Repository(RepositoryHandle.on_store(RemoteStore(bucket), cache=None)) as repo:
        assert repr(VERBS[verb](repo)) == answers[verb]


@pytest.mark.parametrize("verb", VERBS)
def test_a_host_that_looked_at_the_log_answers_the_same(
    bucket: MemoryStore, answers: dict[str, Any], verb: str, tmp_path: Path
) -> None:
    for _ in range(2):
        with Repository(RepositoryHandle.on_store(RemoteStore(bucket), cache=tmp_path, lazy=True)) as repo:
            repo.log(), repo.read("main", "model/w1")
            assert repr(VERBS[verb](repo)) == answers[verb]


@pytest.mark.parametrize("verb", VERBS)
def test_a_host_that_listed_one_commit_answers_the_same(
    bucket: MemoryStore, answers: dict[str, Any], verb: str, tmp_path: Path
) -> None:
    """Its index knows the packs of that commit, and not those before."""
    store = RemoteStore(bucket)
    with Repository(RepositoryHandle.on_store(store, cache=tmp_path, lazy=True)) as repo:
        assert repr(repo.ls("main")) == answers["ls"]
        assert 0 < len(repo._handle.index.packs()) < len(dict(bucket.list("packs/")))
        assert store.tally("list").calls == 0, store.asked
        assert repr(VERBS[verb](repo)) == answers[verb]
    with Repository(RepositoryHandle.on_store(RemoteStore(bucket), cache=tmp_path, lazy=True)) as repo:
        assert repr(VERBS[verb](repo)) == answers[verb]


@pytest.mark.parametrize("verb", VERBS)
def test_a_host_whose_index_is_behind_answers_the_same(
    bucket: MemoryStore, answers: dict[str, Any], verb: str, tmp_path: Path
) -> None:
    with closing(RepositoryHandle.on_store(RemoteStore(bucket), cache=tmp_path)) as handle:
        handle.sync()
        head = handle.refs.get(RefKind.BRANCH, "main").target
        assert head is not None
        newest = handle.locate([head])[head][0].pack
        handle.index.drop_packs([newest])
    with Repository(RepositoryHandle.on_store(RemoteStore(bucket), cache=tmp_path, lazy=True)) as repo:
        assert repr(VERBS[verb](repo)) == answers[verb]


WARM = {"log": 2, "ls": 1, "entry": 1, "diff": 2, "read": 1, "resolve": 1, "find": 3, "branches": 1}
"""Requests of a process on a host that looked before."""


@pytest.mark.parametrize("verb", WARM)
def test_a_second_look_takes_few_requests(bucket: MemoryStore, verb: str, tmp_path: Path) -> None:
    for _ in range(3 if verb == "log" else 2):  # HEAD: the second lists refs, whose versions it does not know yet
        store = RemoteStore(bucket)
        with Repository(RepositoryHandle.on_store(store, cache=tmp_path, lazy=True)) as repo:
            VERBS[verb](repo)
    assert store.requests <= WARM[verb], store.asked


@pytest.mark.parametrize("verb", ["log", "ls", "diff", "show"])
def test_in_one_look_it_takes_one_request_for_all_refs(bucket: MemoryStore, verb: str, tmp_path: Path) -> None:
    for _ in range(2):
        store = RemoteStore(bucket)
        handle = RepositoryHandle.on_store(store, cache=tmp_path, lazy=True)
        with Repository(handle) as repo, repo.one_look():
            VERBS[verb](repo)
    assert store.tally("list_versions").calls == 1 and store.tally("get").calls == 0
    assert store.requests <= 2, store.asked


def test_commits_of_others_are_in_every_answer(tmp_path: Path) -> None:
    inner = MemoryStore(url="s3://bucket/llm")
    write_config(inner, Config(new_store_id()))
    for number in range(4):
        with closing(RepositoryHandle.on_store(RemoteStore(inner), cache=None)) as writer:
            made = commit(writer, {"w": np.full(300, number, np.float32)}, step=number, metrics={"loss": -number})
        with Repository(RepositoryHandle.on_store(RemoteStore(inner), cache=tmp_path, lazy=True)) as repo:
            assert repo.log()[0].id == made.id and repo.read("main", "w")[0] == number
            assert repo.best("loss")[0].commit.id == made.id
            assert repo.stats().num_commits == number + 1
