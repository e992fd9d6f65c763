"""What every kind of `Peers` must do, as programs that all ranks run together.

`CHECKS` are for worlds of any size, `FAILURE_CHECKS` for two ranks and more. Each leaves the group as usable
as it was, so that they may follow one another in one world.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cas_ckpt.errors import InvalidInputError, PeerError
from cas_ckpt.parallel.peers import Peers

Check = Callable[[Peers], None]
LENGTHS = (0, 1, 4097, 3_000_000)


def content(length: int, *seed: int) -> bytes:
    """Bytes that differ between ranks and from one place to the next."""
    start = sum(97 * (place + 1) * part for place, part in enumerate(seed))
    pattern = bytes((31 * place + start) % 251 for place in range(251))
    return (pattern * (length // 251 + 1))[:length]


def answers(peers: Peers) -> None:
    """The group works."""
    assert peers.gather_all(b"%d" % peers.rank) == [b"%d" % rank for rank in range(peers.size)]


def gather_all_gives_the_message_of_every_rank(peers: Peers) -> None:
    for length in LENGTHS:
        expected = [content(length, rank) for rank in range(peers.size)]
        assert peers.gather_all(expected[peers.rank]) == expected


def gather_all_takes_messages_of_unequal_length(peers: Peers) -> None:
    expected = [content(rank * 1_000_003 if rank else 0, rank) for rank in range(peers.size)]
    assert peers.gather_all(expected[peers.rank]) == expected


def gather_gives_the_messages_to_rank_0_alone(peers: Peers) -> None:
    expected = [content(100_000 * rank, rank) for rank in range(peers.size)]
    assert peers.gather(expected[peers.rank]) == (None if peers.rank else expected)


def broadcast_gives_the_message_of_rank_0_to_all(peers: Peers) -> None:
    for length in LENGTHS:
        assert peers.broadcast(None if peers.rank else content(length)) == content(length)


def exchange_delivers_one_message_from_each_to_each(peers: Peers) -> None:
    for length in LENGTHS:
        sent = [content(length, peers.rank, peer) for peer in range(peers.size)]
        received = peers.exchange(sent)
        assert [bytes(message) for message in received] == [
            content(length, peer, peers.rank) for peer in range(peers.size)
        ]


def exchange_takes_messages_of_unequal_length_and_none(peers: Peers) -> None:
    def message(source: int, target: int) -> bytes:
        return b"" if (source + target) % 3 == 1 else content(700_000 * source + target, source, target)

    received = peers.exchange([message(peers.rank, peer) for peer in range(peers.size)])
    assert [bytes(one) for one in received] == [message(peer, peers.rank) for peer in range(peers.size)]


def exchange_takes_every_kind_of_buffer(peers: Peers) -> None:
    plain = content(1000, peers.rank)
    kinds = [plain, bytearray(plain), memoryview(plain), memoryview(plain * 2)[::2], memoryview(plain).cast("I")]
    for kind in kinds:
        expected = [bytes(content(1000, peer)) for peer in range(peers.size)]
        if kind is kinds[3]:
            expected = [bytes(memoryview(one * 2)[::2]) for one in expected]
        assert [bytes(one) for one in peers.exchange([kind] * peers.size)] == expected


def the_own_message_passes_through_an_exchange(peers: Peers) -> None:
    own = bytearray(b"own")
    assert peers.exchange([own] * peers.size)[peers.rank] is own


def a_sender_may_reuse_its_memory_at_once(peers: Peers) -> None:
    memory = bytearray(content(2_000_000, peers.rank))
    received = peers.exchange([memoryview(memory)] * peers.size)
    everyone = peers.gather_all(memory)
    memory[:] = bytes(len(memory))
    for peer in range(peers.size):
        if peer != peers.rank:
            assert bytes(received[peer]) == content(2_000_000, peer)
        assert everyone[peer] == content(2_000_000, peer)


def calls_that_make_no_sense_are_refused(peers: Peers) -> None:
    if peers.rank == 0:
        with pytest.raises(InvalidInputError, match="rank 0 gives the message of a broadcast"):
            peers.broadcast(None)
    with pytest.raises(InvalidInputError, match=f"one message for each of {peers.size} ranks, got 0"):
        peers.exchange([])
    with pytest.raises(TypeError):
        peers.gather_all("text")  # type: ignore[arg-type]
    answers(peers)


def a_failing_rank_raises_on_all_others_and_the_group_goes_on(peers: Peers) -> None:
    for failing in range(peers.size):
        answers(peers)
        if peers.rank == failing:
            peers.fail(ValueError(f"no space on node {failing}"))
        else:
            with pytest.raises(PeerError) as caught:
                peers.exchange([content(1_000_000)] * peers.size)
            assert str(caught.value) == f"rank {failing} failed: ValueError: no space on node {failing}"
            assert caught.value.ranks == (failing,)
            peers.fail(caught.value)  # known to all: not told again
        answers(peers)


def ranks_that_fail_at_the_same_time_end_the_same_work(peers: Peers) -> None:
    if peers.rank != 0:
        peers.fail(ValueError("all but rank 0"))
    else:
        with pytest.raises(PeerError, match="failed: ValueError: all but rank 0"):
            peers.gather(b"")
    answers(peers)


def all_ranks_may_fail_at_the_same_time(peers: Peers) -> None:
    peers.fail(ValueError("all"))
    peers.fail(ValueError("all once more"))
    if peers.rank == 0:
        peers.fail(ValueError("rank 0 alone"))
    else:
        with pytest.raises(PeerError, match="rank 0 alone"):
            answers(peers)
    answers(peers)


def a_very_long_error_is_told_in_part(peers: Peers) -> None:
    if peers.rank == 0:
        peers.fail(ValueError("é" * 100_000))
    else:
        with pytest.raises(PeerError, match="rank 0 failed: ValueError: é"):
            peers.broadcast(None)
    answers(peers)


def ranks_that_make_other_calls_raise_on_all(peers: Peers) -> None:
    is_wrong = peers.rank == peers.size - 1
    with pytest.raises(PeerError, match=r"do not make the same call .*broadcast") as caught:
        peers.gather(b"") if is_wrong else peers.broadcast(b"")
    assert peers.size == 2 or caught.value.ranks == (peers.size - 1,)
    with pytest.raises(PeerError, match="do not make the same call"):
        peers.gather_all(b"of some length") if is_wrong else peers.exchange([b"x"] * peers.size)
    answers(peers)


CHECKS: tuple[Check, ...] = (
    gather_all_gives_the_message_of_every_rank,
    gather_all_takes_messages_of_unequal_length,
    gather_gives_the_messages_to_rank_0_alone,
    broadcast_gives_the_message_of_rank_0_to_all,
    exchange_delivers_one_message_from_each_to_each,
    exchange_takes_messages_of_unequal_length_and_none,
    exchange_takes_every_kind_of_buffer,
    the_own_message_passes_through_an_exchange,
    a_sender_may_reuse_its_memory_at_once,
    calls_that_make_no_sense_are_refused,
)
FAILURE_CHECKS: tuple[Check, ...] = (
    a_failing_rank_raises_on_all_others_and_the_group_goes_on,
    ranks_that_fail_at_the_same_time_end_the_same_work,
    all_ranks_may_fail_at_the_same_time,
    a_very_long_error_is_told_in_part,
    ranks_that_make_other_calls_raise_on_all,
)


def name_of(check: Check) -> str:
    return check.__name__
