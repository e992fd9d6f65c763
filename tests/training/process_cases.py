"""What the processes of test_process_group.py do; each function runs on every rank and returns what it saw."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cas_ckpt.clock import monotonic_s
from cas_ckpt.errors import InvalidInputError, PeerError, StorageError
from cas_ckpt.parallel.peers import Peers, SoloPeers, collective_errors
from cas_ckpt.repository.opened import AUTO, Ranks
from cas_ckpt.training import connections
from cas_ckpt.training.connections import Connections, ConnectionsLost
from cas_ckpt.training.process_group import GroupPeers
from tests.parallel.conformance import CHECKS, FAILURE_CHECKS, answers, name_of
from tests.ranks import die, hold

Told = tuple[str, tuple[int, ...], float]


def keeps_the_contract() -> list[str]:
    """Every check on one group, one after the other; their names."""
    peers = GroupPeers(timeout_s=60)
    passed = []
    for check in (*CHECKS, *FAILURE_CHECKS, beside_the_training, overlapping_calls, many_groups):
        check(peers)
        answers(peers)
        passed.append(name_of(check))
    return passed


def beside_the_training(peers: Peers) -> None:
    """Collectives of the training go on in another thread, in their own order."""
    sums: list[float] = []

    def train() -> None:
        for _ in range(20):
            weights = torch.ones(1000)
            dist.all_reduce(weights)
            sums.append(weights[0].item())

    thread = threading.Thread(target=train)
    thread.start()
    for _ in range(20):
        answers(peers)
    thread.join()
    assert sums == [peers.size] * 20


def overlapping_calls(peers: Peers) -> None:
    """Rank 0 is in a call, which the others let it finish only when another call on it was refused."""
    if peers.rank != 0:
        dist.barrier()
        peers.gather_all(b"")
        return
    thread = threading.Thread(target=lambda: peers.gather_all(b""))
    thread.start()
    refused = ""
    while not refused:
        refused = refusal_of(peers)
    dist.barrier()
    thread.join()
    assert "while another of its threads is in a call on the same group" in refused


def refusal_of(peers: Peers) -> str:
    """Of a call that sends nothing as it makes no sense, unless the group is busy."""
    taken = peers._taken  # type: ignore[attr-defined]
    if taken is None or taken.is_over:
        return ""
    try:
        peers.broadcast(b"")
    except InvalidInputError as error:
        peers.fail(error)  # must not end the call that is under way
        return str(error)
    return "not refused"


def many_groups(peers: Peers) -> None:
    """Groups of all and of some ranks, each with calls of its own."""
    ranks = [0, peers.size - 1]
    process_group = dist.new_group(ranks)
    default = Ranks(AUTO, 60).peers
    assert isinstance(default, GroupPeers)
    answers(default)
    if peers.rank in ranks:
        some = GroupPeers(process_group, timeout_s=60)
        assert (some.rank, some.size) == (ranks.index(peers.rank), 2)
        answers(some)
        some.close()
    else:
        with pytest.raises(InvalidInputError, match=f"rank {peers.rank} of the job is not of the given process group"):
            GroupPeers(process_group)
    default.close()
    default.close()


def loses_ranks() -> list[Told]:
    """Of four ranks one comes late, one is killed before a call and one within a call; two go on."""
    rank = dist.get_rank()
    three, two = dist.new_group([0, 1, 2]), dist.new_group([0, 1])
    told = [comes_late()]
    killed_before = GroupPeers(timeout_s=60)
    if rank == 3:
        die()
    told.append(raised(lambda: killed_before.gather_all(b"")))
    told.append(raised(lambda: killed_before.gather_all(b"")))
    killed_before.fail(ValueError("nobody listens"))
    killed_within = GroupPeers(three, timeout_s=60)
    answers(killed_within)
    if rank == 2:
        dies_after_the_headers(killed_within)
    told.append(raised(lambda: killed_within.exchange([bytes(20_000_000)] * 3)))
    meet("lost the second", [0, 1])
    told.append(raised(lambda: GroupPeers(three, timeout_s=4).close()))
    answers(GroupPeers(two, timeout_s=60))
    return told


def comes_late() -> Told:
    """Rank 3 comes when all the others have given up on it."""
    peers = GroupPeers(timeout_s=60)
    answers(peers)
    peers._timeout_s = 1.0  # from here on: connecting may take longer on a busy machine
    store = default_store()
    if dist.get_rank() == 3:
        store.wait([f"gave up/{rank}" for rank in range(3)])
        told = raised(lambda: peers.gather_all(b""))
        assert told[:2] == ("this rank (3) came too late to gather_all(), call 1 of this group: " + told[0][67:], (3,))
        assert "had given up on it" in told[0]
        return told
    meet("before rank 3 is late", range(3))
    told = raised(lambda: peers.gather_all(b""))
    store.set(f"gave up/{dist.get_rank()}", "")
    return told


def dies_after_the_headers(peers: GroupPeers) -> None:
    """So the others wait for its messages."""
    headers = peers._swap_headers

    def last_headers(*args: object) -> object:
        headers(*args)  # type: ignore[arg-type]
        die()

    peers._swap_headers = last_headers  # type: ignore[assignment,method-assign]
    peers.exchange([b""] * peers.size)


def stops_before_it_has_sent(num_bytes: int, is_killed: bool) -> float | None:
    """How long rank 1 waits for a message of rank 0, of which only a part comes.

    Rank 2 is killed. Rank 0 notices that, closes its connections and keeps its error; or it is killed as well.

    Args:
        num_bytes: That rank 0 begins to send before; 0: it sends nothing, and rank 1 waits for 8.
    """
    peers = GroupPeers(timeout_s=60)
    answers(peers)
    connections, store, began_s = peers._connections, default_store(), monotonic_s()
    if peers.rank == 2:
        die()
    if peers.rank == 1:
        with pytest.raises(ConnectionsLost) as kept:
            connections.swap({}, {0: num_bytes or 8}, deadline_s=began_s + 60)
        store.set("noticed", "")
        assert (kept.value.suspects, kept.value.is_late) == ({0}, False)
        return monotonic_s() - began_s
    with pytest.raises(ConnectionsLost) as kept:
        connections.swap({}, {2: 8}, deadline_s=began_s + 60)
    if num_bytes:
        threading.Event().wait(1.5)  # until rank 1 waits, and has looked twice
        if is_killed:
            connections._start(connections._group.send, 1, torch.zeros(num_bytes, dtype=torch.uint8), set())
            die()
        with pytest.raises(ConnectionsLost) as kept:
            connections.swap({1: bytes(num_bytes)}, {2: 8}, deadline_s=began_s + 60)
    connections.close()
    store.wait(["noticed"])
    assert kept.value.suspects == {2}
    return None


def waits_for_a_slow_message() -> bytes:
    """What the ranks get when one sends long after the other has begun to wait, and to look after the connection."""
    peers = GroupPeers(timeout_s=60)
    answers(peers)
    if peers.rank == 0:
        threading.Event().wait(1.7)
    found = peers.gather_all(f"from {peers.rank}".encode() * 1_000_000)
    return found[0][:6] + found[1][-6:]


def hangs() -> Told:
    """Rank 1 never comes; the other ends its own work with `fail`, which must not hang either."""
    peers = GroupPeers(timeout_s=60)
    peers._timeout_s = 1.0
    if dist.get_rank() == 1:
        hold()
    began_s = monotonic_s()
    peers.fail(ValueError("alone"))
    assert monotonic_s() - began_s < 30
    return raised(lambda: peers.gather_all(b""))


def loses_the_store() -> Told:
    """Rank 0 hosts the store of torch.distributed and is killed."""
    peers = GroupPeers(timeout_s=60)
    answers(peers)
    if dist.get_rank() == 0:
        die()
    return raised(lambda: peers.gather_all(b""))


class TroubledStore(dist.Store):
    """The store of a rank to which something happens at its n-th request: gloo makes four in a group of two ranks."""

    def __init__(self, inner: dist.Store, number: int, trouble: Callable[[], object]) -> None:
        super().__init__()
        self._inner = inner
        self._left = number
        self._trouble = trouble

    def _next(self) -> None:
        self._left -= 1
        if not self._left:
            self._trouble()

    def set(self, key: str, value: str) -> None:  # type: ignore[override]
        self._next()
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        self._next()
        return self._inner.get(key)

    def wait(self, *args: Any) -> None:
        self._next()
        self._inner.wait(*args)


def loses_a_rank_while_connecting(number: int, trouble: str) -> Told:
    """The last rank is killed, or stops for good, while gloo connects it to the others."""

    def connected(store: dist.Store, *args: Any, **options: Any) -> Connections:
        happens = die if trouble == "killed" else lambda: os.kill(os.getpid(), signal.SIGSTOP)
        return Connections(TroubledStore(store, number, happens), *args, **options)

    if dist.get_rank() == dist.get_world_size() - 1:
        connections.Connections = connected  # type: ignore[assignment,misc]
    return raised(lambda: GroupPeers(timeout_s=6))


def has_no_descriptors() -> Told:
    """Rank 1 may not open what it needs to connect; nobody else is to blame, nobody waits for the timeout."""
    began_s = monotonic_s()
    if dist.get_rank() == 1:
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, used + 1))
    try:
        GroupPeers(timeout_s=60)
    except (StorageError, PeerError) as error:
        return f"{type(error).__name__}: {error}", getattr(error, "ranks", ()), monotonic_s() - began_s
    raise AssertionError("connected")


def goes_on_after_a_straggler() -> list[bool]:
    """A rank that came late breaks what is under way; the next work needs nothing from anybody."""
    peers, rank = GroupPeers(timeout_s=60), dist.get_rank()
    with collective_errors(peers):
        answers(peers)
    before = peers._connections
    with pytest.raises(PeerError), collective_errors(peers):
        comes_late_to(peers)
    found = [refuses_until_the_next_work(peers)]
    peers._timeout_s = 60.0
    with collective_errors(peers):
        found.append(peers._connections is not before)
        answers(peers)
    # One rank finds the others late, and nobody else has noticed: the next work connects all anew all the same.
    if rank == 0:
        peers._break(peers._blame_for(ConnectionsLost({1}, is_late=True), "a call"))
    dist.barrier()
    for _ in range(3):
        with collective_errors(peers):
            answers(peers)
    peers.close()
    return found


def begins_too_late() -> Told:
    """The last rank begins a work that all others have given up; what each rank raised. The next work goes well."""
    peers, store = GroupPeers(timeout_s=60), default_store()
    with collective_errors(peers):
        answers(peers)
    last = peers.size - 1
    if peers.rank == last:
        store.wait([f"gave up/{rank}" for rank in range(last)])
    else:
        meet("before the work", range(last))
    peers._timeout_s = 60.0 if peers.rank == last else 1.0

    def work() -> None:
        with collective_errors(peers):
            peers.gather_all(b"in time")

    told = raised(work)
    store.set(f"gave up/{peers.rank}", "")
    peers._timeout_s = 60.0
    with collective_errors(peers):
        answers(peers)
    peers.close()
    return told


def comes_late_to(peers: GroupPeers) -> None:
    """The last rank comes to a call when all others have given up on it."""
    store, last = default_store(), peers.size - 1
    if peers.rank == last:
        store.wait([f"gave up/{rank}" for rank in range(last)])
        peers.gather_all(b"too late")
    meet("before the last is late", range(last))
    peers._timeout_s = 1.0
    try:
        peers.gather_all(b"in time")
    finally:
        store.set(f"gave up/{peers.rank}", "")


def refuses_until_the_next_work(peers: Peers) -> bool:
    text, _, _ = raised(lambda: peers.gather_all(b""))
    return text.endswith("The next commit or checkout connects the ranks anew")


def is_alone() -> str:
    """A process without a process group."""
    peers = Ranks(AUTO, 1).peers
    assert isinstance(peers, SoloPeers)
    try:
        GroupPeers()
    except InvalidInputError as error:
        return str(error)
    return "accepted"


def default_store() -> dist.Store:
    """By which the ranks wait for one another whatever became of their groups."""
    return dist.distributed_c10d._get_default_store()


def meet(place: str, ranks: Iterable[int]) -> None:
    """Wait for all `ranks` (this one is of them): so that none of them is late itself in what has a short timeout."""
    store = default_store()
    store.set(f"{place}/{dist.get_rank()}", "")
    store.wait([f"{place}/{rank}" for rank in ranks])


def raised(call: Callable[[], object]) -> Told:
    """The `PeerError` of a call: message, ranks, seconds it took."""
    began_s = monotonic_s()
    try:
        call()
    except PeerError as error:
        return str(error), error.ranks, monotonic_s() - began_s
    raise AssertionError("no PeerError")


def in_step(timeout_s: float = 20.0) -> tuple[GroupPeers, dist.Store]:
    """A group that has done a work, and the store by which its ranks wait for one another."""
    peers = GroupPeers(timeout_s=timeout_s)
    with collective_errors(peers):
        answers(peers)
    return peers, default_store()


def next_work(peers: GroupPeers, *, after_begin: Callable[[], object] = lambda: None) -> Told:
    """What this rank raises in a work."""

    def work() -> None:
        with collective_errors(peers):
            after_begin()
            peers.gather_all(b"")

    return raised(work)


def gives_up_behind_the_others() -> Told:
    """The last rank gives up at the end of a work that the others have ended; they lose it in the next one."""
    peers, store = in_step()
    last = peers.size - 1
    if peers.rank == last:
        store.wait([f"began/{rank}" for rank in range(last)])
        peers._break(peers._blame_for(ConnectionsLost({0}, is_late=True), "the last call"))
        store.set("stopped", "")
        store.wait([f"gave up/{rank}" for rank in range(last)])
        told = next_work(peers)
    else:

        def wait_for_the_last() -> None:
            store.set(f"began/{peers.rank}", "")
            store.wait(["stopped"])

        told = next_work(peers, after_begin=wait_for_the_last)
        store.set(f"gave up/{peers.rank}", "")
    with collective_errors(peers):
        answers(peers)
    return told


def gives_up_between_two_who_begin() -> Told | None:
    """The last rank gives up when rank 0 waits in the next work for rank 1, which has not begun it."""
    peers, store = in_step(4.0)
    if peers.rank == 0:
        told = next_work(peers, after_begin=lambda: store.set("began", ""))
        assert not peers.has_lost_ranks
        return told
    if peers.rank == 1:
        store.wait(["stopped"])
    else:
        store.wait(["began"])
        threading.Event().wait(0.5)  # until rank 0 waits for messages
        peers._break(peers._blame_for(ConnectionsLost({1}, is_late=True), "the last call"))
        store.set("stopped", "")
    next_work(peers)
    return None


def leaves_between_works() -> Told | None:
    """The last rank leaves; the others begin a work when it has."""
    peers, store = in_step()
    if peers.rank == peers.size - 1:
        peers.close()
        store.set("left", "")
        return None
    store.wait(["left"])
    return next_work(peers)


def dies_at_the_end_of_a_work() -> Told:
    """The last rank is killed, and only rank 0 notices: the others have got what they need of the work."""
    peers, store = in_step()
    last = peers.size - 1
    if peers.rank == last:
        die()
    if peers.rank == 0:
        peers._break(peers._blame_for(ConnectionsLost({last}, is_late=False), "the last call"))
        store.set("lost", "")
    store.wait(["lost"])
    return next_work(peers)
