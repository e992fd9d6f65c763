"""One of several ranks dies, or meets a full disk, at any effect of a common commit: nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest

from cas_ckpt import limits
from cas_ckpt.core.config import Config
from cas_ckpt.core.create import new_store_id, write_config
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.revisions import resolve
from cas_ckpt.errors import CkptError, OutOfSpaceError, PeerError
from cas_ckpt.index import history
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.parallel.peers import Peers
from cas_ckpt.storage.memory import MemoryStore
from tests.builders import commit, numbers, same_bytes, stored_arrays
from tests.divided import mesh, over, state_of
from tests.effects import CrashNow, Effects, FaultPlan, die_after, die_before, no_space_from
from tests.thread_peers import run_ranks
from tests.wrapped_stores import FaultyStore

SIZE = 3
BEFORE = {"w": numbers(1500, 700, seed=1), "v": numbers(70_000, seed=2), "step": 1}
AFTER = {"w": numbers(1500, 700, seed=3), "v": numbers(70_000, seed=4), "step": 2}
PLACEMENTS = {"w": over(mesh(SIZE), "S(0)")}


class Rig:
    """A store with one commit in it, on which three ranks try a second one."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        write_config(self.store, Config(new_store_id(), pack_bytes=1 << 20))
        self.first = commit(self.open(), BEFORE)

    def open(self, effects: Effects | None = None) -> RepositoryHandle:
        store = FaultyStore(self.store, effects=effects or Effects())
        return RepositoryHandle.on_store(store, index_url=":memory:")

    def second(self, victim: int, plan: FaultPlan | None) -> tuple[list[Any], Effects]:
        effects = Effects(plan)

        def work(peers: Peers) -> Any:
            handle = self.open(effects if peers.rank == victim else None)
            state = state_of(AFTER, PLACEMENTS, peers.rank)
            with limits(num_threads=1):
                return commit_tree(handle, state, CommitRequest(), peers=peers)

        return run_ranks(SIZE, work, timeout_s=10, outcomes=True), effects

    def check(self, outcomes: list[Any]) -> None:
        """The branch is at the old commit or at a whole new one, and the next commit works."""
        handle = self.open()
        head = resolve(handle, "main").hex()
        handle.sync()
        if head != self.first.id:
            row = handle.index.read(history.read_commit, bytes.fromhex(head))
            assert row is not None
            assert same_bytes(stored_arrays(handle, row.root.hex())["w"], AFTER["w"])
        told = {outcome.id for outcome in outcomes if not isinstance(outcome, BaseException)}
        assert told <= {head}
        again, _ = self.second(0, None)
        fresh = self.open()
        fresh.sync()
        assert resolve(fresh, "main").hex() == again[0].id
        assert same_bytes(stored_arrays(fresh, again[0].root)["w"], AFTER["w"])
        assert same_bytes(stored_arrays(fresh, again[0].root)["v"], AFTER["v"])


FEWEST = {0: 5, 1: 2, 2: 2}
"""Effects that each rank has at least: how the writer threads of a rank share packs varies."""

CASES = [(victim, k) for victim in range(SIZE) for k in range(1, 12 if victim == 0 else 8)]


@pytest.mark.parametrize(("victim", "k"), CASES)
@pytest.mark.parametrize("plan", [die_before, die_after])
def test_a_rank_that_dies_at_any_effect_makes_the_others_raise_and_loses_nothing(
    victim: int, k: int, plan: Any
) -> None:
    rig = Rig()
    outcomes, effects = rig.second(victim, plan(k))
    if effects.dead:
        assert isinstance(outcomes[victim], CrashNow)
        others = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
        assert all(isinstance(outcome, PeerError) and outcome.ranks == (victim,) for outcome in others)
    else:
        assert k > FEWEST[victim]
    rig.check(outcomes)


@pytest.mark.parametrize(("victim", "k"), CASES[::2])
def test_a_full_disk_of_one_rank_is_told_to_all(victim: int, k: int) -> None:
    rig = Rig()
    outcomes, _ = rig.second(victim, no_space_from(k))
    if any(isinstance(outcome, CkptError) for outcome in outcomes):
        assert isinstance(outcomes[victim], OutOfSpaceError)
        assert all(isinstance(outcome, (PeerError, OutOfSpaceError)) for outcome in outcomes)
        assert "no space left" in str(outcomes[(victim + 1) % SIZE])
    rig.check(outcomes)
