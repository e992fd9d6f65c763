"""stats and du: what states hold, what they added, what is there for them alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.errors import InvalidInputError, NotFoundError
from cas_ckpt.ops.history.usage import UsageRow, commit_stats, repository_stats, usage_rows
from cas_ckpt.ops.refs import create_branch, delete_branch
from tests.builders import commit, new_repository, numbers
from tests.index.building import all_commits, empty

A, B, C = (numbers(250, 1000, seed=seed) for seed in range(3))  # a megabyte each
MB = A.nbytes


def near(count: int, wanted: int) -> bool:
    """Nodes and inline values come on top of whole tensors."""
    return wanted <= count < wanted + 4096


@pytest.fixture
def repo(tmp_path: Path) -> RepositoryHandle:
    """main: A, then A+B; ft from the first: A+C."""
    handle = new_repository(tmp_path / "repo")
    commit(handle, {"a": A}, message="first")
    create_branch(handle, "ft")
    commit(handle, {"a": A, "b": B}, message="second")
    commit(handle, {"a": A, "c": C, "again": C, "small": A[0, :5]}, message="tuned", branch="ft")
    return handle


def by_message(handle: RepositoryHandle, rows: list[UsageRow]) -> dict[str, UsageRow]:
    found = {row.digest.hex(): row.message for row in all_commits(handle.index)}
    return {found[row.name]: row for row in rows}


def test_an_empty_repository_holds_nothing(tmp_path: Path) -> None:
    handle = new_repository(tmp_path / "repo")
    stats = repository_stats(handle)
    assert (stats.num_commits, stats.total_bytes, stats.unique_bytes, stats.pack_bytes) == (0, 0, 0, 0)
    assert stats.ratio == 1.0
    assert usage_rows(handle) == usage_rows(handle, "branch") == []


def test_the_repository_counts_every_byte_once(repo: RepositoryHandle) -> None:
    stats = repository_stats(repo)
    assert (stats.num_commits, stats.num_branches, stats.num_tags, stats.num_chunks) == (3, 2, 0, 3)
    assert near(stats.total_bytes, 6 * MB)
    assert near(stats.unique_bytes, 3 * MB)
    assert stats.unique_bytes <= stats.pack_bytes < 3 * MB + 16384
    assert stats.ratio == stats.total_bytes / stats.pack_bytes


def test_a_commit_has_for_itself_what_no_other_needs(repo: RepositoryHandle) -> None:
    rows = by_message(repo, usage_rows(repo))
    assert [near(rows[name].total_bytes, size) for name, size in (("first", MB), ("second", 2 * MB), ("tuned", 3 * MB))]
    assert near(rows["first"].new_bytes, MB)
    assert near(rows["second"].new_bytes, MB)
    assert near(rows["tuned"].new_bytes, MB)
    assert near(rows["first"].unique_bytes, 0)
    assert near(rows["second"].unique_bytes, MB)
    assert near(rows["tuned"].unique_bytes, MB)
    assert [near(row.shared_bytes, MB) for row in rows.values()] == [True] * 3


def test_unique_bytes_count_commits_that_are_not_shown(repo: RepositoryHandle) -> None:
    (row,) = usage_rows(repo, revision="main~1")
    assert near(row.unique_bytes, 0)
    assert near(row.shared_bytes, MB)


def test_equal_states_have_nothing_for_themselves(repo: RepositoryHandle) -> None:
    commit(repo, {"a": A, "b": B}, message="same")
    rows = by_message(repo, usage_rows(repo))
    assert (rows["same"].unique_bytes, rows["second"].unique_bytes, rows["same"].new_bytes) == (0, 0, 0)


def test_a_branch_has_for_itself_what_no_other_branch_needs(repo: RepositoryHandle) -> None:
    rows = {row.name: row for row in usage_rows(repo, "branch")}
    assert list(rows) == ["ft", "main"]
    assert all(near(row.unique_bytes, MB) and near(row.shared_bytes, MB) for row in rows.values())
    assert near(rows["main"].total_bytes, 3 * MB)
    assert near(rows["main"].new_bytes, 2 * MB)


def test_a_tensor_tells_what_is_new_and_what_is_its_own(repo: RepositoryHandle) -> None:
    rows = {row.name: row for row in usage_rows(repo, "tensor", revision="ft")}
    found = {name: (row.total_bytes, row.new_bytes, row.unique_bytes, row.shared_bytes) for name, row in rows.items()}
    assert found == {
        "a": (MB, 0, 0, MB),
        "again": (MB, MB, MB, 0),  # equal tensors: counted once, at the first key
        "c": (MB, 0, 0, MB),
        "small": (20, 0, 0, 20),
    }
    assert [row.name for row in usage_rows(repo, "tensor", revision="ft", keys="a*")] == ["a", "again"]


def test_a_dtype_tells_what_all_its_tensors_hold(repo: RepositoryHandle) -> None:
    half = numbers(250, 1000, seed=7, dtype="float16")
    commit(repo, {"a": A, "again": A, "h": half, "same bits": half.view("int16"), "step": 3}, branch="ft")
    rows = [
        (row.name, row.total_bytes, row.new_bytes, row.unique_bytes, row.shared_bytes)
        for row in usage_rows(repo, "dtype", revision="ft")
    ]
    assert rows == [
        ("float32", 2 * MB, 0, 0, 2 * MB),
        ("float16", MB // 2, MB // 2, MB // 2, 0),  # what two dtypes have is counted once, at the first key
        ("int16", MB // 2, 0, 0, MB // 2),
    ]
    assert [row.name for row in usage_rows(repo, "dtype", revision="ft", keys=["s*", "a"])] == ["float32", "int16"]
    with pytest.raises(NotFoundError):
        usage_rows(repo, "dtype", keys="nothing")


def test_one_commit_tells_its_own_row(repo: RepositoryHandle) -> None:
    found = commit_stats(repo, "main")
    assert found.commit.message == "second"
    assert found.usage == by_message(repo, usage_rows(repo))["second"]


def test_numbers_are_the_same_after_the_index_is_lost(repo: RepositoryHandle) -> None:
    before = repository_stats(repo), usage_rows(repo), usage_rows(repo, "branch")
    empty(repo.index)
    assert (repository_stats(repo), usage_rows(repo), usage_rows(repo, "branch")) == before


def test_packs_that_nothing_names_any_more_are_counted_as_stored(repo: RepositoryHandle) -> None:
    before = repository_stats(repo)
    with_other_index = RepositoryHandle.open(repo.store.url, index_url=":memory:")
    commit(with_other_index, {"d": A + 1}, branch="gone")
    delete_branch(with_other_index, "gone", force=True)
    after = repository_stats(repo)
    assert (after.num_commits, after.unique_bytes) == (before.num_commits, before.unique_bytes)
    assert near(after.pack_bytes - before.pack_bytes, MB)


def test_rows_are_limited(repo: RepositoryHandle) -> None:
    assert len(usage_rows(repo, limit=2)) == 2
    assert [row.name for row in usage_rows(repo, revision="main", limit=1)] == [commit_stats(repo, "main").commit.id]


def test_arguments_that_do_not_go_together_are_refused(repo: RepositoryHandle) -> None:
    with pytest.raises(InvalidInputError, match="give .commit. or .branch. or .tensor. or .dtype."):
        usage_rows(repo, "colour")
    with pytest.raises(InvalidInputError, match="takes no keys"):
        usage_rows(repo, "commit", keys="a")
    with pytest.raises(InvalidInputError, match="takes no revision"):
        usage_rows(repo, "branch", revision="main")
    with pytest.raises(NotFoundError):
        usage_rows(repo, "tensor", keys="nothing")
    with pytest.raises(NotFoundError):
        commit_stats(repo, "nothing")
