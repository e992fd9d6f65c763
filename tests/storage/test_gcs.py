"""Cloud Storage: the conformance suite over a real server, and what is Cloud Storage's alone."""

from __future__ import annotations

import pytest

from cas_ckpt.storage.store import Store
from cas_ckpt.storage.url import open_store
from cas_ckpt.testing import FaultyStore, StoreConformance
from tests.servers import GcsServer


class TestGcsStore(StoreConformance):
    @pytest.fixture(autouse=True)
    def _in_a_new_bucket(self, gcs: GcsServer) -> None:
        self.url = gcs.url(gcs.new_bucket())

    def store(self) -> Store:
        return open_store(self.url)

    def reopened(self, store: Store) -> Store:
        return open_store(store.url)


class TestGcsStoreWithParts(TestGcsStore):
    """Parts are small here, so that most values of the suite are composed."""

    num_listed = 10

    @pytest.fixture(autouse=True)
    def _in_a_new_bucket(self, gcs: GcsServer) -> None:
        self.url = gcs.url(gcs.new_bucket(), part_bytes=1 << 20, parallel=4)


class TestFaultyGcsStore(TestGcsStore):
    num_listed = 10

    def store(self) -> Store:
        return FaultyStore(super().store())
