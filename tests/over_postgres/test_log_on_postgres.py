"""The log of several branches and writers, with the index in PostgreSQL."""

from tests.over_buckets.again import again

globals().update(again("tests.ops.history.test_log"))
