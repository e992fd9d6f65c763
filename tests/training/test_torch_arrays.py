"""Files of torch.save with NumPy arrays in them, read as data: the tensors beside the arrays are what they were."""

from __future__ import annotations

import itertools
import os
import resource
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cas_ckpt import ImportOptions, InvalidInputError, Repository

Z = torch.tensor([1 + 2j, 3 - 4j])


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    with Repository.init(tmp_path / "repo") as opened:
        yield opened


def imported(repo: Repository, path: Path, content: dict[str, Any]) -> dict[str, Any]:
    torch.save({**content, "array": np.arange(3)}, path)
    loaded: dict[str, Any] = repo.load(repo.import_file(path, branch="of-file", options=ImportOptions(create=True)))
    assert loaded["array"].tolist() == [0, 1, 2]
    return loaded


@pytest.mark.parametrize("tensor", [Z.conj(), Z.conj().imag, Z.imag, Z.conj()[1:]], ids=["conj", "neg", "imag", "part"])
def test_a_tensor_whose_bits_are_not_its_values_keeps_its_values(
    repo: Repository, tmp_path: Path, tensor: torch.Tensor
) -> None:
    assert torch.equal(imported(repo, tmp_path / "x.pt", {"t": tensor})["t"], tensor.resolve_conj().resolve_neg())


def test_a_shape_is_read(repo: Repository, tmp_path: Path) -> None:
    assert list(imported(repo, tmp_path / "x.pt", {"s": torch.Size([2, 3])})["s"]) == [2, 3]


def test_many_storages_take_no_descriptor_each(repo: Repository, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    free = (number for number in itertools.count() if number not in used)
    # Room for 128 more, however many the tests before this one have left open.
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(itertools.islice(free, 128, None)), hard))
    try:
        loaded = imported(repo, tmp_path / "x.pt", {f"t{n}": torch.full((2,), float(n)) for n in range(400)})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert loaded["t399"].tolist() == [399.0, 399.0]


def test_a_storage_of_half_an_element_is_said_to_be_malformed(repo: Repository, tmp_path: Path) -> None:
    torch.save({"t": torch.ones(2), "array": np.arange(3)}, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as whole, zipfile.ZipFile(tmp_path / "y.pt", "w") as cut:
        for name in whole.namelist():
            data = whole.read(name)
            cut.writestr(name, data[:7] if name.endswith("/data/0") else data)
    with pytest.raises(InvalidInputError, match="has 7 bytes, fewer than 2 elements take"):
        repo.import_file(tmp_path / "y.pt")


class WithMore:
    """Is pickled as a tensor that is made with one argument more than torch knows."""

    def __reduce__(self) -> Any:
        storage = torch.ones(2)._typed_storage()
        return torch._utils._rebuild_tensor_v2, (storage, 0, (2,), (1,), False, OrderedDict(), None, "more")


def test_a_tensor_that_is_made_with_more_than_torch_knows_is_refused(repo: Repository, tmp_path: Path) -> None:
    torch.save({"array": np.arange(3), "t": WithMore()}, tmp_path / "x.pt")
    with pytest.raises(InvalidInputError, match="no pickle can be read there .TypeError: _rebuild_tensor_v2"):
        repo.import_file(tmp_path / "x.pt")
