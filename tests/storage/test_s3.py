"""S3: the conformance suite over a real server, and what is S3's alone."""

from __future__ import annotations

import pytest

from cas_ckpt.storage.store import Store
from cas_ckpt.storage.url import open_store
from cas_ckpt.testing import StoreConformance
from tests.servers import S3Server


class TestS3Store(StoreConformance):
    @pytest.fixture(autouse=True)
    def _in_a_new_bucket(self, s3: S3Server) -> None:
        self.url = s3.url(s3.new_bucket())

    def store(self) -> Store:
        return open_store(self.url)

    def reopened(self, store: Store) -> Store:
        return open_store(store.url)
