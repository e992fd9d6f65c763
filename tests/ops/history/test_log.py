"""The log shows every commit once, children before parents, whoever wrote it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cas_ckpt import clock
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.records import CommitInfo
from cas_ckpt.core.revisions import resolve
from cas_ckpt.errors import InvalidInputError, NotFoundError
from cas_ckpt.ops.history.log import log_commits
from cas_ckpt.ops.refs import create_branch, create_tag
from tests.builders import commit, new_repository


def messages(commits: list[CommitInfo]) -> list[str]:
    return [info.message for info in commits]


def log(handle: RepositoryHandle, *revisions: str, **options: object) -> list[str]:
    return messages(list(log_commits(handle, revisions, **options)))  # type: ignore[arg-type]


def with_branches(path: Path) -> RepositoryHandle:
    """main: a - b - d, ft: a - c, joined by m on main."""
    handle = new_repository(path)
    times = iter(range(100, 200))
    with clock.fixed(lambda: float(next(times))):
        commit(handle, {"x": 1}, message="a")
        create_branch(handle, "ft")
        commit(handle, {"x": 2}, message="b")
        commit(handle, {"x": 3}, message="c", branch="ft")
        commit(handle, {"x": 4}, message="d")
        commit(handle, {"x": 5}, message="m", other_parents=[resolve(handle, "ft")])
    return handle


def test_an_empty_repository_has_an_empty_log(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    assert log(handle) == log(handle, all_refs=True) == []
    with pytest.raises(NotFoundError):
        log(handle, "main")


def test_commits_come_youngest_first_and_before_their_parents(tmp_path: Path) -> None:
    handle = with_branches(tmp_path / "repo")
    assert log(handle) == ["m", "d", "c", "b", "a"]
    assert log(handle, "ft") == ["c", "a"]
    assert log(handle, "main~1", "ft") == ["d", "c", "b", "a"]


def test_only_first_parents_are_followed_if_that_is_wanted(tmp_path: Path) -> None:
    assert log(with_branches(tmp_path / "repo"), first_parent=True) == ["m", "d", "b", "a"]


def test_a_range_leaves_out_what_its_beginning_leads_to(tmp_path: Path) -> None:
    handle = with_branches(tmp_path / "repo")
    assert log(handle, "ft..main") == log(handle, "^ft", "main") == log(handle, "ft..") == ["m", "d", "b"]
    assert log(handle, "main..ft") == log(handle, "..ft") == []
    assert log(handle, "main~1..ft") == ["c"]
    assert log(handle, "main~2..main", "^ft", limit=1) == ["m"]
    assert log(handle, "^main~1", all_refs=True) == ["m", "c"]
    assert log(handle, "^main") == []


def test_a_range_whose_ends_are_not_there_is_an_error(tmp_path: Path) -> None:
    handle = with_branches(tmp_path / "repo")
    for words in ("nope..main", "main..nope", "^nope"):
        with pytest.raises(NotFoundError, match="'nope'"):
            log(handle, words)
    with pytest.raises(InvalidInputError, match="merge_base"):
        log(handle, "main...ft")


def test_messages_are_searched_by_regular_expressions(tmp_path: Path) -> None:
    handle = with_branches(tmp_path / "repo")
    assert log(handle, grep=["^[ab]$"]) == ["b", "a"]
    assert log(handle, grep=["a", "m"], limit=1) == ["m"]
    assert log(handle, "ft..main", grep=["c"]) == []
    with pytest.raises(InvalidInputError, match="not a regular expression"):
        log(handle, grep=["("])


def test_all_refs_begin_at_every_branch_and_tag(tmp_path: Path) -> None:
    handle = with_branches(tmp_path / "repo")
    commit(handle, {"x": 6}, message="alone", branch="other")
    create_tag(handle, "v1", "other")
    assert log(handle, all_refs=True) == ["alone", "m", "d", "c", "b", "a"]


def test_a_log_is_cut_at_its_limit(tmp_path: Path) -> None:
    handle = with_branches(tmp_path / "repo")
    assert log(handle, limit=2) == ["m", "d"]
    assert log(handle, limit=0) == []


def test_commits_of_another_process_are_found(tmp_path: Path) -> None:
    ours = new_repository(tmp_path / "repo")
    commit(ours, {"x": 1}, message="ours")
    theirs = RepositoryHandle.open(tmp_path / "repo", index_url=str(tmp_path / "other.sqlite"))
    commit(theirs, {"x": 2}, message="theirs")
    assert log(ours) == ["theirs", "ours"]


def test_the_log_tells_all_that_a_commit_says(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    made = commit(handle, {"x": 1}, message="m\nore", step=7, metrics={"loss": 0.5}, author="me", meta={"a": (1, None)})
    assert list(log_commits(handle)) == [made]
    assert (made.step, made.metrics, made.author, made.meta) == (7, {"loss": 0.5}, "me", {"a": (1, None)})
