"""Races in a bucket: numbers as in docs/gc.md. Where every request is tried elsewhere, a few of them are here.

Races 16 and 22, of stores that ignore conditions or deny deletion, are in tests/core/test_object_storage.py.
"""

import pytest

from tests.over_buckets.again import again
from tests.schedule import test_pushing, test_races

pytestmark = pytest.mark.usefixtures("in_buckets")

WANTED = (
    "test_1_a_", "test_2_", "test_3_", "test_14_a_", "test_14_also", "test_15_a_request", "test_20_a_", "test_26_",
)  # fmt: skip

globals().update(again("tests.schedule.test_races", lambda name: name.startswith(WANTED)))


@pytest.fixture(params=[False, True], ids=["etags", "generations"])
def generations(request: pytest.FixtureRequest) -> object:
    return request.param


@pytest.fixture(autouse=True)
def _a_few_of_the_requests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_races, "EVERY", 11 if "push" in request.node.name or "clone" in request.node.name else 5)


def test_14_some_requests_of_a_push_fail_or_lose_their_replies() -> None:
    test_pushing.test_14_each_request_of_a_push_fails_or_loses_its_reply()


def test_19_a_push_dies_after_some_of_its_requests() -> None:
    test_pushing.test_19_a_push_dies_after_any_of_its_requests()


def test_19_a_collection_that_was_stopped_loses_nothing_of_a_push() -> None:
    test_pushing.test_19_a_collection_that_was_stopped_at_any_moment_loses_nothing_of_a_push("fresh", "gc repack")


def test_19_a_clone_beside_a_collection_is_whole() -> None:
    test_pushing.test_19_a_clone_beside_a_collection_is_whole("gc")
