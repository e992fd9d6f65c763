"""What is used of torch beside its public interface: the torch that is installed has it, or its feature says so."""

from __future__ import annotations

import errno
import io
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

import cas_ckpt.training.torch_internals as internals
from cas_ckpt import Repository, UnsupportedVersionError
from cas_ckpt.dcp import CasStorageReader, CasStorageWriter
from cas_ckpt.training.torch_internals import ATTRIBUTES, NAMES, OVERRIDDEN, STAGER, private, save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

HOLDERS: dict[str, Any] = {
    "torch.Tensor": torch.zeros(2).to_sparse(), "torch.nn.Module": torch.nn.Linear(1, 1),
    "torch.distributed.tensor.DTensor": DTensor,
}  # fmt: skip


@pytest.mark.parametrize("name", [*NAMES, *ATTRIBUTES])
def test_the_torch_that_is_installed_has_the_name(name: str) -> None:
    if name in NAMES:
        assert private(name) is not None
    else:
        holder, _, last = name.rpartition(".")
        assert hasattr(HOLDERS[holder], last)


@pytest.mark.parametrize("refusal", [MemoryError("none left"), OSError(errno.ENOSPC, "no space left")], ids=repr)
def test_what_a_write_raises_is_raised_by_a_save(refusal: Exception) -> None:
    class Refusing(io.BytesIO):
        def __init__(self, room: int) -> None:
            super().__init__()
            self.room = room

        def write(self, data: Any) -> int:
            if self.tell() >= self.room:
                raise refusal
            return super().write(data)

    whole = io.BytesIO()
    save(state := {"bytes": bytes(10_000), "tensor": torch.zeros(1000)}, whole)
    for room in range(0, len(whole.getbuffer()), 500):
        with pytest.raises(type(refusal), match="left"):
            save(state, Refusing(room))


def test_the_stager_has_what_is_overridden_in_it() -> None:
    assert [name for name in OVERRIDDEN if not hasattr(private(STAGER)(), name)] == []


WITHOUT = """
import importlib, sys, torch
for name in sys.argv[1:]:
    home, _, last = name.rpartition(".")
    delattr(importlib.import_module(home), last)
import cas_ckpt.formats.verbs, cas_ckpt.dcp.paths, cas_ckpt.formats.dcp_export
from cas_ckpt import Repository, RetentionHook
with Repository.init("memory://without") as repo:
    model = torch.nn.Linear(2, 2)
    repo.commit({"model": model})
    repo.checkout(into={"model": model})
"""


def test_without_all_of_torchs_private_names_everything_is_imported_and_modules_go_in_and_out() -> None:
    """As with a torch that has dropped them. In a process of its own, for they are gone in all of it."""
    used_by_torch = ("torch._empty", internals.STORAGE_UTILS, internals.TRAVERSE, internals.STAGER)
    gone = [name for name in NAMES if not name.startswith(used_by_torch)]
    subprocess.run([sys.executable, "-c", WITHOUT, *gone], check=True, timeout=100)


def without(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A torch that has no such name."""
    home, _, last = name.rpartition(".")
    monkeypatch.delattr(import_module(home), last)
    internals.stager_class.cache_clear()


def test_a_save_in_the_background_names_the_stager_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with Repository.init("memory://stager") as repo:
        without(monkeypatch, STAGER)
        with pytest.raises(UnsupportedVersionError, match=r"has no .*StateDictStager, which dcp.async_save .* needs"):
            dcp.async_save({"w": torch.zeros(2)}, storage_writer=CasStorageWriter(repo), no_dist=True)
        dcp.save({"w": torch.ones(2)}, storage_writer=CasStorageWriter(repo), no_dist=True)
        assert repo.load("HEAD")["w"].tolist() == [1.0, 1.0]
    internals.stager_class.cache_clear()


def test_a_load_names_what_is_not_there_and_touches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with Repository.init("memory://load") as repo:
        repo.commit({"w": torch.ones(2)})
        target = {"w": torch.zeros(2)}
        without(monkeypatch, internals.TRAVERSE)
        with pytest.raises(dcp.api.CheckpointException, match=r"has no .*traverse_state_dict, which loading"):
            dcp.load(target, storage_reader=CasStorageReader(repo), no_dist=True)
        assert target["w"].tolist() == [0.0, 0.0]


@pytest.mark.filterwarnings("ignore:.*deprecated:UserWarning")  # quantized tensors
def test_a_quantized_tensor_names_what_is_not_there_and_all_else_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with Repository.init("memory://quantized") as repo:
        repo.commit({"q": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8), "w": torch.ones(2)})
        monkeypatch.delattr(torch, "_empty_affine_quantized")
        with pytest.raises(UnsupportedVersionError, match="has no torch._empty_affine_quantized"):
            repo.load("HEAD")
        assert repo.load("HEAD", keys="w")["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("version", "is_unknown"),
    [("2.9.1", False), ("2.15.0+cu132", False), ("2.16.0.dev20270101", True), ("3.0.0", True), ("unknown", False)],
)
def test_a_torch_newer_than_all_that_were_tested_is_named_in_a_warning(
    version: str, is_unknown: bool, caplog: pytest.LogCaptureFixture
) -> None:
    internals.warn_of_unknown_release(version)
    assert (f"torch {version} is newer than" in caplog.text) == is_unknown
