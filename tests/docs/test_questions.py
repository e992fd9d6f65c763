"""The questions of docs/sql.md have the answers that the verbs have for the same repository."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cas_ckpt.repository import Repository
from tests.docs.questions import QUESTIONS, example


@pytest.fixture(scope="module")
def repo() -> Iterator[Repository]:
    with example() as path, Repository.open(path, group=None) as opened:
        yield opened


def answer(repo: Repository, title: str) -> list[tuple[Any, ...]]:
    (query,) = (text for known, text in QUESTIONS if known.startswith(title))
    return list(repo.sql(query))


def test_what_a_branch_holds_and_how_much_of_each_dtype(repo: Repository) -> None:
    tensors = [each for each in repo.ls("main") if each.dtype is not None]
    largest = sorted(tensors, key=lambda each: (-each.num_bytes, each.key))[:5]
    held = [(each.key, each.dtype, each.num_bytes) for each in largest]
    assert [(key, dtype, size) for key, dtype, _, size in answer(repo, "What does main hold")] == held
    found = {dtype: (count, size) for dtype, count, size in answer(repo, "How many bytes of each dtype")}
    assert found == {
        dtype: (len(sizes), sum(sizes))
        for dtype in {each.dtype for each in tensors}
        if (sizes := [each.num_bytes for each in tensors if each.dtype == dtype])
    }


def test_what_differs_is_what_diff_says(repo: Repository) -> None:
    words = {"added": "new", "changed": "changed", "removed": "gone"}
    told = [(each.key, words[each.change.value]) for each in repo.diff("v1", "ft").entries]
    assert [row[:2] for row in answer(repo, "Which entries differ")] == sorted(told)
    assert {change for _, change in told} == set(words.values())


def test_who_holds_a_tensor_and_who_held_a_part_of_it(repo: Repository) -> None:
    found = [row[0] for row in answer(repo, "Which commits hold")]
    assert found == [each.short_id for each in reversed(repo.holders("main", "model/embed"))]
    (row,) = repo.shards("v1", "model/layers/0/wq", rank=3)
    assert [rank for (rank,) in answer(repo, "Who else held")] == [rank for rank in row.ranks if rank != 3]


def test_commits_of_a_layout_and_branches_with_their_bytes(repo: Repository) -> None:
    by_layout = repo.log(all_refs=True, world_size=8, axes="tp=2")
    assert [row[0] for row in answer(repo, "Which commits were saved")] == [each.short_id for each in by_layout][::-1]
    told = [(row.name, row.unique_bytes, row.shared_bytes) for row in repo.du(by="branch")]
    assert [(name, *rest) for name, _, *rest in answer(repo, "How much do branches")] == sorted(told)


def test_the_fastest_mesh_is_the_one_that_plan_says(repo: Repository) -> None:
    told = [(each.mesh, int(each.summary.estimated_s * 1e6)) for each in repo.compare_plans("main")]
    assert [(row[0], row[-1]) for row in answer(repo, "Which mesh restores")] == told


def test_the_best_and_the_proven(repo: Repository) -> None:
    best = [each.commit.short_id for each in repo.best("loss", limit=3)]
    assert [row[0] for row in answer(repo, "Which is the best")] == best
    proven = {name: moment is not None for name, moment in answer(repo, "When was each ref")}
    assert proven == {name: repo.show(name).commit.restored_s is not None for name in ("main", "ft", "v1")}


def test_equal_tensors_are_equal(repo: Repository) -> None:
    state = repo.load("main")
    for one, another, _, _ in answer(repo, "Which tensors of a commit are equal"):
        first, second = (repo.read("main", key) for key in (one, another))
        assert first.tobytes() == second.tobytes()
    assert state["model"]["embed"].tobytes() == state["model"]["head"].tobytes()


def test_what_commits_changed_and_who_moved_a_branch(repo: Repository) -> None:
    diffs = [repo.diff(each.parents[0], each) for each in repo.log("main")[::-1] if each.parents]
    assert [row[1] for row in answer(repo, "What did each commit")][1:] == [len(each.entries) for each in diffs]
    words = {"added": "new", "changed": "changed", "removed": "gone"}
    told = [(words[each.change.value], each.key) for each in repo.diff("ft~1", "ft").entries]
    assert answer(repo, "Which keys did") == sorted(told)
    moves = [(each.action, each.author) for each in repo.reflog("main")]
    assert [row[1:] for row in answer(repo, "Who moved main")] == moves
