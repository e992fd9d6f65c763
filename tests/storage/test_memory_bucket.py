"""The conformance suite over the bucket in memory that other tests begin with: it is one as good as a vendor's."""

from __future__ import annotations

from cas_ckpt.storage.object_store import ObjectStore
from cas_ckpt.storage.store import Store
from cas_ckpt.testing import StoreConformance
from tests.memory_bucket import MemoryBucket


class TestBucketOfETags(StoreConformance):
    generations = False

    def setup_method(self) -> None:
        self.bucket = MemoryBucket(generations=self.generations)

    def store(self) -> Store:
        return ObjectStore(self.bucket, "some/where/", url="s3://bucket/some/where")

    def reopened(self, store: Store) -> Store:
        return self.store()


class TestBucketOfGenerations(TestBucketOfETags):
    generations = True
