"""The conformance suite over folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from cas_ckpt.storage.file import FileStore
from cas_ckpt.storage.store import Store
from cas_ckpt.testing import StoreConformance


class TestFileStore(StoreConformance):
    num_listed = 100  # a folder has no pages

    @pytest.fixture(autouse=True)
    def _in_a_new_folder(self, tmp_path: Path) -> None:
        self.root = tmp_path / "not" / "there yet"

    def store(self) -> Store:
        return FileStore(self.root)

    def reopened(self, store: Store) -> Store:
        return FileStore(self.root)


class TestFileStoreBehindASymbolicLink(TestFileStore):
    @pytest.fixture(autouse=True)
    def _behind_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        self.root = tmp_path / "link"
        self.root.symlink_to(tmp_path / "real")
