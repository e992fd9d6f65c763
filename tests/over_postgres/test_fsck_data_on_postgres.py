"""Reading all bytes, with the index in PostgreSQL."""

from tests.over_buckets.again import again

globals().update(again("tests.ops.fsck.test_fsck_data"))
