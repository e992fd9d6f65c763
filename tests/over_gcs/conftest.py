"""Stores in buckets of Cloud Storage in the place of folders and of memory: as tests/over_s3, over another server."""

from __future__ import annotations

import pytest

from tests.over_s3.conftest import in_buckets  # noqa: F401 - a fixture
from tests.servers import GcsServer


@pytest.fixture
def s3(gcs: GcsServer) -> GcsServer:
    """What `in_buckets` takes its buckets from."""
    return gcs
