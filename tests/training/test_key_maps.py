"""checkout, load and export by a key map: the bytes that torch would make, in place, verified before."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from cas_ckpt import KeyMap, Repository
from cas_ckpt.errors import CorruptionError, InvalidInputError, MismatchError
from cas_ckpt.training.capture.tensors import HASHERS
from tests.ops.fsck.fsck_cases import flip
from tests.ranks import results, run_processes
from tests.training.key_map_cases import RULES, stored, wanted

MAP = KeyMap(RULES)


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with Repository.init(tmp_path / "repo", group=None) as repo:
        repo.commit(stored())
        yield repo


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(each) for name, each in wanted().items()}


@pytest.mark.parametrize("atomic", [True, False])
def test_a_checkout_fills_the_same_tensors_and_moves_their_versions(repo: Repository, atomic: bool) -> None:
    model = torch.nn.ParameterDict(zeros())
    model["woven"] = torch.nn.Parameter(torch.zeros(400, 5400).T)  # not in one piece
    before = {name: (each.data_ptr(), each._version) for name, each in model.items()}
    repo.checkout(into={"m": model}, key_map=KeyMap([*RULES, {"prefix": "", "to": "m/"}]), atomic=atomic)
    assert same({name: each.detach() for name, each in model.items()}, wanted())
    for name, each in model.items():
        assert each.data_ptr() == before[name][0]
        assert each._version > before[name][1]


def test_a_load_gives_new_tensors_by_the_map_and_casts_once_more_if_asked(repo: Repository) -> None:
    assert same(repo.load(key_map=MAP), wanted())
    halves = repo.load(key_map=MAP, dtype=torch.float16)
    assert same(halves, {name: each.to(torch.float16) for name, each in wanted().items()})
    assert repo.load(keys=["re*", "gate"], key_map=MAP).keys() == {"renamed", "gate"}


def test_targets_elsewhere_get_copies(repo: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where targets are no views of host memory."""
    monkeypatch.setitem(HASHERS, torch.device("cpu"), object())
    target = zeros()
    repo.checkout(into=target, key_map=MAP)
    assert same(target, wanted())


def test_arrays_are_rearranged_too(tmp_path: Path) -> None:
    array = np.arange(3_000_000, dtype=np.int16).reshape(1000, 3000)
    with Repository.init(tmp_path / "repo", group=None) as repo:
        repo.commit({"a": array, "b": array[:2]})
        key_map = KeyMap([{"transpose": "a"}, {"interleave": "b", "shape": [10, 3, -1], "dim": 1}])
        woven = array[:2].reshape(2, 10, 3, 100).swapaxes(2, 3).reshape(2, 3000)
        target = {"a": np.zeros((3000, 1000), np.int16), "b": np.zeros((2, 3000), np.int16)}
        repo.checkout(into=target, key_map=key_map)
        for found in (target, repo.load(key_map=key_map)):
            assert np.array_equal(found["a"], array.T)
            assert np.array_equal(found["b"], woven)


def test_exports_have_the_names_shapes_and_dtypes_of_the_map(repo: Repository, tmp_path: Path) -> None:
    repo.export("main", tmp_path / "a.safetensors", key_map=MAP)
    assert same(load_file(tmp_path / "a.safetensors"), wanted())
    repo.export("main", tmp_path / "parts", key_map=MAP, max_shard_bytes=5_000_000, keys=["qk", "woven", "gate"])
    found = {
        name: each for path in (tmp_path / "parts").glob("*.safetensors") for name, each in load_file(path).items()
    }
    assert same(found, {name: wanted()[name] for name in ("qk", "woven", "gate")})
    info = repo.export("main", tmp_path / "a.pt", key_map=MAP)
    assert same(torch.load(tmp_path / "a.pt"), wanted())
    assert (info.num_tensors, info.total_bytes) == (10, sum(each.nbytes for each in wanted().values()))
    repo.export("main", tmp_path / "dcp", format="dcp", key_map=MAP)
    target = zeros()
    with pytest.warns(UserWarning, match="in a single process"):
        dcp.load(target, checkpoint_id=tmp_path / "dcp")
    assert same(target, wanted())
    with pytest.raises(InvalidInputError, match="a folder of trainer has the names of its framework"):
        repo.export("main", tmp_path / "trainer", format="trainer", key_map=MAP)


def test_tied_tensors_stay_tied_however_they_are_cast(tmp_path: Path) -> None:
    weight = torch.randn(300, 40)
    with Repository.init(tmp_path / "repo", group=None) as repo:
        repo.commit({"head": weight, "embed": weight, "other": weight.clone()})
        cast = KeyMap([{"cast": ".*", "to": "bfloat16"}])
        target = torch.zeros(300, 40, dtype=torch.bfloat16)
        repo.checkout(into={"head": target, "embed": target, "other": torch.zeros_like(target)}, key_map=cast)
        assert torch.equal(target, weight.bfloat16())
        loaded = repo.load(key_map=cast)
        assert loaded["head"] is loaded["embed"] is not loaded["other"]
        apart = KeyMap([{"cast": "head|embed|other", "to": "bfloat16"}, {"interleave": "embed", "shape": [2, 3, -1]}])
        with pytest.raises(MismatchError, match="one tensor in the target but two different"):
            repo.checkout(into={"head": target, "embed": target, "other": torch.zeros_like(target)}, key_map=apart)
        woven = weight.reshape(2, 3, 50, 40).transpose(1, 2).reshape(300, 40).bfloat16()
        assert same(repo.load(keys=["head", "embed"], key_map=apart), {"head": target, "embed": woven})


def test_a_tensor_without_dimensions_is_cast(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "repo", group=None) as repo:
        repo.commit({"step": torch.tensor(3.25)})
        cast = KeyMap([{"cast": "step", "to": "bfloat16"}])
        target = torch.zeros((), dtype=torch.bfloat16)
        repo.checkout(into={"step": target}, key_map=cast)
        assert same({"step": target}, {"step": torch.tensor(3.25, dtype=torch.bfloat16)})
        assert same(repo.load(key_map=cast), {"step": target})


def test_what_does_not_fit_is_refused_before_anything_is_touched(repo: Repository) -> None:
    target = zeros()
    del target["up"]
    with pytest.raises(MismatchError, match="in the commit but not in the target.*\n.*up"):
        repo.checkout(into=target, key_map=MAP)
    target = {**zeros(), "cast": torch.zeros(1100, 1001)}
    with pytest.raises(MismatchError, match=r"cast: the target is float32\[1100, 1001\], the commit holds bfloat16"):
        repo.checkout(into=target, key_map=MAP)
    assert not any(each.any() for each in target.values())
    with pytest.raises(InvalidInputError, match="key_map is a list"):
        repo.load(key_map=RULES)  # type: ignore[arg-type]


def test_damage_is_found_before_a_tensor_is_touched(repo: Repository, tmp_path: Path) -> None:
    (pack,) = (tmp_path / "repo").rglob("*.data")
    flip(pack, pack.stat().st_size // 2)
    target = zeros()
    with pytest.raises(CorruptionError) as raised:
        repo.checkout(into=target, key_map=MAP)
    assert not any(each.any() for each in target.values())
    assert str(raised.value).partition(":")[0] in target


def test_what_no_rule_takes_is_reported_and_stays(repo: Repository, caplog: pytest.LogCaptureFixture) -> None:
    key_map = KeyMap([{"rename": "named", "to": "renamed"}, {"drop": "[qkvw]|both|turned|woven|unwoven"}])
    target = {"renamed": torch.zeros(900, 900), "cast": torch.zeros(1100, 1001), "small": torch.zeros(6, 3)}
    with caplog.at_level(logging.WARNING, "cas_ckpt"):
        report = repo.checkout(into=target, key_map=key_map)
    assert report.unmapped == ("cast", "small")
    assert "no rule of the key map took cast, small: left as they are" in caplog.text
    assert torch.equal(target["cast"], stored()["cast"])
    assert repo.checkout(into=target, keys=["renamed", "s*"], key_map=key_map).unmapped == ("small",)
    assert not any(each.complete for each in repo.restores())


def test_ranks_fill_what_they_hold_of_mapped_tensors(repo: Repository, tmp_path: Path) -> None:
    ran = run_processes(4, "tests.training.key_map_cases:into_shards", str(tmp_path / "repo"), timeout_s=120)
    assert results(ran) == [[]] * 4


def test_ranks_that_give_different_maps_are_told(repo: Repository, tmp_path: Path) -> None:
    ran = run_processes(2, "tests.training.key_map_cases:with_maps_of_their_own", str(tmp_path / "repo"))
    assert all("key_map" in said for said in results(ran))
