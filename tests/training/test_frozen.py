"""Frozen tensors: every way to write to one is found, and what is not declared frozen is stored as it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cas_ckpt import CommitOptions, Repository
from cas_ckpt.errors import FrozenChangedError, InvalidInputError
from cas_ckpt.objects.spec import Box
from cas_ckpt.training.capture.tensors import CopiedTensor, HostTensor
from cas_ckpt.transfer.hashing import Summed, checksums

SIZE = 300


def fused_step(weight: torch.Tensor) -> None:
    weight.requires_grad_()
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    weight.grad = torch.ones_like(weight)
    optimizer.step()


def through_data(weight: torch.Tensor) -> None:
    weight.data[7, 5] += 1


def through_numpy(weight: torch.Tensor) -> None:
    weight.detach().numpy()[299, 299] = 3.5


def through_the_storage(weight: torch.Tensor) -> None:
    weight.untyped_storage()[12345] = (weight.untyped_storage()[12345] + 1) % 256


def by_a_swap(weight: torch.Tensor) -> None:
    array = weight.detach().numpy().reshape(-1)
    array[[3, 40_003]] = array[[40_003, 3]]


WRITES = [fused_step, through_data, through_numpy, through_the_storage, by_a_swap]


@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_every_way_to_write_to_a_frozen_tensor_is_found(tmp_path: Path, write: Callable[[torch.Tensor], None]) -> None:
    weight = torch.randn(SIZE, SIZE)
    state = {"base": weight, "step": 0}
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit(state, frozen="base", options=CommitOptions(frozen_audit=0))
        repo.commit(state, frozen="base", options=CommitOptions(frozen_audit=0))
        write(weight)
        with pytest.raises(FrozenChangedError, match=r"base: .*commit once without frozen="):
            repo.commit(state, frozen="base", options=CommitOptions(frozen_audit=0))
        assert len(repo.log()) == 2


def test_a_tensor_may_be_frozen_again_after_a_commit_without_it(tmp_path: Path) -> None:
    weight = torch.randn(SIZE, SIZE)
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit({"base": weight}, frozen="base")
        weight += 1
        with pytest.raises(FrozenChangedError):
            repo.commit({"base": weight}, frozen="base")
        now, thawed = weight.clone(), repo.commit({"base": weight})
        assert repo.commit({"base": weight}, frozen="base").root == thawed.root
        weight.data += 1
        with pytest.raises(FrozenChangedError):
            repo.commit({"base": weight}, frozen="base")
        assert torch.equal(repo.load("main")["base"], now)


def test_a_commit_of_other_keys_keeps_what_is_known_of_frozen_ones(tmp_path: Path) -> None:
    weight = torch.randn(SIZE, SIZE)
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit({"base": weight}, frozen="base")
        repo.commit({"other": 1})
        weight.data += 1
        with pytest.raises(FrozenChangedError):
            repo.commit({"base": weight}, frozen="base")


def test_equal_bytes_in_other_memory_are_the_same_frozen_tensor(tmp_path: Path) -> None:
    weight = torch.randn(SIZE, SIZE)
    with Repository.init(tmp_path / "repo") as repo:
        first = repo.commit({"base": weight}, frozen="base")
        assert repo.commit({"base": weight.T.contiguous().T}, frozen="base").root == first.root


def test_the_version_counter_is_believed_by_who_says_so(tmp_path: Path) -> None:
    weight = torch.randn(SIZE, SIZE)
    options: dict[str, Any] = {"frozen": "base", "options": CommitOptions(frozen_check="version", frozen_audit=0)}
    with Repository.init(tmp_path / "repo") as repo:
        first = repo.commit({"base": weight}, **options)
        weight.data += 1
        assert repo.commit({"base": weight}, **options).root == first.root
        weight += 1
        with pytest.raises(FrozenChangedError):
            repo.commit({"base": weight}, **options)
        with pytest.raises(FrozenChangedError):  # nothing was summed so far: the ids are compared
            repo.commit({"base": weight}, frozen="base", options=CommitOptions(frozen_audit=0))


def test_a_check_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with Repository.init(tmp_path / "repo") as repo:
        with pytest.raises(InvalidInputError, match="frozen_check is 'none': give 'checksum' or 'version'"):
            repo.commit({"a": 1}, options=CommitOptions(frozen_check="none"))
        with pytest.raises(InvalidInputError, match="replica_check is '.*': give 'checksum' or 'sample'"):
            repo.commit({"a": 1}, options=CommitOptions(replica_check="none"))


# --- values and small tensors -----------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 5000], ids=["inline", "in chunks"])
def test_values_among_frozen_keys_are_stored_as_they_are_each_time(tmp_path: Path, size: int) -> None:
    state: dict[str, Any] = {"base": {"w": torch.randn(SIZE, SIZE), "history": "a" * size}}
    with Repository.init(tmp_path / "repo") as repo:
        for letter in "abc":
            state["base"]["history"] = letter * size
            repo.commit(state, frozen="base/**")
            assert repo.load("main")["base"]["history"] == letter * size


@pytest.mark.parametrize("value", [1, "a" * 5000], ids=["inline", "in chunks"])
def test_a_frozen_pattern_that_names_values_alone_is_refused_at_once(tmp_path: Path, value: Any) -> None:
    with Repository.init(tmp_path / "repo") as repo, pytest.raises(InvalidInputError, match="matches no tensor"):
        repo.commit({"w": torch.randn(SIZE, SIZE), "note": value}, frozen=["w", "note"])


def test_small_frozen_tensors_are_compared_too(tmp_path: Path) -> None:
    bias = torch.zeros(4)
    with Repository.init(tmp_path / "repo") as repo:
        first = repo.commit({"base": {"b": bias}}, frozen="base/b")
        assert repo.commit({"base": {"b": bias}}, frozen="base/b").root == first.root
        bias.data[1] = 1
        with pytest.raises(FrozenChangedError, match="base/b"):
            repo.commit({"base": {"b": bias}}, frozen="base/b")


# --- requires_grad ----------------------------------------------------------------------------


class Tuned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(SIZE, SIZE).requires_grad_(False)
        self.norm = nn.BatchNorm1d(SIZE).requires_grad_(False)
        self.head = nn.Linear(SIZE, 4)


def test_parameters_that_require_no_gradient_are_frozen_and_nothing_else(tmp_path: Path) -> None:
    model = Tuned()
    optimizer = torch.optim.AdamW(model.head.parameters())
    state = {"run": {"model": model}, "optim": optimizer, "loose": torch.zeros(SIZE)}
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit(state, frozen="requires_grad")
        model.head.weight.data += 1
        model.norm.running_mean += 1  # type: ignore[operator]
        state["loose"].data += 1  # type: ignore[union-attr]
        root = repo.commit(state, frozen="requires_grad").root
        assert root != repo.log()[-1].root
        model.base.weight.data[0, 0] += 1
        with pytest.raises(FrozenChangedError, match=r"run/model/base\.weight"):
            repo.commit(state, frozen="requires_grad")
        model.base.requires_grad_(True)  # unfrozen: stored as it is from now on
        assert repo.commit(state, frozen=["requires_grad", "loose"]).root != root


def test_nothing_is_frozen_where_all_parameters_require_a_gradient(tmp_path: Path) -> None:
    model = nn.Linear(SIZE, SIZE)
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit({"model": model}, frozen="requires_grad")
        model.weight.data += 1
        repo.commit({"model": model}, frozen="requires_grad")


def test_parameters_in_wrapped_modules_are_frozen_by_the_names_of_their_keys(tmp_path: Path) -> None:
    model = Tuned()
    with Repository.init(tmp_path / "repo") as repo:
        repo.commit({"model": nn.DataParallel(model)}, frozen="requires_grad")
        model.base.weight.data[0, 0] += 1
        with pytest.raises(FrozenChangedError, match=r"model/base\.weight"):
            repo.commit({"model": nn.DataParallel(model)}, frozen="requires_grad")


# --- on a device --------------------------------------------------------------------------------

DEVICES = [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]


def checksum(source: Any, tensor: torch.Tensor) -> bytes:
    box = Box((0,) * tensor.dim(), tuple(tensor.shape))
    return checksums([Summed(source, box, tensor.element_size())], num_threads=1)[0]


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex128], ids=str)
@pytest.mark.parametrize("shape", [(), (7,), (200_001,), (300, 401), (3, 1_500_007)], ids=str)
def test_a_device_sums_what_the_host_sums(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    memory = torch.empty(int(np.prod(shape)) + 3, dtype=dtype)
    tensor = memory[3:].view(shape)
    tensor.copy_((torch.rand(shape) * 9 - 4).to(dtype))
    wanted = checksum(HostTensor(tensor), tensor)
    there = memory.to(device)[3:].view(shape)
    assert checksum(CopiedTensor(there), there) == wanted
    if tensor.dim() > 1:
        other = there.transpose(0, 1).contiguous().transpose(0, 1)
        assert checksum(CopiedTensor(other), other) == wanted


def test_conjugated_and_negated_views_are_summed_as_what_they_mean() -> None:
    tensor = torch.randn(300, 301, dtype=torch.complex64)
    assert checksum(CopiedTensor(tensor.conj()), tensor) == checksum(HostTensor(tensor.conj().resolve_conj()), tensor)
    view = tensor.conj().imag
    assert view.is_neg()
    assert checksum(CopiedTensor(view), view) == checksum(HostTensor(view.resolve_neg()), view)
