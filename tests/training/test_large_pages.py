"""New tensors lie in memory for which the kernel was asked for large pages."""

from __future__ import annotations

import mmap
import re
import sys
from pathlib import Path

import pytest
import torch

from cas_ckpt import Repository
from cas_ckpt.training.restore import materialize
from cas_ckpt.training.restore.materialize import WORTH_BYTES, ask_for_large_pages

THERE = sys.platform == "linux" and Path("/sys/kernel/mm/transparent_hugepage").exists()


def asked(address: int) -> bool:
    """Whether the mapping that holds `address` may have large pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError("no such mapping")


@pytest.mark.skipif(not THERE, reason="a kernel without large pages")
def test_a_new_tensor_that_is_loaded_may_have_large_pages(tmp_path: Path) -> None:
    state = {"large": torch.arange(1 << 21), "small": torch.arange(10)}
    with Repository.init(tmp_path / "repo", group=None) as repo:
        repo.commit(state)
        loaded = repo.load("main")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
    assert asked(loaded["large"].data_ptr() + mmap.PAGESIZE)


@pytest.mark.skipif(not THERE, reason="a kernel without large pages")
def test_only_whole_pages_of_the_tensor_itself_are_asked_for() -> None:
    memory = mmap.mmap(-1, 4 * WORTH_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    part = whole[mmap.PAGESIZE + 5 : 2 * WORTH_BYTES + 5]
    ask_for_large_pages(part)
    assert asked(part.data_ptr() + mmap.PAGESIZE)
    assert not asked(part.data_ptr()) and not asked(part.data_ptr() + part.numel())


def test_without_the_call_of_the_system_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    materialize._madvise.cache_clear()
    ask_for_large_pages(tensor := torch.empty(WORTH_BYTES, dtype=torch.uint8))
    assert materialize._madvise() is None and tensor.fill_(1).sum() == WORTH_BYTES
    materialize._madvise.cache_clear()
