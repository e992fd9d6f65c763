"""One interpreter of `benchmarks.free_threaded`: measures a round when it is told to. Without torch.

    python -m benchmarks.free_threaded_worker FOLDER NUM_BYTES

Says what it is in a line of JSON, and answers each line on stdin by one line of JSON: seconds by name.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from cas_ckpt import limits
from cas_ckpt.core.tree import load_tree, stored_tensors
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.state import TensorCopy
from cas_ckpt.ops.checkout.checkout import fetch_tensors
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.request import CommitRequest
from tests.builders import ArrayMemory, new_repository, state

ROWS, COLUMNS = 2048, 1024
"""Of a matrix: 8 MiB."""

THREADS = 2


def hash_all(arrays: Sequence[np.ndarray[Any, Any]], piece: int) -> None:
    """Hash every array, `piece` bytes at a time, on two threads."""

    def one(array: np.ndarray[Any, Any]) -> None:
        view = array.reshape(-1).view(np.uint8).data
        for begin in range(0, len(view), piece):
            blake3(view[begin : begin + piece]).digest()

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(one, arrays))


def python_step() -> None:
    """What benchmarks/async_loops.py has as a step of Python and nothing else."""
    counts: dict[int, int] = {}
    for number in range(20_000):
        counts[number % 97] = counts.get(number % 97, 0) + number


def steps_beside(work: Callable[[], object]) -> tuple[float, float]:
    """(steps a second of a Python loop while a thread does `work`, seconds that `work` took)."""
    thread = threading.Thread(target=work)
    start, steps = time.perf_counter(), 0
    thread.start()
    while thread.is_alive():
        python_step()
        steps += 1
    taken = time.perf_counter() - start
    return steps / taken, taken


class Measured:
    """A repository with one commit, its state, and memory to restore into."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        generator = np.random.default_rng(0)
        number = max(2, num_bytes // (4 * ROWS * COLUMNS))
        self.arrays = [generator.standard_normal((ROWS, COLUMNS), np.float32) for _ in range(number)]
        self.targets = [array + 1 for array in self.arrays]
        self.handle = new_repository(folder / "repo")
        self.few = [array + 2 for array in self.arrays[: max(1, number // 8)]]
        self.few_handle = new_repository(folder / "few")
        self.root: str = self.commit().root

    def commit(self, num_threads: int = THREADS) -> Any:
        """Commit the state, of which nothing has changed but at the first time."""
        tree = state({f"w{number}": array for number, array in enumerate(self.arrays)})
        with limits(num_threads=num_threads):
            return commit_tree(self.handle, tree, CommitRequest())

    def commit_few(self) -> None:
        """Commit an eighth of the state, by one thread."""
        tree = state({f"w{number}": array for number, array in enumerate(self.few)})
        with limits(num_threads=1):
            commit_tree(self.few_handle, tree, CommitRequest())

    def restore(self, *, atomic: bool) -> None:
        """Bring the commit into the targets."""
        tree = load_tree(self.handle, Digest(bytes.fromhex(self.root)))
        targets = {f"w{number}": ArrayMemory(target) for number, target in enumerate(self.targets)}
        copies = [TensorCopy(path, stored, targets[str(path[0])]) for path, stored in stored_tensors(tree)]
        with limits(num_threads=THREADS):
            fetch_tensors(self.handle, copies, atomic=atomic)

    def round(self) -> dict[str, float]:
        """Seconds by name; of the loop steps a second."""
        size = sum(array.nbytes for array in self.arrays)
        found: dict[str, float] = {"num_bytes": size, "few_bytes": sum(array.nbytes for array in self.few)}

        def take(name: str, work: Callable[[], object]) -> None:
            start = time.perf_counter()
            work()
            found[name] = time.perf_counter() - start

        take("pieces", lambda: hash_all(self.arrays, 4 << 20))
        take("leaves", lambda: hash_all(self.arrays, 128 << 10))
        take("commit", self.commit)
        take("checkout", lambda: self.restore(atomic=True))
        take("one pass", lambda: self.restore(atomic=False))
        if not all(np.array_equal(*pair) for pair in zip(self.arrays, self.targets, strict=True)):
            raise RuntimeError("other bytes were restored than were committed")
        self.commit_few()
        take("few alone", self.commit_few)
        found["steps alone"] = steps_beside(lambda: time.sleep(0.3))[0]
        found["steps beside"], found["few beside"] = steps_beside(self.commit_few)
        return found


def main() -> None:
    """Measure whenever a line comes."""
    measured = Measured(Path(sys.argv[1]), int(sys.argv[2]))
    measured.round()
    has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
    print(json.dumps({"version": sys.version.split()[0], "has_lock": has_lock}), flush=True)
    for _ in sys.stdin:
        print(json.dumps(measured.round()), flush=True)


if __name__ == "__main__":
    main()
