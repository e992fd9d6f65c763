"""What states share, with the index in PostgreSQL."""

from tests.over_buckets.again import again

globals().update(again("tests.ops.history.test_what_is_shared"))
