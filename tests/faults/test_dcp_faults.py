"""The ten faults of torch.distributed.checkpoint 2.13 that were reproduced: none of them is ours.

Numbers are those of the list in the project's notes on its peers. What concerns only the DCP storage
backend (cas_ckpt.dcp) is tested in tests/dcp; the docstrings say where.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from cas_ckpt import CommitOptions, PerRank, Repository, limits
from cas_ckpt.errors import CkptError, MismatchError, PeerError, StorageError, UnsupportedValueError
from cas_ckpt.layout.holdings import holdings
from cas_ckpt.layout.restore_plan import RestoreRequest, plan_restore_reads
from cas_ckpt.layout.save_plan import Held, SavePlan
from cas_ckpt.objects.spec import Spec, grid_for
from cas_ckpt.objects.state import Container, TensorItem
from cas_ckpt.ops.commit.merge_states import describe, merge_states
from cas_ckpt.storage.store import Store
from tests.builders import ArrayMemory
from tests.divided import mesh, over
from tests.effects import CrashNow, Effects, FaultPlan, die_after, die_before, fail_at
from tests.faults.rank_cases import MIB, Counting, Place, by_rank, damaged, divide, divided, failing, noise, opcodes
from tests.training.roundtrip import same_state
from tests.wrapped_stores import CountingStore, flip_bit

ENOUGH = 80
"""More effects than a commit here has."""


def eight(seed: int) -> dict[str, Any]:
    """Enough for several batches, each a pack of more than a MiB."""
    return {f"w{n}": noise(400_000, seed=100 * seed + n) for n in range(8)}


def attempt(place: Place, plan: FaultPlan, state: dict[str, Any]) -> tuple[BaseException | None, Effects]:
    """What a commit by four threads raises if the medium fares as planned."""
    effects = Effects(plan)
    with place.open(failing(effects)) as repo:
        try:
            with limits(num_threads=4):
                repo.commit(state)
        except (CkptError, CrashNow) as error:
            return error, effects
    return None, effects


def test_an_error_that_any_writer_thread_meets_fails_the_commit() -> None:
    """DCP 1: the I/O error of a worker was swallowed, the save succeeded without its tensors.

    That results which do not cover the plan are refused: tests/dcp/test_save.py.
    """
    place = Place(pack_bytes=MIB)
    with place.open() as repo:
        first = repo.commit(eight(0)).id
    for k in range(1, ENOUGH, 2):
        error, effects = attempt(place, fail_at(k), eight(k))
        if error is None:
            break
        assert isinstance(error, StorageError), k
        with place.open() as repo:
            assert repo.resolve("main") == first
    assert k > 8
    assert len({effect.where for effect in effects.log if effect.where.endswith(".data")}) > 1
    with place.open() as repo:
        assert same_state(repo.load(), eight(k))


@pytest.mark.parametrize("fate", [die_before, die_after])
def test_a_crash_at_any_moment_leaves_the_old_id_with_the_old_values(fate: Callable[[int], FaultPlan]) -> None:
    """DCP 2: after a crash while overwriting, the old checkpoint's id read the new values."""
    place = Place(pack_bytes=MIB)
    with place.open() as repo:
        first = repo.commit(eight(0)).id
    for k in range(1, ENOUGH, 3):
        error, _ = attempt(place, fate(k), eight(k))
        if error is None:
            break
        with place.open() as repo:
            assert same_state(repo.load(first), eight(0)), k
    assert k > 8


def test_a_bit_flipped_anywhere_never_loads_as_another_value() -> None:
    """DCP 2: a flipped bit loaded silently."""
    state = {"w": noise(90_000, seed=1), "b": noise(2, seed=2), "step": 7, "text": "a" * 3000}
    place = Place()
    with place.open() as repo:
        repo.commit(state, message="first")
    found, tried = 0, 0
    for key, size in place.keys().items():
        for offset in sorted({*range(0, size, max(1, size // 5)), size - 1}):
            tried += not key.startswith(("names/", "gc/"))  # which no checkout reads
            w, b = torch.full((90_000,), 7.0), torch.full((2,), 7.0)
            target = {**state, "w": w, "b": b}
            try:
                with place.open(damaged(key, flip_bit(offset, 3))) as repo:
                    repo.checkout(into=target)
                assert same_state(target, state), (key, offset)
            except CkptError:
                found += 1
                assert (w == 7).all() and (b == 7).all()
    assert found >= 0.8 * tried


def test_each_of_many_commits_keeps_its_own_values_of_a_state_that_goes_on_changing() -> None:
    """DCP 3: a stager that was used again wrote into buffers still on their way: 1 held the values of 2.

    Saves in the background: tests/dcp/test_async.py.
    """
    weights, place = torch.zeros(300_000), Place()
    with place.open() as repo:
        ids = []
        for step in range(1, 4):
            weights.fill_(step)
            ids.append(repo.commit({"w": weights, "f": weights[:10]}).id)
            weights.fill_(-1)
        for step, commit in enumerate(ids, 1):
            assert torch.equal(repo.load(commit)["w"], torch.full((300_000,), float(step)))


def test_a_part_that_nobody_committed_is_refused_by_name() -> None:
    """DCP 4: a save without collectives, of one rank's part, passed for the whole.

    A region that no rank holds: tests/ops/commit/test_commit_on_ranks.py.
    """
    place, states = Place(), divided(noise(600, 300), 2, Shard(0))
    with place.open() as repo, pytest.raises(PeerError, match=r"^w: ranks \[1\] do not have this key"):
        repo.commit(states[0])
    with place.open() as repo:
        assert repo.branches() == {}


LAYOUTS = [(3, Shard(1)), (5, Shard(0)), (2, Replicate()), (1, Shard(0))]


@pytest.mark.parametrize(("size", "placement"), LAYOUTS, ids=str)
def test_no_region_of_a_target_divided_anew_stays_as_it_was(size: int, placement: Any) -> None:
    """DCP 4: a resharded load left regions of the target at their old values, silently."""
    whole, place = noise(602, 301, seed=1), Place()
    states = divided(whole, 4, Shard(0))
    place.on_ranks(4, lambda repo, rank: repo.commit(states[rank]))
    targets = divided(torch.full_like(whole, torch.nan), size, placement)
    place.on_ranks(size, lambda repo, rank: repo.checkout(into=targets[rank]))
    wanted = divided(whole, size, placement)
    assert all(
        torch.equal(got["w"].to_local(), want["w"].to_local()) for got, want in zip(targets, wanted, strict=True)
    )


def test_a_target_that_the_commit_has_less_of_is_refused_and_untouched() -> None:
    """DCP 4: what no stored item covered stayed as it was, silently."""
    place, target = Place(), {"w": torch.full((600, 3), 7.0), "v": torch.full((5,), 7.0)}
    with place.open() as repo:
        repo.commit({"w": noise(500, 3), "v": noise(5)})
        with pytest.raises(MismatchError, match="w"):
            repo.checkout(into=target)
        with pytest.raises(MismatchError, match="more"):
            repo.checkout(into={"v": target["v"], "w": torch.zeros(500, 3), "more": torch.zeros(3)})
    assert (target["w"] == 7).all() and (target["v"] == 7).all()


@pytest.mark.parametrize("odd", ["tensor", "array", "number", "object", "order"])
def test_replicas_that_differ_are_reported_by_key_and_nothing_is_committed(odd: str) -> None:
    """DCP 5: divergent "replicated" tensors and objects collapsed to one rank's copy."""
    place = Place()
    equal = {"tensor": noise(70_000), "array": np.arange(5000), "number": 3, "object": {"a": [1]}, "order": [1, 2]}
    changed = {"tensor": noise(70_000) + 1, "array": np.arange(5000) + 1, "number": 4, "object": {"a": [2]}}
    other = {**equal, odd: changed.get(odd, [2, 1])}
    told = place.on_ranks(3, lambda repo, rank: repo.commit(other if rank == 2 else equal), outcomes=True)
    assert all(isinstance(error, PeerError) and odd in str(error) and "2" in str(error) for error in told)
    with place.open() as repo:
        assert repo.branches() == {}


def test_values_that_each_rank_has_for_itself_come_back_to_their_ranks() -> None:
    """DCP 5: of objects an arbitrary rank's copy was kept, and restored on all."""
    place = Place()
    generators = [torch.Generator().manual_seed(rank) for rank in range(3)]
    states = [{"rng": PerRank(each.get_state()), "at": PerRank({"epoch": r})} for r, each in enumerate(generators)]
    place.on_ranks(3, lambda repo, rank: repo.commit(states[rank]))
    back = [{"rng": PerRank(torch.zeros_like(states[0]["rng"].value)), "at": PerRank({"epoch": -1})} for _ in range(3)]
    place.on_ranks(3, lambda repo, rank: repo.checkout(into=back[rank]))
    for rank in range(3):
        assert torch.equal(back[rank]["rng"].value, generators[rank].get_state())
        assert back[rank]["at"].value == {"epoch": rank}


def test_int_keys_stay_ints_and_tuples_keep_their_tensors() -> None:
    """DCP 6: int keys became str, and tuples that hold tensors were pickled whole."""
    state = {"state": {1: noise(2000), "1": noise(3), -2: 5}, "pair": (noise(3000), (noise(2), None)), "none": ()}
    place = Place()
    with place.open() as repo:
        repo.commit(state)
        loaded = repo.load()
        assert {entry.key for entry in repo.ls() if entry.dtype} >= {"pair/0", "pair/1/0"}
    assert set(loaded["state"]) == {1, "1", -2}
    assert type(loaded["pair"]) is tuple and type(loaded["pair"][1]) is tuple and loaded["none"] == ()
    assert same_state(loaded, state)


def test_a_dtype_is_never_cast_silently() -> None:
    """DCP 6: fp32 was cast to bf16 on load without a word."""
    place, target = Place(), {"w": torch.full((3000,), 7.0, dtype=torch.bfloat16)}
    with place.open() as repo:
        repo.commit({"w": noise(3000)})
        with pytest.raises(MismatchError, match="w.*float32.*bfloat16|w.*bfloat16.*float32"):
            repo.checkout(into=target)
        assert repo.load()["w"].dtype == torch.float32
    assert (target["w"] == 7).all()


def test_tied_tensors_are_stored_once_and_come_back_tied() -> None:
    """DCP 6: tied tensors were stored twice."""
    place, weights = Place(), noise(300_000)
    with place.open() as repo:
        info = repo.commit({"embedding": weights, "head": weights})
        loaded = repo.load()
    assert info.stats.new_bytes < 1.01 * weights.nbytes
    assert loaded["embedding"].data_ptr() == loaded["head"].data_ptr()


@pytest.mark.parametrize("inside", ["one dict", "a dict each"])
def test_a_tensor_of_one_element_costs_few_bytes(inside: str) -> None:
    """DCP 6: each 0-d tensor cost 1.58 kB. Here about 27 bytes, and a node of the tree if it has a dict to itself."""
    ones = {n: torch.tensor(float(n)) for n in range(600)}
    place = Place()
    with place.open() as repo:
        repo.commit({})
        before = sum(place.keys().values())
        repo.commit({"state": ones if inside == "one dict" else {n: {"step": one} for n, one in ones.items()}})
    assert sum(place.keys().values()) - before < len(ones) * (50 if inside == "one dict" else 400)


def test_a_slice_reads_the_leaves_that_it_touches() -> None:
    """DCP 7: every saved item was read whole: 16 MB for 40 bytes."""
    place, counted, whole = Place(), Counting(), noise(4096, 1024)
    with place.open() as repo:
        repo.commit({"w": whole, "v": noise(500_000)})
    with place.open(counted) as repo:
        repo.log()
        counted.stores[0].reset()
        part = repo.read("main", "w", region=np.s_[77:78, 500:510])
    assert torch.equal(part, whole[77:78, 500:510])
    assert counted.stores[0].bytes_read < 200_000


class TwoAtOnce(CountingStore):
    """Lets the first two long reads end together, or never."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.barrier, self.first = threading.Barrier(2, timeout=20), threading.Semaphore(2)

    def read_into(self, key: str, offset: int, target: memoryview, *, cached_only: bool = False) -> bool:
        if target.nbytes >= MIB and self.first.acquire(blocking=False):
            self.barrier.wait()
        return super().read_into(key, offset, target, cached_only=cached_only)


def test_several_threads_read_at_the_same_time() -> None:
    """DCP 7: the load was single-threaded."""
    place, state = Place(), {"v": noise(3 * MIB), "w": noise(3 * MIB, seed=1)}
    with place.open() as repo:
        repo.commit(state)
    with place.open(TwoAtOnce) as repo, limits(num_threads=2):
        assert same_state(repo.load(), state)


def test_no_plan_of_an_earlier_commit_decides_on_a_later_one() -> None:
    """DCP 8: plan caching ignored dtypes, and handed the first save's places to later ones.

    The same through DCP with its caching on: tests/dcp/test_save.py, tests/dcp/test_ranks.py.
    """
    size, wholes = 2, [noise(600, 300), noise(600, 300, seed=1).bfloat16(), noise(600, 300, seed=2)]
    states = [divided(whole, size, Shard(0)) for whole in wholes]
    here, there = Place(), Place()

    def commit(*numbers: int) -> Callable[[Repository, int], object]:
        return lambda repo, rank: [repo.commit(states[number][rank]) for number in numbers]

    here.on_ranks(size, commit(0, 1, 2))
    there.on_ranks(size, commit(2))
    with here.open() as repo:
        for back, whole in zip((2, 1, 0), wholes, strict=True):
            assert same_state(repo.load(f"main~{back}"), {"w": whole})
            assert repo.entry(f"main~{back}", "w").dtype == str(whole.dtype).removeprefix("torch.")
    with there.open() as repo:
        assert same_state(repo.load(), {"w": wholes[2]})


MATRIX = Spec("bfloat16", (8192, 28672))
"""The ranks divide its columns below, so that all of them have a part of many cells."""


def plan_commit(size: int) -> None:
    """Find out who holds what from what all ranks say alike, and plan who writes what."""
    placement = over(mesh(size), "S(1)")
    state = Container("dict", {"w": TensorItem(MATRIX, ArrayMemory(np.empty(0)), "torch", None, placement)})
    union = merge_states([(tuple(range(size)), describe(state))], {})
    plan = SavePlan([Held("w", MATRIX, grid_for(MATRIX), union.shards["w"], "w" in union.disjoint)], size)
    assert plan.whole_cells(size - 1) or plan.straddling_cells(size - 1, 0)


def plan_checkout(size: int) -> None:
    """Plan who reads what and who gets it."""
    shards = holdings(MATRIX.shape, [over(mesh(size), "S(1)")])
    plan = plan_restore_reads([RestoreRequest("w", MATRIX, shards)], size)
    assert list(plan.receives(size - 1)) and sum(1 for _ in plan.reads(size - 1)) <= grid_for(MATRIX).num_cells


@pytest.mark.parametrize("plan", [plan_commit, plan_checkout])
def test_planning_costs_no_more_per_rank_when_there_are_more_of_them(plan: Callable[[int], None]) -> None:
    """DCP 9: a matrix sharded along a smaller dimension was planned in quadratic time."""
    few, many = opcodes(lambda: plan(64)), opcodes(lambda: plan(256))
    assert many < 6 * few, (few, many)


def test_replicas_do_not_read_once_each() -> None:
    """DCP 9: loads were not deduplicated, N replicas read N times."""
    state = {f"w{n}": noise(MIB, seed=n) for n in range(3)}
    place = Place()
    with place.open() as repo:
        repo.commit(state)

    def read(size: int) -> int:
        counted = Counting()
        targets = [{name: torch.zeros(MIB) for name in state} for _ in range(size)]
        place.on_ranks(
            size, lambda repo, rank: repo.checkout(into=targets[rank]), wrap=dict.fromkeys(range(size), counted)
        )
        assert all(same_state(target, state) for target in targets)
        return sum(store.tally("read_into").num_bytes for store in counted.stores)

    assert read(4) == read(1)


def test_what_one_key_needs_is_read_without_the_metadata_of_all() -> None:
    """DCP 9: `.metadata` is one pickle that every rank loads whole."""
    place, counted = Place(), Counting()
    state = {f"block{b}": {f"w{n}": noise(300, seed=100 * b + n) for n in range(40)} for b in range(20)}
    with place.open(counted) as repo:
        repo.commit(state)
        repo.log()
        counted.stores[0].reset()
        assert torch.equal(repo.read("main", "block7/w3"), noise(300, seed=703))
        read = counted.stores[0].bytes_read
    assert read * 5 < sum(place.keys(".meta").values())


def test_nothing_is_pickled_or_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    """DCP 10: raw pickle.load of metadata, weights_only=False for objects. And tests/dcp/test_load.py."""
    states = by_rank(2, lambda rank: {"w": divide(noise(600, 300), 2, Shard(0)), "values": {"lr": 0.1, 3: (None, "x")}})
    targets = by_rank(2, lambda rank: {"w": divide(torch.zeros(600, 300), 2, Shard(1)), "values": {"lr": 0.0, 3: ()}})

    def forbidden(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("pickle is not to be used")

    for module in ("pickle", "_pickle"):
        for name in ("load", "loads", "dump", "dumps", "Pickler", "Unpickler"):
            monkeypatch.setattr(f"{module}.{name}", forbidden)
    monkeypatch.setattr(torch, "load", forbidden)
    monkeypatch.setattr(torch, "save", forbidden)
    place = Place()
    place.on_ranks(2, lambda repo, rank: repo.commit(states[rank], meta={"a": 1}))
    place.on_ranks(2, lambda repo, rank: repo.checkout(into=targets[rank]))
    assert all(target["values"] == {"lr": 0.1, 3: (None, "x")} for target in targets)
    with place.open() as repo:
        assert torch.equal(repo.load()["w"], noise(600, 300))


class Custom:
    ran = False

    def __setstate__(self, state: object) -> None:
        Custom.ran = True

    def __getstate__(self) -> object:
        return {"x": 1}


def test_a_pickle_needs_leave_to_be_made_and_leave_to_be_run() -> None:
    """DCP 10: objects were unpickled without being asked to."""
    place = Place()
    with place.open() as repo:
        with pytest.raises(UnsupportedValueError, match="odd"):
            repo.commit({"odd": Custom()})
        repo.commit({"odd": Custom()}, options=CommitOptions(allow_pickle=True))
        for work in (repo.load, lambda: repo.checkout(into={"odd": Custom()}), lambda: repo.read("main", "odd")):
            with pytest.raises(CkptError, match="allow_pickle"):
                work()
        assert not Custom.ran
        assert isinstance(repo.load(allow_pickle=True)["odd"], Custom) and Custom.ran
