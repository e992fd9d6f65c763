"""SeaweedFS, an S3 of folders: the conformance suite over it, and a repository with such names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cas_ckpt import Repository
from cas_ckpt.storage import s3 as s3_module
from cas_ckpt.storage.store import Store
from cas_ckpt.storage.url import open_store
from cas_ckpt.testing import StoreConformance
from tests.servers import S3Server, credentials, s3_by_folders

pytestmark = pytest.mark.slow  # it starts a server


@pytest.fixture(scope="module")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with credentials(), s3_by_folders(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture(scope="module")
def bucket(seaweed: S3Server) -> str:
    return seaweed.new_bucket()


class TestSeaweedStore(StoreConformance):
    num_listed = 60

    @pytest.fixture(autouse=True)
    def _in_the_bucket(self, seaweed: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(s3_module, "_PAGE", 25)
        self.url = seaweed.url(bucket)

    def store(self) -> Store:
        return open_store(self.url)

    def reopened(self, store: Store) -> Store:
        return open_store(store.url)


def test_branches_whose_names_a_service_lists_in_another_order(
    seaweed: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_module, "_PAGE", 2)
    url = seaweed.url(bucket, "repository")
    with Repository.init(url, cache=None) as repo:
        first = repo.commit({"x": 1})
        for name in ("ft/a", "ft-b", "ft/b"):
            repo.branch(name)
        assert list(repo.branches()) == sorted(repo.branches())
        assert len(repo.branches()) == 4
    with Repository.open(url, cache=None) as repo:
        assert [each.id for each in repo.log(all_refs=True)] == [first.id]
        assert repo.gc(dry_run=True).deleted_packs == 0
        assert repo.fsck().ok
        repo.delete_branch("ft-b", force=True)
        assert "ft-b" not in repo.branches()
