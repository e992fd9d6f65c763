"""What a restore over a network holds in memory does not grow with the state."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cas_ckpt.objects.spec import Box, Spec
from cas_ckpt.objects.state import Flavor, StoredTensor
from cas_ckpt.ops.checkout.checkout import _batches
from tests.builders import commit, new_repository

NUM_BYTES = 600 * 1024 * 1024
ALLOWED_BYTES = 150 * 1024 * 1024
"""Beside the targets: 72 MiB of requests in flight, and of an export what is being written and what is next."""

RESTORE_AND_MEASURE = """
import sys
from pathlib import Path
import numpy as np
from cas_ckpt import limits
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.tree import load_tree, stored_tensors
from cas_ckpt.objects.state import TensorCopy
from cas_ckpt.ops.checkout.checkout import fetch_tensors
from cas_ckpt.ops.fsck.check import check_open
from cas_ckpt.ops.fsck.packs import DataOptions
from cas_ckpt.formats.safetensors import export_safetensors
from cas_ckpt.storage.file import FileStore
from tests.builders import ArrayMemory
from tests.far import FarStore

def peak_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

path, root, verb, budget = sys.argv[1:]
memory_bytes = int(budget) or None
handle = RepositoryHandle.on_store(FarStore(FileStore(path)), index_url=":memory:", cache=None)
handle.sync()
tree = load_tree(handle, bytes.fromhex(root))
if verb == "checkout":
    copies = []
    for at, stored in stored_tensors(tree):
        target = np.full(stored.spec.shape, 7, stored.spec.dtype)
        copies.append(TensorCopy(at, stored, ArrayMemory(target)))
before = peak_bytes()
with limits(memory_bytes=memory_bytes):
    if verb == "checkout":
        fetch_tensors(handle, copies)
    elif verb == "fsck":
        assert check_open(handle, DataOptions()).ok
    else:
        export_safetensors(handle, bytes.fromhex(root), path + ".safetensors", force=True)
print(before, peak_bytes())
"""


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    path = tmp_path_factory.mktemp("far") / "repo"
    handle = new_repository(path, encoding="raw", pack_bytes=128 << 20)
    rows = NUM_BYTES // 4 // 4096 // 4
    state = {
        f"w{n}": np.arange(n << 30, (n << 30) + rows * 4096, dtype=np.uint32).reshape(rows, 4096) for n in range(4)
    }
    root = commit(handle, state).root
    handle.close()
    return path, root


def peaks(stored: tuple[Path, str], verb: str, *, memory_bytes: int = 0) -> tuple[int, int]:
    """What a process of its own held before, and at most; 0: the budget that a call has by itself."""
    command = [sys.executable, "-c", RESTORE_AND_MEASURE, str(stored[0]), stored[1], verb, str(memory_bytes)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[3])
    before, peak = map(int, done.stdout.split())
    return before, peak


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells the peak")
@pytest.mark.parametrize("verb", ["checkout", "fsck", "export"])
def test_memory_does_not_grow_with_the_state(stored: tuple[Path, str], verb: str) -> None:
    before, peak = peaks(stored, verb)
    assert peak - before < ALLOWED_BYTES
    assert peak - (NUM_BYTES if verb == "checkout" else 0) < 300 * 1000 * 1000


def test_what_is_read_ahead_is_never_more_than_its_share_unless_it_is_one_array() -> None:
    stored = StoredTensor(Spec("uint8", (100,)), Flavor.NUMPY, None, bytes(100))
    wanted = [((), stored, Box((0,), (size,))) for size in (6, 6, 10, 1, 9, 1, 30, 2)]
    sizes = [[box.num_elements for _, _, box in batch] for batch in _batches(wanted, 10)]
    assert sizes == [[6], [6], [10], [1, 9], [1], [30], [2]]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells the peak")
@pytest.mark.parametrize("verb", ["checkout", "export"])
def test_a_small_budget_is_kept_to(stored: tuple[Path, str], verb: str) -> None:
    budget = 72 * 1000 * 1000
    before, peak = peaks(stored, verb, memory_bytes=budget)
    assert peak - before < budget
