"""Moving a ref: what is published is published once."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

import pytest

from cas_ckpt.core.config import Config
from cas_ckpt.core.create import new_store_id, write_config
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.publish import publish_copied, publish_lost_ref
from cas_ckpt.core.refs import RefKind, new_move, ref_key
from cas_ckpt.errors import ConflictError, NotFoundError, TransientStorageError
from cas_ckpt.index import history
from cas_ckpt.objects.digest import Digest
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.gc.plan import GcOptions
from cas_ckpt.ops.refs import create_branch
from cas_ckpt.storage.memory import MemoryStore
from tests.builders import commit
from tests.meddling import MeddledStore


class LostReplyStore(MemoryStore):
    """Does one swap of a ref, lets somebody commit on top, and answers that it was refused."""

    def __init__(self) -> None:
        super().__init__()
        self.armed = False

    def compare_and_swap(self, key: str, expected: bytes, data: Any) -> None:
        super().compare_and_swap(key, expected, data)
        if self.armed:
            self.armed = False
            commit(RepositoryHandle.on_store(self, index_url=":memory:"), {"theirs": 1}, message="theirs")
            raise ConflictError("refused, says a retry whose first try was done")


def test_an_own_commit_on_which_others_have_built_is_not_made_twice() -> None:
    store = LostReplyStore()
    write_config(store, Config(new_store_id()))
    handle = RepositoryHandle.on_store(store, index_url=":memory:")
    commit(handle, {"a": 1}, message="base")
    store.armed = True
    ours = commit(handle, {"a": 2}, message="ours")
    handle.sync()
    head = handle.refs.get(RefKind.BRANCH, "main").target
    assert head is not None
    messages = [row.message for row in history.log(handle.index, [head])]
    assert messages == ["theirs", "ours", "base"]
    assert handle.index.read(history.read_commit, head).parents == (bytes.fromhex(ours.id),)  # type: ignore[union-attr]


def test_a_branch_that_somebody_else_begins_at_this_moment_is_not_moved() -> None:
    inner = MemoryStore()
    write_config(inner, Config(new_store_id()))
    theirs = RepositoryHandle.on_store(inner, index_url=":memory:")
    first = commit(theirs, {"a": 1}).id
    second = commit(theirs, {"a": 2}).id
    store = MeddledStore(
        inner, lambda: create_branch(theirs, "again", start=first), before="put_if_absent", key="refs/heads/again.ref"
    )
    ours = RepositoryHandle.on_store(store, index_url=":memory:")
    with pytest.raises(ConflictError, match="there is a branch 'again' already"):
        create_branch(ours, "again", start=second)
    assert store.happened == 1
    assert theirs.refs.get(RefKind.BRANCH, "again").target == Digest(bytes.fromhex(first))


def test_a_commit_on_a_head_whose_pack_is_gone_says_so_once_and_is_made(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    write_config(store, Config(new_store_id()))
    handle = RepositoryHandle.on_store(store, index_url=":memory:")
    commit(handle, {"a": 1})
    before = {key for key, _ in store.list("packs/")}
    head = commit(handle, {"a": 2})
    for key in {key for key, _ in store.list("packs/")} - before:
        store.delete(key)
    after = RepositoryHandle.on_store(store, index_url=":memory:")
    with caplog.at_level(logging.WARNING, logger="cas_ckpt"):
        made = [commit(after, {"a": number}) for number in (3, 4)]
    assert made[0].parents == (head.id,)
    said = [record.getMessage() for record in caplog.records if "is in no pack of" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith(f"commit {head.id[:12]}, the head of branch 'main', ")
    assert "repo.fsck() says what" in said[0]


def test_a_commit_on_what_another_process_or_a_collection_has_moved_warns_of_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore()
    write_config(store, Config(new_store_id()))
    one, other = (RepositoryHandle.on_store(store, index_url=":memory:") for _ in range(2))
    with caplog.at_level(logging.WARNING, logger="cas_ckpt"):
        for number in range(3):
            commit(one, {"a": number})
            commit(other, {"b": number})
        collect_garbage(one, GcOptions(min_age_s=0))
        commit(other, {"b": 9})
    assert "is in no pack of" not in caplog.text


def test_a_repair_that_fails_beside_a_first_commit_leaves_what_says_that_its_branch_was_made() -> None:
    store = MemoryStore()
    write_config(store, Config("7" * 32))
    other = RepositoryHandle.on_store(store, index_url=":memory:")
    other.refs.create_placeholder(RefKind.BRANCH, "new")  # its first commit has begun
    beside = MeddledStore(store, lambda: commit(other, {"step": 1}, branch="new"), before="get", key="gc/state", at=2)
    repairing = RepositoryHandle.on_store(beside, index_url=":memory:")
    nowhere = Digest(bytes(32))
    with suppress(NotFoundError, ConflictError):
        publish_lost_ref(repairing, RefKind.BRANCH, "new", nowhere, move=new_move(None, nowhere, "repaired", "tests"))
    assert beside.happened and other.refs.was_announced(ref_key(RefKind.BRANCH, "new"))


class RefusedSwapStore(MemoryStore):
    """Refuses one swap of a record, which is not done."""

    armed = False

    def compare_and_swap(self, key: str, expected: bytes, data: Any) -> None:
        if self.armed:
            raise TransientStorageError("not now")
        super().compare_and_swap(key, expected, data)


def test_a_branch_that_is_moved_back_over_a_store_that_refuses_is_not_taken_for_moved() -> None:
    store = RefusedSwapStore()
    write_config(store, Config(new_store_id()))
    handle = RepositoryHandle.on_store(store, index_url=":memory:")
    before = Digest(bytes.fromhex(commit(handle, {"a": 1}, message="before").id))
    after = Digest(bytes.fromhex(commit(handle, {"a": 2}, message="after").id))
    generation = handle.begin_writing()
    store.armed = True
    with pytest.raises(TransientStorageError, match="not now"):
        publish_copied(
            handle, RefKind.BRANCH, "main", before, generation=generation,
            admit=lambda old: new_move(old, before, "forced", "somebody"),
        )  # fmt: skip
    assert handle.refs.get(RefKind.BRANCH, "main").target == after
