"""The tests of garbage collection once more, over an index in PostgreSQL; they ask the index most."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cas_ckpt.core.create import init_repository
from cas_ckpt.core.handle import RepositoryHandle
from tests.index.conftest import server_url
from tests.ops.gc import test_gc

__all__ = ["handle", "server_url"]

pytestmark = pytest.mark.slow

globals().update({name: value for name, value in vars(test_gc).items() if name.startswith("test_")})


@pytest.fixture
def handle(tmp_path: Path, server_url: str) -> Iterator[RepositoryHandle]:
    """An empty repository in `tmp_path / "repo"`."""
    made = init_repository(tmp_path / "repo", index_url=server_url)
    yield made
    made.close()
