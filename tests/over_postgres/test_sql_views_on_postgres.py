"""What views say of commits and refs, with the index in PostgreSQL."""

from tests.over_buckets.again import again

globals().update(again("tests.ops.history.test_sql_views", lambda name: "the_work" not in name))
