"""Ranks that are together make one call with one set of arguments, or all are told who makes which."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from cas_ckpt import CheckoutReport, CommitOptions, PerRank, Repository, limits
from cas_ckpt.errors import InvalidInputError, PeerError
from cas_ckpt.parallel.peers import Peers
from tests.builders import numbers
from tests.thread_peers import ThreadPeers, run_ranks

Work = Callable[[Repository, int], Any]
EVEN = {"w": np.ones(10), "lr": 0.5}


def on_ranks(size: int, work: Work) -> list[Any]:
    """What `work` gave or raised on every rank, with a repository that holds one commit; the branch must stay."""
    url = f"memory://calls-{secrets.token_hex(4)}"
    with Repository.init(url, group=None) as repo:
        before = repo.commit(EVEN).id

    def with_repository(peers: Peers) -> Any:
        with Repository.open(url, group=peers) as repo:
            return work(repo, peers.rank)

    found = run_ranks(size, with_repository, timeout_s=8, outcomes=True)
    with Repository.open(url, group=None) as repo:
        assert repo.resolve("main") == before
    return found


def refusals(size: int, work: Work) -> list[PeerError]:
    found = on_ranks(size, work)
    assert [type(each) for each in found] == [PeerError] * size, found
    return found


@pytest.mark.parametrize("wrong", [0, 2])
def test_a_rank_that_checks_out_while_the_others_commit_is_named_on_all(wrong: int) -> None:
    def work(repo: Repository, rank: int) -> Any:
        if rank == wrong:
            return repo.checkout("main", into={"w": np.zeros(10), "lr": 0.0})
        return repo.commit(EVEN, step=3)

    for error in refusals(3, work):
        assert error.ranks == (wrong,)
        assert "do not make the same call" in str(error)
        assert f"rank {wrong}: checkout(" in str(error) and "commit(" in str(error) and "step=3" in str(error)


def test_a_rank_that_makes_a_repository_while_others_commit_is_named() -> None:
    def work(repo: Repository, rank: int) -> Any:
        if rank == 1:
            return Repository.init("memory://calls-other", group=repo._ranks.peers)
        return repo.commit(EVEN)

    for error in refusals(3, work):
        assert error.ranks == (1,) and "rank 1: init(" in str(error)


ARGUMENTS_OF_COMMIT: list[tuple[str, Any, Any]] = [
    ("frozen", None, "w"), ("frozen", "w", ["w", "lr"]), ("allow_pickle", False, True),
    ("on_conflict", "retry", "raise"), ("on_divergence", "raise", "warn"), ("meta", {"a": 1}, {"a": 2}),
    ("metrics", {"loss": 1.0}, {}), ("branch", None, "other"), ("step", 1, 2), ("message", "", "x"),
]  # fmt: skip


def called(given: dict[str, Any]) -> dict[str, Any]:
    """`given` as arguments of `commit`: what belongs there in `options=`."""
    names = {each.name for each in fields(CommitOptions)}
    options = CommitOptions(**{name: value for name, value in given.items() if name in names})
    return {name: value for name, value in given.items() if name not in names} | {"options": options}


@pytest.mark.parametrize(("name", "usual", "odd"), ARGUMENTS_OF_COMMIT)
def test_ranks_that_commit_with_other_arguments_are_told_which_and_who(name: str, usual: Any, odd: Any) -> None:
    def work(repo: Repository, rank: int) -> Any:
        return repo.commit(EVEN, **called({name: odd if rank == 1 else usual}))

    for error in refusals(3, work):
        assert error.ranks == (1,)
        assert f"the ranks disagree on the {name}: ranks 0, 2 say" in str(error) and "rank 1 says" in str(error)


@pytest.mark.parametrize(
    ("name", "usual", "odd"),
    [("strict", True, False), ("keys", None, "w"), ("keys", "w", ["lr"]), ("allow_pickle", False, True)],
)
def test_ranks_that_check_out_with_other_arguments_are_told_which_and_who(name: str, usual: Any, odd: Any) -> None:
    intos = [{"w": np.zeros(10), "lr": 0.0} for _ in range(3)]

    def work(repo: Repository, rank: int) -> Any:
        return repo.checkout("main", into=intos[rank], **{name: odd if rank == 2 else usual})

    for error in refusals(3, work):
        assert error.ranks == (2,)
        assert f"the ranks disagree on the {name}: ranks 0, 1 say" in str(error) and "rank 2 says" in str(error)
    assert all(not into["w"].any() and into["lr"] == 0 for into in intos)


@pytest.mark.parametrize("name", ["create", "branch", "progress", "author"])
def test_an_argument_that_one_rank_alone_gives_wrongly_ends_the_call_on_all(name: str) -> None:
    """At once: the others would wait for it until their time is up."""
    found = on_ranks(2, lambda repo, rank: repo.commit(EVEN, **(called({name: 1.5}) if rank == 1 else {})))
    assert [type(each) for each in found] == [PeerError, InvalidInputError]
    said = {"author": "the author is a float", "branch": "1.5 is not a name of a branch"}.get(name, f"{name} is 1.5")
    assert said in str(found[0]) and said in str(found[1])


def test_a_refused_argument_ends_one_work_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Works are counted, and ranks that count differently cannot connect anew after a later one broke off."""
    begun: list[int] = []
    monkeypatch.setattr(ThreadPeers, "begin", lambda peers: begun.append(peers.rank))
    on_ranks(3, lambda repo, rank: repo.commit(EVEN, **({"branch": 1.5} if rank == 1 else {})))
    assert sorted(begun) == [0, 1, 2]


def test_the_same_argument_in_other_words_is_no_disagreement() -> None:
    intos = [{"w": np.zeros(10), "lr": 0.0} for _ in range(2)]

    def work(repo: Repository, rank: int) -> CheckoutReport:
        with limits(num_threads=1 + rank):
            return repo.checkout("main", into=intos[rank], keys="w" if rank else ("w",))

    found = on_ranks(2, work)
    assert found[0].commit == found[1].commit and all(into["w"].all() for into in intos)


def test_two_commits_in_swapped_order_are_refused_where_the_state_cannot_tell() -> None:
    """Keys of one rank alone, as pipeline stages have them: nothing in the state says that these are two states."""
    model, average = {"model": numbers(30)}, {"average": numbers(40)}

    def work(repo: Repository, rank: int) -> Any:
        if rank == 0:
            return repo.commit(model)
        return repo.commit(average)

    for error in refusals(2, work):
        assert error.ranks == (1,)
        assert "commit is called from other lines of the program" in str(error)
        assert "test_calls_of_ranks.py:" in str(error)


def test_commits_of_values_kept_per_rank_from_two_places_are_refused() -> None:
    def work(repo: Repository, rank: int) -> Any:
        if rank == 0:
            return repo.commit({"own": PerRank(1)})
        return repo.commit({"own": PerRank(2)})

    assert all("other lines of the program" in str(error) for error in refusals(2, work))


def test_a_commit_in_two_places_of_what_is_the_same_everywhere_is_fine() -> None:
    url = "memory://calls-two-places"
    Repository.init(url, group=None).close()

    def work(peers: Peers) -> str:
        with Repository.open(url, group=peers) as repo:
            if peers.rank == 0:
                return repo.commit(EVEN, message="x").id
            return repo.commit(EVEN, message="x").id

    assert len(set(run_ranks(2, work, timeout_s=8))) == 1


def test_an_argument_that_one_rank_cannot_even_read_is_told_at_once() -> None:
    def work(repo: Repository, rank: int) -> Any:
        try:
            repo.commit(EVEN, metrics={"loss": 1.0} if rank else "loss")  # type: ignore[arg-type]
        except (ValueError, PeerError) as error:
            told.append((rank, str(error)))
        return repo.commit(EVEN, branch="next").id

    told: list[tuple[int, str]] = []
    on_ranks(2, work)
    assert len(told) == 2 and "rank 0 failed: " in dict(told)[1]


def test_replicas_that_differ_blame_the_ranks_that_hold_other_bytes() -> None:
    def work(repo: Repository, rank: int) -> Any:
        return repo.commit({"w": numbers(3000, 40, seed=rank == 2)})

    for error in refusals(3, work):
        assert error.ranks == (2,)
