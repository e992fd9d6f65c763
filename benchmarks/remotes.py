"""Training state of 1 GB to a bucket and back, beside the vendor's own transfer of a file of that size.

    python -m benchmarks.remotes --write           everything, about 20 minutes; docs/benchmarks/remotes.md
    python -m benchmarks.remotes --quick           rclone's S3 only, 256 MB; prints only
    python -m benchmarks.remotes --server moto     that server only (rclone, moto or gcs), 1 GB; prints only

Steps: a first commit of random fp32 weights in tensors of 16 MiB, a checkout into other tensors from a cold cache, a
clone into a local folder with a checkout from it, `fsck --read-data` from the bucket. The servers: rclone's S3 over a
folder in memory, moto, fake-gcs-server, each a process on this machine, so that it takes cores from both sides alike;
rclone's once more behind a proxy with 30 ms for each request and 200 MB/s. All steps take turns with the plain transfer
(boto3's, google-cloud-storage's) with the same parallelism, and medians of the rounds give the ratios of one run. Then
requests and bytes are counted by a proxy. Local folders are in memory (/dev/shm).
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import machine
from benchmarks.harness.meter import measured
from benchmarks.object_storage import PARALLEL, Plain, slow
from benchmarks.object_storage_gcs import Gcs
from cas_ckpt import Repository, StateDict
from tests.proxy import Proxy
from tests.servers import GcsServer, S3Server, credentials, gcs_server, s3_server, s3_without_conditions

TENSOR_BYTES = 16 << 20
REPORT = Path(__file__).parent.parent / "docs" / "benchmarks" / "remotes.md"
SLOW = "rclone, 30 ms, 200 MB/s"
PLAIN_OF = {"commit": "upload", "checkout": "download", "clone and checkout": "download", "fsck": "download"}
AT_LEAST = {"commit": 0.9, "checkout": 0.9, "clone and checkout": 0.85, "fsck": 0.8}


def weights(num_bytes: int, seed: int) -> dict[str, torch.Tensor]:
    """Random weights: what a model that trains in full looks like to a codec."""
    chance = torch.Generator().manual_seed(seed)
    shape = (2048, TENSOR_BYTES // 4 // 2048)
    return {f"w{number}": torch.randn(shape, generator=chance) * 0.02 for number in range(num_bytes // TENSOR_BYTES)}


class PlainGcs:
    """google-cloud-storage's own transfer of a file."""

    def __init__(self, server: GcsServer, source: Path, folder: Path) -> None:
        self.vendor, self.source, self.folder = Gcs(server), source, folder

    def upload(self) -> None:
        self.vendor.upload("plain", memoryview(self.source.read_bytes()))

    def download(self) -> None:
        self.vendor.download("plain", self.folder / "target")


class Ours:
    """The same state in a repository. Each step opens it anew, with a cold cache."""

    def __init__(self, url: str, folder: Path, num_bytes: int, seed: int) -> None:
        self.url, self.folder = url, folder
        self.state = weights(num_bytes, seed)
        # Live tensors: pages that were never touched cost the first who writes there 3 s a gigabyte on such machines.
        self.into = {key: torch.full_like(value, 7.0) for key, value in self.state.items()}
        Repository.init(url, single_writer=True).close()

    @contextmanager
    def opened(self) -> Iterator[Repository]:
        with (
            tempfile.TemporaryDirectory(dir=self.folder) as cache,
            closing(Repository.open(self.url, cache=cache)) as repo,
        ):
            yield repo

    def commit(self) -> None:
        with self.opened() as repo:
            repo.commit({"model": StateDict(**self.state)})

    def checkout(self) -> None:
        with self.opened() as repo:
            repo.checkout("main", into={"model": StateDict(**self.into)})

    def clone(self) -> None:
        with closing(Repository.clone(self.url, self.folder / "clone")) as repo:
            repo.checkout("main", into={"model": StateDict(**self.into)})

    def fsck(self) -> None:
        with self.opened() as repo:
            report = repo.fsck(read_data=True)
        assert not report.problems, report.problems

    def check(self) -> None:
        """What the last checkout brought is what was committed; the next one has to bring it again."""
        for key, value in self.state.items():
            assert torch.equal(value.view(torch.int32), self.into[key].view(torch.int32))
            self.into[key].fill_(7.0)


Found = dict[str, list[dict[str, Any]]]


def rounds_of(
    make: Callable[[int, Path], tuple[Any, Ours]], forget: Callable[[], None], rounds: int, folder: Path
) -> Found:
    """What each step cost in each round but the first, which warms up."""
    found: Found = {}
    for number in range(rounds + 1):
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            plain, ours = make(number, Path(scratch))
            steps: list[tuple[str, Callable[[], None]]] = [
                ("upload", plain.upload), ("commit", ours.commit), ("download", plain.download),
                ("checkout", ours.checkout), ("clone and checkout", ours.clone), ("fsck", ours.fsck),
            ]  # fmt: skip
            for name, work in steps:
                cost: dict[str, Any] = {}
                with measured(cost):
                    work()
                if number:
                    found.setdefault(name, []).append(cost)
                if "checkout" in name:
                    ours.check()
        forget()
    return found


def of_s3(server: S3Server, num_bytes: int, source: Path) -> Callable[[int, Path], tuple[Any, Ours]]:
    def make(number: int, scratch: Path) -> tuple[Any, Ours]:
        bucket = server.new_bucket()
        url = server.url(bucket, parallel=PARALLEL)
        return Plain(server, bucket, scratch, source), Ours(url, scratch, num_bytes, number)

    return make


def of_gcs(server: GcsServer, num_bytes: int, source: Path) -> Callable[[int, Path], tuple[Any, Ours]]:
    def make(number: int, scratch: Path) -> tuple[Any, Ours]:
        url = server.url(server.new_bucket(), parallel=PARALLEL)
        return PlainGcs(server, source, scratch), Ours(url, scratch, num_bytes, number)

    return make


def measure(which: str, num_bytes: int, rounds: int, folder: Path) -> Found:
    """Every step over one server, in turns."""
    source, served = folder / "source", folder / "served"
    source.write_bytes(os.urandom(num_bytes))
    served.mkdir(exist_ok=True)
    if which == "gcs":
        found: Found = {}
        for number in range(rounds):  # the server keeps everything in memory: a new one each time
            with gcs_server(alone=True) as gcs:
                for name, costs in rounds_of(of_gcs(gcs, num_bytes, source), _nothing, 1, folder).items():
                    found.setdefault(name, []).extend(costs)
            print(f"{which}: round {number + 1}", flush=True)
        return found
    if which == "moto":
        with s3_server() as moto:
            return rounds_of(of_s3(moto, num_bytes, source), moto.reset, rounds, folder)

    def forget() -> None:
        for bucket in served.iterdir():
            shutil.rmtree(bucket)

    with s3_without_conditions(served) as server:
        if which != SLOW:
            return rounds_of(of_s3(server, num_bytes, source), forget, rounds, folder)
        with slow(server.endpoint) as endpoint:
            return rounds_of(of_s3(S3Server(endpoint), num_bytes, source), forget, rounds, folder)


def _nothing() -> None:
    pass


def table(which: str, found: Found, num_bytes: int) -> list[str]:
    """A row for each step: its rate, its ratio to the plain transfer, and the peak of memory above the state."""
    lines = []
    middle = {name: statistics.median(cost["seconds"] for cost in costs) for name, costs in found.items()}
    for name, seconds in middle.items():
        peak = max(cost["peak_bytes"] for cost in found[name]) / 1e6
        ratio = f"**{middle[PLAIN_OF[name]] / seconds:.2f}** | >= {AT_LEAST[name]}" if name in PLAIN_OF else "|"
        cpu = statistics.median(cost["cpu_s"] for cost in found[name])
        lines.append(f"| {which} | {name} | {num_bytes / seconds / 1e6:.0f} | {cpu:.1f} | {peak:.0f} | {ratio} |")
    return lines


def counted(num_bytes: int, folder: Path) -> list[str]:
    """Requests and bytes, by a proxy that counts them, over moto, which keeps conditions."""
    lines: list[str] = []
    with s3_server() as server, Proxy(server.endpoint) as proxy:
        url = S3Server(proxy.endpoint).url(server.new_bucket())
        state = weights(num_bytes, 0) | {f"small{number}": torch.randn(512, 512) for number in range(10)}
        Repository.init(url).close()
        with (
            closing(Repository.init(folder / "local")) as local,
            closing(Repository.open(url, cache=folder / "cache")) as far,
        ):
            local.add_remote("origin", url)

            def count(what: str, work: Callable[[], object]) -> None:
                proxy.clear()
                work()
                sent = sum(each.sent_bytes for each in proxy.requests)
                received = sum(each.received_bytes for each in proxy.requests)
                lines.append(f"| {what} | {len(proxy.requests)} | {sent / 1e6:.3f} | {received / 1e6:.3f} |")

            def new_commit(target: Repository) -> int:
                return int(target.commit({"model": StateDict(**state)}).stats.stored_bytes)

            first = new_commit(local)
            count(f"push of the first commit, {first / 1e6:.1f} MB as stored", lambda: local.push("origin"))
            for number in range(10):
                state[f"small{number}"] += 1.0
            changed = new_commit(local)
            count(
                f"push after 10 tensors of 1 MiB changed, {changed / 1e6:.3f} MB as stored",
                lambda: local.push("origin"),
            )
            count("push of nothing", lambda: local.push("origin"))
            for again in ("cold cache", "warm cache", "once more"):

                def read() -> None:
                    with closing(Repository.open(url, cache=folder / "reader", read_only=True)) as reader:
                        assert torch.equal(reader.read("main", "model/small7"), state["small7"])

                count(f"open, and read a tensor of 1 MB, {again}", read)
            new_commit(far)
            count("commit of the unchanged state", lambda: new_commit(far))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for flag in ("--write", "--quick", "--counts"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--server", choices=("rclone", SLOW, "moto", "gcs"), action="append")
    parser.add_argument("--rounds", type=int)
    given = parser.parse_args()
    num_bytes, rounds = (256 << 20, given.rounds or 3) if given.quick else (1 << 30, given.rounds or 5)
    servers: Sequence[str] = given.server or (("rclone", SLOW) if given.quick else ("rclone", SLOW, "moto", "gcs"))
    rows = []
    with credentials():
        for which in [] if given.counts else servers:
            with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
                # moto copies the whole value for each range of it: of 1 GB that takes minutes
                size = num_bytes >> 2 if which == "moto" and not given.quick else num_bytes
                found = measure(which, size, rounds, Path(place))
            rows += table(which if size == num_bytes else f"{which}, {size >> 20} MiB", found, size)
            print("\n".join(rows[-len(found) :]), flush=True)
        with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
            counts = counted(num_bytes, Path(place))
        print("\n".join(counts))
    if given.write:
        hosted = machine.describe(REPORT.parent)
        text = TEMPLATE.format(
            machine=", ".join(hosted[key] for key in ("processor", "memory", "kernel", "commit")),
            today=datetime.date.today().isoformat(), load=os.getloadavg()[0], rows="\n".join(rows),
            counts="\n".join(counts), rounds=rounds, parallel=PARALLEL,
        )  # fmt: skip
        REPORT.write_text(text)


TEMPLATE = """# Remotes: 1 GB to a bucket and back

Written by `python -m benchmarks.remotes --write --rounds {rounds}` on {today}, figures as they came; what is compared,
and how, is said in benchmarks/remotes.py. Medians; {parallel} requests at once on both sides. Server, proxy and client
share this machine's cores: compare the ratios, not the rates.

Machine: {machine}; load at the end {load:.1f}.

| server | step | MB/s | CPU, s | peak memory above the state, MB | ratio to the plain transfer | wanted |
| --- | --- | --- | --- | --- | --- | --- |
{rows}

*upload* and *download* are boto3's `upload_file` and `download_file` with parts of 8 MiB (rclone, moto), and
google-cloud-storage's transfer manager (gcs). The peak counts pages of mapped files and of what is staged, as the
kernel counts them. moto copies the whole value for each range that is asked of it, so that a file of 1 GB is slow
there; packs are 128 MiB.

## Counted

| | requests | MB sent | MB received |
| --- | --- | --- | --- |
{counts}
"""


if __name__ == "__main__":
    main()
