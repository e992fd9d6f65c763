"""A commit relies only on packs that its own store has and that no garbage collection condemned."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from cas_ckpt import limits
from cas_ckpt.core.config import INDEX_PATH
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.protocol import GC_STATE_KEY, GcState, encode_gc_state
from cas_ckpt.core.publish import publish_ref
from cas_ckpt.core.refs import Generation, RefKind, new_move
from cas_ckpt.core.revisions import resolve
from cas_ckpt.errors import CkptError, ConflictError, NotFoundError, PermissionDeniedError
from cas_ckpt.index import contents
from cas_ckpt.objects.digest import Digest
from cas_ckpt.ops.refs import create_branch, delete_branch
from cas_ckpt.storage.file import FileStore
from tests.builders import commit, new_repository, numbers, same_bytes, stored_arrays
from tests.meddling import MeddledStore

OLD = {"w": numbers(1 << 19, seed=1)}
OTHER = {"w": numbers(1 << 19, seed=2)}


def packs(handle: RepositoryHandle) -> list[str]:
    return [key for key, _ in handle.store.list("packs/")]


def condemn(handle: RepositoryHandle, keys: list[str]) -> None:
    handle.store.put(GC_STATE_KEY, encode_gc_state(GcState(Generation(1), "condemned", tuple(keys))))


def test_a_condemned_pack_is_not_relied_on_after_a_reader_met_it_again(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    commit(handle, OLD)
    condemned = packs(handle)
    condemn(handle, condemned)
    handle.begin_writing()
    handle.sync()  # as any miss of a reader does
    info = commit(handle, OLD, branch="second")
    for key in condemned:
        handle.store.delete(key)
    assert same_bytes(stored_arrays(RepositoryHandle.open(tmp_path / "repo"), info.root)["w"], OLD["w"])


@contextmanager
def reads_of_the_index(handle: RepositoryHandle) -> Iterator[list[object]]:
    """One entry for each time that the block reads the index."""
    found: list[object] = []

    @event.listens_for(handle.index._database.engine, "checkout")
    def look(connection: object, *_: object) -> None:
        found.append(connection)

    yield found
    event.remove(handle.index._database.engine, "checkout", look)


def test_a_commit_of_many_new_chunks_asks_the_index_once(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    commit(handle, OLD)
    stored = [Digest(each) for each in handle.index.read(contents.chunk_digests)]
    known = handle.known_to_commit()
    new = [Digest(bytes([number]) * 32) for number in range(9)]
    with reads_of_the_index(handle) as reads:
        assert known(stored) == [True] * len(stored)
        assert not reads
        assert [known([digest, stored[0]]) for digest in new] == [[False, True]] * len(new)
    assert len(reads) == 1


def test_a_commit_finds_the_chunks_that_another_handle_has_written_since_the_last_one(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    commit(handle, OLD)
    other = RepositoryHandle.open(tmp_path / "repo")
    commit(other, OTHER)
    written = [Digest(each) for each in other.index.read(contents.chunk_digests)]
    assert handle.known_to_commit()([*written, Digest(b"\1" * 32)]) == [*[True] * len(written), False]


def test_a_branch_is_not_pointed_at_a_commit_in_condemned_packs(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    info = commit(handle, OLD)
    condemn(handle, packs(handle))
    target = Digest(bytes.fromhex(info.id))
    with pytest.raises(NotFoundError):
        publish_ref(handle, RefKind.BRANCH, "again", target, move=new_move(None, target, "test", "me"))


def test_a_branch_is_not_pointed_at_a_commit_that_was_collected_in_part(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    info = commit(handle, OLD)
    for key in packs(handle):
        if key.endswith(".data"):
            handle.store.delete(key)
    handle.store.put(GC_STATE_KEY, encode_gc_state(GcState(Generation(2))))
    target = Digest(bytes.fromhex(info.id))
    with pytest.raises(NotFoundError):
        publish_ref(handle, RefKind.BRANCH, "again", target, move=new_move(None, target, "test", "me"))


def test_a_ref_is_never_set_for_a_generation_that_is_over(tmp_path: Path) -> None:
    new_repository(tmp_path / "repo").close()
    inner, generations = FileStore(tmp_path / "repo"), itertools.count(1)

    def begin_a_collection() -> None:
        inner.put(GC_STATE_KEY, encode_gc_state(GcState(Generation(next(generations)))))

    store = MeddledStore(inner, begin_a_collection, before="get", key="*again.ref", times=0)
    handle = RepositoryHandle.on_store(store, index_url=str(tmp_path / "repo" / INDEX_PATH))
    info = commit(handle, OLD)
    target = Digest(bytes.fromhex(info.id))
    publish_ref(handle, RefKind.BRANCH, "again", target, move=new_move(None, target, "test", "me"))
    store.times = 2
    ref = publish_ref(handle, RefKind.BRANCH, "again", target, move=new_move(None, target, "t", "me"), force=True)
    assert ref.generation.number == 2


def test_chunks_of_another_repository_in_a_shared_index_are_not_relied_on(tmp_path: Path) -> None:
    place = str(tmp_path / "shared.sqlite")
    for name in ("a", "b"):
        new_repository(tmp_path / name).close()
    first = RepositoryHandle.open(tmp_path / "a", index_url=place)
    commit(first, OTHER)
    with pytest.raises(ConflictError, match="no two repositories share one file"):
        RepositoryHandle.open(tmp_path / "b", index_url=place)
    first.close()
    second = RepositoryHandle.open(tmp_path / "b", index_url=place)
    commit(second, OLD)
    second.close()
    first = RepositoryHandle.open(tmp_path / "a", index_url=place)
    info = commit(first, OLD)
    again = RepositoryHandle.open(tmp_path / "a", index_url=str(tmp_path / "fresh.sqlite"))
    assert same_bytes(stored_arrays(again, info.root)["w"], OLD["w"])


def test_two_copies_of_a_repository_that_share_an_index_do_not_rely_on_each_other(tmp_path: Path) -> None:
    import shutil

    place = str(tmp_path / "shared.sqlite")
    new_repository(tmp_path / "a").close()
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    first = RepositoryHandle.open(tmp_path / "a", index_url=place)
    commit(first, {"x": numbers(600)})
    second = RepositoryHandle.open(tmp_path / "b", index_url=place)
    commit(second, OLD, branch="other")  # not main: that the index knows of one makes a missing record a lost one
    info = commit(first, OLD)
    again = RepositoryHandle.open(tmp_path / "a", index_url=str(tmp_path / "fresh.sqlite"))
    assert same_bytes(stored_arrays(again, info.root)["w"], OLD["w"])


def test_what_another_process_committed_is_not_written_again(tmp_path: Path) -> None:
    first = new_repository(tmp_path / "repo")
    commit(first, {"x": numbers(600)})
    second = RepositoryHandle.open(tmp_path / "repo")
    commit(second, OLD)
    assert commit(first, OLD).stats.num_new_chunks == 0


@pytest.mark.parametrize(
    "write",
    [
        lambda handle: commit(handle, OTHER),
        lambda handle: create_branch(handle, "new"),
        lambda handle: delete_branch(handle, "side", force=True),
    ],
    ids=["commit", "branch", "delete"],
)
def test_a_repository_opened_read_only_is_not_written(
    tmp_path: Path, write: Callable[[RepositoryHandle], object]
) -> None:
    writer = new_repository(tmp_path / "repo")
    commit(writer, OLD)
    create_branch(writer, "side")
    heads = [ref.record for ref in writer.refs.list(RefKind.BRANCH)]
    before = packs(writer)
    with pytest.raises(PermissionDeniedError):
        write(RepositoryHandle.open(tmp_path / "repo", read_only=True))
    assert packs(writer) == before
    assert [ref.record for ref in writer.refs.list(RefKind.BRANCH)] == heads


def test_a_read_that_lost_the_race_for_a_sync_finds_what_the_other_brought(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    other = RepositoryHandle.open(tmp_path / "repo", index_url=str(tmp_path / "other.sqlite"))
    info = commit(other, OLD)
    wanted = Digest(bytes.fromhex(info.root))
    real = handle.sync

    def overtaken() -> int:
        real()  # another thread was first
        return real()

    handle.sync = overtaken  # type: ignore[method-assign]
    assert wanted in handle.locate([wanted])
    assert resolve(handle, info.id[:12]).hex() == info.id


def test_a_commit_that_is_published_is_not_reported_as_failed_when_the_index_refuses(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    commit(handle, OTHER)
    real = handle.index.add_packs

    def refuse(records: object, **named: object) -> int:
        raise CkptError("no space for the index")

    handle.index.add_packs = refuse  # type: ignore[method-assign]
    info = commit(handle, OLD)
    handle.index.add_packs = real  # type: ignore[method-assign]
    assert resolve(handle, "main").hex() == info.id
    assert commit(handle, OLD).stats.num_new_chunks == 0


def test_what_a_failed_commit_wrote_is_not_written_again(tmp_path: Path) -> None:
    import numpy as np

    from cas_ckpt.objects.spec import Spec
    from cas_ckpt.objects.state import Container, Item, Name, TensorItem
    from cas_ckpt.ops.commit.commit import commit_tree
    from cas_ckpt.ops.commit.request import CommitRequest
    from tests.builders import tensor

    handle = new_repository(tmp_path / "repo", pack_bytes=1 << 20)

    class Failing:
        def read(self, box: object) -> np.ndarray[Any, Any]:
            # The thread that writes packs is under way: a slow disk may not have one durable by now.
            deadline_s = time.monotonic() + 60
            while not packs(handle) and time.monotonic() < deadline_s:
                time.sleep(0.005)
            raise KeyError("gone")

    big = numbers(1 << 22, seed=4)
    state: dict[Name, Item] = {"a": tensor(big), "b": TensorItem(Spec("float32", (1 << 20,)), Failing())}
    with pytest.raises(KeyError), limits(num_threads=1):
        commit_tree(handle, Container("dict", state), CommitRequest())
    written = sum(key.endswith(".data") for key in packs(handle))
    assert written
    info = commit(handle, {"a": big})
    assert info.stats.num_new_chunks == info.stats.num_chunks - written
