"""Repositories that snapshots keep open are closed after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cas_ckpt.torchsnapshot import close_repositories


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_repositories()
