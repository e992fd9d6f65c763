"""DCP folders go in and out in a few buffers, not in as much memory as they are long."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cas_ckpt.objects.spec import Box
from tests.dcp.folder.dcp_folders import save_boxes

NUM_BYTES = 288 * 1024 * 1024
ALLOWED_BYTES = 220 * 1024 * 1024

IN_AND_OUT = """
import sys
from pathlib import Path
import torch.distributed.checkpoint                   # its own memory is not what is measured
import cas_ckpt.dcp.folder.importing
import cas_ckpt.dcp.folder.export
from cas_ckpt.core.create import init_repository
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.files import export_any
from cas_ckpt.files import import_any

def peak_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

folder = Path(sys.argv[1])
repo = init_repository(folder / "repo")
before = peak_bytes()
info = import_any(repo, folder / "c", CommitRequest(num_threads=2))
imported = peak_bytes() - before
written = export_any(repo, "main", folder / "out", format="dcp", max_shard_bytes=1 << 30)
again = import_any(repo, folder / "out", CommitRequest(branch="again", num_threads=2))
print(info.stats.total_bytes, imported, peak_bytes() - before, info.root == again.root)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells the peak")
def test_memory_does_not_grow_with_the_folder(tmp_path: Path) -> None:
    wide = torch.zeros(NUM_BYTES // 16384, 8192, dtype=torch.bfloat16)
    rows = wide.shape[0] // 2
    left, right, below = Box((0, 0), (rows, 4096)), Box((0, 4096), (rows, 4096)), Box((rows, 0), (rows, 8192))
    ranks = [[("w", left), ("w", below)], [("w", right)]]
    save_boxes(tmp_path / "c", {"w": wide}, ranks)
    command = [sys.executable, "-c", IN_AND_OUT, str(tmp_path)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root, timeout=100)
    total_bytes, imported, peak, same = done.stdout.split()
    assert int(total_bytes) == NUM_BYTES
    assert int(imported) < ALLOWED_BYTES
    assert int(peak) < ALLOWED_BYTES
    assert same == "True"
