"""The index in memory, and copies of others there."""

from __future__ import annotations

from pathlib import Path

import pytest

from cas_ckpt.index import contents
from cas_ckpt.index.index import Index
from tests.index.building import STORE, data_pack, digest
from tests.index.index_suite import HistoryTests, PackTests, PrefixTests, UsageTests
from tests.index.liveness_suite import LivenessTests


class TestMemoryIndex(PackTests, PrefixTests, HistoryTests, UsageTests, LivenessTests):
    @pytest.fixture
    def index(self) -> Index:
        return Index.open(":memory:", store_id=STORE)


def test_two_indexes_in_memory_know_nothing_of_each_other() -> None:
    one, two = Index.open(":memory:", store_id=STORE), Index.open(":memory:", store_id=STORE)
    one.add_packs([data_pack("d", ["a"])])
    assert two.packs() == {}


def test_a_copy_in_memory_can_be_written_and_leaves_the_original_alone(tmp_path: Path) -> None:
    with Index.open(tmp_path / "index.sqlite", store_id=STORE) as index:
        index.add_packs([data_pack("d", ["a"])])
    with Index.open(tmp_path / "index.sqlite", store_id=STORE, read_only=True) as index:
        copy = index.detached()
        copy.add_packs([data_pack("e", ["b"])])
        assert copy.matches
        assert copy.read(contents.chunk_digests) == {digest("a"), digest("b")}
        assert index.read(contents.chunk_digests) == {digest("a")}
