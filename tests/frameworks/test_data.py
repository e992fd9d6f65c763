"""Data loaders in a state: training goes on with the sample that comes next, by however many ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cas_ckpt import InvalidInputError, PerRank, Repository, RNGState
from cas_ckpt.integrations.data import ElasticLoader
from tests.frameworks.programs import roots_of

SAMPLES = [torch.tensor(number) for number in range(50)]


def loaders(world_size: int, **given: Any) -> list[ElasticLoader]:
    options = {"batch_size": 3, "seed": 5, **given}
    return [ElasticLoader(SAMPLES, rank=rank, world_size=world_size, **options) for rank in range(world_size)]


def steps(ranks: list[ElasticLoader], most: int | None = None) -> list[list[int]]:
    """What all ranks are given at each step, up to the end of the epoch or for so many steps."""
    found = []
    for number, batches in enumerate(zip(*ranks, strict=True), start=1):
        found.append([int(sample) for batch in batches for sample in batch])
        if number == most:
            break
    return found


def flat(parts: list[list[int]]) -> list[int]:
    return [sample for part in parts for sample in part]


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 12), st.integers(1, 4))
def test_another_number_of_ranks_goes_on_with_the_samples_that_nobody_has_had(
    before: int, after: int, stopped: int, batch_size: int
) -> None:
    first = loaders(before, batch_size=batch_size)
    had = flat(steps(first, stopped))
    if len(had) == len(SAMPLES) or first[0].epoch:
        return
    assert {tuple(each.state_dict().items()) for each in first} == {tuple(first[0].state_dict().items())}
    second = loaders(after, batch_size=batch_size, seed=0)
    for each in second:
        each.load_state_dict(first[0].state_dict())
    rest = flat(steps(second))
    assert len({*had, *rest}) == len(had) + len(rest) > len(SAMPLES) - before - after
    assert {each.epoch for each in second} == {1} and {each.consumed for each in second} == {0}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_epoch_has_each_sample_once_in_another_order(world_size: int) -> None:
    ranks = loaders(world_size, batch_size=5)
    epochs = [flat(steps(ranks)) for _ in range(3)]
    even = len(SAMPLES) // world_size * world_size
    assert all(len({*epoch}) == len(epoch) == even for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [len(each) for each in ranks] == [len(steps(loaders(world_size, batch_size=5)))] * world_size


def test_all_ranks_take_together_what_one_takes() -> None:
    alone = steps(loaders(1, batch_size=6))
    assert [sorted(step) for step in steps(loaders(2))] == [sorted(step) for step in alone]


def test_an_epoch_has_ended_when_its_last_batch_was_handed_out() -> None:
    """Trainers ask for `len(loader)` batches and no more; what is committed with the last one goes on after it."""
    (loader,), (other,) = loaders(1), loaders(1)
    epochs = []
    for _ in range(3):
        batches = iter(loader)
        epochs.append([sample for _ in range(len(loader)) for sample in next(batches).tolist()])
    assert all(sorted(epoch) == [*range(50)] for epoch in epochs) and epochs[0] != epochs[1] != epochs[2]
    assert loader.state_dict() == loaders(1)[0].state_dict() | {"epoch": 3}
    other.load_state_dict(loader.state_dict())
    assert flat(steps([other])) == flat(steps([loader]))


def test_the_same_seed_gives_the_same_order_and_no_shuffle_that_of_the_dataset() -> None:
    assert steps(loaders(2)) == steps(loaders(2)) != steps(loaders(2, seed=6))
    assert flat(steps(loaders(1, shuffle=False))) == [*range(50)]


def test_iterating_draws_no_random_numbers_of_the_process() -> None:
    before = torch.get_rng_state()
    (loader,) = loaders(1)
    assert len([*loader]) == len(loader) == 17
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_checkout_puts_the_loader_where_it_was(tmp_path: Path, num_workers: int) -> None:
    """With workers, which read batches ahead: only what was handed out counts."""
    (loader,), (other,) = loaders(1, num_workers=num_workers), loaders(1, seed=0)
    with Repository.init(tmp_path / "repo", group=None) as repo:
        had = steps([loader], 4)
        repo.commit({"loader": loader, "rng": RNGState()})
        repo.checkout("main", into={"loader": other, "rng": RNGState()})
    assert flat(had) + flat(steps([other])) == flat(steps(loaders(1)))


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": [1]}, {"drop_last": True}, {"in_order": False}, {"batch_size": 0}, {"rank": 2}, {"rank": None},
        {"seed": None}, {"seed": 1.5},
    ],
)  # fmt: skip
def test_what_would_order_samples_otherwise_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        ElasticLoader(SAMPLES, **{"batch_size": 3, "world_size": 2, "rank": 0, **options})


def test_a_second_loop_ends_the_first_and_takes_nothing_twice() -> None:
    (loader,) = loaders(1)
    first = iter(loader)
    had = [*next(first).tolist()]
    second = iter(loader)
    had += next(second).tolist()
    with pytest.raises(InvalidInputError, match="end a loop before another one is begun"):
        next(first)
    had += [sample for batch in second for sample in batch.tolist()]
    assert sorted(had) == [*range(50)] and (loader.epoch, loader.consumed) == (1, 0)


def test_a_loop_that_goes_on_after_a_checkout_into_its_loader_is_refused() -> None:
    (loader,) = loaders(1)
    batches, begun = iter(loader), loader.state_dict()
    next(batches)
    loader.load_state_dict(begun)
    with pytest.raises(InvalidInputError, match="before a checkout into the loader"):
        next(batches)
    assert flat(steps([loader])) == flat(steps(loaders(1)))


def test_a_state_brings_its_order_with_it() -> None:
    (loader,), (other,) = loaders(1), loaders(1, shuffle=False, seed=np.int64(9))
    had = steps([loader], 4)
    other.load_state_dict(loader.state_dict())
    assert flat(had) + flat(steps([other])) == flat(steps(loaders(1)))
    assert steps(loaders(1, seed=np.int64(5))) == steps(loaders(1, seed=5))


def test_ranks_are_those_of_the_group_when_a_loop_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = ElasticLoader(SAMPLES, batch_size=3, seed=5)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in loaders(2)[1]] and len(loader) == 9


def test_the_state_of_a_dataset_of_another_length_is_refused() -> None:
    (loader,) = loaders(1)
    with pytest.raises(InvalidInputError, match="a dataset of 49 samples, this one has 50"):
        loader.load_state_dict(loader.state_dict() | {"num_samples": 49})


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stateful_data_loader_of_torchdata_goes_on_by_rank(tmp_path: Path, num_workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def loader() -> Any:
        return stateful(SAMPLES, batch_size=3, num_workers=num_workers, shuffle=False)

    first, second, had = loader(), loader(), []
    with Repository.init(tmp_path / "repo", group=None) as repo:
        for number, batch in enumerate(first, start=1):
            had += batch.tolist()
            if number == 4:
                repo.commit({"loader": PerRank(first)})
                break
        repo.checkout("main", into={"loader": PerRank(second)})
    assert had + [sample for batch in second for sample in batch.tolist()] == [*range(50)]


def test_the_program_of_the_docs_is_killed_and_resumes_exactly(tmp_path: Path) -> None:
    whole = roots_of("Data loaders", tmp_path / "whole")
    assert len(whole) == 6 and roots_of("Data loaders", tmp_path / "killed", kill_at=3) == whole
