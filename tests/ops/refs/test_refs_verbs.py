"""Branches and tags name commits: made, moved, listed and deleted, and never confused."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.refs import PLACEHOLDER_GENERATION, Head, RefKind, check_name
from cas_ckpt.core.revisions import resolve
from cas_ckpt.core.settings import Remote
from cas_ckpt.errors import AmbiguousIdError, ConflictError, InvalidInputError, NotFoundError
from cas_ckpt.ops.commit.commit import commit_live
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.ops.fsck.check import check_url
from cas_ckpt.ops.history.log import latest_of
from cas_ckpt.ops.refs import (
    create_branch,
    create_pin,
    create_tag,
    delete_branch,
    delete_ref,
    named,
    reflog,
    rename_ref,
    set_default_branch,
)
from cas_ckpt.ops.sync.push import PushRequest, push
from cas_ckpt.ops.sync.remotes import add_remote
from tests.builders import commit, new_repository, numbers, state


@pytest.fixture
def repo(tmp_path: Path) -> RepositoryHandle:
    handle = new_repository(tmp_path / "repo")
    for number in range(3):
        commit(handle, {"x": number}, message=f"c{number}")
    return handle


def branches(handle: RepositoryHandle) -> dict[str, str]:
    return named(handle, RefKind.BRANCH)


def test_a_branch_begins_at_the_head_of_the_default_branch(repo: RepositoryHandle) -> None:
    made = create_branch(repo, "ft")
    assert branches(repo) == {"ft": made.hex(), "main": made.hex()}


def test_a_branch_begins_where_it_is_told_to_and_moves_alone(repo: RepositoryHandle) -> None:
    head = resolve(repo, "main")
    base = create_branch(repo, "ft", start="main~2")
    info = commit(repo, {"x": "tuned"}, branch="ft")
    assert base == resolve(repo, "main~2")
    assert info.parents == (base.hex(),)
    assert resolve(repo, "main") == head


def test_a_branch_that_exists_is_not_moved_unless_forced(repo: RepositoryHandle) -> None:
    create_branch(repo, "ft", start="main~1")
    with pytest.raises(ConflictError, match="there is a branch 'ft' already"):
        create_branch(repo, "ft", start="main")
    assert resolve(repo, "ft") == resolve(repo, "main~1")
    create_branch(repo, "ft", start="main", force=True)
    assert resolve(repo, "ft") == resolve(repo, "main")


def test_a_tag_stays_when_the_branch_moves(repo: RepositoryHandle) -> None:
    tagged = create_tag(repo, "v1")
    commit(repo, {"x": "later"})
    assert resolve(repo, "v1") == tagged == resolve(repo, "main~1")


def test_a_tag_is_moved_only_by_force(repo: RepositoryHandle) -> None:
    create_tag(repo, "best", "main~1")
    with pytest.raises(ConflictError, match="there is a tag 'best' already"):
        create_tag(repo, "best", "main")
    create_tag(repo, "best", "main", force=True)
    assert resolve(repo, "best") == resolve(repo, "main")


def test_a_name_is_a_branch_or_a_tag_never_both(repo: RepositoryHandle) -> None:
    create_tag(repo, "v1")
    create_branch(repo, "ft")
    with pytest.raises(ConflictError, match="'v1' is a tag already"):
        create_branch(repo, "v1")
    with pytest.raises(ConflictError, match="'ft' is a branch already"):
        create_tag(repo, "ft", force=True)
    with pytest.raises(ConflictError, match="'v1' is a tag already"):
        commit(repo, {"x": 9}, branch="v1")


def test_a_deleted_branch_is_gone_and_its_commits_are_not(repo: RepositoryHandle) -> None:
    create_branch(repo, "ft")
    own = commit(repo, {"x": "tuned"}, branch="ft")
    assert delete_branch(repo, "ft", force=True).hex() == own.id
    assert "ft" not in branches(repo)
    with pytest.raises(NotFoundError, match="'ft'"):
        resolve(repo, "ft")
    assert resolve(repo, own.id).hex() == own.id


def test_a_deleted_name_can_be_used_again_for_either_kind(repo: RepositoryHandle) -> None:
    create_branch(repo, "x")
    delete_branch(repo, "x")
    create_tag(repo, "x", "main~1")
    with pytest.raises(ConflictError, match="'x' is a tag already"):
        create_branch(repo, "x")
    delete_ref(repo, RefKind.TAG, "x")
    assert create_branch(repo, "x") == resolve(repo, "main")
    assert named(repo, RefKind.TAG) == {}


def test_a_commit_that_arrives_while_its_branch_is_deleted_is_not_lost(repo: RepositoryHandle) -> None:
    create_branch(repo, "ft")
    seen = repo.refs.get(RefKind.BRANCH, "ft")
    arrived = commit(repo, {"x": "tuned"}, branch="ft")
    with pytest.raises(ConflictError):
        repo.refs.swap(seen, None, generation=PLACEHOLDER_GENERATION)  # what delete_ref does with what it read before
    assert branches(repo)["ft"] == arrived.id


def test_a_branch_that_alone_leads_to_commits_is_deleted_only_by_force(repo: RepositoryHandle) -> None:
    made = commit(repo, {"x": 9}, branch="ft")
    commit(repo, {"x": 8}, branch="ft")
    with pytest.raises(ConflictError, match="branch 'ft' alone leads to 2 commits"):
        delete_branch(repo, "ft")
    create_tag(repo, "half", made.id)
    with pytest.raises(ConflictError, match="branch 'ft' alone leads to 1 commits"):
        delete_branch(repo, "ft")
    create_branch(repo, "on-top", start="ft")
    delete_branch(repo, "ft")
    delete_branch(repo, "on-top", force=True)


def test_the_default_branch_cannot_be_deleted(repo: RepositoryHandle) -> None:
    with pytest.raises(InvalidInputError, match="'main' is the default branch"):
        delete_branch(repo, "main")


@pytest.mark.parametrize("name", ["nothing", "gone"])
def test_deleting_what_is_not_there_says_so(repo: RepositoryHandle, name: str) -> None:
    create_branch(repo, "gone")
    delete_branch(repo, "gone")
    with pytest.raises(NotFoundError, match=f"there is no branch '{name}'"):
        delete_branch(repo, name)
    with pytest.raises(NotFoundError, match=f"there is no tag '{name}'"):
        delete_ref(repo, RefKind.TAG, name)


@pytest.mark.parametrize("name", ["", "a b", "../up", "/a", "a//b", "a\nb", "x" * 300, "-d", "é", "f" * 64, "a.lock"])
def test_an_impossible_name_is_refused(repo: RepositoryHandle, name: str) -> None:
    for make in (create_branch, create_tag):
        with pytest.raises(InvalidInputError):
            make(repo, name)
    assert [ref.name for ref in repo.refs.list()] == ["main"]


def test_a_branch_cannot_begin_at_nothing(repo: RepositoryHandle) -> None:
    with pytest.raises(NotFoundError):
        create_branch(repo, "ft", start="main~7")
    assert "ft" not in branches(repo)


def test_a_branch_may_lie_below_another(repo: RepositoryHandle) -> None:
    create_branch(repo, "ft")
    create_branch(repo, "ft/math", start="main~1")
    assert list(branches(repo)) == ["ft", "ft/math", "main"]


def test_revisions_name_refs_ancestors_and_ids(repo: RepositoryHandle) -> None:
    head, before = resolve(repo, "main"), resolve(repo, "main~1")
    create_tag(repo, "v1", "main~1")
    names = ("HEAD", "@", "main", "refs/heads/main", head.hex(), head.hex()[:12])
    assert {resolve(repo, text) for text in names} == {head}
    assert {resolve(repo, text) for text in ("v1", "main^", "HEAD~", "main^1", "refs/tags/v1")} == {before}
    assert resolve(repo, "main~2") == resolve(repo, "main^^") == resolve(repo, "v1~1")


def test_a_prefix_that_several_commits_share_is_ambiguous() -> None:
    repo = init_repository("memory://")
    ids: set[str] = set()
    while len({digest[:4] for digest in ids}) == len(ids):
        ids.add(commit(repo, {}, message=str(len(ids)), branch=f"b-{len(ids) % 20}").id)
    shared = next(digest[:4] for digest in ids if sum(other[:4] == digest[:4] for other in ids) > 1)
    with pytest.raises(AmbiguousIdError, match=f"begin with {shared}"):
        resolve(repo, shared)


@pytest.mark.parametrize("name", ["DEADBEEF" * 8, "face" * 16, "HEAD"])
def test_a_name_that_would_not_resolve_is_refused(name: str) -> None:
    with pytest.raises(InvalidInputError):
        check_name(name)


def test_a_name_of_more_hexadecimal_digits_than_an_id_has_resolves(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    info = commit(handle, {"w": 1}, branch="a" * 70)
    assert resolve(handle, "a" * 70).hex() == info.id


def test_a_file_among_the_refs_that_is_no_ref_does_not_hide_the_others(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    commit(handle, {"w": 1})
    (tmp_path / "repo" / "refs" / "heads" / "main.ref.orig").write_bytes(b"left by an editor")
    assert [ref.name for ref in handle.refs.list(RefKind.BRANCH)] == ["main"]


def weights(seed: int) -> np.ndarray[Any, Any]:
    return numbers(64, 64, seed=seed)


def test_a_stray_file_among_the_refs_does_not_end_every_listing(handle: RepositoryHandle, tmp_path: Path) -> None:
    commit(handle, {"w": weights(1)})
    record = (tmp_path / "repo/refs/heads/main.ref").read_bytes()
    (tmp_path / "repo/refs/heads/main (conflicted copy).ref").write_bytes(record)
    assert [ref.name for ref in handle.refs.list(RefKind.BRANCH)] == ["main"]


@pytest.mark.parametrize("name", ["HEAD", "-x", "deadbeef" * 8, "a..b", ".x"])
def test_a_ref_file_of_an_impossible_name_does_not_end_every_listing(
    handle: RepositoryHandle, tmp_path: Path, name: str
) -> None:
    commit(handle, {"w": weights(1)})
    record = (tmp_path / "repo/refs/heads/main.ref").read_bytes()
    (tmp_path / f"repo/refs/heads/{name}.ref").write_bytes(record)
    assert [ref.name for ref in handle.refs.list(RefKind.BRANCH)] == ["main"]


# ---------------------------------------------------------------- the default branch


def test_another_branch_becomes_the_default_branch(repo: RepositoryHandle) -> None:
    create_branch(repo, "ft", start="main~1")
    beside = RepositoryHandle.open(repo.store.url)
    set_default_branch(repo, "ft")
    assert (repo.config.default_branch, repo.head) == ("ft", Head("ft"))
    with closing(RepositoryHandle.open(repo.store.url)) as other:
        assert resolve(other, "HEAD") == resolve(repo, "main~1")
        assert replace(other.config, default_branch="main") == beside.config
    for handle in (repo, beside):  # one that was open before looks again
        with pytest.raises(InvalidInputError, match="'ft' is the default branch"):
            delete_branch(handle, "ft")
        with pytest.raises(InvalidInputError, match="'ft' is the default branch"):
            rename_ref(handle, RefKind.BRANCH, "ft", "tuned")
    delete_branch(beside, "main", force=True)
    for name, error in (("main", NotFoundError), ("nothing", NotFoundError), ("refs/heads/ft", InvalidInputError)):
        with pytest.raises(error):
            set_default_branch(repo, name)
    report = check_url(repo.store.url)
    assert report.ok and not report.notes


def test_a_state_that_was_checked_out_stays_on_its_branch_when_the_default_changes(repo: RepositoryHandle) -> None:
    create_branch(repo, "ft")
    made = commit_live(repo, state({"x": 4}), CommitRequest())
    set_default_branch(repo, "ft")
    assert repo.head == Head("main", made.id)


# ---------------------------------------------------------------- names that mean two things


def name_by_hand(handle: RepositoryHandle, kind: RefKind, name: str, revision: str) -> None:
    """Let a ref name a commit as another writer may, who compares it with nothing."""
    made = handle.refs.create_placeholder(kind, name)
    handle.refs.swap(made, resolve(handle, revision), generation=handle.begin_writing())


@pytest.mark.parametrize("kinds", [
    (RefKind.TAG, RefKind.REMOTE), (RefKind.BRANCH, RefKind.REMOTE), (RefKind.TAG, RefKind.BRANCH)])  # fmt: skip
def test_a_name_of_two_refs_is_refused_and_their_whole_names_are_not(
    repo: RepositoryHandle, kinds: tuple[RefKind, RefKind]
) -> None:
    for kind, revision in zip(kinds, ("main~1", "main~2"), strict=True):
        name_by_hand(repo, kind, "origin/main", revision)
    whole = [f"{kind.value}origin/main" for kind in kinds]
    for ask in (lambda: resolve(repo, "origin/main~0"), lambda: reflog(repo, "origin/main")):
        with pytest.raises(AmbiguousIdError) as caught:
            ask()
        assert all(name in str(caught.value) for name in whole)
    assert [resolve(repo, name) for name in whole] == [resolve(repo, "main~1"), resolve(repo, "main~2")]


def test_what_is_pushed_is_one_thing(repo: RepositoryHandle, tmp_path: Path) -> None:
    new_repository(tmp_path / "there").close()
    digits = resolve(repo, "main").hex()[:12]
    for name in ("origin/main", digits):
        name_by_hand(repo, RefKind.TAG, name, "main~2")
    name_by_hand(repo, RefKind.REMOTE, "origin/main", "main~1")
    for name in ("origin/main", digits):
        with pytest.raises(AmbiguousIdError):
            push(repo, PushRequest(str(tmp_path / "there"), [f"{name}:main"]))


@pytest.mark.parametrize("kind", [RefKind.TAG, RefKind.BRANCH])
def test_digits_that_are_a_name_and_begin_the_id_of_another_commit_are_refused(
    repo: RepositoryHandle, kind: RefKind
) -> None:
    digits = resolve(repo, "main").hex()[:12]
    name_by_hand(repo, kind, digits, "main~1")
    with pytest.raises(AmbiguousIdError, match=f"{kind.value}{digits}"):
        resolve(repo, digits)
    assert resolve(repo, f"{kind.value}{digits}") == resolve(repo, "main~1")
    own = resolve(repo, "main~1").hex()[:12]
    name_by_hand(repo, kind, own, "main~1")  # both are one commit
    assert resolve(repo, own) == resolve(repo, "main~1")


def test_a_short_name_wins_over_an_id_that_begins_like_it_and_says_so(
    repo: RepositoryHandle, caplog: pytest.LogCaptureFixture
) -> None:
    digits = resolve(repo, "main").hex()[:4]
    create_branch(repo, digits, start="main~1")
    assert resolve(repo, digits) == resolve(repo, "main~1")
    assert f"refs/heads/{digits}" in caplog.text


def test_a_name_with_another_meaning_is_not_given_without_force(repo: RepositoryHandle) -> None:
    add_remote(repo, Remote("usb", "/mnt/usb"))
    digits = resolve(repo, "main").hex()[:12].upper()
    for name in ("usb/main", digits):
        for make in (create_branch, create_tag):
            with pytest.raises(ConflictError, match="force=True"):
                make(repo, name)
        with pytest.raises(InvalidInputError, match="create=True"):
            commit(repo, {"x": 9}, branch=name, head=Head("main"), orphan=True)
        create_tag(repo, name, "main~1", force=True)
        create_tag(repo, name, "main~2", force=True)
    create_tag(repo, "usb-main")
    assert set(branches(repo)) == {"main"}


# ---------------------------------------------------------------- whole names of refs


def test_the_whole_name_of_a_ref_is_no_name_of_a_new_one(repo: RepositoryHandle, tmp_path: Path) -> None:
    before = resolve(repo, "main")
    calls = [
        lambda name: create_branch(repo, name), lambda name: create_tag(repo, name, force=True),
        lambda name: create_pin(repo, name=name), lambda name: commit(repo, {"x": 9}, branch=name),
        lambda name: rename_ref(repo, RefKind.BRANCH, "ft", name), lambda name: latest_of(repo, name),
        lambda name: init_repository(tmp_path / "new", default_branch=name),
        lambda name: push(repo, PushRequest(str(tmp_path / "there"), [f"main:refs/heads/{name}"])),
    ]  # fmt: skip
    create_branch(repo, "ft")
    new_repository(tmp_path / "there").close()
    for call in calls:
        for name in ("refs/heads/main", "refs/main"):
            with pytest.raises(InvalidInputError, match="refs/"):
                call(name)
    with pytest.raises(InvalidInputError, match="refs"):
        add_remote(repo, Remote("refs", "/mnt/usb"))
    assert {ref.name for ref in repo.refs.list()} == {"main", "ft"}
    assert resolve(repo, "refs/heads/main") == before


def test_a_branch_that_an_older_version_named_so_is_renamed_and_collected_beside(repo: RepositoryHandle) -> None:
    name_by_hand(repo, RefKind.BRANCH, "refs/heads/main", "main~1")
    assert len(list(repo.refs.every())) == 2
    rename_ref(repo, RefKind.BRANCH, "refs/heads/main", "main-1")
    assert branches(repo) == {"main": resolve(repo, "main").hex(), "main-1": resolve(repo, "main~1").hex()}
