"""DCP folders go in and out in a few buffers, not in as much memory as they are long."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint._extension import ZStandard

from cas_ckpt import CommitOptions, MemoryBudgetError, Repository, limits
from cas_ckpt.formats.dcp_import import folder_tree
from cas_ckpt.objects.spec import Box, grid_for
from cas_ckpt.objects.state import TensorItem, walk
from cas_ckpt.ops.commit.save import measure
from tests.formats.dcp_folders import save_boxes, save_folder

NUM_BYTES = 288 * 1024 * 1024
ALLOWED_BYTES = 220 * 1024 * 1024

IN_AND_OUT = """
import sys
from pathlib import Path
from cas_ckpt import limits
from cas_ckpt.core.create import init_repository
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.formats.verbs import export_any
from cas_ckpt.formats.verbs import import_any

def peak_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

folder = Path(sys.argv[1])
repo = init_repository(folder / "repo")
# Nor are the pages of libraries that a first call reads.
import_any(repo, folder / "small", CommitRequest(branch="small"))
assert "torch.distributed.checkpoint" not in sys.modules  # 50 MB, and half a second: only an export needs it
export_any(repo, "small", folder / "small-out", format="dcp")
before = peak_bytes()
with limits(num_threads=2):
    info = import_any(repo, folder / "c", CommitRequest())
imported = peak_bytes() - before
written = export_any(repo, "main", folder / "out", format="dcp", max_shard_bytes=1 << 30)
again = import_any(repo, folder / "out", CommitRequest(branch="again"))
print(info.stats.total_bytes, imported, peak_bytes() - before, info.root == again.root)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells the peak")
def test_memory_does_not_grow_with_the_folder(tmp_path: Path) -> None:
    wide = torch.zeros(NUM_BYTES // 16384, 8192, dtype=torch.bfloat16)
    rows = wide.shape[0] // 2
    left, right, below = Box((0, 0), (rows, 4096)), Box((0, 4096), (rows, 4096)), Box((rows, 0), (rows, 8192))
    ranks = [[("w", left), ("w", below)], [("w", right)]]
    save_boxes(tmp_path / "c", {"w": wide}, ranks)
    save_boxes(tmp_path / "small", {"w": wide[:2, :2]}, [[("w", Box((0, 0), (2, 2)))]])
    command = [sys.executable, "-c", IN_AND_OUT, str(tmp_path)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root, timeout=100)
    total_bytes, imported, peak, same = done.stdout.split()
    assert int(total_bytes) == NUM_BYTES
    assert int(imported) < ALLOWED_BYTES
    assert int(peak) < ALLOWED_BYTES
    assert same == "True"


@pytest.mark.parametrize("kind", ["whole rows", "cut twice", "laid out the other way", "compressed"])
def test_a_thread_holds_no_more_of_a_folder_than_its_sources_say(tmp_path: Path, kind: str) -> None:
    state = {"w": torch.randn(2600, 2048)}
    if kind == "cut twice":  # cells of 512 rows touch two chunks or four, whose rows are half as long
        cuts = [Box((row, column), (1300, 1024)) for row in (0, 1300) for column in (0, 1024)]
        folder = save_boxes(tmp_path / "c", state, [[("w", box) for box in cuts]])
    elif kind == "laid out the other way":
        folder = save_folder(tmp_path / "c", {"w": state["w"].t()})
    else:
        folder = save_folder(tmp_path / "c", state, _extensions=[ZStandard()] if kind == "compressed" else [])
    tree, _ = folder_tree(folder)
    said = measure(tree).read_bytes
    (source,) = (item.source for _, item in walk(tree) if isinstance(item, TensorItem))
    spec = next(item.spec for _, item in walk(tree) if isinstance(item, TensorItem))
    grid = grid_for(spec)
    tracemalloc.start()
    try:
        for number in range(grid.num_cells):
            source.read(grid.box(number))
        held = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 0 < held <= said + (1 << 20)
    assert said <= 2 * spec.num_bytes + (4 << 20)


def test_a_folder_in_too_little_memory_is_refused_and_with_what_is_asked_for_it_is_imported(tmp_path: Path) -> None:
    state = {"w": torch.randn(2600, 2048)}
    save_folder(tmp_path / "c", state, _extensions=[ZStandard()])
    with Repository.init(tmp_path / "repo", group=None) as repo:
        with pytest.raises(MemoryBudgetError, match="needs") as caught, limits(memory_bytes=1000):
            repo.import_file(tmp_path / "c")
        live = repo.commit(state, branch="live", options=CommitOptions(create=True))
        with pytest.raises(MemoryBudgetError, match="needs") as of_live, limits(memory_bytes=1000):
            repo.commit(state, branch="live")
        assert caught.value.least_bytes >= of_live.value.least_bytes + 2 * state["w"].nbytes
        with limits(memory_bytes=caught.value.least_bytes):
            made = repo.import_file(tmp_path / "c")
        assert made.root == live.root
