"""The faults of torchsnapshot (0.1.0, nightly 2024.7.26) that were reproduced: none of them is ours.

Numbers are those of the list in the project's notes on its peers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from cas_ckpt import CommitInfo, CommitOptions, Repository, limits
from cas_ckpt.arguments import Buffer
from cas_ckpt.errors import CkptError, CorruptionError, InvalidInputError, PeerError, UnsupportedValueError
from cas_ckpt.storage.store import Store
from tests.effects import CrashNow, Effects, FaultPlan, die_after, die_before, fail_at
from tests.faults.rank_cases import MIB, Counting, Place, by_rank, damaged, divide, divided, failing, noise
from tests.training.roundtrip import same_state
from tests.wrapped_stores import CountingStore, Damage, flip_bit, truncate

HOURS_S = 7200.0
"""Nobody who waits for this timeout gets through the test."""


def usage(folder: Path) -> tuple[int, int]:
    """(files, bytes) of a repository on disk, its index left out."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.relative_to(folder).parts[0] != "index"]
    return len(files), sum(path.stat().st_size for path in files)


def test_three_commits_of_one_state_cost_once(tmp_path: Path) -> None:
    """torchsnapshot 1: three takes of the same state cost three times the disk."""
    weights = noise(600_000)
    state = {"w": weights, "b": noise(300), "step": 1}
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit(state)
        _, once = usage(tmp_path / "repo")
        repo.commit({**state, "w": weights.clone()})
        repo.commit(state, message="third")
    _, thrice = usage(tmp_path / "repo")
    assert once > 2_400_000
    assert thrice - once < 4000


def test_tied_tensors_take_the_disk_once(tmp_path: Path) -> None:
    """torchsnapshot 1: tied tensors were stored twice."""
    weights = noise(600_000)
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit({"embedding": weights, "head": weights, "view": weights[:]})
    assert usage(tmp_path / "repo")[1] < 1.01 * weights.nbytes


def test_none_and_tuples_cost_bytes_and_no_files(tmp_path: Path) -> None:
    """torchsnapshot 1: `None` or a tuple cost a file of 1.2 KB each."""
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit({"a": 1})
        files, size = usage(tmp_path / "repo")
        repo.commit({"a": 1, **{f"none{n}": None for n in range(200)}, **{f"pair{n}": (n, None) for n in range(200)}})
        more_files, more = usage(tmp_path / "repo")
        assert repo.load()["pair7"] == (7, None)
    assert more_files - files <= 2
    assert more - size < 400 * 40


def test_one_element_that_differs_between_replicas_is_reported() -> None:
    """torchsnapshot 2: "replicated" entries were never compared, rank 1's differing tensor was lost."""
    place, states = Place(), [{"w": noise(3000, 40), "small": noise(5)} for _ in range(3)]
    states[1]["w"][2222, 7] += 1
    told = place.on_ranks(
        3, lambda repo, rank: repo.commit(states[rank], options=CommitOptions(replica_audit=1.0)), outcomes=True
    )
    assert all(isinstance(error, PeerError) and str(error).startswith("w: ranks 1 hold other bytes") for error in told)
    with place.open() as repo:
        assert repo.branches() == {}


FAILURES = ["a value that cannot be stored", "a medium that refuses", "an error before the call", "a tensor of meta"]


@pytest.mark.parametrize("failure", FAILURES)
def test_when_one_rank_fails_the_others_raise_without_waiting_for_a_timeout(failure: str) -> None:
    """torchsnapshot 3: the others waited for the process group's timeout."""
    place, state = Place(), {"w": noise(3000), "odd": 1}
    wrap = {1: failing(Effects(fail_at(1)))} if failure == FAILURES[1] else {}
    odd = {FAILURES[0]: threading.Lock(), FAILURES[3]: torch.empty(3, device="meta")}.get(failure, 1)

    def work(repo: Repository, rank: int) -> Any:
        if rank == 1 and failure == FAILURES[2]:
            raise InvalidInputError("this rank fails on its own")
        return repo.commit({**state, "own": noise(90_000, seed=2), "odd": odd if rank == 1 else 1})

    told = place.on_ranks(3, work, wrap=wrap, outcomes=True, timeout_s=HOURS_S)
    assert isinstance(told[1], CkptError) and not isinstance(told[1], PeerError)
    for rank in (0, 2):
        assert isinstance(told[rank], PeerError) and told[rank].ranks == (1,), told[rank]
    with place.open() as repo:
        assert repo.branches() == {}


def in_one_thread(repo: Repository, state: dict[str, Any]) -> CommitInfo:
    with limits(num_threads=1):
        return repo.commit(state)


def test_the_branch_moves_after_the_last_byte_of_every_rank() -> None:
    """torchsnapshot 4: a snapshot was marked good before rank 1 had written."""
    place, effects = Place(pack_bytes=MIB), Effects()
    states = divided(noise(2000, 600), 3, Shard(0))
    shared = dict.fromkeys(range(3), failing(effects))
    place.on_ranks(3, lambda repo, rank: in_one_thread(repo, states[rank]), wrap=shared)
    packs = [at for at, effect in enumerate(effects.log) if effect.where.endswith(".data")]
    heads = [at for at, effect in enumerate(effects.log) if effect.where.startswith("refs/")]
    assert len({effects.log[at].where for at in packs}) >= 3
    assert min(heads) > max(packs)


@pytest.mark.parametrize("fate", [fail_at, die_before, die_after])
def test_a_commit_that_a_rank_has_not_written_is_never_marked_good(fate: Callable[[int], FaultPlan]) -> None:
    """torchsnapshot 4, the torn snapshot itself: rank 1 fails at any of its writes."""
    whole, place = noise(2000, 600), Place(pack_bytes=MIB)
    with place.open() as repo:
        first = repo.commit({"w": torch.zeros(2000, 600)}).id
    for k in range(1, 9):
        states, effects = divided(whole + k, 3, Shard(0)), Effects(fate(k))

        def work(repo: Repository, rank: int, states: Any = states) -> Any:
            with limits(num_threads=1):
                return repo.commit(states[rank])

        told = place.on_ranks(3, work, wrap={1: failing(effects)}, outcomes=True)
        with place.open() as repo:
            if effects.count < k:
                assert len({info.id for info in told}) == 1
                assert same_state(repo.load(), {"w": whole + k})
                break
            assert all(isinstance(error, (CkptError, CrashNow)) for error in told)
            assert repo.resolve("main") == first
    assert k > 1


class MeetsAtTheSwap(CountingStore):
    """Lets the first swap of each of two stores begin when both have come to it."""

    def __init__(self, inner: Store, barrier: threading.Barrier) -> None:
        super().__init__(inner)
        self.barrier, self.first = barrier, threading.Semaphore(1)

    def compare_and_swap(self, key: str, expected: bytes, data: Buffer) -> None:
        if self.first.acquire(blocking=False):
            self.barrier.wait()
        super().compare_and_swap(key, expected, data)


def test_two_commits_of_all_ranks_to_one_branch_at_once_are_both_whole() -> None:
    """torchsnapshot 4: a second take to the same path mixed with the first."""
    place, size = Place(pack_bytes=MIB), 2
    wholes = [noise(1200, 600, seed=seed) for seed in range(2)]
    states = [divided(whole, size, Shard(0)) for whole in wholes]
    made: dict[int, list[Any]] = {}
    barrier = threading.Barrier(2, timeout=30)

    def commit(which: int) -> None:
        made[which] = place.on_ranks(
            size,
            lambda repo, rank: repo.commit(states[which][rank], step=which),
            wrap={0: lambda store: MeetsAtTheSwap(store, barrier)},
        )

    threads = [threading.Thread(target=commit, args=(which,)) for which in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with place.open() as repo:
        assert {info.step for info in repo.log()} == {0, 1}
        for which, infos in made.items():
            assert len({info.id for info in infos}) == 1
            assert same_state(repo.load(infos[0].id), {"w": wholes[which]})


def test_a_large_tensor_changed_after_its_commit_stays_as_it_was_committed() -> None:
    """torchsnapshot 5: a large CPU tensor that was modified after async_take was saved modified.

    Saves in the background: tests/dcp/test_async.py.
    """
    place, size = Place(), 2
    states = [{"w": noise(3 * MIB)} for _ in range(size)]

    def work(repo: Repository, rank: int) -> None:
        repo.commit(states[rank])
        states[rank]["w"].zero_()

    place.on_ranks(size, work)
    with place.open() as repo:
        assert torch.equal(repo.load()["w"], noise(3 * MIB))


def restored_over(place: Place, size: int, state: dict[str, torch.Tensor], key: str, damage: Damage) -> list[Any]:
    """What each rank of a checkout raises whose stores damage `key`; their targets must be untouched."""
    targets = [{name: torch.full_like(value, 7) for name, value in state.items()} for _ in range(size)]
    told = place.on_ranks(
        size,
        lambda repo, rank: repo.checkout(into=targets[rank]),
        wrap=dict.fromkeys(range(size), damaged(key, damage)),
        outcomes=True,
    )
    assert all((value == 7).all() for target in targets for value in target.values())
    return told


@pytest.mark.parametrize("size", [1, 2])
def test_a_file_cut_short_is_an_error_and_the_target_is_untouched(size: int) -> None:
    """torchsnapshot 6: a truncated data file restored "successfully", with stale values."""
    place, state = Place(), {"w": noise(400_000), "v": noise(3000)}
    with place.open() as repo:
        repo.commit(state)
    packs = {**place.keys(".data"), **place.keys(".meta")}
    assert len(packs) >= 2
    for key, length in packs.items():
        for left in (length - 1, length // 2, 0):
            told = restored_over(place, size, state, key, truncate(left))
            assert all(isinstance(error, CkptError) for error in told), (key, left)


def test_a_bit_flipped_in_the_values_is_found_on_every_rank() -> None:
    """torchsnapshot 6: a flipped bit was never seen."""
    place, state = Place(), {"w": noise(400_000)}
    with place.open() as repo:
        repo.commit(state)
    ((key, length),) = place.keys(".data").items()
    told = restored_over(place, 2, state, key, flip_bit(length // 2))
    assert any(isinstance(error, CorruptionError) for error in told)
    assert all(isinstance(error, (CorruptionError, PeerError)) and "w" in str(error) for error in told)


@pytest.mark.parametrize("fate", [die_before, die_after])
def test_a_crash_while_metadata_are_written_leaves_nothing_that_cannot_be_read(
    fate: Callable[[int], FaultPlan],
) -> None:
    """torchsnapshot 6: a crash while writing metadata left a file that could not be parsed."""
    place, struck = Place(), 0
    with place.open() as repo:
        first = repo.commit({"w": noise(3000), "step": 0}).id
    for k in range(1, 30):
        effects = Effects(fate(k))
        with place.open(failing(effects)) as repo:
            try:
                repo.commit({"w": noise(3000, seed=k), "step": k})
            except CrashNow:
                struck += effects.log[-1].where.endswith(".meta")
        with place.open() as repo:
            assert [info.id for info in repo.log()][-1] == first
            assert repo.load(first)["step"] == 0
            assert repo.load()["w"].shape == (3000,)
        if not effects.dead:
            break
    assert struck


@pytest.mark.parametrize("count", [1, 3, 513, 5001, 1_100_001])
def test_bf16_of_an_odd_length_keeps_its_last_element(count: int) -> None:
    """torchsnapshot 7: odd-length bf16 tensors lost two bytes."""
    place, whole = Place(), noise(count, dtype=torch.bfloat16)
    states = divided(whole, 3, Shard(0))
    with place.open() as repo:
        repo.commit({"w": whole}, branch="whole")
        place.on_ranks(3, lambda repo, rank: repo.commit(states[rank], options=CommitOptions(orphan=True)))
        for branch in ("whole", "main"):
            assert same_state(repo.load(branch), {"w": whole})


def test_fully_replicated_dtensors_come_back() -> None:
    """torchsnapshot 7: they raised KeyError on restore."""
    place, whole = Place(), noise(500, 300)
    states, targets = divided(whole, 3, Replicate()), divided(torch.zeros(500, 300), 2, Replicate())
    place.on_ranks(3, lambda repo, rank: repo.commit(states[rank]))
    place.on_ranks(2, lambda repo, rank: repo.checkout(into=targets[rank]))
    assert all(torch.equal(target["w"].to_local(), whole) for target in targets)


def test_local_shards_that_are_empty_are_saved_and_restored() -> None:
    """torchsnapshot 7: an empty local shard (uneven FSDP2) divided by zero."""
    place, wholes = Place(), {"w": noise(5, 700), "b": noise(2), "none": noise(0, 4)}
    states = by_rank(6, lambda rank: {name: divide(whole, 6, Shard(0)) for name, whole in wholes.items()})
    targets = by_rank(
        4, lambda rank: {name: divide(torch.zeros_like(whole), 4, Shard(0)) for name, whole in wholes.items()}
    )
    assert states[5]["w"].to_local().numel() == 0 and targets[3]["b"].to_local().numel() == 0
    place.on_ranks(6, lambda repo, rank: repo.commit(states[rank]))
    place.on_ranks(4, lambda repo, rank: repo.checkout(into=targets[rank]))
    for name, whole in wholes.items():
        assert torch.equal(torch.cat([target[name].to_local() for target in targets]), whole)
    with place.open() as repo:
        assert same_state(repo.load(), wholes)


DTYPES = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "uint16", "uint32", "uint64"]


def test_fp8_and_unsigned_tensors_come_back_whole_and_divided() -> None:
    """torchsnapshot 7: they raised."""
    bits = torch.arange(1024 * 8, dtype=torch.int64).view(torch.uint8)[: 1024 * 40]
    wholes = {name: bits.clone().view(getattr(torch, name)) for name in DTYPES}
    place = Place()

    def over(size: int, values: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
        return by_rank(size, lambda rank: {name: divide(value, size, Shard(0)) for name, value in values.items()})

    states, targets = over(3, wholes), over(2, {name: torch.zeros_like(whole) for name, whole in wholes.items()})
    wanted = over(2, wholes)
    place.on_ranks(3, lambda repo, rank: repo.commit(states[rank]))
    place.on_ranks(2, lambda repo, rank: repo.checkout(into=targets[rank]))
    with place.open() as repo:
        loaded = repo.load()
    assert same_state(loaded, wholes)
    for name, whole in wholes.items():
        assert loaded[name].dtype == whole.dtype == getattr(torch, name)
        for target, want in zip(targets, wanted, strict=True):
            parts = [part[name].to_local().view(torch.uint8) for part in (target, want)]
            assert torch.equal(*parts)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_come_back() -> None:
    """torchsnapshot 7: they raised."""
    dense = torch.zeros(400, 300)
    dense[::7, ::5] = noise(58, 60)
    state = {"coo": dense.to_sparse(), "csr": dense.to_sparse_csr()}
    with Place().open() as repo:
        repo.commit(state)
        loaded = repo.load()
    for name, value in state.items():
        assert loaded[name].layout == value.layout
        assert torch.equal(loaded[name].to_dense(), dense)


def test_meta_tensors_are_refused_by_key() -> None:
    """torchsnapshot 7: they raised whatever came first."""
    place = Place()
    with place.open() as repo:
        with pytest.raises(UnsupportedValueError, match="^model/w: .*meta"):
            repo.commit({"model": {"w": torch.empty(3, 4, device="meta")}})
        assert repo.branches() == {}


def test_numpy_arrays_come_back_as_arrays() -> None:
    """torchsnapshot 7: they could be saved and not restored."""
    state = {"a": np.arange(5000.0).reshape(50, 100).T, "flags": np.array([True, False]), "zero": np.array(3)}
    with Place().open() as repo:
        repo.commit(state)
        loaded = repo.load()
        target = {name: np.zeros_like(value) for name, value in state.items()}
        repo.checkout(into=target)
    for name, value in state.items():
        assert type(loaded[name]) is np.ndarray
        for found in (loaded[name], target[name]):
            assert found.dtype == value.dtype and np.array_equal(found, value)


def test_many_entries_cost_few_bytes_each_and_are_opened_without_reading_all() -> None:
    """torchsnapshot 8: metadata of 100,000 entries took 32 MB (320 bytes each) and 42 to 64 s to open."""
    place, counted = Place(), Counting()
    state = {f"part{p}": {f"entry{n}": torch.tensor(p * 1000 + n) for n in range(1000)} for p in range(10)}
    with place.open(counted) as repo:
        repo.commit(state)
        counted.stores[0].reset()
        assert repo.read("main", "part7/entry77").item() == 7077
        assert counted.stores[0].bytes_read * 4 < sum(place.keys().values())
    assert sum(place.keys().values()) < 50 * 10_000
