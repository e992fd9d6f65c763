"""cache show and cache clear."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from cas_ckpt.core.handle import RepositoryHandle
from cas_ckpt.storage.memory import MemoryStore
from tests.cli.running import call
from tests.core.test_host_cache import fill
from tests.remote_store import RemoteStore


def test_it_is_shown_limited_and_cleared(tmp_path: Path) -> None:
    bucket = MemoryStore(url="s3://bucket/llm")
    store_id = fill(bucket, 2)
    place = str(tmp_path / "cache")
    with closing(RepositoryHandle.on_store(RemoteStore(bucket), cache=place)) as handle:
        handle.sync()
    shown = call("cache", "show", "--json", CAS_CKPT_CACHE=place).json
    assert shown["folder"] == place
    (only,) = shown["repositories"]
    assert only["id"] == store_id and only["num_bytes"] > 0
    assert "of at most 20" in call("cache", "show", "--max-size", "20GB", CAS_CKPT_CACHE=place).out
    assert store_id[:12] in call("cache", "show", CAS_CKPT_CACHE=place).out
    assert call("cache", "clear", "nothing", CAS_CKPT_CACHE=place).code == 15
    assert call("cache", "clear", store_id[:6], CAS_CKPT_CACHE=place).out.endswith("removed\n")
    assert not call("cache", "show", "--json", CAS_CKPT_CACHE=place).json["repositories"]


def test_without_a_folder_that_is_said(tmp_path: Path) -> None:
    ran = call("cache", "show", CAS_CKPT_CACHE="")
    assert ran.code == 15 and "CAS_CKPT_CACHE is empty" in ran.err
