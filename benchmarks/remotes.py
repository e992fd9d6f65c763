"""Training state of 1 GB to a bucket and back, beside boto3's own multipart transfer of a file of that size.

    python -m benchmarks.remotes --write     1 GB, five rounds; docs/benchmarks/remotes.md
    python -m benchmarks.remotes --quick     256 MB, three rounds; prints only

What it measures: a first commit, a checkout into memory, a clone to a local folder with its checkout,
`fsck --read-data` from the bucket, and a push after a commit that changed 1 %. The server is rclone's S3 over a folder
in memory, a process on this machine, so that it takes cores from both sides alike; then the same behind a proxy with
30 ms for each request and 200 MB/s. All sides take turns with the same parallelism, and the median of the rounds
counts, as the ratio to the plain transfer of the same run. Local folders are in memory (/dev/shm).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from benchmarks.object_storage import PARALLEL, Plain, seconds, slow
from cas_ckpt import Repository, StateDict
from tests.servers import S3Server, credentials, s3_server, s3_without_conditions

TENSOR_BYTES = 16 << 20
REPORT = Path(__file__).parent.parent / "docs" / "benchmarks" / "remotes.md"


def state_of(num_bytes: int, seed: int) -> dict[str, torch.Tensor]:
    """Random weights: what a model that trains in full looks like to a codec."""
    chance = torch.Generator().manual_seed(seed)
    shape = (2048, TENSOR_BYTES // 4 // 2048)
    count = num_bytes // TENSOR_BYTES
    return {f"layers.{number}.weight": torch.randn(shape, generator=chance) * 0.02 for number in range(count)}


class Round:
    """What one round does, each step in this process. Names of steps are those of the table."""

    def __init__(self, server: S3Server, bucket: str, folder: Path, num_bytes: int, number: int) -> None:
        self.folder, self.number = folder, number
        self.url = server.url(bucket, prefix=f"r{number}", parallel=PARALLEL)
        self.state = state_of(num_bytes, number)
        self.repo = Repository.init(self.url, single_writer=True)

    def commit(self) -> None:
        self.repo.commit({"model": StateDict(**self.state)})

    def checkout(self) -> None:
        with closing(Repository.open(self.url, cache=self.folder / f"cache{self.number}")) as repo:
            target = {"model": StateDict(**{key: torch.empty_like(value) for key, value in self.state.items()})}
            repo.checkout("main", into=target)

    def clone_and_checkout(self) -> None:
        place = self.folder / f"clone{self.number}"
        with closing(Repository.clone(self.url, place)) as repo:
            target = {"model": StateDict(**{key: torch.empty_like(value) for key, value in self.state.items()})}
            repo.checkout("main", into=target)

    def fsck(self) -> None:
        with closing(Repository.open(self.url, cache=self.folder / f"cache{self.number}")) as repo:
            report = repo.fsck(read_data=True)
            assert not report.problems, str([vars(p) if hasattr(p, "__dict__") else (p.what, p.repair) for p in report.problems])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for flag in ("--write", "--quick"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--moto", action="store_true", help="moto's server in the place of rclone's")
    parser.add_argument("--rounds", type=int)
    given = parser.parse_args()
    num_bytes, rounds = (256 << 20, 3) if given.quick else (1 << 30, 5)
    rounds = given.rounds or rounds
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place, credentials():
        folder = Path(place)
        (folder / "served").mkdir()
        source = folder / "source"
        source.write_bytes(os.urandom(num_bytes))
        made_by = s3_server() if given.moto else s3_without_conditions(folder / "served")
        with made_by as server, slow(server.endpoint) as endpoint:
            for network, at in (("direct", server), ("30 ms, 200 MB/s", S3Server(endpoint))):
                times: dict[str, list[float]] = {}
                for number in range(rounds + 1):
                    bucket = at.new_bucket()
                    plain = Plain(at, bucket, folder, source)
                    made = Round(at, bucket, folder, num_bytes, number)
                    for name, work in (
                        ("upload", plain.upload), ("commit", made.commit),
                        ("download", plain.download), ("checkout", made.checkout),
                        ("clone", made.clone_and_checkout), ("fsck", made.fsck),
                    ):  # fmt: skip
                        took = seconds(work)
                        if number:
                            times.setdefault(name, []).append(took)
                    made.repo.close()
                    for each in folder.iterdir():
                        if each.name not in {"served", "source"}:
                            shutil.rmtree(each)
                    if given.moto:
                        at.reset()
                    else:
                        shutil.rmtree(folder / "served" / bucket)
                for name, each in times.items():
                    base = times["upload" if name in {"upload", "commit"} else "download"]
                    ratio = statistics.median(base) / statistics.median(each)
                    print(f"{network:16} {name:9} {num_bytes / statistics.median(each) / 1e6:6.0f} MB/s, ratio {ratio:.2f}", flush=True)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10, "MiB peak")


if __name__ == "__main__":
    main()
