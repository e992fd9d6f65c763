"""What the tests of DCP's storage share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cas_ckpt import Repository


@pytest.fixture
def repo(tmp_path: Path) -> Iterator[Repository]:
    """An empty repository on disk."""
    with Repository.init(tmp_path / "repo") as opened:
        yield opened
