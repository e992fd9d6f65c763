"""The index in a SQLite file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cas_ckpt.index.index import Index
from tests.index.building import STORE
from tests.index.index_suite import IndexSuite, Open


class TestSqliteIndex(IndexSuite):
    @pytest.fixture
    def open_index(self, tmp_path: Path) -> Open:
        class Opener:
            place = tmp_path / "a folder?with#odd%20characters" / "index.sqlite"

            def __call__(self, store_id: str = STORE, **how: Any) -> Index:
                return Index.open(self.place, store_id=store_id, **how)

        return Opener()
