"""Races in a bucket: numbers as in docs/gc.md. Where every request is tried elsewhere, a few of them are here."""

import pytest

from tests.over_s3.again import again
from tests.schedule import test_races

WANTED = (
    "test_1_a_", "test_2_", "test_3_", "test_14_a_", "test_14_also", "test_15_a_request", "test_20_a_", "test_26_",
)  # fmt: skip

globals().update(again("tests.schedule.test_races", lambda name: name.startswith(WANTED)))


@pytest.fixture(autouse=True)
def _a_few_of_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_races, "EVERY", 13)
