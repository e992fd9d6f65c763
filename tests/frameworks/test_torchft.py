"""torchft with a `CasTransport`: its own test of transports, and a replica that is killed and heals from a commit."""

from __future__ import annotations

import inspect
import json
import logging
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from threading import Event
from typing import Any
from unittest import TestCase

import pytest

pytest.importorskip("torchft")

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor, Shard, distribute_tensor
from torchft import Manager
from torchft.checkpointing import transport_test
from torchft.coordination import LighthouseServer

from cas_ckpt import InvalidInputError, MismatchError, PermissionDeniedError, Repository, StillPendingError
from cas_ckpt.integrations.torchft import CasTransport
from tests.frameworks.programs import program
from tests.frameworks.torchft_cases import train
from tests.processes import Forked

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # those of the framework
]

SECOND = timedelta(seconds=1)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


# ------------------------------------------------------------ replicas


@pytest.fixture
def lighthouse() -> Iterator[str]:
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=100)
    yield server.address()
    server.shutdown()


def run_replicas(folder: Path, lighthouse: str, kill_at: int | None = None) -> dict[str, Any]:
    """Train by two replicas that begin differently, of which one is killed; the weights, which both have at the end."""
    folder.mkdir()
    with ExitStack() as stack:
        others = [stack.enter_context(Forked(train, str(folder), lighthouse, 0, 5))]
        second = stack.enter_context(Forked(train, str(folder), lighthouse, 1, 6, kill_at))
        if kill_at is not None:
            second.wait(60)
            assert second.returncode == -signal.SIGKILL
            second = stack.enter_context(Forked(train, str(folder), lighthouse, 1, 7))
        for process in (*others, second):
            process.wait(60)
            assert process.returncode == 0
    first, other = (json.loads((folder / f"weights-{replica}").read_text()) for replica in range(2))
    assert first == other
    return first


def test_a_replica_that_was_killed_heals_from_a_commit_and_training_goes_on_exactly(
    tmp_path: Path, lighthouse: str
) -> None:
    whole = run_replicas(tmp_path / "whole", lighthouse)
    assert run_replicas(tmp_path / "killed", lighthouse, kill_at=3) == whole
    with Repository.open(tmp_path / "killed" / "healing") as repository:
        assert [move for move in repository.branches() if "torchft" not in move] == []


def test_the_function_of_the_page_makes_a_manager_with_the_transport(tmp_path: Path) -> None:
    given: dict[str, Any] = {}
    names: dict[str, Any] = {}
    exec(program("torchft"), names)
    names.update(Manager=lambda **options: given.update(options), CasTransport=lambda url: url)
    names["manager_of"](1, 2, 3)
    assert given.pop("checkpoint_transport") == "s3://bucket/healing"
    inspect.signature(Manager).bind(**given, checkpoint_transport=None)


# ------------------------------------------------------------ the transport


def test_the_transport_passes_the_test_of_torchft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def state(device: torch.device) -> dict[str, Any]:  # as theirs, but for a mesh that this process is in
        mesh = DeviceMesh("cpu", [0])
        tensor = distribute_tensor(torch.tensor([5, 6, 7]), mesh, [Shard(0)])
        return {"rank": torch.tensor([1, 2, 3], device=device), "str": "str", "int": 1234, "dtensor": tensor}

    monkeypatch.setattr(transport_test, "make_state_dict", state)
    cpu = torch.device("cpu")
    transport_test.run_multi_recovery_test(
        TestCase(), lambda rank, size: CasTransport(tmp_path / "repo", state_dict=lambda: state(cpu)), cpu
    )
    with Repository.open(tmp_path / "repo", group=None) as repository:
        assert repository.branches() == {}


def test_the_state_may_change_as_soon_as_it_was_sent(tmp_path: Path) -> None:
    sender, receiver = CasTransport[Any](tmp_path / "repo"), CasTransport[Any](tmp_path / "repo")
    state = {"user": {"default": {"x": torch.zeros(1 << 20), 3: (1, [2.5, None])}}, "torchft": {"step": 4}}
    sender.send_checkpoint([1], 4, state, SECOND)
    sender.disallow_checkpoint()
    state["user"]["default"]["x"].fill_(1)
    got = receiver.recv_checkpoint(0, sender.metadata(), 4, 20 * SECOND)
    assert torch.equal(got["user"]["default"].pop("x"), torch.zeros(1 << 20))
    assert got == {"user": {"default": {3: (1, [2.5, None])}}, "torchft": {"step": 4}}
    for transport in (sender, receiver):
        transport.shutdown()


def test_older_states_are_forgotten_and_a_step_that_was_not_sent_is_waited_for(tmp_path: Path) -> None:
    sender, receiver = CasTransport[Any](tmp_path / "repo"), CasTransport[Any](tmp_path / "repo")
    for step in range(3):
        sender.send_checkpoint([1], step, {"x": torch.full((1000,), step)}, 20 * SECOND)
    got = receiver.recv_checkpoint(0, sender.metadata(), 2, 20 * SECOND)
    assert got["x"][0] == 2
    assert [each.forgotten for each in receiver.repository.log(sender.branch)] == [False, False, True]
    with pytest.raises(StillPendingError, match="timed out .* no state of step 1"):
        receiver.recv_checkpoint(0, sender.metadata(), 1, SECOND / 10)
    sender.shutdown(wait=False)
    receiver.shutdown()


def test_parts_are_divided_as_the_live_ones_are_and_those_stay_as_they_are(tmp_path: Path, one_rank: None) -> None:
    mesh = DeviceMesh("cpu", [0])
    sent = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    live = distribute_tensor(torch.zeros(6), mesh, [Shard(0)])
    sender = CasTransport[Any](tmp_path / "repo")
    sender.send_checkpoint([1], 1, {"user": {"default": {"w": sent}}}, SECOND)
    receiver = CasTransport[Any](tmp_path / "repo", state_dict=lambda: {"w": live})
    got = receiver.recv_checkpoint(0, sender.metadata(), 1, 20 * SECOND)["user"]["default"]["w"]
    assert isinstance(got, DTensor) and got.placements == (Shard(0),)
    assert torch.equal(got.full_tensor(), torch.arange(6.0)) and torch.equal(live.full_tensor(), torch.zeros(6))
    other = CasTransport[Any](tmp_path / "repo", state_dict=lambda: {"w": live[:4]})
    with pytest.raises(MismatchError, match="this rank holds"):
        other.recv_checkpoint(0, sender.metadata(), 1, SECOND)
    without = CasTransport[Any](tmp_path / "repo")
    with pytest.raises(MismatchError, match="give state_dict="):
        without.recv_checkpoint(0, sender.metadata(), 1, SECOND)
    for transport in (sender, receiver, other, without):
        transport.shutdown()


@pytest.mark.parametrize("way", ["warn", "raise"])
def test_a_send_that_fails_is_logged_or_raised(tmp_path: Path, way: Any, caplog: pytest.LogCaptureFixture) -> None:
    transport = CasTransport[Any](tmp_path / "repo", on_save_error=way)
    transport.repository.close()
    transport.repository = Repository.open(tmp_path / "repo", read_only=True, group=None)
    if way == "raise":
        with pytest.raises(PermissionDeniedError):
            transport.send_checkpoint([1], 1, {"x": 1}, SECOND)
    else:
        transport.send_checkpoint([1], 1, {"x": 1}, SECOND)
        assert "training goes on" in caplog.text and caplog.records[-1].levelno == logging.ERROR
    assert isinstance(transport.last_error, PermissionDeniedError)
    transport.shutdown()


def test_a_send_after_one_that_failed_in_the_background_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sender, receiver = CasTransport[Any](tmp_path / "repo"), CasTransport[Any](tmp_path / "repo")
    packs, is_told = tmp_path / "repo" / "packs", Event()
    packs.touch()  # so that nothing can be stored
    sender.send_checkpoint([1], 1, {"x": torch.rand(1000)}, SECOND)
    assert sender._pending is not None
    sender._pending.add_done_callback(lambda _: is_told.set())
    assert is_told.wait(20)
    packs.unlink()
    sender.send_checkpoint([1], 2, {"x": torch.zeros(1000)}, SECOND)
    assert "training goes on" in caplog.text and sender.last_error is None
    assert not receiver.recv_checkpoint(0, sender.metadata(), 2, 20 * SECOND)["x"].any()
    for transport in (sender, receiver):
        transport.shutdown()


def test_a_state_that_a_killed_process_left_on_the_branch_is_not_taken_for_that_of_a_new_one(tmp_path: Path) -> None:
    sender, receiver = CasTransport[Any](tmp_path / "repo", branch="first"), CasTransport[Any](tmp_path / "repo")
    sender.send_checkpoint([1], 7, {"x": 1}, SECOND)
    assert receiver.recv_checkpoint(0, sender.metadata(), 7, 20 * SECOND) == {"x": 1}
    sender.repository.close()  # without `shutdown`
    again = CasTransport[Any](tmp_path / "repo", branch="first")
    with pytest.raises(StillPendingError):
        receiver.recv_checkpoint(0, again.metadata(), 7, SECOND / 10)
    again.send_checkpoint([1], 7, {"x": 2}, SECOND)
    assert receiver.recv_checkpoint(0, again.metadata(), 7, 20 * SECOND) == {"x": 2}
    for transport in (again, receiver):
        transport.shutdown()


def test_misuse_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="give 'warn' or 'raise'"):
        CasTransport[Any](tmp_path / "repo", on_save_error="ignore")  # type: ignore[arg-type]
    with Repository.init(tmp_path / "repo") as repository, pytest.raises(InvalidInputError, match="path or URL"):
        CasTransport[Any](repository)  # type: ignore[arg-type]
