"""Keys of S3 and passwords of PostgreSQL, given in the vendors' own places, are in nothing that is written or said.

Commits, looks, errors and tracebacks over s3:// with an index in PostgreSQL; then everything is searched: the objects
of the bucket, every table of the database, the cache of the host, the working directory, logs, standard output and
error, and the `repr` of whatever people hold. The search is shown a secret first that it must find.
"""

from __future__ import annotations

import base64
import logging
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote

import boto3
import numpy as np
import psycopg
import pytest
from safetensors.numpy import save_file

from cas_ckpt import Repository
from tests.cli.running import call
from tests.servers import S3Server

KEY_ID, SECRET_KEY, TOKEN = "AKIASECRETOFTHETESTS", f"aws/{secrets.token_hex(20)}+", f"token/{secrets.token_hex(20)}=="
PASSWORD = f"pg:{secrets.token_hex(12)}/%@"
SECRETS = (SECRET_KEY, TOKEN, PASSWORD)


def forms(secret: str) -> Iterator[bytes]:
    """The secret as it may be written."""
    data = secret.encode()
    yield from (data, quote(secret, safe="").encode(), quote(secret).encode(), data.hex().encode())
    yield from (base64.b64encode(data), base64.b64encode(data).rstrip(b"="), repr(secret)[1:-1].encode())


def found_in(places: Mapping[str, bytes], *, known: tuple[str, ...] = SECRETS) -> list[str]:
    return sorted({place for place, data in places.items() for one in known for form in forms(one) if form in data})


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rows_of(url: str) -> dict[str, bytes]:
    """Every row of every table, as text."""
    tables = "SELECT schemaname, tablename FROM pg_tables WHERE schemaname NOT IN ('pg_catalog', 'information_schema')"
    found = {}
    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        for schema, table in connection.execute(tables).fetchall():
            rows = connection.execute(f'SELECT t::text FROM "{schema}"."{table}" t').fetchall()
            found[f"{schema}.{table}"] = repr(rows).encode()
    assert found
    return found


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """Where the keys are: in the environment, or in a file of credentials with a profile; what the URL says of it."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    told = {"AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_SESSION_TOKEN": TOKEN}
    if request.param == "environment":
        for name, value in told.items():
            monkeypatch.setenv(name, value)
        return ""
    home = tmp_path / "home"
    home.mkdir()
    lines = "".join(f"{name.lower()} = {value}\n" for name, value in told.items())
    (home / "credentials").write_text(f"[trainer]\n{lines}")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(home / "credentials"))
    assert boto3.Session(profile_name="trainer").get_credentials().get_frozen_credentials()[:2] == (KEY_ID, SECRET_KEY)
    return "&profile=trainer"


@pytest.fixture
def postgres(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server_url: str, request: pytest.FixtureRequest) -> str:
    """A URL of the database; the password is in it, or in the environment and in a file of passwords."""
    user, host = server_url.partition("//")[2].split("@", 1)
    name = user.rstrip(":")
    if request.param == "url":
        return f"postgresql+psycopg://{name}:{quote(PASSWORD, safe='')}@{host}"
    home = tmp_path / "home"
    home.mkdir(exist_ok=True)
    escaped = PASSWORD.replace("\\", "\\\\").replace(":", "\\:")
    (home / "pgpass").write_text(f"*:*:*:*:{escaped}\n")
    (home / "pgpass").chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(home / "pgpass"))
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    return f"postgresql+psycopg://{name}@{host}"


def test_the_search_finds_a_secret_in_every_form() -> None:
    for one in SECRETS:
        for form in forms(one):
            assert found_in({"here": b"x" + form + b"y", "there": b"nothing"}) == ["here"]


@pytest.mark.slow
@pytest.mark.parametrize(("aws", "postgres"), [("environment", "url"), ("file", "file")], indirect=True)
def test_no_secret_is_in_anything_that_is_written_or_said(
    s3: S3Server, aws: str, postgres: str, server_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level(logging.DEBUG, logger="cas_ckpt")
    work, cache = tmp_path / "work", tmp_path / "cache"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("CAS_CKPT_CACHE", str(cache))
    bucket = s3.new_bucket()
    url = s3.url(bucket) + aws
    save_file({"w": np.zeros(300_000, np.float32)}, work / "m.safetensors")
    said: dict[str, bytes] = {}

    def run(*words: str, code: int | None = 0) -> None:
        monkeypatch.setattr("sys.argv", ["cas-ckpt", *words])  # what --provenance keeps
        ran = call(*words)
        said[words[-1]] = said.get(words[-1], b"") + (ran.out + ran.err).encode()
        assert code is None or ran.code == code, ran.err
        assert code != 0 or "Traceback" not in ran.err

    run("-C", url, "status", code=10)
    run("init", url)
    for index, branch in (((), "one"), (("--index", postgres), "two")):
        run("-C", url, *index, "import", "m.safetensors", "-m", "one", "--branch", branch, "--provenance")
        for words in (["log", "--all"], ["show", branch], ["stats", "--requests"], ["status"], ["fsck"], ["gc"]):
            run("-C", url, *index, *words)
        run("-C", url, *index, "--debug", "show", "nothing", code=15)
    for odd in (
        ("/postgres?", "/nothing?"),
        ("+psycopg", "+nodriver"),
        ("@", "@nowhere.invalid:notaport"),
        ("//", "//["),
    ):
        run("-C", url, "--index", postgres.replace(*odd), "log", "--debug", code=None)
    run("-C", s3.url("no-such-bucket") + aws, "log", "--debug", code=None)
    run("-C", f"s3://{KEY_ID}:{quote(SECRET_KEY, safe='')}@{bucket}/x", "log", "--debug", code=2)
    run("-C", f"{url}&secret_access_key={quote(SECRET_KEY, safe='')}", "log", "--debug", code=2)
    run("-C", url, "remote", "add", "origin", f"https://ann:{quote(PASSWORD, safe='')}@host/x", code=2)
    with Repository.open(url, index_url=postgres, group=None) as repo:
        store = repo._handle.store
        held = (repo, repo._handle, repo._handle.index, repo.log(), repo.stats(), repo.status())
        said["repr"] = repr((*held, store, vars(store), getattr(store, "inner", None), store.url)).encode()
    said["log"] = caplog.text.encode()
    objects = [
        s3.client.get_object(Bucket=bucket, Key=each["Key"])
        for each in s3.client.list_objects_v2(Bucket=bucket)["Contents"]
    ]
    stored = {f"object {at}": one["Body"].read() + repr(one["Metadata"]).encode() for at, one in enumerate(objects)}
    kept = files_below(work) | files_below(cache)
    assert len(stored) > 8 and len(kept) > 1 and all(len(said[name]) for name in ("repr", "fsck"))
    assert found_in(said | stored | kept | rows_of(server_url)) == []
