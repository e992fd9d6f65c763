"""What goes wrong in torchsnapshot, and does not here; those of several ranks are in rank_cases.py."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cas_ckpt import Repository
from cas_ckpt.torchsnapshot import Snapshot, StateDict
from tests.processes import Forked
from tests.torchsnapshot.states import same, trained


def test_equal_states_and_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    table = torch.randn(300_000)
    state = {"state": StateDict(table=table, tied=table, nothing=None, pair=(1, 2))}
    for number in range(3):
        Snapshot.take(str(tmp_path / f"step-{number}"), state)
    stored = sum(path.stat().st_size for path in (tmp_path / ".cas_ckpt" / "packs").rglob("*") if path.is_file())
    assert stored < 1.1 * table.nbytes
    other = StateDict(table=torch.zeros(300_000), tied=torch.zeros(300_000))
    other["tied"] = other["table"]
    Snapshot(str(tmp_path / "step-2")).restore({"state": other})
    assert other["tied"] is other["table"] and torch.equal(table, other["table"])


@pytest.mark.parametrize("where", ["truncated", "flipped"])
def test_a_damaged_file_is_never_restored_in_silence(tmp_path: Path, where: str) -> None:
    state = {"state": StateDict(t=torch.randn(100_000))}
    snapshot = Snapshot.take(str(tmp_path / "one"), state)
    pack = max((tmp_path / ".cas_ckpt" / "packs").rglob("*"), key=lambda path: path.stat().st_size)
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 4
    pack.chmod(0o600)
    pack.write_bytes(data[: len(data) // 2] if where == "truncated" else data)
    out = torch.zeros(100_000)
    for verb in (
        lambda: snapshot.restore({"state": StateDict(t=out)}),
        lambda: snapshot.read_object("0/state/t", out),
        lambda: snapshot.get_state_dict_for_key("state"),
    ):
        with pytest.raises(Exception, match="state/t|chunk|pack"):
            verb()
    assert not out.any()


def test_all_dtypes_and_layouts_come_back(tmp_path: Path) -> None:
    numbers = torch.arange(7)
    dtypes = [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.uint16, torch.uint32, torch.uint64, torch.bool,
              torch.complex64, torch.int8]  # fmt: skip
    state: dict[str, Any] = {str(dtype): numbers.to(dtype) for dtype in dtypes}
    state |= {"scalar": torch.tensor(3), "empty": torch.empty(0, 4), "transposed": torch.randn(3, 4).T}
    state["sparse"] = torch.eye(3).to_sparse()
    snapshot = Snapshot.take(str(tmp_path / "one"), {"state": StateDict(state)})
    other = StateDict(dict.fromkeys(state))
    snapshot.restore({"state": other})
    assert torch.equal(other.pop("sparse").to_dense(), torch.eye(3))
    assert all(torch.equal(other[name].double(), state[name].double()) for name in other if "complex" not in name)
    assert torch.equal(other["torch.complex64"], state["torch.complex64"])


def test_many_entries_are_written_and_opened_in_seconds(tmp_path: Path) -> None:
    state = StateDict({f"t{number}": torch.full((2,), float(number)) for number in range(10_000)})
    start = time.monotonic()
    Snapshot.take(str(tmp_path / "one"), {"state": state})
    snapshot = Snapshot(str(tmp_path / "one"))
    assert len(snapshot.get_manifest()) == 10_001 and snapshot.read_object("0/state/t77")[0] == 77
    assert time.monotonic() - start < 8  # torchsnapshot: 5 s for each 10,000 entries, to open them alone


# --- processes that are killed ----------------------------------------------------------------


def takes(path: str, started: str) -> None:
    """Take snapshots to one path, one after another, for ever; each is of a state in which all is one number."""
    number = 0
    state = {"a": StateDict(), "b": StateDict()}
    while True:
        number += 1
        for each in state.values():
            each["t"], each["step"] = torch.full((100_000,), float(number)), number
        if number % 2:
            Snapshot.take(path, state)
        else:
            Snapshot.async_take(path, state).wait()
        Path(started).write_text(str(number))


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_whole_snapshot_at_the_path(tmp_path: Path) -> None:
    path, started = tmp_path / "one", tmp_path / "started"
    for number in range(3):
        started.unlink(missing_ok=True)
        with Forked(takes, str(path), str(started)) as process:
            while not started.exists():
                time.sleep(0.001)
            time.sleep(0.007 * number)
            process.kill()
        assert process.returncode == -signal.SIGKILL
        state = {"a": StateDict(t=torch.zeros(100_000)), "b": StateDict(t=torch.zeros(100_000))}
        Snapshot(str(path)).restore(state)
        steps = {each["step"] for each in state.values()}
        assert len(steps) == 1 and all(each["t"].eq(each["step"]).all() for each in state.values())
    with Repository.open(tmp_path / ".cas_ckpt") as repo:
        assert repo.fsck(read_data=True).ok


def trains(folder: str, until: int, wait_at: int) -> None:
    """Train, with a snapshot after each step; go on from the newest one, if there is one."""
    state = trained(1, steps=0)
    for number in range(until, 0, -1):
        if Path(folder, f"step-{number}").exists():
            Snapshot(f"{folder}/step-{number}").restore(state)
            break
    model, optim, sched, progress = state.values()
    while progress["step"] < until:
        progress["step"] += 1
        torch.manual_seed(progress["step"])
        model(torch.randn(5, 3)).sum().backward()
        optim.step()
        sched.step()
        optim.zero_grad()
        pending = Snapshot.async_take(f"{folder}/step-{progress['step']}", state)
        if progress["step"] == wait_at:
            pending.wait()
            Path(folder, "reached").touch()
            time.sleep(60)


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_bit_by_bit(tmp_path: Path) -> None:
    with Forked(trains, str(tmp_path / "whole"), 6, -1) as process:
        process.wait(30)
    with Forked(trains, str(tmp_path / "killed"), 6, 3) as process:
        while not (tmp_path / "killed" / "reached").exists():
            time.sleep(0.01)
        process.kill()
    with Forked(trains, str(tmp_path / "killed"), 6, -1) as process:
        process.wait(30)
    found = []
    for name in ("whole", "killed"):
        with Repository.open(tmp_path / name / ".cas_ckpt") as repo:
            found.append((repo.show("step-6").commit.root, [each.message for each in repo.log("main")]))
    assert found[0] == found[1] and len(found[0][1]) == 6
    assert same(
        *(Snapshot(str(tmp_path / name / "step-6")).get_state_dict_for_key("model") for name in ("whole", "killed"))
    )
