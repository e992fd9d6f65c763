"""How fast is a restore over a network, beside a plain download of as many bytes?

    python -m benchmarks.remote_reads           about a minute, printed; docs/decisions/011 has the figures
    python -m benchmarks.remote_reads --s3      the same over S3: moto, in a process of its own on the same cores
    python -m benchmarks.remote_reads --limits  gaps and spans

The network is simulated: each request waits for the latency, and all share the bandwidth. The plain download reads
the same packs in parts of 8 MiB, as many at once, and writes them into a file.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fsck import _tensor
from benchmarks.harness import machine
from cas_ckpt.arguments import Buffer
from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.core.tree import load_tree, stored_tensors
from cas_ckpt.objects.digest import Digest
from cas_ckpt.objects.spec import Box
from cas_ckpt.objects.state import Container, StoredTensor, TensorCopy
from cas_ckpt.ops.checkout.checkout import fetch_tensors
from cas_ckpt.ops.commit.commit import commit_tree
from cas_ckpt.ops.commit.request import CommitRequest
from cas_ckpt.ops.fsck.check import check_open
from cas_ckpt.ops.fsck.packs import DataOptions
from cas_ckpt.storage.file import FileStore
from cas_ckpt.storage.store import Abilities, Store
from cas_ckpt.transfer import arrivals
from cas_ckpt.transfer.sources import ReadLimits
from tests.wrapped_stores import CountingStore

AT_ONCE = 16
PART_BYTES = 8 << 20
PIECE_BYTES = 256 << 10


class Network:
    """A line on which each request waits, and that all requests share."""

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        self.latency_s, self.bytes_per_s = latency_s, bytes_per_s
        self._free_s = 0.0
        self._lock = threading.Lock()

    def carry(self, num_bytes: int) -> None:
        """Wait for as long as a request takes that brings so many bytes."""
        time.sleep(self.latency_s)
        while num_bytes > 0:
            piece = min(num_bytes, PIECE_BYTES)
            with self._lock:
                self._free_s = max(self._free_s, time.monotonic()) + piece / self.bytes_per_s
                until_s = self._free_s
            num_bytes -= piece
            if (rest_s := until_s - time.monotonic()) > 0:
                time.sleep(rest_s)


class FarStore(CountingStore):
    """A store behind a network."""

    def __init__(self, inner: Store, network: Network) -> None:
        super().__init__(inner)
        self.network = network

    @property
    def abilities(self) -> Abilities:
        return replace(self.inner.abilities, local=False, parallel=AT_ONCE)

    def get(self, key: str) -> bytes:
        found = super().get(key)
        self.network.carry(len(found))
        return found

    def get_range(self, key: str, offset: int, length: int) -> Buffer:
        found = bytes(super().get_range(key, offset, length))
        self.network.carry(length)
        return found

    def get_tail(self, key: str, length: int) -> tuple[int, bytes]:
        found = super().get_tail(key, length)
        self.network.carry(len(found[1]))
        return found

    def read_into(self, key: str, offset: int, target: memoryview, *, cached_only: bool = False) -> bool:
        if cached_only:
            return False
        self.network.carry(len(target))
        return super().read_into(key, offset, target)


class _Target:
    """An array as the target of a tensor."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def open(self, box: Box) -> np.ndarray[Any, Any]:
        return self.array[box.slices]

    def done(self, box: Box, array: np.ndarray[Any, Any]) -> None:
        """In place."""


def states(num_bytes: int) -> dict[str, dict[Any, Any]]:
    """A model of large tensors, and one of many small ones, of about so many bytes."""
    dice = np.random.default_rng(1)
    large = {f"layers.{at}": dice.standard_normal((1024, 4096), np.float32) for at in range(num_bytes >> 24)}
    small = {f"bias.{at}": dice.standard_normal(8192, np.float32) for at in range(num_bytes >> 16)}
    return {"large tensors": large, "small tensors (32 KB)": small}


def commit(url: Any, arrays: dict[Any, Any]) -> tuple[Digest, RepositoryHandle]:
    """The root of a commit of these arrays in a new repository."""
    handle = init_repository(url, encoding="raw", pack_bytes=128 << 20)
    tree = Container("dict", {name: _tensor(array) for name, array in arrays.items()})
    return Digest(bytes.fromhex(commit_tree(handle, tree, CommitRequest()).root)), handle


class Restorer:
    """Restores a state into arrays that are there before, or into new ones."""

    def __init__(self, handle: RepositoryHandle, root: Digest) -> None:
        self._handle, self._root = handle, root
        self._live: dict[Any, np.ndarray[Any, Any]] = {}
        for path, stored in stored_tensors(load_tree(handle, root)):
            self._live[path] = np.ones(stored.spec.shape, stored.spec.dtype)

    def into_live(self) -> None:
        """As a checkout."""
        self._fetch(lambda path, stored: self._live[path], unseen=False)

    def into_new(self) -> None:
        """As a load."""
        self._fetch(lambda path, stored: np.empty(stored.spec.shape, stored.spec.dtype), unseen=True)

    def _fetch(self, target: Callable[[Any, StoredTensor], np.ndarray[Any, Any]], *, unseen: bool) -> None:
        copies = [
            TensorCopy(path, stored, _Target(target(path, stored)))
            for path, stored in stored_tensors(load_tree(self._handle, self._root))
        ]
        fetch_tensors(self._handle, copies, unseen=unseen)


def download(store: Store) -> None:
    """Every pack into a file, in parts, many at once."""
    with tempfile.TemporaryFile(dir="/var/tmp") as file:
        parts, at = [], 0
        for key, size in store.list("packs/"):
            starts = range(0, size, PART_BYTES)
            parts += [(key, start, min(PART_BYTES, size - start), at + start) for start in starts]
            at += size

        def work(part: tuple[str, int, int, int]) -> None:
            key, offset, length, place = part
            space = memoryview(bytearray(length))
            store.read_into(key, offset, space)
            os.pwrite(file.fileno(), space, place)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(work, parts))


def seconds(work: Callable[[], object], rounds: int = 3) -> float:
    """The median time of some rounds."""
    found = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        work()
        found.append(time.perf_counter() - began_s)
    return statistics.median(found)


def measure(store: Store, handle: RepositoryHandle, root: Digest, what: str, num_bytes: int) -> None:
    """Print what each verb takes, and how that compares with the download."""
    restorer = Restorer(handle, root)
    plain_s = seconds(lambda: download(store))
    print(f"| {what} | plain download | {num_bytes / plain_s / 1e6:.0f} MB/s | 1.00 | |")
    verbs: dict[str, Callable[[], object]] = {
        "checkout": restorer.into_live,
        "load": restorer.into_new,
        "fsck --read-data": lambda: check_open(handle, DataOptions()),
    }
    for name, work in verbs.items():
        if isinstance(store, CountingStore):
            store.reset()
        took_s = seconds(work)
        counted = f"{store.num_calls // 3}" if isinstance(store, CountingStore) else ""
        print(f"| {what} | {name} | {num_bytes / took_s / 1e6:.0f} MB/s | {plain_s / took_s:.2f} | {counted} |")


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder on the disk."""
    folder = Path(tempfile.mkdtemp(prefix="remote-reads-", dir="/var/tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def simulated(num_bytes: int, networks: list[tuple[float, float]]) -> None:
    """Over the simulated network."""
    with scratch_folder() as folder:
        for what, arrays in states(num_bytes).items():
            root, handle = commit(folder / what[:5], arrays)
            handle.close()
            for latency_s, bytes_per_s in networks:
                store = FarStore(FileStore(folder / what[:5]), Network(latency_s, bytes_per_s))
                far = RepositoryHandle.on_store(store, index_url=":memory:", cache=None)
                far.sync()
                line = f"{what}, {1000 * latency_s:.0f} ms, {bytes_per_s / 1e6:.0f} MB/s"
                measure(store, far, root, line, sum(array.nbytes for array in arrays.values()))


def limits(num_bytes: int) -> None:
    """Other gaps and spans: of a model of which every second tensor is wanted, and of a whole one."""
    with scratch_folder() as folder:
        for what, arrays in states(num_bytes).items():
            root, handle = commit(folder / what[:5], arrays)
            handle.close()
            store = FarStore(FileStore(folder / what[:5]), Network(0.03, 200e6))
            far = RepositoryHandle.on_store(store, index_url=":memory:", cache=None)
            far.sync()
            stored = list(stored_tensors(load_tree(far, root)))
            for share in (1, 2, 8):
                for gap_kib in (0, 64, 256, 1024):
                    for span_mib in (1, 4, 8):
                        found = ReadLimits(gap_kib << 10, (span_mib << 20) + (256 << 10))
                        arrivals.limits_of = lambda *_, found=found, **__: found  # type: ignore[misc]
                        wanted = stored[::share]
                        copies = [
                            TensorCopy(path, each, _Target(np.zeros(each.spec.shape, each.spec.dtype)))
                            for path, each in wanted
                        ]
                        store.reset()
                        took_s = seconds(partial(fetch_tensors, far, copies, unseen=True), rounds=1)
                        size = sum(each.spec.num_bytes for _, each in wanted)
                        print(
                            f"| {what}, 1 in {share} | gap {gap_kib} KiB | span {span_mib} MiB | {store.num_calls} | "
                            f"{store.bytes_read / size:.2f} | {size / took_s / 1e6:.0f} MB/s |"
                        )


def over_s3(num_bytes: int) -> None:
    """Over moto."""
    from tests.servers import credentials, s3_server

    with credentials(), s3_server() as server:
        for what, arrays in states(num_bytes).items():
            root, handle = commit(server.url(server.new_bucket()), arrays)
            measure(handle.store, handle, root, f"{what}, S3", sum(array.nbytes for array in arrays.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=400)
    parser.add_argument("--s3", action="store_true")
    parser.add_argument("--limits", action="store_true")
    given = parser.parse_args()
    print(machine.describe(Path("/var/tmp")))
    if given.limits:
        limits(given.mb << 20)
        return
    print("| state | verb | rate | of the download | requests |\n| --- | --- | --- | --- | --- |")
    if given.s3:
        over_s3(given.mb << 20)
    else:
        simulated(given.mb << 20, [(0.03, 200e6), (0.1, 200e6), (0.0, 1e9)])


if __name__ == "__main__":
    main()
