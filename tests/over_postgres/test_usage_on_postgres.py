"""Whose bytes these are, with the index in PostgreSQL."""

from tests.over_buckets.again import again

globals().update(again("tests.ops.history.test_usage"))
