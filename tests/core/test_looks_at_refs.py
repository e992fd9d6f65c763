"""Refs of a remote repository: one listing says which of them changed, and what changed is always seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.refs import Head, RefKind
from cas_ckpt.core.revisions import resolve
from cas_ckpt.errors import ConflictError, NoRepositoryError, NotFoundError
from cas_ckpt.ops.refs import create_branch, create_tag, set_default_branch
from cas_ckpt.repository import Repository
from cas_ckpt.storage.memory import MemoryStore
from tests.committing import commit
from tests.core.test_host_cache import fill
from tests.remote_store import RemoteStore

LOOKS: tuple[Callable[[RepositoryHandle], object], ...] = (
    lambda handle: list(handle.refs.list()),
    lambda handle: handle.refs.get(RefKind.BRANCH, "main"),
    lambda handle: handle.refs.find(RefKind.BRANCH, "main"),
    lambda handle: handle.refs.seen([RefKind.BRANCH], "main"),
    lambda handle: handle.index.packs(),
    lambda handle: handle.sync(),
)


@pytest.fixture
def bucket() -> MemoryStore:
    inner = MemoryStore(url="s3://bucket/llm")
    fill(inner, 3)
    with closing(RepositoryHandle.on_store(RemoteStore(inner), cache=None)) as handle:
        for number in range(20):
            create_branch(handle, f"b{number}")
        create_tag(handle, "v1")
    return inner


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def store(bucket: MemoryStore) -> RemoteStore:
    return RemoteStore(bucket)


@pytest.fixture
def warm(store: RemoteStore, place: Path) -> Iterator[RepositoryHandle]:
    """A handle that looked at everything, and counts from now on."""
    with closing(RepositoryHandle.on_store(store, cache=place)) as handle:
        handle.sync()
        list(handle.refs.list())
        store.reset()
        yield handle


def test_the_second_look_at_all_refs_is_one_request(warm: RepositoryHandle, store: RemoteStore) -> None:
    assert len(list(warm.refs.list())) == 22
    assert len(list(warm.refs.list(RefKind.TAG))) == 1
    assert store.asked == {"list_versions": 2}


def test_the_first_look_of_the_next_process_is_one_request(
    warm: RepositoryHandle, bucket: MemoryStore, place: Path
) -> None:
    store = RemoteStore(bucket)
    with closing(RepositoryHandle.on_store(store, cache=place, lazy=True)) as handle:
        assert len(list(handle.refs.list())) == 22
        assert handle.index.packs()
    assert store.asked == {"list_versions": 1}


def test_what_others_changed_is_seen_and_only_that_is_read(
    warm: RepositoryHandle, store: RemoteStore, bucket: MemoryStore
) -> None:
    with closing(RepositoryHandle.on_store(RemoteStore(bucket), cache=None)) as other:
        made = commit(other, {"w": np.ones(5, np.float32)}, branch="b7")
        create_branch(other, "new")
    found = {ref.name: ref.target for ref in warm.refs.list(RefKind.BRANCH)}
    target = found["b7"]
    assert target is not None and target.hex() == made.id and "new" in found
    assert store.asked == {"get": 2, "list_versions": 1}


def test_every_look_of_an_open_repository_sees_what_is_there_now(warm: RepositoryHandle, bucket: MemoryStore) -> None:
    with closing(RepositoryHandle.on_store(RemoteStore(bucket), cache=None)) as other:
        for number in range(3):
            made = commit(other, {"w": np.full(5, number, np.float32)})
            assert resolve(warm, "main").hex() == resolve(warm, "HEAD").hex() == made.id


def test_a_name_is_looked_for_by_one_request(warm: RepositoryHandle, store: RemoteStore) -> None:
    resolve(warm, "v1"), resolve(warm, "b3"), resolve(warm, "HEAD")
    assert store.asked == {"get": 1, "list_versions": 2}
    with pytest.raises(NotFoundError):
        resolve(warm, "nothing")


def test_one_look_takes_one_request_for_everything(store: RemoteStore, place: Path) -> None:
    with Repository(RepositoryHandle.on_store(store, cache=place)) as repo:
        repo.branches(), repo.tags(), repo.pins()
        store.reset()
        with repo.one_look():
            assert len(repo.branches()) == 21 and list(repo.tags()) == ["v1"] and not repo.pins()
            assert repo.resolve("main") == repo.branches()["main"]
        assert store.asked == {"list_versions": 1}
        repo.branches()
        assert store.asked == {"list_versions": 2}


def test_a_commit_inside_of_one_look_goes_on_top_of_what_is_there(store: RemoteStore, bucket: MemoryStore) -> None:
    with (
        Repository(RepositoryHandle.on_store(store, cache=None)) as repo,
        Repository(RepositoryHandle.on_store(RemoteStore(bucket), cache=None)) as other,
        repo.one_look(),
    ):
        repo.branches()
        theirs = other.commit({"w": 1})
        ours = repo.commit({"w": 2})
        assert ours.parents == (theirs.id,)


def test_a_lazy_handle_of_a_repository_that_is_gone_says_so(
    warm: RepositoryHandle, bucket: MemoryStore, place: Path
) -> None:
    for look in LOOKS:
        with closing(RepositoryHandle.on_store(RemoteStore(bucket), cache=place)):
            pass  # it was looked at last
        gone = RemoteStore(MemoryStore(url=bucket.url))
        lazy = RepositoryHandle.on_store(gone, cache=place, lazy=True)
        with closing(lazy), pytest.raises(NoRepositoryError):
            look(lazy)
        with pytest.raises(NoRepositoryError):
            RepositoryHandle.on_store(gone, cache=place, lazy=True)


def test_another_repository_at_the_same_url_is_noticed_before_anything_is_answered(
    warm: RepositoryHandle, bucket: MemoryStore, place: Path
) -> None:
    anew = MemoryStore(url=bucket.url)
    fill(anew, 1)
    for look in LOOKS:
        with closing(RepositoryHandle.on_store(RemoteStore(bucket), cache=place)):
            pass  # it was looked at last
        lazy = RepositoryHandle.on_store(RemoteStore(anew), cache=place, lazy=True)
        with closing(lazy), pytest.raises(ConflictError, match="another repository"):
            look(lazy)
        with closing(RepositoryHandle.on_store(RemoteStore(anew), cache=place, lazy=True)) as handle:
            look(handle)
            assert len(list(handle.refs.list())) == 1


def test_a_host_that_remembers_the_config_sees_that_another_branch_became_the_default_branch(
    warm: RepositoryHandle, bucket: MemoryStore, place: Path
) -> None:
    with closing(RepositoryHandle.on_store(RemoteStore(bucket), cache=None)) as other:
        made = commit(other, {"w": np.ones(5, np.float32)}, branch="b7")
        list(warm.refs.list())  # remembered as well: only the default branch is another one from now on
        set_default_branch(other, "b7")
    store = RemoteStore(bucket)
    for _ in range(2):  # never believed, for it may change again
        with closing(RepositoryHandle.on_store(store, cache=place, lazy=True)) as handle:
            assert len(list(handle.refs.list())) == 22  # which proves the repository, and not its config
            store.reset()
            assert (resolve(handle, "HEAD").hex(), handle.head) == (made.id, Head("b7"))
            assert store.asked == {"get": 1, "list_versions": 1}


def test_a_record_in_the_cache_that_is_damaged_is_read_again(
    warm: RepositoryHandle, bucket: MemoryStore, place: Path
) -> None:
    assert warm.cache is not None
    known = warm.cache.refs()
    warm.cache.note_refs({key: (version, record[:-3] + b"xxx") for key, (version, record) in known.items()})
    with closing(RepositoryHandle.on_store(RemoteStore(bucket), cache=place)) as handle:
        assert len(list(handle.refs.list())) == 22
