"""HEAD: a commit goes on from the state that was restored, and never begins a history unnoticed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cas_ckpt import (
    CommitInfo,
    CommitOptions,
    ConflictError,
    CorruptionError,
    Head,
    InvalidInputError,
    Lineage,
    NotFoundError,
    Repository,
)
from cas_ckpt.cli.log import line_of
from cas_ckpt.objects.pack import PACK_PREFIX


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with Repository.init(tmp_path / "repo") as made:
        yield made


def again(repo: Repository) -> Repository:
    return Repository.open(repo.url)


def history(repo: Repository, *, length: int = 4) -> list[CommitInfo]:
    """Commits of one branch, the oldest first; made by another handle."""
    with again(repo) as other:
        return [other.commit({"x": number}, message=str(number), step=number * 1000) for number in range(length)]


def parents(commit: CommitInfo) -> list[str]:
    return list(commit.parents)


# ---------------------------------------------------------------- what head says


def test_a_fresh_handle_is_on_the_default_branch_and_knows_no_commit(repo: Repository) -> None:
    history(repo)
    with again(repo) as fresh:
        assert fresh.head == Head("main", None)


def test_a_commit_moves_head(repo: Repository) -> None:
    made = repo.commit({"x": 1})
    assert repo.head == Head("main", made.id)
    assert not repo.head.detached


@pytest.mark.parametrize("ref", ["main", "HEAD", "@", "refs/heads/main"])
def test_checking_out_a_branch_attaches(repo: Repository, ref: str) -> None:
    commits = history(repo)
    repo.checkout(ref, into={"x": 0})
    assert repo.head == Head("main", commits[-1].id)


def test_checking_out_a_tag_an_id_or_an_older_commit_detaches(repo: Repository) -> None:
    commits = history(repo)
    repo.tag("v1", "main")
    for ref, number in (("v1", 3), (commits[2].id, 2), ("main~2", 1), (commits[0].short_id, 0), ("main@step:2000", 2)):
        repo.checkout(ref, into={"x": 0})
        assert repo.head == Head(None, commits[number].id)
        assert repo.head.detached


def test_load_and_read_do_not_move_head(repo: Repository) -> None:
    commits = history(repo)
    repo.checkout("main", into={"x": 0})
    repo.load("main~2")
    repo.read("main~1", "x")
    assert repo.head == Head("main", commits[-1].id)


def test_checking_out_a_part_does_not_move_head(repo: Repository) -> None:
    with again(repo) as other:
        other.commit({"x": 0, "y": 0})
        other.commit({"x": 1, "y": 1}, branch="ft")
    repo.checkout("main", into={"x": 5, "y": 5})
    before = repo.head
    repo.checkout("ft", into={"x": 5, "y": 5}, keys="x")
    assert repo.head == replace(before, parts=(repo.branches()["ft"],))


def test_a_checkout_that_is_refused_leaves_head_as_it_was(repo: Repository) -> None:
    history(repo)
    repo.checkout("main", into={"x": 0})
    before = repo.head
    with pytest.raises(NotFoundError):
        repo.checkout("nothing", into={"x": 0})
    with pytest.raises(InvalidInputError):
        repo.checkout("main~1", into={"another key": 0})
    assert repo.head == before


# ---------------------------------------------------------------- where a commit goes


def test_a_commit_goes_to_the_branch_that_was_checked_out(repo: Repository) -> None:
    commits = history(repo)
    repo.branch("ft", start="main~1")
    repo.checkout("ft", into={"x": 0})
    made = repo.commit({"x": 9})
    assert parents(made) == [commits[2].id]
    assert repo.branches() == {"ft": made.id, "main": commits[-1].id}
    assert repo.head == Head("ft", made.id)


def test_a_fresh_handle_goes_on_on_the_default_branch(repo: Repository) -> None:
    commits = history(repo)
    made = repo.commit({"x": 9})
    assert parents(made) == [commits[-1].id]
    assert made.lineage == ()


def test_after_an_older_commit_was_checked_out_a_commit_needs_a_branch(repo: Repository) -> None:
    commits = history(repo)
    repo.checkout("main~2", into={"x": 0})
    with pytest.raises(InvalidInputError) as caught:
        repo.commit({"x": 9})
    assert 'branch="NAME"' in str(caught.value)
    assert f'repo.branch("main", start="{commits[1].short_id}", force=True)' in str(caught.value)
    assert repo.branches() == {"main": commits[-1].id}


def test_a_new_branch_begins_at_the_commit_that_the_state_came_from(repo: Repository) -> None:
    commits = history(repo)
    repo.checkout("main~2", into={"x": 0})
    made = repo.commit({"x": 9}, branch="retry")
    assert parents(made) == [commits[1].id]
    assert repo.head == Head("retry", made.id)
    assert parents(repo.commit({"x": 10})) == [made.id]


def test_a_branch_that_was_moved_back_goes_on_from_there(repo: Repository) -> None:
    commits = history(repo)
    repo.checkout("main~2", into={"x": 0})
    repo.branch("main", start=commits[1], force=True)
    made = repo.commit({"x": 9}, branch="main")
    assert parents(made) == [commits[1].id]
    assert made.lineage == ()


def test_a_branch_that_went_elsewhere_is_not_gone_on_with_from_another_state(repo: Repository) -> None:
    commits = history(repo)
    repo.checkout("main~2", into={"x": 0})
    with pytest.raises(ConflictError) as caught:
        repo.commit({"x": 9}, branch="main")
    assert commits[1].short_id in str(caught.value)
    assert "parents=" in str(caught.value)
    assert repo.branches() == {"main": commits[-1].id}
    assert repo.head == Head(None, commits[1].id)


def test_a_branch_that_the_state_already_contains_is_moved_forward(repo: Repository) -> None:
    commits = history(repo)
    repo.branch("stable", start="main~3")
    repo.checkout("main", into={"x": 0})
    made = repo.commit({"x": 9}, branch="stable")
    assert parents(made) == [commits[-1].id]
    assert repo.is_ancestor(commits[0].id, "stable")
    assert repo.head == Head("stable", made.id)


def test_a_declared_merge_goes_on_top_of_a_branch_that_went_elsewhere(repo: Repository) -> None:
    commits = history(repo)
    repo.checkout("main~2", into={"x": 0})
    made = repo.commit({"x": 9}, branch="main", options=CommitOptions(parents=[commits[1]]))
    assert parents(made) == [commits[-1].id, commits[1].id]


def test_a_declared_lineage_goes_on_top_of_a_branch_that_went_elsewhere(repo: Repository) -> None:
    commits = history(repo)
    repo.checkout("main~2", into={"x": 0})
    made = repo.commit({"x": 9}, branch="main", options=CommitOptions(lineage=[Lineage("reverted-to", commits[1].id)]))
    assert parents(made) == [commits[-1].id]
    assert made.lineage == (Lineage("reverted-to", commits[1].id),)


# ---------------------------------------------------------------- others commit meanwhile


def test_on_top_of_a_branch_that_moved_the_lineage_says_where_the_state_came_from(repo: Repository) -> None:
    commits = history(repo)
    repo.checkout("main", into={"x": 0})
    with again(repo) as other:
        theirs = other.commit({"x": "theirs"})
    made = repo.commit({"x": 9})
    assert parents(made) == [theirs.id]
    assert made.lineage == (Lineage("continued-from", commits[-1].id),)
    assert repo.show(made).commit.lineage == made.lineage
    assert repo.commit({"x": 10}).lineage == ()


def test_on_conflict_raise_sees_what_others_committed_since_the_checkout(repo: Repository) -> None:
    history(repo)
    repo.checkout("main", into={"x": 0})
    with again(repo) as other:
        theirs = other.commit({"x": "theirs"})
    with pytest.raises(ConflictError, match="moved"):
        repo.commit({"x": 9}, options=CommitOptions(on_conflict="raise"))
    assert repo.branches() == {"main": theirs.id}


def test_a_branch_that_somebody_deleted_begins_again_where_the_state_came_from(repo: Repository) -> None:
    history(repo)
    repo.branch("ft")
    repo.checkout("ft", into={"x": 0})
    first = repo.commit({"x": 9})
    with again(repo) as other:
        other.delete_branch("ft", force=True)
    made = repo.commit({"x": 10})
    assert parents(made) == [first.id]
    assert repo.branches()["ft"] == made.id


def test_a_commit_whose_state_did_not_come_from_the_head_it_lands_on_says_so(
    repo: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    before = history(repo)[-1]
    repo.checkout("main", into={"x": 0})
    with again(repo) as other:
        theirs = other.commit({"x": "theirs"})
    assert not caplog.records
    made = repo.commit({"x": 9})
    assert len(caplog.records) == 1
    for said in (made.short_id, theirs.short_id, before.short_id, "'main'", 'on_conflict="raise"'):
        assert said in caplog.text
    with_mark, without = (line_of(commit, [], width=None) for commit in (made, theirs))
    assert f"state from {before.short_id}" in with_mark and "state from" not in without
    rows = repo.sql("SELECT commit_id, continued_from FROM commits WHERE continued_from IS NOT NULL").rows
    assert rows == ((made.id, before.id),)


def test_a_branch_that_was_moved_onto_another_history_is_not_gone_on_with(repo: Repository) -> None:
    commits = history(repo)
    repo.checkout("main", into={"x": 0})
    with again(repo) as other:
        foreign = other.commit({"x": "foreign"}, branch="other", options=CommitOptions(orphan=True))
        other.branch("main", start=foreign, force=True)
    with pytest.raises(ConflictError, match="does not follow"):
        repo.commit({"x": 9})
    assert repo.branches()["main"] == foreign.id
    assert repo.head == Head("main", commits[-1].id)
    assert parents(repo.commit({"x": 9}, branch="mine")) == [commits[-1].id]


def test_a_branch_that_was_moved_to_a_sibling_is_not_gone_on_with_either(repo: Repository) -> None:
    commits = history(repo)
    repo.checkout("main", into={"x": 0})
    with again(repo) as other:
        other.branch("main", start="main~1", force=True)
        other.checkout("main", into={"x": 0})
        other.commit({"x": "instead"})
    with pytest.raises(ConflictError, match=commits[-1].short_id):
        repo.commit({"x": 9})
    made = repo.commit({"x": 9}, options=CommitOptions(parents=[commits[-1]]))
    assert parents(made)[1:] == [commits[-1].id]


def test_a_branch_that_was_moved_back_while_it_is_checked_out_follows_the_state_again(repo: Repository) -> None:
    commits = history(repo)
    repo.checkout("main", into={"x": 0})
    with again(repo) as other:
        other.branch("main", start="main~2", force=True)
    made = repo.commit({"x": 9})
    assert (parents(made), made.lineage) == ([commits[-1].id], ())


# ---------------------------------------------------------------- where a state says that it came from


def test_a_state_may_say_where_it_came_from(repo: Repository) -> None:
    commits = history(repo)
    repo.branch("ft", start="main~2")
    state = repo.load("ft")
    made = repo.commit(state, options=CommitOptions(came_from="ft"))
    assert (parents(made), repo.head) == ([commits[1].id], Head("ft", made.id))
    made = repo.commit_async(state, branch="again", options=CommitOptions(came_from=commits[2])).result()
    assert (parents(made), repo.head) == ([commits[2].id], Head("again", made.id))
    with pytest.raises(ConflictError, match=commits[0].short_id):
        repo.commit(state, branch="main", options=CommitOptions(came_from="main~3"))
    assert repo.branches()["main"] == commits[-1].id
    with pytest.raises(NotFoundError):
        repo.commit(state, options=CommitOptions(came_from="nothing"))
    with again(repo) as fresh:  # on the default branch, of unknown origin
        assert parents(fresh.commit(state, options=CommitOptions(came_from=commits[-1]))) == [commits[-1].id]
        with pytest.raises(ConflictError):
            fresh.commit(state, options=CommitOptions(came_from=commits[1]))


# ---------------------------------------------------------------- states that are restored in parts


def three(repo: Repository) -> list[CommitInfo]:
    """Three commits of a state of two parts and a number."""
    return [repo.commit(trained(number), step=number) for number in range(3)]


def trained(number: int) -> dict[str, Any]:
    return {"model": {"w": number, "b": number}, "optim": number, "epoch": number}


def test_parts_of_one_commit_that_are_all_of_it_are_that_commit(repo: Repository) -> None:
    commits = three(repo)
    for keys in ("model/w", ["optim", "epoch"], "model/*"):
        assert repo.head.commit == commits[-1].id
        repo.checkout("step:1", into=trained(9), keys=keys)
    assert repo.head == Head(None, commits[1].id)
    assert parents(repo.commit(trained(7), branch="again")) == [commits[1].id]
    for keys in ("model", "optim", "epoch"):
        repo.checkout("main", into=trained(9), keys=keys)
    assert repo.head == Head("main", commits[-1].id)
    made = repo.commit(trained(8))
    assert (parents(made), made.lineage) == ([commits[-1].id], ())


def test_parts_of_a_commit_that_are_not_all_of_it_are_named_by_the_lineage(repo: Repository) -> None:
    commits = three(repo)
    repo.checkout("step:1", into=trained(9), keys="model")
    repo.checkout("step:0", into=trained(9), keys="epoch")
    assert (repo.head.branch, repo.head.commit) == ("main", commits[-1].id)
    assert repo.head.parts == (commits[1].id, commits[0].id)
    made = repo.commit(trained(7))
    assert parents(made) == [commits[-1].id]
    assert made.lineage == (Lineage("partly-from", commits[1].id), Lineage("partly-from", commits[0].id))
    assert repo.head == Head("main", made.id)
    repo.checkout("step:1", into=trained(9), keys=["optim", "epoch"])  # trained since: not all of it
    assert repo.head.parts == (commits[1].id,)
    worker = repo.commit_async(trained(6), worker="process").result()
    assert worker.lineage == (Lineage("partly-from", commits[1].id),)


def test_a_part_of_the_first_commit_counts_for_no_other_one(repo: Repository) -> None:
    commits = three(repo)
    repo.checkout("main", into=trained(9))
    repo.checkout("step:1", into=trained(9), keys="model")
    repo.checkout("main", into=trained(9), keys=["optim", "epoch"])
    repo.checkout("step:1", into=trained(9), keys="model")
    assert (repo.head.commit, repo.head.parts) == (commits[-1].id, (commits[1].id,))


def test_the_first_part_says_where_a_state_of_unknown_origin_came_from(repo: Repository) -> None:
    commits = three(repo)
    with again(repo) as fresh:
        fresh.checkout("step:1", into=trained(9), keys="model")
        assert fresh.head == Head(None, commits[1].id)
        fresh.checkout("step:1", into=trained(9), keys="optim")
        assert fresh.head == Head(None, commits[1].id)
        fresh.checkout("main", into=trained(9), keys="epoch")
        assert fresh.head.parts == (commits[-1].id,)
        made = fresh.commit(trained(7), branch="mixed")
        assert parents(made) == [commits[1].id]
        assert made.lineage == (Lineage("partly-from", commits[-1].id),)
    with again(repo) as fresh:
        fresh.checkout("main", into=trained(9), keys="model")
        assert fresh.head == Head("main", commits[-1].id)


def test_a_part_that_was_broken_off_is_named_by_the_lineage(repo: Repository) -> None:
    commits = [repo.commit({"x": number, "part": Refuses()}) for number in range(2)]
    with pytest.raises(Exception, match="not today"):
        repo.checkout("main~1", into={"x": 5, "part": Refuses()}, keys=["x", "part"])
    assert repo.commit({"x": 6}).lineage == (Lineage("partly-from", commits[0].id),)


# ---------------------------------------------------------------- beginning a history


def test_the_first_commit_of_a_repository_may_begin_any_branch(repo: Repository) -> None:
    made = repo.commit({"x": 1}, branch="trunk")
    assert parents(made) == []
    assert repo.head == Head("trunk", made.id)


@pytest.mark.parametrize("typo", ["mian", "Main", "MAIN", "man", "maain", "maim", "main-"])
def test_a_name_that_is_nearly_that_of_a_branch_begins_nothing(repo: Repository, typo: str) -> None:
    repo.commit({"x": 1})
    with pytest.raises(InvalidInputError, match="did you mean 'main'.*create=True"):
        repo.commit({"x": 2}, branch=typo)
    assert list(repo.branches()) == ["main"]
    made = repo.commit({"x": 2}, branch=typo, options=CommitOptions(create=True))
    assert parents(made) == [repo.branches()["main"]]


@pytest.mark.parametrize(
    ("there", "new"),
    [("run-1", "run-2"), ("ft-a", "ft-b"), ("v1.0", "v1.1"), ("b", "c"), ("main", "ft"), ("lr1e4", "lr2e4"),
     ("ft-math", "ft-code"), ("2024", "2025")],
)  # fmt: skip
def test_names_of_one_series_are_no_typos_of_one_another(repo: Repository, there: str, new: str) -> None:
    repo.commit({"x": 1}, branch=there)
    repo.commit({"x": 2}, branch=new)
    assert set(repo.branches()) == {there, new}


def test_a_state_of_unknown_origin_begins_no_branch_beside_a_history(repo: Repository) -> None:
    history(repo)
    with again(repo) as fresh:
        with pytest.raises(InvalidInputError) as caught:
            fresh.commit({"x": 2}, branch="ft")
        for way in ("orphan=True", "repo.branch(", "repo.checkout("):
            assert way in str(caught.value)
        assert list(fresh.branches()) == ["main"]
        assert parents(fresh.commit({"x": 2}, branch="ft", options=CommitOptions(orphan=True))) == []
        assert fresh.head.branch == "ft"


def test_the_default_branch_is_no_orphan_either(repo: Repository) -> None:
    repo.commit({"x": 1}, branch="trunk")
    with again(repo) as fresh, pytest.raises(InvalidInputError, match="orphan=True"):
        fresh.commit({"x": 2})


def test_an_orphan_has_no_parent_though_something_was_checked_out(repo: Repository) -> None:
    history(repo)
    repo.checkout("main", into={"x": 0})
    assert parents(repo.commit({"x": 2}, branch="other", options=CommitOptions(orphan=True))) == []


def test_given_parents_begin_a_branch(repo: Repository) -> None:
    commits = history(repo)
    made = repo.commit({"x": 2}, branch="soup", options=CommitOptions(parents=["main", "main~1"]))
    assert parents(made) == [commits[-1].id, commits[-2].id]


def test_head_means_what_was_checked_out(repo: Repository) -> None:
    commits = history(repo)
    repo.checkout("main~1", into={"x": 0})
    assert repo.resolve("HEAD") == commits[2].id
    assert repo.resolve("HEAD~1") == commits[1].id
    made = repo.commit({"x": 9}, branch="ft")
    assert repo.resolve("HEAD") == made.id
    assert repo.tag("v1") == made.id
    assert [commit.id for commit in repo.log(limit=2)] == [made.id, commits[2].id]


# ---------------------------------------------------------------- states that are a mix


class Refuses:
    """A part of a state that cannot be restored."""

    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError("not today")


def test_after_a_checkout_that_was_broken_off_head_is_unknown(repo: Repository) -> None:
    commits = [repo.commit({"x": number, "part": Refuses()}) for number in range(2)]
    with pytest.raises(Exception, match="not today"):
        repo.checkout("main~1", into={"x": 5, "part": Refuses()})
    assert repo.head == Head(None, None)
    with pytest.raises(InvalidInputError, match="broken off"):
        repo.commit({"x": 6})
    assert repo.branches() == {"main": commits[-1].id}
    repo.checkout("main", into={"x": 5}, strict=False)
    assert repo.head == Head("main", commits[-1].id)


def test_a_checkout_that_found_damage_touched_nothing_and_leaves_head(repo: Repository, tmp_path: Path) -> None:
    import numpy as np

    for seed in range(2):
        repo.commit({"w": np.random.default_rng(seed).standard_normal(100_000)})
    before = repo.head
    for pack in (tmp_path / "repo").joinpath(PACK_PREFIX).rglob("*"):
        if pack.is_file() and pack.stat().st_size > 500_000:
            damaged = bytearray(pack.read_bytes())
            damaged[300_000] ^= 1
            pack.chmod(0o644)
            pack.write_bytes(damaged)
    target = {"w": np.zeros(100_000)}
    with again(repo) as other, pytest.raises(CorruptionError):
        other.checkout("main~1", into=target)
    with pytest.raises(CorruptionError):
        repo.checkout("main~1", into=target)
    assert repo.head == before
    assert not target["w"].any()
