"""How fast does a store on S3 send and fetch a value of 1 GB, beside boto3's own multipart transfer of such a file?

    python -m benchmarks.object_storage --write     1 GB, five rounds; docs/benchmarks/object_storage.md
    python -m benchmarks.object_storage --quick     128 MB, three rounds; prints only
    python -m benchmarks.object_storage --crt       as --quick, with boto3's CRT client in the place of the store

The server is rclone's S3 over a folder in memory, a process on this machine, so that it takes cores from both sides
alike; then the same behind a proxy with 30 ms for each request and 200 MB/s. Both do it in turns with the same
parallelism and parts, and the median of the rounds counts, as the ratio of the two in one run. The file of boto3's side
is in memory (/dev/shm). `--crt` needs `pip install 'boto3[crt]'`, in an environment of its own.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from boto3.s3.transfer import TransferConfig

from cas_ckpt.storage.object_store import ObjectStore
from cas_ckpt.storage.url import open_store
from tests.servers import S3Server, credentials, s3_without_conditions

PARALLEL, PART_BYTES = 16, 8 << 20
LATENCY_S, BYTES_PER_S = 0.03, 200e6
PIECE_BYTES = 4 << 20
REPORT = Path(__file__).parent.parent / "docs" / "benchmarks" / "object_storage.md"


@contextmanager
def slow(endpoint: str) -> Iterator[str]:
    """The server behind a proxy in a process of its own."""
    command = [sys.executable, "-m", "tests.proxy", endpoint, str(LATENCY_S), str(BYTES_PER_S)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()


def seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Plain:
    """boto3's own transfer of a file."""

    def __init__(self, server: S3Server, bucket: str, folder: Path, source: Path, client: str = "classic") -> None:
        self.client, self.bucket, self.folder, self.source = server.client, bucket, folder, source
        self.config = TransferConfig(
            multipart_chunksize=PART_BYTES, multipart_threshold=PART_BYTES, max_concurrency=PARALLEL,
            preferred_transfer_client=client,
        )  # fmt: skip

    def upload(self) -> None:
        self.client.upload_file(str(self.source), self.bucket, "plain", Config=self.config)

    def download(self) -> None:
        target = self.folder / "target"
        self.client.download_file(self.bucket, "plain", str(target), Config=self.config)
        target.unlink()


class Ours:
    """The store, from and to memory."""

    def __init__(self, store: ObjectStore, value: memoryview) -> None:
        self.store, self.value = store, value
        self.target = bytearray(len(value))

    def upload(self) -> None:
        self.store.delete("ours")
        with self.store.open_writer("ours") as writer:
            for at in range(0, len(self.value), PIECE_BYTES):
                writer.write(self.value[at : at + PIECE_BYTES])
            writer.commit()

    def download(self) -> None:
        self.store.read_into("ours", 0, memoryview(self.target))


def compare(plain: Any, other: Any, rounds: int) -> Iterator[tuple[str, float, float]]:
    """(what, median seconds of the plain side, of the other one), in turns."""
    for what in ("upload", "download"):
        times: dict[Any, list[float]] = {plain: [], other: []}
        for number in range(rounds + 1):
            for side in (plain, other) if number % 2 else (other, plain):
                took = seconds(getattr(side, what))
                if number:  # the first round warms up
                    times[side].append(took)
        yield what, statistics.median(times[plain]), statistics.median(times[other])


def measure(num_bytes: int, rounds: int, *, crt: bool) -> list[tuple[str, str, float, float]]:
    rows = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place_of_files, credentials():
        folder = Path(place_of_files)
        source = folder / "source"
        value = memoryview(os.urandom(num_bytes))
        source.write_bytes(value)
        (folder / "served").mkdir()
        with s3_without_conditions(folder / "served") as server, slow(server.endpoint) as endpoint:
            for place, at in (("direct", server), ("30 ms, 200 MB/s", S3Server(endpoint))):
                bucket = at.new_bucket()
                plain = Plain(at, bucket, folder, source)
                url = at.url(bucket, parallel=PARALLEL, part_bytes=PART_BYTES)
                with closing(open_store(url)) as store:
                    assert isinstance(store, ObjectStore)
                    other = Plain(at, bucket, folder, source, "crt") if crt else Ours(store, value)
                    for what, base, found in compare(plain, other, rounds):
                        rows.append((place, what, num_bytes / base / 1e6, num_bytes / found / 1e6))
                        name = "CRT" if crt else "store"
                        print(
                            f"{place:16} {what:9} boto3 {rows[-1][2]:6.0f} MB/s, {name} {rows[-1][3]:6.0f} MB/s, "
                            f"ratio {base / found:.2f}",
                            flush=True,
                        )
                    if isinstance(other, Ours):
                        assert other.target == value
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for flag in ("--write", "--quick", "--crt"):
        parser.add_argument(flag, action="store_true")
    given = parser.parse_args()
    num_bytes, rounds = (128 << 20, 3) if given.quick or given.crt else (1 << 30, 5)
    rows = measure(num_bytes, rounds, crt=given.crt)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"peak memory of this process {peak} MiB, of which the value and its copy are {2 * num_bytes >> 20} MiB")
    if given.write:
        from benchmarks.harness.machine import describe

        hosted = describe(REPORT.parent)
        machine = ", ".join(hosted[key] for key in ("processor", "memory", "commit"))
        REPORT.write_text(page(rows, num_bytes, rounds, machine))


def page(rows: list[tuple[str, str, float, float]], num_bytes: int, rounds: int, machine: str) -> str:
    lines = [
        "# A value of 1 GB to S3 and back", "",
        f"`python -m benchmarks.object_storage --write`: {num_bytes >> 20} MiB, {rounds} rounds, medians; {PARALLEL} "
        f"requests at once, parts of {PART_BYTES >> 20} MiB; rclone's S3 on the same machine.", "",
        f"Machine: {machine}", "",
        "| | | boto3, MB/s | cas_ckpt, MB/s | ratio |", "| --- | --- | --- | --- | --- |",
        *(f"| {place} | {what} | {base:.0f} | {ours:.0f} | {ours / base:.2f} |" for place, what, base, ours in rows),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
