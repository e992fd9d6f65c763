"""What the processes of test_memory_budgets.py do: each calls verbs in turn and says how much memory each took."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from cas_ckpt import CommitOptions, Repository, limits
from cas_ckpt.formats.folders import MAX_BAND_BYTES
from cas_ckpt.storage.probe import NO_TOKEN
from cas_ckpt.transfer import scatter

ROWS = 4507
"""Of a tensor of 4,096 columns: of 74 MB, no rank's part of which ends where a cell ends."""

Peaks = dict[str, int]
"""Verb -> bytes above what was resident when it was called."""


def peak_of(call: Callable[[], object], **given: int | None) -> int:
    """The most that is resident while `call` runs, above what was before, less what it returns; with these limits."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = _status_bytes("VmRSS")
    with limits(**given):
        found = call()
    peak = _status_bytes("VmHWM") - before
    loaded = found.values() if isinstance(found, dict) else ()
    return peak - sum(each.nbytes for each in loaded if isinstance(each, torch.Tensor))


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def import_everything(repo: Repository, folder: str) -> None:
    """Call every verb once: what it imports, and what the database keeps, is not what the next call holds."""
    small = {"w": torch.zeros(1000)}
    repo.commit(small, branch="small", options=CommitOptions(create=True))
    repo.checkout("small", into=small)
    repo.load("small")
    repo.export("small", f"{folder}/small.safetensors")
    repo.import_file(f"{folder}/small.safetensors", branch="small")
    Repository.init(f"{folder}/other").close()
    repo.push(f"{folder}/other", "small")


def randomize(state: Mapping[str, torch.Tensor], seed: int) -> None:
    """Bytes that no encoding makes shorter."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in state.values():
        tensor.view(torch.int32).random_(generator=generator)


def few_large_tensors(folder: str, encoding: str, memory_bytes: int | None) -> Peaks:
    state = {f"w{number}": torch.zeros(3072, 4096) for number in range(3)}
    given = {"num_threads": 8, "memory_bytes": memory_bytes}
    with Repository.init(f"{folder}/repo", group=None, encoding=encoding) as repo:
        import_everything(repo, folder)
        randomize(state, 1)
        peaks = {
            "commit": peak_of(lambda: repo.commit(state, branch="main", options=CommitOptions(create=True)), **given)
        }
        randomize(state, 2)
        peaks["changed"] = peak_of(lambda: repo.commit(state), **given)
        peaks["unchanged"] = peak_of(lambda: repo.commit(state), **given)
        peaks["checkout"] = peak_of(lambda: repo.checkout("main~2", into=state), **given)
        peaks["load"] = peak_of(lambda: repo.load("main"), **given)
        peaks["export"] = peak_of(lambda: repo.export("main", f"{folder}/x.safetensors", keys=["w0", "w1"]), **given)
        peaks["push"] = peak_of(lambda: repo.push(f"{folder}/other", "main"), **given)
        randomize(state, 3)
        save_file(state, f"{folder}/new.safetensors")
        rows_bytes = 0 if memory_bytes is None else MAX_BAND_BYTES  # cells are cut out of so much of the file
        if memory_bytes is not None:
            given["memory_bytes"] = memory_bytes + rows_bytes
        peak = peak_of(lambda: repo.import_file(f"{folder}/new.safetensors", branch="new"), **given)
        peaks["import"] = peak - rows_bytes
    return peaks


def one_huge_tensor(folder: str, memory_bytes: int) -> Peaks:
    """Of twice the budget that the test gives."""
    state = {"w": torch.zeros(9_216, 4_096)}
    given = {"num_threads": 8, "memory_bytes": memory_bytes}
    with Repository.init(f"{folder}/repo", group=None) as repo:
        import_everything(repo, folder)
        randomize(state, 1)
        peaks = {
            "commit": peak_of(lambda: repo.commit(state, branch="main", options=CommitOptions(create=True)), **given)
        }
        peaks["checkout"] = peak_of(lambda: repo.checkout("main", into=state), **given)
        peaks["one pass"] = peak_of(lambda: repo.checkout("main", into=state, atomic=False), **given)
        peaks["load"] = peak_of(lambda: repo.load("main"), **given)
    return peaks


def in_the_background(folder: str, staging_bytes: int, memory_bytes: int) -> Peaks:
    """Commits that do not fit the memory for staging; what they hold besides that."""
    model = torch.nn.ParameterDict({f"w{number}": torch.zeros(3072, 4096) for number in range(3)})
    given, options = {"num_threads": 8, "memory_bytes": memory_bytes}, CommitOptions(staging_bytes=staging_bytes)
    peaks = {}
    with Repository.init(f"{folder}/repo", group=None) as repo:
        import_everything(repo, folder)
        repo.commit_async({"w": torch.zeros(1000)}, branch="main", options=CommitOptions(create=True)).result()
        for seed, snapshot in enumerate(("copy", "lazy")):
            randomize({name: param.data for name, param in model.items()}, seed)
            call = partial(repo.commit_async, {"model": model}, snapshot=snapshot, options=options)
            peaks[snapshot] = peak_of(lambda call=call: call().result().id, **given)  # type: ignore[misc]
    peaks["copy"] -= staging_bytes  # it is warm then
    return peaks


def by_a_worker(folder: str, memory_bytes: int) -> Peaks:
    """A commit by a worker process, of a state that is not staged: what this process, not the worker, holds."""
    state = {f"w{number}": torch.zeros(4096, 4096) for number in range(4)}
    given, options = {"num_threads": 8, "memory_bytes": memory_bytes}, CommitOptions(staging_bytes=0)
    with Repository.init(f"{folder}/repo", group=None) as repo:
        import_everything(repo, folder)
        repo.commit_async(
            {"w": torch.zeros(1000)}, branch="main", options=CommitOptions(create=True), worker="process"
        ).result()
        randomize(state, 1)
        return {
            "commit": peak_of(lambda: repo.commit_async(state, worker="process", options=options).result().id, **given)
        }


def many_small_tensors(folder: str) -> Peaks:
    """40,000, and the budget that a call has by itself."""
    rows = torch.zeros(40_000, 320)
    randomize({"rows": rows}, 1)
    state = {f"layers.{number}.weight": row.clone() for number, row in enumerate(rows)}
    del rows
    with Repository.init(f"{folder}/repo", group=None) as repo:
        import_everything(repo, folder)
        peaks = {"commit": peak_of(lambda: repo.commit(state, branch="main", options=CommitOptions(create=True)))}
        peaks["checkout"] = peak_of(lambda: repo.checkout("main", into=state))
    return peaks


def sharded(folder: str, memory_bytes: int) -> Peaks:
    """Every rank has a part of each tensor, and nearly every cell straddles two; then other parts are restored.

    First from the page cache that the ranks share, then as if they had none, by messages.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (size,))
    parts = {f"w{number}": torch.zeros(ROWS, 4096) for number in range(2)}
    randomize(parts, 1)
    state = {
        name: distribute_tensor(part, mesh, [Shard(number % 2)]) for number, (name, part) in enumerate(parts.items())
    }
    other: dict[str, DTensor] = {}
    for number, name in enumerate(parts):
        zeros = torch.zeros(ROWS, 4096)
        other[name] = distribute_tensor(zeros, mesh, [Shard((number + 1) % 2)])
    given = {"num_threads": 4, "memory_bytes": memory_bytes}
    if rank == 0:
        Repository.init(f"{folder}/repo", group=None).close()
    dist.barrier()
    with Repository.open(f"{folder}/repo") as repo:
        repo.commit({"w": torch.zeros(1000)})
        peaks = {
            "commit": peak_of(
                lambda: repo.commit(state, branch="main", options=CommitOptions(create=True, orphan=True)), **given
            )
        }
        peaks["checkout"] = peak_of(lambda: repo.checkout("main", into=other), **given)
        scatter.cache_token = lambda store: NO_TOKEN
        peaks["messages"] = peak_of(lambda: repo.checkout("main", into=other), **given)
    for name, part in parts.items():
        assert torch.equal(other[name].full_tensor().view(torch.int32), part.view(torch.int32))
    return peaks
