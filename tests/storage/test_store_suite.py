"""The suite as `cas-ckpt store check` runs it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cas_ckpt.storage.memory import MemoryStore
from cas_ckpt.testing import Outcome, run_store_checks
from cas_ckpt.testing.store_suite import check_names


class ListsOnePage(MemoryStore):
    def list(self, prefix: str) -> Iterator[tuple[str, int]]:
        return iter(list(super().list(prefix))[:1000])


@pytest.mark.slow
def test_the_checks_run_on_a_store_in_use_and_leave_its_keys_alone() -> None:
    store = MemoryStore()
    store.put("conformance-of-mine", b"x")
    told: list[str] = []
    results = run_store_checks(store, progress=lambda result: told.append(result.name), num_listed=5)
    assert [result.name for result in results] == told
    assert len(results) == len(check_names())
    assert all(result.ok for result in results), [result for result in results if not result.ok]
    assert [result.detail for result in results if result.outcome is Outcome.SKIPPED] == [
        "this store has no versions in its listings",
        "this store declares conditional writes",
    ]
    assert list(store.list("")) == [("conformance-of-mine", 1)]


@pytest.mark.slow
def test_a_broken_store_is_told_rule_by_rule() -> None:
    failed = {result.name: result.detail for result in run_store_checks(ListsOnePage()) if not result.ok}
    assert list(failed) == ["a long listing is complete"]
    assert "wanted" in failed["a long listing is complete"]
