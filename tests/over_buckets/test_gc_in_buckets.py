"""Garbage collection, in a bucket. Tests that look into a folder stay where they are."""

import pytest

from tests.over_buckets.again import again

pytestmark = pytest.mark.usefixtures("in_buckets")

IN_A_FOLDER = (
    "test_writers_go_on_while_a_dead_collection_leaves_packs_condemned",
    "test_of_two_collections_at_once_one_goes_on",
)

globals().update(again("tests.ops.gc.test_gc", lambda name: name not in IN_A_FOLDER))
