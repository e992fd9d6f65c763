"""Commits exported as folders of Megatron: it loads them by itself and goes on, without cas_ckpt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cas_ckpt import Repository
from cas_ckpt.errors import UnsupportedValueError
from tests import processes
from tests.frameworks.test_megatron import CASES, call, train
from tests.ranks import results, run_processes

processes.IMPORTED.append(CASES)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # those of the framework
]


def same(before: list[Any], after: list[Any], *, whole: bool = True) -> bool:
    """Whether parts of tensors are equal; where not all is, all but buckets of the optimizer, whose padding is any."""
    places = [[part[:2] for part in parts] for parts in (before, after)]
    return places[0] == places[1] and all(
        torch.equal(one, other)
        for (key, _, one), (_, _, other) in zip(before, after, strict=True)
        if whole or "bucket" not in key
    )


def parts_of(repository: Repository, ref: str, parts: list[Any]) -> list[Any]:
    """The same parts of the tensors in a commit."""
    state = repository.load(ref)
    return [(key, place, state[key][place]) for key, place, _ in parts]


@pytest.mark.parametrize("given", [{}, {"sharding": "dp_reshardable", "dtype": torch.bfloat16}])
def test_a_folder_of_megatron_comes_out_as_one_that_it_goes_on_with(tmp_path: Path, given: dict[str, Any]) -> None:
    call("save_by_megatron", str(tmp_path), given)
    saved, exported = tmp_path / "out" / "iter_0000001", tmp_path / "exported"
    with Repository.open(tmp_path / "ckpts") as repository:
        imported = repository.import_file(saved, branch="imported")
        files = repository.export("imported", exported, format="megatron").files
        assert Path(files[-1]).name == "metadata.json"  # by which Megatron tells that a folder is whole
        again = repository.import_file(exported, branch="again")
        assert again.root == imported.root
    names = sorted(path.name for path in exported.iterdir())
    assert names == [".metadata", "__0_0.distcp", "common.pt", "metadata.json"]
    about, state, trained, rng = call("go_on_by_megatron", str(saved), 2, given)
    found, loaded, went_on, drawn = call("go_on_by_megatron", str(exported), 2, given)
    assert found == about
    assert found[0] == 1 and len(found[3]) > 15
    assert same(state, loaded, whole=not given)
    assert same(trained, went_on, whole=not given)
    assert torch.equal(rng, drawn)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_commit_of_a_strategy_comes_out_as_a_folder_that_megatron_goes_on_with(tmp_path: Path, ranks: int) -> None:
    train(tmp_path, size=ranks, tp=ranks)
    exported = tmp_path / "exported"
    with Repository.open(tmp_path / "ckpts", group=None) as repository:
        repository.export("main~1", exported, format="megatron")
        with pytest.raises(UnsupportedValueError, match="common: Megatron loads no folder without it"):
            repository.export("main", tmp_path / "parts", format="megatron", keys="decoder.*")
        assert json.loads((exported / "metadata.json").read_bytes())["sharded_backend"] == "torch_dist"
        case = f"{CASES}:go_on_by_megatron"
        for about, loaded, went_on, _ in results(run_processes(ranks, case, str(exported), 2, {"tp": ranks})):
            assert about[0] == 4 and about[2] == {"sharding": "fully_reshardable"}
            assert about[3] == {key for key, _, _ in loaded}
            assert same(parts_of(repository, "main~1", loaded), loaded)
            assert same(parts_of(repository, "main", went_on), went_on)
