"""One rank of `benchmarks.ranks`, in a process of its own: build, prepare, measure one operation, say what it cost.

    python -m benchmarks.ranks_worker '{"operation": "save", "peer": "cas_ckpt", ...}'     (RANK etc. as torchrun sets)

Duty: the two peers behind the same calls, and the measurement. Start and stop are read from the monotonic
clock, which the processes of one machine share; the parent makes one figure of the ranks'.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.harness import disk
from benchmarks.harness.meter import measured
from benchmarks.ranks_state import RankState

Figures = dict[str, Any]


class CasCkpt:
    """One repository; the group between ranks is made inside the timed call, which pays for it.

    Imported outside the measured time, as every peer is: commit and checkout import their modules when first called.
    """

    def __init__(self, folder: Path) -> None:
        import cas_ckpt.training.verbs  # noqa: F401 - for the import alone
        from cas_ckpt import Repository

        path = folder / "repo"
        self.repo: Any = Repository.open(path) if path.exists() else Repository.init(path)

    def save(self, state: RankState, number: int) -> Any:
        """A commit of all ranks."""
        return self.repo.commit(state.parts, message=f"step {number}", step=number)

    def load(self, state: RankState) -> None:
        """In place."""
        self.repo.checkout("main", into=state.parts)


class DCP:
    """Stock dcp.save (which fsyncs its files) and dcp.load."""

    def __init__(self, folder: Path) -> None:
        from torch.distributed import checkpoint

        self.api: Any = checkpoint
        self.folder = folder / "dcp"

    def save(self, state: RankState, number: int) -> None:
        """One checkpoint folder."""
        self.api.save(state.parts, checkpoint_id=str(self.folder))

    def load(self, state: RankState) -> None:
        """In place."""
        self.api.load(state.parts, checkpoint_id=str(self.folder))


PEERS: dict[str, Callable[[Path], Any]] = {"cas_ckpt": CasCkpt, "dcp": DCP}


class Counted:
    """blake3 as objects/digest.py calls it, counting what leaves, chunks and nodes feed it."""

    def __init__(self) -> None:
        from cas_ckpt.objects import digest

        self.num_bytes = 0
        self._blake3 = digest.blake3
        self.digest = digest.blake3.digest
        digest.blake3 = self  # type: ignore[assignment]

    def __call__(self, data: Any = b"", **options: Any) -> Any:
        self.num_bytes += memoryview(data).nbytes
        return self._blake3(data, **options)


def _timed(operation: Callable[[], Any]) -> Figures:
    out: Figures = {}
    with measured(out):
        dist.barrier()
        start = time.monotonic()
        operation()
        stop = time.monotonic()
    return out | {"start": start, "stop": stop}


def _save(job: Figures, peer: Any, number: int) -> Figures:
    state = RankState(job["layout"], job["layers"], blank=False)
    counted = Counted() if job["operation"] == "count" else None
    figures = _timed(lambda: peer.save(state, number))
    return figures | ({} if counted is None else {"hashed_bytes": counted.num_bytes})


def _load(job: Figures, peer: Any) -> Figures:
    state = RankState(job["layout"], job["layers"], blank=True)
    if dist.get_rank() == 0:
        if job["operation"] == "load-cold":
            left = disk.evict(Path(job["folder"]))
        else:
            disk.warm(Path(job["folder"]))
            left = 0
    dist.barrier()
    figures = _timed(lambda: peer.load(state))
    wrong = state.wrong()
    if wrong:
        raise SystemExit(f"{job['peer']} brought back other bytes for {', '.join(wrong[:3])}")
    return figures | ({"resident_before": left} if dist.get_rank() == 0 else {})


def main(job: Figures) -> None:
    """Do it, and write the figures of this rank beside the others'."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    dist.barrier()
    peer = PEERS[job["peer"]](Path(job["folder"]))
    operations: dict[str, Callable[[], Figures]] = {
        "save": lambda: _save(job, peer, 1),
        "count": lambda: _save(job, peer, 1),
        "unchanged": lambda: _save(job, peer, 2),
        "load-cold": lambda: _load(job, peer),
        "load-warm": lambda: _load(job, peer),
    }
    figures = operations[job["operation"]]()
    Path(job["answers"], str(dist.get_rank())).write_text(json.dumps(figures))
    dist.barrier()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
