"""Snapshots by several ranks, and what becomes of them in another number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cas_ckpt.torchsnapshot import RNGState, Snapshot, StateDict
from tests.ranks import results, run_processes
from tests.torchsnapshot.rank_cases import WHOLE
from tests.torchsnapshot.states import same, trained

CASES = "tests.torchsnapshot.rank_cases"


@pytest.mark.slow
def test_two_ranks_take_snapshots_that_three_and_one_restore(tmp_path: Path) -> None:
    results(run_processes(2, f"{CASES}:take", str(tmp_path), timeout_s=60))
    told = results(run_processes(3, f"{CASES}:restore", str(tmp_path), timeout_s=60))
    assert [sum("nothing for rank 2 to take" in text for text in texts) for texts in told] == [0, 0, 2]

    state, drawn = {**trained(5), "rng": RNGState()}, torch.get_rng_state()
    Snapshot(str(tmp_path / "own-0")).restore(state)
    taken = trained(1, progress=10)
    assert all(same(state[key], taken[key]) for key in ("model", "optim", "sched"))
    assert state["progress"]["step"] == 10 and not torch.equal(drawn, torch.get_rng_state())
    divided = StateDict(table=torch.zeros(5, 6), mine=-1)
    Snapshot(str(tmp_path / "divided")).restore({"state": divided})
    assert torch.equal(divided["table"], WHOLE) and divided["mine"] == 0
