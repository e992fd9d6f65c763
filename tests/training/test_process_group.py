"""Real processes over gloo keep the contract of `Peers`; ranks that die, hang or come late are named to the others."""

from __future__ import annotations

import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from cas_ckpt.clock import monotonic_s
from cas_ckpt.training.connections import Connections, ConnectionsLost
from cas_ckpt.training.process_group import GroupPeers
from tests.interrupts import interrupted, places_in, told
from tests.parallel.conformance import CHECKS, FAILURE_CHECKS, name_of
from tests.ranks import results, run_processes
from tests.repository.test_signals import handled

pytestmark = pytest.mark.slow

CASES = "tests.training.process_cases"
# Far below the timeout of the groups (60 s), far above what a busy machine needs.
SOON_S = 30.0


@pytest.mark.parametrize("size", [2, 4])
def test_processes_keep_the_contract(size: int) -> None:
    passed = results(run_processes(size, f"{CASES}:keeps_the_contract"))
    assert all(set(map(name_of, (*CHECKS, *FAILURE_CHECKS))) <= set(names) for names in passed)


def test_ranks_that_come_late_or_are_killed_are_named_and_the_others_go_on() -> None:
    outcomes = run_processes(4, f"{CASES}:loses_ranks")
    assert [outcome.exit_code for outcome in outcomes[2:]] == [-signal.SIGKILL] * 2
    for late, before, again, within, connecting in results(outcomes[:2]):
        assert late[:2] == (
            "rank 3 has not come to gather_all(), call 1 of this group within 1 s: dead, hanging, or slower than the "
            "timeout of the group allows",
            (3,),
        )
        assert before[0].startswith("rank 3 is gone, killed or crashed: the connection broke during gather_all()")
        assert again[0].startswith("this group of ranks is broken: rank 3 is gone")
        assert before[1] == again[1] == (3,)
        assert within[0].startswith("rank 2 is gone, killed or crashed: the connection broke during exchange()")
        assert within[1] == (2,)
        assert connecting[0].startswith("rank 2 has not come to the making of the group within 4 s")
        assert connecting[1] == (2,)
        assert max(before[2], again[2], within[2], connecting[2]) < SOON_S


@pytest.mark.parametrize(("num_bytes", "is_killed"), [(0, False), (40_000_000, False), (40_000_000, True)])
def test_a_rank_that_stops_is_noticed_at_once_although_it_keeps_its_error_or_has_sent_a_part_of_a_message(
    num_bytes: int, is_killed: bool
) -> None:
    outcomes = run_processes(3, f"{CASES}:stops_before_it_has_sent", num_bytes, is_killed)
    assert results(outcomes[1:2] if is_killed else outcomes[:2])[-1] < SOON_S
    assert outcomes[0].exit_code == (-signal.SIGKILL if is_killed else 0)


def test_a_message_may_come_long_after_the_first_look_for_it() -> None:
    assert results(run_processes(2, f"{CASES}:waits_for_a_slow_message")) == [b"from 0from 1"] * 2


class PunctualGroup:
    """In the place of gloo, whose waits take limits in whole milliseconds too, but are often longer than that."""

    def recv(self, *_: object) -> PunctualGroup:
        return self

    def wait(self, limit: timedelta) -> None:
        end_s = monotonic_s() + limit // timedelta(milliseconds=1) / 1000
        while monotonic_s() < end_s:
            pass
        raise RuntimeError("timed out")


def test_what_does_not_come_until_the_deadline_is_late_and_never_a_broken_connection() -> None:
    connections = Connections.__new__(Connections)
    connections._group, connections._under_way = PunctualGroup(), []
    with pytest.raises(ConnectionsLost) as lost:
        connections.swap({}, {1: 8}, deadline_s=monotonic_s() + 0.0209)
    assert lost.value.is_late


def test_nobody_hangs_with_a_rank_that_hangs() -> None:
    outcomes = run_processes(2, f"{CASES}:hangs", hanging=[1])
    message, ranks, _ = results(outcomes[:1])[0]
    assert message.startswith("this group of ranks is broken: rank 1 has not come to fail within 1 s")
    assert ranks == (1,)


def test_the_death_of_the_rank_that_hosts_the_store_is_told_as_such() -> None:
    outcomes = run_processes(3, f"{CASES}:loses_the_store", store="tcp")
    for message, ranks, seconds in results(outcomes[1:]):
        # Without a store, the one who notices last cannot tell the rank that died from the one that stopped for it.
        assert message.startswith(("rank 0 is gone", "ranks 0, "))
        assert "the store of torch.distributed is gone as well" in message
        assert 0 in ranks
        assert seconds < SOON_S


@pytest.mark.parametrize(("number", "trouble"), [(2, "killed"), (5, "killed"), (3, "stopped")])
def test_a_rank_that_is_lost_while_the_group_is_made_is_named_in_time(number: int, trouble: str) -> None:
    # Over TCP: a rank that is stopped can hold the lock of a store in a file, where nobody goes on.
    outcomes = run_processes(3, f"{CASES}:loses_a_rank_while_connecting", number, trouble, hanging=[2], store="tcp")
    for message, ranks, seconds in results(outcomes[:2]):
        assert message.startswith("rank 2 has not come to the making of the group within 6 s")
        assert ranks == (2,)
        assert seconds < 12  # gloo by itself takes 15 s, whatever it is told


def test_a_rank_without_file_descriptors_says_so_and_is_named_to_the_others() -> None:
    told = results(run_processes(3, f"{CASES}:has_no_descriptors"))
    assert told[1][0].startswith("StorageError: this rank (1) cannot connect to the 2 others: ")
    assert "Too many open files" in told[1][0]
    for message, ranks, seconds in (told[0], told[2]):
        assert message.startswith("PeerError: rank 1 failed in the making of the group: ")
        assert "Too many open files" in message
        assert ranks == (1,)
        assert seconds < SOON_S


def test_after_a_straggler_the_next_work_connects_all_ranks_anew() -> None:
    assert results(run_processes(3, f"{CASES}:goes_on_after_a_straggler")) == [[True, True]] * 3


def test_a_rank_that_begins_when_all_others_have_given_up_says_so_and_the_next_work_goes_well() -> None:
    told = results(run_processes(3, f"{CASES}:begins_too_late"))
    assert [ranks for _, ranks, _ in told] == [(2,)] * 3
    assert "this rank (2) came too late to this commit or checkout: ranks 0, 1 had given up on it" in told[2][0]


def test_a_rank_that_gave_up_in_the_work_before_raises_at_once_where_the_others_have_lost_it_in_this_one() -> None:
    told = results(run_processes(3, f"{CASES}:gives_up_behind_the_others"))
    assert "this rank (2) came too late to this commit or checkout: ranks 0, 1 had given up on it" in told[2][0]
    assert max(seconds for _, _, seconds in told) < 15  # the group's timeout is 20 s


def test_a_rank_that_leaves_old_connections_is_not_taken_for_dead_by_one_that_began_on_them() -> None:
    told = results(run_processes(3, f"{CASES}:gives_up_between_two_who_begin"))
    assert "gone" not in told[0][0]


def test_a_rank_that_has_left_is_named_at_once_to_those_who_begin_later() -> None:
    told = results(run_processes(3, f"{CASES}:leaves_between_works"))
    assert [text for text, _, _ in told[:2]] == ["rank 2 has left the group"] * 2
    assert [ranks for _, ranks, _ in told[:2]] == [(2,)] * 2
    assert max(seconds for _, _, seconds in told[:2]) < 15


def test_a_rank_that_died_unnoticed_is_named_at_once_when_the_next_work_begins() -> None:
    outcomes = run_processes(4, f"{CASES}:dies_at_the_end_of_a_work")
    assert outcomes[3].exit_code == -signal.SIGKILL
    for text, ranks, seconds in results(outcomes[:3]):
        assert "rank 3 is gone, killed or crashed" in text
        assert ranks == (3,)
        assert seconds < 15


def test_without_a_process_group_a_process_is_a_world_of_its_own() -> None:
    outcomes = run_processes(1, f"{CASES}:is_alone", default_backend=None)
    assert results(outcomes) == ["GroupPeers needs torch.distributed: call init_process_group first"]


def test_a_ctrl_c_in_a_call_leaves_no_call_under_way(tmp_path: Path) -> None:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(str(tmp_path / "store"), 1))
    try:
        peers = GroupPeers()

        def work() -> None:
            peers.begin()
            peers.gather_all(b"x")
            peers.fail(ValueError())

        work()
        places = places_in(work, of=lambda path: path.endswith(("contextlib.py", "training/process_group.py")))
        assert len(places) > 20
        with handled(signal.default_int_handler):
            for place in places:
                with pytest.raises(KeyboardInterrupt) as kept:  # with its traceback, and what that refers to
                    interrupted(work, place)
                peers.begin()
                assert peers.gather_all(b"y") == [b"y"], (told(place), kept)
        peers.close()
    finally:
        dist.destroy_process_group()
