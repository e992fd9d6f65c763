"""What lists say after gc, repack and rebuild, with the index in PostgreSQL."""

from tests.over_buckets.again import again

globals().update(again("tests.ops.history.test_lists_after_upkeep", lambda name: "stay" in name))
