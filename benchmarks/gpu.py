"""Tensors on a GPU: how fast leaves are hashed there, and the pause of a commit of what is unchanged.

    python -m benchmarks.gpu                 # on a machine with a GPU of 48 GB or more, and twice as much memory
    python -m benchmarks.gpu --gb 4          # a smaller state, for a smaller GPU
    python -m benchmarks.gpu --host          # without a GPU: only what the host does for an unchanged state
    python -m benchmarks.gpu --write         # into docs/benchmarks/gpu.md

Duty: docs/benchmarks/gpu.md. Rates are medians of several rounds after one that warms up (kernels are compiled and
checked, arenas are pinned in it); what is compared takes turns within a round. Digests are compared with the package
blake3 before anything is measured. `bytes moved` counts what is brought to the host, digests and tables included.
What is changed, or new, and checkouts: benchmarks/cores.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from benchmarks.harness.page import machine_and_load
from cas_ckpt import CommitOptions, Repository
from cas_ckpt.native import leaf_digests
from cas_ckpt.objects.digest import DIGEST_BYTES, chunk_id
from cas_ckpt.objects.spec import grid_for
from cas_ckpt.training.capture.tensors import CopiedTensor, spec_of
from cas_ckpt.training.device import hasher as module
from cas_ckpt.training.device.cells import CellRequest
from cas_ckpt.training.device.hasher import Hasher

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks" / "gpu.md"
ROUNDS = 7
HASHED_BYTES = 8 << 30
WANTED = {"hash": 300.0, "pause": 0.4, "moved": 0.1}


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def random_words(num_bytes: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, (num_bytes // 4,), dtype=torch.int32, device=device())


def asked(tensor: torch.Tensor) -> CellRequest:
    grid = grid_for(spec_of(tensor))
    return CellRequest(CopiedTensor(tensor).device_parts(), grid, range(grid.num_cells), tensor.element_size())


def seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def median_s(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    work()
    return statistics.median(seconds(work) for _ in range(rounds))


# ------------------------------------------------------------ hashing


def layouts(data: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same memory, laid out in every way that hashing tells apart."""
    rows = len(data) // 8192
    matrix = data[: rows * 8192].view(rows, 8192)
    narrow = data[: len(data) // 4000 * 4000].view(-1, 4000)
    return {
        "one vector": data,
        "a wide matrix, cells beside one another": data[: rows * 8192].view(8192, rows),
        "rows of 16,000 bytes": narrow,
        "a matrix without its last column (gathered first)": matrix[:, :-1],
        "a matrix transposed (gathered first)": matrix.t(),
        "an unaligned vector (gathered first)": data.view(torch.uint8)[1:],
    }


def hashing(num_bytes: int) -> list[str]:
    from cas_ckpt.training.device import kernels

    data = random_words(num_bytes)
    hasher = Hasher(device(), kernels)
    lines = ["| layout | GB | GB/s, digests in host memory | beside reading |", "| --- | --- | --- | --- |"]
    for name, tensor in layouts(data).items():
        request = asked(tensor)
        compare(hasher, tensor, request)
        size = tensor.numel() * tensor.element_size()
        hash_s = median_s(lambda request=request: hasher.hash([request]))  # type: ignore[misc]
        read_s = median_s(lambda tensor=tensor: tensor.sum())  # type: ignore[misc]
        lines.append(f"| {name} | {size / 1e9:.1f} | {size / hash_s / 1e9:.0f} | {read_s / hash_s:.2f} |")
    return lines


def compare(hasher: Hasher, tensor: torch.Tensor, request: CellRequest) -> None:
    """The digests of a few cells, the last one too, are those of blake3."""
    last = request.grid.num_cells - 1
    few = CellRequest(request.parts, request.grid, sorted({0, last // 2, last}), request.item_bytes)
    for found in hasher.hash([few]):
        for (_, at), digests in zip(found.places, found.digests, strict=True):
            cell = CopiedTensor(tensor).read(request.grid.box(few.numbers[at])).tobytes()
            if digests != leaf_digests(memoryview(cell), request.grid.leaf_bytes):
                raise SystemExit(f"cell {few.numbers[at]} of {tensor.shape}: wrong digests")


# ------------------------------------------------------------ commits


def model(num_bytes: int) -> dict[str, torch.Tensor]:
    """Matrices and vectors of a transformer's sizes, of about so many bytes."""
    state: dict[str, torch.Tensor] = {}
    left = num_bytes
    for number in range(10_000):
        for name, shape in (("up", (14336, 4096)), ("q", (4096, 4096)), ("norm", (4096,))):
            if left <= 0:
                return state
            words = random_words(4 * shape[0] * (shape[1] if len(shape) > 1 else 1))
            state[f"{number}.{name}"] = words.view(torch.float32).view(shape)
            left -= words.nbytes
    return state


@contextmanager
def moved() -> Iterator[list[int]]:
    """Bytes of tensors that are brought to the host inside."""
    found = [0]
    read, copy_into = CopiedTensor.read, CopiedTensor.copy_into

    def counted_read(self, box):  # type: ignore[no-untyped-def]
        found[0] += box.num_elements * self.tensor.element_size()
        return read(self, box)

    def counted_copy(self, box, target):  # type: ignore[no-untyped-def]
        found[0] += target.nbytes
        copy_into(self, box, target)

    CopiedTensor.read, CopiedTensor.copy_into = counted_read, counted_copy  # type: ignore[method-assign]
    try:
        yield found
    finally:
        CopiedTensor.read, CopiedTensor.copy_into = read, copy_into  # type: ignore[method-assign]


def digest_bytes(state: dict[str, torch.Tensor]) -> int:
    grids = [(grid_for(spec_of(each)), each) for each in state.values()]
    leaves = sum(-(-each.nbytes // grid.leaf_bytes) for grid, each in grids)
    return leaves * (DIGEST_BYTES + 4) + 48 * sum(grid.num_cells for grid, _ in grids)


def unchanged(num_bytes: int) -> list[str]:
    state = model(num_bytes)
    size = sum(each.nbytes for each in state.values())
    with Repository.init("memory://gpu-unchanged", encoding="raw") as repo:
        repo.commit(state, message="first")  # nothing is staged for it: it is read live
        repo.commit_async(state, options=CommitOptions(staging_bytes=1 << 30)).result()
        pauses, whole, bytes_moved = [], [], []
        for _ in range(ROUNDS):
            with moved() as found:
                start = time.perf_counter()
                pending = repo.commit_async(state)
                pauses.append(time.perf_counter() - start)
                pending.result()
                whole.append(time.perf_counter() - start)
            bytes_moved.append(found[0] + digest_bytes(state))
        sync_s = statistics.median(seconds(lambda: repo.commit(state)) for _ in range(ROUNDS))
        name = next(iter(state))
        state[name].view(torch.int32)[0, 0] ^= 1
        with moved() as found:
            start = time.perf_counter()
            pending = repo.commit_async(state)
            changed_s = time.perf_counter() - start
            pending.result()
    pause, share = statistics.median(pauses), 100 * statistics.median(bytes_moved) / size
    return [
        f"| a state of {size / 1e9:.1f} GB in {len(state)} tensors | |",
        "| --- | --- |",
        f"| pause of `commit_async`, nothing changed (at most {WANTED['pause']} s) | {pause:.3f} s |",
        f"| bytes moved (less than {WANTED['moved']} %) | {share:.3f} % |",
        f"| from the call to the result | {statistics.median(whole):.3f} s |",
        f"| `commit`, nothing changed | {sync_s:.3f} s |",
        f"| pause of `commit_async`, one element changed | {changed_s:.3f} s, {found[0] / 1e6:.1f} MB of tensors |",
    ]


# ------------------------------------------------------------ the host's half


class _NoLaunch:
    """Kernels that do nothing."""

    TABLE_COLUMNS = 6

    def __getattr__(self, name: str) -> _NoLaunch:
        return self

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *_, **__: None


class _HostHalf(Hasher):
    """Makes all tables; digests are zeros."""

    def _here(self, tensor: torch.Tensor) -> np.ndarray:
        return np.zeros(tensor.shape, np.int32)


def host_half(num_bytes: int) -> list[str]:
    """What a commit of an unchanged state does on the host, without the index and without the device."""
    memory = torch.empty(14336 * 4096)  # never touched: tensors of any number share it
    tensors: list[torch.Tensor] = []
    while sum(each.nbytes for each in tensors) < num_bytes:
        tensors += [memory[: 14336 * 4096].view(14336, 4096), memory[: 4096 * 4096].view(4096, 4096), memory[:4096]]
    requests = [asked(each) for each in tensors]
    hasher = _HostHalf(torch.device("cpu"), _NoLaunch())  # type: ignore[arg-type]

    def ids() -> None:
        for found in hashed:
            for (request, at), digests in zip(found.places, found.digests, strict=True):
                grid = requests[request].grid
                chunk_id(grid.cell_elements(requests[request].numbers[at]) * 4, digests)

    hashed = hasher.hash(requests)
    times: dict[str, list[float]] = {"grids and requests": [], "tables, and digests by cell": [], "ids of chunks": []}
    for _ in range(ROUNDS):
        works = (lambda: list(map(asked, tensors)), lambda: hasher.hash(requests), ids)
        for name, work in zip(times, works, strict=True):
            start = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - start)
    cells = sum(each.grid.num_cells for each in requests)
    size = sum(each.nbytes for each in tensors) / 1e9
    rows = [f"| {name} | {statistics.median(each):.3f} |" for name, each in times.items()]
    return [f"| {size:.1f} GB in {len(tensors)} tensors, {cells:,} cells | s |", "| --- | --- |", *rows]


# ------------------------------------------------------------ the page


def page(num_bytes: int, *, host_only: bool) -> str:
    module.AUDIT_SHARE = 0  # audits are counted apart: a cell of 4 MiB for 64 GB that are hashed
    kind = "No GPU: only the host's half is measured" if host_only else torch.cuda.get_device_name()
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    host = {"What the host does for an unchanged state": lambda: host_half(num_bytes)}
    sections = (
        host
        if host_only
        else {
            **host,
            f"Hashing (wanted: {WANTED['hash']:.0f} GB/s)": lambda: hashing(min(HASHED_BYTES, num_bytes)),
            "What is unchanged": lambda: unchanged(num_bytes),
        }
    )
    found = [
        "# Tensors on a GPU", "",
        f"Written by `python -m benchmarks.gpu{' --host' * host_only} --write`; what is measured, and how, is in",
        "benchmarks/gpu.py.",
        f"{kind}, {versions}, {torch.get_num_threads()} threads of torch. Medians of {ROUNDS} rounds.",
        *machine_and_load(PAGE.parent), "",
    ]  # fmt: skip
    for title, measure in sections.items():
        found += [f"## {title}", "", *measure(), ""]
        print("\n".join(found[-8:]), file=sys.stderr, flush=True)
        if not host_only:
            torch.cuda.empty_cache()
    return "\n".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=40.0, help="size of the unchanged state")
    parser.add_argument("--host", action="store_true", help="without a GPU: the host's half alone")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.host:
        raise SystemExit("there is no GPU here: --host measures what the host does")
    text = page(int(options.gb * 1e9), host_only=options.host)
    if options.write:
        PAGE.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
