"""docs/format.md says of every record, of hints and of bundles what their bytes hold: no field more, and none less.

The bytes are taken apart here by what the page says, not by the code that wrote them.
"""

from __future__ import annotations

import re
import struct
from collections import defaultdict
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import blake3
import numpy as np
import pytest
import zstandard

from cas_ckpt import CommitOptions, Policy, Repository
from cas_ckpt.core.protocol import Session
from cas_ckpt.errors import CkptError
from cas_ckpt.objects.digest import unpack_canonical
from tests.docs.pages import DOCS
from tests.servers import S3Server, credentials
from tests.signing.keys import key_file, public_line

PAGE = (DOCS / "format.md").read_text()
RECORDS = PAGE.partition("## 8. Records")[2].partition("### Retention policy")[0]
ROWS = dict(re.findall(r"^\| `([\w-]+)` \| (.+) \|$", RECORDS, re.MULTILINE))
"""Kind of a record -> what the page says of its payload."""

VALUES = {"honoured", "emulated", "idle", "deleting"}
"""What is quoted in the table and is the value of a field."""

Payloads = dict[str, list[dict[str, Any]]]


def unsealed(key: str, data: bytes) -> tuple[str, dict[str, Any]]:
    """Kind and payload of a record, by section 8."""
    assert data[:8] == b"CASCKREC"
    kind, version, named, payload = unpack_canonical(data[40:])
    context = f"cas_ckpt 2026-11 object v1: record {kind}"
    assert data[8:40] == blake3.blake3(data[40:], derive_key_context=context).digest()
    assert (version, named) == (1, key)
    return kind, payload


def hints_of(pack: bytes) -> dict[str, Any]:
    """What the hints of a meta pack hold, by section 7."""
    at = pack.rindex(b"CASCHINT")
    magic, version, encoding, stored, plain = struct.unpack_from("<8sHH4xQQ", pack, at)
    assert (magic, version) == (b"CASCHINT", 1)
    payload = pack[at - stored : at]
    end = at + struct.calcsize("<8sHH4xQQ")
    assert pack[end : end + 8] == blake3.blake3(pack[at - stored : end]).digest()[:8]
    data = zstandard.ZstdDecompressor().decompress(payload) if encoding == 3 else payload
    assert len(data) == plain
    found: dict[str, Any] = unpack_canonical(data)
    return found


def fill(repo: Repository, folder: Path) -> None:
    """Make a record of every kind, with every field."""
    key = key_file()
    repo.set_signers("release/*", [public_line()])
    for step in range(4):
        repo.commit({"w": np.arange(30_000.0) + step}, step=step, options=CommitOptions(sign=key))
    repo.tag("v1", message="as released", sign=key)
    repo.pin(name="paper", reason="of the paper")
    repo.branch("release/1")
    repo.set_policy(Policy(keep_last=1))
    repo.set_policy(Policy(keep_daily=7), branch="release/*")
    for step in range(70):  # more moves than a log has room for: the first ones are released
        repo.branch("moved", start=f"main~{step % 2}", force=step > 0)
    repo.forget(revisions=["main~3"])
    repo.add_remote("origin", folder / "nowhere", fetch=["main"], push=["main"], tier=True)
    repo.commit({"w": np.zeros(10)}, push_to="origin")
    with pytest.raises(CkptError):
        repo.wait_pushed()
    repo.create_bundle(folder / "run.bundle", "main", since=["main~1"])
    Session(repo._handle.store).announce()


@pytest.fixture(scope="module")
def stored(s3_process: S3Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Key -> value, of a repository in a bucket: on a disk there would be no hints."""
    folder = tmp_path_factory.mktemp("stored")
    with credentials():
        repo = Repository.init(s3_process.url(s3_process.new_bucket()), cache=None, group=None)
        fill(repo, folder)
        store = repo._handle.store
        values = {key: bytes(store.get(key)) for key, _ in store.list("")}
    with ZipFile(folder / "run.bundle") as bundle:
        values["bundle"] = bundle.read("bundle")
    repo.close()
    return values


def array_lengths(said: str) -> dict[str, int]:
    """Field -> length of its elements, where the page says "array of [a, b, c]"."""
    return {name: inside.count(",") + 1 for name, inside in re.findall(r"`(\w+)` array of \[([^]]+)\]", said)}


@pytest.mark.slow
def test_records_have_the_fields_that_the_page_names(stored: dict[str, bytes]) -> None:
    found: Payloads = defaultdict(list)
    for key, data in stored.items():
        if not key.startswith("packs/"):
            kind, payload = unsealed(key, data)
            found[kind].append(payload)
    assert found.keys() == ROWS.keys()
    for kind, payloads in found.items():
        said = ROWS[kind].partition(": how the last push")[0]
        named = set(re.findall(r"`(\w+)`", said)) - VALUES - {"forgotten", "released"}
        if kind in ("name", "session"):
            named = {"host", "process", "started_us", "heard_us"} if kind == "session" else set()
        assert {field for payload in payloads for field in payload} == named, kind
        for field, length in array_lengths(said).items():
            elements = [each for payload in payloads for each in payload[field]]
            assert elements and all(len(each) == length for each in elements), (kind, field)


@pytest.mark.slow
def test_remotes_and_rules_have_the_fields_that_the_page_names(stored: dict[str, bytes]) -> None:
    (remote,) = unsealed("settings", stored["settings"])[1]["remotes"]
    said = PAGE.partition("### Settings")[2].partition("## 9.")[0]
    assert remote.keys() == {"name", "url", "fetch", "push", "tier"}
    assert remote.keys() | {"promisor", "filter"} <= set(re.findall(r"`(\w+)`", said))
    rules = unsealed("policy", stored["policy"])[1]["default"]
    assert rules == {"keep_last": 1}


@pytest.mark.slow
def test_hints_have_the_fields_that_the_page_names(stored: dict[str, bytes]) -> None:
    said = PAGE.partition("### Hints")[2].partition("### Encodings")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", said, re.MULTILINE))
    found = [hints_of(data) for key, data in stored.items() if key.endswith(".meta") and b"CASCHINT" in data]
    assert len(found) >= 5
    assert {field for hints in found for field in hints} == rows.keys()
    for hints in found:
        assert all(len(each) == 3 for each in hints["commits"])
        assert all(len(each) == 2 for each in hints["directories"])
    assert any(hints["commits"] for hints in found) and any(hints["directories"] for hints in found)
