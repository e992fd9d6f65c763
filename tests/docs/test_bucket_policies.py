"""The policies for S3 in docs/remotes.md let each do its work, and nothing else: moto judges every request by them."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import boto3
import botocore.client
import numpy as np
import pytest

from cas_ckpt import Repository
from cas_ckpt.errors import PermissionDeniedError
from tests.servers import KEY_ID, SECRET_KEY, S3Server, s3_server
from tests.test_docs import ROOT, blocks

BUCKET, PREFIX = "my-bucket", "llm/run-7"
ACTIONS = {
    "GetObject": "s3:GetObject",
    "HeadObject": "s3:GetObject",
    "PutObject": "s3:PutObject",
    "CreateMultipartUpload": "s3:PutObject",
    "UploadPart": "s3:PutObject",
    "CompleteMultipartUpload": "s3:PutObject",
    "DeleteObject": "s3:DeleteObject",
    "DeleteObjects": "s3:DeleteObject",
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
    "ListObjectsV2": "s3:ListBucket",
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
    "ListParts": "s3:ListMultipartUploadParts",
}
"""Operation of S3 -> the action of a policy that allows it, as the vendor lists them."""


@dataclass
class Guarded:
    """A server that asks the policies of whoever makes a request."""

    server: S3Server
    monkeypatch: pytest.MonkeyPatch

    def become(self, who: str) -> None:
        """From now on this process has the keys of a user with the policy called `who` on the page."""
        self.judging(False)
        keys = {"aws_access_key_id": KEY_ID, "aws_secret_access_key": SECRET_KEY}
        iam = boto3.client("iam", endpoint_url=self.server.endpoint, region_name="us-east-1", **keys)
        iam.create_user(UserName=who)
        iam.put_user_policy(UserName=who, PolicyName=who, PolicyDocument=json.dumps(policies()[who]))
        made = iam.create_access_key(UserName=who)["AccessKey"]
        self.monkeypatch.setenv("AWS_ACCESS_KEY_ID", made["AccessKeyId"])
        self.monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", made["SecretAccessKey"])
        self.judging(True)

    def judging(self, on: bool) -> None:
        body = b"0" if on else b"1000000000"
        request = urllib.request.Request(f"{self.server.endpoint}/moto-api/reset-auth", data=body, method="POST")
        urllib.request.urlopen(request).close()

    @property
    def url(self) -> str:
        return self.server.url(BUCKET, PREFIX)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    """One of its own: no other test's requests are to be judged."""
    with s3_server() as made:
        yield made


@pytest.fixture
def guarded(server: S3Server, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Guarded]:
    server.reset()
    server.client.create_bucket(Bucket=BUCKET)
    found = Guarded(server, monkeypatch)
    yield found
    found.judging(False)


def policies() -> dict[str, dict[str, Any]]:
    """Those on the page, by the name in `Id`."""
    found = [json.loads(text) for text in blocks(ROOT / "docs" / "remotes.md", "json")]
    return {one["Id"]: one for one in found if "Id" in one}


def state(seed: int) -> dict[str, Any]:
    """Of three parts, so that it is an upload of several."""
    return {"w": np.random.default_rng(seed).integers(0, 256, 20 << 20, dtype=np.uint8)}


def write(url: str, seeds: range) -> None:
    with Repository.open(url, cache=None, group=None) as repo:
        for seed in seeds:
            repo.commit(state(seed), step=seed)
            assert np.array_equal(repo.load("main")["w"], state(seed)["w"])


def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Every operation that this process asks for from now on, with its arguments."""
    made: list[tuple[str, dict[str, Any]]] = []
    ask = botocore.client.BaseClient._make_api_call

    def asked(client: Any, operation: str, arguments: dict[str, Any]) -> Any:
        made.append((operation, arguments))
        return ask(client, operation, arguments)

    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", asked)
    return made


@pytest.mark.slow
def test_the_writer_commits_pushes_and_collects_and_the_bucket_is_not_its_own(
    guarded: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded.become("writer")
    made = called(monkeypatch)
    Repository.init(guarded.url, cache=None, group=None).close()
    write(guarded.url, range(2))
    with Repository.open(guarded.url, cache=None, group=None) as repo:
        repo.branch("ft")
        repo.add_remote("origin", tmp_path / "there")
        repo.rename("ft", "ft2")
        repo.delete("ft2")
        assert repo.fsck(read_data=True).ok
    assert repo_is_whole(guarded.url)
    for operation in ("create_bucket", "delete_bucket"):
        with pytest.raises(botocore.client.ClientError, match="AccessDenied"):
            getattr(client_of_now(guarded), operation)(Bucket="another-bucket")
    assert {ACTIONS[operation] for operation, _ in made} <= allowed("writer")


def client_of_now(guarded: Guarded) -> Any:
    return boto3.client("s3", endpoint_url=guarded.server.endpoint, region_name="us-east-1")


def repo_is_whole(url: str) -> bool:
    with Repository.open(url, cache=None, group=None, read_only=True) as repo:
        return repo.fsck(read_data=True).ok


def allowed(who: str) -> set[str]:
    statements = policies()[who]["Statement"]
    return {action for one in statements if one["Effect"] == "Allow" for action in one["Action"]}
