"""Tests of stores in files run on a disk, where the others run in memory: O_DIRECT, fsync and links are the disk's."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="cas-ckpt-tests-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
