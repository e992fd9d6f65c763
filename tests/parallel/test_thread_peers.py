"""Threads as ranks, and the world of one, keep the contract of `Peers`; who is late, gone or in the way is named."""

from __future__ import annotations

import threading

import pytest

from cas_ckpt.errors import InvalidInputError, PeerError
from cas_ckpt.parallel.peers import Peers, SoloPeers, collective_errors, report_instead
from tests.parallel.conformance import CHECKS, FAILURE_CHECKS, Check, answers, name_of
from tests.thread_peers import run_ranks, thread_world


@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_a_world_of_one_keeps_the_contract(check: Check) -> None:
    check(SoloPeers())


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_threads_keep_the_contract(size: int, check: Check) -> None:
    run_ranks(size, check, timeout_s=30)


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("check", FAILURE_CHECKS, ids=name_of)
def test_threads_keep_the_contract_when_a_rank_fails(size: int, check: Check) -> None:
    run_ranks(size, check, timeout_s=30)


class _Counting(SoloPeers):
    num_begun = num_failed = 0

    def begin(self) -> None:
        self.num_begun += 1

    def fail(self, error: BaseException) -> None:
        self.num_failed += 1


def test_work_that_a_ctrl_c_broke_off_in_contextlib_is_over_once_any_thread_has_collected_it() -> None:
    peers = _Counting()
    left = [collective_errors(peers)]  # contextlib's own object, of which the with statement did not come to know
    left[0].__enter__()
    with collective_errors(peers):  # is within that one
        assert peers.num_begun == 1
    collector = threading.Thread(target=left.clear)
    collector.start()
    collector.join()

    def failing() -> None:
        with collective_errors(peers):
            assert peers.num_begun == 2
            report_instead(peers, ValueError())
            raise ValueError("told")

    with pytest.raises(ValueError, match="told"):
        failing()
    assert peers.num_failed == 2  # once of that one, as it was collected


def test_results_come_by_rank() -> None:
    assert run_ranks(3, lambda peers: peers.rank * 10 + peers.size) == [3, 13, 23]


def test_a_rank_that_never_comes_is_named_and_may_come_back_for_the_next_work() -> None:
    others_have_raised = threading.Event()

    def work(peers: Peers) -> str:
        if peers.rank == 2:
            assert others_have_raised.wait(30)
        with pytest.raises(PeerError) as caught:
            peers.broadcast(b"x")
        others_have_raised.set()
        answers(peers)
        assert caught.value.ranks == (2,)
        return str(caught.value)

    # The others wait for rank 2 at their next call as well, which it reaches once it has ended the failed one.
    told = set(run_ranks(3, work, timeout_s=0.3))
    assert len(told) == 1
    assert "rank 2 has not come to broadcast within 0.3 s" in told.pop()


def test_a_rank_learns_of_every_work_that_failed_without_it() -> None:
    first, second, _ = thread_world(3)[:3]

    def late(peers: Peers) -> list[str]:
        told = []
        for _ in range(2):
            with pytest.raises(PeerError) as caught:
                peers.gather_all(b"")
            told.append(str(caught.value))
        return told

    first.fail(ValueError("one"))
    first.fail(ValueError("two"))
    assert late(second) == ["rank 0 failed: ValueError: one", "rank 0 failed: ValueError: two"]


def test_a_rank_that_ended_without_a_word_is_not_waited_for() -> None:
    def work(peers: Peers) -> None:
        if peers.rank == 1:
            raise OSError("disk gone")
        peers.gather_all(b"")

    outcomes = run_ranks(3, work, timeout_s=600, outcomes=True)
    assert [str(outcome) for outcome in outcomes] == [
        "rank 1 failed: OSError: disk gone",
        "disk gone",
        "rank 1 failed: OSError: disk gone",
    ]


def test_a_rank_that_closed_is_not_waited_for_and_cannot_call() -> None:
    left, stays = thread_world(2, timeout_s=600)
    left.close()
    left.close()
    with pytest.raises(PeerError, match="rank 0 has left the group") as caught:
        stays.gather_all(b"")
    assert caught.value.ranks == (0,)
    with pytest.raises(PeerError, match=r"this rank \(0\) has left the group"):
        left.gather_all(b"")


def test_the_first_own_error_is_raised_with_what_the_others_raised() -> None:
    def work(peers: Peers) -> None:
        if peers.rank == 1:
            error = KeyError("layers.0")
            peers.fail(error)
            raise error
        peers.gather_all(b"")

    with pytest.raises(KeyError, match=r"layers\.0") as caught:
        run_ranks(3, work)
    notes = caught.value.__notes__
    assert notes[0] == "raised on rank 1 of 3"
    assert sorted(notes[1:]) == [
        f"rank {rank} raised PeerError: rank 1 failed: KeyError: 'layers.0'" for rank in (0, 2)
    ]


def test_two_threads_of_one_rank_in_one_group_are_refused() -> None:
    mine, other = thread_world(2, timeout_s=30)
    refused = threading.Event()
    told: list[str] = []

    def overlapping() -> None:
        while not refused.is_set():
            try:
                mine.gather(b"")  # whichever of the two threads comes second
            except InvalidInputError as error:
                told.append(str(error))
                mine.fail(error)  # must not end the work of the first
                refused.set()

    threads = [threading.Thread(target=overlapping, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert refused.wait(30)
    assert other.gather(b"") is None  # lets the first thread go
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert "while another of its threads is in a call on the same group" in told[0]


def test_a_world_without_ranks_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="at least one rank, got size=0"):
        thread_world(0)
