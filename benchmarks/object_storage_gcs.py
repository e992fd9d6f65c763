"""How fast is a long value sent to Cloud Storage and read back, beside google-cloud-storage's own transfer of a file?

    python -m benchmarks.object_storage_gcs                               256 MB, fake-gcs-server in memory
    python -m benchmarks.object_storage_gcs --latency 0.03 --rate 200e6   through a proxy that waits, and limits

Ours and the library's take turns, with as many requests at once and parts of the same size; medians, and their ratio.
The library's ways: parts by `transfer_manager.upload_many`, then `compose`, then deletion, as `gcloud storage cp` does
it (`upload_chunks_concurrently` speaks the XML API, which fake-gcs-server has not); `download_chunks_concurrently` by
threads. Figures are in docs/benchmarks/object_storage_gcs.md.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from cas_ckpt.storage.object_store import ObjectStore
from cas_ckpt.storage.url import open_store
from tests.servers import GcsServer, gcs_server

AT_ONCE = 16
PART_BYTES = 8 << 20
WRITE_BYTES = 1 << 20
ROUNDS = 3
MEMORY = Path("/dev/shm")


class Gcs:
    def __init__(self, server: GcsServer) -> None:
        from requests.adapters import HTTPAdapter

        self.url = server.url(server.new_bucket(), parallel=AT_ONCE, part_bytes=PART_BYTES)
        self.bucket = server.client.bucket(self.url.split("/")[2])
        server.client._http.mount("http://", HTTPAdapter(pool_maxsize=2 * AT_ONCE))

    def upload(self, name: str, data: memoryview) -> None:
        from google.cloud.storage import transfer_manager

        parts = [
            (io.BytesIO(data[at : at + PART_BYTES]), self.bucket.blob(f"{name}.{at}"))
            for at in range(0, data.nbytes, PART_BYTES)
        ]
        done = transfer_manager.upload_many(
            parts, worker_type=transfer_manager.THREAD, max_workers=AT_ONCE, raise_exception=True
        )
        assert len(done) == len(parts)
        joined = [blob for _, blob in parts]
        while len(joined) > 1:
            rows = [joined[at : at + 32] for at in range(0, len(joined), 32)]
            joined = [
                self._composed(f"{name}.{len(rows)}.{at}" if len(rows) > 1 else name, row)
                for at, row in enumerate(rows)
            ]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda part: part[1].delete(), parts))

    def _composed(self, name: str, parts: list[Any]) -> Any:
        blob = self.bucket.blob(name)
        blob.compose(parts)
        return blob

    def download(self, name: str, file: Path) -> None:
        from google.cloud.storage import transfer_manager

        blob = self.bucket.get_blob(name)
        blob._properties.pop("mediaLink")  # it leads past the proxy
        transfer_manager.download_chunks_concurrently(
            blob, str(file), chunk_size=PART_BYTES, worker_type=transfer_manager.THREAD,
            max_workers=AT_ONCE,
        )  # fmt: skip


def upload(store: ObjectStore, key: str, data: memoryview) -> None:
    with store.open_writer(key) as writer:
        for at in range(0, data.nbytes, WRITE_BYTES):
            writer.write(data[at : at + WRITE_BYTES])
        writer.commit()


def download(store: ObjectStore, key: str, size: int, file: Path) -> None:
    """Into a file, as the vendors do: each thread reads a part and writes it to its place."""
    with file.open("wb", buffering=0) as target, ThreadPoolExecutor(AT_ONCE) as pool:

        def move(at: int) -> None:
            buffer = memoryview(bytearray(min(PART_BYTES, size - at)))
            store.read_into(key, at, buffer)
            os.pwrite(target.fileno(), buffer, at)

        list(pool.map(move, range(0, size, PART_BYTES)))


@contextmanager
def slowed(endpoint: str, latency_s: float, bytes_per_s: float) -> Iterator[str]:
    """The endpoint, behind a proxy in a process of its own if it is to be slow."""
    if not latency_s and not bytes_per_s:
        yield endpoint
        return
    command = [sys.executable, "-m", "tests.proxy", endpoint, str(latency_s), str(bytes_per_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()


def measured(vendor: Gcs, data: memoryview, folder: Path) -> dict[str, list[float]]:
    """Seconds of each round, by what was done; ours and the library's take turns."""
    store = open_store(vendor.url)
    assert isinstance(store, ObjectStore)
    file, seconds = folder / "file", dict[str, list[float]]()

    def timed(what: str, work: Callable[[], None]) -> None:
        begun = time.perf_counter()
        work()
        seconds.setdefault(what, []).append(time.perf_counter() - begun)

    for number in range(ROUNDS):
        timed("upload, ours", lambda number=number: upload(store, f"a{number}", data))  # type: ignore[misc]
        timed("upload, library's", lambda number=number: vendor.upload(f"b{number}", data))  # type: ignore[misc]
        timed("download, ours", lambda number=number: download(store, f"a{number}", data.nbytes, file))  # type: ignore[misc]
        assert file.read_bytes() == data
        timed("download, library's", lambda number=number: vendor.download(f"b{number}", file))  # type: ignore[misc]
        assert file.read_bytes() == data
        store.delete(f"a{number}")
    store.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--latency", type=float, default=0.0, help="seconds added to each request")
    parser.add_argument("--rate", type=float, default=0.0, help="bytes per second of the line, each way")
    given = parser.parse_args()
    data = memoryview(os.urandom(given.mb << 20))
    with ExitStack() as stack:
        # In memory where there is such a folder: the disk is not what is measured.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None)))
        server = stack.enter_context(gcs_server(alone=True))
        endpoint = stack.enter_context(slowed(server.endpoint, given.latency, given.rate))
        seconds = measured(Gcs(GcsServer(endpoint)), data, folder)
    print(f"{given.mb} MB, {given.latency * 1000:.0f} ms, {given.rate / 1e6:.0f} MB/s (0: as it is)")
    for way in ("upload", "download"):
        ours, theirs = (statistics.median(seconds[f"{way}, {who}"]) for who in ("ours", "library's"))
        rates = [len(data) / each / 1e6 for each in (ours, theirs)]
        print(f"{way}: {rates[0]:.0f} MB/s, the library's {rates[1]:.0f}: {theirs / ours:.2f}x")


if __name__ == "__main__":
    main()
