"""A file is imported in a buffer per thread, not in as much memory as it is long."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.formats.import_files import claim, raw_file

NUM_BYTES = 320 * 1024 * 1024
ALLOWED_BYTES = 200 * 1024 * 1024

IMPORT_AND_MEASURE = """
import sys
from pathlib import Path
import torch                      # its own memory is not what is measured
import cas_ckpt.formats.torch_file
from cas_ckpt import limits
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.core.create import init_repository
from cas_ckpt.formats.verbs import import_any

def peak_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

repo = init_repository(Path(sys.argv[1]) / "repo")
before = peak_bytes()
with limits(num_threads=2):
    info = import_any(repo, sys.argv[2], CommitRequest())
print(info.stats.total_bytes, peak_bytes() - before)
"""


def large_safetensors(path: Path) -> Path:
    """Zeros that take no space on disk: one wide matrix and one long vector."""
    half = NUM_BYTES // 2
    rows = half // 4096 // 2
    raw_file(path, {"a": claim("BF16", [rows, 4096], 0, half), "b": claim("U8", [half], half, NUM_BYTES)})
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + NUM_BYTES)
    return path


def large_torch_file(path: Path) -> Path:
    torch.save({"a": torch.zeros(NUM_BYTES // 8192, 4096, dtype=torch.bfloat16)}, path)
    return path


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells the peak")
@pytest.mark.parametrize(("make", "name"), [(large_safetensors, "m.safetensors"), (large_torch_file, "m.pt")])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, make: object, name: str) -> None:
    path = make(tmp_path / name)  # type: ignore[operator]
    command = [sys.executable, "-c", IMPORT_AND_MEASURE, str(tmp_path), str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    total_bytes, peak_bytes = map(int, done.stdout.split())
    assert total_bytes >= NUM_BYTES
    assert peak_bytes < ALLOWED_BYTES
