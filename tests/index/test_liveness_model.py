"""The index and the model agree about every answer, whatever comes and goes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings

from cas_ckpt.index import garbage
from cas_ckpt.index.index import Index
from tests.index.building import STORE
from tests.index.histories import Steps, histories, play
from tests.searches import tries

pytestmark = pytest.mark.slow

UNHURRIED = list(HealthCheck)


@pytest.fixture(scope="module")
def index() -> Iterator[Index]:
    with Index.open(":memory:", store_id=STORE) as index:
        yield index


@settings(max_examples=tries(12, 40), deadline=None, suppress_health_check=UNHURRIED)
@given(steps=histories())
def test_the_index_in_memory_agrees_with_the_model(index: Index, steps: Steps) -> None:
    play(index, steps)


@settings(max_examples=tries(5, 15), deadline=None, suppress_health_check=UNHURRIED)
@given(steps=histories())
def test_examining_a_few_entries_at_a_time_makes_no_difference(index: Index, steps: Steps) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(garbage, "ENTRIES_PER_TURN", 3)
        patch.setattr(garbage, "_OBJECTS_PER_READ", 2)
        play(index, steps)
