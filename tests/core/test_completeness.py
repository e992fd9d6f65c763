"""Forgotten commits that are wanted again: branches take them back, and what was collected stays forgotten."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cas_ckpt.core import forgotten as records
from cas_ckpt.core import live as taking_back
from cas_ckpt.core.create import init_repository
from cas_ckpt.core.forgotten import (
    MANY_RECORDS,
    PREFIX,
    merge_forgotten,
    read_forgotten,
    remove_forgotten,
    write_forgotten,
)
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.refs import RefKind
from cas_ckpt.errors import NotFoundError
from cas_ckpt.objects.digest import Digest
from cas_ckpt.ops.gc.gc import collect_garbage
from cas_ckpt.ops.gc.plan import GcOptions
from cas_ckpt.ops.history.log import log_commits
from cas_ckpt.ops.refs import create_branch, create_tag, delete_branch, undelete_ref
from cas_ckpt.ops.retention.forget import forget
from tests.builders import commit, numbers, same_bytes, stored_arrays

EVERYTHING = GcOptions(min_age_s=0, reflog_expire_s=0, max_unused=0)


def just_before(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, act: Callable[[], Any]) -> None:
    """Do `act` once, when `place.name` is called next."""
    real, done = getattr(place, name), []

    def later(*args: Any, **kwargs: Any) -> Any:
        if not done:
            done.append(True)
            act()
        return real(*args, **kwargs)

    monkeypatch.setattr(place, name, later)


def id_of(handle: RepositoryHandle, revision: str) -> Digest:
    return Digest(bytes.fromhex(next(log_commits(handle, [revision])).id))


def is_there(handle: RepositoryHandle, revision: str) -> bool:
    return same_bytes(stored_arrays(handle, next(log_commits(handle, [revision])).root)["own"], numbers(30_000))


@pytest.fixture
def wide() -> Iterator[RepositoryHandle]:
    """main: d0 - ... - d6 - w - later; w has 30,000 numbers of its own."""
    handle = init_repository(f"memory://take-back-{secrets.token_hex(4)}")
    for number in range(7):
        commit(handle, {"x": number}, message=f"d{number}")
    commit(handle, {"own": numbers(30_000)}, message="w")
    commit(handle, {"x": "later"}, message="later")
    yield handle
    handle.close()


def gone(handle: RepositoryHandle) -> set[str]:
    """Messages of the commits that are forgotten."""
    forgotten = read_forgotten(handle.store)
    return {info.message for info in log_commits(handle, all_refs=True) if bytes.fromhex(info.id) in forgotten}


def test_a_branch_on_a_forgotten_commit_keeps_it_when_it_goes_on(wide: RepositoryHandle) -> None:
    forget(wide, revisions=["main~1", "main~3"])
    create_branch(wide, "again", start="main~1")
    assert gone(wide) == {"d5"}
    commit(wide, {"x": "on top"}, branch="again")
    collect_garbage(wide, EVERYTHING)
    assert is_there(wide, "again~1")


def test_a_tag_on_a_forgotten_commit_keeps_it_by_naming_it(wide: RepositoryHandle) -> None:
    forget(wide, revisions=["main~1"])
    create_tag(wide, "wanted", "main~1")
    assert gone(wide) == {"w"}
    collect_garbage(wide, EVERYTHING)
    assert is_there(wide, "wanted")


def test_a_forgotten_branch_that_is_undeleted_goes_on(wide: RepositoryHandle) -> None:
    create_branch(wide, "side", start="main~1")
    delete_branch(wide, "side", force=True)
    forget(wide, revisions=["main~1"])
    undelete_ref(wide, RefKind.BRANCH, "side")
    commit(wide, {"x": "on top"}, branch="side")
    collect_garbage(wide, EVERYTHING)
    assert is_there(wide, "side~1")


def test_a_commit_that_is_collected_before_a_branch_takes_it_back_stays_forgotten(
    wide: RepositoryHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget(wide, revisions=["main~1"])
    other = RepositoryHandle.on_store(wide.store)
    just_before(monkeypatch, taking_back, "remove_forgotten", lambda: collect_garbage(other, EVERYTHING))
    with pytest.raises(NotFoundError, match="gc has removed its data"):
        create_branch(wide, "again", start="main~1")
    assert gone(wide) == {"w"}
    assert collect_garbage(other, EVERYTHING).took_over is None


def test_a_commit_that_is_forgotten_while_a_branch_is_put_there_is_taken_back(
    wide: RepositoryHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = RepositoryHandle.on_store(wide.store)
    just_before(monkeypatch, wide.refs, "swap", lambda: forget(other, revisions=["main~1"]))
    create_branch(wide, "again", start="main~1")
    assert gone(wide) == set()


def test_what_is_remembered_does_not_come_back_with_records_that_are_merged_meanwhile(
    wide: RepositoryHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [id_of(wide, f"main~{back}") for back in range(1, 8)]
    for one in ids * 3:
        write_forgotten(wide.store, [one], author="me")
    just_before(monkeypatch, records, "write_forgotten", lambda: remove_forgotten(wide.store, ids[:1], author="me"))
    merge_forgotten(wide.store, known=lambda: ids, author="me")
    assert read_forgotten(wide.store) == frozenset(ids[1:])
    assert merge_forgotten(wide.store, known=lambda: ids, author="me") > MANY_RECORDS
    assert read_forgotten(wide.store) == frozenset(ids[1:]) and len(list(wide.store.list(PREFIX))) == 1
    assert remove_forgotten(wide.store, ids[:3], author="me") == frozenset(ids[1:3])
    assert read_forgotten(wide.store) == frozenset(ids[3:])
