"""The policies for S3 in docs/remotes.md let each do its work, and nothing else: moto judges every request by them."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import botocore.client
import numpy as np
import pytest

from cas_ckpt import Repository
from cas_ckpt.errors import PermissionDeniedError
from cas_ckpt.storage import object_parts
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
        told = {"Content-Type": "text/plain"}
        request = urllib.request.Request(f"{self.server.endpoint}/moto-api/reset-auth", body, told, method="POST")
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


def commit(url: str, seeds: range) -> None:
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


def used(made: list[tuple[str, dict[str, Any]]]) -> set[str]:
    """The actions that were needed, since this was last asked."""
    found = {ACTIONS[operation] for operation, _ in made if operation in ACTIONS}
    made.clear()
    return found


def used_keys(made: list[tuple[str, dict[str, Any]]], operation: str, prefix: str) -> list[str]:
    """What an operation was asked for below a prefix."""
    keys = [str(arguments.get("Key", "")) for name, arguments in made if name == operation]
    return [key for key in keys if key.startswith(f"{PREFIX}/{prefix}")]


def allowed(who: str) -> set[str]:
    return {action for one in policies()[who]["Statement"] for action in one["Action"]}


def client_of_now(server: S3Server) -> Any:
    return boto3.client("s3", endpoint_url=server.endpoint, region_name="us-east-1")


def opened(url: str, *, read_only: bool = False) -> Repository:
    return Repository.open(url, cache=None, group=None, read_only=read_only)


@pytest.mark.slow
def test_each_does_its_work_and_no_more(guarded: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The actions that a policy allows are those that were asked for: none is missing, none is too much."""
    monkeypatch.setattr(object_parts, "MIN_UPLOAD_AGE_S", -1.0)
    made = called(monkeypatch)
    guarded.become("maintainer")
    used(made)
    Repository.init(guarded.url, cache=None, group=None).close()
    commit(guarded.url, range(2))
    client_of_now(guarded.server).create_multipart_upload(Bucket=BUCKET, Key=f"{PREFIX}/packs/00/{'0' * 32}.data")
    with opened(guarded.url) as repo:
        repo.branch("ft")
        repo.delete_branch("ft", force=True)
        repo.forget(revisions=["main~1"])
        assert repo.gc(min_age_s=0).denied == ""
        assert repo.fsck(read_data=True).ok
    assert used(made) == allowed("maintainer")

    guarded.become("writer")
    used(made)
    commit(guarded.url, range(2, 4))
    with Repository.clone(guarded.url, tmp_path / "here", cache=None) as here:
        for seed in (5, 6):  # a push of several writes a record of them and deletes it
            here.commit(state(seed))
        here.push()
        assert len(used_keys(made, "DeleteObject", "released/")) == 1
    with opened(guarded.url) as repo:
        repo.tag("v1")
        store = repo._handle.store
        for prefix in ("packs/", "refs/", "gc/"):
            with pytest.raises(PermissionDeniedError):
                store.delete(next(key for key, _ in store.list(prefix)))
    assert used(made) == allowed("writer") - {"s3:AbortMultipartUpload"}, "that is for a commit that fails"

    guarded.become("reader")
    used(made)
    with opened(guarded.url, read_only=True) as repo:
        assert len(list(repo.log())) == 6 and repo.ls("main") and repo.fsck(read_data=True).ok
    Repository.clone(guarded.url, tmp_path / "clone", cache=None).close()
    assert used(made) - {"s3:ListBucketMultipartUploads"} == allowed("reader"), "fsck counts uploads where it may"
    with pytest.raises(PermissionDeniedError, match="docs/remotes.md"):
        commit(guarded.url, range(9, 10))


def test_the_lifecycle_rules_expire_no_object() -> None:
    rules = [
        rule for text in blocks(ROOT / "docs" / "remotes.md", "json") for rule in json.loads(text).get("Rules", ())
    ]
    assert len(rules) >= 2
    assert not any({"Expiration", "Transitions"} & rule.keys() for rule in rules)
